//! DREQs that travel between other addresses than their connection's, whose network may be dead.
//!
//! Nothing depends on them: each is sent a few times, until it is answered, and then forgotten.

use core::{net::IpAddr, time::Duration};
use std::collections::BTreeMap;

use roce_verbs::Instant;

use super::{Manager, State, build};
use crate::{
    mad::{Attribute, Drep, MAD_LEN, Mad, Message},
    types::{ConnId, DropReason},
};

/// How often each is sent at most.
const TRIES: u8 = 4;

struct Farewell {
    local: IpAddr,
    remote: IpAddr,
    /// Ours and the peer's.
    ids: (u32, u32),
    mad: [u8; MAD_LEN],
    tries: u8,
    pause: Duration,
}

/// Disconnects that wait for their answers.
#[derive(Default)]
pub(super) struct Farewells {
    /// By the time at which each is sent again, or forgotten.
    waiting: BTreeMap<(Instant, u64), Farewell>,
    next: u64,
}

impl Farewells {
    fn insert(&mut self, at: Instant, farewell: Farewell) {
        self.waiting.insert((at, self.next), farewell);
        self.next += 1;
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes a DREP. False: it answers none of them.
    pub(super) fn answer(&mut self, local: IpAddr, remote: IpAddr, drep: &Drep) -> bool {
        let ids = (drep.remote_comm_id, drep.local_comm_id);
        let before = self.waiting.len();
        self.waiting
            .retain(|_, f| (f.local, f.remote, f.ids) != (local, remote, ids));
        self.waiting.len() < before
    }
}

impl Manager {
    /// The DREQ of a connection that waits for its DREP, for [`Manager::send_farewell`].
    pub fn farewell(&self, conn: ConnId) -> Option<Mad> {
        let c = self.table.get(conn).filter(|c| c.detached.is_none())?;
        (c.state == State::DreqSent).then(|| Mad::new(self.transaction(c.local_id), build::dreq(c)))
    }

    /// Sends a DREQ, perhaps another manager's, between addresses that are not its connection's: for when that network may be dead and
    /// this one leads to the same peer. A peer that goes by the numbers in it alone (`cm_dreq_handler`) ends the connection. Four times
    /// at most; what else is given or does not fit in is dropped.
    ///
    /// The address is the caller's to answer for: it must have shown that it is the peer's.
    pub fn send_farewell(&mut self, now: Instant, local: IpAddr, remote: IpAddr, dreq: &Mad) {
        let Message::Dreq(m) = &dreq.message else { return };
        if self.farewells.len() >= self.config.max_lingering {
            self.counters.count_drop(DropReason::OutQueueFull);
            return;
        }
        let farewell = Farewell {
            local: local.to_canonical(),
            remote: remote.to_canonical(),
            ids: (m.local_comm_id, m.remote_comm_id),
            mad: dreq.emit(),
            tries: TRIES,
            pause: self.config.first_retry.max(Duration::from_millis(1)),
        };
        self.say_farewell(now, farewell);
    }

    fn say_farewell(&mut self, now: Instant, mut farewell: Farewell) {
        self.send_to(farewell.local, farewell.remote, Attribute::Dreq, farewell.mad);
        farewell.tries -= 1;
        let at = now + farewell.pause;
        farewell.pause *= 2;
        self.farewells.insert(at, farewell);
    }

    /// Sends again what was not answered.
    pub(super) fn on_farewell_timers(&mut self, now: Instant) {
        while let Some(entry) = self.farewells.waiting.first_entry().filter(|e| e.key().0 <= now) {
            let farewell = entry.remove();
            if farewell.tries > 0 {
                self.counters.count_retried(Attribute::Dreq);
                self.say_farewell(now, farewell);
            }
        }
    }
}
