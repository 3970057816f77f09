//! Heartbeats of a path and its round-trip time: how long it may be silent.

use core::time::Duration;
use std::collections::VecDeque;

use roce_verbs::Instant;

/// A question that is unanswered for as long is one that is lost, or so is its answer. Queue pairs repair what is lost by and by within
/// that time, unless nothing comes through any more.
const SILENCE: Duration = Duration::from_millis(400);
/// As many of a path's usual round trips are no silence.
const ROUND_TRIPS: u32 = 4;
/// Time allowed to a path that was not measured yet.
const UNMEASURED: Duration = Duration::from_secs(2);
/// Answers that a path may owe before it is not asked any more.
const MAX_OWED: usize = 32;

/// Questions and answers of a path: heartbeats. Answers come in the order of their questions.
#[derive(Clone, Debug, Default)]
pub(super) struct Questions {
    /// When those went that wait for their answers.
    asked: VecDeque<Instant>,
    /// When the one went that was answered last.
    answered: Option<Instant>,
    /// When anything has come by the path.
    heard: Instant,
    /// Smoothed round-trip time.
    usual: Option<Duration>,
}

impl Questions {
    /// One goes. `false`: too many are unanswered.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        let may = self.asked.len() < MAX_OWED;
        if may {
            self.asked.push_back(now);
        }
        may
    }

    /// Records that a packet has come, whatever it is.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// One is on its way.
    pub(super) fn is_open(&self) -> bool {
        !self.asked.is_empty()
    }

    /// An answer has come, and after which time; `None` if nothing was asked.
    pub(super) fn answer(&mut self, now: Instant) -> Option<Duration> {
        let asked = self.asked.pop_front()?;
        let time = now.saturating_since(asked);
        self.answered = Some(asked);
        self.usual = Some(self.usual.map_or(time, |usual| (usual * 7 + time) / 8));
        Some(time)
    }

    /// For how long it may be silent.
    fn patience(&self) -> Duration {
        self.usual.map_or(UNMEASURED, |time| SILENCE.max(time * ROUND_TRIPS))
    }

    /// It is silent for longer than it may be: since when, and how long.
    pub(super) fn silent(&self, now: Instant) -> Option<(Instant, Duration)> {
        let since = self.heard.max(*self.asked.front()?);
        let time = now.saturating_since(since);
        (time >= self.patience()).then_some((since, time))
    }

    /// Whether a question was answered that went clearly after another path was asked what it has not answered.
    ///
    /// If it had gone with the other, the answers might lie side by side in the sockets of a process that was stopped.
    pub(super) fn proves_life(&self, since: Instant) -> bool {
        self.answered.is_some_and(|asked| asked >= since + SILENCE / 2)
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
        let mut path = Questions::default();
        path.ask(at(1000));
        assert_eq!(path.silent(at(2999)), None, "it was not measured yet");
        assert_eq!(path.silent(at(3000)), Some((at(1000), Duration::from_secs(2))));
        assert_eq!(path.answer(at(1250)), Some(Duration::from_millis(250)));
        assert_eq!(path.answer(at(1260)), None, "nobody has asked");
        path.ask(at(2000));
        path.ask(at(2500));
        assert_eq!(path.silent(at(2999)), None);
        assert_eq!(path.silent(at(3000)), Some((at(2000), Duration::from_secs(1))));
    }

    #[test]
    fn whatever_comes_is_a_sign_of_life() {
        let mut path = Questions::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        path.heard(at(450));
        assert_eq!(path.silent(at(849)), None);
        assert_eq!(path.silent(at(850)), Some((at(450), SILENCE)));
    }

    #[test]
    fn each_answer_belongs_to_the_question_that_has_waited_longest() {
        let mut path = Questions::default();
        for n in 0..MAX_OWED as u64 {
            assert!(path.ask(at(100 * n)));
        }
        assert!(!path.ask(at(5000)), "enough is owed");
        assert_eq!(path.answer(at(5000)), Some(Duration::from_millis(5000)));
        assert_eq!(path.answer(at(5000)), Some(Duration::from_millis(4900)));
        assert_eq!(path.silent(at(5000)).map(|(since, _)| since), None, "{path:?}");
        assert!(path.ask(at(5100)) && path.is_open());
    }

    #[test]
    fn a_quick_path_may_be_silent_for_a_while() {
        let mut path = Questions::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        assert_eq!(path.silent(at(499)), None);
        assert!(path.silent(at(500)).is_some());
    }

    #[test]
    fn one_slow_answer_is_no_custom() {
        let mut path = Questions::default();
        path.ask(at(0));
        path.answer(at(1));
        path.ask(at(100));
        assert_eq!(path.answer(at(400)), Some(Duration::from_millis(300)));
        path.ask(at(1000));
        assert!(path.silent(at(1400)).is_some());
    }

    #[test]
    fn life_is_shown_by_the_answer_to_a_later_question() {
        let mut other = Questions::default();
        other.ask(at(100));
        assert!(!other.proves_life(at(100)));
        other.answer(at(5000));
        assert!(
            !other.proves_life(at(100)),
            "both may have been answered while we slept"
        );
        other.ask(at(299));
        other.answer(at(6000));
        assert!(!other.proves_life(at(100)));
        other.ask(at(300));
        other.answer(at(6000));
        assert!(other.proves_life(at(100)));
    }
}
