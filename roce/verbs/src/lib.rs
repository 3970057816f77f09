//! The vocabulary of verbs: time, attributes, work requests, completions, events, device limits, and the [`provider`]
//! traits that RTRS and everything above are written against. All of it is without behaviour, but for [`mem`]: protection
//! domains, regions, windows, keys and the checks of accesses by them. It alone touches registered memory, and has `unsafe` code.
//!
//! It knows what IBA chapters 10 and 11 call things, and which attributes each transition of a queue pair takes. It knows
//! neither the software port nor hardware: `roce-port` and `roce-hw` implement its traits, and must not need more of the
//! caller than they say. Nothing here does I/O.
#![deny(unsafe_code)]

pub mod attr;
mod counters;
pub mod event;
mod hash;
pub mod legal;
// The only access to registered memory.
#[allow(unsafe_code)]
pub mod mem;
pub mod messages;
mod numbered;
pub mod provider;
mod shown;
mod time;
mod timers;
mod to_rts;
pub mod wc;
pub mod wr;

pub use attr::{
    AccessFlags, AddressVector, DeviceLimits, Mtu, PathMigState, PathMtus, QpAttr, QpAttrMask, QpCaps, QpState, QpType,
    SrqAttr, SrqModify, SrqType,
};
pub use event::{AsyncEvent, EventSource};
pub use hash::{AddressHasher, AddressHashes, NumberHasher};
pub use roce_bth::{LKey, Msn, PKey, Placement, Psn, QKey, Qpn, RKey, RnrTimer, Selectivity, Srqn};
pub use shown::{Shown, shown};
pub use time::Instant;
pub use timers::TimerHeap;
pub use wc::{Completion, WcFlags, WcOpcode, WcStatus};
pub use wr::{
    Datagram, Flush, Payload, RecvWr, RemoteAddr, SendFlags, SendOp, SendRequest, SendWr, Sge, Target, WrOpcode,
};
