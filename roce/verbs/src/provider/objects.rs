//! Verbs objects as handles that threads share: the shape that programs know from libibverbs.
//!
//! Connection management and [`RevocableRegion`] are abstract, because hardware in userspace does them otherwise.
//!
//! All handles are cheap to clone or shared by reference, may be used from any thread, and release their object when
//! the last one goes.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::os::fd::BorrowedFd;

use roce_bth::{LKey, Qpn, RKey};

use super::{ConnParams, NoAnswer, RejectReason, VerbsError};
use crate::{
    attr::{DeviceLimits, QpAttr, QpCaps},
    wc::Completion,
    wr::{AccessFlags, PostError, RecvWr, SendFlags, SendWr},
};

/// Offsets outside a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} bytes at {offset} are outside a region of {size} bytes")]
pub struct RangeError {
    /// First byte asked for.
    pub offset: usize,
    /// Bytes asked for.
    pub len: usize,
    /// Bytes of the region.
    pub size: usize,
}

/// Owned registered memory, page-aligned and zeroed. A peer may change it at any time, so it is only ever copied.
pub trait MemoryRegion: Send + Sync + 'static {
    /// Address of the first byte for SGEs and for peers.
    fn addr(&self) -> u64;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Local key.
    fn lkey(&self) -> LKey;
    /// Remote key, valid if the access flags name a remote right.
    fn rkey(&self) -> RKey;
    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range is outside the region; nothing is copied.
    fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RangeError>;
    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range is outside the region; nothing is copied.
    fn write(&self, offset: usize, data: &[u8]) -> Result<(), RangeError>;
    /// First byte, for system calls that read or write the memory (`pread`, `pwrite`, io_uring). Valid while the
    /// region lives; never make a reference from it.
    fn as_ptr(&self) -> *mut u8;
}

/// A remote key that can be taken back and renewed in the order of a send queue. What of it a renewal can change (the low
/// byte; the rest is the object's index) is to be random and never what it was.
pub trait RevocableRegion: Send + Sync + 'static {
    /// The current key.
    fn rkey(&self) -> RKey;
}

/// Memory that a revocable region shall open.
#[derive(Debug)]
pub struct Grant<'a, M> {
    /// The memory behind it.
    pub region: &'a M,
    /// First byte within it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// The rights.
    pub access: AccessFlags,
}

/// A completion queue.
pub trait CompletionQueue: Clone + Send + Sync + 'static {
    /// Appends at most `max` completions to `out`, oldest first, and returns how many. On an empty queue the caller's
    /// thread advances the transport.
    ///
    /// # Errors
    /// When the queue has overflowed.
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError>;
    /// Asks for one event on the channel at the next completion (or the next solicited one). Completions that came
    /// before are not reported: poll once more after arming.
    ///
    /// # Errors
    /// When the queue has no channel.
    fn arm(&self, solicited_only: bool) -> Result<(), VerbsError>;
}

/// Channel for completion events. Readable (level-triggered) while events wait.
pub trait CompletionChannel: Clone + Send + Sync + 'static {
    /// For poll, epoll and mio.
    fn as_fd(&self) -> BorrowedFd<'_>;
    /// Takes one event: the cookie of the completion queue. `None` when the time runs out (`None` waits for ever,
    /// zero does not wait).
    ///
    /// # Errors
    /// When waiting fails or the device is closed.
    fn wait(&self, timeout: Option<Duration>) -> Result<Option<u64>, VerbsError>;
}

/// Settings of a new queue pair.
#[derive(Debug)]
pub struct QpInit<'a, Cq> {
    /// Completions of sends.
    pub send_cq: &'a Cq,
    /// Completions of receives.
    pub recv_cq: &'a Cq,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
}

/// A reliable connected queue pair.
pub trait QueuePair: Clone + Send + Sync + 'static {
    /// The provider's memory regions.
    type Mr: MemoryRegion;
    /// The provider's revocable regions.
    type Revocable: RevocableRegion;

    /// Its number.
    fn qpn(&self) -> Qpn;
    /// Posts work requests in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Posts receives in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    fn post_recv(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Queues the renewal of a revocable region: peers may use the returned key once what was posted before is
    /// executed. The former key ends at the latest then.
    ///
    /// # Errors
    /// Like [`QueuePair::post_send`]; also when the range is outside the region.
    fn post_grant(
        &self,
        region: &Self::Revocable,
        grant: &Grant<'_, Self::Mr>,
        wr_id: u64,
        flags: SendFlags,
    ) -> Result<RKey, PostError>;
    /// Queues the end of the region's current key.
    ///
    /// # Errors
    /// Like [`QueuePair::post_send`].
    fn post_revoke(&self, region: &Self::Revocable, wr_id: u64, flags: SendFlags) -> Result<(), PostError>;
    /// Changes attributes. Connections made through [`VerbsDevice::connect`] and accept are moved to RTS by the provider.
    ///
    /// # Errors
    /// When the transition or an attribute is not legal.
    fn modify(&self, attr: &QpAttr) -> Result<(), VerbsError>;
    /// Current attributes.
    ///
    /// # Errors
    /// When the queue pair is gone.
    fn query(&self) -> Result<QpAttr, VerbsError>;
}

