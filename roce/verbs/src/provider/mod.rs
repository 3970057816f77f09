//! Verbs with connection management for state machines that one thread runs: all devices of a loop, with numbers for objects.
//!
//! [`Provider`] serves the software transport and hardware verbs (libibverbs with librdmacm), and reports for each device what it can
//! do ([`DeviceCaps`], [`KeyStrategy`]).

mod caps;
mod connect;
mod context;
mod cx;
mod error;
mod event;
mod ids;
mod keys;
mod memory;

pub use caps::{DeviceCaps, KeyStrategy};
pub use connect::{ConnParams, NoAnswer, RejectReason};
pub use context::{MrInfo, Provider, QpSpec, Registration};
pub use cx::Cx;
pub use error::{RangeError, VerbsError};
pub use event::{CmKind, Event};
pub use ids::{CmRef, CqId, DeviceIx, KeyId, MrId, PdId, QpId};
pub use keys::{GrantOf, Granted, KeyKind, Revoked};
pub use memory::{Foreign, ForeignMemory, Memory};
