//! Keys of software devices, and objects that loops share.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use roce_mem::{FastRegion, MemoryTable, PdHandle, PostedKey, Region, Window, WindowKind};
use roce_verbs::{
    AccessFlags, LKey, RKey, SendOp,
    provider::QpId,
    wr::{BindWindow, FastRegister},
};

/// Object of the memory table that a key belongs to.
#[derive(Clone)]
pub(crate) enum KeyObject {
    Fast(Arc<FastRegion>),
    Window(Arc<Window>),
}

/// Key of a software device.
pub(crate) struct SoftKey {
    pub(crate) port: usize,
    pub(crate) pd: PdHandle,
    pub(crate) object: KeyObject,
    pub(crate) posted: PostedKey,
    /// Queue pair that it was granted through last.
    pub(crate) through: Option<QpId>,
    /// State shared with other loops that use it.
    pub(crate) shared: Option<Arc<Shared>>,
    /// Another loop made it.
    pub(crate) borrowed: bool,
}

/// State of a key that loops share: the lasting part of a [`PostedKey`].
pub(crate) struct Shared(AtomicU64);

impl Shared {
    const GRANTED: u64 = 1 << 32;

    pub(crate) fn new(posted: &PostedKey) -> Self {
        Self(AtomicU64::new(Self::word(posted)))
    }

    fn word(posted: &PostedKey) -> u64 {
        let granted = if posted.granted { Self::GRANTED } else { 0 };
        u64::from(posted.key.0) | granted
    }

    fn load(&self, posted: &mut PostedKey) {
        let word = self.0.load(Ordering::Acquire);
        (posted.key, posted.granted) = (RKey(word as u32), word & Self::GRANTED != 0);
    }
}

/// Protection domain for another loop.
pub(crate) struct LentPd {
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) handle: PdHandle,
}

/// Registration for another loop.
pub(crate) struct LentMr {
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) region: Arc<Region>,
}

/// Key for another loop.
pub(crate) struct LentKey {
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) handle: PdHandle,
    pub(crate) object: KeyObject,
    pub(crate) shared: Arc<Shared>,
}

impl SoftKey {
    /// Reads the changes of other loops.
    pub(crate) fn refresh(&mut self) {
        if let Some(shared) = &self.shared {
            shared.load(&mut self.posted);
        }
    }

    /// Returns the current remote key.
    pub(crate) fn current(&self) -> RKey {
        let shared = self.shared.as_ref();
        shared.map_or(self.posted.key, |shared| RKey(shared.0.load(Ordering::Acquire) as u32))
    }

    /// Publishes its state to other loops.
    pub(crate) fn publish(&self) {
        if let Some(shared) = &self.shared {
            shared.0.store(Shared::word(&self.posted), Ordering::Release);
        }
    }

    pub(crate) fn is_window_1(&self) -> bool {
        matches!(&self.object, KeyObject::Window(w) if w.kind() == WindowKind::Type1)
    }

    /// Returns the operation that opens it under a key.
    pub(crate) fn open(&self, key: RKey, at: &Range, access: AccessFlags) -> SendOp {
        match self.object {
            KeyObject::Fast(_) => SendOp::FastRegister(FastRegister {
                key,
                lkey: at.lkey,
                addr: at.addr,
                length: at.length,
                iova: at.iova,
                access,
            }),
            KeyObject::Window(_) => SendOp::BindWindow(BindWindow {
                key,
                lkey: at.lkey,
                addr: at.addr,
                length: at.length,
                access,
            }),
        }
    }

    /// Returns the operation that closes it. A type 1 window ends by being bound to nothing, under another key.
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

/// Bytes of a registration.
pub(crate) struct Range {
    pub(crate) lkey: LKey,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) iova: u64,
}
