//! Bugs of the ledger, for simulators to find. Without the feature `planted` there is never one.

/// Bug in how credits are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(
    not(feature = "planted"),
    allow(dead_code, unreachable_pub, reason = "only tests of simulators plant bugs")
)]
pub enum Planted {
    /// None.
    #[default]
    Nothing,
    /// The buffer of a PUT_REQ gives its credit back at once, and again with PUT_DONE.
    PutReqReturns,
    /// Answers are asked for without a place for them.
    NoReserve,
    /// A NOOP takes a credit.
    NoopCosts,
}
