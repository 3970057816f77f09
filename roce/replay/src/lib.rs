//! Replay: puts the engine in the place of one side of a captured reliable connection, feeds it what that side was sent, when it
//! was sent, and compares what it sends with what the captured side sent.
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
//! equal must also have the captured ICRC, made by `roce-icrc` with the captured Identification.
//!
//! [`read`] finds the connections of a capture, and [`play`] replays one side of one of them. Deviations are [`Difference`]s of a
//! named [`Kind`]. A capture is untrusted input: whatever its packets are, the result is an outcome or an error, and the memory that
//! they can use is bounded.
#![forbid(unsafe_code)]

mod compare;
mod connection;
mod error;
mod kind;
mod model;
mod player;
mod read;
mod requests;

pub use compare::Difference;
pub use connection::{Connection, Event, is_request};
pub use error::Error;
pub use kind::Kind;
pub use player::{Outcome, Settings, play};
pub use read::{MAX_BYTES, read};
