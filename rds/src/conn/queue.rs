//! Messages of a connection to its peer: those that wait, and those that the peer has not acknowledged.

use std::collections::VecDeque;

use super::{operation::Prepared, outgoing::Outgoing};
use crate::{
    config::Config,
    proto::{Flags, Header},
    socket::SocketId,
};

/// Bytes of messages of closed sockets that a connection keeps.
const MAX_ORPHANS: usize = 16 << 20;
/// Bytes that each of them counts beside its data.
const ORPHAN: usize = 256;

/// When acknowledgements are asked for (`net.rds.max_unacked_packets`, `max_unacked_bytes`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AckPolicy {
    /// Messages without a request for an acknowledgement, at most.
    pub(crate) messages: u32,
    /// Bytes of such messages, at most.
    pub(crate) bytes: u64,
}

impl From<&Config> for AckPolicy {
    fn from(config: &Config) -> Self {
        Self {
            messages: config.unacked_messages,
            bytes: config.unacked_bytes,
        }
    }
}

/// Message with its sequence number.
#[derive(Debug)]
struct Numbered {
    sequence: u64,
    /// It has been on a connection that is gone.
    again: bool,
    /// The peer is to acknowledge it.
    ask: bool,
    message: Outgoing,
}

/// Next thing to post.
#[derive(Debug)]
pub(crate) enum Next<'a> {
    /// Pieces of an operation, from this one on.
    Operation(&'a mut Prepared, usize),
    /// Fragment of a message.
    Fragment(NextFragment<'a>),
}

/// Fragment to post.
#[derive(Debug)]
pub(crate) struct NextFragment<'a> {
    pub(crate) header: Header,
    pub(crate) data: &'a [u8],
    /// The last one of its message.
    pub(crate) is_last: bool,
    /// The message has an operation.
    pub(crate) has_operation: bool,
    /// It waits for the operation.
    pub(crate) is_fenced: bool,
}

/// See the module. Sequence numbers ascend, and outlive connections.
#[derive(Debug)]
pub(crate) struct SendQueue {
    policy: AckPolicy,
    next: u64,
    waiting: VecDeque<Numbered>,
    /// Pieces of the first waiting message's operation that were posted.
    pieces: usize,
    /// Fragment of the first waiting message that is next.
    fragment: u32,
    unacked: VecDeque<Numbered>,
    /// Messages and bytes since the last request for an acknowledgement; `None`: the next message asks.
    since: Option<(u32, u64)>,
}

impl SendQueue {
    /// Returns an empty queue, whose first message has this sequence number.
    pub(crate) fn new(policy: AckPolicy, first: u64) -> Self {
        Self {
            policy,
            next: first.max(1),
            waiting: VecDeque::new(),
            pieces: 0,
            fragment: 0,
            unacked: VecDeque::new(),
            since: None,
        }
    }

