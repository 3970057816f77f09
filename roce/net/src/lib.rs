//! Datapaths that drive a port: UDP sockets today; raw IP and AF_PACKET fit behind the same [`Datapath`] trait.

mod clock;
mod datapath;
mod driver;
mod engine;
pub mod environment;
pub mod gids;
mod group;
pub mod holder;
pub mod iface;
pub mod links;
mod sys;
mod udp;
mod wake;

pub use clock::now;
pub use datapath::{Burst, Capabilities, DEFAULT_HOP_LIMIT, Datagram, Datapath, DatapathCounters, Received, Sent};
pub use driver::{Closed, Driver, DriverConfig, TAKEOVER};
pub use engine::{EventSink, Tap};
pub use sys::{EventFd, Thread, start_thread, udp_socket, wait_readable};
pub use udp::{OpenError, OpenSockets, UdpConfig, UdpDatapath};
