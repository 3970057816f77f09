//! RoCEv2 in userspace: a verbs device on ordinary UDP sockets, on the wire what hardware RoCE and Linux's rdma_rxe speak.
//!
//! [`Device::open`] binds UDP port 4791 of an address. A device makes protection domains ([`Pd`]), memory regions ([`Mr`])
//! and windows ([`Mw`]), completion queues ([`Cq`]) and channels ([`Channel`]), queue pairs of every service ([`Qp`]),
//! shared receive queues ([`Srq`]), XRC domains ([`Xrcd`]), address handles ([`AddressHandle`]) and connections ([`Id`],
//! with their events on an [`EventChannel`]). What reliable connections do is in the traits of [`verbs::provider`],
//! re-exported here; everything else are methods of their own, one for each call of libibverbs.
//!
//! Queue pairs are connected through the connection manager ([`VerbsDevice::connect`], [`VerbsDevice::listen`]), or by hand with
//! [`QueuePair::modify`] from what the programs told each other. [`RawCm`] is the connection manager for programs that bring
//! their queue pairs up themselves (librdmacm's), and for datagram services.
//!
//! What a forked child has of its parent's devices is dead there: calls fail, and drops do nothing.
//!
//! [`LocalDevice`] is for programs with a loop of their own: no thread, no lock, and nothing is sent but when the loop says so. It
//! is used through [`verbs::provider::Provider`]. Several loops can have the same addresses ([`LocalDevice::open_shards`]), and so
//! can several processes ([`LocalDevice::open_shared`]). Loops that run get further addresses by an [`Opener`].
//!
//! Registered memory may be changed by peers at any time: it is owned by a region and only ever copied.
//! [`Device::register_mr`] takes the program's own memory, and is `unsafe` for that reason.
//!
//! **Locks.** One lock protects the port of a [`Device`]; it is taken by posting, by polling an empty completion queue, by creating
//! and dropping objects, and by the background thread. `roce_net::Driver` tells the order of the locks. With several engines
//! ([`DeviceConfig::shards`]) each has one, so that threads with queue pairs and completion queues of their own don't meet.

mod ah;
mod cm;
mod cq;
mod device;
mod engines;
mod joined;
mod local;
mod member;
mod memory;
mod open;
mod opener;
mod port;
mod provider;
mod qp;
mod queue;
mod rawcm;
mod shards;
mod shared;
mod srq;
mod tap;

pub use ah::{AddressHandle, NetworkHeader};
pub use cm::{EventChannel, Id};
pub use cq::{Channel, Cq};
pub use device::{Device, DeviceConfig, DeviceStats, Services};
pub use local::LocalDevice;
pub use memory::{Mr, Mw, Pd, Reregister, Revocable};
pub use opener::{NewDevice, Opener};
pub use port::{GidEntry, LinkState, Membership, PortAttr};
pub use qp::{Qp, QpOptions};
pub use rawcm::{PortHold, RawCm, RawEvent, RawId};
pub use roce_broker::{self as broker, JoinConfig};
pub use roce_local::Usage;
pub use roce_mem::{Pages, Persist, WindowKind};
pub use roce_net::{
    DatapathCounters, EventFd, Flush, OpenSockets, Spin, SpinMode, Thread, environment, gids, iface, links, neighbours,
    now,
};
pub use roce_port::{
    AcceptArgs, ConnTransport, ConnectArgs, ListenArgs, PortCounters, PortSpace, QpnParts, QpnSlot, RawCmEvent,
    RemoteQp, ResolveArgs, RxMeta, ServiceId, SidrAnswer,
};
pub use roce_qp::{Notify, WindowConfig};
pub use roce_verbs as verbs;
pub use roce_verbs::{
    AccessFlags, AddressVector, AsyncEvent, Completion, Datagram, DeviceLimits, LKey, Mtu, PKey, Payload, Psn, QKey,
    QpAttr, QpCaps, QpState, QpType, Qpn, RKey, RecvWr, RemoteAddr, RnrTimer, SendFlags, SendOp, SendRequest, SendWr,
    Sge, SrqAttr, SrqModify, SrqType, Srqn, Target, ToRts, WcFlags, WcOpcode, WcStatus,
    provider::{
        CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, ConnParams, Grant, MemoryRegion,
        QpInit, QueuePair, RejectReason, RevocableRegion, VerbsDevice, VerbsError,
    },
    wr::PostError,
};
pub use shards::{Arrival, Placement};
pub use srq::{Srq, SrqInit, Xrcd};
