//! What the fuzz targets do with their input. libFuzzer calls it from `fuzz/`, and `tests/replay.rs` with the corpora that
//! are kept in `fuzz/seeds`: on any toolchain, as an ordinary test.
//!
//! A target panics when something does not hold, or does not return. Those of state machines have no threads and wait for
//! nothing: the same input always does the same.

pub mod broker_records;
pub mod bth_parse;
pub mod cm;
pub mod dissect;
pub mod engine;
mod host;
pub mod ident;
mod input;
pub mod lnet_codec;
pub mod lnet_node;
pub mod nbd;
mod node_host;
pub mod pcap_check;
mod peers;
#[path = "../../../rtrs/tests/support/provider.rs"]
mod provider;
pub mod rds_node;
pub mod rnbd_server;
pub mod rtrs_server;
pub mod script;
pub mod vhost;

/// A target: it is given one input.
pub type Target = fn(&[u8]);

/// Hands the names of all targets to a macro.
#[macro_export]
macro_rules! for_each_target {
    ($what:ident) => {
        $what! {
            broker_records,
            bth_parse,
            cm,
            dissect,
            engine,
            ident,
            lnet_codec,
            lnet_node,
            nbd,
            pcap_check,
            rds_node,
            rnbd_server,
            rtrs_server,
            script,
            vhost,
        }
    };
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        /// All targets, by the names of their folders in `fuzz/seeds`.
        pub const TARGETS: &[(&str, Target)] = &[$((stringify!($name), $name::run)),*];
    };
}

for_each_target!(targets);
