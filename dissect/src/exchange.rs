//! Exchanges: all packets of one request, by keys that its messages have in common.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use rtrs::proto::Uuid;
use serde::Serialize;

/// Open exchanges at most; the oldest are dropped.
const MAX_OPEN: usize = 1 << 16;

/// Number of an exchange, the same for all packets of a request. Numbers are given in the order of the requests, from 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub struct ExchangeId(pub u64);

impl fmt::Display for ExchangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Connections that share numbers of requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Scope {
    /// A connection.
    Conn(u64),
    /// Connections of a path of RTRS.
    Path(Uuid),
    /// Connections from one address to another, with a number of the service.
    Pair(IpAddr, IpAddr, u64),
}

/// Kind of a number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Number {
    /// Chunk of an RTRS server.
    Chunk,
    /// Bits of an RTRS immediate that have the chunk, if it is not known how many they are.
    RawChunk,
    /// Remote key of memory that a request is about.
    RemoteKey,
    /// Sequence number of an RDS message.
    Sequence,
    /// Cookie of LNet that the side with this address made.
    Cookie(IpAddr),
    /// Object of an LNet handle.
    Handle,
    /// Request of SIDR.
    Sidr,
}

/// Key of an exchange.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Key(pub Scope, pub Number, pub u64);

/// Request that an exchange began with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Note {
    /// Nothing to remember.
    None,
    /// RNBD message of this type.
    Rnbd(u16),
    /// Cookie of an LNet transfer.
    Cookie(u64),
}

/// Open exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Open {
    pub(crate) id: ExchangeId,
    /// Frame of the request.
    pub(crate) frame: u64,
    /// Time of the request.
    pub(crate) time_ns: u64,
    pub(crate) note: Note,
}

impl Open {
    /// Describes the request as seen from a packet of its answer.
    pub(crate) fn describe(&self, now_ns: u64) -> String {
        let us = now_ns.saturating_sub(self.time_ns) / 1000;
        format!("frame {}, {us} us before", self.frame)
    }
}

/// Table of open exchanges.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    last: u64,
    open: BTreeMap<Key, (u64, Open)>,
    /// Keys by the order in which they were entered.
    order: BTreeMap<u64, Key>,
    entered: u64,
}

impl Exchanges {
    /// Returns a new number.
    pub(crate) fn fresh(&mut self) -> ExchangeId {
        self.last += 1;
        ExchangeId(self.last)
    }

    /// Enters an exchange under a key. One that was there before is replaced.
    pub(crate) fn enter(&mut self, key: Key, open: Open) {
        self.entered += 1;
        if let Some((order, _)) = self.open.insert(key, (self.entered, open)) {
            self.order.remove(&order);
        }
        self.order.insert(self.entered, key);
        while self.order.len() > MAX_OPEN {
            if let Some((_, oldest)) = self.order.pop_first() {
                self.open.remove(&oldest);
            }
        }
    }

    /// Returns the exchange of a key.
    pub(crate) fn get(&self, key: Key) -> Option<Open> {
        self.open.get(&key).map(|(_, open)| *open)
    }

    /// Removes and returns the exchange of a key.
    pub(crate) fn take(&mut self, key: Key) -> Option<Open> {
        let (order, open) = self.open.remove(&key)?;
        self.order.remove(&order);
        Some(open)
    }

    /// Returns how many keys are open.
    #[cfg(test)]
    fn len(&self) -> usize {
        assert_eq!(self.open.len(), self.order.len());
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(id: ExchangeId) -> Open {
        Open {
            id,
            frame: id.0,
            time_ns: 0,
            note: Note::None,
        }
    }

    #[test]
    fn the_oldest_are_dropped() {
        let mut all = Exchanges::default();
        let key = |n: usize| Key(Scope::Conn(1), Number::Chunk, n as u64);
        for n in 0..MAX_OPEN + 10 {
            let id = all.fresh();
            all.enter(key(n), open(id));
            all.enter(key(0), open(id));
        }
        assert_eq!(all.len(), MAX_OPEN);
        assert!(all.get(key(0)).is_some() && all.get(key(1)).is_none());
        assert!(all.take(key(MAX_OPEN)).is_some() && all.take(key(MAX_OPEN)).is_none());
        assert_eq!(all.len(), MAX_OPEN - 1);
    }
}
