//! The chunks of a session. They belong to all of its paths: a client whose path is lost sends the request once more by
//! another, in the same chunk, while the server's user may still be at work on the first.
//!
//! So a request for a chunk that another path's request has waits until that one is over, at most one for each path and chunk.
//! A client that has not been answered can't reuse the chunk, so nothing that it writes later gets into the earlier request.

use roce_verbs::provider::RangeError;

use crate::{
    PathError,
    admission::PathKey,
    proto::SgDesc,
    server::{
        awaited::AtWork,
        request::RequestKey,
        state::{CHUNK, ChunkEvent, ChunkState},
    },
    table::step,
};

/// A request until it is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pending {
    /// The path that it came by.
    pub(crate) path: PathKey,
    /// And the connection, which its answer takes.
    pub(crate) cid: u16,
    /// Offset of its message in the chunk.
    pub(crate) offset: u32,
    /// Bytes of data at the start of the chunk; 0 until the message has been read.
    pub(crate) data_len: u32,
    /// Destination of the data of a read.
    pub(crate) dest: Option<SgDesc>,
    /// The destination's key is to end.
    pub(crate) need_inval: bool,
}

impl Pending {
    /// A request whose message has not been read.
    pub(crate) const fn new(path: PathKey, cid: u16, offset: u32) -> Self {
        Self {
            path,
            cid,
            offset,
            data_len: 0,
            dest: None,
            need_inval: false,
        }
    }
}

/// Whether a request may have its chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Room {
    /// It may.
    Free,
    /// Not before the other path's request is over.
    Busy,
}

#[derive(Debug)]
struct Chunk {
    state: ChunkState,
    /// Tells requests apart that came in it.
    serial: u32,
    /// The request that has it; of no account when it is idle.
    owner: Option<Pending>,
    /// Requests of other paths, oldest first.
    parked: Vec<Pending>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Chunks {
    chunks: Vec<Chunk>,
}

const NO_CHUNK: PathError = PathError::Unexpected("a chunk that can't be");
const IN_USE: PathError = PathError::Unexpected("a request in a chunk that is in use");

impl Chunk {
    fn is_idle(&self) -> bool {
        self.state == ChunkState::Idle
    }

    /// The request that has it.
    fn owner(&self) -> Option<Pending> {
        self.owner.filter(|_| !self.is_idle())
    }

    /// Paths with a request at work, or that wait.
    fn at_work(&self) -> impl Iterator<Item = PathKey> {
        let busy = matches!(self.state, ChunkState::Revoking | ChunkState::User);
        let owner = self.owner().filter(|_| busy);
        owner
            .into_iter()
            .chain(self.parked.iter().copied())
            .map(|asked| asked.path)
    }

    /// Whether the event was legal.
    fn step(&mut self, event: ChunkEvent) -> bool {
        let Some((next, _)) = step(CHUNK, self.state, event) else {
            return false;
        };
        self.state = next;
        true
    }
}

impl Chunks {
    /// So many, all the client's.
    pub(crate) fn new(count: u32) -> Self {
        let chunk = |_| Chunk {
            state: ChunkState::Idle,
            serial: 0,
            owner: None,
            parked: Vec::new(),
        };
        Self {
            chunks: (0..count).map(chunk).collect(),
        }
    }

    fn get(&self, chunk: u16) -> Option<&Chunk> {
        self.chunks.get(usize::from(chunk))
    }

    fn get_mut(&mut self, chunk: u16) -> Option<&mut Chunk> {
        self.chunks.get_mut(usize::from(chunk))
    }

    /// Whether a request of this path may have the chunk.
    ///
    /// # Errors
    /// When a request of the same path has it, or waits for it.
    pub(crate) fn room(&self, index: u16, path: PathKey) -> Result<Room, PathError> {
        let chunk = self.get(index).ok_or(NO_CHUNK)?;
        let parked = chunk.parked.iter().any(|asked| asked.path == path);
        match chunk.owner() {
            Some(owner) if owner.path == path => Err(IN_USE),
            _ if parked => Err(IN_USE),
            None if chunk.parked.is_empty() => Ok(Room::Free),
            _ => Ok(Room::Busy),
        }
    }

    /// Has a request wait for its chunk.
    pub(crate) fn park(&mut self, chunk: u16, asked: Pending) {
        if let Some(chunk) = self.get_mut(chunk) {
            chunk.parked.push(asked);
        }
    }

    /// Takes out the request that has waited longest for an idle chunk.
    pub(crate) fn unpark(&mut self, index: u16) -> Option<Pending> {
        let chunk = self.get_mut(index)?;
        (chunk.is_idle() && !chunk.parked.is_empty()).then(|| chunk.parked.remove(0))
    }

    /// Idle chunks that requests wait for.
    pub(crate) fn wanted(&self) -> Vec<u16> {
        let wanted = |(_, chunk): &(usize, &Chunk)| chunk.is_idle() && !chunk.parked.is_empty();
        self.chunks
            .iter()
            .enumerate()
            .filter(wanted)
            .map(|(i, _)| i as u16)
            .collect()
    }

