//! Packets between programs and their node.

mod packets;
mod records;
