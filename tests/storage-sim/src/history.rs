//! Writes to a device, and the contents that a read of it may return.

use crate::disk::Content;

/// How a write ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// Written.
    Done,
    /// Under way, failed, or lost with its session: there or not.
    Perhaps,
}

/// A write to one block.
#[derive(Clone, Copy, Debug)]
struct Write {
    id: u64,
    content: Content,
    begin: u64,
    /// Afterwards it changes nothing any more; `None`: it still may.
    end: Option<u64>,
    outcome: Outcome,
    /// A power loss leaves it, or something newer.
    durable: bool,
    /// At this time another had its place: only a power loss brings it back,
    replaced: Option<u64>,
    /// or not even that.
    gone: bool,
}

impl Write {
    /// Whether it ended before `at`.
    fn over(&self, at: u64) -> bool {
        self.end.is_some_and(|end| end < at)
    }

    fn is_certain(&self, at: u64) -> bool {
        self.outcome == Outcome::Done && self.over(at)
    }

    fn replace(&mut self, at: u64) {
        self.replaced = Some(self.replaced.map_or(at, |known| known.min(at)));
    }
}

/// All that was written to a device, as far as it can still be read, now or after a power loss.
#[derive(Debug)]
pub(crate) struct History {
    blocks: Vec<Vec<Write>>,
    /// When power was lost last.
    power_lost: Option<u64>,
}

/// Forgets writes older than the newest durable one.
fn forget_older(block: &mut [Write]) {
    let newest = block.iter().filter(|w| w.durable).map(|w| w.begin).max();
    if let Some(newest) = newest {
        block.iter_mut().for_each(|w| w.gone |= w.over(newest));
    }
}

impl History {
    /// A device of zeroes.
    pub(crate) fn new(blocks: u64) -> Self {
        let zero = Write {
            id: 0,
            content: 0,
            begin: 0,
            end: Some(0),
            outcome: Outcome::Done,
            durable: true,
            replaced: None,
            gone: false,
        };
        Self {
            blocks: vec![vec![zero]; blocks as usize],
            power_lost: None,
        }
    }

    /// A client sends a write.
    pub(crate) fn begin(&mut self, now: u64, id: u64, lba: u64, contents: &[Content]) {
        for (block, content) in self.blocks.iter_mut().skip(lba as usize).zip(contents) {
            block.push(Write {
                id,
                content: *content,
                begin: now,
                end: None,
                outcome: Outcome::Perhaps,
                durable: false,
                replaced: None,
                gone: false,
            });
        }
    }

    /// Ends a write: with success, or with an error, after which it may be there or not.
    pub(crate) fn end(&mut self, now: u64, id: u64, lba: u64, count: u64, success: bool, durable: bool) {
        let power_lost = self.power_lost;
        for write in self.of(id, lba, count) {
            write.end.get_or_insert(now);
            // The answer may have been on its way when power was lost.
            let lost = power_lost.is_some_and(|at| write.begin <= at);
            if success && (durable || !lost) {
                write.outcome = Outcome::Done;
                write.durable = durable;
            }
        }
    }

    /// Its session is gone, and so is whatever the server still did for it.
    pub(crate) fn settle(&mut self, now: u64, id: u64, lba: u64, count: u64) {
        for write in self.of(id, lba, count) {
            write.end.get_or_insert(now);
        }
    }

    fn of(&mut self, id: u64, lba: u64, count: u64) -> impl Iterator<Item = &mut Write> {
        let blocks = self.blocks.iter_mut().skip(lba as usize).take(count as usize);
        blocks.flatten().filter(move |write| write.id == id)
    }

    /// A flush that began at this time has succeeded.
    pub(crate) fn flushed(&mut self, begin: u64) {
        for block in &mut self.blocks {
            for write in &mut *block {
                write.durable |= write.is_certain(begin);
            }
            forget_older(block);
            // What had its place then is durable, or something newer.
            for write in block {
                write.gone |= write.replaced.is_some_and(|at| at < begin);
            }
        }
    }

    /// The server lost power. What was not durable may be there or not; of what was under way nothing comes any more but what is
    /// `held`, to be sent again.
    pub(crate) fn lose_power(&mut self, now: u64, held: impl Fn(u64) -> bool) {
        self.power_lost = Some(now);
        for block in &mut self.blocks {
            forget_older(block);
            for write in block {
                if !held(write.id) {
                    write.end.get_or_insert(now);
                }
                // One of them it is; which, the next read tells.
                write.outcome = Outcome::Perhaps;
                write.durable = false;
                // A read that was under way may still give it.
                write.replaced = write.gone.then(|| write.replaced.map_or(now, |at| at.min(now)));
            }
        }
    }

