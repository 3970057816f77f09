//! Headers, opcodes and numbers.

mod headers;
mod numbers;
mod spec;
