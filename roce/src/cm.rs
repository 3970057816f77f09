//! Connections.
//!
//! The port's events go, under its lock, through the [`Router`] into the queue of the event channel that a listener or
//! connection was made with. They become events with handles only when the program takes them, outside of the lock:
//! dropping a handle takes that lock.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use roce_net::links::LinkChange;
use roce_port::{ConnId, ListenId, PortCmEvent, PortSpace, ServiceId};
use roce_verbs::{
    AsyncEvent, EventSource as Subject, PathMtus, Qpn,
    provider::{CmChannel, CmEvent, CmEventKind, CmId, ConnParams, QueuePair, RejectReason, VerbsError},
};

use crate::{
    cq::wait,
    device::{Device, DeviceInner, closed, io_error},
    port::PortView,
    qp::Qp,
    queue::EventQueue,
};

pub(crate) type CmQueue = EventQueue<PortCmEvent>;

/// A listener or a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Key {
    Listener(ListenId),
    Conn(ConnId),
}

impl Key {
    /// A number that is unique within the device: both counters start apart, and the low bit keeps listeners and
    /// connections from meeting.
    pub(crate) const fn number(self) -> u64 {
        match self {
            Self::Listener(id) => id.0.wrapping_mul(2).wrapping_add(1),
            Self::Conn(id) => id.0.wrapping_mul(2),
        }
    }
}

struct Route {
    queue: Arc<CmQueue>,
    /// The handle, once the program has it.
    id: Weak<IdInner>,
}

/// Object that is closed with the device.
trait Close: Send + Sync {
    fn close(&self);
}

impl<T: Send> Close for EventQueue<T> {
    fn close(&self) {
        EventQueue::close(self);
    }
}

#[derive(Default)]
struct Routes {
    by_key: HashMap<Key, Route>,
    closes: Vec<Weak<dyn Close>>,
    closed: bool,
}

/// Brings the port's events to where the program waits for them.
pub(crate) struct Router {
    routes: Mutex<Routes>,
    async_events: EventQueue<AsyncEvent>,
    pub(crate) port: PortView,
}

/// Asynchronous events of the port and the device that nobody takes: no more are kept, as what they tell can be looked up.
/// Those of objects all wait: a program causes each itself, by making or arming the object, and those of a queue pair go with it.
const MAX_ASYNC_EVENTS: usize = 1024;

impl Router {
    pub(crate) fn new(async_events: EventQueue<AsyncEvent>, port: PortView) -> Self {
        Self {
            routes: Mutex::default(),
            async_events,
            port,
        }
    }

    /// The queue pair is gone, and with it what it had to tell: its number may become another's.
    pub(crate) fn forget_qp(&self, qpn: Qpn) {
        self.async_events.retain(|e| e.describe().1 != Subject::Qp(qpn));
    }

    pub(crate) fn async_events(&self) -> &EventQueue<AsyncEvent> {
        &self.async_events
    }

