//! Messages of LNet: every offset, every truncation, and the kernel's.

#[path = "../../../rds/tests/support/capture.rs"]
mod capture;
mod captures;
mod conn;
mod messages;
mod ping;
mod selftest;
