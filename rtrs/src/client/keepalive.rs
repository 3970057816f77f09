//! Keepalive of a path: its heartbeats, its round-trip time, and how long it may be idle.

use core::time::Duration;
use std::collections::VecDeque;

use roce_verbs::Instant;

/// A heartbeat without an answer for this long is lost, or its answer is. Queue pairs recover losses within that time, unless the path
/// is broken.
const TIMEOUT: Duration = Duration::from_millis(400);
/// The timeout is at least this many round trips.
const ROUND_TRIPS: u32 = 4;
/// Timeout of a path that was not measured yet.
const UNMEASURED: Duration = Duration::from_secs(2);
/// Unanswered heartbeats of a path at most.
const MAX_UNANSWERED: usize = 32;

/// Heartbeats of a path. Answers arrive in the order of their heartbeats.
#[derive(Clone, Debug, Default)]
pub(super) struct Keepalive {
    /// When the unanswered heartbeats were sent.
    sent: VecDeque<Instant>,
    /// When the heartbeat was sent that was answered last.
    answered: Option<Instant>,
    /// When any message arrived last.
    received: Instant,
    /// Smoothed round-trip time.
    rtt: Option<Duration>,
}

impl Keepalive {
    /// A heartbeat is sent. `false`: too many are unanswered.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        let may = self.sent.len() < MAX_UNANSWERED;
        if may {
            self.sent.push_back(now);
        }
        may
    }

    /// Any message has arrived.
    pub(super) fn received(&mut self, now: Instant) {
        self.received = now;
    }

    /// Whether a heartbeat is unanswered.
    pub(super) fn is_open(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Takes an answer. Returns its round-trip time; `None` if no heartbeat was sent.
    pub(super) fn answer(&mut self, now: Instant) -> Option<Duration> {
        let sent = self.sent.pop_front()?;
        let time = now.saturating_since(sent);
        self.answered = Some(sent);
        self.rtt = Some(self.rtt.map_or(time, |rtt| (rtt * 7 + time) / 8));
        Some(time)
    }

    fn timeout(&self) -> Duration {
        self.rtt.map_or(UNMEASURED, |time| TIMEOUT.max(time * ROUND_TRIPS))
    }

    /// Since when, and for how long, the path is idle, if that exceeds its timeout.
    pub(super) fn idle(&self, now: Instant) -> Option<(Instant, Duration)> {
        let since = self.received.max(*self.sent.front()?);
        let time = now.saturating_since(since);
        (time >= self.timeout()).then_some((since, time))
    }

    /// Whether a heartbeat was answered that was sent clearly after another path's unanswered one.
    ///
    /// If both were sent together, both answers might lie in the sockets of a process that was stopped.
    pub(super) fn proves_alive(&self, since: Instant) -> bool {
        self.answered.is_some_and(|sent| sent >= since + TIMEOUT / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn a_path_may_take_several_of_its_round_trips() {
        let mut path = Keepalive::default();
        path.ask(at(1000));
        assert_eq!(path.idle(at(2999)), None, "it was not measured yet");
        assert_eq!(path.idle(at(3000)), Some((at(1000), Duration::from_secs(2))));
        assert_eq!(path.answer(at(1250)), Some(Duration::from_millis(250)));
        assert_eq!(path.answer(at(1260)), None, "nobody has asked");
        path.ask(at(2000));
        path.ask(at(2500));
        assert_eq!(path.idle(at(2999)), None);
        assert_eq!(path.idle(at(3000)), Some((at(2000), Duration::from_secs(1))));
    }

    #[test]
    fn whatever_comes_is_a_sign_of_life() {
        let mut path = Keepalive::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        path.received(at(450));
        assert_eq!(path.idle(at(849)), None);
        assert_eq!(path.idle(at(850)), Some((at(450), TIMEOUT)));
    }

    #[test]
    fn each_answer_belongs_to_the_question_that_has_waited_longest() {
        let mut path = Keepalive::default();
        for n in 0..MAX_UNANSWERED as u64 {
            assert!(path.ask(at(100 * n)));
        }
        assert!(!path.ask(at(5000)), "enough is owed");
        assert_eq!(path.answer(at(5000)), Some(Duration::from_millis(5000)));
        assert_eq!(path.answer(at(5000)), Some(Duration::from_millis(4900)));
        assert_eq!(path.idle(at(5000)).map(|(since, _)| since), None, "{path:?}");
        assert!(path.ask(at(5100)) && path.is_open());
    }

    #[test]
    fn a_quick_path_may_be_silent_for_a_while() {
        let mut path = Keepalive::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        assert_eq!(path.idle(at(499)), None);
        assert!(path.idle(at(500)).is_some());
    }

    #[test]
    fn one_slow_answer_is_no_custom() {
        let mut path = Keepalive::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        assert_eq!(path.answer(at(400)), Some(Duration::from_millis(300)));
        path.ask(at(1000));
        assert!(path.idle(at(1400)).is_some());
    }

    #[test]
    fn life_is_shown_by_the_answer_to_a_later_question() {
        let mut other = Keepalive::default();
        other.ask(at(100));
        assert!(!other.proves_alive(at(100)));
        other.answer(at(5000));
        assert!(
            !other.proves_alive(at(100)),
            "both may have been answered while we slept"
        );
        other.ask(at(299));
        other.answer(at(6000));
        assert!(!other.proves_alive(at(100)));
        other.ask(at(300));
        other.answer(at(6000));
        assert!(other.proves_alive(at(100)));
    }
}