    /// Checks the content that a power loss would leave in a block.
    ///
    /// # Errors
    /// When that must not be.
    pub(crate) fn check_durable(&mut self, lba: u64, content: Content) -> Result<(), String> {
        let block = &mut self.blocks[lba as usize];
        forget_older(block);
        let left = block.iter().filter(|w| !w.gone);
        match left.clone().any(|w| w.content == content) {
            true => Ok(()),
            false => Err(format!(
                "a power loss would leave {content:#x} in block {lba}, where {:x?} is flushed",
                left.map(|w| (w.content, w.begin, w.end)).collect::<Vec<_>>()
            )),
        }
    }

    /// A read that began and ended at these times gave this.
    ///
    /// # Errors
    /// When it can't be.
    pub(crate) fn check(&mut self, begin: u64, end: u64, lba: u64, contents: &[Content]) -> Result<(), String> {
        // Of what was there before a power loss nothing follows for later.
        let before = self.power_lost.is_some_and(|at| begin <= at);
        for (lba, content) in (lba..).zip(contents) {
            let block = &mut self.blocks[lba as usize];
            let certain = block.iter().filter(|w| w.is_certain(begin)).map(|w| w.begin).max();
            for write in &mut *block {
                if !before && certain.is_some_and(|later| write.over(later)) {
                    write.replace(begin);
                }
            }
            let there = block.iter().filter(|w| w.replaced.is_none_or(|at| at > begin));
            let mut possible = there
                .clone()
                .filter(|w| w.begin <= end && w.content == *content)
                .peekable();
            if possible.peek().is_none() {
                return Err(format!(
                    "block {lba} holds {content:#x}, read from {begin} to {end}; it may hold {:x?}",
                    there.map(|w| (w.content, w.begin, w.end)).collect::<Vec<_>>()
                ));
            }
            // Of one that was still under way nothing follows for what it may have come after.
            if !before && possible.all(|w| w.over(begin)) {
                // What was over then, and is not what was read, does not come again.
                for write in block.iter_mut().filter(|w| w.content != *content && w.over(begin)) {
                    write.replace(begin);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_gives_the_last_write_or_one_that_is_under_way() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[100]);
        assert!(h.check(11, 12, 0, &[0]).is_ok());
        assert!(h.check(11, 12, 0, &[100]).is_ok());
        h.end(20, 1, 0, 1, true, false);
        assert!(h.check(21, 22, 0, &[100]).is_ok());
        assert!(h.check(23, 24, 0, &[0]).is_err(), "replaced by a write that had ended");
        assert!(h.check(23, 24, 0, &[7]).is_err(), "written by nobody");
    }

    #[test]
    fn of_two_writes_at_the_same_time_either_may_win_but_it_stays() {
        let both = || {
            let mut h = History::new(1);
            h.begin(10, 1, 0, &[1]);
            h.begin(11, 2, 0, &[2]);
            h.end(20, 1, 0, 1, true, false);
            h.end(21, 2, 0, 1, true, false);
            h
        };
        let mut h = both();
        assert!(h.check(30, 31, 0, &[1]).is_ok());
        assert!(h.check(32, 33, 0, &[2]).is_err(), "it had been 1");
        let mut h = both();
        assert!(h.check(30, 31, 0, &[2]).is_ok());
        assert!(h.check(32, 33, 0, &[0]).is_err());
    }

    #[test]
    fn what_was_read_may_be_of_a_write_that_was_still_under_way() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(20, 1, 0, 1, true, false);
        h.begin(30, 2, 0, &[0]);
        // A discard: perhaps it has changed nothing.
        h.begin(31, 3, 0, &[0]);
        h.end(40, 3, 0, 1, false, false);
        assert!(h.check(41, 60, 0, &[0]).is_ok());
        h.flushed(50);
        assert!(
            h.check_durable(0, 1).is_ok(),
            "the zeroes were written when the flush had begun"
        );
    }

    #[test]
    fn what_failed_may_be_there_until_it_is_replaced() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(20, 1, 0, 1, false, false);
        assert!(h.check(30, 31, 0, &[0]).is_ok());
        assert!(h.check(40, 41, 0, &[1]).is_err(), "after its end it does not come");
        h.begin(50, 2, 0, &[2]);
        h.end(51, 2, 0, 1, true, false);
        assert!(h.check(52, 53, 0, &[0]).is_err());
        assert!(h.check(52, 53, 0, &[2]).is_ok());
    }

