//! Bytes in flight towards one peer.

use core::time::Duration;

use roce_verbs::Instant;

use crate::{
    congestion::{Acked, CongestionControl, DelayAware, Loss},
    pace::Pace,
};

/// Limits of a [`Window`], bytes where nothing else is said.
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

/// The window: how many bytes may be under way to a peer, over all queue pairs, as its [`CongestionControl`] decides; and the
/// pace of READ responses.
#[derive(Debug)]
pub struct Window {
    config: WindowConfig,
    control: Box<dyn CongestionControl>,
    in_flight: usize,
    pace: Pace,
}

impl Window {
    /// An open window with nothing in flight.
    pub fn new(config: WindowConfig) -> Self {
        Self::with(config, Box::new(DelayAware::new(config)))
    }

    /// The same, with a congestion control of the caller's.
    pub fn with(config: WindowConfig, control: Box<dyn CongestionControl>) -> Self {
        Self {
            config,
            control,
            in_flight: 0,
            pace: Pace::default(),
        }
    }

    /// Bytes that may be sent now.
    pub fn available(&self) -> usize {
        self.size().saturating_sub(self.in_flight)
    }

    /// Bytes in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The window's size, bytes.
    pub fn size(&self) -> usize {
        self.control.size()
    }

    /// The most bytes that one READ request should ask for: the window can't hold the answer back once it is asked for.
    /// Half of what the window was before anything was lost, so that two take turns.
    pub fn read_limit(&self) -> usize {
        let WindowConfig { min, max, .. } = self.config;
        (self.control.potential() / 2).max(min * 2).min(max)
    }

    /// The most bytes to ask for again when nothing else is under way.
    pub fn piece_limit(&self) -> usize {
        (self.read_limit() * 2).min(self.config.max)
    }

    /// The shortest round trip of late.
    pub fn shortest_rtt(&self) -> Option<Duration> {
        self.control.shortest_rtt()
    }

    /// Bytes were sent (or asked for with a READ).
    pub fn on_sent(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    /// Bytes arrived; `rtt` is a round trip measured with them.
    pub fn on_acked(&mut self, now: Instant, bytes: usize, rtt: Option<Duration>) {
        let in_flight = self.in_flight;
        self.forget(bytes);
        self.control.on_acked(Acked {
            now,
            bytes,
            in_flight,
            rtt,
        });
    }

    /// A loss was noticed; `bytes` are known to be lost.
    pub fn on_loss(&mut self, now: Instant, loss: Loss, bytes: usize) {
        self.forget(bytes);
        self.control.on_loss(now, loss, bytes);
    }

    /// The last timeout was spurious: packets taken for lost were only late.
    pub fn on_spurious_timeout(&mut self) {
        self.control.on_spurious_timeout();
    }

    /// Whether READ responses may go to the peer now, or when: it gets as many as it asks for, until it has shown that
    /// they are more than it can take.
    pub fn may_respond(&mut self, now: Instant) -> Result<(), Instant> {
        self.pace.may_send(now)
    }

    /// READ responses were sent.
    pub fn on_responded(&mut self, bytes: usize) {
        self.pace.on_sent(bytes);
    }

    /// The peer asks for a READ again, of which `arrived` bytes in a row came to it and `lost` more were sent, the last of
    /// them `silence` ago.
    pub fn on_response_loss(&mut self, now: Instant, silence: Duration, arrived: usize, lost: usize) {
        self.pace.on_loss(now, silence, arrived, lost);
    }

    /// Bytes will never be acknowledged: they are sent again, or their queue pair is gone.
    pub fn forget(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_flight_close_the_window() {
        let mut w = Window::new(WindowConfig::default());
        assert_eq!(w.available(), 64 << 10);
        w.on_sent(60 << 10);
        assert_eq!((w.available(), w.in_flight()), (4 << 10, 60 << 10));
        // A queue pair may always have one packet in flight, so more than the window can be.
        w.on_sent(10 << 10);
        assert_eq!(w.available(), 0);
        w.forget(70 << 10);
        assert_eq!(w.available(), 64 << 10);
        w.forget(1);
        assert_eq!(w.in_flight(), 0);
    }
}
