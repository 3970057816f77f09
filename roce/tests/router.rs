//! Model of [`router`] under shuttle's schedulers: threads that take events and drop handles at the same time.
//!
//! Claims, stated without regard to the code:
//!
//! - No thread waits for a lock that it holds, although the last reference to a handle may be dropped in any thread, and its end takes
//!   the router's lock (shuttle reports a deadlock otherwise).
//! - A request whose listener is gone is an orphan. All later events of a request that was taken have its handle.

#[path = "../src/error.rs"]
#[allow(dead_code, reason = "the crate has more use for it than the model")]
mod error;
#[path = "../src/queue.rs"]
#[allow(dead_code, reason = "the crate has more use for it than the model")]
mod queue;
#[path = "../src/router.rs"]
#[allow(dead_code, unreachable_pub, reason = "the crate has more use for it than the model")]
mod router;

/// Shuttle's lock, and handles whose references other threads may drop at any moment.
mod sync {
    use std::{
        any::Any,
        sync::{Arc, Weak},
    };

    use shuttle::{sync::MutexGuard, thread};

    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread panics")
        }
    }

    pub(crate) struct Handle(Arc<dyn Any + Send + Sync>);

    pub(crate) struct WeakHandle(Weak<dyn Any + Send + Sync>);

    impl Handle {
        pub(crate) fn new(object: impl Any + Send + Sync) -> Self {
            Self(Arc::new(object))
        }

        pub(crate) fn downgrade(this: &Self) -> WeakHandle {
            WeakHandle(Arc::downgrade(&this.0))
        }
    }

    impl Drop for Handle {
        fn drop(&mut self) {
            // Others may drop theirs before this one, which is the last then.
            thread::yield_now();
        }
    }

    impl WeakHandle {
        pub(crate) fn upgrade(&self) -> Option<Handle> {
            self.0.upgrade().map(Handle)
        }

        pub(crate) fn strong_count(&self) -> usize {
            self.0.strong_count()
        }
    }
}

/// Interfaces that never change.
mod view {
    use roce::{AsyncEvent, links::LinkChange};
    use roce_verbs::PathMtus;

    pub(crate) struct PortView;

    impl PortView {
        pub(crate) fn follow(&self, _: &[(String, LinkChange)]) -> Vec<AsyncEvent> {
            Vec::new()
        }

        pub(crate) fn path_mtus(&self) -> Option<PathMtus> {
            None
        }
    }
}

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use queue::EventQueue;
use roce::{CmEventKind, PortSpace};
use roce_port::{ConnId, ListenId};
use router::{CmQueue, Key, Router, Taken};
use shuttle::thread;
use sync::Handle;
use view::PortView;

const LISTENER: ListenId = ListenId(1);
const CONN: ConnId = ConnId(7);

/// Object that ends as a listener or connection of a device does.
struct Object {
    key: Key,
    router: Arc<Router>,
}

impl Drop for Object {
    fn drop(&mut self) {
        self.router.remove(self.key);
    }
}

fn handle(router: &Arc<Router>, key: Key) -> Handle {
    let router = router.clone();
    Handle::new(Object { key, router })
}

/// Returns a router, and a queue with a request to a listener, whose handle is the third.
fn requested() -> (Arc<Router>, Arc<CmQueue>, Handle) {
    let router = Arc::new(Router::new(EventQueue::new().unwrap(), PortView));
    let queue = Arc::new(EventQueue::new().unwrap());
    let listener = handle(&router, Key::Listener(LISTENER));
    router.add(Key::Listener(LISTENER), &queue, &listener);
    let addr = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 7000);
    assert!(router.cm_event(CmEventKind::SidrRequest {
        listener: LISTENER,
        conn: CONN,
        local: addr,
        remote: addr,
        space: PortSpace::Udp,
        private_data: Vec::new(),
    }));
    (router, queue, listener)
}

fn take(router: &Arc<Router>, queue: &CmQueue) -> Taken {
    let taken = router.take(queue, |conn, _, _| handle(router, Key::Conn(conn)));
    taken.unwrap()
}

fn check(world: fn()) {
    shuttle::check_random(world, 300);
    shuttle::check_pct(world, 300, 3);
}

#[test]
fn a_listener_ends_while_its_request_is_taken() {
    check(|| {
        let (router, queue, listener) = requested();
        let ending = thread::spawn(move || drop(listener));
        match take(&router, &queue) {
            Taken::Event(_, id, listener) => {
                assert_eq!(listener, Some(Key::Listener(LISTENER)));
                drop(id);
            }
            Taken::Orphan(conn) => router.remove(Key::Conn(conn)),
            Taken::Nothing | Taken::Stale => panic!("there was a request"),
        }
        ending.join().unwrap();
    });
}

#[test]
fn a_connection_ends_while_its_event_is_taken() {
    check(|| {
        let (router, queue, _listener) = requested();
        let Taken::Event(_, id, _) = take(&router, &queue) else {
            panic!("there was a request");
        };
        assert!(router.cm_event(CmEventKind::TimewaitExit { conn: CONN }));
        let ending = thread::spawn(move || drop(id));
        assert!(matches!(take(&router, &queue), Taken::Event(..) | Taken::Stale));
        ending.join().unwrap();
    });
}

#[test]
fn all_events_after_a_request_have_its_handle() {
    check(|| {
        let (router, queue, _listener) = requested();
        assert!(router.cm_event(CmEventKind::TimewaitExit { conn: CONN }));
        let other = thread::spawn({
            let (router, queue) = (router.clone(), queue.clone());
            move || take(&router, &queue)
        });
        let events = [take(&router, &queue), other.join().unwrap()];
        assert!(events.iter().all(|taken| matches!(taken, Taken::Event(..))));
    });
}
