//! Connections: the connection manager of a device, like librdmacm's.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use roce_port::{
    AcceptArgs, CmEventKind, ConnId, ConnectArgs, ListenArgs, Port, PortSpace, ResolveArgs, ServiceId, SidrAnswer,
};
use roce_verbs::{
    Instant,
    provider::{ConnParams, RejectReason, VerbsError},
};

use crate::{
    config::Services,
    cq::wait,
    device::{Device, DeviceInner},
    error::io_error,
    qp::Qp,
    queue::EventQueue,
    router::{CmQueue, Key, Taken},
    sync::Handle,
};

/// Event of a connection, resolution or listener (`rdma_cm_event`).
#[derive(Clone, Debug)]
pub struct CmEvent {
    /// The connection or resolution. Of a request: the new one, to be accepted or rejected.
    pub id: Id,
    /// [`Id::handle`] of the listener that got a request.
    pub listener: Option<u64>,
    /// Event. The numbers in it have no meaning here; its addresses do.
    pub kind: CmEventKind,
}

/// A connection, resolution or listener (`rdma_cm_id`).
///
/// It ends with its last clone: a listener stops listening, a connection is disconnected, a waiting request is rejected. A queue pair
/// that was connected by [`Device::connect`] or [`Id::accept`] keeps a clone: [`disconnect`](Id::disconnect) it, or drop both.
#[derive(Clone, Debug)]
pub struct Id(pub(crate) Arc<IdInner>);

#[derive(Debug)]
pub(crate) struct IdInner {
    key: Key,
    device: Arc<DeviceInner>,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    /// Service of a listener.
    _claim: Option<Claim>,
}

impl IdInner {
    /// Creates the handle of a connection or resolution.
    pub(crate) fn connection(
        device: &Arc<DeviceInner>,
        conn: ConnId,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Arc<Self> {
        Arc::new(Self {
            key: Key::Conn(conn),
            device: device.clone(),
            local,
            remote: Some(remote),
            _claim: None,
        })
    }
}

impl Drop for IdInner {
    fn drop(&mut self) {
        let Ok(engines) = self.device.live() else { return };
        self.device.router.remove(self.key);
        if let Key::Conn(conn) = self.key {
            engines.fail_qp_of(conn);
        }
        // A closed device has no connections.
        let _ = engines.first().with(|port, now| match self.key {
            Key::Listener(id) => port.cm_unlisten(id),
            Key::Conn(id) => port.cm_destroy(now, id),
        });
    }
}

impl Id {
    /// Returns a number that is unique within the device.
    pub fn handle(&self) -> u64 {
        self.0.key.number()
    }

    /// Returns our address.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    /// Returns the peer's address; a listener has none.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.remote
    }

    fn conn(&self) -> Result<ConnId, VerbsError> {
        match self.0.key {
            Key::Conn(conn) => Ok(conn),
            Key::Listener(_) => Err(VerbsError::State("a listener is not a connection".into())),
        }
    }

    fn with<R>(&self, call: impl FnOnce(&mut Port, Instant, ConnId) -> Result<R, VerbsError>) -> Result<R, VerbsError> {
        let conn = self.conn()?;
        self.0.device.engines.first().with(|port, now| call(port, now, conn))?
    }

    /// Accepts a connect request: moves the queue pair to RTS and answers. [`CmEventKind::Established`] follows.
    ///
    /// # Errors
    /// If the id is not a waiting request, or the queue pair can't be used.
    pub fn accept(&self, qp: &Qp, params: ConnParams) -> Result<(), VerbsError> {
        self.0.device.check(qp.device(), "queue pair")?;
        self.0.device.engines.accept(self.conn()?, qp.place(), params)?;
        qp.keep_connection(self.0.clone());
        Ok(())
    }

    /// Accepts a connect request with a queue pair that the program has moved to RTS. [`CmEventKind::Established`] follows.
    ///
    /// # Errors
    /// If the id is not a waiting request, or the private data is too long.
    pub fn accept_with(&self, args: &AcceptArgs) -> Result<(), VerbsError> {
        let mut args = args.clone();
        args.qp.src_port = self.0.device.engines.promise_source(args.qp.qpn);
        self.0.device.engines.agree(self.conn()?, Some(args.qp.qpn));
        self.with(|port, now, conn| port.cm_accept(now, conn, &args))
    }

