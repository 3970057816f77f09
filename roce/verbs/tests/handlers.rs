//! Signal handlers of the program, beside faults of accesses. One test: signal handlers are the process's.

use std::{
    ffi::{c_int, c_void},
    mem,
    os::unix::process::ExitStatusExt,
    process::Command,
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};

use roce_verbs::mem::{AccessError, MemoryTable, NewRegion, PdHandle, Region, fault, fault::Fault};
use roce_verbs::{AccessFlags, DeviceLimits, Qpn};

const PAGE: usize = 4096;

/// A page that can't be accessed.
fn page() -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(ptr::null_mut(), PAGE, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

struct Bed {
    table: MemoryTable,
    pd: PdHandle,
    region: std::sync::Arc<Region>,
}

impl Bed {
    fn new() -> Self {
        let table = MemoryTable::new([7; 32], &DeviceLimits::software(1));
        let pd = table.alloc_pd().unwrap();
        let new = NewRegion {
            pd,
            ptr: page(),
            len: PAGE,
            iova: 0,
            access: AccessFlags::REMOTE_READ,
            persist: None,
        };
        // SAFETY: nothing else uses the page.
        let region = unsafe { table.register(&new) }.unwrap();
        Self { table, pd, region }
    }

    /// An access of the engine's, which faults.
    fn fault(&self) {
        let (key, need) = (self.region.rkey(), AccessFlags::REMOTE_READ);
        let span = self
            .table
            .resolve_remote(self.pd, Qpn::new(1), key, 0, 8, need)
            .unwrap();
        assert_eq!(span.read(0, &mut [0; 8]), Err(AccessError::Fault(Fault)));
    }

    /// As many as a thread makes until it looks again whether the handler is in place.
    fn fault_often(&self) {
        let buffer = self.table.alloc_region(self.pd, 8, AccessFlags::empty()).unwrap();
        for _ in 0..1100 {
            buffer.read(0, &mut [0]).unwrap();
        }
        self.fault();
    }
}

static FIRST: AtomicUsize = AtomicUsize::new(0);
static SECOND: AtomicUsize = AtomicUsize::new(0);
/// Action that the second handler has replaced, and passes signals on to.
static REPLACED: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Makes the page accessible that a fault was on, so that the access goes on.
extern "C" fn first(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    FIRST.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the information of a fault, or of a signal that was sent.
    unsafe {
        if (*info).si_code > 0 {
            let at = (*info).si_addr() as usize & !(PAGE - 1);
            assert_eq!(libc::mprotect(at as *mut c_void, PAGE, libc::PROT_READ), 0);
        }
    }
}

/// Passes all signals on.
extern "C" fn second(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    SECOND.fetch_add(1, Ordering::Relaxed);
    // SAFETY: an action that was replaced, which has a handler.
    unsafe {
        let replaced = (*REPLACED.load(Ordering::Relaxed)).sa_sigaction;
        let handler = mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(replaced);
        handler(signal, info, context);
    }
}

/// Returns the action before.
fn set(handler: usize, flags: c_int) -> libc::sigaction {
    // SAFETY: zeroes are an action; the handlers are async-signal-safe.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = (mem::zeroed(), mem::zeroed());
        new.sa_sigaction = handler;
        new.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const new, &raw mut old), 0);
        old
    }
}

/// A fault of the program's own.
fn own_fault() {
    // SAFETY: the handler makes the page accessible.
    unsafe { page().read_volatile() };
}

fn counts() -> (usize, usize) {
    (FIRST.load(Ordering::Relaxed), SECOND.load(Ordering::Relaxed))
}

/// Checks what `program_action` says and does.
fn by_library(bed: &Bed) {
    // SAFETY: zeroes are an action; the handlers are async-signal-safe.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = (mem::zeroed(), mem::zeroed());
        new.sa_sigaction = first as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESETHAND;
        libc::sigaddset(&raw mut new.sa_mask, libc::SIGUSR1);
        assert_eq!(
            fault::program_action(libc::SIGSEGV, &raw const new, ptr::null_mut()),
            Some(0)
        );
        assert_eq!(fault::program_action(libc::SIGSEGV, ptr::null(), &raw mut old), Some(0));
        assert_eq!((old.sa_sigaction, old.sa_flags), (new.sa_sigaction, new.sa_flags));
        assert_eq!(libc::sigismember(&raw const old.sa_mask, libc::SIGUSR1), 1);
        assert_eq!(libc::sigismember(&raw const old.sa_mask, libc::SIGUSR2), 0);
        bed.fault();
        let before = counts();
        own_fault();
        assert_eq!(counts(), (before.0 + 1, before.1));
        // SA_RESETHAND: once.
        assert_eq!(fault::program_action(libc::SIGSEGV, ptr::null(), &raw mut old), Some(0));
        assert_eq!(old.sa_sigaction, libc::SIG_DFL);
        bed.fault();
        assert_eq!(fault::program_action(libc::SIGUSR1, ptr::null(), &raw mut old), None);
    }
}

/// In a process of its own: what ends a program still does.
fn end(how: &str) -> ! {
    let bed = Bed::new();
    set(libc::SIG_DFL, 0);
    bed.fault_often();
    match how {
        "fault" => own_fault(),
        // SAFETY: a plain call.
        _ => _ = unsafe { libc::raise(libc::SIGSEGV) },
    }
    unreachable!("the signal has no effect");
}

#[test]
fn programs_get_their_own_faults() {
    if let Ok(how) = std::env::var("END_BY") {
        end(&how);
    }
    for how in ["fault", "raise"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let ended = again
            .env("END_BY", how)
            .args(["--exact", "programs_get_their_own_faults"])
            .output();
        let ended = ended.unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGSEGV), "{how}: {ended:?}");
    }

    // A handler that was there before.
    set(first as *const () as usize, libc::SA_SIGINFO);
    let bed = Bed::new();
    bed.fault();
    assert_eq!(counts(), (0, 0));
    own_fault();
    assert_eq!(counts(), (1, 0));
    // SAFETY: a plain call.
    unsafe { libc::raise(libc::SIGSEGV) };
    assert_eq!(counts(), (2, 0), "a signal that was sent");

    // Handlers that replace ours, and pass signals on to it; again and again, as by code that makes sure of its handler.
    for n in 1..=20 {
        let old = set(second as *const () as usize, libc::SA_SIGINFO | libc::SA_ONSTACK);
        if n == 1 {
            REPLACED.store(Box::into_raw(Box::new(old)), Ordering::Relaxed);
        }
        let before = counts();
        own_fault();
        assert_eq!(counts(), (before.0 + 1, before.1 + 1), "{n}");
        bed.fault_often();
        assert_eq!(counts(), (before.0 + 1, before.1 + 1), "{n}");
        own_fault();
        assert_eq!(counts(), (before.0 + 2, before.1 + 2), "{n}");
    }

    // A registration looks at once.
    set(first as *const () as usize, libc::SA_SIGINFO);
    let other = Bed::new();
    let before = counts();
    other.fault();
    assert_eq!(counts(), before);
    by_library(&other);
}
