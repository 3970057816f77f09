//! The layouts of `infiniband/verbs.h` (rdma-core 44, x86-64 and other LP64 machines), by their C names.
//!
//! `layout.rs` compares sizes and offsets with the installed headers. Enumerations are plain integers here: their
//! values come from the program.
#![allow(non_camel_case_types)]

mod attr;
mod consts;
mod context;
#[cfg(test)]
mod layout;
mod objects;
mod wr;

pub(crate) use attr::*;
pub(crate) use consts::*;
pub(crate) use context::*;
pub(crate) use objects::*;
pub(crate) use wr::*;

use libc::c_int;

/// A C enumeration.
pub(crate) type c_enum = c_int;
