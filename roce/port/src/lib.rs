//! One RoCE port: queue pairs of every service behind a set of IP addresses, the general service interface (QP1) with the connection
//! manager, and the rules of the wire (ICRC, UDP source ports, segmentation into GSO trains).
//!
//! [`Port`] is sans-IO. A driver feeds it datagrams ([`Port::handle_datagram`]) and the time
//! ([`Port::handle_timeout`] when [`Port::poll_timeout`] says so), and takes what it has to send
//! ([`Port::poll_transmit`]) and its events ([`Port::poll_cm_event`], [`Port::poll_async_event`]; completions go into the
//! completion queues). After any call there may be something to send and another timeout.
//!
//! An address may have several ports: *shards*, each with a range of queue pair numbers. They exchange messages ([`ToShard`],
//! [`FromShard`]) with each other and with the GSI, which has QP1 and the connection manager. Engines of one device have one GSI
//! between them ([`Port::leave_gsi`]); loops and processes have one each, for a range of communication IDs.
//!
//! [`cm`] is the connection manager's wire format and state machine. [`fabric`] makes of one or more ports, and of RDMA devices of the
//! host, the [`Provider`](roce_verbs::provider::Provider) that a loop has. Neither it nor anything else here knows sockets, clocks,
//! threads, or libibverbs.
//!
//! Everything in a datagram is the peer's word and checked: addresses against the queue pair's path, the ICRC, every
//! header. What does not pass is dropped and counted under its reason ([`PortCounters`]).
#![forbid(unsafe_code)]

mod batch;
mod bring_up;
pub mod cm;
mod cnp;
mod config;
mod connections;
mod counters;
mod entry;
pub mod fabric;
mod gsi;
mod gso;
mod ident;
mod mcast;
mod message;
mod meta;
mod parting;
mod path;
mod peer;
mod persist;
mod port;
mod qpn;
mod qps;
mod rx;
mod steering;
mod tx;

pub use crate::cm::{
    AcceptArgs, CmConfig, ConnChange, ConnId, ConnTransport, ConnectArgs, Event as CmEventKind, ListenArgs, ListenId,
    LocalQp, RemoteQp, ResolveArgs, SidrAnswer,
    cma::{PortSpace, ServiceId},
};
pub use batch::{MAX_SEGMENTS, MAX_TRAIN_BYTES, Train, TxBatch, TxConfig};
pub use config::{PortConfig, QpInit};
pub use connections::PortChange;
pub use counters::{ErrorCounts, PortCounters};
pub use gsi::{Arrival, GsiRouter, Placement};
pub use message::{FromShard, HandedOver, Offer, QpCommand, QpKey, ToShard};
pub use meta::RxMeta;
pub use persist::{Persisted, Persisting};
pub use port::Port;
pub use qpn::{QpnParts, QpnRange, QpnSlot};
pub use steering::{Forwarded, Numbers, Recipient, Recipients, Steering, dest_qpn};
