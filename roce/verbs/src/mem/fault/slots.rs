//! Guarded mappings, in a list that a signal handler can read.

use core::{
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
};

/// Guarded mapping, as the signal handler finds it. Slots are reused, never freed.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// First byte; 0: none is guarded.
    pub(super) start: AtomicUsize,
    pub(super) len: AtomicUsize,
    /// Whether the mapping was replaced.
    pub(super) hit: AtomicBool,
    pub(super) taken: AtomicBool,
    next: AtomicPtr<Slot>,
}

/// The first of all slots.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// Iterates over all slots.
pub(super) fn all() -> impl Iterator<Item = &'static Slot> {
    let from = |at: &AtomicPtr<Slot>| {
        // SAFETY: slots are leaked when they are made, and complete when they are linked.
        unsafe { at.load(Ordering::Acquire).as_ref() }
    };
    core::iter::successors(from(&SLOTS), move |slot| from(&slot.next))
}

/// Creates another slot.
pub(super) fn link() -> &'static Slot {
    let slot: &'static Slot = Box::leak(Box::new(Slot {
        taken: AtomicBool::new(true),
        ..Slot::default()
    }));
    let mut first = SLOTS.load(Ordering::Acquire);
    loop {
        slot.next.store(first, Ordering::Relaxed);
        let this = ptr::from_ref(slot).cast_mut();
        match SLOTS.compare_exchange_weak(first, this, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return slot,
            Err(other) => first = other,
        }
    }
}

/// Replaces the guarded mapping that an address lies in. Returns false if there is none. Async-signal-safe: atomics and one system
/// call.
pub(super) fn replace(addr: usize) -> bool {
    for slot in all() {
        let start = slot.start.load(Ordering::Acquire);
        let len = slot.len.load(Ordering::Relaxed);
        if start == 0 || !(start..start.saturating_add(len)).contains(&addr) {
            continue;
        }
        slot.hit.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: who has just touched the mapping keeps it alive, so all of the range is its own and nothing else is replaced.
        let at = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(start),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        return at != libc::MAP_FAILED;
    }
    false
}
