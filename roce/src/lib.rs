//! RoCEv2 in userspace: a verbs device on ordinary UDP sockets, on the wire what hardware RoCE and Linux's rdma_rxe speak.
//!
//! Two devices of this process, of which one writes into the other's memory. On two machines each has its half:
//!
//! ```
//! use std::net::{IpAddr, SocketAddr};
//!
//! use roce::{
//!     AccessFlags, CmEventKind, ConnParams, Device, DeviceConfig, Payload, QpInit, RemoteAddr, SendFlags, SendOp, SendWr,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The server: memory that peers may write, a queue pair, and a listener.
//! let addr: IpAddr = "127.0.0.2".parse()?;
//! # let addr: IpAddr = ferroce_loopback::address().into();
//! let server = Device::open(DeviceConfig::new(addr))?;
//! let pd = server.alloc_pd()?;
//! let target = server.alloc_mr(&pd, 4096, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE)?;
//! let cq = server.create_cq(16, None, 0)?;
//! let accepting = server.create_qp(&pd, &QpInit::new(&cq))?;
//! let requests = server.create_cm_channel()?;
//! let _listener = server.listen(&requests, SocketAddr::new(addr, 7000), 16)?;
//!
//! // The client connects.
//! let own: IpAddr = "127.0.0.1".parse()?;
//! # let own: IpAddr = ferroce_loopback::address().into();
//! let client = Device::open(DeviceConfig::new(own))?;
//! let pd = client.alloc_pd()?;
//! let cq = client.create_cq(16, None, 0)?;
//! let qp = client.create_qp(&pd, &QpInit::new(&cq))?;
//! let events = client.create_cm_channel()?;
//! let id = client.connect(&events, None, SocketAddr::new(addr, 7000), &qp, ConnParams::default())?;
//!
//! // The server accepts, and reports in the private data where its memory is.
//! let request = requests.wait(None)?.expect("waits until there is one");
//! if let CmEventKind::Request { .. } = request.kind {
//!     let private_data = [target.addr().to_be_bytes().as_slice(), &target.rkey().0.to_be_bytes()].concat();
//!     request.id.accept(&accepting, ConnParams { private_data, ..ConnParams::default() })?;
//! }
//! let CmEventKind::Established { private_data, .. } = events.wait(None)?.expect("the answer").kind else {
//!     return Err("not accepted".into());
//! };
//!
//! // One RDMA WRITE of bytes that are copied into the work request, and its completion.
//! let remote = RemoteAddr {
//!     addr: u64::from_be_bytes(private_data[..8].try_into()?),
//!     rkey: roce::RKey(u32::from_be_bytes(private_data[8..12].try_into()?)),
//! };
//! let write = SendWr {
//!     wr_id: 1,
//!     op: SendOp::Write(remote),
//!     flags: SendFlags::SIGNALED,
//!     payload: Payload::Inline(b"hello"),
//! };
//! qp.post_send(&[write]).map_err(|(_, refused)| refused)?;
//! let mut completions = Vec::new();
//! while cq.poll(&mut completions, 16)? == 0 {}
//! assert!(completions[0].is_ok());
//!
//! let mut bytes = [0; 5];
//! target.read(0, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! id.disconnect()?;
//! # Ok(())
//! # }
//! ```
//!
//! Whole programs are in the crate's `examples`: `rc_server` and `rc_client`, `events` (a server that sleeps until a descriptor is
//! readable), `async_echo` (the same on tokio), and `event_loop` (without a thread of the device's).
//!
//! # Overview
//!
//! [`Device::open`] binds UDP port 4791 of an address. One process has it then; processes that share an address each open it with
//! [`Device::open_shared`].
//! A device makes protection domains ([`Pd`]), memory regions ([`Mr`])
//! and windows ([`Mw`]), completion queues ([`Cq`]) and channels ([`Channel`]), queue pairs of every service ([`Qp`]),
//! shared receive queues ([`Srq`]), XRC domains ([`Xrcd`]), address handles ([`AddressHandle`]) and connections ([`Id`],
//! with their events on an [`EventChannel`]). Methods correspond to
//! calls of libibverbs and librdmacm.
//!
//! Queue pairs are connected through the connection manager ([`Device::connect`], [`Device::listen`]), or by hand with
//! [`Qp::modify`] from what the programs told each other. With the methods of an [`EventChannel`] the connection manager serves programs that
//! move their queue pairs themselves (librdmacm's), and datagram services.
//!
//! A connection stays up as long as its [`Id`] or its queue pair. With the feature `tokio` completions and events are futures too
//! (module `aio`). Two features are on by default: `broker` ([`Device::open_shared`]; without it there is no [`JoinConfig`], and one process
//! has an address) and `pcap` ([`DeviceConfig::pcap`] and [`ring`]; without it a device with a capture is refused). Without both, a program has 48 crates instead
//! of 61.
//!
//! What a forked child has of its parent's devices is dead there: calls fail, and drops do nothing.
//!
//! [`LocalDevice`] is for programs with a loop of their own: no thread, no lock, and nothing is sent but when the loop says so. It
//! is used through [`verbs::provider::Provider`]. Several loops can have the same addresses ([`LocalDevice::open_shards`]), and so
//! can several processes ([`LocalDevice::open_shared`]). Loops that run get further addresses by an [`Opener`].
//!
//! # When something fails, or nothing happens
//!
//! - A completion has a status only. [`Qp::take_failure`] has the reason as a line of text, on both sides: which operation of whom was
//!   refused, and what was wrong with its key, address or length. Completions after the first error are [`WcStatus::FlushError`].
//! - An event's `Display` tells why a connection failed: `rejected: nothing listens at the service ID`.
//! - A SEND without completion may have met no receive ([`Qp::post_recv`]), or lacks [`SendFlags::SIGNALED`] ([`Qp::post_send`]).
//! - A connection that ends at once had its [`Id`] and queue pair dropped on one side.
//! - [`DeviceConfig::pcap`] writes all packets to a capture, [`DeviceConfig::ring`] keeps the last ones for when something fails, and [tracing](https://docs.rs/tracing) events tell what was dropped.
//!
//! # Memory and locks
//!
//! Registered memory may be changed by peers at any time: it is owned by a region and only ever copied.
//! [`Device::register_mr`] takes the program's own memory, and is `unsafe` for that reason.
//!
//! **Locks.** One lock protects the port of a [`Device`]; it is taken by posting, by polling an empty completion queue, by creating
//! and dropping objects, and by the background thread. `roce_net::Driver` tells the order of the locks. With several engines
//! ([`DeviceConfig::shards`]) each has one, so that threads with queue pairs and completion queues of their own don't meet.

