//! Writes of a client's program that are not flushed, and the reports of their loss.

use rnbd::block::BlockOp;

use roce_sim::Check;

/// Losses that an operation's user knew of when it began: by the server's power failures, and by reports.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Known {
    failures: u32,
    reports: u32,
}

/// Writes to a device since it was mapped.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Unflushed {
    acknowledged: u64,
    covered: u64,
    /// The server has lost power since it opened the device last.
    power_failed: bool,
    /// Losses so far.
    lost: Known,
    /// Losses that flushes, and writes with FUA, have reported.
    reported: [Known; 2],
}

/// Whether success of an operation means that it is durable.
pub(crate) fn is_forced(op: BlockOp) -> bool {
    matches!(
        op,
        BlockOp::Write { fua: true } | BlockOp::WriteZeroes { fua: true, .. }
    )
}

/// Whether only a flush makes an operation durable.
fn is_volatile(op: BlockOp) -> bool {
    op.writes() && !op.makes_durable() && op != BlockOp::Discard
}

impl Unflushed {
    pub(crate) fn power_fails(&mut self) {
        self.power_failed = true;
    }

    /// An operation begins: the losses that it need not tell, and the writes that a flush covers.
    pub(crate) fn begin(&self, op: BlockOp) -> (Known, u64) {
        (self.reported[usize::from(is_forced(op))], self.acknowledged)
    }

    /// The client reports lost writes. `silent`: the server does not say whether it has lost any.
    ///
    /// # Errors
    /// When it has lost none.
    pub(crate) fn reported(&mut self, silent: bool) -> Check {
        self.lost.reports += 1;
        match silent || self.power_failed {
            true => Ok(()),
            false => Err("writes are reported lost, and the server has not lost power".into()),
        }
    }

    /// The server has opened the device again.
    pub(crate) fn reopened(&mut self) {
        if core::mem::take(&mut self.power_failed) && self.acknowledged > self.covered {
            self.covered = self.acknowledged;
            self.lost.failures += 1;
        }
    }

    /// An operation has succeeded.
    ///
    /// # Errors
    /// When it should have made durable what is lost.
    pub(crate) fn succeeded(&mut self, op: BlockOp, known: Known, covers: u64) -> Check {
        if op.makes_durable() && known.failures < self.lost.failures {
            return Err(format!("{op:?} succeeds over acknowledged writes that are lost"));
        }
        if op.makes_durable() && known.reports < self.lost.reports {
            return Err(format!("{op:?} succeeds over writes that were reported lost"));
        }
        match op {
            BlockOp::Flush => self.covered = self.covered.max(covers),
            op if is_volatile(op) => self.acknowledged += 1,
            _ => {}
        }
        Ok(())
    }

    /// An operation has failed with EIO. Returns whether that told of losses: else the server's disk has failed.
    pub(crate) fn failed(&mut self, op: BlockOp, known: Known) -> bool {
        let tells = op.makes_durable() && known.reports < self.lost.reports;
        if tells {
            self.reported[usize::from(is_forced(op))] = self.lost;
        }
        tells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: BlockOp = BlockOp::Write { fua: false };
    const FORCED: BlockOp = BlockOp::Write { fua: true };

    fn written() -> Unflushed {
        let mut u = Unflushed::default();
        let (known, covers) = u.begin(WRITE);
        u.succeeded(WRITE, known, covers).unwrap();
        u
    }

    fn does(u: &mut Unflushed, op: BlockOp) -> Check {
        let (known, covers) = u.begin(op);
        u.succeeded(op, known, covers)
    }

    #[test]
    fn a_flush_that_succeeds_over_lost_writes_is_found() {
        let mut u = written();
        u.reopened();
        assert!(does(&mut u, BlockOp::Flush).is_ok(), "power did not fail");
        let mut u = written();
        u.power_fails();
        u.reopened();
        for op in [BlockOp::Flush, FORCED] {
            assert!(does(&mut u, op).is_err());
        }
        assert!(does(&mut u, BlockOp::Read).is_ok());
    }

    #[test]
    fn each_kind_is_told_once() {
        let mut u = written();
        u.power_fails();
        u.reported(false).unwrap();
        u.reopened();
        for op in [FORCED, BlockOp::Flush] {
            let (known, covers) = u.begin(op);
            let (second, _) = u.begin(op);
            assert!(u.failed(op, known) && u.failed(op, second));
            assert!(u.succeeded(op, known, covers).is_err(), "it began before");
            assert!(does(&mut u, op).is_ok());
            let (known, _) = u.begin(op);
            assert!(!u.failed(op, known));
        }
    }

    #[test]
    fn what_is_flushed_is_not_lost_and_a_report_of_it_is_found() {
        let mut u = written();
        does(&mut u, BlockOp::Flush).unwrap();
        u.power_fails();
        u.reopened();
        assert!(does(&mut u, BlockOp::Flush).is_ok());
        assert!(u.reported(false).is_err());
        assert!(written().reported(true).is_ok());
    }
}
