//! Registered memory and its keys.

mod cache;
mod faults;
mod foreign;
mod keys;
mod order;
