//! Errors.

use core::time::Duration;
use std::sync::Arc;

use roce_verbs::{
    WcStatus,
    provider::{NoAnswer, RejectReason, VerbsError},
    wr::PostError,
};

use crate::{
    addr::PathAddr,
    admission::Refusal,
    proto::{ProtoError, errno},
};

/// Why a session could not be opened, or a server not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument is not possible.
    #[error("{0}")]
    Config(String),
    /// A verb failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The server refused; `errno` is what its RTRS says, if it said anything.
    #[error("connection {cid} refused: {}", refusal(*.reason, *.errno))]
    Rejected {
        /// Number of the connection.
        cid: u16,
        /// The CM's reason.
        reason: RejectReason,
        /// RTRS's positive error number.
        errno: Option<i32>,
    },
    /// No answer from there.
    #[error("the server does not answer{}", unreachable(*.0))]
    Unreachable(NoAnswer),
    /// The server answers, but not in time.
    #[error("no {0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The server does not keep to the protocol, or speaks another version.
    #[error("the server's {what}: {source}")]
    Protocol {
        /// Name of the message.
        what: &'static str,
        /// The violation.
        source: ProtoError,
    },
    /// The server's queue depth or sizes are not those of the session's other paths, between which requests move.
    #[error("the server's queue depth or sizes are not those of the session's other paths")]
    OtherSizes,
    /// The path asks again: another came up while it asked the server to make the session, which may be another server's; or the
    /// session's last path was lost while it asked for the chunks, in which requests may be at work.
    #[error("another path has come up, or has been lost, meanwhile")]
    Overtaken,
    /// The path is being connected or closed (the kernel's `EBUSY`).
    #[error("the path is being connected or closed")]
    Busy,
    /// The session has no such path.
    #[error("no such path")]
    NoPath,
    /// The session has a path between these addresses already.
    #[error("the session has the path {0} already")]
    PathExists(PathAddr),
    /// The connection broke while the session was being opened.
    #[error("connection lost: {0}")]
    Path(PathError),
    /// No path of the session is up, or it has been closed.
    #[error("the session is down: {0}")]
    Down(PathError),
    /// All registered buffers are in use.
    #[error("no I/O buffer of {len} bytes: {limit} bytes are in use")]
    NoBuffer {
        /// Bytes asked for.
        len: usize,
        /// The pool's limit.
        limit: usize,
    },
}

impl Error {
    /// The positive Linux error number that the kernel's client gives for it, where it knows the case.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Config(_) => errno::EINVAL,
            Self::Verbs(VerbsError::Io { source, .. }) => source.raw_os_error().unwrap_or(errno::EIO),
            Self::Verbs(VerbsError::Limit(_)) | Self::NoBuffer { .. } => errno::ENOMEM,
            Self::Verbs(VerbsError::Address(_)) => errno::EHOSTUNREACH,
            Self::Verbs(VerbsError::Closed) => errno::ENODEV,
            Self::Verbs(_) => errno::EINVAL,
            Self::Rejected { errno: Some(e), .. } => *e,
            // Somebody took it down meanwhile (`create_cm`).
            Self::Path(PathError::Closed) => errno::ECONNABORTED,
            // Nothing of RTRS is there, or nothing that we understand (`rtrs_rdma_conn_rejected`, `rtrs-clt.c`).
            Self::Rejected { errno: None, .. } | Self::Protocol { .. } | Self::OtherSizes | Self::Path(_) => {
                errno::ECONNRESET
            }
            Self::Timeout(..) => errno::ETIMEDOUT,
            Self::Unreachable(why) => why.errno(),
            Self::Overtaken | Self::Busy => errno::EBUSY,
            Self::NoPath => errno::ENOENT,
            Self::PathExists(_) => errno::EEXIST,
            Self::Down(_) => errno::ECONNABORTED,
        }
    }
}

fn unreachable(why: NoAnswer) -> String {
    match why {
        NoAnswer::Timeout => String::new(),
        known => format!(": {known}"),
    }
}

fn refusal(reason: RejectReason, errno: Option<i32>) -> String {
    match (errno, reason) {
        (Some(errno::ECONNRESET), _) => {
            "the server found the request malformed or of another version (ECONNRESET)".into()
        }
        (Some(errno::ENXIO), _) => "the server knows no such session (ENXIO)".into(),
        (Some(errno::EBUSY), _) => "the server asks to try again later (EBUSY)".into(),
        (Some(errno::EEXIST), _) => "the session has a path between these addresses already (EEXIST)".into(),
        (Some(errno::ENOMEM), _) => "the server is out of memory (ENOMEM)".into(),
        (Some(errno::EACCES), _) => "the server does not allow this address (EACCES)".into(),
        (Some(errno::EUSERS), _) => "the server has as many sessions as it allows (EUSERS)".into(),
        (Some(e), _) => format!("error {e}"),
        (None, RejectReason::INVALID_SERVICE_ID) => "nobody listens there".into(),
        (None, RejectReason::INVALID_MTU) => "the server can't do the path's MTU".into(),
        (None, other) => other.to_string(),
    }
}

