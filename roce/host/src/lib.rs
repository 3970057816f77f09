//! Node of a protocol over RoCEv2 in a thread of its own.
//!
//! A [`Machine`] is the node: sans-IO, as those of `rds` and `lnet` are. [`Hosted`] runs it on the loop of [`roce`], and lets other threads
//! and tasks call it, wait until it has changed, and run closures in its thread.
#![forbid(unsafe_code)]

mod hosted;
mod machine;
mod service;
mod shared;

pub use hosted::Hosted;
pub use machine::Machine;
