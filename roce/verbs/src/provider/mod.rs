//! Verbs with connection management, in two shapes.
//!
//! - [`Provider`]: all devices of a loop, by numbers, for state machines that one thread runs: RTRS and what else moves data.
//!   It is made for both worlds, the software transport and hardware verbs (libibverbs with librdmacm), and says of each
//!   device what it can do ([`DeviceCaps`], [`KeyStrategy`]).
//! - [`VerbsDevice`]: objects that threads share, for programs.

mod caps;
mod connect;
mod context;
mod error;
mod event;
mod ids;
mod keys;
mod lent;
mod objects;
mod slots;

pub use caps::{DeviceCaps, KeyStrategy};
pub use connect::{ConnParams, NoAnswer, RejectReason};
pub use context::{Memory, MrInfo, Provider, QpSpec, Registration};
pub use error::VerbsError;
pub use event::{CmKind, Event};
pub use ids::{CmRef, CqId, DeviceIx, KeyId, MrId, PdId, QpId};
pub use keys::{GrantOf, Granted, KeyKind, Revoked};
pub use lent::Lent;
pub use objects::{
    CmChannel, CmEvent, CmEventKind, CmId, CompletionChannel, CompletionQueue, Grant, MemoryRegion, QpInit, QueuePair,
    RangeError, RevocableRegion, VerbsDevice,
};
pub use slots::{Number, Slots};
