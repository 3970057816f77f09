//! One connection of the broker's socket.

use std::{
    collections::{BTreeSet, VecDeque},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use roce_verbs::Instant;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{slots::Process, state};
use crate::{
    page::PageFile,
    proto::{Place, Reply, ToBroker, ToClient},
    sys,
    wire::{self, Record, RecvError},
};

/// Answers that a client has not taken, and their bytes: with more it is given up.
pub(super) const MAX_WAITING: usize = 4096;
pub(crate) const MAX_WAITING_BYTES: usize = 2 << 20;
/// How long a connection may say nothing at all.
pub(super) const FIRST_WORD: Duration = Duration::from_secs(10);

/// Connection of a member, or of a process that may become one.
pub(super) struct Client {
    pub(super) socket: OwnedFd,
    /// Readable when the process has ended, even if a child of it holds the connection.
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) process: Process,
    pub(super) uid: u32,
    /// Runs as the broker's own user.
    pub(super) trusted: bool,
    /// Network namespace of whoever connected.
    pub(super) network: Option<u64>,
    pub(super) name: String,
    pub(super) place: Option<Place>,
    /// It has come to look.
    pub(super) observes: bool,
    /// Groups that it has sockets of.
    pub(super) opened: BTreeSet<usize>,
    pub(super) since: Instant,
    /// It had a place with a former broker, and has not told yet all that went with it.
    pub(super) restoring: bool,
    /// Page with its counters, once it has a place.
    pub(super) page: Option<PageFile>,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
}

impl Client {
    /// Takes a new connection.
    pub(super) fn new(socket: OwnedFd, now: Instant, nonce: u64) -> io::Result<Self> {
        let (pid, uid) = sys::peer_credentials(socket.as_fd())?;
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = number.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // In a namespace of its own it has no number here; then it is told apart by one of ours.
        let unseen = Process { pid: 0, start: nonce };
        Ok(Self {
            network: sys::network(socket.as_fd()),
            socket,
            pidfd,
            process: number.and_then(|_| state::process(pid)).unwrap_or(unseen),
            uid,
            trusted: uid == rustix::process::geteuid().as_raw(),
            name: String::new(),
            place: None,
            observes: false,
            opened: BTreeSet::new(),
            since: now,
            restoring: false,
            page: None,
            waiting: VecDeque::new(),
        })
    }

    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Record<ToBroker>, RecvError> {
        let record: Record<ToBroker> = wire::receive(self.socket.as_fd(), buffer, false)?;
        match record.lacks_fds {
            true => Err(RecvError::Malformed("more descriptors than the broker can take".into())),
            false => Ok(record),
        }
    }

    /// Answers, now or when the client has room.
    pub(super) fn reply(&mut self, seq: u64, reply: Reply, fds: Vec<OwnedFd>) -> io::Result<()> {
        let bytes = wire::encode(&ToClient::Reply { seq, reply }, &[])?;
        self.waiting.push_back((bytes, fds));
        self.flush()?;
        let bytes: usize = self.waiting.iter().map(|(bytes, _)| bytes.len()).sum();
        if self.waiting.len() > MAX_WAITING || bytes > MAX_WAITING_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "it does not take its answers",
            ));
        }
        Ok(())
    }

    /// Sends what waits. That the other side is gone is no error here: reading tells, after what it has said.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while let Some((bytes, fds)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match wire::send(self.socket.as_fd(), bytes, &fds, false) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    self.waiting.clear();
                    return Ok(());
                }
                Err(e) => return Err(e),
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Sends something that may get lost. False: it did.
    pub(super) fn try_send(&self, message: &ToClient, payload: &[u8]) -> bool {
        let bytes = wire::encode(message, payload);
        self.waiting.is_empty() && bytes.is_ok_and(|b| wire::send(self.socket.as_fd(), &b, &[], false).is_ok())
    }
}
