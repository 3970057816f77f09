//! Asynchronous events: destinations, and counts of events that are not acknowledged.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::{abi::c_enum, queue::EventQueue};

/// Asynchronous events of a context.
pub(crate) type AsyncEvents = EventQueue<Entry>;

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
    pub(crate) kind: c_enum,
    /// The object's address, or the port's number.
    pub(crate) element: usize,
    acks: Option<Arc<Acks>>,
}

impl Entry {
    /// Makes an event of port 1.
    pub(crate) fn of_port(kind: c_enum) -> Self {
        Self {
            kind,
            element: 1,
            acks: None,
        }
    }

    /// Counts it as handed to the program.
    pub(crate) fn delivered(&self) {
        if let Some(acks) = &self.acks {
            acks.delivered();
        }
    }
}

/// Destination of an object's events.
pub(crate) struct Target {
    events: Arc<AsyncEvents>,
    /// The object's address.
    element: usize,
    acks: Arc<Acks>,
}

impl Target {
    pub(crate) fn new(events: &Arc<AsyncEvents>, element: usize, acks: &Arc<Acks>) -> Self {
        Self {
            events: events.clone(),
            element,
            acks: acks.clone(),
        }
    }

    /// Whether it is the destination of the object at this address.
    pub(crate) fn is_of(&self, element: usize) -> bool {
        self.element == element
    }

    pub(crate) fn push(&self, kind: c_enum) {
        self.events.push(Entry {
            kind,
            element: self.element,
            acks: Some(self.acks.clone()),
        });
    }

    /// Removes the events that wait for the object, which was taken out of the engine's tables, and waits until the program
    /// has acknowledged those that it got.
    pub(crate) fn finish(self) {
        let element = self.element;
        self.events.purge(|| (), |e| e.element == element && e.acks.is_some());
        self.acks.wait();
    }
}
