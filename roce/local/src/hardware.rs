//! Interface between a fabric and the RDMA devices of the host.

use core::{any::Any, fmt, net::IpAddr};
use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use roce_verbs::{
    AsyncEvent, Completion, LKey, Mtu, Qpn, RKey, RecvWr, SendWr,
    provider::{
        CmKind, CmRef, ConnParams, CqId, DeviceCaps, GrantOf, Granted, KeyKind, QpSpec, Registration, RejectReason,
        Revoked, VerbsError,
    },
    wr::PostError,
};

/// Name of an RDMA device, and of a port of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceName {
    /// As in `rdma link`, without the port (`mlx5_0`, `rxe0`).
    pub name: String,
    /// Only the addresses of this port; `None`: those of all ports.
    pub port: Option<u8>,
}

/// Object of an RDMA device. The fabric's tables own it, and dropping it gives it back to the device.
///
/// A fabric passes its backend only objects that came from it. The methods panic for an object of another type.
pub struct Object(Box<dyn Any + Send>);

const OF_BACKEND: &str = "the type that the backend made";

impl Object {
    /// Wraps a backend's object.
    pub fn new<T: Any + Send>(object: T) -> Self {
        Self(Box::new(object))
    }

    /// Returns the object.
    pub fn get<T: Any>(&self) -> &T {
        self.0.downcast_ref().expect(OF_BACKEND)
    }

    /// Returns the object for changes.
    pub fn get_mut<T: Any>(&mut self) -> &mut T {
        self.0.downcast_mut().expect(OF_BACKEND)
    }

    /// Takes the object out.
    pub fn into_inner<T: Any>(self) -> T {
        *self.0.downcast().expect(OF_BACKEND)
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Object")
    }
}

/// New registration.
#[derive(Debug)]
pub struct Registered {
    /// The registration.
    pub object: Object,
    /// Address of its first byte, for SGEs and for peers.
    pub addr: u64,
    /// Local key.
    pub lkey: LKey,
    /// Remote key.
    pub rkey: RKey,
}

/// Result of a request to drain a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drain {
    /// A completion will finish it ([`Completed::drained`]), or one was requested before.
    Pending,
    /// Nothing was outstanding.
    Done,
    /// The device completes nothing any more: [`Hardware::abandon`] the queue pair.
    Dead,
}

/// Meaning of a completion for its queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Completed {
    /// It belongs to a work request of the user, not to one of the backend or of an earlier queue pair of the same number.
    pub is_users: bool,
    /// It finishes a drain.
    pub drained: bool,
    /// The peer used a key, address or right that it does not have.
    pub violated: bool,
}

/// Event of a backend.
#[derive(Debug)]
pub enum HardwareEvent {
    /// Event of a connection or listener, for [`Hardware::cm_event`].
    Cm {
        /// The connection or listener.
        id: CmRef,
        /// Details, known to the backend only.
        event: Object,
    },
    /// Connect request.
    Request {
        /// The listener.
        listener: CmRef,
        /// The device, by its index.
        device: usize,
        /// The connection, without a number until [`Hardware::number_request`]. Dropping it rejects the request.
        cm: Object,
        /// As in [`CmKind::ConnectRequest`].
        private_data: Vec<u8>,
        /// As in [`CmKind::ConnectRequest`].
        initiator_depth: u8,
        /// As in [`CmKind::ConnectRequest`].
        responder_resources: u8,
    },
    /// A completion queue has completions, and is not armed any more.
    Completions(CqId),
    /// Event of a device, by its index.
    Async(usize, AsyncEvent),
    /// A device is gone, by its index: objects on it are unusable, and must be destroyed before it can come back.
    Removed(usize),
    /// Devices or their addresses have changed, also that there are more.
    Changed,
}

/// RDMA devices of the host as a backend of a [`Fabric`](crate::Fabric).
///
/// The fabric owns all objects and their numbers, and passes to each call the objects it concerns: of one device, unless the call says
/// otherwise. The backend keeps devices, descriptors and what it reports, and no object. Devices are indices into
/// [`devices`](Self::devices).
///
/// The driver of the loop calls [`poll`](Self::poll) when [`descriptors`](Self::descriptors) are readable, through the fabric.
pub trait Hardware: fmt::Debug + Send {
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
    /// Closes devices that are gone, and of which no object is left: some drivers wait for that. Called before completions are polled.
    fn close_removed(&mut self);

    /// Returns the descriptors to poll for reading.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Reads the descriptors without waiting; [`next_event`](Self::next_event) returns the events. Returns whether there was anything.
    ///
    /// # Errors
    /// If the system fails.
    fn poll(&mut self) -> Result<bool, VerbsError>;
    /// Returns the next event.
    fn next_event(&mut self) -> Option<HardwareEvent>;

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// At the device's limit, and if the device is gone.
    fn alloc_pd(&mut self, device: usize) -> Result<Object, VerbsError>;
    /// Registers memory.
    ///
    /// # Errors
    /// As [`Provider::register`](roce_verbs::provider::Provider::register).
    fn register(&mut self, pd: &Object, what: &Registration) -> Result<Registered, VerbsError>;
    /// Allocates a memory window, closed until it is granted.
    ///
    /// # Errors
    /// At the device's limit, and if it has no such kind.
    fn alloc_key(&mut self, pd: &Object, kind: KeyKind) -> Result<Object, VerbsError>;
    /// Creates a completion queue, whose events carry the number.
    ///
    /// # Errors
    /// At the device's limit.
    fn create_cq(&mut self, device: usize, entries: u32, id: CqId) -> Result<Object, VerbsError>;
    /// Creates a queue pair in state INIT.
    ///
    /// # Errors
    /// At the device's limit.
    fn create_qp(&mut self, pd: &Object, cq: &Object, spec: &QpSpec) -> Result<(Object, Qpn), VerbsError>;

