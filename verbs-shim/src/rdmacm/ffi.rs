//! `write` and `close` in front of the C library's: commands when they go to an event channel, else passed on.

use std::{
    ffi::{c_int, c_void},
    os::fd::RawFd,
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
    time::Instant,
};

use super::{
    Errno, Result,
    abi::{self, Cmd},
    command::{Answer, Command},
    facade::{Facade, Reports},
    fd_set::FdSet,
    ucma::Ucma,
};
use crate::{
    cancel::{self, Wait},
    engine::Engine,
    fork::{self, Own},
    log, rds, ret,
    symbols::{Call, Next, calls, libc_write},
};

// The C library's own, under a name that is not interposed. A thread may be cancelled in them, which unwinds.
unsafe extern "C-unwind" {
    #[link_name = "__close"]
    pub(crate) fn libc_close(fd: c_int) -> c_int;
    fn pause() -> c_int;
}

// SAFETY: libc's function of this name has this signature.
static NEXT_WRITE: Next<unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize> =
    unsafe { Next::new(c"write") };
// SAFETY: likewise.
static NEXT_CLOSE: Next<unsafe extern "C-unwind" fn(c_int) -> c_int> = unsafe { Next::new(c"close") };

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

/// Calls for programs that loaded this library too late for symbol order.
pub(crate) static CALLS: &[Call] = calls![write, close];

/// `rebind::run`, set before the first channel: that module is above this one.
pub(crate) static REBIND: OnceLock<fn()> = OnceLock::new();
/// Descriptors of event channels.
pub(crate) static CHANNELS: FdSet = FdSet::new();
/// Channels that are being closed, which takes as long as the device does.
static CLOSING: FdSet = FdSet::new();

