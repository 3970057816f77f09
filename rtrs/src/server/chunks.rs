//! The chunks of a session. They belong to all of its paths: a client whose path is lost sends the request once more by
//! another, in the same chunk, while the server's user may still be at work on the first.
//!
//! So a request for a chunk that another path's request has waits until that one is over, at most one for each path and chunk.
//! A client that has not been answered can't reuse the chunk, so nothing that it writes later gets into the earlier request.

use roce_verbs::provider::RangeError;

use crate::{
    PathError,
    admission::PathKey,
    proto,
    server::{keepalive::AtWork, request::RequestKey},
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
    /// Its message, once it has been read.
    pub(crate) message: Option<proto::Request>,
}

impl Pending {
    /// A request whose message has not been read.
    pub(crate) const fn new(path: PathKey, cid: u16, offset: u32) -> Self {
        Self {
            path,
            cid,
            offset,
            message: None,
        }
    }
}

/// State of a chunk, which is the session's: a request may come by another path than the one before.
#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// The client's.
    #[default]
    Idle,
    /// The client's key is being taken back, for this request.
    Revoking(Pending),
    /// The server's user executes it.
    User(Pending),
    /// The answer has not left.
    Answering(Pending),
}

#[derive(Debug, Default)]
struct Chunk {
    state: State,
    /// Tells requests apart that came in it.
    serial: u32,
    /// Requests of other paths, oldest first.
    parked: Vec<Pending>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Chunks(Vec<Chunk>);

const NO_CHUNK: PathError = PathError::Unexpected("a chunk that can't be");
const IN_USE: PathError = PathError::Unexpected("a request in a chunk that is in use");

impl Chunk {
    /// The request that has it.
    fn owner(&self) -> Option<Pending> {
        match self.state {
            State::Idle => None,
            State::Revoking(owner) | State::User(owner) | State::Answering(owner) => Some(owner),
        }
    }

    /// Whether a request waits that may have it.
    fn is_wanted(&self) -> bool {
        self.owner().is_none() && !self.parked.is_empty()
    }

    /// Paths with a request that is executed, or waits.
    fn at_work(&self) -> impl Iterator<Item = PathKey> {
        let owner = match self.state {
            State::Revoking(owner) | State::User(owner) => Some(owner),
            State::Idle | State::Answering(_) => None,
        };
        owner.into_iter().chain(self.parked.iter().copied()).map(|of| of.path)
    }
}

impl Chunks {
    /// So many, all the client's.
    pub(crate) fn new(count: u32) -> Self {
        Self((0..count).map(|_| Chunk::default()).collect())
    }

    fn get(&self, chunk: u16) -> Option<&Chunk> {
        self.0.get(usize::from(chunk))
    }

    fn get_mut(&mut self, chunk: u16) -> Result<&mut Chunk, PathError> {
        self.0.get_mut(usize::from(chunk)).ok_or(NO_CHUNK)
    }

    /// Whether a request may have its chunk now. Otherwise it waits until the request of another path is answered.
    ///
    /// # Errors
    /// When a request of the same path has the chunk, or waits for it.
    pub(crate) fn claim(&mut self, chunk: u16, request: Pending) -> Result<bool, PathError> {
        let chunk = self.get_mut(chunk)?;
        let owner = chunk.owner();
        let mut all = chunk.parked.iter().chain(&owner);
        if all.any(|of| of.path == request.path) {
            return Err(IN_USE);
        }
        let free = owner.is_none() && chunk.parked.is_empty();
        if !free {
            chunk.parked.push(request);
        }
        Ok(free)
    }

    /// Takes out the request that has waited longest for an idle chunk.
    pub(crate) fn unpark(&mut self, chunk: u16) -> Option<Pending> {
        let chunk = self.get_mut(chunk).ok()?;
        chunk.is_wanted().then(|| chunk.parked.remove(0))
    }

    /// Idle chunks that requests wait for.
    pub(crate) fn wanted(&self) -> Vec<u16> {
        let chunks = (0..).zip(&self.0);
        chunks.filter(|(_, chunk)| chunk.is_wanted()).map(|(i, _)| i).collect()
    }

