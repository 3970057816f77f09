//! Acknowledged writes that no flush has made durable, and who has to be told that they were lost.
//!
//! Works as `errseq_t` and open files do in Linux: a loss has a number, and each [`Opener`] knows up to which it has been told. A flush
//! fails that began before it was. So does a write with FUA, for which it is told apart: a program may take the error of a write for
//! that of this write alone, and would then believe its next flush.

use std::{cell::Cell, rc::Rc};

use super::state::DeviceKey;
use crate::{block::BlockOp, errno::Errno};

/// Counts of a device.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Writes acknowledged that only a flush makes durable.
    acknowledged: u64,
    /// Writes that are covered by a flush that succeeded, or are lost.
    covered: u64,
    /// How often some were lost.
    lost: u64,
    /// The last loss that an opener was told of by a flush.
    told: u64,
}

/// The last loss that an opener was told of: by a flush, and by a write with FUA.
type Told = [Cell<u64>; 2];

/// Indices of the two kinds.
const BY_FLUSH: usize = 0;
const BY_WRITE: usize = 1;

impl Losses {
    /// Counts an acknowledged write. Call it before its user can know of it.
    pub(super) fn acknowledge(&mut self) {
        self.acknowledged += 1;
    }

    /// Writes that a flush covers if it is sent now.
    pub(super) fn flush_begins(&self) -> u64 {
        self.acknowledged
    }

    /// A flush that covers so many has succeeded.
    pub(super) fn flush_ends(&mut self, covers: u64) {
        self.covered = self.covered.max(covers);
    }

    /// The server has none of what no flush has covered. Returns how many writes that were.
    pub(super) fn lose(&mut self) -> u64 {
        let writes = self.acknowledged.saturating_sub(self.covered);
        self.flush_ends(self.acknowledged);
        self.lost += u64::from(writes > 0);
        writes
    }

    /// How often writes were lost.
    pub(super) fn count(&self) -> u64 {
        self.lost
    }
}

/// A user of a device that is told once of each loss, as an open file of Linux is: an NBD client, a virtual machine. One that comes
/// after a loss of which nobody has been told is told of it.
#[derive(Clone, Debug)]
pub struct Opener {
    device: DeviceKey,
    told: Rc<Told>,
}

impl Opener {
    pub(super) fn new(device: DeviceKey, losses: Option<&Losses>) -> Self {
        let told = losses.map_or(0, |losses| losses.told);
        Self {
            device,
            told: Rc::new([told, told].map(Cell::new)),
        }
    }

    /// The device.
    pub fn device(&self) -> DeviceKey {
        self.device
    }
}

/// Fate of a write request that takes several operations.
#[derive(Clone, Copy, Default, Debug)]
pub struct Parts(Option<u64>);

impl Parts {
    /// The next operation has ended like this, when the device had lost writes [so often](super::output::Output::Done).
    ///
    /// # Errors
    /// The operation's; EIO if it succeeded, and an earlier one may be lost.
    pub fn ended(&mut self, result: Result<(), Errno>, losses: u64) -> Result<(), Errno> {
        let first = *self.0.get_or_insert(losses);
        result.and(if first == losses { Ok(()) } else { Err(Errno::EIO) })
    }
}

/// Part of an operation that concerns losses.
#[derive(Debug)]
pub(super) struct Stake {
    /// Losses that its opener had been told of when it began.
    known: u64,
    /// Record of losses reported to its opener, and which entry, if it makes writes durable.
    tells: Option<(Rc<Told>, usize)>,
    /// The losses so far when its first part was acknowledged that only a flush makes durable.
    volatile_since: Option<u64>,
}

impl Stake {
    /// For an operation of an opener; `forces`: a flush that stands for the FUA of a write.
    pub(super) fn of(opener: &Opener, op: BlockOp, forces: bool) -> Self {
        let by = match op {
            BlockOp::Flush if !forces => BY_FLUSH,
            _ => BY_WRITE,
        };
        Self {
            known: opener.told[by].get(),
            tells: op.makes_durable().then(|| (opener.told.clone(), by)),
            volatile_since: None,
        }
    }

    /// A part of it was acknowledged that only a flush makes durable.
    pub(super) fn acknowledged(&mut self, losses: &mut Losses) {
        self.volatile_since.get_or_insert(losses.count());
        losses.acknowledge();
    }

    /// Whether such a part is lost.
    pub(super) fn is_torn(&self, losses: &Losses) -> bool {
        self.volatile_since.is_some_and(|since| since < losses.count())
    }

    /// All of its parts are done again.
    pub(super) fn restart(&mut self) {
        self.volatile_since = None;
    }

