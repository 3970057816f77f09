//! Refusal of a request.

use rnbd::Errno;
use serde::{Deserialize, Serialize};

use super::wire;

/// Reason why a request was not executed, or failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{text}")]
pub struct Refused {
    /// The kernel's error number for it.
    #[serde(with = "wire")]
    pub errno: Errno,
    /// Reason for people.
    #[serde(rename = "error")]
    pub text: String,
}

impl Refused {
    /// A refusal with this error number and reason.
    pub fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self {
            errno,
            text: text.into(),
        }
    }
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::new(errno, errno.to_string())
    }
}

impl From<rtrs::Error> for Refused {
    fn from(e: rtrs::Error) -> Self {
        Self::new(Errno::from_wire(e.errno()), e.to_string())
    }
}
