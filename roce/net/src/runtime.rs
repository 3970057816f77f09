//! Environment of the threads that share a port: clock, wake-ups and event sink.

use std::{sync::Arc, time::Duration};

use roce_verbs::Instant;

use crate::{
    clock,
    engine::{Engine, EventSink},
    progress::{Environment, Progress},
    sys,
    wake::Wake,
};

/// Clock, wake-ups and event sink of a driver.
pub(crate) struct Runtime {
    pub(crate) wake: Arc<Wake>,
    pub(crate) sink: Arc<dyn EventSink>,
    /// Process that made it ([`sys::generation`]).
    pub(crate) born: u32,
}

impl Environment for Runtime {
    fn now(&self) -> Instant {
        clock::now()
    }

    fn watch_sockets(&self, on: bool) {
        self.wake.watch(on);
    }

    fn watches_sockets(&self) -> bool {
        self.wake.is_watching()
    }

    fn wake_by(&self, now: Instant, at: Instant) {
        self.wake.wake_by(now, at);
    }

    fn set_lease(&self, now: Instant, end: Instant) {
        self.wake.set_lease(now, end);
    }

    fn park(&self, on: bool) -> bool {
        self.wake.park(on)
    }

    fn is_parked(&self) -> bool {
        self.wake.is_parked()
    }

    fn timer_cost(&self) -> Duration {
        self.wake.timer_cost()
    }

    fn is_inherited(&self) -> bool {
        self.born != sys::generation_now()
    }

    fn closed(&self) {
        self.sink.closed();
    }
}

/// Port that threads share, with its environment.
pub(crate) type Shared = Progress<Engine, Runtime>;
