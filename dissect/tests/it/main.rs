//! Captures of kernels and of odd peers, and changed bytes.

mod captures;
mod common;
mod damage;
mod exchanges;
mod golden;
mod judged;
mod odd;
mod recognized;
mod sent;
mod trees;