    /// Whether a request of the path is executed in the chunk, or waits for it. One that is answered is not.
    pub(crate) fn at_work(&self, (chunk, path): AtWork) -> bool {
        let mut here = self.get(chunk).into_iter().flat_map(Chunk::at_work);
        here.any(|of| of == path)
    }

    /// All requests that are executed, or wait.
    pub(crate) fn all_at_work(&self) -> impl Iterator<Item = AtWork> {
        let chunks = (0..).zip(&self.0);
        chunks.flat_map(|(index, chunk)| chunk.at_work().map(move |path| (index, path)))
    }

    /// Forgets the requests of a path that wait.
    pub(crate) fn drop_parked(&mut self, path: PathKey) {
        for chunk in &mut self.0 {
            chunk.parked.retain(|of| of.path != path);
        }
    }

    /// A request gets its chunk, whose key is being taken back.
    ///
    /// # Errors
    /// When the chunk is not idle.
    pub(crate) fn revoking(&mut self, chunk: u16, request: Pending) -> Result<(), PathError> {
        let chunk = self.get_mut(chunk)?;
        if chunk.owner().is_some() {
            return Err(IN_USE);
        }
        chunk.state = State::Revoking(request);
        Ok(())
    }

    /// The request whose chunk's key has been taken back over this connection.
    pub(crate) fn revoked(&self, chunk: u16, path: PathKey, cid: u16) -> Option<Pending> {
        match self.get(chunk)?.state {
            State::Revoking(owner) => Some(owner).filter(|owner| (owner.path, owner.cid) == (path, cid)),
            _ => None,
        }
    }

    /// A request goes to the user: its key has been taken back, or stays. Returns its number among those of the chunk.
    ///
    /// # Errors
    /// When another request has the chunk.
    pub(crate) fn begin(&mut self, chunk: u16, request: Pending) -> Result<u32, PathError> {
        let chunk = self.get_mut(chunk)?;
        if matches!(chunk.state, State::User(_) | State::Answering(_)) {
            return Err(IN_USE);
        }
        chunk.state = State::User(request);
        chunk.serial = chunk.serial.wrapping_add(1);
        Ok(chunk.serial)
    }

    /// A request that the user has; `None` if it has been answered, or never was.
    pub(crate) fn request(&self, key: RequestKey) -> Option<Pending> {
        let chunk = self.get(key.chunk).filter(|chunk| chunk.serial == key.serial)?;
        match chunk.state {
            State::User(owner) => Some(owner),
            _ => None,
        }
    }

    /// Checks a range of a request's data.
    ///
    /// # Errors
    /// When the range is outside, or the user has no such request.
    pub(crate) fn check(&self, key: RequestKey, offset: usize, len: usize) -> Result<(), RangeError> {
        let request = self.request(key);
        let message = request.and_then(|request| request.message);
        let size = message.map_or(0, |message| message.data_len as usize);
        if request.is_none() || offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(RangeError { offset, len, size });
        }
        Ok(())
    }

    /// The user has answered a request that it [had](Self::request). The chunk waits for the answer to leave, or for the path to be
    /// drained; if it is, the chunk is idle.
    pub(crate) fn answered(&mut self, chunk: u16, request: Pending, drained: bool) {
        if let Ok(chunk) = self.get_mut(chunk) {
            chunk.state = match drained {
                true => State::Idle,
                false => State::Answering(request),
            };
        }
    }

    /// The answer has left.
    pub(crate) fn sent(&mut self, chunk: u16) {
        let Ok(chunk) = self.get_mut(chunk) else { return };
        let is_answering = matches!(chunk.state, State::Answering(_));
        debug_assert!(is_answering, "{chunk:?}");
        if is_answering {
            chunk.state = State::Idle;
        }
    }

