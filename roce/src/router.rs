//! Routes of a device's events to the queues where the program waits for them.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use roce_net::links::LinkChange;
use roce_port::{CmEventKind, ConnId, ListenId};
use roce_verbs::{AsyncEvent, EventSource as Subject, PathMtus, Qpn, provider::VerbsError};

use crate::{
    cm::{CmEvent, Id, IdInner},
    device::DeviceInner,
    port::PortView,
    queue::EventQueue,
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
    /// The handle. Dangling until the program takes the request.
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
    Event(CmEvent),
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
    pub(crate) fn add(&self, key: Key, queue: &Arc<CmQueue>, id: &Arc<IdInner>) {
        let route = Route {
            queue: queue.clone(),
            id: Arc::downgrade(id),
        };
        self.routes.lock().by_key.insert(key, route);
    }

    pub(crate) fn remove(&self, key: Key) {
        // The queue is dropped without the lock.
        let route = self.routes.lock().by_key.remove(&key);
        drop(route);
    }

    /// Takes one event of a queue and finds its handle; makes the handle of a request.
    pub(crate) fn take(&self, device: &Arc<DeviceInner>, queue: &Arc<CmQueue>) -> Result<Taken, VerbsError> {
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
            let route = routes.by_key.get(&Key::Conn(kind.conn()));
            let id = route.and_then(|route| route.id.upgrade());
            return Ok(id.map_or(Taken::Stale, |id| {
                Taken::Event(CmEvent {
                    id: Id(id),
                    listener: None,
                    kind,
                })
            }));
        };
        let listener = Key::Listener(listener);
        let listens = routes.by_key.get(&listener).is_some_and(|l| l.id.strong_count() > 0);
        let Some(route) = routes.by_key.get_mut(&Key::Conn(conn)).filter(|_| listens) else {
            return Ok(Taken::Orphan(conn));
        };
        let id = IdInner::connection(device, conn, local, remote);
        route.id = Arc::downgrade(&id);
        Ok(Taken::Event(CmEvent {
            id: Id(id),
            listener: Some(listener.number()),
            kind,
        }))
    }
}

/// Events of the engines ([`roce_net::EventSink`]).
impl Router {
    /// Returns false if no queue takes the event.
    pub(crate) fn cm_event(&self, event: CmEventKind) -> bool {
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
