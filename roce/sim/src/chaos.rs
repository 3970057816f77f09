//! Disturbances of hosts and connections: partitions, deaths of hosts, queue pairs and memory taken away in mid-flight.

use roce_verbs::{QpAttr, QpState};

use crate::{
    life::to_state,
    model::Phase,
    runner::Check,
    scenario::{MS, US},
    world::World,
};

impl World {
    pub(crate) fn disturb(&mut self) -> Check {
        if self.quiet {
            return Ok(());
        }
        let conn = self.chaos_rng.index(self.conns.len());
        let end = self.chaos_rng.index(2);
        let kind = self.chaos_rng.index(9);
        self.stats.disturbances += 1;
        self.trace
            .note(self.now, || format!("disturbance {kind}, conn {conn}, end {end}"));
        match kind {
            0 | 1 => self.partition(),
            2 => self.kill_some()?,
            3 => self.force_state(conn, end, QpState::Err)?,
            4 => self.force_state(conn, end, QpState::Reset)?,
            5 => self.disconnect(conn, end)?,
            6 => self.take_memory(conn, end)?,
            7 => self.stop_receives(end),
            _ => self.drain(conn, end)?,
        }
        Ok(())
    }

    fn partition(&mut self) {
        let a = self.chaos_rng.index(self.hosts.len());
        let b = (a + 1) % self.hosts.len();
        let duration = self.chaos_rng.pick(&[MS, 10 * MS, 50 * MS, 200 * MS]);
        let both = self.chaos_rng.chance(0.5);
        self.link(a, b).cut = true;
        self.link(b, a).cut |= both;
        for c in &mut self.conns {
            let across = c.plan.hosts.contains(&a) && c.plan.hosts.contains(&b);
            // A retry needs a timeout's time without any answer; the last one before may be nearly over.
            let longest = (4096 << c.plan.timeout) * u64::from(c.plan.retry_cnt);
            let endless = c.plan.timeout == 0 || c.plan.via_cm && c.plan.retry_cnt > 0;
            if across && !endless && duration + 20 * MS >= longest {
                for e in &mut c.ends {
                    e.allow.retry = true;
                }
            }
        }
        self.schedule(duration, "heal", move |w| w.heal(a, b));
    }

    fn heal(&mut self, a: usize, b: usize) -> Check {
        self.link(a, b).cut = false;
        self.link(b, a).cut = false;
        Ok(())
    }

    fn kill_some(&mut self) -> Check {
        let host = self.chaos_rng.index(self.hosts.len());
        if !self.hosts[host].alive {
            return Ok(());
        }
        self.kill(host);
        let down = self.chaos_rng.pick(&[MS, 20 * MS, 100 * MS]);
        self.schedule(down, "boot", move |w| w.boot(host));
        // Services of others that end make room for what waits to be sent.
        for other in 0..self.hosts.len() {
            if self.hosts[other].alive {
                self.service(other)?;
            }
        }
        Ok(())
    }

    /// Whether a connection's end can be meddled with.
    fn is_live(&self, conn: usize, end: usize) -> bool {
        let c = &self.conns[conn];
        let e = &c.ends[end];
        matches!(c.phase, Phase::Up | Phase::Connecting)
            && e.qpn.is_some()
            && self.hosts[e.host].alive
            && e.session.up
            && !e.session.failed
    }

    /// Allows both ends the errors that follow when one of them is taken away.
    fn doom(&mut self, conn: usize) {
        for e in &mut self.conns[conn].ends {
            e.allow.end();
        }
        let c = &mut self.conns[conn];
        if !c.repair_scheduled {
            c.repair_scheduled = true;
            let life = c.life;
            // Long enough, mostly, for the peer to notice by itself.
            let after = self.chaos_rng.pick(&[100 * US, 50 * MS, 500 * MS]);
            self.schedule(after, "repair", move |w| w.repair(conn, life));
        }
    }