    /// A path is drained: its chunks are the client's again, except those that the user still has.
    pub(crate) fn path_gone(&mut self, path: PathKey) {
        for chunk in &mut self.0 {
            if matches!(chunk.state, State::Revoking(owner) | State::Answering(owner) if owner.path == path) {
                chunk.state = State::Idle;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Direction, server::request::SessionKey};

    fn paths<const N: usize>() -> [PathKey; N] {
        core::array::from_fn(|n| PathKey::of(n as u64 + 1))
    }

    fn asked(path: PathKey) -> Pending {
        let message = proto::Request {
            direction: Direction::Write,
            usr_len: 4,
            data_len: 60,
            dest: None,
            need_inval: false,
        };
        Pending {
            message: Some(message),
            ..Pending::new(path, 1, 64)
        }
    }

    fn begin(chunks: &mut Chunks, chunk: u16, asked: Pending) -> RequestKey {
        let serial = chunks.begin(chunk, asked).unwrap();
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
        assert!(chunks.claim(2, a).unwrap());
        let first = begin(&mut chunks, 2, a);
        for other in [b, c] {
            assert!(!chunks.claim(2, other).unwrap());
            assert!(chunks.claim(2, other).is_err(), "one for each path and chunk");
        }
        assert!(chunks.claim(3, b).unwrap(), "other chunks are free");
        assert_eq!(chunks.unpark(2), None, "not while the user works on it");
        chunks.answered(first.chunk, a, false);
        assert_eq!(chunks.unpark(2), None, "not before the answer has left");
        chunks.sent(2);
        assert_eq!(chunks.wanted(), [2]);
        assert!(!chunks.claim(2, a).unwrap(), "nobody overtakes");
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
        let in_use = |chunks: &mut Chunks| chunks.claim(0, a).is_err();
        chunks.revoking(0, a).unwrap();
        assert!(in_use(&mut chunks));
        assert!(chunks.revoking(0, a).is_err());
        assert_eq!(chunks.revoked(0, a.path, 2), None, "another connection");
        assert_eq!(chunks.revoked(0, a.path, 1), Some(a));
        chunks.begin(0, a).unwrap();
        assert!(in_use(&mut chunks) && chunks.begin(0, a).is_err());
        assert!(chunks.revoking(0, a).is_err(), "not while the user has it");
        assert_eq!(chunks.revoked(0, a.path, 1), None);
        chunks.answered(0, a, false);
        assert!(in_use(&mut chunks) && chunks.begin(0, a).is_err());
        assert!(chunks.revoking(0, a).is_err(), "not before the answer has left");
        chunks.sent(0);
        assert!(!in_use(&mut chunks));
        assert!(chunks.claim(1, a).is_err(), "there is one chunk");
    }

    /// The user of the server may still read or write the chunk of a path that is long gone.
    #[test]
    fn a_lost_paths_request_keeps_its_chunk_until_the_user_is_done() {
        let (mut chunks, paths) = (Chunks::new(4), paths::<2>());
        let (a, b) = (asked(paths[0]), asked(paths[1]));
        let with_user = begin(&mut chunks, 0, a);
        chunks.revoking(1, a).unwrap();
        begin(&mut chunks, 2, a);
        chunks.answered(2, a, false);
        for chunk in 0..3 {
            assert!(!chunks.claim(chunk, b).unwrap());
        }
        chunks.path_gone(a.path);
        assert_eq!(chunks.wanted(), [1, 2]);
        assert_eq!(chunks.request(with_user), Some(a));
        chunks.answered(0, a, true);
        assert_eq!(chunks.wanted(), [0, 1, 2]);
        assert_eq!(chunks.request(with_user), None);
    }

    #[test]
    fn requests_that_wait_go_with_their_path() {
        let (mut chunks, paths) = (Chunks::new(1), paths::<3>());
        begin(&mut chunks, 0, asked(paths[0]));
        for path in &paths[1..] {
            assert!(!chunks.claim(0, asked(*path)).unwrap());
        }
        chunks.drop_parked(paths[1]);
        chunks.answered(0, asked(paths[0]), false);
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
        chunks.answered(1, asked(paths[0]), false);
        for key in [key, other, nowhere] {
            assert!(chunks.check(key, 0, 0).is_err(), "{key:?}");
        }
    }
}
