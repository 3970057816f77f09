//! The lives of a connection: created by modify or by the connection manager, broken, repaired, created again.

use std::{collections::VecDeque, sync::Arc};

use ferroce_pages::{Loss, PAGE, Pages};
use roce_port::{CmEventKind, ConnId};
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{AccessFlags, AddressVector, QpAttr, QpState, QpType, Qpn, provider::RejectReason};

use crate::{
    config::Class,
    host::{CQS, LISTEN_PORT},
    model::{Allow, Conn, Effect, End, FastKey, Grant, HOLE_PAGES, LOCAL, Phase, RECV, Session, TARGET},
    runner::Check,
    scenario::{ConnPlan, MS, US},
    world::World,
};

pub(crate) const RIGHTS: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::FLUSH_GLOBAL);

pub(crate) fn to_state(state: QpState) -> QpAttr {
    QpAttr {
        state: Some(state),
        ..QpAttr::default()
    }
}

/// Registers memory of which only the first page is there.
fn make_hole(mem: &MemoryTable, pd: PdHandle, loss: Loss) -> Arc<Region> {
    let pages = Pages::new(HOLE_PAGES).expect("memory");
    pages.lose(1..HOLE_PAGES, loss);
    let rights = RIGHTS | AccessFlags::LOCAL_WRITE;
    let region = mem.register_memory(pd, &pages.memory(), 0..HOLE_PAGES * PAGE, None, rights);
    region.expect("a region")
}

impl World {
    pub(crate) fn make_conn(&mut self, plan: ConnPlan) -> Conn {
        let ends = [0, 1].map(|end| self.make_end(&plan, end, None));
        Conn {
            plan,
            ends,
            phase: Phase::Down,
            life: 0,
            repair_scheduled: false,
        }
    }

    /// `pd`: the protection domain of the queue pair that it has; `None` when that is yet to be made.
    fn make_end(&mut self, plan: &ConnPlan, end: usize, pd: Option<PdHandle>) -> End {
        let host = plan.hosts[end];
        let h = &self.hosts[host];
        let (zero, bind) = match plan.zero_based {
            true => (AccessFlags::ZERO_BASED, AccessFlags::empty()),
            false => (AccessFlags::empty(), AccessFlags::MW_BIND),
        };
        // Beside an observer's victim, keys of others are to be of no use.
        let pd = pd.unwrap_or_else(|| match self.class {
            Class::Observed => h.mem.alloc_pd().expect("a protection domain"),
            _ => h.pd,
        });
        let alloc = |len, access| h.mem.alloc_region(pd, len, access).expect("memory");
        End {
            host,
            pd,
            qpn: None,
            cm: None,
            session: Session::default(),
            cq: self.rng.index(CQS),
            target: alloc(TARGET, RIGHTS | AccessFlags::LOCAL_WRITE | zero | bind),
            local: alloc(LOCAL, AccessFlags::LOCAL_WRITE | zero),
            recv: alloc(RECV, AccessFlags::LOCAL_WRITE | zero),
            hole: make_hole(
                &h.mem,
                pd,
                [Loss::Unmapped, Loss::Protected, Loss::Truncated][(host + end) % 3],
            ),
            fast_view: (0, 0, 0),
            shadow: vec![0; TARGET],
            sent: VecDeque::new(),
            undone: Vec::new(),
            posted: VecDeque::new(),
            next_wr: 0,
            operations_left: plan.operations[end],
            allow: Allow::default(),
            target_gone: false,
            app_scheduled: false,
            looks_in_vain: 0,
            recv_scheduled: false,
        }
    }

    /// Replaces an end's memory: its host has restarted, or its target was deregistered.
    fn renew_memory(&mut self, conn: usize, end: usize, pd: Option<PdHandle>) {
        let plan = self.conns[conn].plan.clone();
        let fresh = self.make_end(&plan, end, pd);
        let e = &mut self.conns[conn].ends[end];
        e.pd = fresh.pd;
        e.target = fresh.target;
        e.local = fresh.local;
        e.recv = fresh.recv;
        e.hole = fresh.hole;
        e.shadow = fresh.shadow;
        (e.session.fast, e.session.fast_key) = (None, FastKey::Closed);
        e.target_gone = false;
    }

