//! Permits: the right to one of the session's chunks. They limit the requests in flight to the queue depth.

use core::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::PathError;

struct State {
    /// Free message numbers; the last returned is given out first, so that few chunks stay in use (and in caches).
    free: Vec<u16>,
    closed: Option<PathError>,
}

/// All permits of a session.
pub(crate) struct Permits {
    state: Mutex<State>,
    returned: Condvar,
}

impl Permits {
    /// `depth` permits, at most 65535.
    pub(crate) fn new(depth: u32) -> Arc<Self> {
        let depth = u16::try_from(depth).unwrap_or(u16::MAX);
        Arc::new(Self {
            state: Mutex::new(State {
                free: (0..depth).rev().collect(),
                closed: None,
            }),
            returned: Condvar::new(),
        })
    }

    /// Takes one, or `None` when all are in use.
    pub(crate) fn try_take(self: &Arc<Self>) -> Result<Option<Permit>, PathError> {
        let mut state = self.state.lock();
        match &state.closed {
            Some(e) => Err(e.clone()),
            None => Ok(state.free.pop().map(|msg_id| Permit {
                permits: self.clone(),
                msg_id,
            })),
        }
    }

    /// Takes one, waiting until one is free.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Permit, PathError> {
        let mut state = self.state.lock();
        loop {
            if let Some(e) = &state.closed {
                return Err(e.clone());
            }
            if let Some(msg_id) = state.free.pop() {
                return Ok(Permit {
                    permits: self.clone(),
                    msg_id,
                });
            }
            self.returned.wait(&mut state);
        }
    }

    /// Nobody gets one any more.
    pub(crate) fn close(&self, why: PathError) {
        self.state.lock().closed.get_or_insert(why);
        self.returned.notify_all();
    }
}

/// The right to send one request; given back when dropped, or when the request is done.
pub struct Permit {
    permits: Arc<Permits>,
    msg_id: u16,
}

impl Permit {
    pub(crate) fn msg_id(&self) -> u16 {
        self.msg_id
    }

    pub(crate) fn belongs_to(&self, permits: &Arc<Permits>) -> bool {
        Arc::ptr_eq(&self.permits, permits)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.state.lock().free.push(self.msg_id);
        self.permits.returned.notify_one();
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Permit({})", self.msg_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_the_queue_is_deep() {
        let permits = Permits::new(3);
        let held: Vec<_> = (0..3).map(|_| permits.try_take().unwrap().unwrap()).collect();
        let mut ids: Vec<_> = held.iter().map(Permit::msg_id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2]);
        assert!(permits.try_take().unwrap().is_none());
        drop(held);
        assert!(permits.try_take().unwrap().is_some());
    }

    #[test]
    fn a_waiter_gets_a_returned_permit_or_the_reason_of_the_end() {
        let permits = Permits::new(1);
        let held = permits.take().unwrap();
        let (a, b) = (permits.clone(), permits.clone());
        let waiter = std::thread::spawn(move || a.take().map(|p| p.msg_id()));
        drop(held);
        assert_eq!(waiter.join().unwrap().unwrap(), 0);
        let held = permits.take().unwrap();
        let waiter = std::thread::spawn(move || b.take().map(|p| p.msg_id()));
        permits.close(PathError::PeerDisconnected);
        assert!(matches!(waiter.join().unwrap(), Err(PathError::PeerDisconnected)));
        drop(held);
        assert!(permits.try_take().is_err());
    }
}
