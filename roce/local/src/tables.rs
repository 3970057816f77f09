//! Tables of a fabric's objects: the only ones that give numbers.

use core::net::SocketAddr;
use std::sync::Arc;

use roce_mem::{PdHandle, Region};
use roce_port::{ConnId, ListenId};
use roce_verbs::{
    Qpn,
    provider::{KeyKind, MrId, QpId, VerbsError},
    wr::PostError,
};

use crate::{hardware::Object, objects::SoftKey, slots::Slots};

/// Error of a full table.
pub(crate) const FULL: VerbsError = VerbsError::Limit("objects of a loop");

/// Errors of a number without a key or registration that fits a work request.
pub(crate) const NO_KEY: PostError = PostError::Invalid("no such key");
pub(crate) const NO_MR: PostError = PostError::Invalid("no such registration");

/// Error of a number without an object.
pub(crate) fn gone(what: &str) -> VerbsError {
    VerbsError::Invalid(format!("no such {what}"))
}

/// Protection domain.
pub(crate) enum Pd {
    Soft {
        port: usize,
        handle: PdHandle,
        /// Another loop made it.
        borrowed: bool,
    },
    Hard {
        device: usize,
        object: Object,
    },
}

/// Registration of memory.
pub(crate) enum Mr {
    Soft {
        port: usize,
        region: Arc<Region>,
        /// Another loop made it.
        borrowed: bool,
    },
    Hard(Object),
}

/// Remote key.
pub(crate) enum Key {
    Soft(SoftKey),
    Hard(HardKey),
}

/// Memory window of an RDMA device.
pub(crate) struct HardKey {
    pub(crate) device: usize,
    pub(crate) kind: KeyKind,
    pub(crate) object: Object,
    /// Registration that it was bound to last.
    pub(crate) mr: Option<MrId>,
    /// Queue pair that it was bound through last.
    pub(crate) qp: Option<QpId>,
    /// Key under which it is registered in the index of open windows.
    pub(crate) open: Option<u32>,
}

/// Completion queue. All of a port are one queue.
pub(crate) enum Cq {
    Soft { port: usize },
    Hard { device: usize, object: Object },
}

/// Queue pair.
pub(crate) struct Qp {
    pub(crate) qpn: Qpn,
    /// The peer used a key, address or right that it does not have.
    pub(crate) violated: bool,
    pub(crate) of: QpOf,
}

/// Backend's part of a queue pair.
pub(crate) enum QpOf {
    Soft { port: usize, pd: PdHandle },
    Hard { device: usize, object: Object },
}

/// Listener or connection.
pub(crate) enum Cm {
    Listener {
        addr: SocketAddr,
        /// By port.
        ids: Vec<(usize, ListenId)>,
        /// Listener of the RDMA devices.
        hard: Option<Object>,
    },
    /// The route to the peer is known.
    Resolved {
        port: usize,
        local: SocketAddr,
        remote: SocketAddr,
    },
    Conn {
        port: usize,
        conn: ConnId,
        local: SocketAddr,
        remote: SocketAddr,
    },
    Hard {
        object: Object,
        qp: Option<QpId>,
    },
}

impl Qp {
    /// Returns the object of an RDMA device's queue pair.
    pub(crate) fn hard(&mut self) -> Option<&mut Object> {
        match &mut self.of {
            QpOf::Hard { object, .. } => Some(object),
            QpOf::Soft { .. } => None,
        }
    }
}

/// All objects of a fabric.
///
/// Objects of RDMA devices end in the order of the fields: a window before its registration, a queue pair before its completion queue.
#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) cms: Slots<Cm>,
    pub(crate) qps: Slots<Qp>,
    pub(crate) keys: Slots<Key>,
    pub(crate) mrs: Slots<Mr>,
    pub(crate) cqs: Slots<Cq>,
    pub(crate) pds: Slots<Pd>,
}

impl Tables {
    /// Returns the number of objects of each kind.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            pds: self.pds.len(),
            mrs: self.mrs.len(),
            keys: self.keys.len(),
            cqs: self.cqs.len(),
            qps: self.qps.len(),
            cms: self.cms.len(),
        }
    }
}

/// Number of objects of each kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs)]
pub struct Usage {
    pub pds: usize,
    pub mrs: usize,
    pub keys: usize,
    pub cqs: usize,
    pub qps: usize,
    pub cms: usize,
}

impl Usage {
    /// Adds those of another loop.
    pub fn add(&mut self, other: &Self) {
        self.pds += other.pds;
        self.mrs += other.mrs;
        self.keys += other.keys;
        self.cqs += other.cqs;
        self.qps += other.qps;
        self.cms += other.cms;
    }
}
