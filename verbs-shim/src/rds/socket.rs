//! RDS sockets that this process has used: what it shares with their node.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{BorrowedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use rds_local::{Page, Request, SocketKey};

use super::{control, fds};
use crate::{
    fork::Own,
    ret::{Errno, Result},
};

/// Most sockets whose pages stay mapped. Those that a program closes in ways that are not seen would stay for ever.
const MAX: usize = 4096;

/// An RDS socket.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) key: SocketKey,
    pub(crate) page: Page,
    /// Packets that were taken and not for the program yet.
    aside: Mutex<VecDeque<Vec<u8>>>,
    /// There are some.
    has_aside: AtomicBool,
}

impl Socket {
    /// Keeps a packet for the next call that receives.
    pub(crate) fn set_aside(&self, packet: Vec<u8>) {
        self.aside.lock().push_back(packet);
        self.has_aside.store(true, Ordering::Release);
    }

    /// Returns a packet that was set aside; it stays there if it is peeked at.
    pub(crate) fn aside(&self, peek: bool) -> Option<Vec<u8>> {
        if !self.has_aside.load(Ordering::Acquire) {
            return None;
        }
        let mut aside = self.aside.lock();
        let packet = if peek {
            aside.front().cloned()
        } else {
            aside.pop_front()
        };
        self.has_aside.store(!aside.is_empty(), Ordering::Release);
        packet
    }
}

/// Sockets by their keys. A forked child asks for them again.
static SOCKETS: Own<Mutex<BTreeMap<SocketKey, Arc<Socket>>>> = Own::new(Mutex::default);

/// Keeps a socket.
pub(crate) fn keep(key: SocketKey, page: Page) -> Arc<Socket> {
    let socket = Arc::new(Socket {
        key,
        page,
        aside: Mutex::default(),
        has_aside: AtomicBool::new(false),
    });
    let mut sockets = SOCKETS.get().lock();
    if sockets.len() >= MAX {
        sockets.clear();
    }
    sockets.insert(key, socket.clone());
    socket
}

/// Returns the socket with a key, which a descriptor has.
///
/// # Errors
/// When its node does not know it.
pub(crate) fn with_key(key: SocketKey, fd: RawFd) -> Result<Arc<Socket>> {
    if let Some(socket) = SOCKETS.get().lock().get(&key) {
        return Ok(socket.clone());
    }
    // SAFETY: it was an RDS socket just now; another file in its place is refused by the node.
    let end = unsafe { BorrowedFd::borrow_raw(fd) };
    let (_, files) = control::ask(&Request::Attach(key), &[end])?;
    let file = files.into_iter().next().ok_or(Errno::IO)?;
    Ok(keep(key, Page::map(file)?))
}

/// A descriptor is about to be closed: its socket's page goes, unless it is used by another descriptor again.
pub(crate) fn closing(fd: RawFd) {
    if let Some(key) = fds::key_of(fd) {
        let gone = SOCKETS.get().lock().remove(&key);
        // Without the lock.
        drop(gone);
    }
}
