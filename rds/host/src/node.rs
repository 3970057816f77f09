//! Node with a thread of its own.

use std::{
    fmt, io,
    net::IpAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use rds::{Config, ConnectionInfo, Node};
use roce::{DeviceConfig, Hardware};

use crate::{socket::Socket, thread::Thread};

/// Options of a node.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Device at the node's address, in software.
    pub device: DeviceConfig,
    /// Settings of the protocol. [`Config::first_sequence`] is the time, unless it is set.
    pub config: Config,
}

impl NodeOptions {
    /// Returns the usual options at an address of this host.
    pub fn new(addr: IpAddr) -> Self {
        Self {
            device: DeviceConfig::new(addr),
            config: Config {
                first_sequence: first_sequence(),
                ..Config::default()
            },
        }
    }
}

/// Sequence numbers grow over restarts: a peer drops what seems to have come before.
fn first_sequence() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_millis() as u64) << 20
}

/// RDS at an address of this host: the connections to all peers, and sockets. Clones are handles of the same node, which ends with the
/// last handle and socket.
///
/// One process has the connections of an address, since peers know a connection by its addresses. A second node at an address is refused.
#[derive(Clone)]
pub struct RdsNode(Arc<Thread>);

impl fmt::Debug for RdsNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdsNode").field("addr", &self.0.addr()).finish()
    }
}

impl RdsNode {
    /// Opens a node, and waits until it listens.
    ///
    /// # Errors
    /// When the address is not one of this host's, or has a node or another owner of UDP port 4791 already.
    pub fn open(options: NodeOptions) -> io::Result<Self> {
        Self::open_on(options, None)
    }

    /// Opens a node on the RDMA device that has its address; without one in software, as [`open`](Self::open) does.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); when the device refuses.
    pub fn open_on(options: NodeOptions, rdma: Option<Box<dyn Hardware>>) -> io::Result<Self> {
        let NodeOptions { device, config } = options;
        Ok(Self(Arc::new(Thread::start(device, rdma, config)?)))
    }

    /// Address of the node.
    pub fn addr(&self) -> IpAddr {
        self.0.addr()
    }

    /// Creates a socket.
    ///
    /// # Errors
    /// When the node has ended, or has as many sockets as it may have.
    pub fn socket(&self) -> io::Result<Socket> {
        let id = self.0.call(Node::socket)?;
        Ok(Socket::new(self.0.clone(), id))
    }

    /// Returns the node's connections.
    ///
    /// # Errors
    /// When the node has ended.
    pub fn connections(&self) -> io::Result<Vec<ConnectionInfo>> {
        self.0.call(|node| Ok(node.connections().collect()))
    }
}
