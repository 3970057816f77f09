//! Access to memory that may not be there: programs unmap and protect registered memory, and truncate files beneath it.
//!
//! Copies and atomics are routines of their own. A signal handler knows their addresses: of a fault in one of them
//! (SIGSEGV, SIGBUS) it makes an error that the routine returns, and passes every other signal on to the program's action.
//! So an access costs the same as without all this as long as nothing faults.
//!
//! - The handler is in place once memory of others is registered ([`install`]), also if the program sets another later
//!   (`handler.rs`).
//! - A thread that blocks these signals would be killed by a fault. The first access of a thread unblocks both in it.
//! - Both are checked again with every 1,024th access of a thread.

use core::cell::Cell;

use thiserror::Error;

mod guard;
mod handler;
mod routines;
mod slots;

pub use guard::Guard;
pub use handler::{Sigaction, install, program_action, program_mask, use_sigaction};

/// A page of the memory is missing or protected, or behind the end of its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the memory is not mapped, protected, or behind the end of its file")]
pub struct Fault;

/// Accesses of a thread between two checks that faults reach the handler. A check takes three system calls.
const ACCESSES: u32 = 1024;

thread_local! {
    /// Accesses until the next check.
    static UNCHECKED: Cell<u32> = const { Cell::new(0) };
}

/// Has faults of this thread reach the handler.
#[inline]
fn prepare() {
    if !handler::is_installed() {
        return;
    }
    UNCHECKED.with(|left| match left.get().checked_sub(1) {
        Some(fewer) => left.set(fewer),
        None => {
            left.set(ACCESSES);
            handler::check();
        }
    });
}

fn done(status: u32) -> Result<(), Fault> {
    match status {
        0 => Ok(()),
        _ => Err(Fault),
    }
}

/// Copies bytes out of memory that may not be there. Some may have been copied when that fails.
///
/// # Safety
/// No Rust object lies at `from`: it is registered memory of the program, or was.
#[inline]
pub(crate) unsafe fn read(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    prepare();
    // SAFETY: `out` is a Rust slice, which registered memory never is, so they don't overlap. The routines make no
    // assumption on `from`. Others may write it meanwhile, which tears bytes that are only ever treated as plain bytes.
    done(unsafe { routines::copy(out.as_mut_ptr(), from, out.len()) })
}

/// Copies bytes into memory that may not be there, as [`read`]. The last byte comes after all others.
///
/// # Safety
/// As [`read`].
#[inline]
pub(crate) unsafe fn write(to: *mut u8, data: &[u8]) -> Result<(), Fault> {
    let Some((last, others)) = data.split_last() else {
        return Ok(());
    };
    prepare();
    // SAFETY: as in `read`, with the roles exchanged.
    done(unsafe { routines::copy(to, others.as_ptr(), others.len()) })?;
    // SAFETY: as above.
    done(unsafe { routines::store_byte(to.wrapping_add(others.len()), *last) })
}

/// Stores an aligned word at once, with release order.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn store(to: *mut u64, word: u64) -> Result<(), Fault> {
    prepare();
    // SAFETY: the caller's promise; what the routines do others may do at the same time.
    done(unsafe { routines::store(to, word) })
}

/// Adds to an aligned word, and returns what it was.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn fetch_add(word: *mut u64, add: u64) -> Result<u64, Fault> {
    prepare();
    let mut former = 0;
    // SAFETY: as in `store`.
    done(unsafe { routines::fetch_add(word, add, &raw mut former) })?;
    Ok(former)
}

/// Stores `swap` in an aligned word that equals `compare`, and returns what it was.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn compare_swap(word: *mut u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    prepare();
    let mut former = 0;
    // SAFETY: as in `store`.
    done(unsafe { routines::compare_swap(word, compare, swap, &raw mut former) })?;
    Ok(former)
}
