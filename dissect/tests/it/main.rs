//! Captures of kernels and of odd peers, and changed bytes.

mod captures;
mod common;
mod damage;
mod exchanges;
mod golden;
mod judged;
mod odd;
#[path = "../../../roce/pcap/tests/support/sent.rs"]
mod packets;
mod recognized;
mod sent;
mod trees;