    #[test]
    fn what_is_lost_with_a_session_may_come_until_the_server_is_done_with_it() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        assert!(h.check(30, 31, 0, &[0]).is_ok());
        assert!(h.check(40, 41, 0, &[1]).is_ok());
        h.begin(50, 2, 0, &[2]);
        h.end(51, 2, 0, 1, true, false);
        assert!(h.check(52, 53, 0, &[1]).is_ok(), "a stale write that comes late");
        h.settle(60, 1, 0, 1);
        assert!(h.check(61, 62, 0, &[1]).is_ok());
    }

    #[test]
    fn a_power_loss_leaves_what_was_flushed_or_something_newer() {
        let mut h = History::new(2);
        h.begin(10, 1, 0, &[1, 1]);
        h.end(11, 1, 0, 2, true, false);
        h.flushed(12);
        h.begin(20, 2, 0, &[2]);
        h.end(21, 2, 0, 1, true, false);
        h.lose_power(30, |_| false);
        let mut other = History::new(2);
        other.blocks = h.blocks.clone();
        assert!(h.check(40, 41, 0, &[1, 1]).is_ok());
        assert!(other.check(40, 41, 0, &[2, 1]).is_ok());
        assert!(other.check(42, 43, 0, &[1, 1]).is_err(), "it had been 2");
        assert!(h.check(42, 43, 1, &[0]).is_err(), "flushed");
    }

    #[test]
    fn a_flush_covers_only_what_had_ended_when_it_began() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.flushed(15);
        h.end(20, 1, 0, 1, true, false);
        h.lose_power(30, |_| false);
        assert!(h.check(40, 41, 0, &[0]).is_ok());
    }

    #[test]
    fn what_a_read_has_shown_to_be_replaced_may_come_back_with_a_power_loss() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(11, 1, 0, 1, true, false);
        h.begin(20, 2, 0, &[2]);
        h.end(21, 2, 0, 1, true, false);
        assert!(h.check(30, 31, 0, &[2]).is_ok());
        assert!(h.check(32, 33, 0, &[1]).is_err());
        h.lose_power(40, |_| false);
        assert!(h.check(50, 51, 0, &[1]).is_ok());
    }

    #[test]
    fn a_read_that_takes_long_gives_what_was_there_when_it_began() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(20, 1, 0, 1, true, true);
        assert!(h.check(30, 31, 0, &[1]).is_ok());
        h.flushed(32);
        assert!(h.check(5, 40, 0, &[0]).is_ok());
        assert!(h.check(25, 40, 0, &[0]).is_err());
    }

    #[test]
    fn a_read_from_before_the_power_loss_says_nothing_of_later() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(20, 1, 0, 1, true, false);
        h.lose_power(40, |_| false);
        assert!(h.check(30, 50, 0, &[1]).is_ok());
        assert!(h.check(60, 61, 0, &[0]).is_ok());
    }

    #[test]
    fn what_was_replaced_before_a_flush_does_not_come_back() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.begin(10, 2, 0, &[2]);
        h.end(20, 1, 0, 1, true, false);
        h.end(20, 2, 0, 1, true, false);
        assert!(h.check(30, 31, 0, &[2]).is_ok());
        h.flushed(40);
        h.lose_power(50, |_| false);
        assert!(h.check(60, 61, 0, &[1]).is_err());
        assert!(h.check(60, 61, 0, &[2]).is_ok());
    }

    #[test]
    fn an_answer_that_comes_after_the_power_loss_is_certain_only_if_forced() {
        let mut h = History::new(2);
        h.begin(10, 1, 0, &[1]);
        h.begin(10, 2, 1, &[2]);
        h.lose_power(15, |_| false);
        h.end(20, 1, 0, 1, true, false);
        h.end(20, 2, 1, 1, true, true);
        assert!(h.check(30, 31, 0, &[0]).is_ok());
        assert!(h.check(30, 31, 1, &[0]).is_err());
        assert!(h.check(30, 31, 1, &[2]).is_ok());
    }

    #[test]
    fn what_is_held_over_a_power_loss_may_be_done_again() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.begin(10, 2, 0, &[2]);
        h.lose_power(20, |id| id == 1);
        let mut other = History::new(1);
        other.blocks = h.blocks.clone();
        assert!(h.check(30, 31, 0, &[0]).is_ok());
        assert!(h.check(40, 41, 0, &[1]).is_ok(), "sent again");
        assert!(h.check(42, 43, 0, &[2]).is_err(), "nobody sends it again");
        assert!(other.check(30, 31, 0, &[2]).is_ok());
        assert!(other.check(40, 41, 0, &[1]).is_ok());
        other.end(50, 1, 0, 1, true, false);
        assert!(other.check(51, 52, 0, &[0]).is_err(), "one of both is there");
    }

    #[test]
    fn what_a_power_loss_would_leave_is_checked() {
        let mut h = History::new(1);
        h.begin(10, 1, 0, &[1]);
        h.end(11, 1, 0, 1, true, false);
        assert!(h.check_durable(0, 0).is_ok() && h.check_durable(0, 1).is_ok());
        h.flushed(12);
        assert!(h.check_durable(0, 0).is_err() && h.check_durable(0, 1).is_ok());
        h.begin(20, 2, 0, &[2]);
        assert!(h.check_durable(0, 2).is_ok(), "a cache may be written out at any time");
    }
}
