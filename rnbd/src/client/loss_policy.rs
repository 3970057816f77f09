//! Loss policy: how long operations wait while their device is lost.

use core::time::Duration;

use roce_verbs::Instant;

/// Between two attempts to open a device again, or to send again what was lost on the way.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Loss policy of a device: the fate of operations while there is no session, or the server has not opened it again.
///
/// With [`Queue`](Self::Queue) they wait, new ones and those whose answer was lost, and are sent (again) when the device is back. That
/// is as if they had taken so long, because of three things:
///
/// - Nothing overtakes. What is sent again was never answered, so no operation that depends on it has been begun. Operations that are
///   under way together have no order anyway.
/// - What was sent first is over. Our server lets a session in again only when its requests of before are answered (the chunk guards of
///   RTRS), and the image of a server process that died is locked until the calls that it had made are over. A kernel's server may let
///   another path in while its disk is at work. If that holds a write for longer than the session takes to come back by another
///   path, what was sent first may be done after what was sent again, and after what was written to the same blocks then.
/// - Each may be done twice: reads, writes, discards and flushes leave behind what they leave behind the first time.
///
/// A flush that was lost has to be repeated, since its writes may be durable or not. What was written and answered before the loss
/// needs nothing: it was in the page cache of the server's system, or in the device's cache, where it outlives the server's process;
/// a later flush covers it. It does not outlive the server's *system*: that it may be gone is
/// [told](super::output::Output::WritesLost), whatever operations do meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnLoss {
    /// They fail at once, as with the kernel's client.
    #[default]
    Error,
    /// They wait: so long at most since the device was lost, or for as long as it takes. From then on they fail.
    Queue(Option<Duration>),
}

/// A timer that starts at the next time that is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Timer {
    #[default]
    Off,
    /// Not started.
    Set(Duration),
    At(Instant),
}

impl Timer {
    /// Starts it, if it was set.
    pub(super) fn start(&mut self, now: Instant) {
        if let Self::Set(after) = *self {
            *self = Self::At(now + after);
        }
    }

    /// When it is due, once it has started.
    pub(super) fn at(self) -> Option<Instant> {
        match self {
            Self::At(at) => Some(at),
            Self::Off | Self::Set(_) => None,
        }
    }

    /// Whether it is due. It is so once.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.at().is_some_and(|at| at <= now);
        if is_due {
            *self = Self::Off;
        }
        is_due
    }
}

/// Loss policy of a device, and its state.
#[derive(Debug, Default)]
pub(super) struct LossPolicy {
    on_loss: OnLoss,
    end: Timer,
    /// The time is over.
    over: bool,
}

impl LossPolicy {
    /// Returns the policy.
    pub(super) fn on_loss(&self) -> OnLoss {
        self.on_loss
    }

    /// Sets the policy; `lost`: the device is.
    pub(super) fn set(&mut self, on_loss: OnLoss, lost: bool) {
        self.on_loss = on_loss;
        self.back();
        if lost {
            self.lost();
        }
    }

    /// The device is lost.
    pub(super) fn lost(&mut self) {
        if let OnLoss::Queue(Some(time)) = self.on_loss {
            self.end = Timer::Set(time);
        }
    }

    /// The device is back.
    pub(super) fn back(&mut self) {
        (self.end, self.over) = (Timer::Off, false);
    }

    /// Whether operations wait while the device is lost.
    pub(super) fn lasts(&self) -> bool {
        self.on_loss != OnLoss::Error && !self.over
    }

    /// Its timer.
    pub(super) fn timer(&mut self) -> &mut Timer {
        &mut self.end
    }

    /// When it ends.
    pub(super) fn end(&self) -> Option<Instant> {
        self.end.at()
    }

    /// Whether it ends now.
    pub(super) fn ends(&mut self, now: Instant) -> bool {
        let ends = self.end.is_due(now);
        self.over |= ends;
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(secs)
    }

    #[test]
    fn policy_begins_with_the_next_look_at_the_clock_and_ends_once() {
        let mut policy = LossPolicy::default();
        assert!(!policy.lasts());
        policy.set(OnLoss::Queue(Some(Duration::from_secs(3))), false);
        assert!(policy.lasts() && !policy.ends(at(100)), "nothing is lost");
        policy.lost();
        assert_eq!(policy.end(), None);
        policy.timer().start(at(10));
        policy.timer().start(at(11));
        assert_eq!(policy.end(), Some(at(13)));
        assert!(!policy.ends(at(12)) && policy.lasts());
        assert!(policy.ends(at(13)) && !policy.lasts() && !policy.ends(at(14)));
        policy.back();
        assert!(policy.lasts());
        policy.set(OnLoss::Queue(None), true);
        policy.timer().start(at(20));
        assert!(!policy.ends(at(1 << 30)) && policy.lasts());
        policy.set(OnLoss::Error, true);
        assert!(!policy.lasts());
    }
}