    /// Begins a life of a connection.
    pub(crate) fn connect(&mut self, conn: usize) -> Check {
        let c = &mut self.conns[conn];
        if c.phase != Phase::Down {
            return Ok(());
        }
        let [a, b] = c.plan.hosts;
        if !self.hosts[a].alive || !self.hosts[b].alive {
            self.schedule(5 * MS, "connect", move |w| w.connect(conn));
            return Ok(());
        }
        c.phase = Phase::Connecting;
        c.life += 1;
        self.stats.connections += 1;
        let (gaps, victim) = (self.lossy(a, b) || self.disorderly(a, b), self.is_victim(conn));
        let cut = self.link(a, b).cut || self.link(b, a).cut;
        let c = &mut self.conns[conn];
        for e in &mut c.ends {
            // A host may have died since the last life.
            e.session = Session::default();
            e.undone.clear();
            e.allow = Allow {
                // By modify, the first packets find a peer that is not there yet.
                // A sequence NAK takes a retry, also an implied one (IBA 9.9.2.4.1).
                retry: cut || c.plan.retry_cnt < 7 && (gaps || !c.plan.via_cm),
                rnr: c.plan.rnr_retry < 7,
                ..Allow::default()
            };
            if victim {
                e.allow = Allow::ALL;
            }
        }
        let (life, via_cm) = (c.life, c.plan.via_cm);
        self.trace.note(self.now, || {
            format!("conn {conn}: life {life} begins, via cm: {via_cm}")
        });
        if via_cm {
            self.connect_by_cm(conn)
        } else {
            self.connect_by_modify(conn)
        }
    }

