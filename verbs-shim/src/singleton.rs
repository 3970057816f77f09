//! Objects that exist once in a process, while they are used.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

use crate::ret::{self, Result};

/// Object of which a process has one while it is used.
///
/// A `std` lock: it needs nothing that a fork could leave half done.
pub(crate) struct Singleton<T> {
    slot: Mutex<Slot<T>>,
    /// The object was opened, or that failed.
    changed: Condvar,
}

enum Slot<T> {
    Empty,
    /// A thread opens it, without the lock: it may have to start a broker first.
    Opening,
    Open(Weak<T>),
}

impl<T> Singleton<T> {
    pub(crate) fn new() -> Self {
        Self {
            slot: Mutex::new(Slot::Empty),
            changed: Condvar::new(),
        }
    }

    /// Returns the object if it exists.
    pub(crate) fn current(&self) -> Option<Arc<T>> {
        match &*self.slot.lock().unwrap_or_else(PoisonError::into_inner) {
            Slot::Open(weak) => weak.upgrade(),
            _ => None,
        }
    }

    /// Returns the object, opened if there is none. Waits while another thread opens it.
    ///
    /// # Errors
    /// The errors of `open`.
    pub(crate) fn get(&self, open: impl FnOnce() -> Result<Arc<T>>) -> Result<Arc<T>> {
        let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        let opening = |slot: &mut Slot<T>| matches!(slot, Slot::Opening);
        let waited = self.changed.wait_while(slot, opening);
        let mut slot = waited.unwrap_or_else(PoisonError::into_inner);
        if let Slot::Open(weak) = &*slot
            && let Some(object) = weak.upgrade()
        {
            return Ok(object);
        }
        *slot = Slot::Opening;
        drop(slot);
        let opened = ret::run(open);
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = match &opened {
            Ok(object) => Slot::Open(Arc::downgrade(object)),
            Err(_) => Slot::Empty,
        };
        self.changed.notify_all();
        opened
    }
}
