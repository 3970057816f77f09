//! Interface between a fabric and its backends: software ports, and the RDMA devices of the host.

use core::{fmt, net::IpAddr};
use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use roce_verbs::{
    Completion, Mtu, Qpn, RecvWr, SendWr,
    provider::{
        CmRef, ConnParams, CqId, DeviceCaps, Event, GrantOf, Granted, KeyId, KeyKind, MrId, MrInfo, PdId, QpId, QpSpec,
        Registration, RejectReason, Revoked, VerbsError,
    },
    wr::PostError,
};

/// Verbs of a backend.
///
/// The fabric gives all numbers. A call that makes an object has its number as the last argument, and a call that fails has made
/// nothing. A call concerns objects of this backend only, which exist and are of one device. Methods have the errors of their
/// counterparts in [`Provider`](roce_verbs::provider::Provider). Devices are indices of the backend.
#[allow(clippy::missing_errors_doc, reason = "they are those of `Provider`")]
pub trait Backend: Keys + Connections {
    /// Allocates a protection domain.
    fn alloc_pd(&mut self, device: usize, id: PdId) -> Result<(), VerbsError>;
    /// Frees a protection domain.
    fn free_pd(&mut self, pd: PdId);
    /// Registers memory.
    fn register(&mut self, pd: PdId, what: &Registration, id: MrId) -> Result<MrInfo, VerbsError>;
    /// Ends a registration, and closes its windows.
    fn deregister(&mut self, mr: MrId);

    /// Creates a completion queue.
    fn create_cq(&mut self, device: usize, entries: u32, id: CqId) -> Result<(), VerbsError>;
    /// Destroys a completion queue.
    fn destroy_cq(&mut self, cq: CqId);
    /// Creates a queue pair in state INIT.
    fn create_qp(&mut self, spec: &QpSpec, id: QpId) -> Result<(), VerbsError>;
    /// Destroys a queue pair, and closes what was opened for it alone.
    fn destroy_qp(&mut self, qp: QpId);
    /// Returns the number that peers know a queue pair by.
    fn qpn(&self, qp: QpId) -> Option<Qpn>;
    /// Returns whether the peer used a key, address or right that it does not have.
    fn access_violated(&self, qp: QpId) -> bool;
    /// Posts send work requests in order; stops at the first that is refused.
    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Posts receive work requests in order; stops at the first that is refused.
    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Moves a queue pair to error. [`Event::Drained`] follows the last completion.
    fn drain(&mut self, qp: QpId);
    /// Appends at most `max` completions of all queues.
    fn poll_completions(&mut self, out: &mut Vec<(QpId, Completion)>, max: usize) -> Result<(), VerbsError>;
}

/// Remote keys of a backend.
#[allow(clippy::missing_errors_doc, reason = "they are those of `Provider`")]
pub trait Keys {
    /// Allocates a key, closed until it is granted.
    fn alloc_key(&mut self, pd: PdId, kind: KeyKind, id: KeyId) -> Result<(), VerbsError>;
    /// Frees a key, and closes it.
    fn free_key(&mut self, key: KeyId);
    /// Opens a range of a registration.
    fn grant(&mut self, qp: QpId, key: KeyId, grant: &GrantOf, wr_id: u64) -> Result<Granted, PostError>;
    /// Closes a key through a queue pair.
    fn revoke(&mut self, qp: QpId, key: KeyId, wr_id: u64) -> Result<Revoked, PostError>;
    /// Closes a key at once, whatever has become of its queue pair.
    fn close_key(&mut self, key: KeyId);
}

/// Connections of a backend.
#[allow(clippy::missing_errors_doc, reason = "they are those of `Provider`")]
pub trait Connections {
    /// Connects a resolved connection.
    fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError>;
    /// Accepts a connect request.
    fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError>;
    /// Rejects a connect request.
    fn reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError>;
    /// Disconnects; the queue pair moves to error.
    fn disconnect(&mut self, id: CmRef);
    /// Forgets a connection or listener. Does nothing for one of another backend.
    fn destroy_cm(&mut self, id: CmRef);
    /// Returns the local and the remote address of a connection.
    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, SocketAddr)>;
}

/// Source of numbers for connect requests; `None` if none is left.
pub type NewCm<'a> = &'a mut dyn FnMut() -> Option<CmRef>;

/// RDMA devices of the host as a backend of a [`Fabric`](crate::fabric::Fabric).
///
/// The driver of the loop calls [`poll`](Self::poll) when [`descriptors`](Self::descriptors) are readable, through the fabric.
pub trait Hardware: Backend + fmt::Debug + Send {
    /// Returns the capabilities of each device. A device that is gone keeps its index, without addresses.
    fn devices(&self) -> &[DeviceCaps];
    /// Returns the device that has an address.
    fn owner(&self, addr: IpAddr) -> Option<usize> {
        let addr = addr.to_canonical();
        self.devices().iter().position(|caps| caps.addrs.contains(&addr))
    }
    /// Returns the addresses of all devices.
    fn addrs(&self) -> Vec<IpAddr> {
        let devices = self.devices().iter();
        devices.flat_map(|caps| caps.addrs.iter().copied()).collect()
    }
    /// Returns the largest path MTU of connections from an address.
    ///
    /// # Errors
    /// If no device has the address, or the device does not report it.
    fn mtu(&self, addr: IpAddr) -> io::Result<Mtu>;

    /// Returns the descriptors to poll for reading.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Reads the descriptors without waiting. Returns whether there was anything.
    ///
    /// # Errors
    /// If the system fails.
    fn poll(&mut self, new: NewCm<'_>) -> Result<bool, VerbsError>;
    /// Returns the next event, with the backend's index of a device.
    fn next_event(&mut self) -> Option<Event>;
    /// Requests that the descriptors report the next completion.
    ///
    /// # Errors
    /// If a completion queue has failed.
    fn arm(&mut self) -> Result<(), VerbsError>;

    /// Listens at an address; port 0 is any free port. Returns the address with the port.
    ///
    /// # Errors
    /// If the port is taken, or the address is no device's.
    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<SocketAddr, VerbsError>;
    /// Starts to resolve a peer's address.
    ///
    /// # Errors
    /// If the source address is no device's, or there is no route.
    fn resolve(&mut self, src: IpAddr, dst: SocketAddr, id: CmRef) -> Result<(), VerbsError>;
}

/// Name of an RDMA device, and of a port of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceName {
    /// As in `rdma link`, without the port (`mlx5_0`, `rxe0`).
    pub name: String,
    /// Only the addresses of this port; `None`: those of all ports.
    pub port: Option<u8>,
}
