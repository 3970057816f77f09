//! Signal handler for faults, in front of the program's own.
//!
//! What the program had as action of SIGSEGV and SIGBUS, the handler's *beneath*, still gets all that is not ours: with the
//! same mask and flags, which the kernel applies because our action has them, too.
//!
//! A program may set an action of its own later.
//!
//! - Calls of `sigaction` that a library leads here ([`program_action`]) change what is beneath, and report that. It can have masks
//!   checked as well ([`program_mask`]).
//! - Other ways put the action in our place. [`check`] finds it there, and puts the handler in front of it again. Since such an
//!   action may call what it replaced, which is the handler, each time another instance of it is used, with a beneath of its own.

use core::{
    ffi::{c_int, c_void},
    mem, ptr,
    sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
};

use super::{routines, slots};

/// Signals of faults. The second is that of pages behind the end of a file.
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// Instances of the handler for each signal. A program whose own handlers push ours aside more often than that ends by faults again.
const INSTANCES: usize = 8;
/// Flags of an action beneath that ours takes over. SA_RESETHAND is done by the handler.
const TAKEN_OVER: c_int = libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER;

/// The function `sigaction(2)`.
pub type Sigaction = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
type Handler = extern "C-unwind" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Action of the program, as atomics for the handler. Two threads that set actions of one signal at the same time may mix their masks.
struct Action {
    handler: AtomicUsize,
    flags: AtomicI32,
    /// Signals 1 to 64.
    mask: AtomicU64,
}

impl Action {
    const fn default() -> Self {
        Self {
            handler: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicI32::new(0),
            mask: AtomicU64::new(0),
        }
    }

    fn set(&self, action: &libc::sigaction) {
        // SAFETY: a set of signals has at least 64 bits, the first of them for the first signals.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read_unaligned() };
        self.mask.store(mask, Ordering::Relaxed);
        self.flags.store(action.sa_flags, Ordering::Relaxed);
        self.handler.store(action.sa_sigaction, Ordering::Release);
    }

    fn get(&self) -> libc::sigaction {
        // SAFETY: all zeroes are an action.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = self.handler.load(Ordering::Acquire);
        action.sa_flags = self.flags.load(Ordering::Relaxed);
        let mask = self.mask.load(Ordering::Relaxed);
        // SAFETY: as in `set`.
        unsafe { (&raw mut action.sa_mask).cast::<u64>().write_unaligned(mask) };
        action
    }
}

/// State of one signal.
struct Signal {
    number: c_int,
    beneath: [Action; INSTANCES],
    /// Instances in use.
    used: AtomicUsize,
}

impl Signal {
    const fn new(number: c_int) -> Self {
        Self {
            number,
            beneath: [const { Action::default() }; INSTANCES],
            used: AtomicUsize::new(0),
        }
    }

    fn of(number: c_int) -> Option<&'static Self> {
        STATE.iter().find(|signal| signal.number == number)
    }

    /// The action in the kernel.
    fn current(&self) -> Option<libc::sigaction> {
        // SAFETY: all zeroes are an action, and the call only reports.
        unsafe {
            let mut action = mem::zeroed();
            (system()(self.number, ptr::null(), &raw mut action) == 0).then_some(action)
        }
    }

    /// Puts an instance of the handler in front of an action.
    fn put(&self, instance: usize, action: &libc::sigaction) -> c_int {
        self.beneath[instance].set(action);
        let mut ours = *action;
        ours.sa_sigaction = HANDLERS[instance] as usize;
        ours.sa_flags = match action.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
            _ => action.sa_flags & TAKEN_OVER,
        } | libc::SA_SIGINFO;
        // SAFETY: the handler is async-signal-safe.
        unsafe { system()(self.number, &raw const ours, ptr::null_mut()) }
    }

    /// Puts the handler in front of the program's action, unless it is there.
    fn check(&self) {
        let Some(current) = self.current().filter(|action| instance_of(action).is_none()) else {
            return;
        };
        let used = self.used.load(Ordering::Acquire);
        let again = (0..used).rfind(|instance| {
            let beneath = self.beneath[*instance].handler.load(Ordering::Relaxed);
            beneath == current.sa_sigaction
        });
        match again {
            Some(instance) => _ = self.put(instance, &current),
            None if used < INSTANCES && self.put(used, &current) == 0 => self.used.store(used + 1, Ordering::Release),
            None => {}
        }
    }
}

static STATE: [Signal; 2] = [Signal::new(SIGNALS[0]), Signal::new(SIGNALS[1])];
static HANDLERS: [Handler; INSTANCES] = [
    on_fault::<0>,
    on_fault::<1>,
    on_fault::<2>,
    on_fault::<3>,
    on_fault::<4>,
    on_fault::<5>,
    on_fault::<6>,
    on_fault::<7>,
];
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The process that has installed the handler. A child of vfork has its memory, but actions and masks of its own.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// One thread checks at a time. Others go on: what they would do is being done.
static CHECKING: AtomicBool = AtomicBool::new(false);
/// The system's `sigaction`; null: libc's.
static SYSTEM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

fn system() -> Sigaction {
    let found = SYSTEM.load(Ordering::Acquire);
    match found.is_null() {
        true => libc::sigaction,
        // SAFETY: what `use_sigaction` has stored.
        false => unsafe { mem::transmute::<*mut c_void, Sigaction>(found) },
    }
}

