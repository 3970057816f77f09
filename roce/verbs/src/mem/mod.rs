//! Protection domains, memory regions, fast registrations and memory windows, key and range checks, and scatter/gather
//! lists.
//!
//! A peer may write registered memory while the program reads it. So nothing here ever makes a Rust reference to it:
//! bytes are copied in and out through raw pointers whose bounds were proven against the region, and 8-byte atomics are done
//! on aligned addresses, both by the routines of [`fault`]. A [`Span`] is such a proven range; it stays memory-safe after its region
//! is gone, because it keeps the allocation alive, but every access through it fails from the moment of revocation.
//!
//! Memory that the program lends ([`MemoryTable::register`]) is different: nothing keeps it alive, and pages of it may be missing,
//! which is an error of the access. Accesses happen only
//! under a port's lock, so a caller that has passed through every port's lock once after [`MemoryTable::deregister`]
//! knows that no access is still under way. Memory that is shared ([`MemoryTable::register_memory`], [`Pages`]) lives as long as
//! anything that was resolved through it.

mod error;
pub mod fault;
mod object;
mod pages;
mod renew;
mod sglist;
mod span;
mod table;

pub use error::{AccessError, AtomicError, FlushError, KeyError, MemError};
pub use object::{FastRegion, PdHandle, Region, Window, WindowKind};
pub use pages::Pages;
pub use renew::{PostedKey, Renewable, RenewedKey};
pub use sglist::SgList;
pub use span::{Persist, Span};
pub use table::{MemoryTable, NewRegion, cache::KeyCache};
