//! Threads of this library within programs of others.

use std::{
    io,
    marker::PhantomData,
    mem, ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

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

/// Slice of a thread that runs briefly and must run soon.
const SHORT_SLICE: Duration = Duration::from_micros(100);

/// Attributes of `sched_setattr(2)`, up to those of deadline scheduling.
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// Gives the calling thread short slices (Linux 6.12), so that it preempts threads that compute when it wakes. Best effort: older kernels
/// and other scheduling policies are left as they are.
pub(crate) fn shorten_slice() {
    let size = size_of::<SchedAttr>() as u32;
    let mut attr = SchedAttr::default();
    // SAFETY: the kernel writes at most `size` bytes to the stack.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    if read != 0 || attr.policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attr.size = size;
    attr.runtime = SHORT_SLICE.as_nanos() as u64;
    // SAFETY: the kernel reads `size` bytes from the stack.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

/// How long [`Thread::finish`] waits for what is being done.
const PATIENCE: Duration = Duration::from_secs(5);

/// How far a thread is.
enum Stage {
    /// It has not begun.
    Starting(Box<dyn FnOnce() + Send>),
    /// It was ended before.
    Unwanted,
    Working,
    /// All is done, and what was done it with is dropped.
    Done {
        panicked: bool,
    },
}

struct Progress {
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl Progress {
    fn of(work: impl FnOnce() + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            stage: Mutex::new(Stage::Starting(Box::new(work))),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the work out if it has not begun; then this is the stage.
    fn take(&self, next: Stage) -> Option<Box<dyn FnOnce() + Send>> {
        let mut stage = self.lock();
        match mem::replace(&mut *stage, next) {
            Stage::Starting(work) => Some(work),
            other => {
                *stage = other;
                None
            }
        }
    }
}

/// Says that the work is done, or has panicked.
struct AtEnd(Arc<Progress>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        *self.0.lock() = Stage::Done {
            panicked: thread::panicking(),
        };
        self.0.changed.notify_all();
    }
}

/// A thread that is told to end and then waited for, also where the dynamic linker's lock is held: destructors of a library that a
/// program unloads may close what the library has opened. A thread that begins, or has its first thread-local variable with a
/// destructor, needs that lock (`__cxa_thread_atexit_impl`), so that waiting for it without end would be a deadlock.
pub struct Thread {
    progress: Arc<Progress>,
    handle: thread::JoinHandle<()>,
}

impl Thread {
    /// Starts it as [`start_thread`] does.
    ///
    /// # Errors
    /// When there can be no more threads.
    pub fn start(name: impl Into<String>, work: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let progress = Progress::of(work);
        let theirs = progress.clone();
        let handle = start_thread(name, move || {
            if let Some(work) = theirs.take(Stage::Working) {
                let _end = AtEnd(theirs);
                work();
            }
        })?;
        Ok(Self { progress, handle })
    }

    /// Its name among threads.
    pub fn id(&self) -> thread::ThreadId {
        self.handle.thread().id()
    }

    /// Waits until the work is done, which has been told to end. What has not begun is dropped without having been done. False if
    /// it has panicked, or takes longer than five seconds, in which case it is left to itself, as it is if the thread itself calls.
    pub fn finish(self) -> bool {
        if self.id() == thread::current().id() {
            return true;
        }
        if self.progress.take(Stage::Unwanted).is_some() {
            return true;
        }
        let working = |stage: &mut Stage| matches!(stage, Stage::Working);
        let (stage, changed) = (self.progress.lock(), &self.progress.changed);
        let waited = changed.wait_timeout_while(stage, PATIENCE, working);
        let (stage, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let Stage::Done { panicked } = *stage else {
            return false;
        };
        drop(stage);
        // What is left of it needs no lock of the dynamic linker.
        self.handle.join().is_ok() && !panicked
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
        let progress = Progress::of(|| panic!("worked"));
        // One that hangs before its work, as if it waited for the dynamic linker.
        let (tell, told) = mpsc::channel::<()>();
        let handle = start_thread("hangs", move || _ = told.recv()).unwrap();
        assert!(Thread { progress, handle }.finish());
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
        for signal in FAULTS {
            assert!(!is_blocked(signal), "{signal} of {inside:x}");
        }
    }
}
