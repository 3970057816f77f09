//! Asynchronous events: who gets them, and how many still have to be acknowledged.

use std::sync::Arc;

use libc::c_int;
use parking_lot::{Condvar, Mutex};

use crate::{
    abi::{c_enum, event, ibv_async_event, ibv_context, ibv_cq, ibv_qp, ibv_srq},
    cancel,
    context::{Context, Core},
    cq::Cq,
    live::Object as _,
    qp::Qp,
    ret,
    srq::Srq,
};

/// Events that were handed to the program against those that it acknowledged. Destroying an object waits until they are
/// equal.
#[derive(Default)]
pub(crate) struct Acks {
    outstanding: Mutex<i64>,
    settled: Condvar,
}

impl Acks {
    pub(crate) fn delivered(&self) {
        *self.outstanding.lock() += 1;
    }

    pub(crate) fn acknowledged(&self, count: u32) {
        let mut left = self.outstanding.lock();
        *left -= i64::from(count);
        if *left <= 0 {
            self.settled.notify_all();
        }
    }

    pub(crate) fn wait(&self) {
        let mut left = self.outstanding.lock();
        while *left > 0 {
            self.settled.wait(&mut left);
        }
    }
}

/// An event that waits for the program.
pub(crate) struct Entry {
    kind: c_enum,
    /// The object's address, or the port's number.
    element: usize,
    acks: Option<Arc<Acks>>,
}

impl Entry {
    /// About port 1.
    pub(crate) fn of_port(kind: c_enum) -> Self {
        Self {
            kind,
            element: 1,
            acks: None,
        }
    }
}

/// Destination of an object's events.
pub(crate) struct Target {
    core: Arc<Core>,
    element: usize,
    acks: Arc<Acks>,
}

impl Target {
    pub(crate) fn new(core: &Arc<Core>, element: usize, acks: &Arc<Acks>) -> Self {
        Self {
            core: core.clone(),
            element,
            acks: acks.clone(),
        }
    }

    /// The object's address.
    pub(crate) fn element(&self) -> usize {
        self.element
    }

    pub(crate) fn push(&self, kind: c_enum) {
        self.core.events.push(Entry {
            kind,
            element: self.element,
            acks: Some(self.acks.clone()),
        });
    }

    /// Forgets what waits for the object, which was taken out of the engine's tables, and waits for the program to
    /// acknowledge what it has got.
    pub(crate) fn finish(self) {
        let element = self.element;
        self.core
            .events
            .purge(|| (), |e| e.element == element && e.acks.is_some());
        self.acks.wait();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    cancel::blocking(|waited| {
        // SAFETY: the program passes an open context.
        let core = unsafe { Context::of(context)? }.core();
        core.alive()?;
        let delivered = |entry: &Entry| {
            if let Some(acks) = &entry.acks {
                acks.delivered();
            }
        };
        let entry = match core.events.take(waited, delivered)? {
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
                event::CQ_ERR => Cq::any(element as *mut ibv_cq).map(Cq::async_acks),
                event::QP_FATAL
                | event::QP_REQ_ERR
                | event::QP_ACCESS_ERR
                | event::COMM_EST
                | event::SQ_DRAINED
                | event::PATH_MIG
                | event::PATH_MIG_ERR
                | event::QP_LAST_WQE_REACHED => Qp::any(element as *mut ibv_qp).map(Qp::acks),
                event::SRQ_ERR | event::SRQ_LIMIT_REACHED => Srq::any(element as *mut ibv_srq).map(Srq::acks),
                _ => return,
            }
        };
        if let Some(acks) = acks {
            acks.acknowledged(1);
        }
    });
}
