//! Decides how long an acknowledgement may wait for a request of ours.

use core::time::Duration;

use roce_verbs::Instant;

/// Longest wait of an acknowledgement.
const HOLD: Duration = Duration::from_micros(20);
/// Time within which an answer counts as prompt. Longer than [`HOLD`], because an acknowledgement that does not wait delays the answer.
const PROMPT: Duration = Duration::from_micros(50);
/// Prompt answers in a row that switch waiting on.
const ANSWERS: u32 = 16;
/// Prompt answers in a row after which a late one may be the scheduler's doing: then waiting is off until the next prompt one.
const MANY_ANSWERS: u32 = 64;

/// Tells ping-pong from other traffic by how fast the program answers what it receives.
///
/// In a ping-pong an acknowledgement that waits for the answer saves a system call at each end. In other traffic it would only delay the
/// peer, so that a late answer switches waiting off.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckPolicy {
    /// Arrival of the oldest message that the program has not answered.
    unanswered: Option<Instant>,
    /// Prompt answers in a row.
    prompt: u32,
}

impl AckPolicy {
    /// Records a message that asks for an acknowledgement. Returns how long the acknowledgement may wait.
    pub(crate) fn on_received(&mut self, now: Instant) -> Duration {
        let since = *self.unanswered.get_or_insert(now);
        if now.saturating_since(since) > PROMPT {
            self.unanswered = Some(now);
            self.on_late();
        }
        match self.prompt >= ANSWERS {
            true => HOLD,
            false => Duration::ZERO,
        }
    }

    /// Records a request that the program posts.
    pub(crate) fn on_posted(&mut self, now: Instant) {
        if let Some(since) = self.unanswered.take() {
            match now.saturating_since(since) <= PROMPT {
                true => self.prompt = self.prompt.saturating_add(1),
                false => self.on_late(),
            }
        }
    }

    fn on_late(&mut self) {
        self.prompt = if self.prompt >= MANY_ANSWERS { ANSWERS - 1 } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(n: u64) -> Instant {
        Instant::from_nanos(n * 1000)
    }

    /// Has answered `times` messages promptly, the last one at 1 ms.
    fn after(times: u32) -> AckPolicy {
        let mut policy = AckPolicy::default();
        for _ in 0..times {
            policy.on_received(us(990));
            policy.on_posted(us(1000));
        }
        policy
    }

    #[test]
    fn acknowledgements_wait_after_enough_prompt_answers() {
        assert_eq!(after(ANSWERS - 1).on_received(us(2000)), Duration::ZERO);
        assert_eq!(after(ANSWERS).on_received(us(2000)), HOLD);
    }

    #[test]
    fn one_late_answer_switches_waiting_off() {
        let mut policy = after(ANSWERS);
        policy.on_received(us(2000));
        policy.on_posted(us(2051));
        assert_eq!(policy.on_received(us(2060)), Duration::ZERO);
    }

    #[test]
    fn after_many_prompt_answers_the_next_prompt_one_switches_waiting_on_again() {
        for (times, hold) in [(MANY_ANSWERS - 1, Duration::ZERO), (MANY_ANSWERS, HOLD)] {
            let mut policy = after(times);
            policy.on_received(us(2000));
            policy.on_posted(us(2051));
            assert_eq!(policy.on_received(us(2060)), Duration::ZERO);
            policy.on_posted(us(2070));
            assert_eq!(policy.on_received(us(2080)), hold);
        }
        let mut policy = after(MANY_ANSWERS);
        for at in [2000, 3000] {
            policy.on_received(us(at));
            policy.on_posted(us(at + 51));
        }
        policy.on_received(us(4000));
        policy.on_posted(us(4001));
        assert_eq!(policy.on_received(us(4010)), Duration::ZERO, "late twice in a row");
    }

    #[test]
    fn a_message_that_finds_an_old_one_unanswered_switches_waiting_off() {
        let mut policy = after(ANSWERS);
        assert_eq!(policy.on_received(us(2000)), HOLD);
        assert_eq!(policy.on_received(us(2050)), HOLD);
        assert_eq!(policy.on_received(us(2051)), Duration::ZERO);
    }
}