    /// Whether a request of the path is at work in the chunk, or waits for it. One that is answered is not.
    pub(crate) fn at_work(&self, (chunk, path): AtWork) -> bool {
        let mut here = self.get(chunk).into_iter().flat_map(Chunk::at_work);
        here.any(|of| of == path)
    }

    /// All requests that are at work, or wait.
    pub(crate) fn all_at_work(&self) -> impl Iterator<Item = AtWork> {
        let chunks = (0..).zip(&self.chunks);
        chunks.flat_map(|(index, chunk)| chunk.at_work().map(move |path| (index, path)))
    }

    /// Forgets the requests of a path that wait.
    pub(crate) fn drop_parked(&mut self, path: PathKey) {
        for chunk in &mut self.chunks {
            chunk.parked.retain(|asked| asked.path != path);
        }
    }

    /// A request gets its chunk, whose key is being taken back.
    ///
    /// # Errors
    /// When the chunk is not idle.
    pub(crate) fn revoking(&mut self, chunk: u16, asked: Pending) -> Result<(), PathError> {
        let chunk = self.get_mut(chunk).ok_or(NO_CHUNK)?;
        if !chunk.step(ChunkEvent::Asked) {
            return Err(IN_USE);
        }
        chunk.owner = Some(asked);
        Ok(())
    }

    /// The request whose chunk's key has been taken back over this connection.
    pub(crate) fn revoked(&self, chunk: u16, path: PathKey, cid: u16) -> Option<Pending> {
        let chunk = self.get(chunk).filter(|c| c.state == ChunkState::Revoking)?;
        chunk.owner().filter(|owner| (owner.path, owner.cid) == (path, cid))
    }

    /// A request goes to the user: with [`ChunkEvent::AskedOpen`], or [`ChunkEvent::Revoked`] if it had to wait for its key.
    /// Returns its number among those of the chunk.
    ///
    /// # Errors
    /// When the chunk is in another's hands.
    pub(crate) fn begin(&mut self, chunk: u16, event: ChunkEvent, asked: Pending) -> Result<u32, PathError> {
        let chunk = self.get_mut(chunk).ok_or(NO_CHUNK)?;
        if !chunk.step(event) {
            return Err(IN_USE);
        }
        chunk.owner = Some(asked);
        chunk.serial = chunk.serial.wrapping_add(1);
        Ok(chunk.serial)
    }

    /// A request that the user has; `None` if it has been answered, or never was.
    pub(crate) fn request(&self, key: RequestKey) -> Option<Pending> {
        let chunk = self.get(key.chunk)?;
        let with_user = chunk.state == ChunkState::User && chunk.serial == key.serial;
        chunk.owner().filter(|_| with_user)
    }

    /// Checks a range of a request's data.
    ///
    /// # Errors
    /// When the range is outside, or the user has no such request.
    pub(crate) fn check(&self, key: RequestKey, offset: usize, len: usize) -> Result<(), RangeError> {
        let request = self.request(key);
        let size = request.map_or(0, |request| request.data_len as usize);
        if request.is_none() || offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(RangeError { offset, len, size });
        }
        Ok(())
    }

    /// The user has answered; the chunk waits for the answer to leave, or for the path to be drained.
    pub(crate) fn answered(&mut self, chunk: u16) {
        self.step(chunk, ChunkEvent::Answered);
    }

    /// The user has answered a request of a path that is drained.
    pub(crate) fn answered_in_vain(&mut self, chunk: u16) {
        self.step(chunk, ChunkEvent::AnsweredInVain);
    }

    /// The answer has left.
    pub(crate) fn sent(&mut self, chunk: u16) {
        self.step(chunk, ChunkEvent::Sent);
    }

    fn step(&mut self, chunk: u16, event: ChunkEvent) {
        let legal = self.get_mut(chunk).is_some_and(|chunk| chunk.step(event));
        debug_assert!(legal, "{event:?} of chunk {chunk}");
    }