    /// Brings a queue pair to INIT and posts its first receives.
    fn ready_qp(&mut self, conn: usize, end: usize) -> Result<Qpn, String> {
        let c = &self.conns[conn];
        let e = &c.ends[end];
        let qpn = match e.qpn {
            Some(qpn) => qpn,
            None => self.hosts[e.host].create_qp(e.pd, e.cq, c.plan.caps, c.plan.signal_all)?,
        };
        self.conns[conn].ends[end].qpn = Some(qpn);
        self.live.forget(self.conns[conn].ends[end].host, qpn);
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(RIGHTS),
            ..QpAttr::default()
        };
        self.modify(conn, end, &init)?;
        self.post_receives(conn, end)?;
        Ok(qpn)
    }

    pub(crate) fn modify(&mut self, conn: usize, end: usize, attr: &QpAttr) -> Check {
        let now = self.instant();
        let e = &self.conns[conn].ends[end];
        let qpn = e.qpn.ok_or("no queue pair to modify")?;
        let port = &mut self.hosts[e.host].port;
        port.modify_qp(now, qpn, attr)
            .map_err(|e| format!("conn {conn} end {end}: to {:?}: {e}", attr.state))
    }

    fn connect_by_modify(&mut self, conn: usize) -> Check {
        let qpns = [self.ready_qp(conn, 0)?, self.ready_qp(conn, 1)?];
        self.raise(conn, 0, qpns[1])?;
        let life = self.conns[conn].life;
        let after = self.rng.range(0, 200 * US);
        self.schedule(after, "raise", move |w| w.raise_second(conn, life));
        let host = self.conns[conn].ends[0].host;
        self.service(host)
    }

    /// Moves a queue pair from INIT to RTS.
    fn raise(&mut self, conn: usize, end: usize, dest: Qpn) -> Check {
        let c = &self.conns[conn];
        let p = &c.plan;
        let [local, remote] = [end, 1 - end].map(|e| self.hosts[c.ends[e].host].plan.addr);
        // A queue pair that is used again must not take packets of its former life for new ones: far from the old PSNs.
        let psn = |direction: usize| p.psn[direction].add((c.life - 1) << 21);
        let way = QpAttr {
            rq_psn: Some(psn(1 - end)),
            sq_psn: Some(psn(end)),
            max_dest_rd_atomic: Some(p.rd_atomic),
            max_rd_atomic: Some(p.rd_atomic),
            min_rnr_timer: Some(p.min_rnr_timer),
            timeout: Some(p.timeout),
            retry_cnt: Some(p.retry_cnt),
            rnr_retry: Some(p.rnr_retry),
            ..QpAttr::to_rts(AddressVector::new(local, remote), p.mtu, dest)
        };
        for to in [QpState::Rtr, QpState::Rts] {
            self.modify(conn, end, &way.step(QpType::Rc, to))?;
        }
        self.set_up(conn, end);
        Ok(())
    }

    /// Lets the end's program send.
    fn set_up(&mut self, conn: usize, end: usize) {
        let c = &mut self.conns[conn];
        c.ends[end].session.up = true;
        if c.phase == Phase::Connecting && c.ends.iter().all(|e| e.session.up) {
            c.phase = Phase::Up;
        }
        self.kick(conn, end);
        self.note_all_up();
    }

    pub(crate) fn raise_second(&mut self, conn: usize, life: u32) -> Check {
        let c = &self.conns[conn];
        if c.life != life || !matches!(c.phase, Phase::Connecting) {
            return Ok(());
        }
        let (Some(dest), host) = (c.ends[0].qpn, c.ends[1].host) else {
            return Ok(());
        };
        self.raise(conn, 1, dest)?;
        self.service(host)
    }

    fn connect_by_cm(&mut self, conn: usize) -> Check {
        let now = self.instant();
        let qpn = self.ready_qp(conn, 0)?;
        let c = &self.conns[conn];
        let (host, life) = (c.ends[0].host, c.life);
        let [local, remote] = [0, 1].map(|e| self.hosts[c.ends[e].host].plan.addr);
        let mut params = c.plan.params(conn);
        params.private_data.extend_from_slice(&life.to_be_bytes());
        params.private_data.extend_from_slice(&self.token(conn, life));
        let port = &mut self.hosts[host].port;
        let id = port.connect_qp(now, (local, 0).into(), (remote, LISTEN_PORT).into(), qpn, params);
        let id = id.map_err(|e| format!("conn {conn}: connect: {e}"))?;
        self.conns[conn].ends[0].cm = Some(id);
        self.service(host)
    }

    /// Returns the token by which this model, but no program, distinguishes genuine requests from forged ones.
    fn token(&self, conn: usize, life: u32) -> [u8; 8] {
        let mixed = self.seed ^ (conn as u64) << 32 ^ u64::from(life);
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a09_e667_f3bc_c908).to_be_bytes()
    }

    /// Notes when all connections are up: from then on throughput counts.
    fn note_all_up(&mut self) {
        if self.all_up.is_none() && self.conns.iter().all(|c| c.phase == Phase::Up) {
            self.all_up = Some(self.now);
            if self.class.is_goodput() && self.blind.is_some() {
                self.start_attack(0);
            }
        }
    }

    /// Finds an end of a connection.
    pub(crate) fn find_end(&self, is_it: impl Fn(&End) -> bool) -> Option<(usize, usize)> {
        let mut conns = self.conns.iter().enumerate();
        conns.find_map(|(i, c)| Some((i, c.ends.iter().position(&is_it)?)))
    }

    fn owner(&self, h: usize, id: ConnId) -> Option<(usize, usize)> {
        self.find_end(|e| e.host == h && e.cm == Some(id))
    }

    /// Allows the flushes that an event explains: their completions may be polled before it.
    pub(crate) fn allow_flushes(&mut self, h: usize, event: &CmEventKind) {
        let goes_on = matches!(
            event,
            CmEventKind::Request { .. } | CmEventKind::Established { .. } | CmEventKind::TimewaitExit { .. }
        );
        if let Some((conn, end)) = self.owner(h, event.conn()).filter(|_| !goes_on) {
            self.conns[conn].ends[end].allow.flush = true;
        }
    }

    pub(crate) fn handle_cm_event(&mut self, h: usize, event: CmEventKind) -> Check {
        if self.program.is_some() {
            return self.with_program(|program, world| program.on_event(world, h, &event));
        }
        if let CmEventKind::Request {
            conn: id, private_data, ..
        } = &event
        {
            return self.on_request(h, *id, private_data);
        }
        if let CmEventKind::SidrRequest { conn: id, .. } = &event {
            return self.on_question(h, *id);
        }
        if self.on_stray_event(h, &event)? {
            return Ok(());
        }
        let Some((conn, end)) = self.owner(h, event.conn()) else {
            if self.observer.is_some() {
                // Of a request that it has made, and that was refused.
                return Ok(());
            }
            return Err(format!(
                "host {h}: an event of a connection that was destroyed: {event:?}"
            ));
        };
        match event {
            CmEventKind::Established { private_data, .. } => {
                if end == 0 && !self.is_victim(conn) && private_data.get(..4) != Some(&(conn as u32).to_be_bytes()[..])
                {
                    return Err(format!("conn {conn}: the accept's private data is not what was given"));
                }
                if self.conns[conn].ends[end].session.up {
                    return Err(format!("conn {conn} end {end}: established twice"));
                }
                self.set_up(conn, end);
            }
            CmEventKind::TimewaitExit { .. }
            | CmEventKind::Request { .. }
            | CmEventKind::SidrRequest { .. }
            | CmEventKind::Resolved { .. }
            | CmEventKind::Reply { .. } => {}
            CmEventKind::Rejected { .. }
            | CmEventKind::Unreachable { .. }
            | CmEventKind::Failed { .. }
            | CmEventKind::Disconnected { .. } => {
                let ends = &mut self.conns[conn].ends;
                ends[end].allow.flush = true;
                ends[end].session.failed = true;
                ends[1 - end].allow.end();
                self.break_later(conn);
            }
        }
        Ok(())
    }

    fn on_request(&mut self, h: usize, id: ConnId, private_data: &[u8]) -> Check {
        let now = self.instant();
        let Some(([a, b, c, d, e, f, g, i], rest)) = private_data.split_first_chunk() else {
            return Err(format!("host {h}: a connect request without its private data"));
        };
        let conn = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let life = u32::from_be_bytes([*e, *f, *g, *i]);
        if !rest.starts_with(&self.token(conn, life)) {
            return self.on_stray(h, id);
        }
        let known = self.conns.get(conn).filter(|c| c.ends[1].host == h && c.life >= life);
        let Some(c) = known else {
            return Err(format!(
                "host {h}: a connect request that nobody made: {conn}, life {life}"
            ));
        };
        let current = c.life == life && c.phase == Phase::Connecting;
        let twice = current && c.ends[1].cm.is_some();
        if twice && !self.is_victim(conn) {
            return Err(format!("conn {conn}: one connect made two requests"));
        }
        if !current || twice || (!self.quiet && self.chaos_rng.chance(0.05)) {
            return self.refuse(h, id, RejectReason::CONSUMER);
        }
        let params = c.plan.params(conn);
        let qpn = self.ready_qp(conn, 1)?;
        let accepted = self.hosts[h].port.accept_qp(now, id, qpn, params);
        self.conns[conn].ends[1].cm = Some(id);
        if let Err(e) = accepted {
            // The peer has taken it back meanwhile, and its event waits behind this one.
            self.trace.note(self.now, || format!("conn {conn}: accept: {e}"));
            self.conns[conn].ends[1].allow.flush = true;
            self.break_later(conn);
        }
        Ok(())
    }

    /// Schedules the cleanup of a broken connection.
    pub(crate) fn break_later(&mut self, conn: usize) {
        let c = &mut self.conns[conn];
        if c.phase == Phase::Down || c.repair_scheduled {
            return;
        }
        c.repair_scheduled = true;
        c.phase = Phase::Broken;
        let life = c.life;
        let after = self.rng.pick(&[0, 100 * US, 30 * MS]);
        self.schedule(after, "repair", move |w| w.repair(conn, life));
    }

    /// Ends a life: both queue pairs stop, everything outstanding is accounted for, memory is compared.
    pub(crate) fn repair(&mut self, conn: usize, life: u32) -> Check {
        let c = &mut self.conns[conn];
        if c.life != life || c.phase == Phase::Down {
            return Ok(());
        }
        self.trace.note(self.now, || format!("conn {conn}: life {life} ends"));
        c.repair_scheduled = false;
        c.phase = Phase::Broken;
        for e in &mut c.ends {
            e.allow.end();
            e.session.up = false;
        }
        for end in [0, 1] {
            self.stop_end(conn, end)?;
        }
        for end in [0, 1] {
            self.settle(conn, end)?;
        }
        let keep = !self.conns[conn].plan.via_cm && self.rng.chance(0.5);
        for end in [0, 1] {
            self.release_end(conn, end, keep)?;
        }
        let c = &mut self.conns[conn];
        c.phase = Phase::Down;
        // Completions seen on the way asked for another one.
        c.repair_scheduled = false;
        self.stats.repairs += 1;
        let after = self.rng.range(0, 20 * MS);
        self.schedule(after, "connect", move |w| w.connect(conn));
        Ok(())
    }

    /// Moves an end's queue pair to error and collects what it flushes; or drops it with all that it has.
    fn stop_end(&mut self, conn: usize, end: usize) -> Check {
        let now = self.instant();
        let e = &self.conns[conn].ends[end];
        let (host, cm) = (e.host, e.cm);
        let Some(qpn) = e.qpn.filter(|_| self.hosts[host].alive) else {
            self.drop_outstanding(conn, end);
            return Ok(());
        };
        let state = self.hosts[host].port.qp_state(qpn);
        let flushes = self.rng.chance(0.7) && state != Some(QpState::Reset);
        if let Some(id) = cm.filter(|_| flushes) {
            self.hosts[host].port.cm_disconnect(now, id);
        }
        if !flushes {
            self.service(host)?;
            self.drop_outstanding(conn, end);
            return self.modify(conn, end, &to_state(QpState::Reset));
        }
        self.modify(conn, end, &to_state(QpState::Err))?;
        self.service(host)?;
        let e = &self.conns[conn].ends[end];
        if let Some(s) = e.sent.iter().find(|s| s.signaled) {
            return Err(format!(
                "conn {conn} end {end}: {} never completed, not even in ERR",
                s.what
            ));
        }
        if !e.posted.is_empty() {
            let n = e.posted.len();
            return Err(format!(
                "conn {conn} end {end}: {n} receives never completed, not even in ERR"
            ));
        }
        // What is left is unsignalled and makes no completion: it has succeeded, or it would have been flushed.
        while !self.conns[conn].ends[end].sent.is_empty() {
            self.succeed_oldest(conn, end)?;
        }
        Ok(())
    }

    /// Forgets the queue pair's work requests, which get no completions.
    pub(crate) fn drop_outstanding(&mut self, conn: usize, end: usize) {
        let e = &mut self.conns[conn].ends[end];
        let undone: Vec<Effect> = e.sent.drain(..).filter_map(|s| s.effect).collect();
        e.undone.extend(undone);
        e.posted.clear();
    }

    /// Checks that an end's memory shows a state that the peer's unfinished work requests lead through
    /// in order, packet by packet. From there the next life goes on.
    fn settle(&mut self, conn: usize, end: usize) -> Check {
        let victim = self.is_victim(conn);
        let undone = std::mem::take(&mut self.conns[conn].ends[1 - end].undone);
        let alive = self.hosts[self.conns[conn].ends[end].host].alive;
        let mtu = self.conns[conn].plan.mtu.bytes();
        let e = &mut self.conns[conn].ends[end];
        if e.target_gone || !alive {
            return Ok(());
        }
        let mut actual = vec![0; TARGET];
        e.target.read(0, &mut actual).map_err(|e| e.to_string())?;
        if victim {
            e.shadow = actual;
            return Ok(());
        }
        let mut state = e.shadow.clone();
        for effect in undone.iter().rev() {
            state[effect.range()].copy_from_slice(&effect.old);
        }
        let mut found = state == actual;
        for effect in &undone {
            for chunk_end in (mtu..effect.new.len()).step_by(mtu).chain([effect.new.len()]) {
                if found {
                    break;
                }
                let chunk = chunk_end.saturating_sub(1) / mtu * mtu..chunk_end;
                let at = effect.at + chunk.start..effect.at + chunk.end;
                state[at].copy_from_slice(&effect.new[chunk]);
                found = state == actual;
            }
        }
        if !found {
            let wrong = actual.iter().zip(&e.shadow).filter(|(a, b)| a != b).count();
            return Err(format!(
                "conn {conn} end {end}: its memory is no state that the peer's {} unfinished operations lead through \
                 ({wrong} bytes differ from the last one)",
                undone.len()
            ));
        }
        e.shadow = actual;
        Ok(())
    }

    /// Makes an end ready for its next life.
    fn release_end(&mut self, conn: usize, end: usize, keep: bool) -> Check {
        let now = self.instant();
        let e = &mut self.conns[conn].ends[end];
        let (host, qpn, cm) = (e.host, e.qpn, e.cm.take());
        let fast = std::mem::take(&mut e.session).fast;
        let target_gone = e.target_gone;
        if self.hosts[host].alive {
            let h = &mut self.hosts[host];
            if let Some(fast) = fast {
                let gone = match &fast {
                    Grant::Fast(fast) => h.mem.dealloc_fast(fast),
                    Grant::Window(window) => h.mem.dealloc_window(window),
                };
                gone.map_err(|e| format!("conn {conn}: end of a grant: {e}"))?;
            }
            if let Some(id) = cm {
                h.port.cm_destroy(now, id);
            }
            match qpn {
                Some(_) if keep => self.modify(conn, end, &to_state(QpState::Reset))?,
                Some(qpn) => {
                    h.port
                        .destroy_qp(now, qpn)
                        .map_err(|e| format!("conn {conn}: destroy: {e}"))?;
                    self.conns[conn].ends[end].qpn = None;
                }
                None => {}
            }
            if target_gone {
                let pd = self.conns[conn].ends[end].pd;
                self.renew_memory(conn, end, Some(pd));
            }
            self.service(host)?;
        } else {
            self.conns[conn].ends[end].qpn = None;
        }
        Ok(())
    }

    /// Boots a host, with nothing in its memory.
    pub(crate) fn boot(&mut self, host: usize) -> Check {
        if self.hosts[host].alive {
            return Ok(());
        }
        self.trace.note(self.now, || format!("host {host} boots"));
        let mut rng = self.seed_rng.clone();
        self.hosts[host].restart(host, &mut rng);
        self.seed_rng = rng;
        self.renew_services(host);
        for conn in 0..self.conns.len() {
            for end in [0, 1] {
                if self.conns[conn].plan.hosts[end] == host {
                    self.renew_memory(conn, end, None);
                    // What the peer believed about the old memory must not be asked of the new one.
                    self.conns[conn].ends[end].target_gone = self.conns[conn].phase != Phase::Down;
                }
            }
        }
        self.service(host)
    }

    /// Kills a host with all its state. Its peers notice by timeouts.
    pub(crate) fn kill(&mut self, host: usize) {
        self.hosts[host].alive = false;
        self.end_services(host);
        for conn in 0..self.conns.len() {
            if !self.conns[conn].plan.hosts.contains(&host) {
                continue;
            }
            for end in [0, 1] {
                if self.conns[conn].plan.hosts[end] == host {
                    self.drop_outstanding(conn, end);
                    let e = &mut self.conns[conn].ends[end];
                    e.qpn = None;
                    e.cm = None;
                    e.session.up = false;
                    e.session.failed = true;
                    e.session.fast = None;
                    e.target_gone = true;
                } else {
                    let allow = &mut self.conns[conn].ends[end].allow;
                    allow.end();
                }
            }
            let c = &mut self.conns[conn];
            if matches!(c.phase, Phase::Up | Phase::Connecting) {
                // Peers with an endless timeout would never notice.
                c.phase = Phase::Broken;
                c.repair_scheduled = true;
                let life = c.life;
                let after = self.rng.range(0, 300 * MS);
                self.schedule(after, "repair", move |w| w.repair(conn, life));
            }
        }
    }
}
