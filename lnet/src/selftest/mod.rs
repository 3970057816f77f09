//! lnet_selftest: tests of LNet that the kernel's module of that name, and its `lst`, take part in.
//!
//! - [`Target`]: answers pings and bulk tests of other nodes, and tests other nodes when a console has it do so.
//! - [`Console`]: has nodes test each other.
//! - [`Run`]: tests other nodes by itself, as their console and client.
//! - [`Client`]: sends single requests, as of a ping.
//!
//! All hand what the node reports to `output`, and act through the node. There is no authentication: anybody may test, and be a console.

mod client;
mod console;
mod errno;
pub mod proto;
mod run;
mod session;
mod slots;
mod target;
mod wire;

pub use client::{CallError, CallId, Client, Data};
pub use console::{Console, TestPlan};
pub use run::{NodeCounters, Run, RunCounts, RunError, RunEvent, RunPlan};
pub use target::{Target, TargetConfig};
pub use wire::Name;
