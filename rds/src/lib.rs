//! RDS (Reliable Datagram Sockets) over RDMA, wire-compatible with Linux's `rds_rdma`.
//!
//! - [`proto`]: headers, extension headers, congestion maps, private data of connections.
#![forbid(unsafe_code)]

pub mod proto;
