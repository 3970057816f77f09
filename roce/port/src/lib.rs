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
//! Everything in a datagram is the peer's word and checked: addresses against the queue pair's path, the ICRC, every
//! header. What does not pass is dropped and counted under its reason ([`PortCounters`]).
#![forbid(unsafe_code)]

mod batch;
mod bring_up;
mod cm;
mod cnp;
mod config;
mod counters;
mod entry;
mod gsi;
mod gso;
mod ident;
mod mcast;
mod message;
mod parting;
mod peer;
mod persist;
mod port;
mod post;
mod qpn;
mod rx;
mod steering;
mod timers;
mod tx;

pub use batch::{MAX_SEGMENTS, MAX_TRAIN_BYTES, Train, TxBatch, TxConfig};
pub use cm::PortChange;
pub use config::{PortConfig, QpInit};
pub use counters::PortCounters;
pub use gsi::{Agreement, Arrival, GsiDrop, GsiRouter, Placement, check_gsi};
pub use message::{FromShard, HandedOver, Offer, QpCommand, QpKey, ToShard};
pub use persist::{Persisted, Persisting};
pub use port::Port;
pub use qpn::{QpnParts, QpnRange, QpnSlot};
pub use roce_cm::{
    AcceptArgs, CmConfig, ConnChange, ConnId, ConnTransport, ConnectArgs, Event as CmEventKind, ListenArgs, ListenId,
    RemoteQp, ResolveArgs, SidrAnswer,
    cma::{PortSpace, ServiceId},
};
pub use rx::RxMeta;
pub use steering::{Forwarded, Numbers, Recipient, Recipients, Steering, dest_qpn};
