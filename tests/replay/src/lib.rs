//! Replay conformance: our engine in the place of each side of the captures in `pcap-fixtures`, packet by packet, by `roce-replay`.
//!
//! The manifest says of each capture how many differences of which kind there are, and why; anything else fails.
#![forbid(unsafe_code)]

mod error;
mod fixture;
pub mod made;
pub mod made_stall;
mod manifest;
mod rds;
mod verdict;

pub use error::Error;
pub use fixture::{connections, fixtures, load, locate};
pub use manifest::{Allowed, Common, Entry, Manifest, Replay};
pub use rds::replay_rds;
pub use verdict::{Verdict, replay_all, replay_folder};
