//! What a fork leaves of us.
//!
//! A child has the parent's memory, but none of its threads, and it shares the parent's sockets. So everything made before
//! the fork is dead in the child: verbs on it fail with EIO and touch neither locks nor the wire. What the child opens
//! itself is its own. The locks of this library's tables are held across a fork, so that the child finds them whole.

use std::sync::{
    Once,
    atomic::{AtomicU32, Ordering},
};

use crate::ret::{Errno, Result};

static GENERATION: AtomicU32 = AtomicU32::new(1);
static HANDLERS: Once = Once::new();

/// Counts the forks between the first process and this one.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Whether something made at `born` may be used in this process.
pub(crate) fn check(born: u32) -> Result<()> {
    if born == generation() { Ok(()) } else { Err(Errno::IO) }
}

extern "C" fn prepare() {
    crate::engine::hold_tables();
}

extern "C" fn parent() {
    crate::engine::release_tables();
}

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    crate::engine::release_tables();
}

/// Sets the handlers up, once: not at load, since a preloaded library is in every program.
pub(crate) fn watch() {
    HANDLERS.call_once(|| {
        // SAFETY: the handlers are plain functions of this library, which is never unloaded (it owns threads).
        let failed = unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
        if failed != 0 {
            tracing::error!("pthread_atfork failed: forked children must not use verbs");
        }
    });
}
