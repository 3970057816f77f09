//! Judge: follows the conversations of a capture and reports broken rules.
//!
//! It takes packets in the order of the capture ([`Observed`]), without files or clocks, and remembers of each direction the
//! requests that may still be answered or repeated. What a capture does not show is not held against anybody: an answer to a
//! request that the capture missed, a beginning before the first frame, a direction that is not there. A rule is broken where
//! the packets prove it.

mod cm;
mod context;
mod conversation;
mod direction;
mod event;
mod message;
mod observed;
mod requests;
mod responses;
mod spans;
mod table;
mod upper;

pub use conversation::{Endpoint, Origin};
pub use event::{Event, EventKind};
pub use observed::{Meta, Observed};
pub use table::{Judge, Stated, Summary};
pub use upper::{ConnectionMessage, NewUpperJudge, UpperJudge};
