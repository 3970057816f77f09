//! Messages between the shards of a server about devices, and remote shard state.

use std::collections::BTreeSet;

use rtrs::server::request::SessionKey;

use super::{disk::StoreId, session::OpenRequest};
use crate::{block::Geometry, errno::Errno};

/// A letter to another share, by [`Server::letter`](super::Server::letter).
#[derive(Clone, PartialEq, Debug)]
pub struct Letter(pub(super) Message);

/// A device of another share's: the share, and its key there.
pub(super) type Original = (usize, u64);

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Message {
    /// From home: a session has a device.
    Device {
        session: SessionKey,
        /// The client's number.
        id: u32,
        /// Home's key.
        device: u64,
        /// Home's.
        store: StoreId,
        geometry: Geometry,
    },
    /// To home: its requests may come, or can't.
    Known(u64, Result<(), Errno>),
    /// From home: it is to be closed.
    Close(u64),
    /// To home: it is.
    Closed(u64),
    /// To home: it has become larger, to so many bytes.
    Resized(u64, u64),
}

/// State at home of a device's parts at the other shards.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// Shares that have not said that they have it, or that they can't.
    pub(super) unknown: BTreeSet<usize>,
    /// Shares that have not closed it.
    pub(super) open: BTreeSet<usize>,
    /// The client's session and number, and its request.
    pub(super) waits: Option<(u32, OpenRequest)>,
    pub(super) failed: Option<Errno>,
}

impl Parts {
    /// Whether no other share has it.
    pub(super) fn are_closed(&self) -> bool {
        self.open.is_empty()
    }
}

/// State of another shard's device.
#[derive(Debug)]
pub(super) enum Part {
    /// It is being taken over; perhaps it is to be closed at once.
    Coming { closing: bool },
    /// Its key here.
    Here { device: u64, session: SessionKey, id: u32 },
    /// It is being closed.
    Going,
}

/// A device that is being taken over.
#[derive(Debug)]
pub(super) struct Coming {
    pub(super) of: Original,
    pub(super) session: SessionKey,
    pub(super) id: u32,
    pub(super) geometry: Geometry,
}
