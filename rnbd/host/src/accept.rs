//! The accept path of NBD clients: the listening sockets of a mapping, and who gets a place.

use std::{collections::VecDeque, io, os::fd::AsFd};

use core::time::Duration;
use mio::{Interest, Token};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use roce::reactor::Sockets;
use roce_net::places::{Full, Identity, Limits, Peer, Places, Refusal};
use roce_verbs::Instant;
use socket2::Socket;

use crate::listen::{Listen, Listener, NbdAddress};

/// How long accepting pauses when the system has no descriptor.
const PAUSE: Duration = Duration::from_millis(100);
/// Clients that have not chosen a device yet, beside those that have. The oldest is evicted for a newer one.
const HALF_OPEN: usize = 32;
/// How long a half-open client is spared while those that wait to be accepted are of hosts that have as many.
const SPARE: Duration = Duration::from_millis(250);
/// The share of places that is reserved for clients of Unix sockets, if there are such sockets and TCP.
const RESERVED: usize = 4;

/// A connection.
#[derive(Debug)]
pub(crate) enum Connected {
    /// A half-open client by its number, and the one that is evicted for it.
    Client(u64, Socket, Option<u64>),
    /// It is not served.
    Rejected(io::Error),
}

/// An accepted connection that waits for a place.
#[derive(Debug)]
struct Waiting {
    stream: Socket,
    peer: Peer,
    /// Until then, or until another client is gone.
    until: Option<Instant>,
}

/// A listening socket.
#[derive(Debug)]
struct ListeningSocket {
    listener: Listener,
    /// Connections wait in its backlog, as far as is known.
    accepts: bool,
    /// While it waits, the next ones stay in the backlog.
    waiting: Option<Waiting>,
}

impl ListeningSocket {
    fn is_unix(&self) -> bool {
        !matches!(self.listener.address(), NbdAddress::Tcp(_))
    }

    /// A connection may be had from it.
    fn is_ready(&self) -> bool {
        self.waiting
            .as_ref()
            .map_or(self.accepts, |waiting| waiting.until.is_none())
    }

    fn next(&mut self) -> io::Result<(Socket, Peer)> {
        if let Some(waiting) = self.waiting.take() {
            return Ok((waiting.stream, waiting.peer));
        }
        let stream = self.listener.accept()?;
        let peer = peer(&stream);
        Ok((stream, peer))
    }
}

/// Returns the peer of a connection. Users who can reach a Unix socket are trusted.
fn peer(stream: &Socket) -> Peer {
    let address = stream.peer_addr().ok().and_then(|address| address.as_socket());
    match address {
        Some(address) => Peer {
            identity: Identity::host(address.ip()),
            trusted: false,
        },
        None => Peer {
            identity: Identity::User(getsockopt(stream, PeerCredentials).map_or(u32::MAX, |of| of.uid())),
            trusted: true,
        },
    }
}

/// The listening sockets, and who has a place.
#[derive(Debug)]
pub(crate) struct AcceptPath {
    sockets: Vec<ListeningSocket>,
    /// Connections that this process has made itself.
    offered: VecDeque<Socket>,
    /// The one that is asked first.
    first: usize,
    paused_until: Option<Instant>,
    /// NBD clients at most that have chosen a device.
    most: usize,
    places: Places<Instant>,
}

fn limits(most: usize, reserved: usize) -> Limits {
    let all = most + HALF_OPEN;
    Limits {
        all,
        open: most,
        reserved,
        each: all,
    }
}

