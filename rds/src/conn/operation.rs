//! Operations on their way through a queue pair.

use core::ops::Range;
use std::{collections::VecDeque, sync::Arc};

use roce_verbs::{
    AccessFlags, RKey, RemoteAddr, SendOp, Sge, WcStatus,
    provider::{Memory, MrId, PdId, Provider, Registration, VerbsError},
};

use super::staged::Staged;
use crate::{
    rdma::{Operation, OperationFlags, OperationKind, RdmaNotice, RdmaStatus},
    socket::SocketId,
};

/// Addressee of an operation's report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    pub(crate) socket: SocketId,
    /// Port of the receiver.
    pub(crate) port: u16,
    pub(crate) token: u64,
    /// Report success.
    pub(crate) on_success: bool,
    /// Report failure.
    pub(crate) on_failure: bool,
}

impl Ticket {
    /// Returns the report of an end, if it is wanted.
    pub(crate) fn notice(&self, status: RdmaStatus) -> Option<RdmaNotice> {
        let is_wanted = match status {
            RdmaStatus::Success => self.on_success,
            _ => self.on_failure,
        };
        let token = self.token;
        is_wanted.then_some(RdmaNotice { token, status })
    }
}

/// Operation of a message.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) operation: Operation,
    /// `None` once it is posted: [`Posted`] has it.
    pub(crate) ticket: Option<Ticket>,
}

impl Prepared {
    /// Pieces of local memory, which are posted in order. A copy is one.
    pub(super) fn pieces(&self) -> usize {
        if self.is_staged() {
            1
        } else {
            self.operation.pieces.len()
        }
    }

    /// Returns whether devices use a copy of the local memory.
    fn is_staged(&self) -> bool {
        self.operation.memory.foreign().is_some()
    }

    /// Bytes of that.
    pub(super) fn staged(&self) -> usize {
        if self.is_staged() { self.operation.bytes() } else { 0 }
    }

    /// Returns whether the SENDs of the message have to wait for it.
    pub(super) fn is_fenced(&self) -> bool {
        self.operation.kind.fetches() || self.operation.flags.contains(OperationFlags::FENCE)
    }

    /// Registers the local memory or its copy, with which `first` becomes the number of the first work request.
    pub(super) fn begin(&mut self, provider: &mut dyn Provider, pd: PdId, first: u64) -> Result<Posted, VerbsError> {
        let missing = || VerbsError::Invalid("local memory is missing".into());
        let staged = match self.is_staged() {
            true => Some(Staged::new(&self.operation).ok_or_else(missing)?),
            false => None,
        };
        let (memory, hull): (Arc<dyn Memory>, _) = match &staged {
            Some(staged) => (staged.pages().clone(), 0..staged.pages().len()),
            None => (self.operation.memory.clone(), self.operation.hull()),
        };
        let access = match self.operation.kind.fetches() {
            true => AccessFlags::LOCAL_WRITE,
            false => AccessFlags::empty(),
        };
        let what = Registration {
            memory,
            offset: hull.start,
            len: hull.len(),
            iova: None,
            access,
        };
        let mr = provider.register(pd, &what)?;
        Ok(Posted {
            own: first..first,
            last: None,
            mr: mr.id,
            base: (mr.addr.wrapping_sub(hull.start as u64), mr.lkey),
            staged,
            ticket: self.ticket.take(),
            is_reported: false,
        })
    }

    /// Returns a work request of `pieces`, with its local elements.
    pub(super) fn request(&self, posted: &Posted, pieces: Range<usize>) -> (SendOp, Vec<Sge>) {
        let Operation { cookie, remote, .. } = self.operation;
        let copy = posted.staged.as_ref().map(|staged| 0..staged.pages().len());
        let all = copy.as_ref().map_or(&*self.operation.pieces, core::slice::from_ref);
        let before: usize = all[..pieces.start].iter().map(Range::len).sum();
        let remote = RemoteAddr {
            addr: cookie.address(remote.wrapping_add(before as u64)),
            rkey: RKey(cookie.rkey()),
        };
        let op = match self.operation.kind {
            OperationKind::Write => SendOp::Write(remote),
            OperationKind::Read => SendOp::Read(remote),
            OperationKind::FetchAdd { add } => SendOp::FetchAdd { remote, add },
            OperationKind::CompareSwap { compare, swap } => SendOp::CompareSwap { remote, compare, swap },
        };
        let (base, lkey) = posted.base;
        let sge = |piece: &Range<usize>| Sge {
            addr: base.wrapping_add(piece.start as u64),
            length: piece.len() as u32,
            lkey,
        };
        (op, all[pieces].iter().map(sge).collect())
    }
}

/// Operation of which some work requests were posted.
#[derive(Debug)]
pub(crate) struct Posted {
    /// Numbers of its work requests.
    pub(super) own: Range<u64>,
    /// Number of the last work request of its message; `None`: not posted yet.
    pub(super) last: Option<u64>,
    mr: MrId,
    /// Address of the memory's offset 0, and local key.
    base: (u64, roce_verbs::LKey),
    /// The memory, if it is a copy.
    staged: Option<Staged>,
    /// `None`: the socket is closed.
    ticket: Option<Ticket>,
    is_reported: bool,
}

impl Posted {
    /// Gives the local memory what was fetched.
    fn finish(&self) -> RdmaStatus {
        match self.staged.as_ref().map_or(Some(()), Staged::finish) {
            Some(()) => RdmaStatus::Success,
            None => RdmaStatus::OtherError,
        }
    }
}

/// End of an operation for its socket. `None`: the report was made before.
pub(crate) type Ended = (Ticket, Option<RdmaStatus>);

