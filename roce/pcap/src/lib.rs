//! Captures of RoCEv2 traffic: [`Capture`] reads pcap and pcapng files, [`decode`] takes a frame apart, [`check_file`]
//! says what is wrong with one, [`Writer`] makes one.
//!
//! A capture is untrusted input like any packet: whatever its bytes are, the answer is an error or a finding.
#![forbid(unsafe_code)]

mod check;
mod create;
mod frame;
mod pcapng;
mod reader;
mod segments;
mod summary;
mod tunnel;
mod writer;

pub use check::{
    Finding, FrameReport, Icrc, Kind, MAX_FINDINGS, Report, Severity, Verdict, check_file, check_file_with,
    check_reader,
};
pub use create::{append_private, create_private};
pub use frame::{Datagram, FrameError, Ip, LinkType, decode};
pub use reader::{Capture, Error, Frame};
pub use writer::Writer;
