//! Signal calls of libc, in front of the real ones.
//!
//! Faults of copies from and to registered memory have a handler ([`roce_verbs::mem::fault`]). Actions that the program sets for SIGSEGV and
//! SIGBUS are beneath it, where the program finds them as it has set them, and no thread blocks these two. Everything else goes straight
//! through, and everything does before memory is registered.

use std::{mem, ptr};

use libc::{c_int, sighandler_t, sigset_t};
use roce_verbs::mem::fault;

use crate::{
    errno::Errno,
    symbols::{Call, Next, calls},
};

/// Signal calls, for programs that loaded this library too late.
pub(crate) static CALLS: &[Call] = calls![sigaction, signal, sigprocmask, pthread_sigmask];

/// Has the handler of faults set by the real `sigaction`. Call it before memory is registered.
pub(crate) fn prepare() {
    fault::use_sigaction(real_sigaction);
}

/// Fails with ENOSYS: libc has no such function.
fn missing<T>(returned: T) -> T {
    Errno::NOSYS.set();
    returned
}

unsafe extern "C" fn real_sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: libc's function of this name has this signature, or there is none.
    static NEXT: Next<fault::Sigaction> = unsafe { Next::new(c"sigaction") };
    // SAFETY: the caller's arguments.
    NEXT.get()
        .map_or_else(|| missing(-1), |real| unsafe { real(number, new, old) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: the program's arguments.
    unsafe { fault::program_action(number, new, old).unwrap_or_else(|| real_sigaction(number, new, old)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: libc's function of this name has this signature, or there is none.
    static NEXT: Next<unsafe extern "C" fn(c_int, sighandler_t) -> sighandler_t> = unsafe { Next::new(c"signal") };
    // SAFETY: zeroes are an action, and a set without signals.
    let (mut new, mut old): (libc::sigaction, libc::sigaction) = unsafe { mem::zeroed() };
    new.sa_sigaction = handler;
    new.sa_flags = libc::SA_RESTART;
    // SAFETY: a set, and actions of this frame.
    let status = unsafe {
        libc::sigaddset(&raw mut new.sa_mask, number);
        match handler {
            libc::SIG_ERR => None,
            _ => fault::program_action(number, &raw const new, &raw mut old),
        }
    };
    match status {
        Some(0) => old.sa_sigaction,
        Some(_) => libc::SIG_ERR,
        // Looked up only here: the rest is async-signal-safe, and `dlsym` is not.
        None => match NEXT.get() {
            // SAFETY: the program's arguments.
            Some(real) => unsafe { real(number, handler) },
            None => missing(libc::SIG_ERR),
        },
    }
}

type Mask = unsafe extern "C" fn(c_int, *const sigset_t, *mut sigset_t) -> c_int;

/// Calls one of the two functions that change a thread's mask.
///
/// # Safety
/// As for that function; `next` is it.
unsafe fn change_mask(next: &Next<Mask>, how: c_int, new: *const sigset_t, old: *mut sigset_t) -> Option<c_int> {
    let real = next.get()?;
    // SAFETY: the caller's promise.
    unsafe {
        let fewer = fault::program_mask(how, new);
        Some(real(how, fewer.as_ref().map_or(new, ptr::from_ref), old))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigprocmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: libc's function of this name has this signature, or there is none.
    static NEXT: Next<Mask> = unsafe { Next::new(c"sigprocmask") };
    // SAFETY: the program's arguments.
    unsafe { change_mask(&NEXT, how, new, old) }.unwrap_or_else(|| missing(-1))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: libc's function of this name has this signature, or there is none.
    static NEXT: Next<Mask> = unsafe { Next::new(c"pthread_sigmask") };
    // SAFETY: the program's arguments.
    unsafe { change_mask(&NEXT, how, new, old) }.unwrap_or(libc::ENOSYS)
}
