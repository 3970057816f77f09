//! Kinds of differences.

use serde::Deserialize;

/// Kind of difference that may have a reason.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// The node asks for an acknowledgement, the kernel did not.
    Asks,
    /// The kernel asked for an acknowledgement, the node does not.
    DoesNotAsk,
    /// The acknowledgement in a header is another.
    Acknowledges,
    /// The node sends an acknowledgement without data, the kernel did not.
    AckAlone,
    /// The kernel sent an acknowledgement without data, the node does not.
    NoAckAlone,
    /// The node refuses a connection that the kernel accepted.
    Refuses,
    /// The node's message lacks the extension headers.
    Extensions,
    /// The node sends something more.
    More,
    /// Anything else. No reason allows it.
    Other,
}
