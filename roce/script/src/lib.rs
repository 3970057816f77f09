//! Packet scripts: packets to send to a queue pair, and those that it must answer with.
//!
//! A script is text, a step a line. [`Script::parse`] reads it, [`Script::play`] plays it: the script is one end of a connection, our
//! engine the other one (the *host*), in virtual time and without sockets. [`Script::play_live`] plays it on a live host, by raw sockets
//! and with an agent there ([`Live`]). docs/scripts.md describes the language.
//!
//! ```
//! let script = roce_script::Script::parse(
//!     "qp mtu=1024 region=r0:65536:rw
//!      > write-only psn=0 va=r0 rkey=r0 payload=8 ackreq
//!      < ack psn=0 msn=1
//!      memory r0+0 payload=8:psn0",
//! )?;
//! assert_eq!(script.play().mismatches, []);
//! # Ok::<(), roce_script::ScriptError>(())
//! ```
//!
//! It knows one queue pair of a reliable or unreliable connection. Connection management is not played.
#![forbid(unsafe_code)]

mod build;
mod engine;
mod error;
mod expect;
mod fields;
mod host;
mod kind;
mod live;
mod memory;
mod names;
mod parse;
mod pattern;
mod play;
mod script;
mod setup;
mod show;
mod value;
mod words;

pub use error::ScriptError;
pub use host::Datagram;
pub use live::{Live, LiveConfig, LiveError};
pub use play::{Direction, Mismatch, Outcome, Record};
pub use script::Script;