    /// Completes a connection after [`CmEventKind::Reply`]: the program has moved the queue pair to RTS.
    ///
    /// # Errors
    /// If there is no reply, or the connection has ended.
    pub fn establish(&self) -> Result<(), VerbsError> {
        self.0.device.engines.agree(self.conn()?, None);
        self.with(|port, now, conn| port.cm_establish(now, conn))
    }

    /// Answers [`CmEventKind::SidrRequest`].
    ///
    /// # Errors
    /// If the id is not a waiting request, or the private data is too long.
    pub fn answer(&self, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_answer(now, conn, answer))
    }

    /// Rejects a connect request.
    ///
    /// # Errors
    /// If the id is not a waiting request, or the data is too long.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.reject_with(RejectReason::CONSUMER, private_data)
    }

    /// Rejects a connect request, or a reply, with a reason.
    ///
    /// # Errors
    /// If there is neither, or the data is too long.
    pub fn reject_with(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        self.with(|port, now, conn| port.cm_reject(now, conn, reason, private_data))
    }

    /// Takes an unanswered request out of its listener's backlog, as the kernel does when a program fetches the event.
    ///
    /// # Errors
    /// If the device is closed.
    pub fn leave_backlog(&self) -> Result<(), VerbsError> {
        self.with(|port, _, conn| {
            port.cm_leave_backlog(conn);
            Ok(())
        })
    }

    /// Treats a packet received on the queue pair as the RTU (`rdma_notify`, "communication established").
    ///
    /// # Errors
    /// If the device is closed.
    pub fn notify(&self) -> Result<(), VerbsError> {
        self.with(|port, now, conn| {
            port.cm_notify(now, conn);
            Ok(())
        })
    }

    /// Ends the connection and informs the peer; moves the queue pair of [`Device::connect`] or [`Id::accept`] to error. A second
    /// call does nothing.
    ///
    /// # Errors
    /// If the device is closed.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        self.0.device.engines.fail_qp_of(self.conn()?);
        self.with(|port, now, conn| {
            port.cm_disconnect(now, conn);
            Ok(())
        })
    }
}

/// Returns the service ID of a port in the RDMA_CM TCP port space.
pub(crate) const fn service_id(port: u16) -> u64 {
    ServiceId::new(PortSpace::Tcp, port).0
}

/// Returns an address in canonical form; `None` if it is unspecified.
fn specific(ip: IpAddr) -> Option<IpAddr> {
    Some(ip.to_canonical()).filter(|ip| !ip.is_unspecified())
}

/// Service that this process has among those that share the address, until the drop, which is without a lock of the device.
#[derive(Debug)]
struct Claim {
    service: ServiceId,
    addr: Option<IpAddr>,
    device: Arc<DeviceInner>,
    release: fn(&(dyn Services + 'static), u64, Option<IpAddr>),
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let (Some(services), Ok(_)) = (&self.device.config.services, self.device.live()) {
            (self.release)(&**services, self.service.0, self.addr);
        }
    }
}

/// Port kept for this process among those that share the address. It is free again with the drop.
#[derive(Debug)]
pub struct PortHold(Claim);

impl PortHold {
    /// Returns the port; 0 if any was requested and no other process shares the address: then every one is free.
    pub const fn port(&self) -> u16 {
        self.0.service.0 as u16
    }
}

/// Event channel of connections (`rdma_event_channel`). Cheap to clone.
///
/// The channel's methods are for programs that move their queue pairs themselves, like librdmacm's, and for datagram services (SIDR).
/// [`Device::listen`], [`Device::connect`] and [`Id::accept`] do that for the program.
#[derive(Clone, Debug)]
pub struct EventChannel(Arc<ChannelInner>);

#[derive(Debug)]
struct ChannelInner {
    queue: Arc<CmQueue>,
    device: Arc<DeviceInner>,
}

/// Rejects the requests that the program has not taken.
impl Drop for ChannelInner {
    fn drop(&mut self) {
        if self.device.live().is_err() {
            return;
        }
        self.queue.close();
        while let Ok(Some(event)) = self.queue.pop() {
            if let Some((_, conn)) = event.request() {
                end_orphan(&self.device, conn);
            }
        }
    }
}

/// Ends a connection without handle.
fn end_orphan(device: &DeviceInner, conn: ConnId) {
    device.router.remove(Key::Conn(conn));
    let _ = device.engines.first().with(|port, now| port.cm_destroy(now, conn));
}

impl EventChannel {
    /// Returns the descriptor, for poll, epoll and mio. It is readable while events wait.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(&*self.0.queue)
    }

