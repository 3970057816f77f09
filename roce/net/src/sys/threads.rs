//! Threads of this library within programs of others.

use std::{io, marker::PhantomData, mem, ptr, thread};

/// Signals that a thread brings upon itself: blocked, they would end the process past the program's handler.
const FAULTS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];

/// All other signals are blocked on this thread while it lives.
struct Blocked {
    before: libc::sigset_t,
    /// A mask belongs to a thread.
    _here: PhantomData<*const ()>,
}

impl Blocked {
    fn new() -> Self {
        // SAFETY: plain data of this frame, which the calls fill and read.
        unsafe {
            let (mut wanted, mut before) = (mem::zeroed(), mem::zeroed());
            libc::sigfillset(&raw mut wanted);
            for signal in FAULTS {
                libc::sigdelset(&raw mut wanted, signal);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const wanted, &raw mut before);
            let _here = PhantomData;
            Self { before, _here }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the mask that was before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}

/// Starts a thread that gets no signals: they are the program's, which may have blocked them on all threads that it knows of
/// to take them by `signalfd` or `sigwait`, and would be ended by one that finds another thread (`signal(7)`).
///
/// # Errors
/// When there can be no more threads.
pub fn start_thread<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<thread::JoinHandle<T>> {
    // A thread begins with the mask of the one that starts it.
    let _blocked = Blocked::new();
    thread::Builder::new().name(name.into()).spawn(work)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The mask of this thread, signal n as bit n - 1.
    fn mask() -> u64 {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn a_thread_gets_no_signal_but_its_own_faults() {
        let before = mask();
        let inside = start_thread("quiet", mask).unwrap().join().unwrap();
        assert_eq!(mask(), before, "the mask of the thread that started it");
        let is_blocked = |signal: libc::c_int| inside & (1 << (signal - 1)) != 0;
        for signal in [libc::SIGUSR2, libc::SIGTERM, libc::SIGINT, libc::SIGALRM, libc::SIGCHLD] {
            assert!(is_blocked(signal), "{signal} of {inside:x}");
        }
        for signal in FAULTS {
            assert!(!is_blocked(signal), "{signal} of {inside:x}");
        }
    }
}
