//! Errors of a replay.

/// Reason why a side of a connection can't be replayed, in words: what the capture lacks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub(crate) String);

impl Error {
    /// Returns a function that puts `what` failed in front of a reason.
    pub(crate) fn of<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Self {
        move |e| Self(format!("{what}: {e}"))
    }
}
