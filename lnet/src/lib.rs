//! LNet over RDMA, wire-compatible with Lustre's `ko2iblnd`.
//!
//! - [`proto`]: messages of o2iblnd, headers of LNet, ping information, private data of connections.
#![forbid(unsafe_code)]

pub mod proto;
