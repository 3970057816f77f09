//! The door of a mapping: NBD clients come to its sockets, and are spread over the loops.

use std::{io, os::fd::AsFd};

use core::time::Duration;
use mio::{Interest, Token};
use roce_reactor::Sockets;
use roce_verbs::Instant;
use socket2::Socket;

use crate::listen::{Listen, Listener, NbdAddress};

/// How long accepting rests when the system has no descriptor.
const REST: Duration = Duration::from_millis(100);

/// Somebody who has come.
#[derive(Debug)]
pub(crate) enum Comer {
    /// A client, and the loop that it is for, which counts it from now on.
    For(usize, Socket),
    /// One who is not served.
    TurnedAway(io::Error),
}

/// A listening socket.
#[derive(Debug)]
struct Way {
    listener: Listener,
    /// It has somebody, as far as is known.
    accepts: bool,
}

/// The listening sockets, and how many clients each loop has.
#[derive(Debug)]
pub(crate) struct Entrance {
    ways: Vec<Way>,
    /// The one that is asked first.
    first: usize,
    rests_until: Option<Instant>,
    /// Clients of each loop, those included that are on their way to it or of which it has not said yet that they are gone.
    loads: Vec<usize>,
    /// Clients at most, of all loops.
    most: usize,
}

impl Entrance {
    /// For so many loops, closed.
    pub(crate) fn new(loops: usize, most: usize) -> Self {
        Self {
            ways: Vec::new(),
            first: 0,
            rests_until: None,
            loads: vec![0; loops],
            most,
        }
    }

    /// Listens at all of these; where clients find them. If one fails, those before it stay until [`close`](Self::close).
    ///
    /// # Errors
    /// Those of [`Listener::open`], and of the loop's descriptors.
    pub(crate) fn open(&mut self, all: &[Listen], sockets: &Sockets<'_>, token: Token) -> io::Result<Vec<NbdAddress>> {
        for way in all {
            let listener = Listener::open(way)?;
            sockets.register(listener.as_fd(), token, Interest::READABLE)?;
            self.ways.push(Way {
                listener,
                accepts: true,
            });
        }
        Ok(self.ways.iter().map(|way| way.listener.address().clone()).collect())
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&mut self, sockets: &Sockets<'_>) {
        for way in self.ways.drain(..) {
            let _ = sockets.deregister(way.listener.as_fd());
        }
    }

    /// A listener is readable.
    pub(crate) fn ready(&mut self) {
        self.ways.iter_mut().for_each(|way| way.accepts = true);
    }

    /// The next who has come. Those who come to one socket don't keep out those of another.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Comer> {
        while self.rests_until.is_none() {
            let count = self.ways.len();
            let mut order = (0..count).map(|i| (self.first + i) % count);
            let index = order.find(|index| self.ways[*index].accepts)?;
            let way = &mut self.ways[index];
            match way.listener.accept() {
                Ok(stream) => {
                    self.first = (index + 1) % count;
                    return Some(self.receive(stream));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => way.accepts = false,
                // Of one that is gone already, and a signal's.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) => {
                    // Out of descriptors, most likely: it does not help to ask again at once.
                    self.rests_until = Some(now + REST);
                    return Some(Comer::TurnedAway(e));
                }
            }
        }
        None
    }

    /// The loop with the fewest clients takes one more.
    fn receive(&mut self, stream: Socket) -> Comer {
        if self.loads.iter().sum::<usize>() >= self.most {
            let most = self.most;
            return Comer::TurnedAway(io::Error::other(format!("there are {most} already")));
        }
        Comer::For(self.place(), stream)
    }

    /// The loop with the fewest takes one more: an NBD client, or somebody who has come another way.
    pub(crate) fn place(&mut self) -> usize {
        let fewest = self.loads.iter().enumerate().min_by_key(|(_, load)| **load);
        let to = fewest.map_or(0, |(index, _)| index);
        self.loads[to] += 1;
        to
    }

    /// A client of this loop is gone, or was not taken by it.
    pub(crate) fn left(&mut self, index: usize) {
        if let Some(load) = self.loads.get_mut(index) {
            *load = load.saturating_sub(1);
        }
    }

    /// When [`timeout`](Self::timeout) is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.rests_until
    }

    pub(crate) fn timeout(&mut self, now: Instant) {
        self.rests_until = self.rests_until.filter(|at| *at > now);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn somebody() -> Socket {
        UnixStream::pair().unwrap().0.into()
    }

    fn come(entrance: &mut Entrance) -> Option<usize> {
        match entrance.receive(somebody()) {
            Comer::For(index, _) => Some(index),
            Comer::TurnedAway(_) => None,
        }
    }

    #[test]
    fn clients_are_spread_and_the_limit_is_that_of_all_loops() {
        let mut entrance = Entrance::new(3, 5);
        let came: Vec<_> = (0..6).map(|_| come(&mut entrance)).collect();
        assert_eq!(came, [Some(0), Some(1), Some(2), Some(0), Some(1), None]);
        entrance.left(1);
        assert_eq!((come(&mut entrance), come(&mut entrance)), (Some(1), None));
        entrance.left(0);
        entrance.left(0);
        assert_eq!((come(&mut entrance), come(&mut entrance)), (Some(0), Some(0)));
        assert_eq!(come(&mut entrance), None);
        // Nobody can be gone who was not there.
        let mut empty = Entrance::new(2, 1);
        empty.left(1);
        empty.left(7);
        assert_eq!(empty.loads, [0; 2]);
        assert_eq!((come(&mut empty), come(&mut empty)), (Some(0), None));
    }

    #[test]
    fn there_is_always_a_loop() {
        let mut entrance = Entrance::new(1, 2);
        assert_eq!((come(&mut entrance), come(&mut entrance)), (Some(0), Some(0)));
        assert_eq!(come(&mut entrance), None);
        assert!(Entrance::new(2, 0).receive(somebody()).turned_away());
    }

    impl Comer {
        fn turned_away(&self) -> bool {
            matches!(self, Self::TurnedAway(_))
        }
    }
}
