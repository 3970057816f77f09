//! Functions that programs and librdmacm call: event channels, and the C library's `write` and `close`, which go on to the C library
//! for every descriptor that is not an event channel.

use std::{
    ffi::{c_int, c_void},
    mem,
    os::fd::RawFd,
    ptr,
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::Instant,
};

use super::{
    Errno, Result,
    abi::{self, Cmd},
    backend::Report,
    channel::FdSet,
    command::{Answer, Command},
    facade::{Facade, Id},
    ucma::Ucma,
};
use crate::{
    cancel::{self, Wait},
    device,
    engine::Engine,
    fork::{self, Own},
    interpose::{Call, Next},
    log, ret,
};

/// `struct rdma_event_channel`.
#[repr(C)]
struct RdmaEventChannel {
    fd: c_int,
}

// The C library's own, under the names that nobody interposes. A thread may be cancelled in them, which unwinds.
unsafe extern "C-unwind" {
    #[link_name = "__write"]
    fn libc_write(fd: c_int, buf: *const c_void, len: usize) -> isize;
    #[link_name = "__close"]
    fn libc_close(fd: c_int) -> c_int;
    fn pause() -> c_int;
}

static NEXT_WRITE: Next = Next::new(c"write");
static NEXT_CLOSE: Next = Next::new(c"close");

/// Looked up before the program begins: it may write in a handler of signals first, where nothing can be looked up.
#[used]
#[unsafe(link_section = ".init_array")]
static FIND_NEXT: extern "C" fn() = {
    extern "C" fn find() {
        NEXT_WRITE.get();
        NEXT_CLOSE.get();
    }
    find
};

/// `write` as if this library were not there.
///
/// # Safety
/// As the C library's.
unsafe fn next_write(fd: c_int, buf: *const c_void, len: usize) -> isize {
    type Write = unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize;
    // SAFETY: a function of this name, or none.
    let next = unsafe { mem::transmute::<*mut c_void, Option<Write>>(NEXT_WRITE.get()) };
    // SAFETY: the caller's.
    unsafe { next.unwrap_or(libc_write)(fd, buf, len) }
}

/// `close` as if this library were not there.
///
/// # Safety
/// As the C library's.
unsafe fn next_close(fd: c_int) -> c_int {
    type Close = unsafe extern "C-unwind" fn(c_int) -> c_int;
    // SAFETY: a function of this name, or none.
    let next = unsafe { mem::transmute::<*mut c_void, Option<Close>>(NEXT_CLOSE.get()) };
    // SAFETY: the caller's.
    unsafe { next.unwrap_or(libc_close)(fd) }
}

/// An address within libc.
pub(crate) fn inside_libc() -> *const c_void {
    libc_write as *const c_void
}

/// Replacements for libc's functions, for programs that loaded this library too late for symbol order.
pub(crate) static CALLS: [Call; 2] = [
    Call {
        name: "write",
        ours: write as *const c_void,
    },
    Call {
        name: "close",
        ours: close as *const c_void,
    },
];
/// Replacements for librdmacm's own, likewise.
pub(crate) static CHANNEL_CALLS: [Call; 2] = [
    Call {
        name: "rdma_create_event_channel",
        ours: rdma_create_event_channel as *const c_void,
    },
    Call {
        name: "rdma_destroy_event_channel",
        ours: rdma_destroy_event_channel as *const c_void,
    },
];

static CHANNELS: FdSet = FdSet::new();
/// Channels that are being closed, which takes as long as the device does.
static CLOSING: FdSet = FdSet::new();
/// The process that [`CHANNELS`] tells of. A child of vfork (Python's subprocess, posix_spawn) has the parent's memory but
/// descriptors of its own, and closes them before it executes a program.
static OWNER: AtomicI64 = AtomicI64::new(0);

/// This process. Asked of the kernel: a child of vfork shares whatever is remembered.
fn own_pid() -> i64 {
    // SAFETY: no arguments.
    unsafe { libc::syscall(libc::SYS_getpid) }
}

