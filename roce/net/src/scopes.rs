//! Interfaces of local addresses, for destinations that mean nothing without one.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use roce_port::Train;
use roce_verbs::Instant;

use crate::{clock, iface, sys::Origin};

/// Time for which the interface of a local address is not looked up again: an address may move to another one.
const AGE: Duration = Duration::from_secs(1);

/// Interfaces of local addresses from which link-local and multicast packets were sent.
pub(crate) struct Scopes {
    known: HashMap<IpAddr, u32>,
    since: Instant,
}

impl Default for Scopes {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            since: Instant::ZERO,
        }
    }
}

impl Scopes {
    /// Notes the interface of a train's local address, if its destination needs one.
    pub(crate) fn note(&mut self, train: &Train<'_>) {
        if !Origin::needs_scope(train.remote.ip()) {
            return;
        }
        let now = clock::now();
        if now.saturating_since(self.since) > AGE {
            self.since = now;
            self.known.clear();
        }
        if !self.known.contains_key(&train.local)
            && let Ok(index) = iface::index_of(train.local)
        {
            self.known.insert(train.local, index);
        }
    }

    /// Returns the source of packets of a socket. `any`: it is bound to all addresses.
    pub(crate) fn origin(&self, any: bool) -> Origin<'_> {
        Origin {
            any,
            scopes: &self.known,
        }
    }
}