/// Why a path ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PathError {
    /// We closed it.
    #[error("closed")]
    Closed,
    /// The peer closed it.
    #[error("the peer disconnected")]
    PeerDisconnected,
    /// The client connects the path again: it has given this one up.
    #[error("the client has given the path up")]
    GivenUp,
    /// The peer gave no sign of life.
    #[error("no heartbeat within {:?}", Duration::from_millis(_0.as_millis() as u64))]
    HeartbeatLost(Duration),
    /// Our network interface went down, and another path was up.
    #[error("its network interface is down")]
    PortDown,
    /// The peer did not finish the handshake.
    #[error("no handshake within {0:?}")]
    HandshakeTimeout(Duration),
    /// The peer broke the protocol.
    #[error("protocol error: {0}")]
    Protocol(#[from] ProtoError),
    /// The peer did something that its state forbids.
    #[error("protocol error: {0}")]
    Unexpected(&'static str),
    /// The client wants the name of another session.
    #[error("another session is named {0:?} already")]
    NameTaken(String),
    /// It may not be there.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The peer used a key, address or right that it does not have.
    #[error("the peer used a key that it had no right to")]
    AccessError,
    /// A work request failed.
    #[error("{what} failed: {status:?}")]
    Completion {
        /// Name of the work request.
        what: &'static str,
        /// How it ended.
        status: WcStatus,
    },
    /// The queue pair went into error, and the connection manager does not say why: most likely the peer did something
    /// that it had no right to.
    #[error("the queue pair failed")]
    Flushed,
    /// A work request was not accepted.
    #[error("posting failed: {0}")]
    Post(#[from] PostError),
    /// A verb failed.
    #[error("{0}")]
    Verbs(Arc<VerbsError>),
    /// The connection manager reports a failure.
    #[error("connection failed: {0}")]
    Cm(String),
}

impl From<VerbsError> for PathError {
    fn from(e: VerbsError) -> Self {
        Self::Verbs(Arc::new(e))
    }
}

impl PathError {
    /// Whether the peer is to blame for breaking the protocol.
    pub fn is_protocol(&self) -> bool {
        matches!(self, Self::Protocol(_) | Self::Unexpected(_))
    }
}

/// Why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IoError {
    /// The server's user answered with this (positive) error number.
    #[error("the server answers error {0}")]
    Remote(i32),
    /// The path ended before the answer came. Whether the request was executed is not known.
    #[error("path lost: {0}")]
    Path(#[from] PathError),
    /// Header or data are longer than the session allows; nothing was sent.
    #[error("{what} of {len} bytes, at most {max} are possible")]
    TooLong {
        /// Header or data.
        what: &'static str,
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: usize,
    },
}

impl IoError {
    /// Result of a request that the server answered with this error number.
    pub(crate) fn of_reply(errno: u16) -> Result<(), Self> {
        match errno {
            0 => Ok(()),
            e => Err(Self::Remote(e.into())),
        }
    }

    /// A positive Linux error number for it.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Remote(e) => *e,
            Self::Path(_) => errno::ECONNABORTED,
            Self::TooLong { .. } => errno::EMSGSIZE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_path_from_being_connected_has_the_kernels_error_number() {
        let rejected = |errno| Error::Rejected {
            cid: 0,
            reason: RejectReason::CONSUMER,
            errno,
        };
        let all = [
            // `rtrs_rdma_conn_rejected`: what the server says.
            (rejected(Some(errno::ENXIO)), errno::ENXIO),
            (rejected(Some(errno::EEXIST)), errno::EEXIST),
            (rejected(Some(errno::EACCES)), errno::EACCES),
            (rejected(None), errno::ECONNRESET),
            // `rtrs_clt_rdma_cm_handler`.
            (Error::Path(PathError::PeerDisconnected), errno::ECONNRESET),
            (Error::Path(PathError::Cm("address changed".into())), errno::ECONNRESET),
            (Error::Verbs(VerbsError::Address("no way".into())), errno::EHOSTUNREACH),
            // `create_cm`, which gives up before the connection manager does, and `rtrs_send_path_info`.
            (Error::Unreachable(NoAnswer::Timeout), errno::ETIMEDOUT),
            (Error::Timeout("answer", Duration::from_secs(30)), errno::ETIMEDOUT),
            (Error::Path(PathError::Closed), errno::ECONNABORTED),
            // `rtrs_rdma_conn_established`.
            (Error::OtherSizes, errno::ECONNRESET),
            // `rtrs_clt_reconnect_from_sysfs`.
            (Error::Busy, errno::EBUSY),
        ];
        for (error, errno) in all {
            assert_eq!(error.errno(), errno, "{error}");
        }
    }

    #[test]
    fn why_a_request_fails_has_the_kernels_error_number() {
        let too_long = IoError::TooLong {
            what: "data",
            len: 2,
            max: 1,
        };
        for (error, errno) in [
            (IoError::Remote(errno::ENOSPC), errno::ENOSPC),
            // `rtrs_clt_request` without a path, and `fail_all_outstanding_reqs`.
            (IoError::Path(PathError::Flushed), errno::ECONNABORTED),
            // `rtrs_clt_write_req`, `rtrs_clt_read_req`.
            (too_long, errno::EMSGSIZE),
        ] {
            assert_eq!(error.errno(), errno, "{error}");
        }
    }
}
