//! RDMA_CM for programs that use librdmacm.
//!
//! librdmacm itself is unchanged. This replaces the kernel below it: librdmacm writes fixed structures (`abi`) to the descriptor of
//! an event channel. `ffi` intercepts those writes, `ucma` owns ids, channels and events (the kernel's `ucma.c` and the part of
//! `cma.c` above the connection manager), `backend` is the interface to the transport, and `facade` implements it over `roce`. Synchronous ids, `rdma_getaddrinfo`, `rdma_create_ep` and rsockets are
//! librdmacm's own.

pub(crate) mod abi;
mod addr;
mod backend;
mod command;
mod connect;
mod context;
mod event;
mod event_channel;
mod facade;
mod fd_set;
pub(crate) mod ffi;
pub(crate) mod forward;
mod multicast;
mod neighbour;
mod ports;
mod qp_attr;
mod query;
mod resolve;
mod state;
#[cfg(test)]
mod tests;
mod ucma;

use crate::ret::{Errno, Result};
