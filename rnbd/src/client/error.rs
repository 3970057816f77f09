//! Why devices can't be mapped.

use rtrs::IoError;

use crate::{errno::Errno, proto::AccessMode};

/// Why a device could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The session failed.
    #[error(transparent)]
    Session(#[from] rtrs::Error),
    /// A message got no answer.
    #[error("{what}: {source}")]
    Request {
        /// Name of the message.
        what: &'static str,
        /// Error of the request.
        source: IoError,
    },
    /// The server refused to open the device.
    #[error("the server refuses device {name} ({mode}): {}", refusal(*.errno, *.mode))]
    Refused {
        /// The device asked for.
        name: String,
        /// How it was to be opened.
        mode: AccessMode,
        /// The server's error.
        errno: Errno,
    },
    /// There is no buffer for the answer.
    #[error("no buffer for {0}: {1}")]
    Buffer(&'static str, Errno),
    /// The server's answer makes no sense.
    #[error("the server's answer to {0} is malformed")]
    Malformed(&'static str),
    /// The name can't be sent.
    #[error("device name {0:?}: must have 1 to 254 bytes and no NUL")]
    Name(String),
    /// This session has mapped the device already.
    #[error("device {0} is mapped already")]
    AlreadyMapped(String),
}

impl MapError {
    /// The error number that says it best: the server's, if it was the server that refused.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Session(rtrs::Error::Config(_)) | Self::Malformed(_) | Self::Name(_) => Errno::EINVAL,
            Self::Session(_) => Errno::ECONNABORTED,
            Self::Request { source, .. } => Errno::from_wire(source.errno()),
            Self::Refused { errno, .. } | Self::Buffer(_, errno) => *errno,
            Self::AlreadyMapped(_) => Errno::EEXIST,
        }
    }
}

fn refusal(e: Errno, mode: AccessMode) -> String {
    match e {
        Errno::ENOENT => "no such export".into(),
        Errno::EACCES if mode.writable() => "the export is read-only".into(),
        Errno::EPERM => "somebody has it open for writing".into(),
        Errno::EBUSY => "another server process on that host writes to it".into(),
        Errno::EEXIST => "this session has it open under another spelling of its name".into(),
        Errno::EMFILE => "the session has as many devices open as the server allows".into(),
        Errno::ENFILE => "the server has as many devices open as it allows".into(),
        Errno::EINVAL => "the server does not accept this name".into(),
        Errno::ENOTBLK => "neither an image file nor a block device".into(),
        Errno::EXDEV | Errno::ELOOP => "a symbolic link leads out of the server's folder".into(),
        e => e.to_string(),
    }
}
