//! Servers and mappings within a process.

#[path = "../common/mod.rs"]
mod common;
mod kernel;
mod loops;
mod nbd;
mod nbd_tls;
mod nbd_tools;
mod rtrs;
