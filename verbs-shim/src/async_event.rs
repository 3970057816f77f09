//! `ibv_get_async_event` and `ibv_ack_async_event`.

use libc::c_int;

use crate::{
    abi::{event, ibv_async_event, ibv_context, ibv_cq, ibv_qp, ibv_srq},
    core::Context,
    cq::Cq,
    events::Entry,
    live::Object as _,
    qp::Qp,
    ret,
    srq::Srq,
};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    ret::blocking(|waited| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(context)? }.core();
        core.alive()?;
        let entry = match core.events.take(waited, Entry::delivered)? {
            Ok(entry) => entry,
            Err(wait) => return Ok(Some(wait)),
        };
        let out = ibv_async_event {
            element: entry.element,
            event_type: entry.kind,
        };
        // SAFETY: the program passes room for an event.
        unsafe { event.write_unaligned(out) };
        Ok(None)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    ret::value((), || {
        // SAFETY: the program passes an event that it got.
        let ibv_async_event { element, event_type } = unsafe { event.read_unaligned() };
        // SAFETY: the object of an event that is not acknowledged lives: its destruction waits.
        let acks = unsafe {
            match event_type {
                event::CQ_ERR => Cq::any(element as *mut ibv_cq).map(|cq| &cq.async_acks),
                event::QP_FATAL..=event::PATH_MIG_ERR | event::QP_LAST_WQE_REACHED => {
                    Qp::any(element as *mut ibv_qp).map(|qp| &qp.acks)
                }
                event::SRQ_ERR | event::SRQ_LIMIT_REACHED => Srq::any(element as *mut ibv_srq).map(|srq| &srq.acks),
                _ => return,
            }
        };
        if let Some(acks) = acks {
            acks.acknowledged(1);
        }
    });
}
