//! [`Provider`](roce_verbs::provider::Provider) over RoCE ports, without I/O: [`Fabric`]. A loop that owns sockets and the
//! simulator use the same.
//!
//! Each of its [`Ports`] is a device. It gives queue pairs, registrations, keys and connections numbers, each good for one object
//! and never for the next in its place, and calls the ports; it neither sends nor receives. Whoever owns the ports does that, tells
//! the time by [`Fabric::set_now`] and, after packets and timers, asks for completions and then for events. Nothing is locked, and all
//! completions of a device are in one queue.
//!
//! The fabrics of several loops may have a memory table in common, the ports of which are shards of one; then protection domains,
//! registrations and keys of one can be lent to the others.
//!
//! Keys are granted and taken back at once, or by work requests as hardware does it ([`FabricConfig`]).
#![forbid(unsafe_code)]

mod cm;
mod fabric;
mod keys;
mod lend;
mod objects;
mod ports;

pub use fabric::{Fabric, FabricConfig, Ports, Usage};
pub use ports::{Several, Single};
