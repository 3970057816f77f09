//! The vocabulary of verbs, without any behaviour: time, attributes, work requests, completions, events, device
//! limits, and the [`provider`] traits that RTRS and everything above are written against.
#![forbid(unsafe_code)]

pub mod attr;
pub mod event;
pub mod provider;
mod time;
pub mod wc;
pub mod wr;

pub use attr::{AddressVector, DeviceLimits, Mtu, QpAttr, QpAttrMask, QpCaps, QpState, QpType};
pub use event::AsyncEvent;
pub use roce_bth::{LKey, Msn, PKey, Psn, QKey, Qpn, RKey, RnrTimer};
pub use time::Instant;
pub use wc::{Completion, WcFlags, WcOpcode, WcStatus};
pub use wr::{AccessFlags, Payload, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};