    /// Has a queue closed with the device.
    pub(crate) fn closes<T: Send + 'static>(&self, queue: &Arc<EventQueue<T>>) {
        let mut routes = self.routes.lock();
        if routes.closed {
            queue.close();
            return;
        }
        if routes.closes.len() == routes.closes.capacity() {
            routes.closes.retain(|q| q.strong_count() > 0);
        }
        let weak: Weak<EventQueue<T>> = Arc::downgrade(queue);
        routes.closes.push(weak);
    }

    fn add(&self, key: Key, queue: &Arc<CmQueue>, id: &Arc<IdInner>) {
        let route = Route {
            queue: queue.clone(),
            id: Arc::downgrade(id),
        };
        self.routes.lock().by_key.insert(key, route);
    }

    /// Brings the events of something that has no handle of ours to a queue.
    pub(crate) fn add_raw(&self, key: Key, queue: &Arc<CmQueue>) {
        let route = Route {
            queue: queue.clone(),
            id: Weak::new(),
        };
        self.routes.lock().by_key.insert(key, route);
    }

    /// Whether events of this one are wanted.
    pub(crate) fn knows(&self, key: Key) -> bool {
        self.routes.lock().by_key.contains_key(&key)
    }

    pub(crate) fn remove(&self, key: Key) {
        // The queue is dropped outside of the lock, and holds nothing that takes one.
        let route = self.routes.lock().by_key.remove(&key);
        drop(route);
    }

    /// Takes one event of a channel and makes handles of its numbers.
    fn take(&self, device: &Arc<DeviceInner>, queue: &Arc<CmQueue>) -> Result<Taken, VerbsError> {
        // One lock for both steps: otherwise another thread could take a later event of a new connection before its
        // handle is known.
        let mut routes = self.routes.lock();
        let Some(event) = queue.pop()? else {
            return Ok(Taken::Nothing);
        };
        let find = |routes: &Routes, key| routes.by_key.get(&key).and_then(|r| r.id.upgrade());
        let PortCmEvent::ConnectRequest {
            listener,
            conn,
            local,
            remote,
            private_data,
            initiator_depth,
            responder_resources,
        } = event
        else {
            return Ok(match find(&routes, Key::Conn(event.conn())) {
                Some(id) => Taken::Event(CmEvent {
                    id: Id(id),
                    kind: kind_of(event),
                }),
                None => Taken::Stale,
            });
        };
        let Some(listener) = find(&routes, Key::Listener(listener)) else {
            return Ok(Taken::Orphan(conn));
        };
        let id = Arc::new(IdInner {
            key: Key::Conn(conn),
            device: device.clone(),
            local,
            remote: Some(remote),
        });
        if let Some(route) = routes.by_key.get_mut(&Key::Conn(conn)) {
            route.id = Arc::downgrade(&id);
        }
        Ok(Taken::Event(CmEvent {
            id: Id(listener),
            kind: CmEventKind::ConnectRequest {
                id: Id(id),
                private_data,
                initiator_depth,
                responder_resources,
            },
        }))
    }
}

/// Result of [`Router::take`].
enum Taken {
    Nothing,
    Event(CmEvent<Id>),
    /// An event of a connection whose handle is gone.
    Stale,
    /// A request for a listener whose handle is gone.
    Orphan(ConnId),
}

fn kind_of(event: PortCmEvent) -> CmEventKind<Id> {
    match event {
        PortCmEvent::Established { private_data, .. } => CmEventKind::Established { private_data },
        PortCmEvent::Rejected {
            reason, private_data, ..
        } => CmEventKind::Rejected { reason, private_data },
        PortCmEvent::Unreachable { why, .. } => CmEventKind::Unreachable(why),
        PortCmEvent::ConnectError { text, .. } => CmEventKind::ConnectError(text),
        PortCmEvent::Disconnected { .. } => CmEventKind::Disconnected,
        // The others were taken out before, or have queues of their own.
        PortCmEvent::TimewaitExit { .. } | PortCmEvent::ConnectRequest { .. } | PortCmEvent::Raw(_) => {
            CmEventKind::TimewaitExit
        }
    }
}

/// Events of the engines ([`roce_net::EventSink`]).
impl Router {
    /// False: nobody is there for it.
    pub(crate) fn cm_event(&self, event: PortCmEvent) -> bool {
        let mut routes = self.routes.lock();
        let (key, new) = match event.request() {
            Some((listener, conn)) => (Key::Listener(listener), Some(conn)),
            None => (Key::Conn(event.conn()), None),
        };
        let Some(queue) = routes.by_key.get(&key).map(|r| r.queue.clone()) else {
            return false;
        };
        if let Some(conn) = new {
            let route = Route {
                queue: queue.clone(),
                id: Weak::new(),
            };
            routes.by_key.insert(Key::Conn(conn), route);
        }
        let taken = queue.push(event).is_ok();
        if let (Some(conn), false) = (new, taken) {
            routes.by_key.remove(&Key::Conn(conn));
        }
        taken
    }

    pub(crate) fn async_event(&self, event: AsyncEvent) {
        tracing::debug!(?event, "asynchronous event");
        let of_object = !matches!(event.describe().1, Subject::Port | Subject::Device);
        if of_object || self.async_events.len() < MAX_ASYNC_EVENTS {
            let _ = self.async_events.push(event);
        } else {
            tracing::warn!(?event, "an asynchronous event is lost: nobody takes them");
        }
    }

