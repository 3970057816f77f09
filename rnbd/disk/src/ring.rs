//! io_uring.

use std::{
    collections::VecDeque,
    fmt, io,
    marker::PhantomData,
    mem,
    os::fd::{AsRawFd, RawFd},
    ptr,
};

use io_uring::{
    IoUring, Probe, cqueue, opcode, squeue,
    types::{Fd, FsyncFlags},
};
use rnbd::{Errno, server::disk::Op};
use rtrs::server::request::SessionKey;

use crate::{
    op::{Call, Io, Part, Task},
    registered::Registered,
    throttle::Throttle,
};

/// Worker threads of the kernel: for files, and for what may wait for ever. Without a bound there are as many as requests.
const WORKERS: [u32; 2] = [4, 2];

/// A ring of one loop: it is used by the thread that opened it. Dropping it waits for what is under way.
pub struct Ring {
    ring: IoUring,
    /// Their next call waits for room in the submission queue.
    waiting: VecDeque<Io>,
    /// Operations with a call in the submission queue or the kernel, which own their memory and their file. `user_data` of the call is the
    /// exposed address of the operation, as [`Box::into_raw`] returned it.
    in_flight: usize,
    registered: Registered,
    calls: u64,
    fixed: u64,
    log: Throttle,
    completions: Vec<(u64, i32)>,
    /// The kernel wants every call from one thread (IORING_SETUP_SINGLE_ISSUER).
    _one_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("waiting", &self.waiting.len())
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

/// The ring with as much as this kernel has of what keeps it quiet: no wake-ups for completions (Linux 5.19), one thread
/// (6.0).
fn build(entries: u32) -> io::Result<IoUring> {
    let mut quiet = IoUring::builder();
    quiet.setup_coop_taskrun();
    let mut alone = quiet.clone();
    alone.setup_single_issuer();
    let unknown = |e: &io::Error| e.raw_os_error() == Some(libc::EINVAL);
    match alone.build(entries) {
        Err(e) if unknown(&e) => {}
        made => return made,
    }
    match quiet.build(entries) {
        Err(e) if unknown(&e) => IoUring::new(entries),
        made => made,
    }
}

impl Ring {
    /// Opens a ring of so many entries.
    ///
    /// # Errors
    /// When the system has no io_uring (ENOSYS), or does not allow it (EPERM), or it can't do what is needed of it (before
    /// Linux 5.6).
    pub fn open(entries: u32) -> io::Result<Self> {
        let ring = build(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
        ];
        if needed.iter().any(|code| !probe.is_supported(*code)) {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let mut workers = WORKERS;
        if let Err(e) = ring.submitter().register_iowq_max_workers(&mut workers) {
            // Before Linux 5.15.
            tracing::debug!("the workers of io_uring are not bounded: {e}");
        }
        Ok(Self {
            ring,
            waiting: VecDeque::new(),
            in_flight: 0,
            registered: Registered::default(),
            calls: 0,
            fixed: 0,
            log: Throttle::new(),
            completions: Vec::new(),
            _one_thread: PhantomData,
        })
    }

    /// Readable when something is over.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// System calls made to submit.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// Transfers through registered memory.
    pub(crate) fn fixed(&self) -> u64 {
        self.fixed
    }

    /// Whether io_uring has a call.
    pub(crate) fn has(call: &Call) -> bool {
        !matches!(call, Call::Range { .. } | Call::Seek { .. })
    }

    /// Takes an operation; [`submit`](Self::submit) starts it.
    pub(crate) fn start(&mut self, op: Io) {
        self.waiting.push_back(op);
    }

    /// Hands the kernel what waits. What is in the page cache may be over afterwards.
    pub(crate) fn submit(&mut self) {
        loop {
            let full = !self.fill();
            if self.ring.submission().is_empty() {
                return;
            }
            self.calls += 1;
            match self.ring.submit() {
                Ok(_) if full => {}
                Ok(_) => return,
                Err(e) => return self.refused(&e),
            }
        }
    }

    /// Keeps calls that are not submitted for the next [`submit`](Self::submit).
    fn refused(&self, e: &io::Error) {
        // Memory is short, or completions are to be taken first.
        let passing = matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY));
        if !passing && let Some(suppressed) = self.log.pass() {
            tracing::error!(suppressed, "io_uring refuses to work: {e}");
        }
    }

    /// Whether something waits to be submitted.
    pub(crate) fn is_behind(&mut self) -> bool {
        !self.waiting.is_empty() || !self.ring.submission().is_empty()
    }

