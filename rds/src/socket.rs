//! Sockets.

use core::net::SocketAddr;
use std::collections::VecDeque;

use crate::{config::Config, proto::RdmaCookie, rdma::RdmaNotice};

/// Number of a socket. That of a closed one may be another's later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SocketId(pub u32);

/// Message that has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// Sender.
    pub from: SocketAddr,
    /// Bytes.
    pub data: Vec<u8>,
    /// Memory of the sender that the receiver may use.
    pub cookie: Option<RdmaCookie>,
    /// Sequence number of its connection; 0 of a socket of the same node.
    pub sequence: u64,
}

/// Abilities of a socket without waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Readiness {
    /// There is something to receive (`POLLIN`).
    pub readable: bool,
    /// The send buffer has room (`POLLOUT`).
    pub writable: bool,
    /// A congestion map has come since the last poll (`POLLIN`, `POLLRDNORM` and `POLLWRBAND`, once).
    pub uncongested: bool,
    /// And a message has been refused because of congestion.
    pub was_refused: bool,
}

/// Result of receiving.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Received {
    /// A message.
    Message(Message),
    /// Ports that are no longer congested, modulo 64 (`RDS_CMSG_CONG_UPDATE`).
    Uncongested(u64),
    /// An operation has ended (`RDS_CMSG_RDMA_STATUS`).
    Rdma(RdmaNotice),
}

/// Change of a socket's port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PortChange {
    /// It has more unread bytes than it may.
    Congested,
    /// It has less than half of them.
    Freed,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) bound: Option<SocketAddr>,
    pub(crate) peer: Option<SocketAddr>,
    /// Type of service: set once, before the first send.
    pub(crate) tos: u8,
    pub(crate) tos_is_fixed: bool,
    pub(crate) send_buffer: usize,
    pub(crate) recv_buffer: usize,
    /// Bytes of messages that are not acknowledged.
    pub(crate) unacked: usize,
    /// Operations that have not ended, and reports that were not read.
    pub(crate) operations: usize,
    /// Regions.
    pub(crate) regions: usize,
    /// It wants to know of operations that failed (`RDS_RECVERR`).
    pub(crate) reports_errors: bool,
    max_operations: usize,
    notices: VecDeque<RdmaNotice>,
    inbox: VecDeque<Message>,
    /// Bytes in the inbox, and of messages that were taken but not read.
    unread: usize,
    congested: bool,
    /// It wants to know of ports that refused it and are free again.
    monitors: bool,
    /// Ports that have refused it, modulo 64.
    refused: u64,
    /// Refusing ports that are free again, modulo 64.
    freed: u64,
    /// Maps that had come when a send was last refused, or waited, because of congestion. `None`: a later map was news to its user.
    refused_at: Option<u64>,
    /// Maps that have come when it was polled last.
    maps_seen: u64,
    /// Its user was told that it has changed, and has not asked since.
    told: bool,
}

