//! Several ports at one address, each with queue pairs of its own. The first has the connection manager of all: management datagrams
//! don't say whose queue pair they are about. What it does to a queue pair of another goes through [`Siblings`]; the way back is
//! [`Port::poll_first_packet`], as whoever has a sibling's lock must not wait for the first's.

use std::sync::Arc;

use roce_bth::Qpn;
use roce_cm::ConnId;
use roce_verbs::{Instant, provider::VerbsError};

use crate::port::Port;

/// The way from the first port to the others.
pub trait Siblings: Send + Sync {
    /// Calls the port that has this queue pair number, once; not at all if there is none any more.
    fn call(&self, qpn: Qpn, call: &mut dyn FnMut(&mut Port));
}

impl Port {
    /// This port is the first: connections of queue pairs with numbers that are not its own are these ports'.
    pub fn set_siblings(&mut self, siblings: Arc<dyn Siblings>) {
        self.siblings = Some(siblings);
    }

    /// This port's queue pairs have their connections at another, the first. Before there are any.
    pub fn follow(&mut self, first: &Self) {
        self.handshakes = first.handshakes.clone();
    }

    /// Takes a connection whose queue pair is here and whose peer's first packet has come, if that is the first port's: it is to be told
    /// ([`Port::cm_notify`]).
    pub fn poll_first_packet(&mut self) -> Option<ConnId> {
        self.first_packets.pop_front()
    }

    /// Does something where a queue pair is.
    ///
    /// # Errors
    /// When that port is closed.
    pub(crate) fn at<R>(&mut self, qpn: Qpn, call: impl FnOnce(&mut Self) -> R) -> Result<R, VerbsError> {
        let elsewhere = self.siblings.as_ref().filter(|_| !self.qpns.includes(qpn));
        let Some(siblings) = elsewhere.cloned() else {
            return Ok(call(self));
        };
        let (mut call, mut result) = (Some(call), None);
        siblings.call(qpn, &mut |port| result = call.take().map(|call| call(port)));
        result.ok_or(VerbsError::Closed)
    }

    /// Does something where a connection's queue pair is, with its number and its place there, if it has one that lives.
    pub(crate) fn at_qp_of<R>(&mut self, conn: ConnId, call: impl FnOnce(&mut Self, Qpn, usize) -> R) -> Option<R> {
        let qpn = self.conns.get(&conn)?.qpn?;
        let done = self.at(qpn, |port| {
            // The number may be another's by now.
            let slot = port.qpns.get(qpn).filter(|slot| port.qps[*slot].conn == Some(conn))?;
            Some(call(port, qpn, slot))
        });
        done.ok()?
    }

    /// A packet of the peer on a queue pair whose connection waits for the RTU says as much as the RTU.
    pub(crate) fn on_first_packet(&mut self, now: Instant, slot: usize) {
        let entry = &mut *self.qps[slot];
        entry.half_open = false;
        let Some(conn) = entry.conn else { return };
        if self.conns.contains_key(&conn) {
            self.cm_notify(now, conn);
        } else {
            self.first_packets.push_back(conn);
        }
    }
}
