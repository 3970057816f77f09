//! The programs: random work requests, and receives for them.

use std::ops::Range;

use roce_verbs::mem::WindowKind;
use roce_verbs::{
    Flush, Payload, Placement, RKey, RecvWr, RemoteAddr, Selectivity, SendFlags, SendOp, SendWr, Sge, WcOpcode,
    WcStatus,
    wr::{BindWindow, FastRegister, PostError},
};

use crate::{
    life::RIGHTS,
    model::{Effect, Expect, FastKey, Grant, LOCAL, Message, Phase, Pieces, Posted, RECV, Sent, TARGET, wr_id},
    runner::Check,
    scenario::US,
    world::World,
};

/// A work request about to be posted.
pub(crate) struct Draft {
    pub(crate) sent: Sent,
    pub(crate) op: SendOp,
    fence: bool,
    solicited: bool,
    /// Bytes to send, in the registered memory of `pieces` or inline.
    inline: Option<Vec<u8>>,
    pub(crate) sges: Vec<Sge>,
    pub(crate) message: Option<Message>,
}

impl Draft {
    pub(crate) fn new(sent: Sent, op: SendOp) -> Self {
        Self {
            sent,
            op,
            fence: false,
            solicited: false,
            inline: None,
            sges: Vec::new(),
            message: None,
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Looks at a full send queue in a row, from which on they become rare.
const MANY_LOOKS: u32 = 1000;

impl World {
    /// Lets an end's program run soon.
    pub(crate) fn kick(&mut self, conn: usize, end: usize) {
        let c = &mut self.conns[conn];
        let (think, life) = (c.plan.think, c.life);
        let e = &mut c.ends[end];
        if !e.app_scheduled && e.operations_left > 0 {
            e.app_scheduled = true;
            // A program that has waited for long need not look as often.
            let rest = if e.looks_in_vain > MANY_LOOKS { 64 } else { 1 };
            let after = self.rng.range(0, think * rest);
            self.schedule(after, "send", move |w| w.on_send(conn, end, life));
        }
    }

    pub(crate) fn on_send(&mut self, conn: usize, end: usize, life: u32) -> Check {
        let c = &mut self.conns[conn];
        if c.life != life {
            // The event was of a former life; this one may have asked meanwhile.
            c.ends[end].app_scheduled = false;
            if c.ends[end].session.up {
                self.kick(conn, end);
            }
            return Ok(());
        }
        let active = matches!(c.phase, Phase::Up | Phase::Connecting);
        let e = &mut c.ends[end];
        e.app_scheduled = false;
        if !active
            || !e.session.up
            || e.session.failed
            || e.session.draining
            || e.qpn.is_none()
            || !self.hosts[e.host].alive
        {
            return Ok(());
        }
        let host = e.host;
        // A request that comes before its queue pair is ready may wait for a timeout longer than all the work takes.
        if self.class.is_goodput() && self.all_up.is_none() {
            self.kick(conn, end);
            return Ok(());
        }
        let mut posted = false;
        for _ in 0..self.rng.range(1, 8) {
            if !self.post_one(conn, end)? {
                break;
            }
            posted = true;
        }
        let e = &mut self.conns[conn].ends[end];
        e.looks_in_vain = if posted { 0 } else { e.looks_in_vain + 1 };
        self.service(host)?;
        self.kick(conn, end);
        Ok(())
    }

    /// Posts one random work request. False when there is no room or nothing to do.
    fn post_one(&mut self, conn: usize, end: usize) -> Result<bool, String> {
        let c = &self.conns[conn];
        let e = &c.ends[end];
        if e.operations_left == 0 || e.session.failed || e.sent.len() + 1 >= c.plan.caps.max_send_wr as usize {
            return Ok(false);
        }
        let bad = !self.quiet && self.rng.chance(self.conns[conn].plan.bad_operations);
        let draft = if bad {
            self.draft_fault(conn, end)
        } else {
            self.draft(conn, end)
        };
        let Some(draft) = draft else {
            return Ok(false);
        };
        self.post(conn, end, draft)?;
        Ok(true)
    }

    fn draft(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let roll = self.rng.range(0, 99);
        match roll {
            88..=90 if self.scenario.extended => self.draft_atomic_write(conn, end),
            91..=93 if self.scenario.extended => self.draft_flush(conn, end),
            0..=29 => self.draft_send(conn, end, None),
            30..=57 => self.draft_write(conn, end),
            58..=79 => self.draft_read(conn, end),
            80..=93 => self.draft_atomic(conn, end),
            _ => self.draft_fast(conn, end),
        }
    }

    fn size(&mut self, conn: usize) -> usize {
        let p = &self.conns[conn].plan;
        let (mtu, largest) = (p.mtu.bytes(), p.largest);
        let size = match self.rng.index(10) {
            0 => 0,
            1 => 1,
            2 => self.rng.range(1, 64) as usize,
            3 => mtu - 1,
            4 => mtu,
            5 => mtu + 1,
            6 => mtu * self.rng.range(2, 6) as usize + self.rng.range(0, 2) as usize - 1,
            7 => self.rng.range(0, mtu as u64) as usize,
            _ => self.rng.range(0, largest as u64) as usize,
        };
        size.min(largest)
    }

    /// A range of a ring cut into at most `most` pieces, in any order and with gaps.
    fn cut(&mut self, range: Range<usize>, len: usize, most: u32) -> Pieces {
        let mut parts = Vec::new();
        let n = self.rng.range(1, u64::from(most.max(1))) as usize;
        let spare = range.len() - len;
        let mut at = range.start + self.rng.range(0, spare as u64) as usize;
        let mut left = len;
        for i in 0..n {
            let take = if i + 1 == n {
                left
            } else {
                self.rng.range(0, left as u64) as usize
            };
            parts.push((at, take));
            at += take;
            left -= take;
        }
        for i in (1..parts.len()).rev() {
            let j = self.rng.index(i + 1);
            parts.swap(i, j);
        }
        Pieces { range, parts }
    }

    /// Room in an end's local region for `len` bytes, filled with noise.
    fn local_pieces(&mut self, conn: usize, end: usize, len: usize) -> Option<Pieces> {
        let gap = self.rng.pick(&[0, 0, 1, 37]);
        let e = &mut self.conns[conn].ends[end];
        let range = e.session.local_ring.take((len + gap).min(LOCAL))?;
        let most = self.conns[conn].plan.caps.max_send_sge;
        Some(self.cut(range, len, most))
    }

    pub(crate) fn blank(&mut self, conn: usize, end: usize, what: &'static str, opcode: WcOpcode) -> Sent {
        let c = &mut self.conns[conn];
        let life = c.life;
        let e = &mut c.ends[end];
        let n = e.next_wr;
        e.next_wr += 1;
        Sent {
            wr_id: wr_id(conn, end, life, false, n),
            what,
            opcode,
            ..Sent::default()
        }
    }

    /// The payload of a SEND or WRITE: noise, inline or in registered memory.
    pub(crate) fn payload(&mut self, conn: usize, end: usize, data: &[u8], draft: &mut Draft) -> Option<()> {
        let inline_most = self.conns[conn].plan.caps.max_inline_data as usize;
        if data.len() <= inline_most && self.rng.chance(0.4) {
            draft.inline = Some(data.to_vec());
            return Some(());
        }
        if data.is_empty() && self.rng.chance(0.5) {
            return Some(());
        }
        let pieces = self.local_pieces(conn, end, data.len())?;
        let mut image = self.rng.bytes(pieces.range.len());
        pieces.lay(data, &mut image);
        let e = &self.conns[conn].ends[end];
        e.local.write(pieces.range.start, &image).ok()?;
        draft.sges = pieces.sges(&e.local);
        draft.sent.local = Some(pieces.range);
        Some(())
    }

    pub(crate) fn draft_send(&mut self, conn: usize, end: usize, invalidates: Option<RKey>) -> Option<Draft> {
        let mut len = self.size(conn);
        if let Some(most) = self.conns[conn].ends[1 - end].session.promised.front() {
            len = len.min(*most);
        }
        let data = self.rng.bytes(len);
        let imm = (invalidates.is_none() && self.rng.chance(0.3)).then(|| self.rng.number() as u32);
        let op = match (invalidates, imm) {
            (Some(key), _) => SendOp::SendWithInv(key),
            (None, Some(imm)) => SendOp::SendWithImm(imm),
            (None, None) => SendOp::Send,
        };
        let sent = self.blank(conn, end, "SEND", WcOpcode::Send);
        let mut draft = Draft::new(sent, op);
        self.payload(conn, end, &data, &mut draft)?;
        draft.solicited = self.rng.chance(0.3);
        draft.message = Some(Message {
            len,
            data: Some(data),
            imm,
            invalidates,
            solicited: draft.solicited,
            ..Message::default()
        });
        Some(draft)
    }

    /// A place of `len` bytes in the peer's target, sometimes through its fast key.
    fn place(&mut self, conn: usize, end: usize, len: usize, align: usize) -> (usize, RemoteAddr, bool) {
        let peer = &self.conns[conn].ends[1 - end];
        let (fast_key, (fast_at, fast_len, fast_iova)) = (peer.session.fast_key, peer.fast_view);
        let (base, rkey) = (peer.target.addr(), peer.target.rkey());
        if let FastKey::Open(key) = fast_key
            && len + align <= fast_len
            && self.rng.chance(0.6)
        {
            let offset = self.rng.range(0, (fast_len - len - align + 1) as u64) as usize / align * align;
            let addr = fast_iova + offset as u64;
            return (fast_at + offset, RemoteAddr { addr, rkey: key }, true);
        }
        // Most of the traffic meets in a small area, so that order matters.
        let area = if self.rng.chance(0.7) {
            (len + 2048).min(TARGET)
        } else {
            TARGET
        };
        let at = self.rng.range(0, (area - len) as u64) as usize / align * align;
        let addr = base + at as u64;
        (at, RemoteAddr { addr, rkey }, false)
    }

    pub(crate) fn draft_write(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let len = self.size(conn);
        let data = self.rng.bytes(len);
        let (at, remote, uses_fast) = self.place(conn, end, len, 1);
        let imm = self.rng.chance(0.25).then(|| self.rng.number() as u32);
        let op = imm.map_or(SendOp::Write(remote), |imm| SendOp::WriteWithImm(remote, imm));
        let mut sent = self.blank(conn, end, "WRITE", WcOpcode::RdmaWrite);
        sent.uses_fast = uses_fast;
        sent.effect = Some(Effect::new(at, data.clone()));
        let mut draft = Draft::new(sent, op);
        self.payload(conn, end, &data, &mut draft)?;
        draft.solicited = imm.is_some() && self.rng.chance(0.3);
        draft.message = imm.map(|imm| Message {
            len,
            imm: Some(imm),
            solicited: draft.solicited,
            ..Message::default()
        });
        Some(draft)
    }

    pub(crate) fn draft_read(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let len = self.size(conn);
        let (at, remote, uses_fast) = self.place(conn, end, len, 1);
        let expected = self.conns[conn].ends[1 - end].shadow[at..at + len].to_vec();
        let mut draft = self.draft_into(conn, end, &expected, "READ", WcOpcode::RdmaRead, SendOp::Read(remote))?;
        draft.sent.reads = Some(at..at + len);
        draft.sent.uses_fast = uses_fast;
        Some(draft)
    }

    /// A work request that brings `expected` into local memory.
    fn draft_into(
        &mut self,
        conn: usize,
        end: usize,
        expected: &[u8],
        what: &'static str,
        opcode: WcOpcode,
        op: SendOp,
    ) -> Option<Draft> {
        let mut sent = self.blank(conn, end, what, opcode);
        sent.rd_atomic = true;
        sent.byte_len = expected.len() as u32;
        let mut draft = Draft::new(sent, op);
        let pieces = self.local_pieces(conn, end, expected.len())?;
        let mut image = self.rng.bytes(pieces.range.len());
        let e = &self.conns[conn].ends[end];
        e.local.write(pieces.range.start, &image).ok()?;
        pieces.lay(expected, &mut image);
        draft.sges = pieces.sges(&e.local);
        draft.sent.local = Some(pieces.range);
        draft.sent.image = Some(image);
        Some(draft)
    }

    pub(crate) fn draft_atomic(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let (at, remote, uses_fast) = self.place(conn, end, 8, 8);
        let bytes: [u8; 8] = self.conns[conn].ends[1 - end].shadow[at..at + 8].try_into().ok()?;
        let old = u64::from_ne_bytes(bytes);
        let (op, new, opcode) = if self.rng.chance(0.5) {
            let add = self.rng.number();
            (
                SendOp::FetchAdd { remote, add },
                old.wrapping_add(add),
                WcOpcode::FetchAdd,
            )
        } else {
            let hits = self.rng.chance(0.7);
            let compare = if hits { old } else { old.wrapping_add(1) };
            let swap = self.rng.number();
            let op = SendOp::CompareSwap { remote, compare, swap };
            (op, if hits { swap } else { old }, WcOpcode::CompareSwap)
        };
        let mut draft = self.draft_into(conn, end, &bytes, "atomic", opcode, op)?;
        draft.sent.uses_fast = uses_fast;
        draft.sent.effect = Some(Effect::new(at, new.to_ne_bytes().to_vec()));
        Some(draft)
    }

    pub(crate) fn draft_atomic_write(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let data = self.rng.bytes(8);
        let (at, remote, uses_fast) = self.place(conn, end, 8, 8);
        let mut sent = self.blank(conn, end, "ATOMIC WRITE", WcOpcode::AtomicWrite);
        (sent.uses_fast, sent.rd_atomic, sent.byte_len) = (uses_fast, true, 8);
        sent.effect = Some(Effect::new(at, data.clone()));
        let mut draft = Draft::new(sent, SendOp::AtomicWrite(remote));
        self.payload(conn, end, &data, &mut draft)?;
        Some(draft)
    }

    fn draft_flush(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let len = self.size(conn);
        let (_, remote, uses_fast) = self.place(conn, end, len, 1);
        let whole = self.rng.chance(0.3);
        let mut sent = self.blank(conn, end, "FLUSH", WcOpcode::Flush);
        (sent.uses_fast, sent.rd_atomic) = (uses_fast, true);
        let flush = Flush {
            remote,
            length: len as u32,
            placement: Placement::GLOBAL_VISIBILITY,
            selectivity: if whole { Selectivity::Region } else { Selectivity::Range },
        };
        Some(Draft::new(sent, SendOp::Flush(flush)))
    }

    /// Opens or closes a fast key: this end's own, or the peer's with a SEND.
    fn draft_fast(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let c = &self.conns[conn];
        if let FastKey::Open(key) = c.ends[1 - end].session.fast_key {
            let mut draft = self.draft_send(conn, end, Some(key))?;
            // A READ that is asked for again would find the key gone.
            draft.fence = self.conns[conn].ends[end]
                .sent
                .iter()
                .any(|s| s.uses_fast && s.rd_atomic);
            draft.sent.uses_fast = true;
            return Some(draft);
        }
        match c.ends[end].session.fast_key {
            FastKey::Changing => None,
            FastKey::Open(key) => {
                if c.ends[1 - end].sent.iter().any(|s| s.uses_fast) || c.ends[1 - end].session.failed {
                    return None;
                }
                let mut sent = self.blank(conn, end, "LOCAL INVALIDATE", WcOpcode::LocalInvalidate);
                sent.fast = Some(FastKey::Closed);
                Some(Draft::new(sent, SendOp::LocalInvalidate(key)))
            }
            FastKey::Closed => self.draft_register(conn, end),
        }
    }

    fn draft_register(&mut self, conn: usize, end: usize) -> Option<Draft> {
        let len = self.rng.range(16, (TARGET / 2) as u64) as usize;
        let at = self.rng.range(0, (TARGET - len) as u64) as usize & !7;
        let iova = (self.rng.number() & 0x7fff_ffff_0000) + 4096;
        let wants_window = !self.conns[conn].plan.zero_based && self.rng.chance(0.5);
        let (key_byte, host) = (self.rng.number() as u8, self.conns[conn].ends[end].host);
        let h = &self.hosts[host];
        let e = &mut self.conns[conn].ends[end];
        let pd = e.pd;
        let grant = match &e.session.fast {
            Some(grant) => grant.clone(),
            None if wants_window => {
                let kind = match self.scenario.extended && key_byte & 1 == 1 {
                    true => WindowKind::Type2A,
                    false => WindowKind::Type2,
                };
                Grant::Window(h.mem.alloc_window(pd, kind).ok()?)
            }
            None => Grant::Fast(h.mem.alloc_fast(pd).ok()?),
        };
        e.session.fast = Some(grant.clone());
        // Another one than before: the old key stays closed.
        let key_byte = if key_byte == grant.rkey().key_byte() {
            key_byte ^ 1
        } else {
            key_byte
        };
        let key = grant.rkey().with_key_byte(key_byte);
        let access = RIGHTS;
        let (lkey, addr, length) = (e.target.lkey(), e.target.addr() + at as u64, len as u64);
        let (op, what, opcode) = match grant {
            Grant::Fast(_) => {
                e.fast_view = (at, len, iova);
                let args = FastRegister {
                    key,
                    lkey,
                    addr,
                    length,
                    iova,
                    access,
                };
                (SendOp::FastRegister(args), "FAST REGISTER", WcOpcode::FastRegister)
            }
            Grant::Window(_) => {
                // A window's addresses are its region's.
                e.fast_view = (at, len, addr);
                let args = BindWindow {
                    key,
                    lkey,
                    addr,
                    length,
                    access,
                };
                (SendOp::BindWindow(args), "BIND WINDOW", WcOpcode::BindWindow)
            }
        };
        let mut sent = self.blank(conn, end, what, opcode);
        sent.fast = Some(FastKey::Open(key));
        Some(Draft::new(sent, op))
    }

    /// Hands a draft to the port, and the model learns of it.
    fn post(&mut self, conn: usize, end: usize, mut draft: Draft) -> Check {
        let now = self.instant();
        let must_signal = {
            let c = &self.conns[conn];
            let e = &c.ends[end];
            let last_place = e.sent.len() + 2 >= c.plan.caps.max_send_wr as usize;
            last_place
                || e.operations_left == 1
                || e.session.unsignaled_run >= 4
                || e.session.unsignaled_bytes > LOCAL / 4
                || draft.sent.expect != Expect::Success
        };
        let changes_fast = draft.sent.fast.is_some();
        let signaled = must_signal || changes_fast || self.rng.chance(0.6);
        draft.sent.signaled = signaled || self.conns[conn].plan.signal_all;
        let writes = draft.sent.effect.as_ref().map(Effect::range);
        let hazard = |s: &Sent| match (&s.reads, &writes) {
            (Some(r), Some(w)) => overlap(r, w),
            _ => false,
        };
        let e = &self.conns[conn].ends[end];
        draft.fence |= e.sent.iter().any(hazard);
        let fence = draft.fence || self.rng.chance(0.05);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::FENCE, fence);
        flags.set(SendFlags::SIGNALED, signaled);
        flags.set(SendFlags::SOLICITED, draft.solicited);
        let wr = SendWr {
            wr_id: draft.sent.wr_id,
            op: draft.op,
            flags,
            payload: match &draft.inline {
                Some(data) => Payload::Inline(data),
                None => Payload::Sges(&draft.sges),
            },
        };
        let e = &self.conns[conn].ends[end];
        let (host, qpn) = (e.host, e.qpn.ok_or("no queue pair to post to")?);
        let bad_key = draft.sent.expect == Expect::Fails(WcStatus::LocalProtectionError);
        match self.hosts[host].port.post_send(now, qpn, &[wr]) {
            Ok(()) => self.posted(conn, end, draft),
            // Moved to error by a packet whose completions are not polled yet.
            Err((0, PostError::State(_))) if self.conns[conn].ends[end].allow.flush => {
                self.unpost(conn, end, &draft);
                Ok(())
            }
            Err((0, PostError::Invalid(_))) if bad_key => {
                self.unpost(conn, end, &draft);
                Ok(())
            }
            Err((_, e)) => Err(format!("conn {conn} end {end}: {} refused: {e}", draft.sent.what)),
        }
    }

    /// A refused work request gives back its memory.
    fn unpost(&mut self, conn: usize, end: usize, draft: &Draft) {
        let e = &mut self.conns[conn].ends[end];
        if draft.sent.local.is_some() {
            e.session.local_ring.take_back();
        }
    }

    fn posted(&mut self, conn: usize, end: usize, draft: Draft) -> Check {
        let Draft { mut sent, message, .. } = draft;
        self.stats.operations += 1;
        let lossy = {
            let [a, b] = self.conns[conn].plan.hosts;
            self.lossy(a, b)
        };
        let peer_fails = message.as_ref().is_some_and(|m| m.fails.is_some());
        let c = &mut self.conns[conn];
        if sent.expect == Expect::Success && peer_fails {
            for e in &mut c.ends {
                e.allow.end();
            }
        }
        if sent.expect != Expect::Success {
            self.stats.faulty_operations += 1;
            for (i, e) in c.ends.iter_mut().enumerate() {
                e.allow.retry |= i != end || lossy;
                e.allow.flush |= i != end;
            }
        }
        let [a, b] = &mut c.ends;
        let (own, peer) = if end == 0 { (a, b) } else { (b, a) };
        own.operations_left -= 1;
        let moved = sent.effect.as_ref().map_or(sent.byte_len as usize, |e| e.new.len());
        self.stats.work_bytes += message.as_ref().map_or(moved, |m| m.len) as u64;
        if sent.signaled {
            (own.session.unsignaled_run, own.session.unsignaled_bytes) = (0, 0);
        } else {
            own.session.unsignaled_run += 1;
            own.session.unsignaled_bytes += sent.local.as_ref().map_or(0, Range::len);
        }
        if let Some(effect) = &mut sent.effect {
            let range = effect.range();
            effect.old = peer.shadow[range.clone()].to_vec();
            peer.shadow[range].copy_from_slice(&effect.new);
        }
        if sent.fast.is_some() {
            own.session.fast_key = FastKey::Changing;
        }
        if let Some(message) = message {
            sent.message = Some(peer.session.messages_posted);
            peer.session.messages_posted += 1;
            if peer.session.promised.pop_front().is_none() {
                let len = if message.data.is_some() { message.len } else { 0 };
                peer.session.unclaimed.push_back(len);
            }
            if message.invalidates.is_some() && message.fails.is_none() {
                peer.session.fast_key = FastKey::Changing;
            }
            peer.session.incoming.push_back(message);
        }
        let has_message = sent.message.is_some();
        own.sent.push_back(sent);
        if has_message {
            self.want_receives(conn, 1 - end);
        }
        Ok(())
    }

    /// Lets an end's program post receives, early or late.
    pub(crate) fn want_receives(&mut self, conn: usize, end: usize) {
        let c = &mut self.conns[conn];
        let life = c.life;
        let lag = if self.quiet { 20 * US } else { c.plan.recv_lag };
        if !c.ends[end].recv_scheduled {
            c.ends[end].recv_scheduled = true;
            let after = self.rng.range(0, lag);
            self.schedule(after, "receive", move |w| w.on_recv(conn, end, life));
        }
    }

    pub(crate) fn on_recv(&mut self, conn: usize, end: usize, life: u32) -> Check {
        let c = &mut self.conns[conn];
        c.ends[end].recv_scheduled = false;
        if c.life != life {
            // The event was of a former life; this one may have asked meanwhile.
            self.want_receives(conn, end);
            return Ok(());
        }
        let e = &c.ends[end];
        if c.phase == Phase::Down || c.phase == Phase::Broken || e.session.failed || e.qpn.is_none() {
            return Ok(());
        }
        let host = e.host;
        if !self.hosts[host].alive {
            return Ok(());
        }
        self.post_receives(conn, end)?;
        self.service(host)
    }

    /// Posts what the messages under way need, and some ahead.
    pub(crate) fn post_receives(&mut self, conn: usize, end: usize) -> Check {
        let now = self.instant();
        loop {
            let p = &self.conns[conn].plan;
            let (most, ahead, sges) = (p.caps.max_recv_wr as usize, p.recv_ahead as usize, p.caps.max_recv_sge);
            let e = &self.conns[conn].ends[end];
            // Messages that an observer has sent take receives that others count on.
            let needed = if self.is_victim(conn) {
                most
            } else {
                e.session.incoming.len() + ahead
            };
            if e.session.mute || e.posted.len() >= most.min(needed) {
                return Ok(());
            }
            let size = match e.session.unclaimed.front() {
                Some(len) => *len + self.rng.pick(&[0, 0, 3, 500]),
                None => self.size(conn),
            };
            let Some(range) = self.conns[conn].ends[end].session.recv_ring.take(size.min(RECV)) else {
                return Ok(());
            };
            let pieces = self.cut(range, size, sges);
            let before = self.rng.bytes(pieces.range.len());
            let life = self.conns[conn].life;
            let e = &mut self.conns[conn].ends[end];
            e.recv.write(pieces.range.start, &before).map_err(|e| e.to_string())?;
            let id = wr_id(conn, end, life, true, e.next_wr);
            e.next_wr += 1;
            let sges = pieces.sges(&e.recv);
            let (host, qpn) = (e.host, e.qpn.ok_or("no queue pair to receive on")?);
            let wr = RecvWr { wr_id: id, sges: &sges };
            match self.hosts[host].port.post_recv(now, qpn, &[wr]) {
                Ok(()) => {}
                Err((_, PostError::State(_))) => return Ok(()),
                Err((_, e)) => return Err(format!("conn {conn} end {end}: receive refused: {e}")),
            }
            self.stats.receives += 1;
            let e = &mut self.conns[conn].ends[end];
            if e.session.unclaimed.pop_front().is_none() {
                e.session.promised.push_back(size);
            }
            e.posted.push_back(Posted {
                wr_id: id,
                pieces,
                before,
            });
        }
    }
}
