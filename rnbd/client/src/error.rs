//! Errors of opening and of the end.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use rnbd::{Errno, client::error::MapError};
use roce::VerbsError;
use roce::reactor::ReactorError;
use rtrs::{Error, PathError};

/// Why a disk could not be opened, or was lost.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no route to the server.
    #[error("no route to {server}: {source}")]
    Route {
        /// The server.
        server: IpAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// Our address can't be used.
    #[error(transparent)]
    Device(VerbsError),
    /// There is no session with the server.
    #[error("no session with {server}: {error}{}", hint(.error))]
    Session {
        /// The server, at the first path's end.
        server: SocketAddr,
        /// Reason.
        error: Error,
    },
    /// The server did not open the device.
    #[error(transparent)]
    Map(MapError),
    /// The session was lost.
    #[error("the session was lost: {0}")]
    Lost(PathError),
    /// The flush at the end failed: completed writes may not be durable.
    #[error("flush at the end: {0}")]
    Flush(Errno),
    /// The loop failed.
    #[error("the disk's loop failed: {0}")]
    Loop(#[from] ReactorError),
    /// The system gave no thread or descriptor.
    #[error(transparent)]
    System(#[from] io::Error),
    /// The disk had ended before, for this reason.
    #[error("{text}")]
    Ended {
        /// Error number that describes it best.
        errno: Errno,
        /// Reason.
        text: String,
    },
    /// The disk is closed.
    #[error("the disk is closed")]
    Closed,
}

/// Advice for an error whose text does not show the cause.
fn hint(error: &Error) -> &'static str {
    match error {
        // RTRS has no message for a refused session: the server disconnects.
        Error::Path(PathError::PeerDisconnected) => {
            "; the server's log says why: mostly another client's session has this name"
        }
        _ => "",
    }
}

impl OpenError {
    /// Returns the error number that describes it best.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Route { .. } | Self::Device(VerbsError::Address(_)) => Errno::EHOSTUNREACH,
            Self::Session { error, .. } => Errno::from_wire(error.errno()),
            Self::Map(e) => e.errno(),
            Self::Lost(_) => Errno::ECONNABORTED,
            Self::Flush(errno) | Self::Ended { errno, .. } => *errno,
            Self::Closed => Errno::ESHUTDOWN,
            Self::System(e) => e.raw_os_error().map_or(Errno::EIO, Errno::from_wire),
            Self::Device(_) | Self::Loop(_) => Errno::EIO,
        }
    }
}

impl From<OpenError> for io::Error {
    /// Keeps the text; the kind is that of the error number.
    fn from(e: OpenError) -> Self {
        let kind = Self::from(e.errno()).kind();
        Self::new(kind, e)
    }
}