/// The instance of the handler that an action is.
fn instance_of(action: &libc::sigaction) -> Option<usize> {
    HANDLERS.iter().position(|h| *h as usize == action.sa_sigaction)
}

/// Whether this process has installed the handler.
fn is_owner() -> bool {
    // SAFETY: no arguments.
    is_installed() && OWNER.load(Ordering::Relaxed) == unsafe { libc::getpid() }
}

/// Sets the function that changes actions, for libraries that export a `sigaction` of their own. Call it before memory is registered.
pub fn use_sigaction(sigaction: Sigaction) {
    SYSTEM.store(sigaction as *mut c_void, Ordering::Release);
}

pub(super) fn is_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

/// Makes faults of accesses errors, from now on. Called when memory is registered that this crate has not allocated.
pub fn install() {
    // SAFETY: no arguments.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    INSTALLED.store(true, Ordering::Release);
    check();
}

/// Puts the handler in place, and has it called for faults of this thread.
#[cold]
pub(super) fn check() {
    // SAFETY: plain data of this frame.
    unsafe {
        let mut faults = mem::zeroed();
        libc::sigemptyset(&raw mut faults);
        for signal in SIGNALS {
            libc::sigaddset(&raw mut faults, signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const faults, ptr::null_mut());
    }
    if !CHECKING.swap(true, Ordering::Acquire) {
        STATE.iter().for_each(Signal::check);
        CHECKING.store(false, Ordering::Release);
    }
}

/// Does what a program asks `sigaction` for, beneath the handler. `None`: the signal is none of ours, and nothing was done.
///
/// Async-signal-safe, as `sigaction` is.
///
/// # Safety
/// As for `sigaction(2)`.
pub unsafe fn program_action(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> Option<c_int> {
    let signal = Signal::of(number).filter(|_| is_owner())?;
    let current = signal.current()?;
    let instance = instance_of(&current)?;
    let before = signal.beneath[instance].get();
    // SAFETY: null, or an action.
    let status = match unsafe { new.as_ref() } {
        None => 0,
        // SAFETY: an action of ours that the program got before its calls led here.
        Some(new) if instance_of(new).is_some() => unsafe { system()(number, new, ptr::null_mut()) },
        Some(new) => signal.put(instance, new),
    };
    if status != 0 {
        signal.beneath[instance].set(&before);
    } else if !old.is_null() {
        // SAFETY: the caller's promise.
        unsafe { old.write(before) };
    }
    Some(status)
}

/// Returns the signal mask for a thread whose program asks for `mask` (`sigprocmask`, `pthread_sigmask`): without the signals of faults.
/// `None`: use `mask` as it is.
///
/// # Safety
/// `mask` is null or a set of signals.
pub unsafe fn program_mask(how: c_int, mask: *const libc::sigset_t) -> Option<libc::sigset_t> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut mask = *mask.as_ref().filter(|_| how != libc::SIG_UNBLOCK)?;
        let blocks = SIGNALS
            .iter()
            .any(|signal| libc::sigismember(&raw const mask, *signal) == 1);
        if !blocks || !is_owner() {
            return None;
        }
        for signal in SIGNALS {
            libc::sigdelset(&raw mut mask, signal);
        }
        Some(mask)
    }
}

extern "C-unwind" fn on_fault<const INSTANCE: usize>(number: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: what the kernel, or an action that calls what it replaced, passes.
    unsafe { handle(INSTANCE, number, info, context) }
}

/// Handles a signal. The program's handler may leave this frame by `longjmp`, or because its thread is cancelled.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn handle(instance: usize, number: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: errno is the thread's own, and stays as it was for the interrupted code.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the caller's promise.
    let ours = unsafe { is_handled(number, info, context) };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !ours && let Some(signal) = Signal::of(number) {
        // SAFETY: the caller's promise.
        unsafe { pass_on(number, &signal.beneath[instance], info, context) };
    }
}

/// Whether a thread has sent the signal, rather than the kernel for an access.
///
/// # Safety
/// `info` is that of a signal.
unsafe fn is_sent(info: *const libc::siginfo_t) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (*info).si_code <= 0 }
}

/// Handles a fault of an access, or of a guarded mapping.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn is_handled(number: c_int, info: *const libc::siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: the caller's promise; signals of the kernel's have an address.
    unsafe {
        !is_sent(info)
            && (number == libc::SIGBUS && slots::replace((*info).si_addr() as usize) || routines::leave(context))
    }
}

/// Does what would have happened without the handler.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn pass_on(number: c_int, beneath: &Action, info: *mut libc::siginfo_t, context: *mut c_void) {
    let handler = beneath.handler.load(Ordering::Acquire);
    // SAFETY: the caller's promise.
    let sent = unsafe { is_sent(info) };
    match handler {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            let action = Action::default().get();
            // SAFETY: ends the process: an access that faulted is tried again, and what was sent is sent again.
            unsafe {
                system()(number, &raw const action, ptr::null_mut());
                if sent {
                    libc::raise(number);
                }
            }
        }
        _ => {
            if beneath.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
                beneath.handler.store(libc::SIG_DFL, Ordering::Release);
            }
            // SAFETY: the program's handler. One without SA_SIGINFO ignores all arguments but the first.
            let handler = unsafe { mem::transmute::<usize, Handler>(handler) };
            handler(number, info, context);
        }
    }
}
