//! Datapath and drivers of a port. A [`Datapath`] is UDP, raw IP or packet sockets ([`DatapathKind`]). [`Driver`]
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
mod intake;
mod kind;
pub mod links;
mod local;
mod losses;
pub mod names;
pub mod neighbours;
mod outgoing;
mod persist;
pub mod places;
pub mod process_socket;
mod progress;
mod raw;
mod scopes;
mod senders;
mod sink;
mod socket;
pub mod socket_file;
mod spin;
mod steer;
mod sync;
mod sys;
mod udp;
mod undeliverable;
mod unix_table;
mod unsegmented;
mod wait;
mod wake;

pub use clock::now;
pub use datapath::{
    Capabilities, DEFAULT_HOP_LIMIT, Datapath, DatapathCounters, Received, Sent, Tap, Trouble, Undeliverable, packets,
};
pub use driver::{Driver, DriverConfig};
pub use fault_control::{FaultControl, FaultRequest, RuleStatus};
pub use inbox::Inbox;
pub use kind::{DatapathKind, UnknownDatapath, VlanId, open_shards};
pub use local::{Flush, Forward, LocalConfig, LocalDriver};
pub use progress::Closed;
pub use raw::AnySource;
pub use roce_port::Train;
pub use sink::EventSink;
pub use socket::{OpenError, UdpConfig};
pub use spin::{Spin, SpinMode, Spinning};
pub use steer::steer_group;
pub use sys::{EventFd, Thread, generation, start_thread, udp_socket, wait_any_readable, wait_readable};
pub use udp::{OpenSockets, UdpDatapath};
pub use wait::{Waiter, wait};
