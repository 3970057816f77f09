//! Memory that is registered with io_uring, so that direct I/O does not look up and pin its pages every time.

use std::{
    collections::BTreeMap,
    io, ptr,
    sync::{Arc, Weak},
};

use io_uring::Submitter;
use roce_verbs::mem::Pages;
use rtrs::server::request::SessionKey;

/// Bytes of a piece: registering one takes some 50 µs, and chunks of usual sizes lie within one.
const PIECE: usize = 1 << 20;
/// Pieces at a time.
const SLOTS: u16 = 1024;

#[derive(Debug)]
struct Piece {
    slot: u16,
    /// Owner of the registration: other memory at the same address is not the same.
    memory: Weak<Pages>,
}

/// Pieces of sessions' memory, registered when they are first used. They stay pinned until the session is
/// [forgotten](Self::forget), which takes nothing from those who read and write them.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    pieces: BTreeMap<(SessionKey, usize), Piece>,
    free: Vec<u16>,
    table: Table,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Table {
    #[default]
    Unmade,
    Open,
    /// The system lets no more be pinned.
    Full,
    /// The system has none.
    Missing,
}

impl Registered {
    /// The slot that `len` bytes at `at` are registered in. `None`: they are not, and can be used all the same.
    pub(crate) fn slot(
        &mut self,
        ring: &Submitter<'_>,
        session: SessionKey,
        memory: &Arc<Pages>,
        at: usize,
        len: usize,
    ) -> Option<u16> {
        let number = at / PIECE;
        if len == 0 || (at + len - 1) / PIECE != number {
            return None;
        }
        if let Some(piece) = self.pieces.get(&(session, number)) {
            let same = ptr::eq(piece.memory.as_ptr(), Arc::as_ptr(memory));
            return same.then_some(piece.slot);
        }
        self.open(ring);
        if self.table != Table::Open {
            return None;
        }
        let slot = self.free.pop()?;
        let begin = number * PIECE;
        let piece = libc::iovec {
            iov_base: memory.as_ptr().wrapping_add(begin).cast(),
            iov_len: PIECE.min(memory.len() - begin),
        };
        // SAFETY: memory that is there; the kernel holds its pages for as long as it needs them.
        if let Err(e) = unsafe { ring.register_buffers_update(slot.into(), &[piece], None) } {
            self.free.push(slot);
            self.refused(&e);
            return None;
        }
        let memory = Arc::downgrade(memory);
        self.pieces.insert((session, number), Piece { slot, memory });
        Some(slot)
    }

    fn open(&mut self, ring: &Submitter<'_>) {
        if self.table != Table::Unmade {
            return;
        }
        match ring.register_buffers_sparse(SLOTS.into()) {
            Ok(()) => {
                self.table = Table::Open;
                self.free = (0..SLOTS).rev().collect();
            }
            Err(e) => {
                tracing::info!("memory is not registered with io_uring: {e}");
                self.table = Table::Missing;
            }
        }
    }

    fn refused(&mut self, e: &io::Error) {
        tracing::info!(
            registered = self.pieces.len(),
            "no more memory is registered with io_uring: {e} (a larger `ulimit -l` helps)"
        );
        self.table = Table::Full;
    }

    /// Gives up what is registered of a session's memory.
    pub(crate) fn forget(&mut self, ring: &Submitter<'_>, session: SessionKey) {
        let of_session = (session, 0)..=(session, usize::MAX);
        let numbers: Vec<_> = self.pieces.range(of_session).map(|(key, _)| *key).collect();
        for key in numbers {
            let Some(piece) = self.pieces.remove(&key) else {
                continue;
            };
            let nothing = libc::iovec {
                iov_base: ptr::null_mut(),
                iov_len: 0,
            };
            // SAFETY: no memory at all.
            match unsafe { ring.register_buffers_update(piece.slot.into(), &[nothing], None) } {
                Ok(()) => self.free.push(piece.slot),
                // The slot stays what it is, and is not used again.
                Err(e) => tracing::debug!("registered memory was not given up: {e}"),
            }
            if self.table == Table::Full {
                self.table = Table::Open;
            }
        }
    }
}