    /// Interfaces changed. Returns what they carry now, if it can tell.
    pub(crate) fn links(&self, changes: &[(String, LinkChange)]) -> Option<PathMtus> {
        for event in self.port.follow(changes) {
            self.async_event(event);
        }
        self.port.path_mtus()
    }

    pub(crate) fn closed(&self) {
        let mut routes = self.routes.lock();
        routes.closed = true;
        for queue in routes.closes.drain(..).filter_map(|q| q.upgrade()) {
            queue.close();
        }
        self.async_events.close();
    }
}

/// A connection or a listener.
///
/// A listener ends with its last clone, and a waiting request is rejected with it. An accepted or initiated connection
/// also stays up as long as its queue pair, which keeps a clone: [`disconnect`](CmId::disconnect) it, or drop both.
#[derive(Clone)]
pub struct Id(Arc<IdInner>);

struct IdInner {
    key: Key,
    device: Arc<DeviceInner>,
    local: SocketAddr,
    remote: Option<SocketAddr>,
}

impl Drop for IdInner {
    fn drop(&mut self) {
        if self.device.engines.is_inherited() {
            return;
        }
        self.device.router.remove(self.key);
        // On a closed device there is nothing left to end.
        let _ = self.device.engines.first().with(|port, now| match self.key {
            Key::Listener(id) => port.cm_unlisten(id),
            Key::Conn(id) => port.cm_destroy(now, id),
        });
        if let (Key::Listener(_), Some(services)) = (self.key, &self.device.services) {
            services.release(service_id(self.local.port()), specific(self.local.ip()));
        }
    }
}

impl core::fmt::Debug for Id {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Id")
            .field("key", &self.0.key)
            .field("local", &self.0.local)
            .field("remote", &self.0.remote)
            .finish()
    }
}

impl Id {
    fn conn(&self) -> Result<ConnId, VerbsError> {
        match self.0.key {
            Key::Conn(id) => Ok(id),
            Key::Listener(_) => Err(VerbsError::State("a listener is not a connection".into())),
        }
    }

    /// Refuses a connect request for a reason other than the program's wish.
    ///
    /// # Errors
    /// When it is not a waiting request or the data is too long.
    pub fn reject_with(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        let conn = self.conn()?;
        let driver = self.0.device.engines.first();
        driver
            .with(|port, now| port.cm_reject(now, conn, reason, private_data))
            .map_err(closed)?
    }
}

impl CmId for Id {
    type Qp = Qp;

    fn handle(&self) -> u64 {
        self.0.key.number()
    }

    fn local_addr(&self) -> SocketAddr {
        self.0.local
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.remote
    }

    fn accept(&self, qp: &Qp, params: ConnParams) -> Result<(), VerbsError> {
        let conn = self.conn()?;
        check_device(qp, &self.0.device)?;
        let driver = self.0.device.engines.first();
        driver
            .with(|port, now| port.cm_accept(now, conn, qp.qpn(), params))
            .map_err(closed)??;
        qp.keep_connection(self.clone());
        Ok(())
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.reject_with(RejectReason::CONSUMER, private_data)
    }

    fn disconnect(&self) -> Result<(), VerbsError> {
        let conn = self.conn()?;
        let driver = self.0.device.engines.first();
        driver.with(|port, now| port.cm_disconnect(now, conn)).map_err(closed)
    }
}

/// The service ID of a port of the RDMA_CM TCP port space.
pub(crate) const fn service_id(port: u16) -> u64 {
    ServiceId::new(PortSpace::Tcp, port).0
}

/// An address unless it stands for all.
pub(crate) fn specific(ip: IpAddr) -> Option<IpAddr> {
    Some(ip.to_canonical()).filter(|ip| !ip.is_unspecified())
}

fn check_device(qp: &Qp, device: &Arc<DeviceInner>) -> Result<(), VerbsError> {
    match Arc::ptr_eq(qp.device(), device) {
        true => Ok(()),
        false => Err(VerbsError::Invalid("the queue pair is another device's".into())),
    }
}

/// Channel for connection events.
#[derive(Clone)]
pub struct EventChannel(Arc<EventSource>);

