//! State of the library after a fork.
//!
//! A child has the parent's memory, but none of its threads, and it shares the parent's sockets. So everything made before
//! the fork is dead in the child, where verbs touch neither its locks nor the wire: destroying an object forgets it and
//! returns 0, used or not, and all other verbs on it fail with EIO. What the child opens itself is its own. What this library keeps of a process is an [`Own`], of which the child has a fresh one; only the list
//! of devices, to which programs keep pointers, is the same in both, and its lock is held across a fork, so that the child
//! finds it whole.

use std::{
    ptr,
    sync::{
        Once,
        atomic::{AtomicI64, AtomicPtr, AtomicU32, Ordering},
    },
};

use crate::errno::{Errno, Result};

static GENERATION: AtomicU32 = AtomicU32::new(1);
static HANDLERS: Once = Once::new();
/// The process whose memory this is.
static OWNER: AtomicI64 = AtomicI64::new(0);

/// Counts the forks between the first process and this one.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// State of this process alone: a forked child has a new one. So a fork waits for none of its locks, whatever is done under them, and
/// finds none of them locked by a thread that it has not.
pub(crate) struct Own<T: 'static> {
    current: AtomicPtr<Born<T>>,
    make: fn() -> T,
}

struct Born<T> {
    generation: u32,
    value: T,
    /// The parent's, never freed: that would end connections of the parent.
    _parents: *const Self,
}

impl<T: Send + Sync> Own<T> {
    pub(crate) const fn new(make: fn() -> T) -> Self {
        Self {
            current: AtomicPtr::new(ptr::null_mut()),
            make,
        }
    }

    /// This process's.
    pub(crate) fn get(&self) -> &'static T {
        loop {
            let known = self.current.load(Ordering::Acquire);
            let generation = generation();
            // SAFETY: null, or from a box that is never freed.
            if let Some(born) = unsafe { known.as_ref() }
                && born.generation == generation
            {
                return &born.value;
            }
            let fresh = Box::into_raw(Box::new(Born {
                generation,
                value: (self.make)(),
                _parents: known,
            }));
            let put = self
                .current
                .compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire);
            if put.is_err() {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

/// Whether something made at `born` may be used in this process.
pub(crate) fn check(born: u32) -> Result<()> {
    match born == generation() {
        true => Ok(()),
        false => {
            Err(Errno::IO.because("the object was created before fork(): open the device again in the child process"))
        }
    }
}

/// Whether the memory is this process's own. A child of vfork (Python's subprocess, posix_spawn) has its parent's, but
/// descriptors of its own, which it closes before it executes a program. False before [`watch`].
pub(crate) fn owns_memory() -> bool {
    OWNER.load(Ordering::Relaxed) == own_pid()
}

/// Makes this process the owner of its memory: a child by a system call (clone) runs no handlers.
pub(crate) fn own_memory() {
    OWNER.store(own_pid(), Ordering::Relaxed);
}

/// Number of this process. Asked of the kernel: a child of vfork shares what is remembered.
fn own_pid() -> i64 {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_getpid) }
}

/// Has a function called when the process exits by `exit` or the return of `main`: in children of a fork, too.
pub(crate) fn at_exit(call: extern "C" fn()) {
    // SAFETY: a plain function of this library, which is never unloaded (it owns threads).
    if unsafe { libc::atexit(call) } != 0 {
        tracing::error!("atexit failed: what is to be done at the end of the process is left out");
    }
}

extern "C" fn child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    own_memory();
}

/// Sets the handlers up, once: not at load, since a preloaded library is in every program. `hold` locks the tables that both
/// processes keep, before a fork; `release` unlocks them, in both.
pub(crate) fn watch(hold: extern "C" fn(), release: extern "C" fn()) {
    HANDLERS.call_once(|| {
        own_memory();
        // SAFETY: the handlers are plain functions of this library, which is never unloaded (it owns threads).
        let failed = unsafe {
            libc::pthread_atfork(Some(hold), Some(release), Some(release))
                | libc::pthread_atfork(None, None, Some(child))
        };
        if failed != 0 {
            tracing::error!("pthread_atfork failed: forked children must not use verbs");
        }
    });
}
