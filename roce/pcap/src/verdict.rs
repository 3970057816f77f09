//! Verdict on a capture or a conversation.

use serde::Serialize;

/// Verdict on a capture or a conversation; the worst is greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Everything was checked and is right.
    Good,
    /// Nothing is bad, but something could not be checked or read, or there is no RoCEv2 frame.
    #[default]
    NotChecked,
    /// A rule of severity "error" was broken.
    Bad,
}

impl Verdict {
    /// Returns the words for it.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::NotChecked => "not checked",
            Self::Bad => "bad",
        }
    }
}
