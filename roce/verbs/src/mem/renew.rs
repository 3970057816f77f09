//! Keys that are renewed: those of fast regions and windows.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::{
    AccessFlags, LKey, RKey, SendOp,
    wr::{BindWindow, FastRegister},
};

use crate::mem::{
    error::MemError,
    object::{FastRegion, Window},
    table::MemoryTable,
};

/// The key that a fast region or window has once everything posted is executed.
#[derive(Debug)]
pub struct PostedKey {
    /// The key.
    pub key: RKey,
    /// It has been granted, and not been revoked since.
    pub granted: bool,
    /// Random bytes for the next keys, lowest first, and how many are left.
    random: u64,
    left: u8,
}

impl PostedKey {
    /// That of a new object.
    pub const fn new(key: RKey) -> Self {
        Self {
            key,
            granted: false,
            random: 0,
            left: 0,
        }
    }

    /// A key to renew it with: the consumer's byte is random, and another than before. The other three are the object's
    /// index, which lasts as long as the object (IBA 10.6.3.3).
    pub fn next(&mut self, mem: &MemoryTable) -> RKey {
        loop {
            if self.left == 0 {
                (self.random, self.left) = (mem.random(), 8);
            }
            let byte = (self.random & 0xff) as u32;
            (self.random, self.left) = (self.random >> 8, self.left - 1);
            if byte != self.key.0 & 0xff {
                return RKey(self.key.0 & !0xff | byte);
            }
        }
    }
}

/// Object whose key is renewed.
#[derive(Debug)]
pub enum Renewable {
    /// Target of fast registrations.
    Fast(Arc<FastRegion>),
    /// Memory window.
    Window(Arc<Window>),
}

/// Object with its key.
#[derive(Debug)]
pub struct RenewedKey {
    /// The object.
    pub object: Renewable,
    /// Its key.
    pub posted: PostedKey,
}

impl RenewedKey {
    /// That of a new object.
    pub fn new(object: Renewable) -> Self {
        let key = match &object {
            Renewable::Fast(fast) => fast.rkey(),
            Renewable::Window(window) => window.rkey(),
        };
        Self {
            object,
            posted: PostedKey::new(key),
        }
    }

    fn is_window_1(&self) -> bool {
        matches!(&self.object, Renewable::Window(window) if !window.kind().is_type2())
    }

    /// Returns the operation that opens a range.
    fn open(&self, at: FastRegister) -> SendOp {
        match self.object {
            Renewable::Fast(_) => SendOp::FastRegister(at),
            Renewable::Window(_) => SendOp::BindWindow(BindWindow {
                key: at.key,
                lkey: at.lkey,
                addr: at.addr,
                length: at.length,
                access: at.access,
            }),
        }
    }

    /// Returns the key of the next grant, and the operations that open the range `at` under it. They close a former grant first; a window
    /// of type 1 is bound again without that (IBA 10.6.7.2.1).
    pub fn grant(&mut self, mem: &MemoryTable, at: FastRegister) -> (RKey, SmallVec<[SendOp; 2]>) {
        let (former, key) = (self.posted.key, self.posted.next(mem));
        let open = self.open(FastRegister { key, ..at });
        let ops = match self.posted.granted && !self.is_window_1() {
            true => smallvec![SendOp::LocalInvalidate(former), open],
            false => smallvec![open],
        };
        (key, ops)
    }

    /// Returns the operation that closes it, and its key after that. A window of type 1 is bound to nothing, under another key.
    pub fn revoke(&mut self, mem: &MemoryTable) -> (RKey, SendOp) {
        if !self.is_window_1() {
            return (self.posted.key, SendOp::LocalInvalidate(self.posted.key));
        }
        let key = self.posted.next(mem);
        let nothing = FastRegister {
            key,
            lkey: LKey::default(),
            addr: 0,
            length: 0,
            iova: 0,
            access: AccessFlags::empty(),
        };
        (key, self.open(nothing))
    }

    /// Releases the object.
    ///
    /// # Errors
    /// As [`MemoryTable::dealloc_fast`] and [`MemoryTable::dealloc_window`].
    pub fn release(&self, mem: &MemoryTable) -> Result<(), MemError> {
        match &self.object {
            Renewable::Fast(fast) => mem.dealloc_fast(fast),
            Renewable::Window(window) => mem.dealloc_window(window),
        }
    }
}