/// Event of a connection.
#[derive(Clone, Debug)]
pub enum CmEventKind<Id> {
    /// On a listener: somebody wants to connect. Accept or reject the new id.
    ConnectRequest {
        /// The half-open connection.
        id: Id,
        /// The peer's private data, without the RDMA_CM header (its bytes up to 56).
        private_data: Vec<u8>,
        /// READs and atomics that the peer will answer at a time (our `initiator_depth` at most).
        initiator_depth: u8,
        /// READs and atomics that the peer will send at a time (our `responder_resources` at least).
        responder_resources: u8,
    },
    /// The connection stands. On the active side with the accept's private data.
    Established {
        /// Private data of the accept.
        private_data: Vec<u8>,
    },
    /// The peer refused.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// Its private data.
        private_data: Vec<u8>,
    },
    /// No answer.
    Unreachable(NoAnswer),
    /// Local error; the text names it.
    ConnectError(String),
    /// The connection is over; the queue pair is in error and flushes.
    Disconnected,
    /// The queue pair's number may be reused.
    TimewaitExit,
}

/// An event with the connection that it belongs to.
#[derive(Clone, Debug)]
pub struct CmEvent<Id> {
    /// The connection or listener.
    pub id: Id,
    /// Kind of event.
    pub kind: CmEventKind<Id>,
}

/// A connection or a listener (`rdma_cm_id`).
pub trait CmId: Clone + core::fmt::Debug + Send + Sync + 'static {
    /// The provider's queue pairs.
    type Qp: QueuePair;

    /// A number that is unique within the provider.
    fn handle(&self) -> u64;
    /// Our address.
    fn local_addr(&self) -> SocketAddr;
    /// The peer's address; a listener has none.
    fn peer_addr(&self) -> Option<SocketAddr>;
    /// Accepts a connect request: brings the queue pair up to RTS and answers.
    ///
    /// # Errors
    /// When the id is not a waiting request or the queue pair can't be used.
    fn accept(&self, qp: &Self::Qp, params: ConnParams) -> Result<(), VerbsError>;
    /// Refuses a connect request.
    ///
    /// # Errors
    /// When the id is not a waiting request or the data is too long.
    fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError>;
    /// Ends the connection, moves its queue pair to error and tells the peer. A second call does nothing.
    ///
    /// # Errors
    /// When the device is closed.
    fn disconnect(&self) -> Result<(), VerbsError>;
}

/// Channel for connection events.
pub trait CmChannel: Clone + Send + Sync + 'static {
    /// The provider's connections.
    type Id: CmId;

    /// For poll, epoll and mio: readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_>;
    /// Takes one event; `None` when the time runs out (`None` waits for ever, zero does not wait).
    ///
    /// # Errors
    /// When waiting fails or the device is closed.
    fn wait(&self, timeout: Option<Duration>) -> Result<Option<CmEvent<Self::Id>>, VerbsError>;
}

/// A verbs device with connection management.
pub trait VerbsDevice: Clone + Send + Sync + 'static {
    /// Protection domains.
    type Pd: Clone + Send + Sync + 'static;
    /// Completion channels.
    type Channel: CompletionChannel;
    /// Completion queues.
    type Cq: CompletionQueue;
    /// Memory regions.
    type Mr: MemoryRegion;
    /// Revocable regions.
    type Revocable: RevocableRegion;
    /// Queue pairs.
    type Qp: QueuePair<Mr = Self::Mr, Revocable = Self::Revocable>;
    /// Connections.
    type CmId: CmId<Qp = Self::Qp>;
    /// Connection event channels.
    type CmChannel: CmChannel<Id = Self::CmId>;

    /// Returns the device's limits.
    fn limits(&self) -> DeviceLimits;
    /// Makes a protection domain.
    ///
    /// # Errors
    /// At the device's limit.
    fn alloc_pd(&self) -> Result<Self::Pd, VerbsError>;
    /// Makes a completion channel.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    fn create_channel(&self) -> Result<Self::Channel, VerbsError>;
    /// Makes a completion queue for `entries` completions; its events carry `cookie`.
    ///
    /// # Errors
    /// At the device's limit.
    fn create_cq(&self, entries: u32, channel: Option<&Self::Channel>, cookie: u64) -> Result<Self::Cq, VerbsError>;
    /// Allocates and registers memory.
    ///
    /// # Errors
    /// At the device's limit, or without memory.
    fn alloc_mr(&self, pd: &Self::Pd, len: usize, access: AccessFlags) -> Result<Self::Mr, VerbsError>;
    /// Makes a revocable region, closed until its first grant.
    ///
    /// # Errors
    /// At the device's limit.
    fn alloc_revocable(&self, pd: &Self::Pd) -> Result<Self::Revocable, VerbsError>;
    /// Makes a reliable connected queue pair, in INIT: receives may be posted at once (`rdma_create_qp`).
    ///
    /// # Errors
    /// At the device's limit.
    fn create_qp(&self, pd: &Self::Pd, init: &QpInit<'_, Self::Cq>) -> Result<Self::Qp, VerbsError>;
    /// Makes a connection event channel.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    fn create_cm_channel(&self) -> Result<Self::CmChannel, VerbsError>;
    /// Listens on a port of the RDMA_CM TCP port space; the address may be unspecified. Dropping the id ends it.
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    fn listen(&self, channel: &Self::CmChannel, addr: SocketAddr, backlog: u32) -> Result<Self::CmId, VerbsError>;
    /// Starts to connect. The outcome is an event; the queue pair is brought up by the provider.
    ///
    /// # Errors
    /// When there is no way to the peer or an argument is wrong.
    fn connect(
        &self,
        channel: &Self::CmChannel,
        src: Option<IpAddr>,
        dst: SocketAddr,
        qp: &Self::Qp,
        params: ConnParams,
    ) -> Result<Self::CmId, VerbsError>;
}