/// Operations that a queue pair works on, in order.
#[derive(Debug, Default)]
pub(crate) struct Operations(VecDeque<Posted>);

impl Operations {
    pub(super) fn push(&mut self, posted: Posted) {
        self.0.push_back(posted);
    }

    /// The one that was posted last.
    pub(super) fn current(&mut self) -> Option<&mut Posted> {
        self.0.back_mut()
    }

    /// Returns whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of copies of local memory.
    pub(super) fn staged(&self) -> usize {
        let copies = self.0.iter().filter_map(|posted| posted.staged.as_ref());
        copies.map(|staged| staged.pages().len()).sum()
    }

    /// Number of operations of a socket.
    pub(crate) fn of(&self, socket: SocketId) -> usize {
        let is_its = |posted: &&Posted| posted.ticket.is_some_and(|ticket| ticket.socket == socket);
        self.0.iter().filter(is_its).count()
    }

    /// Ends those whose work requests, up to this number, are done.
    pub(super) fn completed(&mut self, number: u64, provider: &mut dyn Provider) -> Vec<Ended> {
        let mut ended = Vec::new();
        while self
            .0
            .front()
            .and_then(|first| first.last)
            .is_some_and(|last| last <= number)
        {
            let Some(posted) = self.0.pop_front() else { break };
            provider.deregister(posted.mr);
            let Some(ticket) = posted.ticket else { continue };
            // After a cancel or a close the memory stays as it is.
            let status = (!posted.is_reported).then(|| posted.finish());
            ended.push((ticket, status));
        }
        ended
    }

    /// The queue pair has failed, with a work request of this number if one is the cause. Their memory stays until it is drained.
    pub(super) fn failed(&mut self, cause: Option<(u64, WcStatus)>) -> Vec<Ended> {
        let status = |posted: &Posted| match cause {
            Some((number, _))
                if posted
                    .last
                    .is_some_and(|last| (posted.own.end..=last).contains(&number)) =>
            {
                RdmaStatus::OtherError
            }
            Some((number, status)) if posted.own.contains(&number) => match status {
                WcStatus::RemoteAccessError
                | WcStatus::RemoteInvalidRequestError
                | WcStatus::RemoteOperationError
                | WcStatus::RemoteInvalidRdRequest => RdmaStatus::RemoteError,
                _ => RdmaStatus::OtherError,
            },
            _ => RdmaStatus::Dropped,
        };
        let end = |posted: &mut Posted| {
            let status = (!posted.is_reported).then(|| status(posted));
            posted.ticket.take().map(|ticket| (ticket, status))
        };
        self.0.iter_mut().filter_map(end).collect()
    }

    /// Reports those of a socket to this port as canceled. They are still done.
    pub(crate) fn cancel(&mut self, socket: SocketId, port: u16) -> Vec<Ticket> {
        let canceled = |posted: &mut Posted| {
            let ticket = posted.ticket.filter(|t| (t.socket, t.port) == (socket, port))?;
            (!core::mem::replace(&mut posted.is_reported, true)).then_some(ticket)
        };
        self.0.iter_mut().filter_map(canceled).collect()
    }

    /// A socket is closed: nothing is reported to it.
    pub(crate) fn forget(&mut self, socket: SocketId) {
        for posted in &mut self.0 {
            posted.ticket = posted.ticket.filter(|ticket| ticket.socket != socket);
        }
    }

    /// Nothing of the queue pair is under way.
    pub(super) fn free(self, provider: &mut dyn Provider) {
        self.0.into_iter().for_each(|posted| provider.deregister(posted.mr));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn posted(own: Range<u64>, last: Option<u64>, token: u64) -> Posted {
        Posted {
            own,
            last,
            mr: MrId(0),
            base: (0, roce_verbs::LKey(0)),
            staged: None,
            ticket: Some(Ticket {
                socket: SocketId(3),
                port: 9,
                token,
                on_success: true,
                on_failure: true,
            }),
            is_reported: false,
        }
    }

    #[test]
    fn the_work_request_that_failed_tells_what_of_an_operation() {
        use RdmaStatus::{Dropped, OtherError, RemoteError};
        let (access, retries) = (WcStatus::RemoteAccessError, WcStatus::RetryExceeded);
        let cases = [
            (None, [Dropped, Dropped]),
            (Some((3, access)), [Dropped, RemoteError]),
            (Some((4, access)), [Dropped, RemoteError]),
            (Some((3, retries)), [Dropped, OtherError]),
            // A SEND of the message.
            (Some((2, retries)), [OtherError, Dropped]),
            (Some((2, access)), [OtherError, Dropped]),
            (Some((5, access)), [Dropped, Dropped]),
        ];
        for (cause, expected) in cases {
            let mut operations = Operations([posted(1..2, Some(2), 1), posted(3..5, None, 2)].into());
            let ended: Vec<_> = operations
                .failed(cause)
                .into_iter()
                .map(|(_, status)| status.unwrap())
                .collect();
            assert_eq!(ended, expected, "{cause:?}");
            assert!(operations.failed(cause).is_empty(), "once");
        }
    }

    #[test]
    fn a_canceled_operation_is_reported_once_and_stays_until_it_is_done() {
        let mut operations = Operations([posted(1..2, Some(2), 1)].into());
        assert!(operations.cancel(SocketId(3), 8).is_empty() && operations.cancel(SocketId(4), 9).is_empty());
        assert_eq!(operations.cancel(SocketId(3), 9).len(), 1);
        assert!(operations.cancel(SocketId(3), 9).is_empty());
        assert_eq!((operations.of(SocketId(3)), operations.of(SocketId(4))), (1, 0));
        assert_eq!(operations.failed(None)[0].1, None);
        assert_eq!(operations.of(SocketId(3)), 0);
    }
}
