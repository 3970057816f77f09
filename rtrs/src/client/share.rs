//! Sessions in shares: what of a session belongs to which loop, and what its home knows of the others.
//!
//! A session is spread over the loops of a process. Each has a share: permits, everything in flight under them, and connections
//! of each path, with a provider of its own. A permit is only used with its share's connections, so a request stays in its loop.
//! Share 0 is *home*: it has the service connection, heartbeats, handshakes, and decides about paths and session.

use core::ops::Range;

/// One of the shares that the sessions of a client are made of. With one loop it is the whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Share {
    index: u16,
    count: u16,
}

impl Default for Share {
    fn default() -> Self {
        Self { index: 0, count: 1 }
    }
}

impl Share {
    /// Number `index` of `count`; `None` if there is none.
    pub(super) fn new(index: u16, count: u16) -> Option<Self> {
        (index < count).then_some(Self { index, count })
    }

    pub(super) fn index(self) -> u16 {
        self.index
    }

    /// How many shares there are.
    pub(super) fn count(self) -> u16 {
        self.count
    }

    pub(super) fn is_home(self) -> bool {
        self.index == 0
    }

    /// The other shares, for which home decides; elsewhere none.
    pub(super) fn others(self) -> Range<u16> {
        1..if self.is_home() { self.count } else { 1 }
    }

    /// Places of connections that are not for I/O: the first, at home.
    pub(super) fn service(self) -> u16 {
        u16::from(self.is_home())
    }

    /// How many of a path's `io` I/O connections are here: those whose number less one leaves the share's when divided by
    /// how many there are.
    pub(super) fn io_connections(self, io: u16) -> u16 {
        io.saturating_sub(self.index).div_ceil(self.count)
    }

    /// The number that the server knows a connection by.
    pub(super) fn cid(self, place: u16) -> u16 {
        match place.checked_sub(self.service()) {
            Some(nth) => 1 + self.index + nth * self.count,
            None => 0,
        }
    }

    /// Its part of a session's permits.
    pub(super) fn permits(self, depth: u32) -> Range<u32> {
        let bound = |share: u16| (u64::from(depth) * u64::from(share) / u64::from(self.count)) as u32;
        bound(self.index)..bound(self.index + 1)
    }

    /// A share's part of all of something that has one for each of a session's permits.
    pub(super) fn part_of<T>(self, share: u16, all: &[T]) -> &[T] {
        let of = Self { index: share, ..self };
        let range = of.permits(all.len() as u32);
        &all[range.start as usize..range.end as usize]
    }
}

/// State of a path at another share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Joined {
    /// It has nothing of it.
    No,
    /// It was asked to connect.
    Asked,
    /// Its connections stand, or have stood.
    Connected,
}

/// State of a path at the other shares, as home knows it; elsewhere it is empty.
#[derive(Debug)]
pub(super) struct Others(Vec<Joined>);

impl Others {
    pub(super) fn new(share: Share) -> Self {
        Self(share.others().map(|_| Joined::No).collect())
    }

    /// All are asked to connect.
    pub(super) fn ask(&mut self) {
        self.0.fill(Joined::Asked);
    }

    /// A share's connections stand.
    pub(super) fn connected(&mut self, share: u16) {
        self.set(share, Joined::Connected);
    }

    /// A share has nothing of the path any more.
    pub(super) fn gone(&mut self, share: u16) {
        self.set(share, Joined::No);
    }

    fn set(&mut self, share: u16, joined: Joined) {
        if let Some(of) = self.0.get_mut(usize::from(share).wrapping_sub(1)) {
            *of = joined;
        }
    }

    /// Whether a share has something of the path, or may have.
    pub(super) fn has(&self, share: u16) -> bool {
        let of = self.0.get(usize::from(share).wrapping_sub(1));
        of.is_some_and(|joined| *joined != Joined::No)
    }

    /// None has anything of the path.
    pub(super) fn all_gone(&self) -> bool {
        self.0.iter().all(|joined| *joined == Joined::No)
    }

    /// All connections of all of them stand.
    pub(super) fn all_connected(&self) -> bool {
        self.0.iter().all(|joined| *joined == Joined::Connected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_and_each_permit_is_of_one_share() {
        for count in 1..6 {
            let shares: Vec<Share> = (0..count).filter_map(|i| Share::new(i, count)).collect();
            for io in count..30 {
                let mut cids: Vec<u16> = shares
                    .iter()
                    .flat_map(|s| (0..s.service() + s.io_connections(io)).map(|place| s.cid(place)))
                    .collect();
                cids.sort_unstable();
                assert_eq!(cids, (0..=io).collect::<Vec<_>>());
                assert!(shares.iter().all(|s| s.io_connections(io) > 0));
            }
            for depth in [u32::from(count), 17, 512, 65535] {
                let ranges: Vec<_> = shares.iter().map(|s| s.permits(depth)).collect();
                let all: Vec<u32> = ranges.iter().cloned().flatten().collect();
                assert_eq!(all, (0..depth).collect::<Vec<_>>());
                let lens = || ranges.iter().map(|r| r.len());
                assert!(lens().max().unwrap() - lens().min().unwrap() <= 1);
            }
        }
    }

    #[test]
    fn a_connection_is_of_the_share_that_its_number_says() {
        for (index, cids) in [(0, [0, 1, 4]), (1, [2, 5, 8]), (2, [3, 6, 9])] {
            let share = Share::new(index, 3).unwrap();
            assert_eq!([0, 1, 2].map(|place| share.cid(place)), cids);
        }
        assert!(Share::new(3, 3).is_none());
        assert!(Share::new(0, 0).is_none());
    }

    #[test]
    fn a_path_is_gone_when_the_last_share_says_so() {
        let mut others = Others::new(Share::new(0, 3).unwrap());
        assert!(others.all_gone() && !others.all_connected());
        others.ask();
        others.connected(1);
        assert!(!others.all_connected() && others.has(2));
        others.connected(2);
        assert!(others.all_connected());
        others.gone(1);
        assert!(!others.has(1) && !others.all_gone());
        others.gone(2);
        assert!(others.all_gone());
        let whole = Others::new(Share::default());
        assert!(whole.all_gone() && whole.all_connected());
    }
}
