//! Layers: one file for each protocol.

pub(crate) mod bth;
pub(crate) mod lap;
pub(crate) mod lnet;
pub(crate) mod mad;
pub(crate) mod other;
pub(crate) mod private;
pub(crate) mod rds;
pub(crate) mod rnbd;
pub(crate) mod rtrs;
mod selftest;
