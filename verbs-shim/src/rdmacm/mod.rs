//! RDMA_CM for programs that use librdmacm.
//!
//! librdmacm itself stays as it is. This answers what it would ask the kernel: the fixed structures (`abi`) that it
//! writes to the descriptor of an event channel. `ffi` catches those writes, `ucma` keeps ids, channels and events
//! (the kernel's `ucma.c` and the part of `cma.c` above the connection manager), `backend` is what they need of the
//! transport, and `facade` has it from `roce`. Synchronous ids, `rdma_getaddrinfo`, `rdma_create_ep` and rsockets are
//! librdmacm's own.

pub(crate) mod abi;
mod addr;
mod backend;
mod channel;
mod command;
mod connect;
mod context;
mod event;
mod facade;
pub(crate) mod ffi;
pub(crate) mod forward;
mod multicast;
mod ports;
mod qp_attr;
mod query;
mod reach;
mod resolver;
mod state;
#[cfg(test)]
mod tests;
mod ucma;

use crate::ret::{Errno, Result};
