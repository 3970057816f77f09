//! Datapath and drivers of a port. A [`Datapath`] is UDP sockets today; raw IP and AF_PACKET fit behind the same trait. [`Driver`]
//! shares a port between threads, with a lock and a progress thread; [`LocalDriver`] is for one loop, and has neither.

mod clock;
mod datapath;
mod driver;
mod engine;
pub mod environment;
mod fault_control;
mod faulty;
pub mod gids;
mod group;
pub mod holder;
pub mod iface;
mod inbox;
pub mod links;
mod local;
mod motor;
pub mod names;
pub mod neighbours;
mod persist;
pub mod places;
mod progress;
mod runtime;
mod senders;
mod socket;
pub mod socket_file;
mod spin;
mod steer;
mod sync;
mod sys;
mod udp;
mod undeliverable;
mod unsegmented;
mod wait;
mod wake;

pub use clock::now;
pub use datapath::{
    Burst, Capabilities, DEFAULT_HOP_LIMIT, Datagram, Datapath, DatapathCounters, Received, Sent, Tap, Undeliverable,
};
pub use driver::{Driver, DriverConfig};
pub use engine::EventSink;
pub use fault_control::{FaultControl, FaultRequest, FaultTarget, RuleStatus};
pub use inbox::Inbox;
pub use local::{LocalConfig, LocalDriver};
pub use motor::{Flush, Forward};
pub use progress::Closed;
pub use socket::{OpenError, UdpConfig};
pub use spin::{Spin, SpinMode, Spinning};
pub use steer::steer_group;
pub use sys::{EventFd, Thread, start_thread, udp_socket, wait_readable};
pub use udp::{OpenSockets, UdpDatapath};
pub use wait::{Waiter, wait};
