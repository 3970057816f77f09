//! Replay conformance: puts our engine in the place of one side of a captured reliable connection, feeds it what that
//! side was sent, when it was sent, and compares what it sends with what the captured side sent.
//!
//! - **Responder.** Every request of the capture is given to our queue pair, with its keys and addresses changed to those
//!   of memory of ours (the only change made to a packet). Before a READ or an atomic the memory gets the bytes that the
//!   captured responder read; receives are posted when the captured responder had one. Its answers must be the captured
//!   ones, bit for bit.
//! - **Requester.** Work requests are derived from the captured requests: operation, addresses and keys, length, payload,
//!   solicited event. Each time the captured requester sent a packet ours may send one, which must be that packet.
//!   *When* a requester repeats itself is its own choice, so our timers run only when the captured side's did; *what* it
//!   repeats is compared.
//!
//! Queue pair numbers, first PSNs and addresses are the capture's: they are arguments of the engine. A packet that is
//! equal must also have the captured ICRC, made by our `roce-icrc` with the captured Identification.
//!
//! Deviations are [`Difference`]s of a named [`Kind`]. The manifest says of each capture how many of which kind there
//! are, and why; anything else fails.
#![forbid(unsafe_code)]

mod capture;
mod compare;
mod error;
pub mod made;
pub mod made_stall;
mod manifest;
mod model;
mod player;
mod requests;
mod verdict;

pub use capture::{Connection, Event, connections, is_request, load};
pub use compare::{Difference, Kind};
pub use error::Error;
pub use manifest::{Allowed, Common, Entry, Manifest, Replay, fixtures, locate};
pub use player::{Outcome, Settings, play};
pub use verdict::{Verdict, replay_all, replay_folder};
