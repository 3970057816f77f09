//! Messages of LNet: every offset, every truncation, and the kernel's.

#[path = "../../../rds/tests/support/capture.rs"]
mod capture;
mod captures;
mod conn;
mod conversation;
mod kernel;
mod messages;
mod names;
mod negotiation;
mod ping;
mod player;
#[path = "../../../rtrs/tests/support/provider.rs"]
mod provider;
mod replay;
mod selftest;