/// Whether a descriptor's number is that of an event channel of this process.
fn is_channel(fd: RawFd) -> bool {
    CHANNELS.contains(fd) && OWNER.load(Ordering::Relaxed) == own_pid()
}

/// Whether the descriptor of an event channel still is that channel's. A channel that the program has closed by `dup2` or
/// `close_range` is destroyed.
fn takes_commands(fd: RawFd) -> bool {
    let lost = is_lost(fd);
    if lost && !CLOSING.contains(fd) {
        forget_channel(fd);
    }
    !lost
}

/// Whether the number of an event channel is another file's, or nobody's.
fn is_lost(fd: RawFd) -> bool {
    with(|ucma| ucma.has_channel(fd) && !ucma.is_there(fd))
}

/// State of this process. The state of the process that it was forked from is out of reach, and never freed, since that would end
/// that process's connections.
static GLOBAL: Own<Mutex<Option<Ucma<Facade>>>> = Own::new(Mutex::default);

extern "C" fn after_fork_in_child() {
    OWNER.store(own_pid(), Ordering::Relaxed);
}

/// Watches for forks, once.
fn watch_forks() {
    static HANDLERS: Once = Once::new();
    fork::watch();
    HANDLERS.call_once(|| {
        // SAFETY: a plain function of this library, which is never unloaded.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        if failed != 0 {
            tracing::error!("pthread_atfork failed: forked children must not use RDMA_CM");
        }
    });
}

/// Runs something on what this process keeps. It must not wait for a broker: the whole of RDMA_CM would.
fn with<R>(body: impl FnOnce(&mut Ucma<Facade>) -> R) -> R {
    let mut slot = GLOBAL.get().lock().unwrap_or_else(PoisonError::into_inner);
    body(slot.get_or_insert_with(|| Ucma::new(Facade::default())))
}

/// Takes a report of the transport.
pub(crate) fn deliver(report: Report<Id>) {
    with(|ucma| ucma.on_report(report));
}

/// Does what is due. Returns when to come again.
pub(crate) fn tend() -> Option<Instant> {
    with(|ucma| ucma.ask_again(Instant::now()))
}

fn create_event_channel() -> Result<*mut RdmaEventChannel> {
    watch_forks();
    if device::list()?.is_empty() {
        return Err(
            Errno::NODEV.because("no interface is up and has an address, or none has one of FERROCE_ADDR (--addr)")
        );
    }
    // SAFETY: plain allocation; freed in rdma_destroy_event_channel, or by librdmacm's own free().
    let channel = unsafe { libc::malloc(size_of::<RdmaEventChannel>()) }.cast::<RdmaEventChannel>();
    if channel.is_null() {
        return Err(Errno::NOMEM);
    }
    let opened = with(|ucma| {
        let fd = ucma.open_channel()?;
        OWNER.store(own_pid(), Ordering::Relaxed);
        CHANNELS.insert(fd).map(|()| fd).inspect_err(|_| {
            ucma.close_channel(fd);
            // SAFETY: the channel has given its descriptor up to us.
            unsafe { libc_close(fd) };
        })
    });
    match opened {
        Ok(fd) => {
            // SAFETY: just allocated with this size.
            unsafe { channel.write(RdmaEventChannel { fd }) };
            Ok(channel)
        }
        Err(e) => {
            // SAFETY: just allocated.
            unsafe { libc::free(channel.cast()) };
            Err(e)
        }
    }
}

/// Makes an event channel, or returns NULL with errno: ENODEV without devices.
#[unsafe(no_mangle)]
extern "C" fn rdma_create_event_channel() -> *mut RdmaEventChannel {
    ret::pointer(create_event_channel)
}

/// Destroys an event channel and what is left on it.
///
/// # Safety
/// `channel` is from [`rdma_create_event_channel`] and is not used any more.
#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut RdmaEventChannel) {
    if channel.is_null() {
        return;
    }
    ret::value((), || {
        // SAFETY: the caller's promise.
        let fd = unsafe { (*channel).fd };
        let lost = CHANNELS.contains(fd) && is_lost(fd);
        forget_channel(fd);
        // SAFETY: the channel's own descriptor and memory, by the caller's promise.
        unsafe {
            if !lost {
                libc_close(fd);
            }
            libc::free(channel.cast());
        }
    });
}

