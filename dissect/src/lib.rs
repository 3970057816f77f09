//! RoCE packets as fields and one-line summaries.
//!
//! [`Dissector`] takes the packets of a capture in their order. It learns connections and their services from the connection manager's
//! messages, or recognizes them by what they send, puts messages of several packets together, and returns a [`Dissection`] of each packet: its [`Layer`]s, the outermost first, and
//! the number of the [exchange](ExchangeId) that it belongs to. All packets of a request have the same one: its data, its answer, and the
//! acknowledgements.
//!
//! [`ProtocolJudge`] judges RDS and LNet in captures: [`checker`] is `roce_pcap`'s with its rules.
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
//! ```
//! use ferroce_dissect::{Dissector, Meta};
//! use roce_bth::Packet;
//!
//! // An acknowledgement, with its ICRC.
//! let payload = [0x11, 0, 0xff, 0xff, 0, 0, 0, 17, 0, 0, 0, 5, 0x1f, 0, 0, 3, 0, 0, 0, 0];
//! let (src, dst) = ("10.0.0.1:50000".parse()?, "10.0.0.2:4791".parse()?);
//! let meta = Meta { frame: 1, time_ns: 0, src, dst };
//! let dissection = Dissector::new().packet(&meta, &Packet::parse(&payload)?);
//! assert_eq!(dissection.summary(), "RC Acknowledge qp 0x000011 psn 0x000005 ack msn 0x000003");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Packets are untrusted input: no bytes panic, memory is bounded, and bytes that no layer understands are fields with the name
//! [`NOT_UNDERSTOOD`].
#![forbid(unsafe_code)]

mod conns;
mod credits;
mod cx;
mod dissector;
mod exchange;
mod field;
mod flow;
mod judge;
mod layers;
mod paths;
mod rds_part;
mod recognize;
mod service;

pub use cx::Meta;
pub use dissector::Dissector;
pub use exchange::ExchangeId;
pub use field::{Base, Dissection, Field, Layer, NOT_UNDERSTOOD};
pub use judge::{ProtocolJudge, check_file, check_reader, checker};
pub use roce_pcap::Service;
