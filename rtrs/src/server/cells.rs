//! Owner of each chunk of a session, as all its shares see it.
//!
//! A chunk is worked on for one path by one share. A share whose request finds the chunk with another path keeps the request and
//! marks the cell; who works in the chunk sees the mark when it leaves, and tells all shares.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::admission::PathKey;

/// 0, or who works in the chunk: the path's number, the share's, and whether somebody waits.
#[derive(Debug)]
struct Cell(AtomicU64);

const WAITED_FOR: u64 = 1;
const FREE: u64 = 0;

fn holder(path: PathKey, share: usize) -> u64 {
    path.value() << 8 | (share as u64) << 1
}

/// All cells of a session.
#[derive(Debug)]
pub(crate) struct Cells(Vec<Cell>);

impl Cells {
    /// So many, all free.
    pub(crate) fn new(count: u32) -> Arc<Self> {
        Arc::new(Self((0..count).map(|_| Cell(AtomicU64::new(FREE))).collect()))
    }
}

/// Result of asking for a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// It is the share's, for this path.
    Mine,
    /// Another path's request is at work there. Who leaves will tell.
    Waits,
    /// Another request of this path is.
    Same,
}

/// The cells as a share has them.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    cells: Arc<Cells>,
    share: usize,
}

impl Hold {
    pub(crate) const fn new(cells: Arc<Cells>, share: usize) -> Self {
        Self { cells, share }
    }

    /// For another share.
    pub(crate) fn cells(&self) -> Arc<Cells> {
        self.cells.clone()
    }

    /// Asks for a chunk. One that does not exist is never free.
    pub(crate) fn take(&self, chunk: u16, path: PathKey) -> Taken {
        let Some(Cell(cell)) = self.cells.0.get(usize::from(chunk)) else {
            return Taken::Same;
        };
        let mine = holder(path, self.share);
        let mut seen = FREE;
        loop {
            let next = if seen == FREE { mine } else { seen | WAITED_FOR };
            match cell.compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(FREE) => return Taken::Mine,
                Ok(_) => return Taken::Waits,
                Err(now) if now >> 8 == path.value() => return Taken::Same,
                Err(now) => seen = now,
            }
        }
    }

    /// Waits for a chunk, whoever has it. True: it is the share's now.
    pub(crate) fn take_or_wait(&self, chunk: u16, path: PathKey) -> bool {
        let Some(Cell(cell)) = self.cells.0.get(usize::from(chunk)) else {
            return false;
        };
        let mine = holder(path, self.share);
        let waits = |now: u64| Some(if now == FREE { mine } else { now | WAITED_FOR });
        cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, waits) == Ok(FREE)
    }

    /// Leaves a chunk that this share has for a path; if it has not, nothing happens. True: somebody waits.
    pub(crate) fn leave(&self, chunk: u16, path: PathKey) -> bool {
        let Some(Cell(cell)) = self.cells.0.get(usize::from(chunk)) else {
            return false;
        };
        let mine = holder(path, self.share);
        let leave = |now: u64| (now & !WAITED_FOR == mine).then_some(FREE);
        let left = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, leave);
        left.is_ok_and(|was| was & WAITED_FOR != 0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use roce_verbs::Instant;

    use super::*;
    use crate::{
        admission::{AccessList, Admission, Admitted, ConnectRequest, Limits},
        proto::Uuid,
    };

    /// Paths: only an admission makes their keys.
    pub(crate) fn paths(count: u8) -> Vec<PathKey> {
        let mut admission = Admission::new(Limits::default(), AccessList::default());
        let path = |n| {
            let request = ConnectRequest {
                peer: [10, 0, 0, n].into(),
                local: [10, 0, 1, 1].into(),
                session: Uuid([n; 16]),
                path: Uuid([n; 16]),
                cid: 0,
                connections: 2,
                first_conn: true,
                recon_cnt: 1,
            };
            match admission.request(Instant::ZERO, &request) {
                Ok(Admitted::HalfOpen { path, .. }) => path,
                other => panic!("{other:?}"),
            }
        };
        (0..count).map(path).collect()
    }

    #[test]
    fn one_path_of_one_share_has_a_chunk_and_who_waits_is_told_of() {
        let [a, b] = paths(2)[..] else { unreachable!() };
        let cells = Cells::new(2);
        let [first, second] = [0, 1].map(|share| Hold::new(cells.clone(), share));
        assert_eq!(first.take(1, a), Taken::Mine);
        assert_eq!((first.take(1, a), second.take(1, a)), (Taken::Same, Taken::Same));
        assert!(!second.leave(1, a), "it is not the second share's to leave");
        assert!(!first.leave(1, b), "nor the other path's");
        assert_eq!(second.take(0, b), Taken::Mine, "other chunks are free");
        assert_eq!(second.take(1, b), Taken::Waits);
        assert!(first.leave(1, a), "somebody waits");
        assert!(!first.leave(1, a), "once");
        assert!(second.take_or_wait(1, b));
        assert!(!first.take_or_wait(1, a) && !first.take_or_wait(1, b));
        assert!(second.leave(1, b));
        assert_eq!(first.take(1, b), Taken::Mine);
        assert!(!first.leave(1, b), "the mark went with who was there");
        assert_eq!(first.take(2, a), Taken::Same, "there are two chunks");
    }

    /// Real threads: whoever has the chunk is alone in it, and nobody is left waiting.
    #[test]
    fn threads_take_turns() {
        use std::sync::atomic::AtomicUsize;
        let cells = Cells::new(1);
        let inside = AtomicUsize::new(0);
        let turns = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for (share, path) in paths(3).into_iter().enumerate() {
                let hold = Hold::new(cells.clone(), share);
                let (inside, turns) = (&inside, &turns);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        while !hold.take_or_wait(0, path) {
                            std::thread::yield_now();
                        }
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        turns.fetch_add(1, Ordering::SeqCst);
                        hold.leave(0, path);
                    }
                });
            }
        });
        assert_eq!(turns.into_inner(), 6000);
    }
}