    /// Sequence number of the next message.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next
    }

    /// Adds a message. `ask`: the peer is to acknowledge it soon, since its socket has little room left.
    pub(crate) fn push(&mut self, message: Outgoing, ask: bool) -> u64 {
        let sequence = self.next;
        self.next += 1;
        self.waiting.push_back(Numbered {
            sequence,
            again: false,
            ask,
            message,
        });
        sequence
    }

    /// Returns whether nothing waits to be sent.
    pub(crate) fn is_sent(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns whether no message of a socket, open or closed, waits for an acknowledgement. Pings and pongs of the node do not matter: two nodes would ask
    /// each other for ever.
    pub(crate) fn is_acked(&self) -> bool {
        let is_own = |message: &Outgoing| message.socket.is_none() && !message.orphan;
        self.unacked.iter().all(|sent| is_own(&sent.message))
    }

    /// Messages that wait, and that are not acknowledged.
    pub(crate) fn lens(&self) -> (usize, usize) {
        (self.waiting.len(), self.unacked.len())
    }

    /// Messages with their sequence numbers: those that wait, or those that are not acknowledged.
    pub(crate) fn messages(&self, are_sent: bool) -> impl Iterator<Item = (u64, &Outgoing)> {
        let queue = if are_sent { &self.unacked } else { &self.waiting };
        queue.iter().map(|kept| (kept.sequence, &kept.message))
    }

    /// Messages of a socket.
    pub(crate) fn messages_of(&self, socket: SocketId) -> usize {
        let all = self.waiting.iter().chain(&self.unacked);
        all.filter(|kept| kept.message.socket == Some(socket) && !kept.message.canceled)
            .count()
    }

    /// Returns whether a message has some of its operation or fragments sent, and the next ones must follow.
    pub(crate) fn is_amid_message(&self) -> bool {
        self.fragment > 0 || self.pieces > 0
    }

    /// Returns what to post next, a fragment with a header that acknowledges `ack`. [`operated`](Self::operated) or
    /// [`posted`](Self::posted) must follow if it is, or [`drop_first`](Self::drop_first) if it can't be.
    pub(crate) fn next(&mut self, ack: u64) -> Option<Next<'_>> {
        let first = self.waiting.front_mut()?;
        let pieces = first
            .message
            .operation
            .as_ref()
            .map_or(0, |operation| operation.pieces());
        if self.pieces < pieces {
            let operation = first.message.operation.as_deref_mut()?;
            return Some(Next::Operation(operation, self.pieces));
        }
        if self.fragment == 0 {
            let len = first.message.data.len() as u64;
            let due = self
                .since
                .is_none_or(|(messages, bytes)| messages >= self.policy.messages || bytes + len > self.policy.bytes);
            first.ask |= due || first.again;
        }
        let mut flags = Flags::empty();
        flags.set(Flags::ACK_REQUIRED, first.ask);
        flags.set(Flags::RETRANSMITTED, first.again);
        let operation = first.message.operation.as_deref();
        Some(Next::Fragment(NextFragment {
            header: first.message.header(first.sequence, ack, flags),
            data: first.message.fragment(self.fragment),
            is_last: self.fragment + 1 == first.message.fragments(),
            has_operation: operation.is_some(),
            is_fenced: self.fragment == 0 && operation.is_some_and(Prepared::is_fenced),
        }))
    }

    /// So many pieces of the operation of [`next`](Self::next) were posted. Returns whether its message ends with it.
    pub(crate) fn operated(&mut self, pieces: usize) -> bool {
        self.pieces += pieces;
        let is_end = |first: &Numbered| {
            let posted = first
                .message
                .operation
                .as_ref()
                .map_or(0, |operation| operation.pieces())
                == self.pieces;
            posted && first.message.is_silent
        };
        let ends = self.waiting.front().is_some_and(is_end);
        if ends {
            self.waiting.pop_front();
            self.pieces = 0;
        }
        ends
    }

    /// Takes the message of [`next`](Self::next) out, of which nothing was posted.
    pub(crate) fn drop_first(&mut self) -> Option<Outgoing> {
        self.waiting.pop_front().map(|first| first.message)
    }

    /// The fragment of [`next`](Self::next) was posted.
    pub(crate) fn posted(&mut self) {
        let Some(first) = self.waiting.front() else { return };
        self.fragment += 1;
        if self.fragment < first.message.fragments() {
            return;
        }
        (self.fragment, self.pieces) = (0, 0);
        let Some(sent) = self.waiting.pop_front() else { return };
        let len = sent.message.data.len() as u64;
        self.since = match (sent.ask, self.since) {
            (false, Some((messages, bytes))) => Some((messages + 1, bytes + len)),
            _ => Some((0, 0)),
        };
        if !sent.message.canceled {
            self.unacked.push_back(sent);
        }
    }

    /// The peer has acknowledged all messages up to `sequence`: they leave the queue. Returns whether they were sent at all; an
    /// acknowledgement of others counts for nothing, as it would lose them (`rds_send_path_drop_acked` believes it).
    pub(crate) fn acknowledge(&mut self, sequence: u64, mut released: impl FnMut(&Outgoing)) -> bool {
        let unsent = self.waiting.front().map_or(self.next, |first| first.sequence);
        if sequence >= unsent {
            return false;
        }
        while self.unacked.front().is_some_and(|first| first.sequence <= sequence) {
            if let Some(first) = self.unacked.pop_front() {
                released(&first.message);
            }
        }
        true
    }

    /// The connection is gone: what it carried and is not acknowledged is to be sent again, from its first fragment. Messages with
    /// operations are not, as those must not be done twice; these are returned.
    pub(crate) fn restart(&mut self) -> Vec<Outgoing> {
        let mut dropped = Vec::new();
        if self.is_amid_message()
            && let Some(mut first) = self.waiting.pop_front()
        {
            first.again = true;
            self.unacked.push_back(first);
        }
        (self.fragment, self.pieces) = (0, 0);
        self.since = None;
        while let Some(mut last) = self.unacked.pop_back() {
            // A message that was canceled amid its fragments need not be finished any more.
            match (last.message.canceled || last.message.orphan, &last.message.operation) {
                (true, _) => {}
                (false, Some(_)) => dropped.push(last.message),
                (false, None) => {
                    last.again = true;
                    self.waiting.push_front(last);
                }
            }
        }
        self.waiting.retain(|kept| !kept.message.orphan);
        dropped
    }

    /// A socket is closed. Its messages are accounted to nobody from now on, and those that are too many for that are canceled, as are
    /// those whose operation has not begun: the operation's memory goes with the socket.
    pub(crate) fn orphan(&mut self, socket: SocketId) {
        self.waiting
            .retain(|kept| kept.message.socket != Some(socket) || kept.message.ticket().is_none());
        let all = || self.waiting.iter().chain(&self.unacked).map(|kept| &kept.message);
        let kept: usize = all()
            .filter(|m| m.orphan || m.socket == Some(socket))
            .map(|m| m.data.len() + ORPHAN)
            .sum();
        if kept > MAX_ORPHANS {
            return self.cancel(socket, None, |_| {});
        }
        let all = self.waiting.iter_mut().chain(&mut self.unacked);
        for message in all.map(|kept| &mut kept.message) {
            if message.socket == Some(socket) && !message.canceled {
                (message.socket, message.orphan) = (None, true);
            }
        }
    }

    /// Drops the messages of a socket, those to `port` only if one is named. Of one that is partly sent the rest still leaves.
    pub(crate) fn cancel(&mut self, socket: SocketId, port: Option<u16>, mut released: impl FnMut(&Outgoing)) {
        let is_meant =
            |m: &Outgoing| m.socket == Some(socket) && !m.canceled && port.is_none_or(|port| m.ports.1 == port);
        let partly_sent = self
            .waiting
            .front()
            .filter(|_| self.is_amid_message())
            .map(|m| m.sequence);
        for queue in [&mut self.unacked, &mut self.waiting] {
            queue.retain_mut(|kept| {
                if !is_meant(&kept.message) {
                    return true;
                }
                released(&kept.message);
                kept.message.canceled = true;
                Some(kept.sequence) == partly_sent
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        conn::operation::Ticket,
        proto::RdmaCookie,
        rdma::{Operation, OperationFlags, OperationKind},
    };

    const SOCKET: SocketId = SocketId(3);

    fn queue(messages: u32) -> SendQueue {
        SendQueue::new(
            AckPolicy {
                messages,
                bytes: 1 << 20,
            },
            1,
        )
    }

    fn push(queue: &mut SendQueue, lens: &[usize]) {
        for len in lens {
            queue.push(Outgoing::new(Some(SOCKET), (7, 9), vec![0; *len].into()), false);
        }
    }

    /// Posts fragments; returns of each: sequence number, bytes, flags.
    fn post(queue: &mut SendQueue, count: usize) -> Vec<(u64, usize, Flags)> {
        let mut posted = Vec::new();
        for _ in 0..count {
            let Some(Next::Fragment(next)) = queue.next(0) else {
                break;
            };
            posted.push((next.header.sequence.get(), next.data.len(), next.header.flags()));
            queue.posted();
        }
        posted
    }

    #[test]
    fn acknowledgements_are_asked_for_at_first_and_after_so_many_messages() {
        let mut queue = queue(2);
        push(&mut queue, &[1; 7]);
        let asked = post(&mut queue, 9)
            .into_iter()
            .filter(|(.., flags)| flags.contains(Flags::ACK_REQUIRED));
        assert_eq!(asked.map(|(sequence, ..)| sequence).collect::<Vec<_>>(), [1, 4, 7]);
    }

    #[test]
    fn a_message_leaves_in_fragments_and_an_empty_one_in_one() {
        let mut queue = queue(100);
        push(&mut queue, &[0, 4096, 4097]);
        let lens: Vec<_> = post(&mut queue, 9)
            .into_iter()
            .map(|(sequence, len, _)| (sequence, len))
            .collect();
        assert_eq!(lens, [(1, 0), (2, 4096), (3, 4096), (3, 1)]);
        assert!(queue.is_sent() && !queue.is_acked());
    }

    #[test]
    fn what_was_not_acknowledged_is_sent_again_from_its_first_fragment() {
        let mut queue = queue(100);
        push(&mut queue, &[1, 2, 9000, 3]);
        assert_eq!(post(&mut queue, 4).len(), 4);
        let mut released = 0;
        assert!(queue.acknowledge(1, |message| released += message.data.len()));
        assert_eq!(released, 1);
        queue.restart();
        let again = Flags::RETRANSMITTED | Flags::ACK_REQUIRED;
        let posted = post(&mut queue, 9);
        assert_eq!(
            posted[..4],
            [(2, 2, again), (3, 4096, again), (3, 4096, again), (3, 808, again)]
        );
        assert_eq!((posted[4].0, posted[4].2.contains(Flags::RETRANSMITTED)), (4, false));
    }

    #[test]
    fn an_acknowledgement_of_what_was_not_sent_counts_for_nothing() {
        let mut queue = queue(100);
        push(&mut queue, &[1, 5000]);
        post(&mut queue, 2);
        // Half of the second one has left.
        for sequence in [2, 3, u64::MAX] {
            assert!(!queue.acknowledge(sequence, |_| panic!("released")));
        }
        assert!(queue.acknowledge(1, |_| {}) && queue.acknowledge(0, |_| panic!("released")));
    }

    #[test]
    fn canceled_messages_are_gone_but_a_partly_sent_one_is_finished() {
        let mut queue = queue(100);
        push(&mut queue, &[1, 9000, 2]);
        queue.push(Outgoing::new(Some(SOCKET), (7, 10), Box::default()), false);
        post(&mut queue, 2);
        let mut released = Vec::new();
        queue.cancel(SOCKET, Some(9), |message| released.push(message.data.len()));
        assert_eq!(released, [1, 9000, 2]);
        let posted: Vec<_> = post(&mut queue, 9)
            .into_iter()
            .map(|(sequence, len, _)| (sequence, len))
            .collect();
        assert_eq!(posted, [(2, 4096), (2, 808), (4, 0)]);
        assert_eq!(queue.lens(), (0, 1));
        // Over another connection it need not be finished.
        push(&mut queue, &[9000]);
        post(&mut queue, 1);
        queue.cancel(SOCKET, None, |_| {});
        queue.restart();
        assert_eq!(queue.lens(), (0, 0));
    }

    fn push_operation(queue: &mut SendQueue, token: u64, is_silent: bool) {
        let memory = roce_verbs::mem::Pages::allocate(100).unwrap();
        let operation = Operation {
            kind: OperationKind::Read,
            cookie: RdmaCookie::new(1, 0),
            remote: 0,
            memory,
            pieces: vec![0..10, 20..30, 50..60],
            flags: OperationFlags::NOTIFY,
            token,
        };
        let ticket = Ticket {
            socket: SOCKET,
            port: 9,
            token,
            on_success: true,
            on_failure: true,
        };
        let mut message = Outgoing::new(Some(SOCKET), (7, 9), Box::default());
        message.is_silent = is_silent;
        message.operation = Some(Box::new(Prepared {
            operation,
            ticket: Some(ticket),
        }));
        queue.push(message, false);
    }

    /// Posts the next pieces of an operation, the first of which is to be this one.
    fn operate(queue: &mut SendQueue, first: usize, pieces: usize) -> bool {
        let Some(Next::Operation(operation, from)) = queue.next(0) else {
            panic!("no operation is next");
        };
        assert_eq!(from, first);
        // What posts it takes the ticket.
        operation.ticket = None;
        queue.operated(pieces)
    }

    #[test]
    fn an_operation_goes_before_its_message_and_alone_if_silent() {
        let mut queue = queue(100);
        push_operation(&mut queue, 1, false);
        push_operation(&mut queue, 2, true);
        push(&mut queue, &[5]);
        assert!(!operate(&mut queue, 0, 2) && queue.is_amid_message());
        assert!(!operate(&mut queue, 2, 1));
        let Some(Next::Fragment(next)) = queue.next(0) else {
            panic!("no message");
        };
        assert!(next.has_operation && next.is_fenced && next.is_last);
        queue.posted();
        assert!(!queue.is_amid_message());
        assert!(operate(&mut queue, 0, 3), "no message");
        assert_eq!(post(&mut queue, 9), [(3, 5, Flags::empty())]);
        assert_eq!(queue.lens(), (0, 2));
    }

    #[test]
    fn messages_whose_operation_has_begun_are_not_sent_again() {
        let mut queue = queue(100);
        for (token, is_silent) in [(1, false), (2, false), (3, true)] {
            push_operation(&mut queue, token, is_silent);
        }
        operate(&mut queue, 0, 3);
        post(&mut queue, 1);
        operate(&mut queue, 0, 1);
        let dropped = queue.restart();
        let tokens = dropped
            .iter()
            .map(|message| message.operation.as_ref().unwrap().operation.token);
        assert_eq!(tokens.collect::<Vec<_>>(), [2, 1]);
        assert!(operate(&mut queue, 0, 3), "the third one had not begun");
        assert_eq!(queue.lens(), (0, 0));
    }

    #[test]
    fn operations_of_a_closed_socket_do_not_begin() {
        let mut queue = queue(100);
        push_operation(&mut queue, 1, false);
        push_operation(&mut queue, 2, false);
        push(&mut queue, &[1]);
        operate(&mut queue, 0, 3);
        queue.orphan(SOCKET);
        assert_eq!(post(&mut queue, 9).len(), 2);
        push_operation(&mut queue, 3, false);
        let mut canceled = Vec::new();
        queue.cancel(SOCKET, Some(9), |message| {
            canceled.push(message.ticket().unwrap().token)
        });
        assert_eq!(canceled, [3]);
    }

    #[test]
    fn messages_of_a_closed_socket_leave_over_the_link_that_there_is() {
        let mut queue = queue(100);
        push(&mut queue, &[1, 2]);
        post(&mut queue, 1);
        queue.orphan(SOCKET);
        assert_eq!(post(&mut queue, 9).len(), 1);
        assert!(queue.is_sent() && !queue.is_acked());
        assert!(queue.acknowledge(1, |message| assert_eq!(message.socket, None)));
        queue.restart();
        assert_eq!(queue.lens(), (0, 0), "not over another one");
        push(&mut queue, &[MAX_ORPHANS]);
        queue.orphan(SOCKET);
        assert_eq!(queue.lens(), (0, 0), "too many");
    }
}
