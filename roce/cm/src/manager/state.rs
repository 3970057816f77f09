//! The states of a connection and what is legal in each.

/// State of a connection (IBA 12.9.7; `enum ib_cm_state`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// Active: REQ sent.
    ReqSent,
}
