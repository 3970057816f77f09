//! [`Provider`](roce_verbs::provider::Provider) of a loop, without I/O: [`Fabric`], the only owner of the numbers of objects.
//!
//! Its backends are software devices, each a port of [`Ports`], and RDMA devices of the host ([`Hardware`]). The loop that owns the
//! ports receives and sends, sets the time ([`Fabric::set_now`]), and after packets and timers polls completions and then events.
//! Nothing is locked, and all completions of a software device are in one queue. The simulator uses the same.
//!
//! It knows ports, and the objects of RDMA devices only as values it passes to their backend. It must not know sockets, clocks, or
//! libibverbs.
//!
//! Fabrics of several loops whose ports have a memory table in common can share protection domains, registrations and keys.
//! Keys are granted at once, or by work requests as hardware does it ([`FabricConfig`]).
#![forbid(unsafe_code)]

mod cm;
mod fabric;
mod hard;
mod hardware;
mod keys;
mod lend;
mod objects;
mod ports;
mod provider;
mod slots;
mod tables;

pub use fabric::{Fabric, FabricConfig};
pub use hardware::{Completed, DeviceName, Drain, Hardware, HardwareEvent, Object, Registered};
pub use ports::{Ports, Several, Single};
pub use tables::Usage;
