//! Messages of RDS: every offset, every truncation, and the kernel's.

#[path = "../support/capture.rs"]
mod capture;
mod captures;
mod conn;
mod counters;
mod header;
