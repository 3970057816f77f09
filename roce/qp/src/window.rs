//! Window of bytes in flight towards one peer.

use core::time::Duration;

use roce_verbs::Instant;

use crate::{
    congestion::{DelayAware, Loss, WindowConfig},
    pace::Pace,
};

/// Window of bytes in flight towards a peer, for all queue pairs, and the pace of READ responses.
///
/// Congestion control (`DelayAware`) decides the size.
#[derive(Debug)]
pub struct Window {
    control: DelayAware,
    in_flight: usize,
    pace: Pace,
}

impl Window {
    /// Creates a window with nothing in flight.
    pub fn new(config: WindowConfig) -> Self {
        Self {
            control: DelayAware::new(config),
            in_flight: 0,
            pace: Pace::default(),
        }
    }

    /// Returns the bytes that may be sent now.
    pub fn available(&self) -> usize {
        self.size().saturating_sub(self.in_flight)
    }

    /// Returns the bytes in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the size, bytes.
    pub fn size(&self) -> usize {
        self.control.size()
    }

    /// Returns the largest part that one READ request should request, bytes.
    ///
    /// The window can't hold the response back after the request. Half of the size before any loss, so that two READs take
    /// turns.
    pub fn read_limit(&self) -> usize {
        let WindowConfig { min, max, .. } = self.control.config();
        (self.control.potential() / 2).max(min * 2).min(max)
    }

    /// Returns the largest part of a READ to request again when nothing else is in flight, bytes.
    pub fn piece_limit(&self) -> usize {
        (self.read_limit() * 2).min(self.control.config().max)
    }

    /// Records sent bytes, or those that a READ requests.
    pub fn on_sent(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    /// Records acknowledged bytes. `rtt`: round trip measured with them.
    pub fn on_acked(&mut self, now: Instant, bytes: usize, rtt: Option<Duration>) {
        let in_flight = self.in_flight;
        self.forget(bytes);
        self.control.on_acked(now, bytes, in_flight, rtt);
    }

    /// Records a loss of `bytes`.
    pub fn on_loss(&mut self, now: Instant, loss: Loss, bytes: usize) {
        self.forget(bytes);
        self.control.on_loss(now, loss, bytes);
    }

    /// Records that the last timeout was spurious: the packets were only late.
    pub fn on_spurious_timeout(&mut self) {
        self.control.on_spurious_timeout();
    }

    /// Checks whether READ responses may be sent to the peer now. They are not limited until the peer loses some.
    ///
    /// # Errors
    /// The time from when on they may.
    pub fn may_respond(&mut self, now: Instant) -> Result<(), Instant> {
        self.pace.may_send(now)
    }

    /// Records sent READ responses, bytes.
    pub fn on_responded(&mut self, bytes: usize) {
        self.pace.on_sent(bytes);
    }

    /// Records that the peer requests a READ again: `arrived` bytes in a row had arrived, and `lost` more were sent, the last
    /// of them `silence` ago.
    pub fn on_response_loss(&mut self, now: Instant, silence: Duration, arrived: usize, lost: usize) {
        self.pace.on_loss(now, silence, arrived, lost);
    }

    /// Removes bytes that will never be acknowledged: they are retransmitted, or their queue pair is gone.
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