    /// How an operation ends that ended like this at the server.
    ///
    /// # Errors
    /// The server's; EIO if it would make durable what was lost, or if parts of it are among that.
    pub(super) fn verdict(&self, result: Result<(), Errno>, losses: &mut Losses) -> Result<(), Errno> {
        if result.is_err_and(|e| e != Errno::EIO) {
            return result;
        }
        let lost = losses.count();
        let tells = self.tells.as_ref().filter(|_| self.known < lost);
        if let Some((told, by)) = tells {
            told[*by].set(told[*by].get().max(lost));
            if *by == BY_FLUSH {
                losses.told = losses.told.max(lost);
            }
        }
        match self.is_torn(losses) || tells.is_some() {
            true => Err(Errno::EIO),
            false => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: BlockOp = BlockOp::Write { fua: false };
    const FORCED: BlockOp = BlockOp::Write { fua: true };

    fn opener(losses: &Losses) -> Opener {
        Opener::new(DeviceKey(1), Some(losses))
    }

    fn ends(losses: &mut Losses, opener: &Opener, op: BlockOp) -> bool {
        Stake::of(opener, op, false).verdict(Ok(()), losses).is_ok()
    }

    #[test]
    fn only_what_no_flush_has_covered_is_lost() {
        let mut losses = Losses::default();
        assert_eq!(losses.lose(), 0);
        losses.acknowledge();
        let covers = losses.flush_begins();
        losses.acknowledge();
        losses.acknowledge();
        losses.flush_ends(covers);
        assert_eq!((losses.lose(), losses.count()), (2, 1));
        assert_eq!((losses.lose(), losses.count()), (0, 1), "once");
        losses.acknowledge();
        {
            let covers = losses.flush_begins();
            losses.flush_ends(covers)
        };
        losses.flush_ends(covers);
        assert_eq!((losses.lose(), losses.count()), (0, 1));
    }

    #[test]
    fn each_opener_is_told_once_by_a_flush() {
        let mut losses = Losses::default();
        let (one, two) = (opener(&losses), opener(&losses));
        let early = Stake::of(&one, BlockOp::Flush, false);
        losses.acknowledge();
        losses.lose();
        assert!(!ends(&mut losses, &one, FORCED) && ends(&mut losses, &one, FORCED));
        assert!(
            [BlockOp::Read, WRITE, BlockOp::Discard]
                .iter()
                .all(|op| ends(&mut losses, &one, *op))
        );
        assert!(
            !ends(&mut losses, &one, BlockOp::Flush),
            "the error of a write is no flush's"
        );
        assert!(ends(&mut losses, &one, BlockOp::Flush));
        assert!(
            early.verdict(Ok(()), &mut losses).is_err(),
            "it began before the loss was told"
        );
        assert!(!ends(&mut losses, &two, BlockOp::Flush) && ends(&mut losses, &two, BlockOp::Flush));
        let later = opener(&losses);
        assert!(ends(&mut losses, &later, BlockOp::Flush), "others know");
    }

    #[test]
    fn a_flush_in_the_place_of_fua_is_part_of_a_write() {
        let mut losses = Losses::default();
        let opener = opener(&losses);
        losses.acknowledge();
        losses.lose();
        let flush = || Stake::of(&opener, BlockOp::Flush, true);
        assert!(flush().verdict(Ok(()), &mut losses).is_err() && flush().verdict(Ok(()), &mut losses).is_ok());
        assert!(ends(&mut losses, &opener, FORCED), "it has been told of a write");
        assert!(!ends(&mut losses, &opener, BlockOp::Flush));
    }

    #[test]
    fn a_request_fails_that_has_lost_an_operation() {
        let mut parts = Parts::default();
        assert_eq!(parts.ended(Ok(()), 3), Ok(()));
        assert_eq!(parts.ended(Err(Errno::ENOSPC), 3), Err(Errno::ENOSPC));
        assert_eq!(parts.ended(Ok(()), 4), Err(Errno::EIO));
        assert_eq!(Parts::default().ended(Ok(()), 4), Ok(()));
    }

    #[test]
    fn who_comes_is_told_of_what_nobody_knows() {
        let mut losses = Losses::default();
        losses.acknowledge();
        losses.lose();
        let (one, two) = (opener(&losses), opener(&losses));
        assert!(!ends(&mut losses, &one, BlockOp::Flush) && !ends(&mut losses, &two, BlockOp::Flush));
        losses.acknowledge();
        losses.lose();
        let later = opener(&losses);
        assert!(!ends(&mut losses, &later, BlockOp::Flush));
        assert!(!ends(&mut losses, &one, BlockOp::Flush) && ends(&mut losses, &one, BlockOp::Flush));
    }

    #[test]
    fn an_error_of_the_server_tells_as_well_but_not_that_there_is_no_server() {
        let mut losses = Losses::default();
        let opener = opener(&losses);
        losses.acknowledge();
        losses.lose();
        for e in [Errno::ECONNABORTED, Errno::EIO] {
            let flush = Stake::of(&opener, BlockOp::Flush, false);
            assert!(flush.verdict(Ok(()), &mut Losses::default()).is_ok());
            assert_eq!(flush.verdict(Err(e), &mut losses), Err(e));
        }
        assert!(ends(&mut losses, &opener, BlockOp::Flush));
    }

    #[test]
    fn an_operation_fails_that_has_lost_a_part() {
        let mut losses = Losses::default();
        let opener = opener(&losses);
        let mut stake = Stake::of(&opener, WRITE, false);
        stake.acknowledged(&mut losses);
        assert_eq!(stake.verdict(Ok(()), &mut losses), Ok(()));
        losses.lose();
        stake.acknowledged(&mut losses);
        assert_eq!(stake.verdict(Ok(()), &mut losses), Err(Errno::EIO));
        stake.restart();
        stake.acknowledged(&mut losses);
        assert_eq!(stake.verdict(Ok(()), &mut losses), Ok(()));
        let mut later = Stake::of(&opener, WRITE, false);
        later.acknowledged(&mut losses);
        assert_eq!(later.verdict(Ok(()), &mut losses), Ok(()));
    }
}
