//! libibverbs and librdmacm, as types that keep alive what they are made of. All calls of the two libraries are here.
//!
//! rdma-sys has the structures, the functions, and most of those that C has in headers only; what it lacks is in [`ffi`].

mod attr;
mod cm;
mod context;
mod ffi;
mod memory;
mod object;
mod poll;
mod queue;
mod wr;

pub(crate) use attr::Reads;
pub(crate) use cm::{CmId, EventChannel, News, close_dead_device};
pub(crate) use context::{AsyncNews, Context, Found};
pub(crate) use memory::{Mr, Mw, Pd};
pub(crate) use poll::{Nodes, Watched};
pub(crate) use queue::{Cq, Qp};
pub(crate) use rdma_sys::rdma_cm_event_type as kind;
pub(crate) use wr::{Bind, RecvList, SendList};

/// Folder of the device files.
pub(crate) const NODES: &str = "/dev/infiniband";
