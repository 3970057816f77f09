//! Storage: a server with RTRS, RNBD and disks, and clients that work with its devices, in turns as their loops run, under the
//! virtual clock.
//!
//! Clients write blocks that carry a number of their own, read, flush, discard and write zeroes; disks are slow, fail, and lose
//! what was not flushed; hosts die and come back, links are cut, sessions are ended. Every operation ends once. A read gives
//! what some allowed order of the writes gives. What was flushed is there after a power failure. Nothing is written that nobody
//! asked for. In the end all permits, chunks, buffers, keys and queue pairs have come back.

mod client;
mod disk;
mod draw;
mod engine;
mod history;
mod lan;
mod late;
mod ledger;
mod losses;
mod program;
mod raw;
mod server;
mod tally;
mod turn;
mod wide;
mod world;

pub(crate) use tally::Tally;
pub(crate) use world::World;
