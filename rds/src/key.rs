//! Names of connections.

use core::{fmt, net::IpAddr};

/// Name of a connection: there is one for each pair of addresses and type of service.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PairKey {
    /// Address of this node.
    pub local: IpAddr,
    /// Address of the peer.
    pub remote: IpAddr,
    /// Type of service.
    pub tos: u8,
}

impl fmt::Display for PairKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}, tos {}", self.local, self.remote, self.tos)
    }
}