impl Socket {
    /// Returns a socket that is not bound.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            bound: None,
            peer: None,
            tos: 0,
            tos_is_fixed: false,
            send_buffer: config.send_buffer,
            recv_buffer: config.recv_buffer,
            unacked: 0,
            operations: 0,
            regions: 0,
            reports_errors: false,
            max_operations: config.max_operations,
            notices: VecDeque::new(),
            inbox: VecDeque::new(),
            unread: 0,
            congested: false,
            monitors: false,
            refused: 0,
            freed: 0,
            refused_at: None,
            maps_seen: 0,
            told: false,
        }
    }

    /// Bytes that were not read.
    pub(crate) fn unread(&self) -> usize {
        self.unread
    }

    /// Messages that were not taken.
    pub(crate) fn inbox(&self) -> impl Iterator<Item = &Message> {
        self.inbox.iter()
    }

    /// Adds a message.
    pub(crate) fn push(&mut self, message: Message) -> Option<PortChange> {
        self.unread += message.data.len();
        self.inbox.push_back(message);
        let becomes = !self.congested && self.unread > self.recv_buffer;
        self.congested |= becomes;
        becomes.then_some(PortChange::Congested)
    }

    /// Returns what would be received next.
    pub(crate) fn peek(&self) -> Option<Received> {
        if let Some(notice) = self.notices.front() {
            return Some(Received::Rdma(*notice));
        }
        match self.freed {
            0 => self.inbox.front().cloned().map(Received::Message),
            freed => Some(Received::Uncongested(freed)),
        }
    }

    /// An operation has ended; `None`: its user does not want to know.
    pub(crate) fn operation_ended(&mut self, notice: Option<RdmaNotice>) {
        match notice {
            Some(notice) => self.notices.push_back(notice),
            None => self.operations -= 1,
        }
    }

    /// Adds a report of an operation that ended at once.
    pub(crate) fn notify(&mut self, notice: RdmaNotice) {
        self.operations += 1;
        self.notices.push_back(notice);
    }

    /// Takes the next report of an operation.
    pub(crate) fn pop_notice(&mut self) -> Option<RdmaNotice> {
        let notice = self.notices.pop_front()?;
        self.operations -= 1;
        Some(notice)
    }

    /// Returns whether it has as many operations as it may have.
    pub(crate) fn is_operating_fully(&self) -> bool {
        self.operations >= self.max_operations
    }

    /// Takes what is next: reports of operations, then congestion, then messages, as the kernel does. A message counts as unread until [`read`](Self::read).
    pub(crate) fn pop(&mut self) -> Option<Received> {
        if let Some(notice) = self.pop_notice() {
            return Some(Received::Rdma(notice));
        }
        match core::mem::take(&mut self.freed) {
            0 => self.inbox.pop_front().map(Received::Message),
            freed => Some(Received::Uncongested(freed)),
        }
    }

    /// Bytes of messages that were taken are read. Returns how many, which is not more than there are.
    pub(crate) fn read(&mut self, len: usize) -> (usize, Option<PortChange>) {
        let len = len.min(self.unread);
        self.unread -= len;
        let becomes = self.congested && self.unread < self.recv_buffer / 2;
        self.congested &= !becomes;
        (len, becomes.then_some(PortChange::Freed))
    }

    /// No message comes any more. Returns its address, and how its port changes by that.
    pub(crate) fn stop_receiving(&mut self) -> (Option<SocketAddr>, Option<PortChange>) {
        let was_congested = core::mem::take(&mut self.congested);
        (self.bound, was_congested.then_some(PortChange::Freed))
    }

    /// Switches reports of ports on or off. Ports that refused it before are not reported.
    pub(crate) fn set_monitor(&mut self, on: bool) {
        self.monitors = on;
        if !on {
            (self.refused, self.freed) = (0, 0);
        }
    }

    /// A destination was congested. `maps`: those that have come to the node so far.
    pub(crate) fn refused_by(&mut self, port: u16, maps: u64) {
        self.refused_at = Some(maps);
        if self.monitors {
            self.refused |= 1 << (port % 64);
        }
    }

    /// Ports have become free, modulo 64. Returns whether its user is to hear of it.
    pub(crate) fn note_freed(&mut self, freed: u64) -> bool {
        if !self.monitors {
            return self.refused_at.is_some();
        }
        let news = freed & self.refused;
        self.refused &= !news;
        self.freed |= news;
        news != 0
    }

    /// Returns what can be done. `maps`: those that have come to the node so far.
    pub(crate) fn poll(&mut self, maps: u64) -> Readiness {
        self.told = false;
        let is_new = core::mem::replace(&mut self.maps_seen, maps) != maps;
        let was_refused = is_new && self.refused_at.is_some();
        // A map that had come before the refusal says nothing of it: the next one is still to be told.
        self.refused_at.take_if(|at| *at != maps);
        Readiness {
            was_refused,
            readable: self.freed != 0 || !self.inbox.is_empty() || !self.notices.is_empty(),
            writable: self.unacked < self.send_buffer && !self.is_operating_fully(),
            uncongested: is_new && !self.monitors,
        }
    }

    /// Returns whether its user is to be told that it has changed, once until the next poll.
    pub(crate) fn tell(&mut self) -> bool {
        !core::mem::replace(&mut self.told, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(len: usize) -> Message {
        Message {
            from: ([192, 0, 2, 1], 9).into(),
            data: vec![0; len],
            cookie: None,
            sequence: 0,
        }
    }

    fn socket(recv_buffer: usize) -> Socket {
        Socket::new(&Config {
            recv_buffer,
            ..Config::default()
        })
    }

    #[test]
    fn a_port_is_congested_above_its_buffer_and_free_below_half_of_it() {
        let mut socket = socket(8192);
        let changes: Vec<_> = (0..3).map(|_| socket.push(message(4096))).collect();
        assert_eq!(changes, [None, None, Some(PortChange::Congested)]);
        assert!(
            (0..3).all(|_| socket.pop().is_some()) && socket.congested,
            "taken is not read"
        );
        let changes: Vec<_> = (0..3).map(|_| socket.read(4096).1).collect();
        // With 8192 and 4096 bytes it still is.
        assert_eq!(changes, [None, None, Some(PortChange::Freed)]);
        assert!(!socket.congested && socket.pop().is_none());
    }

    #[test]
    fn only_ports_that_refused_it_while_it_watched_are_reported() {
        let mut socket = socket(8192);
        socket.refused_by(4002, 0);
        socket.set_monitor(true);
        assert!(!socket.note_freed(u64::MAX));
        socket.refused_by(4002, 0);
        assert!(!socket.note_freed(1) && socket.note_freed(1 << 34));
        socket.push(message(1));
        assert_eq!(socket.pop(), Some(Received::Uncongested(1 << 34)));
        assert!(matches!(socket.pop(), Some(Received::Message(_))));
        assert!(!socket.note_freed(1 << 34), "once");
    }

    #[test]
    fn a_map_is_news_once_unless_ports_are_watched() {
        let mut socket = socket(8192);
        assert!(socket.poll(1).uncongested && !socket.poll(1).uncongested && socket.poll(2).uncongested);
        socket.set_monitor(true);
        assert!(!socket.poll(3).uncongested);
    }

    #[test]
    fn who_was_refused_hears_of_the_next_map_whenever_it_polls() {
        let mut socket = socket(8192);
        // Two maps have come, and the second one is why it is refused.
        socket.refused_by(4002, 2);
        assert!(socket.poll(2).was_refused && !socket.poll(2).was_refused);
        assert!(socket.note_freed(0), "the third one");
        assert!(socket.poll(3).was_refused);
        assert!(!socket.note_freed(0) && !socket.poll(4).was_refused, "once");
    }

    #[test]
    fn a_change_is_told_once_until_it_is_asked_for() {
        let mut socket = socket(8192);
        assert!(socket.tell() && !socket.tell());
        socket.poll(0);
        assert!(socket.tell());
    }
}
