//! What a fabric has besides queue pairs and memory: connections and keys.

use core::net::SocketAddr;
use std::sync::Arc;

use roce_mem::{FastRegion, PostedKey, Window, WindowKind};
use roce_port::{ConnId, ListenId};
use roce_verbs::{
    AccessFlags, LKey, RKey, SendOp,
    provider::{PdId, QpId},
    wr::{BindWindow, FastRegister},
};

/// A listener or a connection.
pub(crate) enum Cm {
    Listener {
        addr: SocketAddr,
        /// By device.
        ids: Vec<(usize, ListenId)>,
    },
    /// The way to the peer is known.
    Resolved {
        device: usize,
        local: SocketAddr,
        remote: SocketAddr,
    },
    Conn {
        device: usize,
        conn: ConnId,
        local: SocketAddr,
        remote: SocketAddr,
    },
}

impl Cm {
    pub(crate) fn addrs(&self) -> (SocketAddr, Option<SocketAddr>) {
        match self {
            Self::Listener { addr, .. } => (*addr, None),
            Self::Resolved { local, remote, .. } | Self::Conn { local, remote, .. } => (*local, Some(*remote)),
        }
    }
}

/// What a key belongs to.
pub(crate) enum Object {
    Fast(Arc<FastRegion>),
    Window(Arc<Window>),
}

/// A key.
pub(crate) struct Key {
    pub(crate) pd: PdId,
    pub(crate) object: Object,
    pub(crate) posted: PostedKey,
    /// The queue pair that it was granted through last.
    pub(crate) through: Option<QpId>,
}

impl Key {
    pub(crate) fn is_window_1(&self) -> bool {
        matches!(&self.object, Object::Window(w) if w.kind() == WindowKind::Type1)
    }

    /// What opens it under a key.
    pub(crate) fn open(&self, key: RKey, at: &Range, access: AccessFlags) -> SendOp {
        match self.object {
            Object::Fast(_) => SendOp::FastRegister(FastRegister {
                key,
                lkey: at.lkey,
                addr: at.addr,
                length: at.length,
                iova: at.iova,
                access,
            }),
            Object::Window(_) => SendOp::BindWindow(BindWindow {
                key,
                lkey: at.lkey,
                addr: at.addr,
                length: at.length,
                access,
            }),
        }
    }

    /// What closes it. A type 1 window ends by being bound to nothing, under another key.
    pub(crate) fn close(&self, next: RKey) -> SendOp {
        match self.is_window_1() {
            true => SendOp::BindWindow(BindWindow {
                key: next,
                lkey: LKey::default(),
                addr: 0,
                length: 0,
                access: AccessFlags::empty(),
            }),
            false => SendOp::LocalInvalidate(self.posted.key),
        }
    }
}

/// Of a registration.
pub(crate) struct Range {
    pub(crate) lkey: LKey,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) iova: u64,
}
