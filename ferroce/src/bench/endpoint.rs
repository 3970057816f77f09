//! Interface between the measurements and the devices that they run on.

use std::{net::SocketAddr, time::Duration};

use roce::{Completion, DeviceStats, Mtu, NoAnswer, RejectReason, RemoteAddr, SendWr, Sge, WcStatus};

use super::wire::{Hello, credit_at, receives};
use crate::output::Failure;

/// Time in which a peer must answer a connect request.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Completions taken with one poll: some for each of 64 queue pairs, whose next messages are posted as lists.
pub(super) const POLL: usize = 256;
/// Lower half of the mark of receives; that of sends is the number of a message. The upper half is the connection's number.
pub(super) const RECEIVE: u32 = u32::MAX;

/// Returns the mark of a work request.
pub(super) fn mark(connection: u32, message: u32) -> u64 {
    u64::from(connection) << 32 | u64::from(message)
}

/// Returns the numbers of the connection and the message in a mark.
pub(super) fn parts(wr_id: u64) -> (u32, u32) {
    ((wr_id >> 32) as u32, wr_id as u32)
}

/// Memory and queues of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) memory: usize,
    pub(super) sends: u32,
    pub(super) receives: u32,
    /// Receives to post before the connection is accepted.
    pub(super) posted: u32,
    /// Whether the thread sleeps until there are completions.
    pub(super) sleeps: bool,
    /// Whether there are completions to poll for.
    pub(super) completes: bool,
}

impl Shape {
    /// Returns the shape of the active side of a connection.
    pub(super) fn active(hello: &Hello) -> Self {
        Self {
            memory: credit_at(hello.bytes) + size_of::<u64>(),
            sends: hello.depth + 1,
            receives: hello.depth + 1,
            posted: 0,
            sleeps: hello.role.sleeps(),
            completes: true,
        }
    }

    /// Returns the shape of the passive side of a connection.
    pub(super) fn passive(hello: &Hello) -> Self {
        let receives = receives(hello.depth);
        Self {
            memory: hello.bytes.max(1) as usize,
            sends: hello.depth.max(8),
            receives,
            posted: if hello.role.receives() { receives } else { 0 },
            sleeps: hello.role.sleeps(),
            completes: hello.role.completes(),
        }
    }
}

/// Change of the passive side's connections.
#[derive(Debug)]
pub(super) enum Event {
    /// Connect request with private data. The next call accepts or rejects it.
    Request(Vec<u8>),
    /// A connection has ended.
    Ended(u32),
}

/// A device and its connections, used by one thread. Connections have small numbers, from 0.
pub(super) trait Endpoint: Send {
    fn mtu(&self) -> Mtu;
    /// Returns the name of an RDMA device.
    fn name(&self) -> Option<&str>;
    fn stats(&mut self) -> DeviceStats;
    /// Returns whether [`poll`](Self::poll) can sleep.
    fn can_sleep(&self) -> bool;

    fn listen(&mut self, addr: SocketAddr) -> Result<(), Failure>;
    /// Connects, and waits until the peer has accepted. Fills in the memory of `hello`. Returns the peer's memory.
    fn connect(&mut self, peer: SocketAddr, hello: Hello) -> Result<RemoteAddr, Failure>;
    /// Waits for an event.
    fn event(&mut self, timeout: Duration) -> Result<Option<Event>, Failure>;
    /// Accepts the last connect request. Returns the connection's number.
    fn accept(&mut self, shape: &Shape) -> Result<u32, Failure>;
    /// Rejects the last connect request.
    fn reject(&mut self, private_data: &[u8]);
    fn close(&mut self, connection: u32);
    /// Closes all connections, and gives their peers time to notice.
    fn close_all(&mut self);

    /// Makes progress and appends completions. With `sleep` the thread sleeps until there are some, or for that time.
    fn poll(&mut self, out: &mut Vec<Completion>, sleep: Option<Duration>) -> Result<(), Failure>;
    fn post_send(&mut self, connection: u32, wrs: &[SendWr<'_>]) -> Result<(), Failure>;
    /// Posts receives into the whole memory.
    fn post_recv(&mut self, connection: u32, count: usize) -> Result<(), Failure>;
    /// Returns a gather element for the first bytes of the memory.
    fn sge(&self, connection: u32, len: u32) -> Sge;
    fn read(&self, connection: u32, at: usize, out: &mut [u8]) -> Result<(), Failure>;
    fn write(&self, connection: u32, at: usize, data: &[u8]) -> Result<(), Failure>;
}

/// Returns the error of an operation on a connection that does not exist.
pub(super) fn gone() -> Failure {
    Failure::failed("the connection ended")
}

/// Returns an error if a completion is one.
pub(super) fn check(completion: &Completion) -> Result<(), Failure> {
    let why = match completion.status {
        WcStatus::Success => return Ok(()),
        WcStatus::RetryExceeded => "the peer does not answer any more",
        WcStatus::FlushError => "the connection ended",
        _ => "the connection failed",
    };
    Err(Failure::failed(format!("{why} ({:?})", completion.status)))
}

/// Returns the error text of a rejected connect request.
pub(super) fn rejected(reason: RejectReason) -> String {
    match reason {
        RejectReason::INVALID_SERVICE_ID => "nothing listens there: start `ferroce bench --server` first".to_owned(),
        reason => format!("the peer refused: {reason}"),
    }
}

/// Returns the error text of an unanswered connect request.
pub(super) fn unreachable(why: NoAnswer) -> String {
    match why {
        NoAnswer::Timeout => {
            "no answer: is UDP port 4791 open on the way, and `ferroce bench --server` running there?".to_owned()
        }
        NoAnswer::PortUnreachable => format!("{why}: start `ferroce bench --server` first"),
        NoAnswer::Prohibited => why.to_string(),
    }
}
