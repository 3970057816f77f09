//! Completion queues (`ibv_create_cq` and the calls on its result).

use std::{cell::UnsafeCell, sync::Arc};

use libc::c_int;
use parking_lot::{Mutex, RawMutex, lock_api::RawMutex as _};
use roce::{Completion, WcFlags};

use crate::{
    abi::{
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED, c_enum, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex,
        ibv_modify_cq_attr, ibv_wc,
    },
    channel::{Channel, CqEvents, Notifier},
    core::{COMP_VECTORS, Context, Core},
    errno,
    events::{Acks, Target},
    live::{self, Object as _},
    pd::Users,
    ret::{self, Errno, Result},
};

/// Current completion, between start and end of a poll.
pub(crate) struct Poll {
    /// Held between start and end, unless the queue was created for one polling thread.
    lock: RawMutex,
    single: bool,
    pub(crate) current: UnsafeCell<Completion>,
}

// SAFETY: the completion is only touched between start and end of a poll, under the lock or by the only thread.
unsafe impl Sync for Poll {}

impl Poll {
    fn new(single: bool) -> Self {
        Self {
            lock: RawMutex::INIT,
            single,
            current: UnsafeCell::default(),
        }
    }

    pub(crate) fn lock(&self) {
        if !self.single {
            self.lock.lock();
        }
    }

    pub(crate) fn unlock(&self) {
        if !self.single {
            // SAFETY: locked by the start of this poll.
            unsafe { self.lock.unlock() };
        }
    }
}

/// Completion queue. Always has the extended structure, even if created by `ibv_create_cq`.
#[repr(C)]
pub(crate) struct Cq {
    abi: UnsafeCell<ibv_cq_ex>,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Cq,
    events: Arc<CqEvents>,
    pub(crate) async_acks: Arc<Acks>,
    pub(crate) users: Users,
    scratch: Mutex<Vec<Completion>>,
    pub(crate) poll: Poll,
}

live::object!(Cq, "CQ", ibv_cq, |cq| (*cq).context, (*cq).handle);

impl Cq {
    /// Creates a completion queue, of which `public` makes the extended structure.
    ///
    /// # Errors
    /// EINVAL for a number of entries or a vector out of range, EBADF for a channel that the context does not have.
    ///
    /// # Safety
    /// `context` is open, and `attr.channel` is null or a channel created by this library.
    pub(crate) unsafe fn create(
        context: *mut ibv_context,
        attr: &ibv_cq_init_attr_ex,
        public: fn(ibv_cq) -> ibv_cq_ex,
    ) -> Result<*mut ibv_cq> {
        // A channel is looked up by its descriptor.
        let other = |_| Errno::BADF.because("the completion channel is of another context, or was destroyed");
        // SAFETY: guaranteed by the caller.
        let core = unsafe { Context::of(context)? }.core();
        // SAFETY: likewise.
        let channel = unsafe { Channel::given(attr.channel) }.map_err(other)?;
        channel
            .map_or(Ok(()), |channel| core.same(&channel.core))
            .map_err(other)?;
        let engine = core.engine()?;
        if attr.cqe == 0 || attr.comp_vector >= COMP_VECTORS {
            return Err(Errno::INVAL.because(format_args!(
                "cqe {}, comp_vector {}: expected 1 or more entries and a vector below {COMP_VECTORS}",
                attr.cqe, attr.comp_vector
            )));
        }
        let events = CqEvents::new(channel);
        let notify = Arc::new(Notifier(events.clone()));
        let inner = engine.device.create_cq_notifying(attr.cqe, Some(notify))?;
        let handle = inner.handle();
        let async_acks = Arc::new(Acks::default());
        let base = ibv_cq {
            context,
            channel: attr.channel,
            cq_context: attr.cq_context,
            handle,
            cqe: inner.capacity() as c_int,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        let cq = Self {
            abi: UnsafeCell::new(public(base)),
            core: core.clone(),
            inner,
            events: events.clone(),
            async_acks: async_acks.clone(),
            users: Users::default(),
            scratch: Mutex::default(),
            poll: Poll::new(attr.flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0),
        };
        let cq = cq.publish()?;
        events.set_address(cq);
        let target = Target::new(&core.events, cq as usize, &async_acks);
        engine.objects().cqs.insert(handle, target);
        Ok(cq)
    }

    /// Removes up to `max` completions and passes each to `each`. Returns their number.
    ///
    /// # Errors
    /// In a forked child, or if the queue has overflowed.
    fn take(&self, max: usize, mut each: impl FnMut(&Completion)) -> Result<usize> {
        let mut own;
        let mut shared;
        // A thread that finds the shared buffer in use allocates one instead of waiting.
        let buffer: &mut Vec<Completion> = match self.scratch.try_lock() {
            Some(guard) => {
                shared = guard;
                &mut shared
            }
            None => {
                own = Vec::new();
                &mut own
            }
        };
        buffer.clear();
        let count = self.inner.poll(buffer, max)?;
        if count > 0 && errno::is_logged() {
            self.log(buffer);
        }
        buffer.iter().for_each(&mut each);
        Ok(count)
    }

    /// Logs the errors among completions.
    #[cold]
    fn log(&self, completions: &[Completion]) {
        if let Some(engine) = self.core.opened() {
            engine.log_completions(completions);
        }
    }

    /// Removes the oldest completion, if any.
    pub(crate) fn take_one(&self) -> Result<Option<Completion>> {
        let mut out = None;
        self.take(1, |c| out = Some(*c))?;
        Ok(out)
    }
}

/// Converts a completion to `ibv_wc`.
fn wc(c: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: c.wr_id,
        status: c.status as c_enum,
        opcode: c.opcode as c_enum,
        vendor_err: c.vendor_err,
        byte_len: c.byte_len,
        imm_data: imm_or_key(c),
        qp_num: c.qpn.value(),
        src_qp: c.src_qp.value(),
        wc_flags: c.flags.bits(),
        pkey_index: c.pkey_index,
        slid: 0,
        sl: c.sl,
        dlid_path_bits: 0,
    }
}

