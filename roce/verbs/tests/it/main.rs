//! Registered memory and its keys.

mod cache;
mod faults;
mod keys;
mod order;
