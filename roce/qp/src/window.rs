//! Bytes in flight towards one peer.

use core::time::Duration;

use roce_verbs::Instant;

/// Limits of a [`Window`], bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowConfig {
    /// At the start.
    pub initial: usize,
    /// Never less.
    pub min: usize,
    /// Never more: about what the peer's socket buffer holds.
    pub max: usize,
}

impl Default for WindowConfig {
    fn default() -> Self {
        Self {
            initial: 64 << 10,
            min: 16 << 10,
            max: 4 << 20,
        }
    }
}

/// The window: how many bytes may be under way to a peer, over all queue pairs.
#[derive(Clone, Debug)]
pub struct Window {
    config: WindowConfig,
    size: usize,
    in_flight: usize,
}

impl Window {
    /// An open window with nothing in flight.
    pub fn new(config: WindowConfig) -> Self {
        Self {
            config,
            size: config.initial,
            in_flight: 0,
        }
    }

    /// Bytes that may be sent now.
    pub fn available(&self) -> usize {
        self.size.saturating_sub(self.in_flight)
    }

    /// Bytes in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The window's size, bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes were sent (or asked for with a READ).
    pub fn on_sent(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    /// Bytes arrived; `rtt` is a round trip measured with them.
    pub fn on_acked(&mut self, _now: Instant, bytes: usize, _rtt: Option<Duration>) {
        self.forget(bytes);
        self.size = (self.size + bytes).min(self.config.max);
    }

    /// Bytes were lost.
    pub fn on_loss(&mut self, _now: Instant, bytes: usize) {
        self.forget(bytes);
    }

    /// Nothing came back for a retransmission timeout.
    pub fn on_timeout(&mut self, _now: Instant) {
        self.size = self.config.min;
    }

    /// Bytes will never be acknowledged: their queue pair is gone.
    pub fn forget(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
    }
}
