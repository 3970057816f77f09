//! RoCEv2 transport headers (IBTA volume 1 chapter 9, Annex A17): one opcode table as data, checked parsing into a
//! [`Packet`] view, emission of a [`Header`], and newtypes for the numbers on the wire.
//!
//! It knows the UDP payload: BTH, extended headers, payload, pad, and the place of the four ICRC bytes, which the
//! `roce-icrc` crate makes and checks. It knows no queue pair, address or time: `roce-qp` decides which packets are
//! expected. Nothing here allocates or does I/O.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod aeth;
mod header;
mod ids;
mod opcode;
mod packet;
mod psn;
mod wire;

pub use aeth::{Aeth, Credits, NakCode, RnrTimer, Syndrome};
pub use header::{AtomicEth, Bth, Deth, Feth, Placement, Reth, Selectivity, XrcEth};
pub use ids::{LKey, PKey, QKey, Qpn, RKey, Srqn};
pub use opcode::{Class, ExtHeader, Opcode, OpcodeInfo, Position, Service};
pub use packet::{Header, HeaderView, HeaderWriter, Packet, ParseError};
pub use psn::{Msn, Psn};
pub use wire::{BTH_LEN, ICRC_LEN, MAX_HEADER_LEN, ROCE_UDP_PORT};
