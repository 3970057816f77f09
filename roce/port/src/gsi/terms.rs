//! Extra terms that peers announce in REQ and REP: UDP source ports and selective acknowledgement.

use core::net::IpAddr;

use roce_bth::Qpn;
use roce_cm::RemoteQp;

/// Terms that a peer has announced for its queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Terms {
    /// The peer buffers packets beyond a gap and reports them.
    pub(crate) selective: bool,
    /// UDP source port of all the peer's packets.
    pub(crate) src_port: Option<u16>,
}

impl Terms {
    pub(crate) fn of(path: &RemoteQp) -> Self {
        Self {
            selective: path.keeps_packets,
            src_port: path.src_port,
        }
    }
}

/// Terms of a connection whose queue pair the application moves, for the shard that has the queue pair
/// ([`Port::agree`](crate::Port::agree)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreement {
    pub(crate) qpn: Qpn,
    pub(crate) peer: (IpAddr, Qpn),
    pub(crate) terms: Terms,
}

impl Agreement {
    pub(crate) fn of(qpn: Qpn, path: &RemoteQp) -> Self {
        Self {
            qpn,
            peer: (path.av.remote.to_canonical(), path.qpn),
            terms: Terms::of(path),
        }
    }

    /// Returns our queue pair.
    pub const fn qpn(&self) -> Qpn {
        self.qpn
    }
}