    /// Puts what waits into the submission queue. False: there is no room for all of it.
    fn fill(&mut self) -> bool {
        while let Some(op) = self.waiting.pop_front() {
            let entry = self.entry(&op);
            let raw = Box::into_raw(op);
            let entry = entry.user_data(raw.expose_provenance() as u64);
            // SAFETY: the operation owns the memory and the file, and stays at its address until the entry's completion has been taken.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                // SAFETY: `into_raw` returned it above, and the queue has not taken the entry.
                self.waiting.push_front(unsafe { Box::from_raw(raw) });
                return false;
            }
            self.in_flight += 1;
        }
        true
    }

    /// The next call of an operation, as io_uring has it, without `user_data`.
    fn entry(&mut self, op: &Io) -> squeue::Entry {
        let Some(task) = &op.part.task else {
            // `take` fails it.
            return opcode::Nop::new().build();
        };
        let call = task.call();
        let slot = slot_of(&mut self.registered, &self.ring, op.id.session, task, &call);
        self.fixed += u64::from(slot.is_some());
        let fd = Fd(task.image.fd());
        let entry = match call {
            Call::Read { offset, to, len } => match slot {
                Some(slot) => opcode::ReadFixed::new(fd, to, len as u32, slot).offset(offset).build(),
                None => opcode::Read::new(fd, to, len as u32).offset(offset).build(),
            },
            Call::Write {
                offset,
                from,
                len,
                dsync,
            } => {
                let flags = if dsync { libc::RWF_DSYNC } else { 0 };
                let len = len as u32;
                match slot {
                    Some(slot) => opcode::WriteFixed::new(fd, from, len, slot)
                        .offset(offset)
                        .rw_flags(flags)
                        .build(),
                    None => opcode::Write::new(fd, from, len).offset(offset).rw_flags(flags).build(),
                }
            }
            Call::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Call::Allocate { mode, offset, len } => opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build(),
            Call::Range { .. } | Call::Seek { .. } => opcode::Nop::new().build(),
        };
        let flags = match task.insists() {
            // It was not possible without waiting: a worker waits.
            true => squeue::Flags::ASYNC,
            false => squeue::Flags::empty(),
        };
        entry.flags(flags)
    }

    /// Moves operations that have ended to `out`.
    pub(crate) fn take(&mut self, out: &mut Vec<Io>) {
        let mut completions = mem::take(&mut self.completions);
        let completion = |c: cqueue::Entry| (c.user_data(), c.result());
        completions.extend(self.ring.completion().map(completion));
        for (user_data, result) in completions.drain(..) {
            // SAFETY: the kernel completes each entry once.
            let mut op = unsafe { completed(user_data) };
            self.in_flight -= 1;
            let result = match usize::try_from(result) {
                Ok(n) => Ok(n),
                Err(_) => Err(Errno::from(io::Error::from_raw_os_error(-result))),
            };
            let ended = op.part.task.as_mut().map(|task| task.returned(result));
            match ended.unwrap_or(Some(Err(Errno::EIO))) {
                None => self.waiting.push_back(op),
                Some(result) => {
                    op.result = result;
                    out.push(op);
                }
            }
        }
        self.completions = completions;
    }

    /// Gives up what is registered of a session's memory.
    pub(crate) fn forget(&mut self, session: SessionKey) {
        self.registered.forget(&self.ring.submitter(), session);
    }
}

/// Returns the operation of a completed entry.
///
/// # Safety
/// `user_data` is of an entry whose completion has been taken, for the first time.
unsafe fn completed(user_data: u64) -> Io {
    // SAFETY: `fill` has exposed the address of a box that it released with `into_raw`, and nothing has used it since.
    unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<Op<Part>>(user_data as usize)) }
}

/// Returns the slot of a call's registered memory. Only direct I/O gains by that.
fn slot_of(registered: &mut Registered, ring: &IoUring, session: SessionKey, task: &Task, call: &Call) -> Option<u16> {
    let (at, len) = match *call {
        Call::Read { to, len, .. } => (to.cast_const(), len),
        Call::Write { from, len, .. } => (from, len),
        _ => return None,
    };
    let memory = task.memory().filter(|_| task.image.is_direct())?;
    let at = (at as usize).checked_sub(memory.as_ptr() as usize)?;
    registered.slot(&ring.submitter(), session, memory, at, len)
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel goes on with what it has, also when the ring is closed.
        while self.in_flight > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(e) => {
                    // The kernel may still write to their memory, so operations in flight are never released.
                    return tracing::error!("io_uring does not end: {e}");
                }
            }
            for completion in self.ring.completion() {
                self.in_flight -= 1;
                // SAFETY: the kernel completes each entry once.
                drop(unsafe { completed(completion.user_data()) });
            }
        }
    }
}