/// Returns the immediate data in network byte order, or the invalidated key (`imm_data` or `invalidated_rkey`).
pub(crate) fn imm_or_key(c: &Completion) -> u32 {
    match c.flags.contains(WcFlags::WITH_INV) {
        true => c.invalidated.0,
        false => c.imm.to_be(),
    }
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, max: c_int, out: *mut ibv_wc) -> c_int {
    ret::minus_one(|| {
        // SAFETY: the program passes a completion queue created by this library.
        let cq = unsafe { Cq::hot(cq)? };
        let max = usize::try_from(max).map_err(|_| Errno::INVAL.because("num_entries is negative"))?;
        let mut at = out;
        let count = cq.take(max, |c| {
            // SAFETY: `out` has room for `max` completions, and `take` returns at most `max`.
            unsafe {
                at.write_unaligned(wc(c));
                at = at.add(1);
            }
        })?;
        Ok(count as c_int)
    })
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a completion queue created by this library.
        let cq = unsafe { Cq::hot(cq)? };
        Ok(cq.inner.arm(solicited_only != 0)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a completion queue created by this library.
        let this = unsafe { Cq::of(cq)? };
        let count = u32::try_from(entries).ok().filter(|n| *n > 0);
        let count =
            count.ok_or_else(|| Errno::INVAL.because(format_args!("cqe {entries}: expected 1 or more entries")))?;
        this.inner.resize(count)?;
        // SAFETY: `Cq::of` has checked that `cq` points to a live queue.
        unsafe { (&raw mut (*cq).cqe).write(this.inner.capacity() as c_int) };
        Ok(())
    })
}

/// Moderates completion events (`ibv_modify_cq`). Accepts only an empty mask, because events are never delayed.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a completion queue created by this library.
        unsafe { Cq::of(cq)? };
        // SAFETY: the program passes a pointer to attributes.
        match unsafe { (&raw const (*attr).attr_mask).read_unaligned() } {
            0 => Ok(()),
            _ => Err(Errno::NOTSUP.because("completion events are not moderated here")),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: libc::c_uint) {
    ret::value((), || {
        // SAFETY: a queue with events that are not acknowledged lives: its destruction waits.
        if let Some(cq) = unsafe { Cq::any(cq) } {
            cq.events.acknowledge(count);
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    ret::code(|| {
        Cq::destroy(cq, |this| {
            this.users.none("queue pairs or SRQs use the completion queue")?;
            let target = this.core.engine()?.objects().cqs.remove(&this.inner.handle());
            target.into_iter().for_each(Target::finish);
            this.events.finish();
            Ok(())
        })
    })
}