#[macro_use]
mod debug;

mod ah;
#[cfg(feature = "tokio")]
pub mod aio;
#[cfg(not(feature = "broker"))]
pub mod broker;
mod cm;
mod config;
mod cq;
mod device;
mod engines;
mod error;
mod faults;
mod group;
mod joined;
mod local;
mod memory;
mod open;
mod opener;
mod qp;
mod queue;
pub mod reactor;
#[cfg(feature = "pcap")]
pub mod ring;
mod router;
mod shards;
mod srq;
mod stats;
mod sync;
mod tap;
mod view;

#[cfg(feature = "broker")]
pub use roce_broker as broker;

pub use ah::{AddressHandle, NetworkHeader};
pub use broker::JoinConfig;
pub use cm::{CmEvent, EventChannel, Id, PortHold};
pub use config::{DeviceConfig, Services};
pub use cq::{Channel, Cq};
pub use device::Device;
pub use group::Membership;
pub use local::LocalDevice;
pub use memory::{Mr, Mw, Pd, Reregister, Revocable};
pub use opener::{NewDevice, Opener};
pub use qp::{Grant, Qp, QpInit, QpOptions};
pub use roce_fault::{self as fault, Faults};
pub use roce_net::{
    DatapathCounters, DatapathKind, EventFd, FaultControl, FaultRequest, Flush, OpenSockets, RuleStatus, Spin,
    SpinMode, Thread, UnknownDatapath, VlanId, environment, gids, iface, links, names, neighbours, now,
    process_socket::ProcessName,
};
pub use roce_port::fabric::{DeviceName, Hardware, Usage};
pub use roce_port::{
    AcceptArgs, Arrival, CmEventKind, ConnTransport, ConnectArgs, ListenArgs, LocalQp, Placement, PortCounters,
    PortSpace, QpnParts, QpnSlot, RemoteQp, ResolveArgs, RxMeta, ServiceId, SidrAnswer,
};
pub use roce_qp::{Failure, Notify, WindowConfig};
pub use roce_verbs as verbs;
pub use roce_verbs::mem::{Pages, Persist, WindowKind};
pub use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Datagram, DeviceLimits, LKey, Mtu, PKey, Payload, Psn, QKey,
    QpAttr, QpCaps, QpState, QpType, Qpn, RKey, RecvWr, RemoteAddr, RnrTimer, SendFlags, SendOp, SendRequest, SendWr,
    Sge, SrqAttr, SrqModify, SrqType, Srqn, Target, WcFlags, WcOpcode, WcStatus, counters,
    provider::{ConnParams, NoAnswer, RangeError, RejectReason, VerbsError},
    wr::PostError,
};
pub use srq::{Srq, SrqInit, Xrcd};
pub use stats::DeviceStats;
pub use view::LinkState;