/// Ends what is left on a channel whose descriptor is about to be closed.
fn forget_channel(fd: RawFd) {
    if CHANNELS.contains(fd) && !CLOSING.contains(fd) && CLOSING.insert(fd).is_ok() {
        ret::guard(|| {
            let ending = with(|ucma| {
                ucma.close_channel(fd);
                ucma.is_idle().then(|| ucma.backend.close())
            });
            if let Some(ending) = ending {
                ending.end();
            }
        });
        CHANNELS.remove(fd);
        CLOSING.remove(fd);
    }
}

/// The C library's `close`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if is_channel(fd) {
        forget_channel(fd);
    }
    // SAFETY: the caller's.
    unsafe { next_close(fd) }
}

/// The C library's `write`; commands when it goes to an event channel.
///
/// # Safety
/// As the C library's. A command's addresses are the program's, for as many bytes as the command says.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: usize) -> isize {
    if !is_channel(fd) || !ret::value(false, || takes_commands(fd)) {
        // SAFETY: the caller's.
        return unsafe { next_write(fd, buf, len) };
    }
    // SAFETY: the caller passes `len` readable bytes.
    if ret::value(false, || unsafe { asks_event(fd, buf, len) }) {
        cancel::point();
    }
    loop {
        // SAFETY: likewise, and addresses in them that are its own.
        match unsafe { command(fd, buf, len) } {
            Outcome::Done => return len as isize,
            Outcome::Failed(e) => {
                e.set();
                return -1;
            }
            Outcome::Closed => sleep_on(),
            Outcome::Wait => {}
        }
        let number = ptr::without_provenance_mut(fd as usize);
        // SAFETY: a plain function that takes a number.
        let wait = unsafe { Wait::new(fd, rearm, number) };
        // Signals and O_NONBLOCK behave as with the kernel's descriptor. This frame has nothing to drop if the thread is
        // cancelled.
        if !wait.read() {
            return -1;
        }
        rearm(number);
        if !CHANNELS.contains(fd) {
            sleep_on();
        }
    }
}

/// Makes the descriptor of an event channel readable again if events are left after its count was read.
extern "C" fn rearm(number: *mut c_void) {
    ret::value((), || with(|ucma| ucma.was_read(number.addr() as RawFd)));
}

/// Whether a command asks for an event, and thus may block.
///
/// # Safety
/// As for [`write`].
unsafe fn asks_event(fd: RawFd, buf: *const c_void, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { parse(fd, buf, len) }.is_ok_and(|c| c.cmd == Cmd::GetEvent)
}

/// Blocks a reader whose channel is closed meanwhile: the kernel's readers sleep on, and programs close channels that a thread of theirs
/// reads just before they exit. The descriptor's number may be another's already.
fn sleep_on() -> ! {
    loop {
        // SAFETY: waits for a signal.
        unsafe { pause() };
    }
}

enum Outcome {
    Done,
    Failed(Errno),
    /// Nothing there: read the descriptor, then come again.
    Wait,
    /// The channel was closed before its event could be asked for.
    Closed,
}

impl From<Result<Self>> for Outcome {
    fn from(r: Result<Self>) -> Self {
        r.unwrap_or_else(Self::Failed)
    }
}

fn guarded(body: impl FnOnce() -> Result<Outcome>) -> Outcome {
    ret::run(body).into()
}

/// Reads the program's memory.
///
/// # Safety
/// `from` is readable for `len` bytes, or null.
unsafe fn read_user(from: u64, len: usize) -> Result<Vec<u8>> {
    let from = from as *const u8;
    if len > 0 && from.is_null() {
        return Err(Errno::FAULT);
    }
    let mut out = vec![0; len];
    // SAFETY: the caller's promise; the vector has this length.
    unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), len) };
    Ok(out)
}

