//! RoCE packets as fields and one-line summaries.
//!
//! [`Dissector`] takes the packets of a capture in their order. It learns connections and their services from the connection manager's
//! messages, or recognizes them by what they send, puts messages of several packets together, and returns a [`Dissection`] of each packet: its [`Layer`]s, the outermost first, and
//! the number of the [exchange](ExchangeId) that it belongs to. All packets of a request have the same one: its data, its answer, and the
//! acknowledgements.
//!
//! | layer | contents |
//! | --- | --- |
//! | `BTH` | base transport header and extended headers |
//! | `MAD`, `CM`, `RDMA_CM` | management datagrams, messages of the connection manager, RDMA_CM's header in their private data |
//! | `RTRS`, `RNBD` | connection and session information, requests and responses, heartbeats; block requests |
//! | `RDS` | messages and fragments, acknowledgements, congestion maps |
//! | `LNet` | messages of o2iblnd with LNet's headers, bulk data |
//! | `message` | which part of a message the packet is |
//! | other names | messages of services that have no dissector |
//!
//! Packets are untrusted input: no bytes panic, memory is bounded, and bytes that no layer understands are fields with the name
//! [`NOT_UNDERSTOOD`].
#![forbid(unsafe_code)]

mod conns;
mod cx;
mod dissector;
mod exchange;
mod field;
mod flow;
mod layers;
mod paths;
mod rds_part;
mod recognize;
mod service;

pub use cx::Meta;
pub use dissector::Dissector;
pub use exchange::ExchangeId;
pub use field::{Base, Dissection, Field, Layer, NOT_UNDERSTOOD};
pub use service::Service;
