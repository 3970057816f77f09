//! DREQs between other addresses than their connection's, whose network may be down.
//!
//! Nothing depends on them: each is sent a few times, until it is answered.

use core::{net::IpAddr, time::Duration};
use std::collections::BTreeMap;

use roce_verbs::Instant;

use super::{Manager, State};
use crate::cm::{
    drops::DropReason,
    mad::{Attribute, Drep, MAD_LEN, Mad, Message},
    types::ConnId,
};

/// Transmissions of each.
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

/// DREQs that wait for their DREPs.
#[derive(Default)]
pub(super) struct Farewells {
    /// By the time of the next transmission, or of removal.
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

    /// Removes the DREQ that a DREP answers. Returns false if there is none.
    pub(super) fn answer(&mut self, local: IpAddr, remote: IpAddr, drep: &Drep) -> bool {
        let ids = (drep.remote_comm_id, drep.local_comm_id);
        let before = self.waiting.len();
        self.waiting
            .retain(|_, f| (f.local, f.remote, f.ids) != (local, remote, ids));
        self.waiting.len() < before
    }
}

impl Manager {
    /// Returns the DREQ of a connection that waits for its DREP, for [`Manager::send_farewell`].
    pub fn farewell(&self, conn: ConnId) -> Option<Mad> {
        let c = self.table.attached(conn)?;
        (c.state == State::DreqSent).then(|| self.dreq(c))
    }

    /// Sends a DREQ, possibly another manager's, between the addresses of connection `by`, in case that the network of its own
    /// connection is down. A peer that looks only at the numbers in it (`cm_dreq_handler`) ends the connection. Sent four times at most.
    ///
    /// Returns false unless `by` is established: before that its peer's address is unverified.
    pub fn send_farewell(&mut self, now: Instant, by: ConnId, dreq: &Mad) -> bool {
        let c = self.table.attached(by).filter(|c| c.state == State::Established);
        let (Some(c), Message::Dreq(m)) = (c, &dreq.message) else {
            return false;
        };
        if self.farewells.len() >= self.config.max_lingering {
            self.counters.count_drop(DropReason::OutQueueFull);
            return true;
        }
        let farewell = Farewell {
            local: c.local.ip(),
            remote: c.remote.ip(),
            ids: (m.local_comm_id, m.remote_comm_id),
            mad: dreq.emit(),
            tries: TRIES,
            pause: self.config.first_pause(),
        };
        self.say_farewell(now, farewell);
        true
    }

    fn say_farewell(&mut self, now: Instant, mut farewell: Farewell) {
        self.send(farewell.local, farewell.remote, farewell.mad);
        farewell.tries -= 1;
        let at = now + farewell.pause;
        farewell.pause *= 2;
        self.farewells.insert(at, farewell);
    }

    /// Sends those that are due again.
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
