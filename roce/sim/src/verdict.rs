//! Checks of everything that the ports report.

use roce_verbs::{Completion, Qpn, WcFlags, WcOpcode, WcStatus};

use crate::{
    adversary::packets::MARK,
    model::{Expect, FastKey, Message, Phase, Posted, Sent, TARGET, wr_owner},
    runner::Check,
    world::World,
};

impl World {
    pub(crate) fn on_completion(&mut self, h: usize, cq: usize, wc: &Completion) -> Check {
        let (conn, end, life, is_recv) = wr_owner(wc.wr_id);
        let Some(c) = self.conns.get(conn) else {
            return Err(format!("host {h}: a completion of nobody's work request: {wc:?}"));
        };
        let e = &c.ends[end];
        if e.host != h || c.life & 0xffff != life || e.cq != cq || e.qpn != Some(wc.qpn) {
            return Err(format!(
                "host {h}: a completion that came to the wrong queue, or late: {wc:?}; conn {conn} is in life {}",
                c.life
            ));
        }
        self.stats.completions += 1;
        let result = if is_recv {
            self.on_receive(conn, end, wc)
        } else {
            self.on_sent(conn, end, wc)
        };
        result.map_err(|text| format!("conn {conn} end {end} life {life}: {text}"))?;
        if !wc.is_ok() {
            self.stats.count_error(wc.status);
            self.conns[conn].ends[end].session.failed = true;
            self.break_later(conn);
        }
        Ok(())
    }

    fn on_sent(&mut self, conn: usize, end: usize, wc: &Completion) -> Check {
        let e = &self.conns[conn].ends[end];
        let Some(place) = e.sent.iter().position(|s| s.wr_id == wc.wr_id) else {
            return Err(format!("a send completed that is not outstanding (twice?): {wc:?}"));
        };
        if wc.status != WcStatus::FlushError && e.session.failed {
            return Err(format!("{:?} after the queue pair had failed: {wc:?}", wc.status));
        }
        // Those before it make no completion if they succeed.
        for _ in 0..place {
            let oldest = &self.conns[conn].ends[end].sent[0];
            if oldest.signaled {
                return Err(format!(
                    "{} was passed over: a later one completed first: {wc:?}",
                    oldest.what
                ));
            }
            self.succeed_oldest(conn, end)?;
        }
        if wc.status == WcStatus::Success {
            let s = &self.conns[conn].ends[end].sent[0];
            if !s.signaled {
                return Err(format!("an unsignalled {} made a completion: {wc:?}", s.what));
            }
            if wc.opcode != s.opcode || (s.rd_atomic && wc.byte_len != s.byte_len) {
                return Err(format!("a {} of {} bytes completed as {wc:?}", s.what, s.byte_len));
            }
            return self.succeed_oldest(conn, end);
        }
        self.fail_oldest(conn, end, wc.status)
    }

    fn fail_oldest(&mut self, conn: usize, end: usize, status: WcStatus) -> Check {
        let victim = self.is_victim(conn);
        let e = &mut self.conns[conn].ends[end];
        let Some(s) = e.sent.pop_front() else {
            return Err("nothing is outstanding".into());
        };
        let allowed = match status {
            WcStatus::FlushError => e.session.failed || e.allow.flush,
            WcStatus::RetryExceeded => e.allow.retry,
            WcStatus::RnrRetryExceeded => e.allow.rnr && s.message.is_some(),
            WcStatus::RemoteAccessError => e.allow.access,
            WcStatus::LocalQpOperationError | WcStatus::MwBindError => {
                e.target_gone && matches!(s.opcode, WcOpcode::FastRegister | WcOpcode::BindWindow)
            }
            _ => false,
        };
        if !victim && !allowed && s.expect != Expect::Fails(status) {
            return Err(format!(
                "a {} (expected: {:?}) ended with {status:?}; allowed: {:?}",
                s.what, s.expect, e.allow
            ));
        }
        if s.local.is_some() {
            e.session.local_ring.give_back();
        }
        e.undone.extend(s.effect);
        if status != WcStatus::FlushError {
            // The peer's queue pair may be in error as well, and does not answer then.
            let peer = &mut self.conns[conn].ends[1 - end];
            peer.allow.end();
        }
        Ok(())
    }

