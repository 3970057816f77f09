//! Several ports at one address, each with its own queue pairs.
//!
//! The first port has the connection manager of all, because management datagrams don't name the queue pair's port.
//! It reaches queue pairs of other ports through [`Siblings`]. They report back through [`Port::poll_first_packet`],
//! because a thread that holds a sibling's lock must not acquire the first port's.

use std::sync::Arc;

use roce_bth::Qpn;
use roce_cm::ConnId;
use roce_verbs::{Instant, provider::VerbsError};

use crate::port::Port;

/// Access of the first port to the others.
pub trait Siblings: Send + Sync {
    /// Runs `call` once on the port with this queue pair number; not at all if that port is closed.
    fn call(&self, qpn: Qpn, call: &mut dyn FnMut(&mut Port));
}

impl Port {
    /// Makes this the first port. Queue pair numbers outside its own range belong to `siblings`.
    pub fn set_siblings(&mut self, siblings: Arc<dyn Siblings>) {
        self.siblings = Some(siblings);
    }

    /// Makes this port a sibling of `first`, which has its connections. Call before creating queue pairs.
    pub fn follow(&mut self, first: &Self) {
        self.handshakes = first.handshakes.clone();
    }

    /// Returns the next of the first port's connections whose peer sent a first packet.
    ///
    /// Pass it to the first port's [`Port::cm_notify`].
    pub fn poll_first_packet(&mut self) -> Option<ConnId> {
        self.first_packets.pop_front()
    }

    /// Runs `call` on the port that owns a queue pair.
    ///
    /// # Errors
    /// That port is closed.
    pub(crate) fn at<R>(&mut self, qpn: Qpn, call: impl FnOnce(&mut Self) -> R) -> Result<R, VerbsError> {
        let elsewhere = self.siblings.as_ref().filter(|_| !self.qpns.includes(qpn));
        let Some(siblings) = elsewhere.cloned() else {
            return Ok(call(self));
        };
        let (mut call, mut result) = (Some(call), None);
        siblings.call(qpn, &mut |port| result = call.take().map(|call| call(port)));
        result.ok_or(VerbsError::Closed)
    }

    /// Runs `call` on the port of a connection's queue pair; `None` without queue pair.
    pub(crate) fn at_qp_of<R>(&mut self, conn: ConnId, call: impl FnOnce(&mut Self, Qpn, usize) -> R) -> Option<R> {
        let qpn = self.conns.get(&conn)?.qpn;
        let done = self.at(qpn, |port| {
            // Another queue pair may have the number by now.
            let slot = port.qpns.get(qpn).filter(|slot| port.qps[*slot].conn == Some(conn))?;
            Some(call(port, qpn, slot))
        });
        done.ok()?
    }

    /// Treats the peer's first packet on a half-open connection as its RTU.
    pub(crate) fn on_first_packet(&mut self, now: Instant, slot: usize) {
        let entry = &mut *self.qps[slot];
        entry.half_open = false;
        let Some(conn) = entry.conn else { return };
        if self.is_bound(conn) {
            self.cm_notify(now, conn);
        } else {
            self.first_packets.push_back(conn);
        }
    }
}