    fn force_state(&mut self, conn: usize, end: usize, state: QpState) -> Check {
        if !self.is_live(conn, end) {
            return Ok(());
        }
        self.doom(conn);
        let host = self.conns[conn].ends[end].host;
        self.service(host)?;
        if self.conns[conn].ends[end].qpn.is_none() {
            return Ok(());
        }
        if state == QpState::Reset {
            self.drop_outstanding(conn, end);
            self.conns[conn].ends[end].session.failed = true;
        }
        self.modify(conn, end, &to_state(state))?;
        self.service(host)
    }

    fn disconnect(&mut self, conn: usize, end: usize) -> Check {
        let Some(id) = self.conns[conn].ends[end].cm.filter(|_| self.is_live(conn, end)) else {
            return Ok(());
        };
        self.doom(conn);
        let now = self.instant();
        let host = self.conns[conn].ends[end].host;
        self.hosts[host].port.cm_disconnect(now, id);
        self.service(host)
    }

    /// Deregisters an end's target while the peer works with it.
    fn take_memory(&mut self, conn: usize, end: usize) -> Check {
        if !self.is_live(conn, end) || self.conns[conn].ends[end].target_gone {
            return Ok(());
        }
        self.doom(conn);
        let e = &mut self.conns[conn].ends[end];
        if self.hosts[e.host].mem.deregister(&e.target).is_err() {
            // A window is bound to it.
            return Ok(());
        }
        e.target_gone = true;
        self.conns[conn].ends[1 - end].allow.access = true;
        Ok(())
    }

    /// Lets an end's program post no receives any more, if its peer gives up on that some time.
    fn stop_receives(&mut self, end: usize) {
        for conn in 0..self.conns.len() {
            if self.is_live(conn, end) && self.conns[conn].plan.rnr_retry < 7 {
                self.conns[conn].ends[end].session.mute = true;
            }
        }
    }

    /// Asks a send queue to drain; it goes on when it has.
    fn drain(&mut self, conn: usize, end: usize) -> Check {
        let e = &self.conns[conn].ends[end];
        if !self.is_live(conn, end) || e.session.draining || e.session.failed {
            return Ok(());
        }
        let (host, qpn) = (e.host, e.qpn);
        if qpn.and_then(|q| self.hosts[host].port.qp_state(q)) != Some(QpState::Rts) {
            return Ok(());
        }
        self.conns[conn].ends[end].session.draining = true;
        let attr = QpAttr {
            en_sqd_async_notify: Some(true),
            ..to_state(QpState::Sqd)
        };
        self.modify(conn, end, &attr)?;
        self.service(host)
    }

    pub(crate) fn resume(&mut self, conn: usize, end: usize, life: u32) -> Check {
        let e = &self.conns[conn].ends[end];
        if self.conns[conn].life != life || !e.session.draining {
            return Ok(());
        }
        let (host, qpn) = (e.host, e.qpn);
        let state = qpn
            .filter(|_| self.hosts[host].alive)
            .and_then(|q| self.hosts[host].port.qp_state(q));
        self.conns[conn].ends[end].session.draining = false;
        if state != Some(QpState::Sqd) {
            // An error has moved it on.
            return Ok(());
        }
        self.modify(conn, end, &to_state(QpState::Rts))?;
        self.kick(conn, end);
        self.service(host)
    }

    /// Ends the faults. From here on everything must complete.
    pub(crate) fn enter_quiet(&mut self) -> Check {
        self.trace.note(self.now, || "the quiet phase begins".into());
        self.quiet = true;
        self.quiet_since = self.now;
        let n = self.hosts.len();
        for from in 0..n {
            for to in 0..n {
                let link = self.link(from, to);
                link.faults = link.faults.quiet();
                link.cut = false;
            }
        }
        for host in 0..n {
            self.boot(host)?;
        }
        for conn in 0..self.conns.len() {
            for end in [0, 1] {
                self.kick(conn, end);
            }
        }
        self.wake_services();
        Ok(())
    }
}
