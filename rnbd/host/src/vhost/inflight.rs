//! In-flight requests of each ring, in memory that the front end keeps for us: a back end that comes after this one, or this one after
//! the front end was gone, begins again with those that were not answered.
//!
//! The layout is that of the vhost-user specification ("Inflight I/O tracking", split rings), each ring's part on a boundary of 64 bytes.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use roce_verbs::mem::Pages;
use roce_verbs::provider::{Memory, RangeError};
use vhost::vhost_user::message::VhostUserInflight;

use super::{
    MAX_QUEUES, MAX_RING,
    mapped::{Mapped, sealed_file},
};

/// Bytes before the descriptors' states: features, version, number of descriptors, last batch's head, used index.
const HEAD: u64 = 16;
const VERSION_AT: u64 = 8;
const COUNT_AT: u64 = 10;
const LAST_AT: u64 = 12;
const USED_AT: u64 = 14;
/// Bytes of a descriptor's state: whether it is under way, 5 of no use, the next of a batch, and its number in the order of all.
const STATE: u64 = 16;
const COUNTER_AT: u64 = 8;
const VERSION: u16 = 1;

/// The memory.
#[derive(Debug)]
pub(crate) struct Inflight {
    pages: Arc<Pages>,
    mapped: Arc<Mapped>,
    queues: u16,
    size: u16,
}

fn bytes_of_ring(size: u16) -> u64 {
    (HEAD + STATE * u64::from(size)).next_multiple_of(64)
}

impl Inflight {
    /// Makes it, and the descriptor and the message for the front end that tell of it.
    ///
    /// # Errors
    /// When the front end wants more than there may be; those of the system.
    pub(crate) fn make(wanted: &VhostUserInflight) -> io::Result<(VhostUserInflight, OwnedFd)> {
        check(wanted)?;
        let len = bytes_of_ring(wanted.queue_size) * u64::from(wanted.num_queues);
        let file = sealed_file(len)?;
        let made = VhostUserInflight::new(len, 0, wanted.num_queues, wanted.queue_size);
        Ok((made, file))
    }

    /// Takes it as the front end has kept it.
    ///
    /// # Errors
    /// When it can't be that memory.
    pub(crate) fn take(what: &VhostUserInflight, file: &OwnedFd) -> io::Result<Self> {
        check(what)?;
        let len = bytes_of_ring(what.queue_size) * u64::from(what.num_queues);
        if what.mmap_size < len {
            return Err(invalid("the memory for what is under way is too small"));
        }
        let mapped = Mapped::new(file.as_fd(), what.mmap_offset, len)?;
        let memory: Arc<dyn Memory> = mapped.clone();
        let pages = Pages::of(&memory).map_err(io::Error::other)?;
        Ok(Self {
            pages,
            mapped,
            queues: what.num_queues,
            size: what.queue_size,
        })
    }

    /// The file behind it has become shorter.
    pub(crate) fn is_gone(&self) -> bool {
        self.mapped.is_gone()
    }

    /// The part of a ring with so many descriptors, if it has one.
    pub(crate) fn of_ring(&self, index: u16, size: u16) -> Option<RingInflight> {
        (index < self.queues && size <= self.size).then(|| RingInflight {
            pages: self.pages.clone(),
            at: bytes_of_ring(self.size) * u64::from(index),
            size,
            counter: 0,
        })
    }
}