    /// The oldest outstanding send has succeeded: checks what that promises.
    pub(crate) fn succeed_oldest(&mut self, conn: usize, end: usize) -> Check {
        let victim = self.is_victim(conn);
        let c = &mut self.conns[conn];
        let [a, b] = &mut c.ends;
        let (own, peer) = if end == 0 { (a, b) } else { (b, a) };
        let Some(s) = own.sent.pop_front() else {
            return Err("nothing is outstanding".into());
        };
        self.stats.succeeded += 1;
        if victim {
            if s.local.is_some() {
                own.session.local_ring.give_back();
            }
            own.session.fast_key = s.fast.unwrap_or(own.session.fast_key);
            return Ok(());
        }
        if s.expect != Expect::Success {
            return Err(format!("a {} succeeded that must fail: {:?}", s.what, s.expect));
        }
        if let Some(range) = &s.local {
            if let Some(image) = &s.image {
                let mut actual = vec![0; range.len()];
                own.local.read(range.start, &mut actual).map_err(|e| e.to_string())?;
                if let Some(text) = difference(&actual, image) {
                    return Err(format!(
                        "a {} of {} bytes left the wrong bytes: {text}",
                        s.what, s.byte_len
                    ));
                }
            }
            own.session.local_ring.give_back();
        }
        let peer_is_there = self.hosts[peer.host].alive && !peer.target_gone;
        if let Some(n) = s.message
            && peer_is_there
            && peer.session.messages_received <= n
        {
            return Err(format!(
                "{} number {n} completed, but the peer has only {}",
                s.what, peer.session.messages_received
            ));
        }
        if let Some(effect) = &s.effect
            && peer_is_there
        {
            let range = effect.range();
            let later = own.sent.iter().filter_map(|s| s.effect.as_ref()).map(|e| e.range());
            let covered = later.into_iter().any(|r| r.start < range.end && range.start < r.end);
            let mut actual = vec![0; range.len()];
            peer.target.read(range.start, &mut actual).map_err(|e| e.to_string())?;
            if !covered && let Some(text) = difference(&actual, &effect.new) {
                return Err(format!(
                    "a {} completed that is not in the peer's memory: {text}",
                    s.what
                ));
            }
        }
        if let Some(state) = s.fast {
            own.session.fast_key = state;
        }
        Ok(())
    }

    fn on_receive(&mut self, conn: usize, end: usize, wc: &Completion) -> Check {
        let victim = self.is_victim(conn);
        let e = &mut self.conns[conn].ends[end];
        let posted = match e.posted.front() {
            Some(p) if p.wr_id == wc.wr_id => e.posted.pop_front(),
            _ => None,
        };
        let Some(posted) = posted else {
            return Err(format!("a receive completed out of turn: {wc:?}"));
        };
        e.session.recv_ring.give_back();
        if victim {
            // Whoever sent it.
            e.session.messages_received += u64::from(e.session.incoming.pop_front().is_some());
            self.want_receives(conn, end);
            return Ok(());
        }
        match wc.status {
            WcStatus::Success => {
                let Some(message) = e.session.incoming.pop_front() else {
                    return Err(format!("a message arrived that nobody has sent: {wc:?}"));
                };
                e.session.messages_received += 1;
                let mut actual = vec![0; posted.before.len()];
                e.recv
                    .read(posted.pieces.range.start, &mut actual)
                    .map_err(|e| e.to_string())?;
                check_message(&message, &posted, wc, &actual)?;
                if message.invalidates.is_some() {
                    e.session.fast_key = FastKey::Closed;
                }
                self.stats.messages += 1;
                self.want_receives(conn, end);
                Ok(())
            }
            WcStatus::FlushError if e.session.failed || e.allow.flush => Ok(()),
            WcStatus::LocalLengthError if e.session.incoming.front().is_some_and(|m| m.too_long) => {
                e.session.incoming.pop_front();
                Ok(())
            }
            WcStatus::LocalAccessError if e.target_gone => {
                e.session.incoming.pop_front();
                Ok(())
            }
            // As rdma_rxe does: the receive was taken already.
            status if e.session.incoming.front().is_some_and(|m| m.fails == Some(status)) => {
                if status == WcStatus::RemoteInvalidRequestError {
                    // The message is there, and its sender is told so.
                    e.session.messages_received += 1;
                }
                e.session.incoming.pop_front();
                Ok(())
            }
            _ => Err(format!("a receive ended with {:?}; allowed: {:?}", wc.status, e.allow)),
        }
    }

