//! Completion channels.

use std::{
    ffi::c_void,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use libc::c_int;
use roce::Notify;

use crate::{
    abi::{ibv_comp_channel, ibv_context, ibv_cq},
    core::{Context, Core},
    events::Acks,
    live::{self, Object as _},
    queue::EventQueue,
    ret::{self, Errno},
};

/// A completion queue that has an event.
pub(crate) struct CompEvent(Arc<CqEvents>);

/// Event state of a completion queue, shared with its channel.
pub(crate) struct CqEvents {
    channel: Option<Arc<EventQueue<CompEvent>>>,
    /// Address of the `ibv_cq`.
    cq: AtomicUsize,
    /// The queue is being destroyed. Written and read under the channel's lock.
    dead: AtomicBool,
    /// Acknowledgements of completion events.
    acks: Acks,
}

impl CqEvents {
    pub(crate) fn new(channel: Option<&Channel>) -> Arc<Self> {
        Arc::new(Self {
            channel: channel.map(|channel| channel.events.clone()),
            cq: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            acks: Acks::default(),
        })
    }

    /// Sets the queue as the program knows it.
    pub(crate) fn set_address(&self, cq: *mut ibv_cq) {
        self.cq.store(cq.expose_provenance(), Ordering::Release);
    }

    pub(crate) fn acknowledge(&self, count: u32) {
        self.acks.acknowledged(count);
    }

    /// Removes the events of a queue that is being destroyed, and waits until the program has acknowledged those that it got.
    pub(crate) fn finish(self: &Arc<Self>) {
        let mark = || self.dead.store(true, Ordering::Relaxed);
        match &self.channel {
            Some(channel) => drop(channel.purge(mark, |event| Arc::ptr_eq(&event.0, self))),
            None => mark(),
        }
        self.acks.wait();
    }
}

/// Pushes a completion event to the channel when the transport notifies the queue.
pub(crate) struct Notifier(pub(crate) Arc<CqEvents>);

impl Notify for Notifier {
    fn notify(&self, _handle: u32) {
        let Some(channel) = &self.0.channel else { return };
        channel.push_unless(CompEvent(self.0.clone()), || self.0.dead.load(Ordering::Relaxed));
    }
}

/// A completion channel.
#[repr(C)]
pub(crate) struct Channel {
    abi: ibv_comp_channel,
    pub(crate) core: Arc<Core>,
    events: Arc<EventQueue<CompEvent>>,
}

live::object!(
    Channel,
    "completion channel",
    ibv_comp_channel,
    |channel| (*channel).context,
    (*channel).fd
);

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    ret::pointer(|| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(context)? }.core();
        core.alive()?;
        let events = Arc::new(EventQueue::new()?);
        let channel = Channel {
            abi: ibv_comp_channel {
                context,
                fd: events.fd(),
                refcnt: 0,
            },
            core: core.clone(),
            events,
        };
        channel.publish()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    ret::code(|| {
        // The queues hold clones of the events.
        Channel::destroy(channel, |this| match Arc::strong_count(&this.events) {
            1 => Ok(()),
            _ => Err(Errno::BUSY.because("completion queues with the channel exist")),
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    ret::blocking(|waited| {
        // SAFETY: a channel of ours.
        let this = unsafe { Channel::of(channel)? };
        let CompEvent(event) = match this.events.take(waited, |event| event.0.acks.delivered())? {
            Ok(event) => event,
            Err(wait) => return Ok(Some(wait)),
        };
        // SAFETY: the queue lives until the event is acknowledged. The program passes room for both pointers.
        unsafe {
            let queue = ptr::with_exposed_provenance_mut::<ibv_cq>(event.cq.load(Ordering::Acquire));
            cq.write_unaligned(queue);
            cookie.write_unaligned((*queue).cq_context);
        }
        Ok(None)
    })
}
