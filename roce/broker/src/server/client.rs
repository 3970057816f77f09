//! One connection of the broker's socket.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use roce_port::RxMeta;
use roce_verbs::Instant;
use rustix::{
    event::PollFlags,
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::{slots::Process, state};
use crate::{
    page::PageFile,
    proto::{Connection, Place, Reply, Request, ToBroker, ToClient},
    sys,
    wire::{self, Outbox, Record, RecvError},
};

/// Largest number of answers that a client has not taken, and of their bytes. With more it is given up.
pub(super) const MAX_ANSWERS: usize = 4096;
pub(crate) const MAX_ANSWER_BYTES: usize = 2 << 20;
/// Time within which a connection must send something.
pub(super) const FIRST_WORD: Duration = Duration::from_secs(10);

/// Request that waits: for members of a former broker, or for processes to leave whose end is not known yet.
pub(super) struct Waiting {
    pub(super) seq: u64,
    pub(super) request: Request,
    /// Rounds until the last attempt to get what another process has. `None`: members of a former broker are awaited.
    pub(super) last_in: Option<u32>,
}

/// Connection of a member, or of a process that may become one.
pub(super) struct Client {
    pub(super) socket: OwnedFd,
    /// Readable when the process has ended, even if a child of it holds the connection.
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) process: Process,
    pub(super) uid: u32,
    /// Runs as the broker's own user.
    pub(super) trusted: bool,
    /// Network namespace of the process that connected.
    pub(super) network: Option<u64>,
    pub(super) name: String,
    pub(super) place: Option<Place>,
    /// It asks for statistics only.
    pub(super) observes: bool,
    /// Groups that it has sockets of.
    pub(super) opened: BTreeSet<usize>,
    pub(super) since: Instant,
    /// It had a place with a former broker, and has not reported yet all that went with it.
    pub(super) restoring: bool,
    /// Page with its counters, once it has a place.
    pub(super) page: Option<PageFile>,
    /// Connections that it has reported as established, by its communication IDs.
    pub(super) connections: HashMap<u32, Connection>,
    pub(super) waiting: Vec<Waiting>,
    outbox: Outbox,
}

impl Client {
    /// Takes a new connection.
    pub(super) fn new(socket: OwnedFd, now: Instant, nonce: u64) -> io::Result<Self> {
        let (pid, uid) = sys::peer_credentials(socket.as_fd())?;
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = number.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        // In a namespace of its own it has no number here; then it is told apart by a number of ours.
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
            connections: HashMap::new(),
            waiting: Vec::new(),
            outbox: Outbox::default(),
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
        let record = wire::encode(&ToClient::Reply { seq, reply }, &[])?;
        self.outbox.push(record, fds);
        self.flush()?;
        match self.outbox.len() > MAX_ANSWERS || self.outbox.bytes() > MAX_ANSWER_BYTES {
            true => Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "it does not take its answers",
            )),
            false => Ok(()),
        }
    }

    /// Returns the events to wait for.
    pub(super) fn interest(&self) -> PollFlags {
        match self.outbox.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        }
    }

    /// Sends the answers that wait.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(self.socket.as_fd())
    }

    /// Forwards a packet. Returns false if it is lost.
    pub(super) fn forward(&self, meta: RxMeta, bytes: &[u8]) -> bool {
        self.outbox
            .try_send(self.socket.as_fd(), &ToClient::Datagram(meta), bytes)
    }
}
