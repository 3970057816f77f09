//! Routes of a device's events to the queues where the program waits for them.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Weak},
};

use roce_net::links::LinkChange;
use roce_port::{CmEventKind, ConnId, ListenId};
use roce_verbs::{AsyncEvent, EventSource as Subject, PathMtus, Qpn, provider::VerbsError};

use crate::{
    queue::EventQueue,
    sync::{Handle, Mutex, WeakHandle},
    view::PortView,
};

pub(crate) type CmQueue = EventQueue<CmEventKind>;

/// Key of a listener, connection or resolution.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Key {
    Listener(ListenId),
    Conn(ConnId),
}

impl Key {
    /// Returns a number that is unique within the device: the low bit distinguishes listeners from connections.
    pub(crate) const fn number(self) -> u64 {
        match self {
            Self::Listener(id) => id.0.wrapping_mul(2).wrapping_add(1),
            Self::Conn(id) => id.0.wrapping_mul(2),
        }
    }
}

struct Route {
    queue: Arc<CmQueue>,
    /// Handle, once the program has taken the request.
    id: Option<WeakHandle>,
}

/// Object that is closed with the device.
trait Close: Send + Sync {
    fn close(&self);
}

impl Route {
    fn handle(&self) -> Option<Handle> {
        self.id.as_ref()?.upgrade()
    }
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

/// Routes of a device's events.
///
/// The port's events go into the queue of a channel under the port's lock. They get handles only when the program takes them, without
/// the port's lock, because dropping a handle acquires it.
pub(crate) struct Router {
    routes: Mutex<Routes>,
    async_events: EventQueue<AsyncEvent>,
    pub(crate) port: PortView,
}

/// Largest number of asynchronous events of the port and the device that wait. Later ones are lost: what they report can be queried.
/// Events of objects all wait: the program causes each itself, and those of a queue pair go with it.
const MAX_ASYNC_EVENTS: usize = 1024;

/// Result of [`Router::take`].
pub(crate) enum Taken {
    Nothing,
    /// Event, its handle, and the listener of a request.
    Event(CmEventKind, Handle, Option<Key>),
    /// Event of a connection without handle.
    Stale,
    /// Request for a listener without handle.
    Orphan(ConnId),
}

impl Router {
    pub(crate) fn new(async_events: EventQueue<AsyncEvent>, port: PortView) -> Self {
        Self {
            routes: Mutex::default(),
            async_events,
            port,
        }
    }

    /// Removes the events of a destroyed queue pair, whose number may become another's.
    pub(crate) fn forget_qp(&self, qpn: Qpn) {
        self.async_events.retain(|e| e.describe().1 != Subject::Qp(qpn));
    }

    pub(crate) fn async_events(&self) -> &EventQueue<AsyncEvent> {
        &self.async_events
    }

    /// Closes a queue with the device.
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

    /// Adds the route of a handle.
    pub(crate) fn add(&self, key: Key, queue: &Arc<CmQueue>, id: &Handle) {
        let route = Route {
            queue: queue.clone(),
            id: Some(Handle::downgrade(id)),
        };
        self.routes.lock().by_key.insert(key, route);
    }

    pub(crate) fn remove(&self, key: Key) {
        // The queue is dropped without the lock.
        let route = self.routes.lock().by_key.remove(&key);
        drop(route);
    }

    /// Takes one event of a queue and finds its handle; `connection` makes the handle of a request, of its addresses.
    pub(crate) fn take(
        &self,
        queue: &CmQueue,
        connection: impl FnOnce(ConnId, SocketAddr, SocketAddr) -> Handle,
    ) -> Result<Taken, VerbsError> {
        // One lock for both steps: otherwise another thread could take a later event of a new connection before its
        // handle is known.
        let mut routes = self.routes.lock();
        let Some(kind) = queue.pop()? else {
            return Ok(Taken::Nothing);
        };
        let (CmEventKind::Request {
            listener,
            conn,
            local,
            remote,
            ..
        }
        | CmEventKind::SidrRequest {
            listener,
            conn,
            local,
            remote,
            ..
        }) = kind
        else {
            let id = routes.by_key.get(&Key::Conn(kind.conn())).and_then(Route::handle);
            return Ok(id.map_or(Taken::Stale, |id| Taken::Event(kind, id, None)));
        };
        let listener = Key::Listener(listener);
        // Without a handle, which could be the last one and would need the lock when it is dropped.
        let id = routes.by_key.get(&listener).and_then(|l| l.id.as_ref());
        let listens = id.is_some_and(|id| id.strong_count() > 0);
        let Some(route) = routes.by_key.get_mut(&Key::Conn(conn)).filter(|_| listens) else {
            return Ok(Taken::Orphan(conn));
        };
        let id = connection(conn, local, remote);
        route.id = Some(Handle::downgrade(&id));
        Ok(Taken::Event(kind, id, Some(listener)))
    }
}

/// Events of the engines ([`roce_net::EventSink`]).
impl Router {
    /// Returns false if no queue takes the event.
    pub(crate) fn cm_event(&self, event: CmEventKind) -> bool {
        let request = event.request();
        let key = request.map_or(Key::Conn(event.conn()), |(listener, _)| Key::Listener(listener));
        let mut routes = self.routes.lock();
        let Some(queue) = routes.by_key.get(&key).map(|route| route.queue.clone()) else {
            return false;
        };
        if queue.push(event).is_err() {
            return false;
        }
        // Nobody looks for it before the lock is free.
        if let Some((_, conn)) = request {
            routes.by_key.insert(Key::Conn(conn), Route { queue, id: None });
        }
        true
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

    /// Handles changes of interfaces. Returns the path MTUs that they carry now, if known.
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