/// Whether a descriptor's number is that of an event channel of this process.
fn is_channel(fd: RawFd) -> bool {
    CHANNELS.contains(fd) && fork::owns_memory()
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

/// Whether the number of an event channel is another file's, or is closed.
pub(crate) fn is_lost(fd: RawFd) -> bool {
    with(|ucma| ucma.has_channel(fd) && !ucma.is_intact(fd))
}

/// State of this process. The state of the process that it was forked from is out of reach, and never freed, since that would end
/// that process's connections.
static GLOBAL: Own<Mutex<Option<Ucma<Facade>>>> = Own::new(Mutex::default);

/// Runs a function on the state of this process. It must not wait for a broker: all of RDMA_CM would.
pub(crate) fn with<R>(body: impl FnOnce(&mut Ucma<Facade>) -> R) -> R {
    let mut slot = GLOBAL.get().lock().unwrap_or_else(PoisonError::into_inner);
    body(slot.get_or_insert_with(|| Ucma::new(Facade::new(REPORTS))))
}

const REPORTS: Reports = Reports {
    deliver: |report| with(|ucma| ucma.on_report(report)),
    tend: || with(|ucma| ucma.retry_due(Instant::now())),
};

/// Removes a channel whose descriptor is about to be closed.
pub(crate) fn forget_channel(fd: RawFd) {
    if CHANNELS.contains(fd) && !CLOSING.contains(fd) && CLOSING.insert(fd).is_ok() {
        ret::guard(|| {
            let ending = with(|ucma| {
                ucma.close_channel(fd);
                ucma.is_idle().then(|| ucma.backend.close())
            });
            // Without the lock.
            drop(ending);
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
    if rds::was_socket(fd) && fork::owns_memory() {
        ret::value((), || rds::closing(fd));
    }
    // SAFETY: the caller's.
    unsafe { NEXT_CLOSE.get().unwrap_or(libc_close)(fd) }
}

/// The C library's `write`; commands when it goes to an event channel.
///
/// # Safety
/// As the C library's. A command's addresses are the program's, for the command's numbers of bytes.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: usize) -> isize {
    if !is_channel(fd) || !ret::value(false, || takes_commands(fd)) {
        if let Some(key) = rds::key(fd) {
            // SAFETY: the caller's.
            return unsafe { rds::write(key, fd, buf, len) };
        }
        // SAFETY: the caller's.
        return unsafe { NEXT_WRITE.get().unwrap_or(libc_write)(fd, buf, len) };
    }
    // SAFETY: the caller passes `len` readable bytes.
    if ret::value(false, || unsafe { asks_event(fd, buf, len) }) {
        cancel::point();
    }
    loop {
        // SAFETY: likewise, and addresses in them that are its own.
        match unsafe { command(fd, buf, len) } {
            Ok(Outcome::Done) => return len as isize,
            Ok(Outcome::Wait) => {}
            Ok(Outcome::Closed) => sleep_on(),
            Err(e) => {
                e.set();
                return -1;
            }
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
/// As for [`write()`].
unsafe fn asks_event(fd: RawFd, buf: *const c_void, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { parse(fd, buf, len) }.is_ok_and(|c| c.cmd == Cmd::GetEvent)
}

/// Blocks a reader after its channel was closed: the kernel's readers sleep on, and programs close channels that a thread of theirs
/// reads just before they exit. The descriptor's number may be another's already.
fn sleep_on() -> ! {
    loop {
        // SAFETY: waits for a signal.
        unsafe { pause() };
    }
}

enum Outcome {
    Done,
    /// No event: read the descriptor, then try again.
    Wait,
    /// The channel was closed before its event was read.
    Closed,
}

/// Reads the program's memory.
///
/// # Safety
/// `from` is readable for `len` bytes, or null.
unsafe fn read_user(from: u64, len: usize) -> Result<Vec<u8>> {
    match from as *const u8 {
        _ if len == 0 => Ok(Vec::new()),
        from if from.is_null() => Err(Errno::FAULT),
        // SAFETY: the caller's promise.
        from => Ok(unsafe { std::slice::from_raw_parts(from, len) }.to_vec()),
    }
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
/// As for [`write()`].
unsafe fn command(fd: RawFd, buf: *const c_void, len: usize) -> Result<Outcome> {
    let mut name = "a command of librdmacm";
    let outcome = ret::run(|| {
        // SAFETY: the caller's promise.
        let c = unsafe { parse(fd, buf, len) }?;
        name = c.cmd.function();
        // The command may look for devices, as `ibv_get_device_list` does.
        if c.cmd.may_open()
            && let Some(rebind) = REBIND.get()
        {
            rebind();
        }
        let must_open = c.cmd.may_open() && with(|ucma| ucma.has_channel(fd) && ucma.backend.is_closed());
        // The first caller may start a broker. Only callers that need the transport wait for that.
        let engine = must_open.then(Engine::get);
        with(|ucma| {
            if !ucma.has_channel(fd) {
                return match (CHANNELS.contains(fd) && !CLOSING.contains(fd), c.cmd) {
                    // Of the process that this one was forked from.
                    (true, _) => Err(Errno::IO),
                    // Closed while we waited for our turn, or at this moment.
                    (false, Cmd::GetEvent) => Ok(Outcome::Closed),
                    (false, _) => Err(Errno::BADF),
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
    outcome.inspect_err(|e| ret::value((), || log::failed(name, *e)))
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

    fn outcome(fd: RawFd, cmd: u32) -> Result<Outcome> {
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
        assert!(matches!(outcome(fd, GET_EVENT), Ok(Outcome::Wait)));
        assert!(CLOSING.insert(fd).is_ok());
        with(|ucma| ucma.close_channel(fd));
        assert!(matches!(outcome(fd, GET_EVENT), Ok(Outcome::Closed)));
        assert!(matches!(outcome(fd, DESTROY_ID), Err(Errno::BADF)));
        CLOSING.remove(fd);
        CHANNELS.remove(fd);
        // SAFETY: the channel has given its descriptor up to us.
        unsafe { libc_close(fd) };
    }
}
