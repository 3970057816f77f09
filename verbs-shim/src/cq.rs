//! Completion queues (`ibv_create_cq` and the calls on its result).

use std::{
    cell::UnsafeCell,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use libc::{c_int, c_void};
use parking_lot::Mutex;
use roce::{Completion, Notify, WcFlags};

use crate::{
    abi::{c_enum, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_modify_cq_attr, ibv_wc},
    channel::{Channel, CompEvent},
    context::{COMP_VECTORS, Context, Core},
    cqex,
    events::{Acks, Target},
    live::{self, Object as _},
    log,
    pd::Users,
    queue::EventQueue,
    ret::{self, Errno, Result},
};

/// Event state of a completion queue, shared with its channel.
pub(crate) struct CqEvents {
    channel: Option<Arc<EventQueue<CompEvent>>>,
    /// Address of the `ibv_cq`.
    cq: AtomicUsize,
    /// The queue is being destroyed. Written and read under the channel's lock.
    dead: AtomicBool,
    /// Acknowledgements of completion events.
    pub(crate) acks: Acks,
}

impl CqEvents {
    /// Returns the queue as the program knows it.
    pub(crate) fn address(&self) -> *mut ibv_cq {
        ptr::with_exposed_provenance_mut(self.cq.load(Ordering::Acquire))
    }
}

/// Pushes a completion event to the channel when the transport notifies the queue.
struct Notifier(Arc<CqEvents>);

impl Notify for Notifier {
    fn notify(&self, _handle: u32) {
        let Some(channel) = &self.0.channel else { return };
        let event = CompEvent { cq: self.0.clone() };
        channel.push_unless(event, || self.0.dead.load(Ordering::Relaxed));
    }
}

/// Completion queue. Always has the extended structure, even if created by `ibv_create_cq`.
#[repr(C)]
pub(crate) struct Cq {
    abi: UnsafeCell<ibv_cq_ex>,
    pub(crate) core: Arc<Core>,
    pub(crate) inner: roce::Cq,
    events: Arc<CqEvents>,
    async_acks: Arc<Acks>,
    users: Users,
    scratch: Mutex<Vec<Completion>>,
    pub(crate) poll: cqex::Poll,
}

/// Attributes of a new completion queue.
pub(crate) struct CqInit {
    pub(crate) entries: u32,
    pub(crate) cookie: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) vector: c_int,
    pub(crate) single_threaded: bool,
}

live::object!(Cq, ibv_cq, 0, |cq| (*cq).context, (*cq).handle);

impl Cq {
    pub(crate) fn user(&self) -> Users {
        self.users.clone()
    }

    pub(crate) fn async_acks(&self) -> &Acks {
        &self.async_acks
    }

    pub(crate) fn acknowledge(&self, count: u32) {
        self.events.acks.acknowledged(count);
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// EINVAL for a number of entries or a vector out of range, EBADF for a channel that the context does not have.
    ///
    /// # Safety
    /// `context` is open, and `init.channel` is null or a channel created by this library.
    pub(crate) unsafe fn create(context: *mut ibv_context, init: &CqInit) -> Result<*mut ibv_cq> {
        // A channel is looked up by its descriptor.
        let other = |_| Errno::BADF.because("the completion channel is of another context, or was destroyed");
        // SAFETY: guaranteed by the caller.
        let core = unsafe { Context::of(context)? }.core();
        // SAFETY: likewise.
        let channel = unsafe { Channel::given(init.channel) }.map_err(other)?;
        channel
            .map_or(Ok(()), |channel| core.same(&channel.core))
            .map_err(other)?;
        let engine = core.engine()?;
        if init.entries == 0 || !(0..COMP_VECTORS).contains(&init.vector) {
            return Err(Errno::INVAL.because(format_args!(
                "cqe {}, comp_vector {}: expected 1 or more entries and a vector below {COMP_VECTORS}",
                init.entries, init.vector
            )));
        }
        let events = Arc::new(CqEvents {
            channel: channel.map(|channel| channel.events().clone()),
            cq: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            acks: Acks::default(),
        });
        let notify = Arc::new(Notifier(events.clone()));
        let inner = engine.device.create_cq_notifying(init.entries, Some(notify))?;
        let handle = inner.handle();
        let async_acks = Arc::new(Acks::default());
        let base = ibv_cq {
            context,
            channel: init.channel,
            cq_context: init.cookie,
            handle,
            cqe: inner.capacity() as c_int,
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        let cq = Self {
            abi: UnsafeCell::new(cqex::public(base)),
            core: core.clone(),
            inner,
            events: events.clone(),
            async_acks: async_acks.clone(),
            users: Users::default(),
            scratch: Mutex::default(),
            poll: cqex::Poll::new(init.single_threaded),
        };
        let address = cq.publish()?.expose_provenance();
        events.cq.store(address, Ordering::Release);
        let target = Target::new(core, address, &async_acks);
        engine.objects().cqs.insert(handle, target);
        Ok(ptr::with_exposed_provenance_mut(address))
    }

    /// Removes up to `max` completions and passes each to `each`. Returns their number.
    ///
    /// # Errors
    /// In a forked child, or if the queue has overflowed.
    fn take(&self, max: usize, mut each: impl FnMut(&Completion)) -> Result<usize> {
        self.core.alive()?;
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
        if count > 0 && log::is_on() {
            self.log(buffer);
        }
        buffer.iter().for_each(&mut each);
        Ok(count)
    }

    /// Logs the errors among completions.
    #[cold]
    fn log(&self, completions: &[Completion]) {
        if let Some(engine) = self.core.opened() {
            log::completions(engine, completions);
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
        cq.core.alive()?;
        Ok(cq.inner.arm(solicited_only != 0)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    ret::code(|| {
        // SAFETY: the program passes a completion queue created by this library.
        let this = unsafe { Cq::of(cq)? };
        this.core.alive()?;
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
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    ret::pointer(|| {
        let init = CqInit {
            entries: u32::try_from(entries)
                .map_err(|_| Errno::INVAL.because(format_args!("cqe {entries} is negative")))?,
            cookie,
            channel,
            vector,
            single_threaded: false,
        };
        // SAFETY: the program passes an open context, and a channel created by this library or null.
        unsafe { Cq::create(context, &init) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    ret::code(|| {
        let this = Cq::claim(cq)?;
        let Ok(engine) = this.core.engine() else {
            // In a forked child: the transport belongs to the parent.
            this.forget();
            return Ok(());
        };
        if this.users.in_use() {
            return Err(Errno::BUSY.because("queue pairs or SRQs use the completion queue"));
        }
        let target = engine.objects().cqs.remove(&this.inner.handle());
        match &this.events.channel {
            Some(channel) => channel.purge(
                || this.events.dead.store(true, Ordering::Relaxed),
                |event| Arc::ptr_eq(&event.cq, &this.events),
            ),
            None => this.events.dead.store(true, Ordering::Relaxed),
        }
        if let Some(target) = target {
            target.finish();
        }
        this.events.acks.wait();
        this.free();
        Ok(())
    })
}
