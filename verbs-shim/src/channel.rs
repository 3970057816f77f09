//! Completion channels.

use std::{ffi::c_void, sync::Arc};

use libc::c_int;

use crate::{
    abi::{ibv_comp_channel, ibv_context, ibv_cq},
    context::{Context, Core},
    cq::{Cq, CqEvents},
    queue::EventQueue,
    ret::{self, Errno, object},
};

/// A completion queue that has an event.
pub(crate) struct CompEvent {
    pub(crate) cq: Arc<CqEvents>,
}

/// A completion channel.
#[repr(C)]
pub(crate) struct Channel {
    abi: ibv_comp_channel,
    core: Arc<Core>,
    events: Arc<EventQueue<CompEvent>>,
}

impl Channel {
    /// # Safety
    /// `channel` was made by us and lives as long as the reference.
    pub(crate) unsafe fn of<'a>(channel: *mut ibv_comp_channel) -> &'a Self {
        // SAFETY: the public part is the first field.
        unsafe { &*channel.cast::<Self>() }
    }

    pub(crate) fn events(&self) -> &Arc<EventQueue<CompEvent>> {
        &self.events
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    ret::pointer(|| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(object(context)?) }.core();
        core.alive()?;
        let events = Arc::new(EventQueue::new()?);
        let channel = Box::leak(Box::new(Channel {
            abi: ibv_comp_channel {
                context,
                fd: events.fd(),
                refcnt: 0,
            },
            core: core.clone(),
            events,
        }));
        Ok(&raw mut channel.abi)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    ret::code(|| {
        // SAFETY: a channel of ours.
        let this = unsafe { Channel::of(object(channel)?) };
        // The queues hold clones of the events.
        if Arc::strong_count(&this.events) > 1 {
            return Err(Errno::BUSY);
        }
        // SAFETY: boxed above; the program does not use it again.
        let this = unsafe { Box::from_raw(channel.cast::<Channel>()) };
        if this.core.alive().is_err() {
            std::mem::forget(this);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    ret::minus_one(|| {
        // SAFETY: a channel of ours.
        let this = unsafe { Channel::of(object(channel)?) };
        this.core.alive()?;
        let event = this.events.take(|event| event.cq.acks.delivered())?;
        // SAFETY: the queue lives until the event is acknowledged. The program passes room for both pointers.
        unsafe {
            let queue = event.cq.address();
            cq.write(queue);
            cookie.write((*queue).cq_context);
        }
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: libc::c_uint) {
    ret::value((), || {
        // SAFETY: the program acknowledges events of a queue that lives.
        unsafe { Cq::of(cq) }.acknowledge(count);
    });
}
