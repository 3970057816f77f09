//! Captures of RoCEv2 traffic. [`Capture`] reads pcap and pcapng files, also compressed with gzip or zstd; [`decode`] takes a
//! frame apart, down to the datagram in the innermost tunnel; [`check_file`] reports the faults of a capture. [`Writer`] creates
//! one of packets, [`PcapNgWriter`] one of frames, with copies of those of other captures and comments on them.
//!
//! It knows frames, headers and ICRCs, each packet by itself. It knows no connection: `tests/replay` judges whether a packet
//! is the right one. A capture is untrusted input like any packet: whatever its bytes are, the answer is an error or a finding.
#![forbid(unsafe_code)]

#[cfg(feature = "reader")]
mod check;
mod create;
#[cfg(feature = "reader")]
mod frame;
#[cfg(feature = "reader")]
mod frame_error;
#[cfg(feature = "reader")]
mod input;
#[cfg(feature = "reader")]
mod interface;
#[cfg(feature = "reader")]
mod link;
#[cfg(feature = "reader")]
mod pcapng;
#[cfg(feature = "reader")]
mod pcapng_writer;
#[cfg(feature = "reader")]
mod reader;
#[cfg(feature = "reader")]
mod segments;
#[cfg(feature = "reader")]
mod summary;
#[cfg(feature = "reader")]
mod tunnel;
mod writer;

#[cfg(feature = "reader")]
pub use check::{
    Finding, FrameReport, Icrc, Kind, MAX_FINDINGS, Report, Severity, Verdict, check_file, check_file_with,
    check_reader,
};
pub use create::{append_private, create_private};
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
pub use writer::Writer;