impl AcceptPath {
    /// Without listeners.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            sockets: Vec::new(),
            offered: VecDeque::new(),
            first: 0,
            paused_until: None,
            most,
            places: Places::new(limits(most, 0)),
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
            self.sockets.push(ListeningSocket {
                listener,
                accepts: true,
                waiting: None,
            });
        }
        if self.sockets.iter().any(ListeningSocket::is_unix) {
            self.places = Places::new(limits(self.most, self.most / RESERVED));
        }
        Ok(self.sockets.iter().map(|way| way.listener.address().clone()).collect())
    }

    /// Takes a connection that did not come by a listener.
    pub(crate) fn offer(&mut self, stream: Socket) {
        self.offered.push_back(stream);
    }

    /// Accepts nobody any more.
    pub(crate) fn close(&mut self, sockets: &Sockets<'_>) {
        self.offered.clear();
        for way in self.sockets.drain(..) {
            let _ = sockets.deregister(way.listener.as_fd());
        }
    }

    /// A listener is readable.
    pub(crate) fn ready(&mut self) {
        self.sockets.iter_mut().for_each(|way| way.accepts = true);
    }

    /// A connection may be had at once.
    pub(crate) fn is_ready(&self) -> bool {
        !self.offered.is_empty() || (self.paused_until.is_none() && self.sockets.iter().any(ListeningSocket::is_ready))
    }

    /// The next connection. Those at one socket don't hold up those at another.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Connected> {
        if let Some(stream) = self.offered.pop_front() {
            let peer = peer(&stream);
            return Some(self.receive(stream, peer, now));
        }
        while self.paused_until.is_none() {
            let count = self.sockets.len();
            let mut order = (0..count).map(|i| (self.first + i) % count);
            let index = order.find(|index| self.sockets[*index].is_ready())?;
            let way = &mut self.sockets[index];
            match way.next() {
                Ok((stream, peer)) => {
                    self.first = (index + 1) % count;
                    if let Some(until) = self.places.spared_until(peer, SPARE, now) {
                        let until = Some(until);
                        way.waiting = Some(Waiting { stream, peer, until });
                        continue;
                    }
                    return Some(self.receive(stream, peer, now));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => way.accepts = false,
                // Of one that is gone already, and a signal's.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) => {
                    // Out of descriptors, most likely: it does not help to ask again at once.
                    self.paused_until = Some(now + PAUSE);
                    return Some(Connected::Rejected(e));
                }
            }
        }
        None
    }

    /// A client gets a place.
    fn receive(&mut self, stream: Socket, peer: Peer, now: Instant) -> Connected {
        match self.places.enter(peer, now) {
            Ok(entered) => Connected::Client(entered.id, stream, entered.evicted),
            Err(full) => Connected::Rejected(io::Error::other(full.to_string())),
        }
    }

    /// A client has chosen a device: it can't be evicted from here on.
    ///
    /// # Errors
    /// When as many have as may, and it has to go.
    pub(crate) fn chosen(&mut self, id: u64) -> Result<(), Full> {
        match self.places.open(id) {
            Err(Refusal::Full(full)) => Err(full),
            // One that was evicted is on its way out.
            Ok(()) | Err(Refusal::Evicted) => Ok(()),
        }
    }

    /// An NBD client is gone, or was not taken.
    pub(crate) fn left(&mut self, id: u64) {
        self.places.leave(id);
        let waiting = self.sockets.iter_mut().filter_map(|way| way.waiting.as_mut());
        waiting.for_each(|waiting| waiting.until = None);
    }

    /// When [`timeout`](Self::timeout) is due.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        let waiting = self.sockets.iter().filter_map(|way| way.waiting.as_ref()?.until);
        waiting.chain(self.paused_until).min()
    }

    pub(crate) fn timeout(&mut self, now: Instant) {
        self.paused_until = self.paused_until.filter(|at| *at > now);
        for waiting in self.sockets.iter_mut().filter_map(|way| way.waiting.as_mut()) {
            waiting.until = waiting.until.filter(|at| *at > now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const LOCAL: Peer = Peer {
        identity: Identity::User(7),
        trusted: true,
    };

    fn connect(entrance: &mut AcceptPath) -> Connected {
        entrance.receive(UnixStream::pair().unwrap().0.into(), LOCAL, Instant::ZERO)
    }

    /// One that chooses a device at once.
    fn open(entrance: &mut AcceptPath) -> Option<u64> {
        match connect(entrance) {
            Connected::Client(id, ..) => {
                entrance.chosen(id).unwrap();
                Some(id)
            }
            Connected::Rejected(_) => None,
        }
    }

    #[test]
    fn as_many_clients_as_may_have_a_place() {
        let mut entrance = AcceptPath::new(3);
        let ids: Vec<_> = (0..4).map(|_| open(&mut entrance)).collect();
        assert!(ids[..3].iter().all(Option::is_some) && ids[3].is_none(), "{ids:?}");
        entrance.left(ids[1].unwrap());
        assert!(open(&mut entrance).is_some() && open(&mut entrance).is_none());
        // Nobody can be gone who was not there.
        entrance.left(4711);
        assert!(open(&mut entrance).is_none());
    }

    #[test]
    fn half_open_clients_are_evicted_and_take_no_place_of_others() {
        let mut entrance = AcceptPath::new(2);
        let (mut ids, mut evicted) = (Vec::new(), Vec::new());
        for _ in 0..40 {
            match connect(&mut entrance) {
                Connected::Client(id, _, old) => {
                    ids.push(id);
                    evicted.extend(old);
                }
                Connected::Rejected(e) => panic!("{e}"),
            }
        }
        let oldest = 40 - 2 - HALF_OPEN;
        assert_eq!(evicted, ids[..oldest], "the oldest");
        ids.drain(..oldest);
        assert!(entrance.chosen(ids[0]).is_ok() && entrance.chosen(ids[1]).is_ok());
        // Too late; and one that is gone by now.
        assert_eq!(entrance.chosen(ids[2]), Err(Full::All(2)));
        assert_eq!(entrance.chosen(0), Ok(()));
        assert!(matches!(connect(&mut entrance), Connected::Rejected(_)));
    }

    #[test]
    fn nobody_is_served_where_nobody_may_be() {
        let mut entrance = AcceptPath::new(0);
        assert!(matches!(connect(&mut entrance), Connected::Rejected(_)));
    }
}
