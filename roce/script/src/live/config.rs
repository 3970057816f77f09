//! Ends of a connection with a live host, and why there is none.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::io;

/// Failure to reach a live host.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// The script's sockets can't be opened.
    #[error(transparent)]
    Sockets(#[from] roce_net::OpenError),
    /// The agent can't be reached.
    #[error("no agent at {addr}: {source}")]
    Agent {
        /// Its address.
        addr: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// The agent speaks another protocol.
    #[error("{0}")]
    Protocol(String),
}

/// Ends of the connection, and the host's agent.
#[derive(Clone, Copy, Debug)]
pub struct LiveConfig {
    /// Address of the host, which its agent uses.
    pub host: IpAddr,
    /// Address of this machine that the script sends from. UDP port 4791 must be free there.
    pub script: IpAddr,
    /// TCP address of the agent.
    pub agent: SocketAddr,
    /// Time that the host may be later than a script says.
    pub lateness: Duration,
    /// The host is ferroce. Before a script it sends a WRITE of no bytes, and is answered, so that it learns the script's UDP source port:
    /// until then it sends one request at a time. It keeps packets beyond a gap.
    pub is_ferroce: bool,
}