    /// Takes one event, if there is one.
    ///
    /// # Errors
    /// If none is left and the device is closed.
    pub fn take(&self) -> Result<Option<CmEvent>, VerbsError> {
        let device = &self.0.device;
        device.live()?;
        loop {
            let connection = |conn, local, remote| -> Handle { IdInner::connection(device, conn, local, remote) };
            match device.router.take(&self.0.queue, connection)? {
                Taken::Nothing => return Ok(None),
                Taken::Event(kind, id, listener) => {
                    let Ok(id) = id.downcast::<IdInner>() else { continue };
                    let listener = listener.map(Key::number);
                    return Ok(Some(CmEvent {
                        id: Id(id),
                        listener,
                        kind,
                    }));
                }
                Taken::Stale => {}
                Taken::Orphan(conn) => end_orphan(device, conn),
            }
        }
    }

    /// Takes one event. Returns `None` when the time is over. A timeout of `None` waits for ever, zero does not wait.
    ///
    /// # Errors
    /// If waiting fails, or the device is closed.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<CmEvent>, VerbsError> {
        wait(&self.0.device, &self.0.queue, timeout, None, || self.take())
    }

    /// Keeps a port of a port space for this process, on the addresses of [`ListenArgs::addr`]; port 0: any that is free. Needed only
    /// to be sure of it before listening.
    ///
    /// # Errors
    /// If another process has it.
    pub fn reserve(
        &self,
        space: PortSpace,
        port: u16,
        addr: Option<IpAddr>,
        reuse: bool,
    ) -> Result<PortHold, VerbsError> {
        let device = &self.0.device;
        let (requested, addr) = (ServiceId::new(space, port), addr.map(|a| a.to_canonical()));
        let service = match &device.config.services {
            Some(services) => ServiceId(services.reserve(requested.0, addr, reuse)?),
            None => requested,
        };
        Ok(PortHold(Claim {
            service,
            addr,
            device: device.clone(),
            release: <dyn Services>::unreserve,
        }))
    }

    /// Listens for [`CmEventKind::Request`], in a datagram port space for [`CmEventKind::SidrRequest`]. Dropping the id ends it.
    ///
    /// # Errors
    /// If the port is in use, or the address is not local.
    pub fn listen(&self, args: &ListenArgs) -> Result<Id, VerbsError> {
        let ip = args.addr.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        self.listen_as(args, SocketAddr::new(ip, args.port))
    }

    /// Listens. `local` is the address of the id.
    fn listen_as(&self, args: &ListenArgs, local: SocketAddr) -> Result<Id, VerbsError> {
        let device = &self.0.device;
        let service = ServiceId::new(args.space, args.port);
        let addr = args.addr.map(|a| a.to_canonical());
        if let Some(services) = &device.config.services {
            services.claim(service.0, addr)?;
        }
        let mut claim = Some(Claim {
            service,
            addr,
            device: device.clone(),
            release: <dyn Services>::release,
        });
        // The route is added under the port's lock, so that no event precedes it.
        let made = device.engines.first().with_quiet(|port, _| {
            let key = Key::Listener(port.cm_listen(args)?);
            let id = Arc::new(IdInner {
                key,
                device: device.clone(),
                local,
                remote: None,
                _claim: claim.take(),
            });
            device.router.add(key, &self.0.queue, &(id.clone() as Handle));
            Ok(Id(id))
        });
        made?
    }

    /// Sends a connect request. [`CmEventKind::Reply`], [`CmEventKind::Rejected`] or [`CmEventKind::Unreachable`] follows; after a reply
    /// move the queue pair to RTS and call [`Id::establish`].
    ///
    /// # Errors
    /// If there is no route to the peer, or an argument is invalid.
    pub fn connect(&self, args: &ConnectArgs) -> Result<Id, VerbsError> {
        let local = self.local_for(args.local, args.remote)?;
        let mut args = ConnectArgs { local, ..args.clone() };
        args.qp.src_port = self.0.device.engines.promise_source(args.qp.qpn);
        self.start(local, args.remote, |port, now| port.cm_connect(now, &args))
    }

    /// Requests the queue pair of a datagram service. [`CmEventKind::Resolved`] or [`CmEventKind::Unreachable`] follows.
    ///
    /// # Errors
    /// If there is no route to the peer, or an argument is invalid.
    pub fn resolve(&self, args: &ResolveArgs) -> Result<Id, VerbsError> {
        let local = self.local_for(args.local, args.remote)?;
        let args = ResolveArgs { local, ..args.clone() };
        self.start(local, args.remote, |port, now| port.cm_resolve(now, &args))
    }

    /// Returns the local address for a peer, if `local` is unspecified.
    fn local_for(&self, local: SocketAddr, remote: SocketAddr) -> Result<SocketAddr, VerbsError> {
        match local.ip().is_unspecified() {
            true => Ok(SocketAddr::new(self.0.device.local_for(remote.ip())?, local.port())),
            false => Ok(local),
        }
    }

    fn start(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        call: impl FnOnce(&mut Port, Instant) -> Result<ConnId, VerbsError>,
    ) -> Result<Id, VerbsError> {
        let device = &self.0.device;
        device.engines.first().with(|port, now| {
            let conn = call(port, now)?;
            Ok(self.new_id(conn, local, remote))
        })?
    }

    /// Creates the id of a connection. Called under the port's lock, so that no event precedes its route.
    fn new_id(&self, conn: ConnId, local: SocketAddr, remote: SocketAddr) -> Id {
        let id = IdInner::connection(&self.0.device, conn, local, remote);
        let handle: Handle = id.clone();
        self.0.device.router.add(Key::Conn(conn), &self.0.queue, &handle);
        Id(id)
    }
}

