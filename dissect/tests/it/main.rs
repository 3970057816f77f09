//! Captures of kernels and of odd peers, and changed bytes.

mod captures;
mod common;
mod exchanges;
mod golden;
mod odd;
mod recognized;
mod trees;
