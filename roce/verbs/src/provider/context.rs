//! All devices of a loop.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use roce_bth::{LKey, RKey};

use super::{
    caps::DeviceCaps,
    connect::{ConnParams, RejectReason},
    error::VerbsError,
    event::Event,
    ids::{CmRef, CqId, DeviceIx, KeyId, MrId, PdId, QpId},
    keys::{GrantOf, Granted, KeyKind, Revoked},
    memory::Memory,
};
use crate::{
    attr::{AccessFlags, QpCaps},
    wc::Completion,
    wr::{PostError, RecvWr, SendWr},
};

/// Memory to register.
#[derive(Debug)]
pub struct Registration {
    /// The memory. It stays alive as long as the registration; several devices may register the same.
    pub memory: Arc<dyn Memory>,
    /// First byte of it.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// The address that is to stand for the first byte; `None`: its own.
    pub iova: Option<u64>,
    /// The rights.
    pub access: AccessFlags,
}

/// A registration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MrInfo {
    /// Its number.
    pub id: MrId,
    /// Address of the first byte, for SGEs and for peers.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// Local key.
    pub lkey: LKey,
    /// Remote key, valid if the rights name a remote one.
    pub rkey: RKey,
}

/// Settings of a new reliable connected queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpSpec {
    /// Its protection domain, and with it the device.
    pub pd: PdId,
    /// Completions of sends and receives.
    pub cq: CqId,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
}

/// All devices of a loop, with connection management: what RTRS is written against.
///
/// One thread calls it. Nothing here waits. Whether a posted work request leaves at once or with the turn of the loop is the
/// provider's business. A number that is nobody's (any more) gives [`VerbsError::Invalid`], or does nothing.
pub trait Provider {
    /// The devices. One that is gone keeps its place.
    fn devices(&self) -> &[DeviceCaps];

    /// Makes a protection domain.
    ///
    /// # Errors
    /// At the device's limit.
    fn alloc_pd(&mut self, device: DeviceIx) -> Result<PdId, VerbsError>;
    /// Frees a protection domain. What is in it has to go first.
    fn free_pd(&mut self, pd: PdId);
    /// Registers memory.
    ///
    /// # Errors
    /// At the device's limit, when the range is outside the memory, or when the system does not let so much be pinned.
    fn register(&mut self, pd: PdId, what: &Registration) -> Result<MrInfo, VerbsError>;
    /// Ends a registration: afterwards nothing touches the memory for its sake.
    fn deregister(&mut self, mr: MrId);
    /// Makes a key, closed until it is granted.
    ///
    /// # Errors
    /// At the device's limit, or when it has no such kind.
    fn alloc_key(&mut self, pd: PdId, kind: KeyKind) -> Result<KeyId, VerbsError>;
    /// Frees a key, and closes it.
    fn free_key(&mut self, key: KeyId);

    /// Makes a completion queue.
    ///
    /// # Errors
    /// At the device's limit.
    fn create_cq(&mut self, device: DeviceIx, entries: u32) -> Result<CqId, VerbsError>;
    /// Destroys a completion queue. Its queue pairs have to go first.
    fn destroy_cq(&mut self, cq: CqId);
    /// Makes a queue pair, in INIT: receives may be posted at once.
    ///
    /// # Errors
    /// At the device's limit.
    fn create_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError>;
    /// Destroys a queue pair; completions that are not polled go with it.
    fn destroy_qp(&mut self, qp: QpId);
    /// The queue pair's number as peers know it, for logs and captures.
    fn qpn(&self, qp: QpId) -> Option<roce_bth::Qpn>;

    /// Posts work requests in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Posts receives in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests that were accepted before it.
    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Opens memory to the peer. What the key opened before is closed at the latest when it holds.
    ///
    /// # Errors
    /// Like [`post_send`](Self::post_send); also when the range is outside the registration.
    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError>;
    /// Opens several pieces of memory as one range, which begins at the address of the first and has the rights of the first:
    /// of devices with [`scattered_keys`](DeviceCaps::scattered_keys), with a fast registration, and at once.
    ///
    /// # Errors
    /// Like [`grant`](Self::grant); also on other devices, with other keys, and without a piece.
    fn grant_list(&mut self, _qp: QpId, _key: KeyId, _pieces: &[GrantOf]) -> Result<Granted, PostError> {
        Err(PostError::Invalid("the device's keys open one piece of memory"))
    }
    /// Closes a key.
    ///
    /// # Errors
    /// Like [`post_send`](Self::post_send).
    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError>;
    /// Closes a key at once, whatever queue pair it was granted through: for the buffers of a connection that is gone.
    fn close_key(&mut self, key: KeyId);
    /// Moves a queue pair to error. Every posted work request completes, most of them flushed, then comes
    /// [`Event::Drained`].
    fn drain(&mut self, qp: QpId);
    /// Whether the peer used a key, an address or a right that it does not have, and the queue pair failed for it
    /// (`IBV_EVENT_QP_ACCESS_ERR`).
    fn access_violated(&self, qp: QpId) -> bool;

    /// Listens on a port of the RDMA_CM TCP port space; the address may be unspecified. Port 0: one that is free
    /// ([`cm_addrs`](Self::cm_addrs) tells which).
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    fn cm_listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError>;
    /// Begins a connection: looks for the way to the peer. Comes to [`CmKind::Resolved`](super::CmKind::Resolved).
    ///
    /// # Errors
    /// When the source address is not ours, or there is no way.
    fn cm_resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError>;
    /// Connects; the provider brings the queue pair up, which is of the resolved device.
    ///
    /// # Errors
    /// When the connection is not resolved or an argument is wrong.
    fn cm_connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError>;
    /// Accepts a connect request.
    ///
    /// # Errors
    /// When it is none that waits, or an argument is wrong.
    fn cm_accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError>;
    /// Refuses a connect request, with private data as it is to be on the wire. The connection is gone.
    ///
    /// # Errors
    /// When it is none that waits, or the data is too long.
    fn cm_reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError>;
    /// Ends a connection and tells the peer; the queue pair moves to error. A second call does nothing.
    fn cm_disconnect(&mut self, id: CmRef);
    /// Disconnects when the connection's network may be dead: DREQs also leave by the paths of other connections, which lead to
    /// it. Providers that can send from the connection's own address only do as [`cm_disconnect`](Self::cm_disconnect).
    fn cm_disconnect_by(&mut self, id: CmRef, _ways: &[CmRef]) {
        self.cm_disconnect(id);
    }
    /// Forgets a connection or listener: no more events of it come. A connect request that waits is refused.
    fn cm_destroy(&mut self, id: CmRef);
    /// Our address, and the peer's, which listeners lack. `None` of what is gone.
    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, Option<SocketAddr>)>;

    /// Appends at most `max` completions of all completion queues to `out`, those of a queue in their order, and returns how
    /// many.
    ///
    /// # Errors
    /// When a queue has overflowed.
    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<usize, VerbsError>;
    /// The next event. To be asked for when there are no completions: what was completed before an event comes before it.
    fn poll_event(&mut self) -> Option<Event>;
}
