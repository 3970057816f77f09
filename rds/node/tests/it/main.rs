//! A node process and its programs, on loopback addresses.

mod crash;
mod limits;
mod rdma;
mod sockets;
mod support;