    pub(crate) fn on_drained(&mut self, h: usize, qpn: Qpn) -> Check {
        let Some((conn, end)) = self.find_end(|e| e.host == h && e.qpn == Some(qpn)) else {
            return Ok(());
        };
        let c = &self.conns[conn];
        if !c.ends[end].session.draining {
            return Err(format!("conn {conn} end {end}: drained without having been asked to"));
        }
        self.stats.drains += 1;
        let life = c.life;
        let after = self.rng.range(0, 1_000_000);
        self.schedule(after, "resume", move |w| w.resume(conn, end, life));
        Ok(())
    }

    pub(crate) fn is_done(&self, conn: usize) -> bool {
        let victim = self.is_victim(conn);
        self.conns[conn].ends.iter().all(|e| {
            e.operations_left == 0
                && (victim || e.session.incoming.is_empty())
                && !e.session.draining
                && e.sent.iter().all(|s| !s.signaled)
        })
    }

    /// At the end: nothing is outstanding, memory is what the operations made of it, nothing counts as in flight.
    pub(crate) fn check_end(&mut self) -> Check {
        for conn in 0..self.conns.len() {
            for end in [0, 1] {
                while !self.conns[conn].ends[end].sent.is_empty() {
                    self.succeed_oldest(conn, end)
                        .map_err(|text| format!("conn {conn} end {end}, at the end: {text}"))?;
                }
                if self.is_victim(conn) {
                    continue;
                }
                let e = &self.conns[conn].ends[end];
                let mut actual = vec![0; TARGET];
                e.target.read(0, &mut actual).map_err(|e| e.to_string())?;
                if let Some(text) = difference(&actual, &e.shadow) {
                    return Err(format!("conn {conn} end {end}: memory is not what was written: {text}"));
                }
                if e.session.messages_posted != e.session.messages_received {
                    let (posted, received) = (e.session.messages_posted, e.session.messages_received);
                    return Err(format!(
                        "conn {conn} end {end}: {received} of {posted} messages arrived"
                    ));
                }
            }
            if self.conns[conn].phase != Phase::Up {
                return Err(format!("conn {conn} is {:?} at the end", self.conns[conn].phase));
            }
        }
        self.check_marks()?;
        self.check_services()?;
        self.check_guards()?;
        for (h, host) in self.hosts.iter().enumerate() {
            if let Some((addr, bytes)) = host.port.in_flight().find(|(_, bytes)| *bytes > 0) {
                return Err(format!(
                    "host {h}: {bytes} bytes count as in flight to {addr}, but nothing is"
                ));
            }
        }
        Ok(())
    }