impl Device {
    /// Creates an event channel for connections.
    ///
    /// # Errors
    /// If the system has no descriptor left.
    pub fn create_cm_channel(&self) -> Result<EventChannel, VerbsError> {
        let queue = Arc::new(EventQueue::new().map_err(io_error("creating an event channel"))?);
        self.0.router.closes(&queue);
        Ok(EventChannel(Arc::new(ChannelInner {
            queue,
            device: self.0.clone(),
        })))
    }

    /// Listens on a port of the RDMA_CM TCP port space; the address may be unspecified. Dropping the id ends it.
    ///
    /// # Errors
    /// If the port is in use, or the address is not local.
    pub fn listen(&self, channel: &EventChannel, addr: SocketAddr, backlog: u32) -> Result<Id, VerbsError> {
        self.0.check(&channel.0.device, "event channel")?;
        let args = ListenArgs::new(specific(addr.ip()), addr.port(), backlog);
        channel.listen_as(&args, addr)
    }

    /// Starts to connect a queue pair in RESET or INIT. [`CmEventKind::Established`] reports it in RTS.
    ///
    /// # Errors
    /// If there is no route to the peer, or an argument is invalid.
    pub fn connect(
        &self,
        channel: &EventChannel,
        src: Option<IpAddr>,
        dst: SocketAddr,
        qp: &Qp,
        params: ConnParams,
    ) -> Result<Id, VerbsError> {
        self.0.check(&channel.0.device, "event channel")?;
        self.0.check(qp.device(), "queue pair")?;
        let local = SocketAddr::new(src.unwrap_or(Ipv6Addr::UNSPECIFIED.into()), 0);
        let local = channel.local_for(local, dst)?;
        let started = |conn| channel.new_id(conn, local, dst);
        let id = self.0.engines.connect((local, dst), qp.place(), params, started)?;
        qp.keep_connection(id.0.clone());
        Ok(id)
    }
}
