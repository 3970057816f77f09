//! [`Provider`](roce_verbs::provider::Provider) of a loop, without I/O: [`Fabric`], the only owner of the numbers of objects.
//!
//! Each verb is one call of the [`Backend`] that has the object: software devices, each a port of [`Ports`], or the RDMA devices of the
//! host ([`Hardware`]). Backends keep their objects under the fabric's numbers ([`Table`]). The loop that owns the ports receives and
//! sends, sets the time ([`Fabric::set_now`]), and after packets and timers polls completions and then events. Nothing is locked, and
//! all completions of a software device are in one queue. The simulator uses the same.
//!
//! It knows ports, and of RDMA devices only their capabilities. It must not know sockets, clocks, or libibverbs.
//!
//! Fabrics of several loops whose ports have a memory table in common can share protection domains, registrations and keys.
//! Keys are granted at once, or by work requests as hardware does it ([`FabricConfig`]).

mod backend;
mod ports;
mod provider;
mod slots;
mod soft;

pub use backend::{Backend, Connections, DeviceName, Hardware, Keys, NewCm};
pub use ports::{Ports, Several};
pub use provider::{Fabric, Usage};
pub use slots::Table;
pub use soft::FabricConfig;
