//! Devices of a server, for programs.

mod common;
mod disk;
mod in_loop;
