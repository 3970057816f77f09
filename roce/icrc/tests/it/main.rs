//! The invariant CRC.

mod properties;
mod vectors;
