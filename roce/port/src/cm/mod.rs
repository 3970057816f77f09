//! IB communication management: MADs and the connection manager's state machine, without sockets, clocks or threads.
//!
//! [`mad`] holds the wire format (IBA volume 1, chapter 12; the kernel's `ibta_vol1_c12.h`): checked parsing of
//! 256-byte MADs into plain structs and emission from them. [`cma`] is the header that RDMA_CM puts into the private data
//! of a REQ (IBA Annex A11; the kernel's `cma.c`). [`Manager`] is the state machine (IBA 12.9; the kernel's `cm.c`), with
//! service ID resolution for datagrams (SIDR) next to it: time and MADs are arguments, MADs and [`Event`]s are polled.
//! [`Translation`] proves from a request that its addresses were translated on the way (NAT).
//!
//! It knows queue pairs by number only: `roce-port` moves them through their states as the events ask for. It checks no ICRC:
//! MADs come from packets that have been checked.

pub mod cma;
mod counters;
pub mod datagram;
mod drops;
pub mod guid;
mod half_open;
pub mod mad;
mod manager;
pub mod requests;
mod text;
mod translation;
mod types;

pub use counters::Counters;
pub use drops::DropReason;
pub use manager::{Manager, state};
pub use roce_verbs::provider::{ConnParams, RejectReason};
pub use translation::{Translation, TranslationWatch};
pub use types::{
    AcceptArgs, CmConfig, ConnChange, ConnId, ConnTransport, ConnectArgs, Event, ListenArgs, ListenId, LocalQp, OutMad,
    RateLimit, RemoteQp, ResolveArgs, SidrAnswer, Usage, overlap,
};