    /// A path is drained: what it had is the client's again, but for what the user still works on.
    pub(crate) fn path_gone(&mut self, path: PathKey) {
        for chunk in &mut self.chunks {
            if chunk.owner().is_some_and(|owner| owner.path == path) {
                // Refused while the user works on it.
                chunk.step(ChunkEvent::PathGone);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::request::SessionKey;

    fn paths<const N: usize>() -> [PathKey; N] {
        core::array::from_fn(|n| PathKey::of(n as u64 + 1))
    }

    fn asked(path: PathKey) -> Pending {
        Pending {
            data_len: 60,
            ..Pending::new(path, 1, 64)
        }
    }

    fn begin(chunks: &mut Chunks, chunk: u16, asked: Pending) -> RequestKey {
        let serial = chunks.begin(chunk, ChunkEvent::AskedOpen, asked).unwrap();
        RequestKey {
            session: SessionKey(1),
            chunk,
            serial,
        }
    }

    #[test]
    fn a_chunk_that_another_path_has_is_waited_for() {
        let (mut chunks, paths) = (Chunks::new(4), paths::<3>());
        let (a, b, c) = (asked(paths[0]), asked(paths[1]), asked(paths[2]));
        assert!(matches!(chunks.room(2, a.path), Ok(Room::Free)));
        let first = begin(&mut chunks, 2, a);
        for other in [b, c] {
            assert!(matches!(chunks.room(2, other.path), Ok(Room::Busy)));
            chunks.park(2, other);
            assert!(chunks.room(2, other.path).is_err(), "one for each path and chunk");
        }
        assert!(
            matches!(chunks.room(3, b.path), Ok(Room::Free)),
            "other chunks are free"
        );
        assert_eq!(chunks.unpark(2), None, "not while the user works on it");
        chunks.answered(first.chunk);
        assert_eq!(chunks.unpark(2), None, "not before the answer has left");
        chunks.sent(2);
        assert_eq!(chunks.wanted(), [2]);
        assert!(matches!(chunks.room(2, a.path), Ok(Room::Busy)), "nobody overtakes");
        assert_eq!(chunks.unpark(2), Some(b), "the oldest first");
        let second = begin(&mut chunks, 2, b);
        assert_eq!(chunks.unpark(2), None);
        assert_ne!(first, second);
        assert_eq!((chunks.request(first), chunks.request(second)), (None, Some(b)));
    }

    #[test]
    fn a_path_has_one_request_in_a_chunk() {
        let (mut chunks, paths) = (Chunks::new(1), paths::<1>());
        let a = asked(paths[0]);
        let in_use = |chunks: &Chunks| matches!(chunks.room(0, a.path), Err(PathError::Unexpected(_)));
        chunks.revoking(0, a).unwrap();
        assert!(in_use(&chunks));
        assert!(chunks.revoking(0, a).is_err());
        assert_eq!(chunks.revoked(0, a.path, 2), None, "another connection");
        assert_eq!(chunks.revoked(0, a.path, 1), Some(a));
        chunks.begin(0, ChunkEvent::Revoked, a).unwrap();
        assert!(in_use(&chunks));
        assert_eq!(chunks.revoked(0, a.path, 1), None);
        chunks.answered(0);
        assert!(in_use(&chunks));
        chunks.sent(0);
        assert!(!in_use(&chunks));
        assert!(chunks.room(1, a.path).is_err(), "there is one chunk");
    }

    /// The user of the server may still read or write the chunk of a path that is long gone.
    #[test]
    fn a_lost_paths_request_keeps_its_chunk_until_the_user_is_done() {
        let (mut chunks, paths) = (Chunks::new(4), paths::<2>());
        let (a, b) = (asked(paths[0]), asked(paths[1]));
        let with_user = begin(&mut chunks, 0, a);
        chunks.revoking(1, a).unwrap();
        begin(&mut chunks, 2, a);
        chunks.answered(2);
        for chunk in 0..3 {
            assert!(matches!(chunks.room(chunk, b.path), Ok(Room::Busy)));
            chunks.park(chunk, b);
        }
        chunks.path_gone(a.path);
        assert_eq!(chunks.wanted(), [1, 2]);
        assert_eq!(chunks.request(with_user), Some(a));
        chunks.answered_in_vain(0);
        assert_eq!(chunks.wanted(), [0, 1, 2]);
        assert_eq!(chunks.request(with_user), None);
    }

    #[test]
    fn requests_that_wait_go_with_their_path() {
        let (mut chunks, paths) = (Chunks::new(1), paths::<3>());
        begin(&mut chunks, 0, asked(paths[0]));
        chunks.park(0, asked(paths[1]));
        chunks.park(0, asked(paths[2]));
        chunks.drop_parked(paths[1]);
        chunks.answered(0);
        chunks.sent(0);
        assert_eq!(chunks.unpark(0), Some(asked(paths[2])));
        assert_eq!(chunks.unpark(0), None);
    }

    #[test]
    fn a_request_is_written_to_within_its_data_and_while_it_is_the_users() {
        let (mut chunks, paths) = (Chunks::new(2), paths::<1>());
        let key = begin(&mut chunks, 1, asked(paths[0]));
        for (offset, len, fits) in [
            (0, 60, true),
            (60, 0, true),
            (1, 60, false),
            (61, 0, false),
            (usize::MAX, 2, false),
        ] {
            assert_eq!(chunks.check(key, offset, len).is_ok(), fits, "{len} at {offset}");
        }
        let other = RequestKey {
            serial: key.serial + 1,
            ..key
        };
        let nowhere = RequestKey { chunk: 9, ..key };
        chunks.answered(1);
        for key in [key, other, nowhere] {
            assert!(chunks.check(key, 0, 0).is_err(), "{key:?}");
        }
    }
}