    /// Checks that no forged payload is in any connection's memory.
    fn check_marks(&self) -> Check {
        if self.blind.is_none() && self.copies.is_none() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for (conn, c) in self.conns.iter().enumerate() {
            for (end, e) in c.ends.iter().enumerate() {
                for (name, region) in [("target", &e.target), ("local", &e.local), ("recv", &e.recv)] {
                    bytes.resize(region.len(), 0);
                    // Memory that was deregistered may be gone.
                    let is_read = region.read(0, &mut bytes).is_ok();
                    if is_read && let Some(at) = find_mark(&bytes) {
                        return Err(format!(
                            "conn {conn} end {end}: bytes of a stranger are in its memory ({name}, up to {at})"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns a summary of the run's state, for reports.
    pub(crate) fn situation(&self) -> String {
        let mut out = format!("at {:.6} s, quiet: {}", self.now as f64 / 1e9, self.quiet);
        for (h, host) in self.hosts.iter().enumerate() {
            let in_flight: Vec<_> = host.port.in_flight().collect();
            out += &format!("\n  host {h}: bytes in flight {in_flight:?}");
        }
        out += &self.program.as_ref().map_or(String::new(), |p| p.situation());
        out += &self.services.as_ref().map_or(String::new(), |s| s.situation());
        for (i, c) in self.conns.iter().enumerate() {
            out += &format!("\n  conn {i} (cm: {}, life {}): {:?}", c.plan.via_cm, c.life, c.phase);
            for (j, e) in c.ends.iter().enumerate() {
                let host = &self.hosts[e.host];
                let state = e.qpn.and_then(|q| host.port.qp_state(q));
                let wait = e.qpn.and_then(|q| Some(host.port.qp(q)?.wait_reason()));
                let cm = e.cm.and_then(|id| host.port.cm()?.state(id));
                out += &format!(
                    "\n    end {j} on host {}: up {} failed {} draining {}; {} to post, {} sent, {} receives posted, {} \
                     messages on their way; qp {state:?} {wait:?} cm {cm:?}; oldest: {:?}",
                    e.host,
                    e.session.up,
                    e.session.failed,
                    e.session.draining,
                    e.operations_left,
                    e.sent.len(),
                    e.posted.len(),
                    e.session.incoming.len(),
                    e.sent.front().map(|s: &Sent| (s.what, s.byte_len, s.signaled)),
                );
            }
        }
        out
    }
}

/// Compares a receive with its message: length, flags, data in place, nothing else touched.
fn check_message(message: &Message, posted: &Posted, wc: &Completion, actual: &[u8]) -> Check {
    if message.too_long || message.fails.is_some() {
        return Err(format!("a message arrived that must fail: {message:?}"));
    }
    let opcode = if message.data.is_some() {
        WcOpcode::Recv
    } else {
        WcOpcode::RecvRdmaWithImm
    };
    let has = |flag| wc.flags.contains(flag);
    let right = wc.opcode == opcode
        && wc.byte_len as usize == message.len
        && has(WcFlags::WITH_IMM) == message.imm.is_some()
        && message.imm.is_none_or(|imm| imm == wc.imm)
        && has(WcFlags::WITH_INV) == message.invalidates.is_some()
        && message.invalidates.is_none_or(|key| key == wc.invalidated)
        && wc.solicited == message.solicited;
    if !right {
        return Err(format!(
            "a message of {} bytes completed as {wc:?}: {message:?}",
            message.len
        ));
    }
    let mut expected = posted.before.clone();
    if let Some(data) = &message.data {
        posted.pieces.lay(data, &mut expected);
    }
    match difference(actual, &expected) {
        Some(text) => Err(format!("a message of {} bytes arrived wrong: {text}", message.len)),
        None => Ok(()),
    }
}

/// Finds eight marks of forged payloads in a row.
fn find_mark(bytes: &[u8]) -> Option<usize> {
    let mut run = 0;
    bytes.iter().position(|byte| {
        run = if *byte == MARK { run + 1 } else { 0 };
        run == 8
    })
}

/// Returns how two byte strings differ.
fn difference(actual: &[u8], expected: &[u8]) -> Option<String> {
    if actual == expected {
        return None;
    }
    let wrong: Vec<usize> = (0..actual.len()).filter(|i| actual[*i] != expected[*i]).collect();
    let (first, last) = (wrong.first()?, wrong.last()?);
    let whose = find_mark(actual).map_or("", |_| ", some of them a stranger's");
    Some(format!(
        "{} of {} bytes differ, between {first} and {last}{whose}",
        wrong.len(),
        actual.len()
    ))
}