/// Writes an answer to the program's memory.
///
/// # Safety
/// The answer's address is writable for its bytes, or null.
unsafe fn write_user(answer: &Answer) -> Result<()> {
    let to = answer.to as *mut u8;
    if answer.bytes.is_empty() {
        return Ok(());
    }
    if to.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(answer.bytes.as_ptr(), to, answer.bytes.len()) };
    Ok(())
}

/// The bytes of a command.
///
/// # Safety
/// `buf` is readable for `len` bytes while the result is used.
unsafe fn parse<'a>(fd: RawFd, buf: *const c_void, len: usize) -> Result<Command<'a>> {
    if buf.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    Command::parse(fd, unsafe { std::slice::from_raw_parts(buf.cast(), len) })
}

/// Executes a command that was written to a channel.
///
/// # Safety
/// As for [`write`].
unsafe fn command(fd: RawFd, buf: *const c_void, len: usize) -> Outcome {
    let mut name = "a command of librdmacm";
    let outcome = guarded(|| {
        // SAFETY: the caller's promise.
        let c = unsafe { parse(fd, buf, len) }?;
        name = c.cmd.function();
        let must_open = c.cmd.may_open() && with(|ucma| ucma.has_channel(fd) && ucma.backend.is_closed());
        // Whoever gets here first may start a broker, and nobody waits for that but those who need it too.
        let engine = must_open.then(Engine::get);
        with(|ucma| {
            if !ucma.has_channel(fd) {
                return match (CHANNELS.contains(fd) && !CLOSING.contains(fd), c.cmd) {
                    // Of the process that this one was forked from.
                    (true, _) => Err(Errno::IO),
                    // Closed while we waited for our turn, or at this moment.
                    (false, Cmd::GetEvent) => Ok(Outcome::Closed),
                    (false, _) => Err(Errno(libc::EBADF)),
                };
            }
            let answer = if c.cmd == Cmd::GetEvent {
                c.need(abi::EVENT_MIN)?;
                let Some(answer) = ucma.event_answer(&c)? else {
                    return Ok(Outcome::Wait);
                };
                answer
            } else {
                ucma.backend.offer(engine);
                // SAFETY: the caller's promise.
                let answer = ucma.execute(&c, &|from, len| unsafe { read_user(from, len) });
                ucma.backend.offer(None);
                answer?
            };
            // SAFETY: the caller's promise.
            unsafe { write_user(&answer) }?;
            Ok(Outcome::Done)
        })
    });
    if let Outcome::Failed(e) = outcome {
        ret::value((), || log::failed(name, e));
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command whose body is all zero, as bytes.
    fn bytes(cmd: u32) -> Vec<u8> {
        let (body, out) = ([0u8; 8], 512u16);
        let len = body.len() as u16;
        [&cmd.to_ne_bytes()[..], &len.to_ne_bytes(), &out.to_ne_bytes(), &body].concat()
    }

    fn outcome(fd: RawFd, cmd: u32) -> Outcome {
        let buf = bytes(cmd);
        // SAFETY: the command has no addresses.
        unsafe { command(fd, buf.as_ptr().cast(), buf.len()) }
    }

    #[test]
    fn who_waits_for_events_while_the_channel_is_closed_gets_no_error() {
        const GET_EVENT: u32 = 12;
        const DESTROY_ID: u32 = 1;
        let fd = with(|ucma| ucma.open_channel()).unwrap_or_else(|e| panic!("{}", e.0));
        assert!(CHANNELS.insert(fd).is_ok());
        assert!(matches!(outcome(fd, GET_EVENT), Outcome::Wait));
        assert!(CLOSING.insert(fd).is_ok());
        with(|ucma| ucma.close_channel(fd));
        assert!(matches!(outcome(fd, GET_EVENT), Outcome::Closed));
        assert!(matches!(outcome(fd, DESTROY_ID), Outcome::Failed(Errno(libc::EBADF))));
        CLOSING.remove(fd);
        CHANNELS.remove(fd);
        // SAFETY: the channel has given its descriptor up to us.
        unsafe { libc_close(fd) };
    }
}