/// A queue of connection events; what nobody has taken from it when it goes is refused.
pub(crate) struct EventSource {
    pub(crate) queue: Arc<CmQueue>,
    pub(crate) device: Arc<DeviceInner>,
}

impl EventSource {
    pub(crate) fn new(device: &Device) -> Result<Arc<Self>, VerbsError> {
        let queue = Arc::new(EventQueue::new().map_err(io_error("making an event channel"))?);
        device.0.router.closes(&queue);
        Ok(Arc::new(Self {
            queue,
            device: device.0.clone(),
        }))
    }
}

impl Drop for EventSource {
    fn drop(&mut self) {
        if self.device.engines.is_inherited() {
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

/// Ends a connection that no handle stands for.
pub(crate) fn end_orphan(device: &DeviceInner, conn: ConnId) {
    device.router.remove(Key::Conn(conn));
    let _ = device.engines.first().with(|port, now| port.cm_destroy(now, conn));
}

impl core::fmt::Debug for EventChannel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("EventChannel").finish_non_exhaustive()
    }
}

impl EventChannel {
    pub(crate) fn new(device: &Device) -> Result<Self, VerbsError> {
        EventSource::new(device).map(Self)
    }

    fn check(&self, device: &Device) -> Result<(), VerbsError> {
        match Arc::ptr_eq(&self.0.device, &device.0) {
            true => Ok(()),
            false => Err(VerbsError::Invalid("the event channel is another device's".into())),
        }
    }

    /// Takes an event that still concerns somebody.
    fn take(&self) -> Result<Option<CmEvent<Id>>, VerbsError> {
        let device = &self.0.device;
        loop {
            match device.router.take(device, &self.0.queue)? {
                Taken::Nothing => return Ok(None),
                Taken::Event(event) => return Ok(Some(event)),
                Taken::Stale => {}
                Taken::Orphan(conn) => end_orphan(device, conn),
            }
        }
    }
}

impl CmChannel for EventChannel {
    type Id = Id;

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(&*self.0.queue)
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<Option<CmEvent<Id>>, VerbsError> {
        wait(&self.0.device, &self.0.queue, timeout, || self.take())
    }
}

impl Device {
    pub(crate) fn cm_listen(&self, channel: &EventChannel, addr: SocketAddr, backlog: u32) -> Result<Id, VerbsError> {
        channel.check(self)?;
        let ip = specific(addr.ip());
        let queue = &channel.0.queue;
        let services = self.0.services.as_deref();
        if let Some(services) = services {
            services.claim(service_id(addr.port()), ip)?;
        }
        let made = self.0.engines.first().with_quiet(|port, _| {
            let key = Key::Listener(port.cm_listen(ip, addr.port(), backlog)?);
            Ok(self.new_id(key, queue, addr, None))
        });
        let made = made.map_err(closed).and_then(|made| made);
        if let (Err(_), Some(services)) = (&made, services) {
            services.release(service_id(addr.port()), ip);
        }
        made
    }

    pub(crate) fn cm_connect(
        &self,
        channel: &EventChannel,
        src: Option<IpAddr>,
        dst: SocketAddr,
        qp: &Qp,
        params: ConnParams,
    ) -> Result<Id, VerbsError> {
        channel.check(self)?;
        check_device(qp, &self.0)?;
        let local = match src.filter(|ip| !ip.is_unspecified()) {
            Some(ip) => ip,
            None => self.0.local_for(dst.ip())?,
        };
        let local = SocketAddr::new(local, 0);
        let queue = &channel.0.queue;
        let made = self.0.engines.first().with(|port, now| {
            let key = Key::Conn(port.cm_connect(now, local, dst, qp.qpn(), params)?);
            Ok::<_, VerbsError>(self.new_id(key, queue, local, Some(dst)))
        });
        let id = made.map_err(closed)??;
        qp.keep_connection(id.clone());
        Ok(id)
    }

    /// Makes a handle and its route. Called under the port's lock, so that no event comes before the route.
    fn new_id(&self, key: Key, queue: &Arc<CmQueue>, local: SocketAddr, remote: Option<SocketAddr>) -> Id {
        let id = Arc::new(IdInner {
            key,
            device: self.0.clone(),
            local,
            remote,
        });
        self.0.router.add(key, queue, &id);
        Id(id)
    }
}
