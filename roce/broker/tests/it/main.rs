//! The broker, and its members in other processes.

mod environment;
mod isolation;
mod raw;
mod sharing;
