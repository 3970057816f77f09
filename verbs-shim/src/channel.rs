//! Completion channels.

use std::{ffi::c_void, sync::Arc};

use libc::c_int;

use crate::{
    abi::{ibv_comp_channel, ibv_context, ibv_cq},
    cancel,
    context::{Context, Core},
    cq::{Cq, CqEvents},
    live::{self, Object as _},
    queue::EventQueue,
    ret::{self, Errno},
};

/// A completion queue that has an event.
pub(crate) struct CompEvent {
    pub(crate) cq: Arc<CqEvents>,
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
    ibv_comp_channel,
    0,
    |channel| (*channel).context,
    (*channel).fd
);

impl Channel {
    pub(crate) fn events(&self) -> &Arc<EventQueue<CompEvent>> {
        &self.events
    }
}

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
        let this = Channel::claim(channel)?;
        // The queues hold clones of the events.
        if Arc::strong_count(&this.events) > 1 {
            return Err(Errno::BUSY.because("completion queues with the channel exist"));
        }
        match this.core.alive() {
            Ok(()) => this.free(),
            Err(_) => this.forget(),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    cancel::blocking(|waited| {
        // SAFETY: a channel of ours.
        let this = unsafe { Channel::of(channel)? };
        this.core.alive()?;
        let event = match this.events.take(waited, |event| event.cq.acks.delivered())? {
            Ok(event) => event,
            Err(wait) => return Ok(Some(wait)),
        };
        // SAFETY: the queue lives until the event is acknowledged. The program passes room for both pointers.
        unsafe {
            let queue = event.cq.address();
            cq.write_unaligned(queue);
            cookie.write_unaligned((*queue).cq_context);
        }
        Ok(None)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: libc::c_uint) {
    ret::value((), || {
        // SAFETY: a queue with events that are not acknowledged lives: its destruction waits.
        if let Some(cq) = unsafe { Cq::any(cq) } {
            cq.acknowledge(count);
        }
    });
}