    /// Posts send work requests in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests accepted before it.
    fn post_send(&mut self, qp: &mut Object, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Posts receive work requests in order; stops at the first that is refused.
    ///
    /// # Errors
    /// The refusal, with the number of requests accepted before it.
    fn post_recv(&mut self, qp: &mut Object, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)>;
    /// Opens a range of a registration through a window. The three objects may be of different devices, which is refused.
    ///
    /// # Errors
    /// As [`Provider::grant`](roce_verbs::provider::Provider::grant).
    fn grant(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        mr: &Object,
        grant: &GrantOf,
        wr_id: u64,
    ) -> Result<Granted, PostError>;
    /// Closes a window by a work request. `mr`: the registration it was bound to last.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    fn revoke(
        &mut self,
        qp: &mut Object,
        key: &mut Object,
        mr: Option<&Object>,
        wr_id: u64,
    ) -> Result<Revoked, PostError>;
    /// Notes that a SEND with invalidate of the peer has closed a type 2 window.
    fn invalidated(&mut self, key: &mut Object);
    /// Closes a window at once, by replacing it with a new one.
    fn replace_key(&mut self, key: &mut Object);

    /// Moves a queue pair to error, so that every work request completes.
    fn drain(&mut self, qp: &mut Object) -> Drain;
    /// Returns whether a drain is pending.
    fn is_draining(&self, qp: &Object) -> bool;
    /// Destroys a queue pair whose device completes nothing any more; its drain is done with that. Returns `wr_id` of the outstanding
    /// work requests.
    fn abandon(&mut self, qp: &mut Object) -> Vec<u64>;
    /// Appends at most `max` completions of a queue, with the `wr_id` of the device. Returns the number of completions.
    ///
    /// # Errors
    /// If the queue has overflowed.
    fn poll_cq(&mut self, cq: &mut Object, out: &mut Vec<Completion>, max: usize) -> Result<usize, VerbsError>;
    /// Processes a completion of a queue pair, and replaces its `wr_id` by the user's.
    fn complete(&mut self, qp: &mut Object, completion: &mut Completion) -> Completed;
    /// Requests an event ([`HardwareEvent::Completions`]) for the next completion, unless that is pending.
    ///
    /// # Errors
    /// If the queue has failed.
    fn arm(&mut self, cq: &mut Object) -> Result<(), VerbsError>;
    /// Notes that the event of a completion queue has come.
    fn disarm(&mut self, cq: &mut Object);

    /// Listens at an address; port 0 is any free port. Returns the address with the port.
    ///
    /// # Errors
    /// If the port is taken, or the address is no device's.
    fn listen(&mut self, addr: SocketAddr, backlog: u32, id: CmRef) -> Result<(Object, SocketAddr), VerbsError>;
    /// Starts listening again if the listener's device was lost and is back.
    fn listen_again(&mut self, listener: &mut Object);
    /// Detaches a listener from a device that is gone.
    fn lose_listener(&mut self, listener: &mut Object, device: usize);
    /// Starts to resolve a peer's address.
    ///
    /// # Errors
    /// If the source address is no device's, or there is no route.
    fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr, id: CmRef) -> Result<Object, VerbsError>;
    /// Gives the connection of a request the number that its events carry.
    fn number_request(&mut self, cm: &mut Object, id: CmRef);
    /// Connects a resolved connection.
    ///
    /// # Errors
    /// If it is not resolved, or an argument is wrong.
    fn connect(&mut self, cm: &mut Object, qp: &Object, params: &ConnParams) -> Result<(), VerbsError>;
    /// Accepts a connect request.
    ///
    /// # Errors
    /// If it is none, or an argument is wrong.
    fn accept(&mut self, cm: &mut Object, qp: &mut Object, params: &ConnParams) -> Result<(), VerbsError>;
    /// Rejects a connect request.
    ///
    /// # Errors
    /// If it is none, or the data is too long.
    fn reject(&mut self, cm: &mut Object, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError>;
    /// Disconnects; the queue pair moves to error.
    fn disconnect(&mut self, cm: &mut Object, qp: Option<&mut Object>);
    /// Processes an event of a connection or listener. Returns the event for the user, with the backend's index of a device.
    fn cm_event(&mut self, cm: &mut Object, qp: Option<&mut Object>, event: Object) -> Option<CmKind>;
    /// Notes that a packet has arrived on a queue pair whose connection the peer has not confirmed: the RTU may be lost.
    fn communication_established(&mut self, cm: &mut Object);
    /// Returns the local and the remote address.
    fn cm_addrs(&self, cm: &Object) -> (SocketAddr, Option<SocketAddr>);
}
