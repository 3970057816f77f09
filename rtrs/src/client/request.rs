//! Requests to a session, and its outputs.

use smallvec::SmallVec;

use super::{
    buffers::Buffer,
    config::{ConType, SessionInfo},
    status::{PathId, PathNews},
};
use crate::{Direction, Error, IoError, PathError};

/// A session of a [`Client`](super::Client). No other has had the number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionId(pub u32);

/// A request on its way into a session.
#[derive(Debug)]
pub struct Submission<U = u64> {
    /// The user's part of the request. Comes back with the answer.
    pub tag: U,
    /// The connection that it takes.
    pub con: ConType,
    /// Direction of the data.
    pub direction: Direction,
    /// The user's header.
    pub header: SmallVec<[u8; 64]>,
    /// The data of a write, or the place for that of a read: of this session.
    pub data: Option<Buffer>,
}

impl<U> Submission<U> {
    /// Its end.
    pub(super) fn done(self, session: SessionId, result: Result<(), IoError>) -> Output<U> {
        Output::Done {
            session,
            tag: self.tag,
            result,
            data: self.data,
        }
    }
}

/// Report of a client to its user.
#[derive(Debug)]
pub enum Output<U = u64> {
    /// All paths are up, or the first one if any will do: requests are taken.
    Opened(SessionId, SessionInfo),
    /// The session could not be opened, and is gone.
    OpenFailed(SessionId, Error),
    /// A request has ended. Nothing touches its buffer any more.
    Done {
        /// The session.
        session: SessionId,
        /// The user's part of the request.
        tag: U,
        /// Success, the server's error number, or what broke.
        result: Result<(), IoError>,
        /// The request's buffer.
        data: Option<Buffer>,
    },
    /// No path is left (`RTRS_CLT_LINK_EV_DISCONNECTED`), and why the last one went.
    Down(SessionId, PathError),
    /// There is a path again (`RTRS_CLT_LINK_EV_RECONNECTED`). Sizes may be others than before.
    Up(SessionId, SessionInfo),
    /// Event of a path.
    Path {
        /// The session.
        session: SessionId,
        /// The path.
        path: PathId,
        /// The event.
        news: PathNews,
    },
    /// The session has been closed, and is gone: every request has ended.
    Closed(SessionId),
}
