//! Threads of this library within programs of others.

use std::{
    io, mem,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Signals that a thread brings upon itself: blocked, they would end the process past the program's handler.
const FAULTS: [Signal; 5] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGTRAP,
];

/// Starts a thread that gets no signals: they are the program's, which may have blocked them on all threads that it knows of
/// to take them by `signalfd` or `sigwait`, and would be ended by one that finds another thread (`signal(7)`).
///
/// # Errors
/// When there can be no more threads.
pub fn start_thread<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<thread::JoinHandle<T>> {
    let mut blocked = SigSet::all();
    FAULTS.iter().for_each(|signal| blocked.remove(*signal));
    // A thread begins with the mask of the one that starts it.
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let thread = thread::Builder::new().name(name.into()).spawn(work);
    before.thread_set_mask()?;
    thread
}

/// Slice of a thread that runs briefly and must run soon.
const SHORT_SLICE: Duration = Duration::from_micros(100);

/// Gives the calling thread short slices (Linux 6.12), so that it preempts threads that compute when it wakes. Best effort: older kernels
/// and other scheduling policies are left as they are.
pub(crate) fn shorten_slice() {
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: integers, for which zero is a value.
    let mut attr: libc::sched_attr = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes to the stack.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if read != 0 || attr.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attr.size = size;
    attr.sched_runtime = SHORT_SLICE.as_nanos() as u64;
    // SAFETY: the kernel reads `size` bytes from the stack.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// Longest time that [`Thread::finish`] waits.
const TIMEOUT: Duration = Duration::from_secs(5);

type Work = Box<dyn FnOnce() + Send>;

/// Takes the work out, unless it has begun.
fn take(work: &Mutex<Option<Work>>) -> Option<Work> {
    work.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// A thread that is told to end and then waited for, also where the dynamic linker's lock is held: destructors of a library that a
/// program unloads may close what the library has opened. A thread that begins, or has its first thread-local variable with a
/// destructor, needs that lock (`__cxa_thread_atexit_impl`), so that waiting for it without end would be a deadlock.
pub struct Thread {
    work: Arc<Mutex<Option<Work>>>,
    /// Disconnected when the work is done and its captures are dropped.
    alive: Receiver<()>,
    handle: thread::JoinHandle<()>,
}

impl Thread {
    /// Starts it as [`start_thread`] does.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn start(name: impl Into<String>, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let work: Arc<Mutex<Option<Work>>> = Arc::new(Mutex::new(Some(Box::new(work))));
        let theirs = work.clone();
        let (lives, alive) = channel();
        let handle = start_thread(name, move || {
            // Dropped last.
            let _lives = lives;
            if let Some(work) = take(&theirs) {
                work();
            }
        })?;
        Ok(Self { work, alive, handle })
    }

    /// Returns its identifier.
    pub fn id(&self) -> thread::ThreadId {
        self.handle.thread().id()
    }

    /// Waits until the work is done, which has been told to end. Work that has not begun is dropped. False if it has panicked, or takes
    /// longer than five seconds, in which case it is left to itself, as it is if the thread itself calls.
    pub fn finish(self) -> bool {
        if self.id() == thread::current().id() || take(&self.work).is_some() {
            return true;
        }
        match self.alive.recv_timeout(TIMEOUT) {
            Err(RecvTimeoutError::Timeout) => false,
            // The rest of the thread needs no lock of the dynamic linker.
            _ => self.handle.join().is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::mpsc};

    use super::*;

    #[test]
    fn a_thread_that_ends_is_waited_for() {
        let (tell, told) = mpsc::channel::<()>();
        let done = Arc::new(Mutex::new(false));
        let theirs = done.clone();
        let (began, begun) = mpsc::channel();
        let thread = Thread::start("ends", move || {
            began.send(()).unwrap();
            let _ = told.recv();
            *theirs.lock().unwrap() = true;
        })
        .unwrap();
        begun.recv().unwrap();
        drop(tell);
        assert!(thread.finish());
        assert!(*done.lock().unwrap());
        assert_eq!(Arc::strong_count(&done), 1, "its captures are dropped");
    }

    #[test]
    fn a_thread_that_has_not_begun_never_works() {
        let work: Work = Box::new(|| panic!("worked"));
        let work = Arc::new(Mutex::new(Some(work)));
        // One that hangs before its work, as if it waited for the dynamic linker.
        let (tell, told) = mpsc::channel::<()>();
        let handle = start_thread("hangs", move || _ = told.recv()).unwrap();
        let (_lives, alive) = channel();
        assert!(Thread { work, alive, handle }.finish());
        drop(tell);
    }

    #[test]
    fn a_panic_is_told() {
        let thread = Thread::start("panics", || panic!("on purpose")).unwrap();
        while !thread.handle.is_finished() {
            thread::yield_now();
        }
        assert!(!thread.finish());
    }

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
        for signal in FAULTS.map(|signal| signal as libc::c_int) {
            assert!(!is_blocked(signal), "{signal} of {inside:x}");
        }
    }
}
