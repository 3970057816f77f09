//! Captures of RoCEv2 traffic. [`Capture`] reads pcap and pcapng files, also compressed with gzip or zstd; [`decode`] takes a
//! frame apart, down to the datagram in the innermost tunnel; [`check_file`] reports the faults of a capture. [`Writer`] creates
//! one of packets, [`PcapNgWriter`] one of frames, with copies of those of other captures and comments on them.
//!
//! [`Survey`] is the first of two readings of a file, whose findings the second one has for each frame: [`annotate`] writes them
//! into a copy as comments, a [`Selection`] chooses frames, and [`split()`] makes a file of each conversation.
//! [`anonymize()`] copies without addresses, keys and data.
//!
//! Frames, headers and ICRCs are checked one by one; [`judge`] follows the conversations and tells which rule is broken, and by
//! whom; [`Flows`] makes statistics of them. It knows no engine: `roce-replay` compares what ours sends with a capture. A capture is untrusted input like any
//! packet: whatever its bytes are, the answer is an error or a finding.
#![forbid(unsafe_code)]

#[cfg(feature = "reader")]
mod annotate;
#[cfg(feature = "reader")]
mod anonymize;
#[cfg(feature = "reader")]
mod check;
#[cfg(feature = "reader")]
mod checker;
mod create;
#[cfg(feature = "reader")]
mod finding;
#[cfg(feature = "reader")]
mod flows;
#[cfg(feature = "reader")]
mod frame;
#[cfg(feature = "reader")]
mod frame_error;
#[cfg(feature = "reader")]
mod input;
#[cfg(feature = "reader")]
mod interface;
#[cfg(feature = "reader")]
pub mod judge;
#[cfg(feature = "reader")]
mod link;
#[cfg(feature = "reader")]
mod pcapng;
#[cfg(feature = "reader")]
mod pcapng_writer;
#[cfg(feature = "reader")]
mod reader;
#[cfg(feature = "reader")]
mod report;
#[cfg(feature = "reader")]
mod rule;
#[cfg(feature = "reader")]
mod segments;
#[cfg(feature = "reader")]
mod select;
#[cfg(feature = "reader")]
mod service;
#[cfg(feature = "reader")]
mod severity;
#[cfg(feature = "reader")]
mod split;
#[cfg(feature = "reader")]
mod summary;
#[cfg(feature = "reader")]
mod survey;
#[cfg(feature = "reader")]
mod tunnel;
#[cfg(feature = "reader")]
mod verdict;
mod writer;

#[cfg(feature = "reader")]
pub use annotate::{annotate, comments};
#[cfg(feature = "reader")]
pub use anonymize::{Anonymized, Filling, Settings, anonymize};
#[cfg(feature = "reader")]
pub use checker::{Checker, Setup, check, check_file, check_file_with, check_reader};
pub use create::{append_private, create_private};
#[cfg(feature = "reader")]
pub use finding::{Finding, Findings, MAX_FINDINGS};
#[cfg(feature = "reader")]
pub use flows::{Flow, FlowReport, Flows, Latency, MAX_FLOWS, MAX_PORTS, UdpPort};
#[cfg(feature = "reader")]
pub use frame::{Datagram, Ip, decode};
#[cfg(feature = "reader")]
pub use frame_error::FrameError;
#[cfg(feature = "reader")]
pub use interface::Interface;
#[cfg(feature = "reader")]
pub use link::{Direction, LinkType};
#[cfg(feature = "reader")]
pub use pcapng_writer::{PcapNgWriter, Record};
#[cfg(feature = "reader")]
pub use reader::{Capture, Error, Frame};
#[cfg(feature = "reader")]
pub use report::{FrameReport, Icrc, Report};
#[cfg(feature = "reader")]
pub use rule::Rule;
#[cfg(feature = "reader")]
pub use select::Selection;
#[cfg(feature = "reader")]
pub use service::Service;
#[cfg(feature = "reader")]
pub use severity::{Fault, Severity};
#[cfg(feature = "reader")]
pub use split::{Part, split};
#[cfg(feature = "reader")]
pub use summary::{EXT_HEADERS, Excerpt, FrameSummary, HeaderSummary, PacketSummary};
#[cfg(feature = "reader")]
pub use survey::{Reviewed, Reviewer, Survey};
#[cfg(feature = "reader")]
pub use verdict::Verdict;
pub use writer::Writer;
