//! Messages of LNet: every offset, every truncation, and the kernel's.

#[path = "../../../rds/tests/support/capture.rs"]
mod capture;
mod captures;
mod conn;
mod kernel;
mod messages;
mod negotiation;
mod ping;
#[path = "../../../rtrs/tests/support/provider.rs"]
mod provider;
mod replay;
mod selftest;
