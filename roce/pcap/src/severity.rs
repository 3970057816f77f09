//! Severity of a rule, and who is at fault when it is broken.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth knowing: nobody broke a rule.
    Note,
    /// Suspicious, or a deviation that peers tolerate.
    Warning,
    /// Against the specification, dropped by a receiver, or the file is broken.
    Error,
}

impl Severity {
    /// Returns the word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// Party at fault by a rule, seen from the packet that shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Sender of the packet.
    Sender,
    /// Receiver of the packet.
    Receiver,
    /// Network between the two.
    Network,
    /// Capture, or how it was taken.
    Capture,
    /// Nobody.
    None,
}
