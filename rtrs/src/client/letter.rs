//! Messages between the shares of a session.

use core::time::Duration;

use crate::{
    Error, PathError,
    addr::PathAddr,
    client::{config::SessionConfig, policy::Policy, request::SessionId, status::PathId, terms::Terms},
    proto::{Uuid, info::ChunkAddr},
};

/// From one share of a session to another: to be handed to [`Client::letter`](super::Client::letter) there, at any later time, but
/// letters from one share to another in their order.
#[derive(Debug)]
pub struct Letter {
    pub(super) session: SessionId,
    pub(super) word: Word,
}

impl Letter {
    /// The session that it is about.
    pub fn session(&self) -> SessionId {
        self.session
    }
}

/// The whole of a letter. `path` is a path's index.
#[derive(Debug)]
pub(super) enum Word {
    /// Home: there is a new session.
    Open(Box<Opening>),
    /// Home: the session is open.
    Opened,
    /// Home: it has one more path, at this place.
    Add { path: u16, joining: Joining },
    /// Home: a path is removed. It is closed everywhere.
    Forget { path: u16 },
    /// Home: paths are chosen in another way.
    Policy(Policy),
    /// Home: the round trip of a path.
    Latency { path: u16, time: Duration },
    /// Home: connect your part of a path. It ends with [`Gone`](Self::Gone).
    Connect { path: u16, offer: Offer },
    /// Home: the path is up, and these are your permits' chunks.
    Up { path: u16, chunks: Vec<ChunkAddr> },
    /// Home: the path is down, perhaps for good.
    Down { path: u16, why: PathError, for_good: bool },
    /// Home: the session is to be closed.
    Close,
    /// To home: all my connections of the path stand.
    Connected { path: u16 },
    /// To home: one of them is lost, or could not be made.
    Lost { path: u16, error: Error },
    /// To home: they are drained and destroyed, and their requests have left them.
    Gone { path: u16 },
    /// To home: requests are under way here.
    Watch,
    /// To home: the user wants the session closed.
    CloseAsked,
    /// To home: nothing is left of the session here.
    Ended,
}

/// Parameters from which a share makes a session.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) config: SessionConfig,
    pub(super) uuid: Uuid,
    /// UUIDs of its paths.
    pub(super) paths: Vec<Uuid>,
}

/// Parameters from which a share makes a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joining {
    pub(super) id: PathId,
    pub(super) addr: PathAddr,
    pub(super) uuid: Uuid,
}

/// Answer of the server on connection 0, and what the other connections have to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) terms: Terms,
    pub(super) recon_cnt: u16,
    pub(super) first_conn: bool,
}

/// They go between threads.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Letter>();
};
