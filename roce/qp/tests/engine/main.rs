//! Packet-script tests of the engine through its public API.

#[macro_use]
mod harness;
mod faults;
mod lifecycle;
mod operations;
mod recovery;
mod refusals;
