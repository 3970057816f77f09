//! Captures replayed, and what the replay finds.

mod detects;
mod fixtures;
mod hardware;
mod kernel;
