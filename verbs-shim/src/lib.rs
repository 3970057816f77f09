//! The C ABI of libibverbs and librdmacm (Debian 12, rdma-core 44) over ferroce: preloaded by `ferroce run`, linked, or behind
//! the stubs of libibverbs.so.1 and librdmacm.so.1 that `build.rs` makes (`table`).
//!
//! Programs call the exported functions and the function tables that `verbs_table` fills. Objects are structures that begin with
//! the public C structure, in memory of their kind (`live`); it is followed by handles of the `roce` crate. One transport per process (`engine`)
//! serves all devices; a device is an interface, and its table of GIDs the interface's addresses.
//!
//! `unsafe` here is the boundary itself: pointers to no object are refused, but lists, buffers and attributes that the program
//! passes are what libibverbs' documentation demands, or it crashes, as it would with libibverbs. No panic unwinds into C
//! (`ret`), and no cancelled thread unwinds through frames with destructors (`cancel`).
#![cfg(target_os = "linux")]

mod abi;
mod ah;
mod async_event;
mod attributes;
mod batch;
mod cancel;
mod channel;
mod config;
mod core;
mod cq;
mod cqex;
mod device;
mod engine;
mod errno;
mod events;
mod fork;
mod gids;
mod interpose;
mod live;
mod log;
mod marshall;
mod mcast;
mod mr;
mod mw;
mod pd;
mod pin;
mod port_events;
mod post;
mod qp;
mod qp_verbs;
mod qpattr;
mod query;
mod queue;
pub mod rdmacm;
mod rds;
mod ready_fd;
mod rebind;
mod ret;
mod signals;
mod singleton;
mod srq;
mod strings;
mod symbols;
mod sysfs;
mod table;
#[cfg(test)]
mod tests;
mod unopened;
mod unsupported;
mod verbs_table;
mod worker;
mod wrex;
mod xrc;
