//! Address resolution for `rdma_resolve_addr`: waits until the kernel has resolved the next hop towards a peer, as `rdma_resolve_ip`
//! does. A thread waits, so that neither the program's threads nor the connection manager's do.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use roce::neighbours::{self, Neighbours};

use super::{Result, backend::Report};
use crate::worker::{Next, Worker};

/// Pause between two requests to the kernel to resolve a neighbour, since its own attempts expire.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// From a local address to a peer.
type Route = (IpAddr, SocketAddr);

/// A query that waits for its neighbour.
#[derive(Clone, Copy)]
struct Query {
    /// Its name for the caller.
    ticket: u64,
    route: Route,
    /// When it fails; `None`: never.
    deadline: Option<Instant>,
    /// When to have the kernel resolve the neighbour again.
    solicit: Instant,
}

impl Query {
    /// Returns when to look at it again, or `None` when its time is up.
    fn next(&self, now: Instant) -> Option<Instant> {
        match self.deadline {
            Some(at) if at <= now => None,
            Some(at) => Some(at.min(self.solicit)),
            None => Some(self.solicit),
        }
    }
}

/// The queries of a process.
#[derive(Clone, Default)]
struct Queries(Arc<Mutex<Vec<Query>>>);

/// Result of a look at the queries.
#[derive(PartialEq, Eq, Debug)]
struct Look {
    /// Queries that have ended, and whether each found its neighbour.
    ended: Vec<(u64, bool)>,
    /// When to look again.
    next: Option<Instant>,
}

impl Queries {
    fn lock(&self) -> MutexGuard<'_, Vec<Query>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at all queries; `resolve` returns whether the next hop of a way is resolved, and makes the kernel resolve it if `due`.
    /// It runs without the lock, once for each way.
    fn look(&self, now: Instant, resolve: impl Fn(Route, bool) -> bool) -> Look {
        let mut ways = HashMap::<Route, bool>::new();
        for query in self.lock().iter_mut() {
            let due = query.solicit <= now;
            if due {
                query.solicit = now + RETRY_INTERVAL;
            }
            *ways.entry(query.route).or_default() |= due;
        }
        for (route, state) in &mut ways {
            *state = resolve(*route, *state);
        }
        let (mut ended, mut next) = (Vec::new(), None);
        self.lock().retain(|query| {
            let resolved = ways.get(&query.route) == Some(&true);
            let Some(at) = query.next(now).filter(|_| !resolved) else {
                ended.push((query.ticket, resolved));
                return false;
            };
            next = Some(next.map_or(at, |next: Instant| next.min(at)));
            true
        });
        Look { ended, next }
    }
}

/// A query that has been started. Dropping it cancels it.
pub(crate) struct Started {
    ticket: u64,
    queries: Queries,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.queries.lock().retain(|query| query.ticket != self.ticket);
    }
}

/// The thread that waits, and what for. It must not be dropped under a lock that `deliver` takes.
pub(crate) struct Resolver {
    queries: Queries,
    worker: Worker,
}

/// Returns whether packets from a local address reach a peer without address resolution.
///
/// # Errors
/// When there is no route.
pub(crate) fn is_resolved(local: IpAddr, remote: SocketAddr) -> Result<bool> {
    Ok(Neighbours::new()?.knows(local, remote)?)
}

fn resolve(neighbours: &Neighbours, route: Route, due: bool) -> bool {
    let (local, remote) = route;
    // A route that is gone may come back.
    let resolved = neighbours.knows(local, remote).unwrap_or(false);
    if due && !resolved {
        let sent = neighbours::solicit(local, remote);
        let _ = sent.inspect_err(|e| tracing::debug!("resolving the next hop towards {remote}: {e}"));
    }
    resolved
}

impl Resolver {
    /// Starts the thread, which reports to `deliver`.
    ///
    /// # Errors
    /// When the system has no descriptor or thread left.
    pub(crate) fn start<H: 'static>(deliver: fn(Report<H>)) -> Result<Self> {
        let queries = Queries::default();
        let neighbours = Neighbours::new()?;
        let watched = neighbours.as_fd().try_clone_to_owned()?;
        let shared = queries.clone();
        let worker = Worker::start("ferroce addr", watched, move || {
            neighbours.forget_changes();
            let look = shared.look(Instant::now(), |route, due| resolve(&neighbours, route, due));
            for (ticket, resolved) in look.ended {
                deliver(Report::Neighbour { ticket, resolved });
            }
            look.next.map_or(Next::Ready, Next::At)
        })?;
        Ok(Self { queries, worker })
    }

    /// Starts a query, whose end [`Report::Neighbour`] reports.
    pub(crate) fn query(&self, ticket: u64, route: Route, timeout: Option<Duration>) -> Started {
        let now = Instant::now();
        self.queries.lock().push(Query {
            ticket,
            route,
            deadline: timeout.map(|timeout| now + timeout),
            solicit: now,
        });
        self.worker.wake();
        Started {
            ticket,
            queries: self.queries.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn query(ticket: u64, now: Instant, deadline: Option<u64>) -> Query {
        Query {
            ticket,
            route: (
                "127.0.0.1".parse().unwrap(),
                SocketAddr::from(([127, 0, 0, 2], ticket as u16)),
            ),
            deadline: deadline.map(|ms| now + Duration::from_millis(ms)),
            solicit: now,
        }
    }

    fn is(ticket: u64) -> impl Fn(Route, bool) -> bool {
        move |route, _| u64::from(route.1.port()) == ticket
    }

    #[test]
    fn a_query_ends_when_its_neighbour_is_resolved_or_its_time_is_up() {
        let queries = Queries::default();
        let now = Instant::now();
        let ms = |n| now + Duration::from_millis(n);
        let look = |ended, next| Look { ended, next };
        for (ticket, deadline) in [(1, Some(100)), (2, Some(300)), (3, None)] {
            queries.lock().push(query(ticket, now, deadline));
        }
        assert_eq!(queries.look(now, is(9)), look(vec![], Some(ms(100))));
        assert_eq!(queries.look(ms(50), is(2)), look(vec![(2, true)], Some(ms(100))));
        let forever = look(vec![(1, false)], Some(now + RETRY_INTERVAL));
        assert_eq!(queries.look(ms(100), is(9)), forever);
        assert_eq!(queries.look(ms(200), is(3)), look(vec![(3, true)], None));
    }

    #[test]
    fn the_kernel_is_asked_at_once_and_then_each_second_once_for_a_way() {
        let queries = Queries::default();
        let now = Instant::now();
        for ticket in 1..4 {
            let route = query(1, now, None).route;
            queries.lock().push(Query {
                route,
                ..query(ticket, now, None)
            });
        }
        let asked = |at| {
            let asked = Cell::new(0);
            queries.look(at, |_, due| {
                asked.set(asked.get() + i32::from(due));
                false
            });
            asked.get()
        };
        assert_eq!(
            [asked(now), asked(now + RETRY_INTERVAL / 2), asked(now + RETRY_INTERVAL)],
            [1, 0, 1]
        );
    }

    #[test]
    fn one_that_is_dropped_is_cancelled() {
        let queries = Queries::default();
        let now = Instant::now();
        queries.lock().push(query(1, now, Some(10)));
        drop(Started {
            ticket: 1,
            queries: queries.clone(),
        });
        let nothing = Look {
            ended: vec![],
            next: None,
        };
        assert_eq!(queries.look(now + RETRY_INTERVAL, is(9)), nothing);
    }
}
