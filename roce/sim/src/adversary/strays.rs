//! Programs' handling of forged connect requests. They can't distinguish them: they accept, refuse or delay them, and clean
//! up when the request is never confirmed.

use roce_port::{CmEventKind, ConnId, SidrAnswer, cm::mad::sidr_status};
use roce_verbs::{
    QKey, QpCaps, Qpn,
    provider::{ConnParams, RejectReason},
};

use super::state::{Held, Stray};
use crate::{
    runner::Check,
    scenario::{MS, SEC},
    world::World,
};

/// Requests that a host's programs hold at a time.
const MOST: usize = 16;

impl World {
    /// Handles a connect request that no peer has made.
    pub(crate) fn on_stray(&mut self, h: usize, id: ConnId) -> Check {
        let now = self.instant();
        if self.observer.is_some() {
            // A request that was seen, and then changed.
            return self.refuse(h, id, RejectReason::CONSUMER);
        }
        let Some(mut blind) = self.blind.take() else {
            return Err(format!("host {h}: a connect request that nobody made"));
        };
        let boot = self.hosts[h].boot;
        blind.answered.retain(|(at, ..)| *at == self.now);
        blind.answered.push((self.now, h, id));
        let connections = blind.strays.iter().filter(|s| s.what != Held::Question);
        let held = connections.filter(|s| s.host == h).count();
        let (choice, delay) = match blind.effort.fills_backlogs() {
            // The backlog bounds how many are held.
            true => (1, 2 * SEC),
            false if held >= MOST => (0, 0),
            false => (blind.rng.index(4), blind.rng.pick(&[0, 100 * MS, 2 * SEC])),
        };
        let params = ConnParams {
            responder_resources: 4,
            initiator_depth: 4,
            ..ConnParams::default()
        };
        if choice == 0 {
            let reason = blind.rng.pick(&[RejectReason::CONSUMER, RejectReason::NO_QP]);
            self.blind = Some(blind);
            return self.refuse(h, id, reason);
        }
        let qpn = (choice > 1).then(|| self.spare_qp(h)).transpose()?;
        let what = Held::Connection(qpn);
        blind.strays.push(Stray {
            host: h,
            boot,
            id,
            what,
        });
        self.blind = Some(blind);
        self.schedule(delay, "dismiss", move |w| w.dismiss(h, id));
        if let Some(qpn) = qpn {
            // A request that can't be accepted any more is dismissed all the same.
            let _ = self.hosts[h].port.accept_qp(now, id, qpn, params);
        }
        Ok(())
    }

    /// Handles a question for a queue pair, which no peer asks: the program answers every second one, and keeps all of them until the
    /// attack is over, as one that forgets to destroy them.
    pub(crate) fn on_question(&mut self, h: usize, id: ConnId) -> Check {
        let (now, boot) = (self.instant(), self.hosts[h].boot);
        let Some(blind) = &mut self.blind else {
            return Err(format!("host {h}: a question that nobody asked"));
        };
        let what = Held::Question;
        blind.strays.push(Stray {
            host: h,
            boot,
            id,
            what,
        });
        let kept = blind.effort.until.saturating_sub(self.now) + SEC;
        self.schedule(kept, "dismiss", move |w| w.dismiss(h, id));
        if id.0.is_multiple_of(2) {
            let answer = SidrAnswer {
                status: sidr_status::REJECT,
                qpn: Qpn::new(0),
                qkey: QKey(0),
                private_data: vec![],
            };
            let answered = self.hosts[h].port.cm_answer(now, id, &answer);
            answered.map_err(|e| format!("host {h}: answering a question: {e}"))?;
        }
        Ok(())
    }

    /// Rejects a request to connect.
    ///
    /// # Errors
    /// None.
    pub fn refuse(&mut self, h: usize, id: ConnId, reason: RejectReason) -> Check {
        let now = self.instant();
        let port = &mut self.hosts[h].port;
        // An error: its peer has taken it back meanwhile, or it gave way to a later one.
        let _ = port.cm_reject(now, id, reason, b"no");
        port.cm_destroy(now, id);
        Ok(())
    }

    /// Creates a queue pair for a request.
    ///
    /// # Errors
    /// When the host has too many.
    pub fn spare_qp(&mut self, h: usize) -> Result<Qpn, String> {
        let host = &mut self.hosts[h];
        let qpn = host.create_qp(host.pd, 0, QpCaps::default(), false);
        qpn.map_err(|e| format!("host {h}: for a request: {e}"))
    }

    /// Whether a connection is none of the model's; then its event is dealt with.
    pub(crate) fn on_stray_event(&mut self, h: usize, event: &CmEventKind) -> Result<bool, String> {
        let boot = self.hosts[h].boot;
        let strays = self.blind.as_ref().map_or(&[][..], |b| &b.strays);
        if !strays.iter().any(|s| (s.host, s.boot, s.id) == (h, boot, event.conn())) {
            let just = (self.now, h, event.conn());
            return Ok(self.blind.as_ref().is_some_and(|b| b.answered.contains(&just)));
        }
        match event {
            CmEventKind::Established { .. } => Err(format!(
                "host {h}: a request that nobody made is established without an answer to its reply"
            )),
            CmEventKind::TimewaitExit { .. } => Ok(true),
            _ => self.dismiss(h, event.conn()).map(|()| true),
        }
    }

    /// The program has waited long enough.
    pub(crate) fn dismiss(&mut self, h: usize, id: ConnId) -> Check {
        let now = self.instant();
        let Some(blind) = &mut self.blind else { return Ok(()) };
        let Some(at) = blind.strays.iter().position(|s| (s.host, s.id) == (h, id)) else {
            return Ok(());
        };
        let stray = blind.strays.swap_remove(at);
        blind.answered.push((self.now, h, id));
        let host = &mut self.hosts[h];
        if !host.alive || host.boot != stray.boot {
            return Ok(());
        }
        host.port.cm_destroy(now, id);
        if let Held::Connection(Some(qpn)) = stray.what {
            let destroyed = host.port.destroy_qp(now, qpn);
            destroyed.map_err(|e| format!("host {h}: destroy: {e}"))?;
        }
        self.service(h)
    }
}