fn check(what: &VhostUserInflight) -> io::Result<()> {
    let fit = (1..=MAX_QUEUES).contains(&what.num_queues) && (1..=MAX_RING).contains(&what.queue_size);
    fit.then_some(()).ok_or_else(|| invalid("so much can't be under way"))
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The part of a ring.
#[derive(Debug)]
pub(crate) struct RingInflight {
    pages: Arc<Pages>,
    at: u64,
    size: u16,
    /// Requests so far.
    counter: u64,
}

impl RingInflight {
    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut out = [0; N];
        told(self.pages.read((self.at + at) as usize, &mut out));
        out
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        told(self.pages.write((self.at + at) as usize, bytes));
    }

    fn state(head: u16) -> u64 {
        HEAD + STATE * u64::from(head)
    }

    /// The ring begins, with this index in its used ring. Returns the heads of the requests that are under way, in their order.
    pub(crate) fn begin(&mut self, used: u16) -> Vec<u16> {
        if u16::from_ne_bytes(self.get(VERSION_AT)) == 0 {
            self.put(VERSION_AT, &VERSION.to_ne_bytes());
            self.put(COUNT_AT, &self.size.to_ne_bytes());
        }
        // The last answer was given, but not noted.
        let last = u16::from_ne_bytes(self.get(LAST_AT));
        if u16::from_ne_bytes(self.get(USED_AT)) != used {
            if last < self.size {
                self.put(Self::state(last), &[0]);
            }
            self.put(USED_AT, &used.to_ne_bytes());
        }
        let under_way = (0..self.size).filter(|head| self.get::<1>(Self::state(*head)) == [1]);
        let counter = |head: u16| u64::from_ne_bytes(self.get(Self::state(head) + COUNTER_AT));
        let mut heads: Vec<(u64, u16)> = under_way.map(|head| (counter(head), head)).collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        heads.into_iter().map(|(_, head)| head).collect()
    }

    /// A request has been taken.
    pub(crate) fn taken(&mut self, head: u16) {
        self.put(Self::state(head) + COUNTER_AT, &self.counter.to_ne_bytes());
        self.counter = self.counter.wrapping_add(1);
        self.put(Self::state(head), &[1]);
    }

    /// A request is about to be answered.
    pub(crate) fn answering(&self, head: u16) {
        self.put(LAST_AT, &head.to_ne_bytes());
    }

    /// It is answered, and this is the index in the used ring now.
    pub(crate) fn answered(&self, head: u16, used: u16) {
        self.put(Self::state(head), &[0]);
        self.put(USED_AT, &used.to_ne_bytes());
    }
}

fn told(done: Result<(), RangeError>) {
    if let Err(e) = done {
        tracing::error!("what is under way: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> (VhostUserInflight, OwnedFd) {
        Inflight::make(&VhostUserInflight::new(0, 0, 2, 8)).unwrap()
    }

    #[test]
    fn what_was_not_answered_is_found_again_in_its_order() {
        let (what, file) = region();
        let first = Inflight::take(&what, &file).unwrap();
        let mut ring = first.of_ring(1, 8).unwrap();
        assert_eq!(ring.begin(0), [0u16; 0]);
        for head in [5, 2, 7, 0] {
            ring.taken(head);
        }
        ring.answering(2);
        ring.answered(2, 1);
        // The next was in the used ring already when we died.
        ring.answering(5);
        drop(ring);
        let again = Inflight::take(&what, &file).unwrap();
        let mut ring = again.of_ring(1, 8).unwrap();
        assert_eq!(ring.begin(2), [7, 0]);
        ring.taken(3);
        assert_eq!(again.of_ring(1, 8).unwrap().begin(2), [7, 0, 3]);
        assert_eq!(again.of_ring(0, 8).unwrap().begin(0), [0u16; 0], "the other ring's");
        assert!(again.of_ring(2, 8).is_none() && again.of_ring(0, 16).is_none());
    }

    #[test]
    fn what_a_front_end_asks_for_is_bounded() {
        for (queues, size) in [
            (0, 8),
            (MAX_QUEUES + 1, 8),
            (1, 0),
            (1, MAX_RING + 1),
            (u16::MAX, u16::MAX),
        ] {
            assert!(Inflight::make(&VhostUserInflight::new(0, 0, queues, size)).is_err());
        }
        let (what, file) = region();
        for (len, offset, queues) in [
            (what.mmap_size - 1, 0, 2),
            (what.mmap_size, 4096, 2),
            (what.mmap_size * 2, 0, 4),
        ] {
            let other = VhostUserInflight::new(len, offset, queues, 8);
            assert!(Inflight::take(&other, &file).is_err(), "{len} {offset} {queues}");
        }
    }

    #[test]
    fn garbage_in_it_names_no_request_that_the_ring_does_not_have() {
        let (what, file) = region();
        let inflight = Inflight::take(&what, &file).unwrap();
        inflight.pages.write(0, &vec![1; inflight.pages.len()]).unwrap();
        let heads = inflight.of_ring(0, 8).unwrap().begin(9);
        assert!(heads.len() <= 8 && heads.iter().all(|head| *head < 8));
    }
}
