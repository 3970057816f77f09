//! Captures in memory: a ring of the last packets, which is written when something goes wrong or somebody asks for it.
//!
//! [`DeviceConfig::ring`](crate::DeviceConfig::ring) has devices record their packets in a [`Ring`]: under a lock, without allocation, and
//! without a system call but that for the time. [`RingControl`] writes it, in a thread of its own: into files, or to a process that asks by
//! a [`RingRequest`].

mod cause;
mod control;
mod files;
mod memory;
mod records;
mod request;

pub(crate) use self::memory::identification;
pub use self::{
    cause::Cause,
    control::{RingConfig, RingControl, Written},
    files::{MAX_FILES, usual_file},
    memory::Ring,
    request::{RingRequest, Sent},
};
