//! The process's connection to the RDS node of its user, which is started by the first socket.

use std::{
    fs::OpenOptions,
    io::{self, IoSlice},
    os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd},
    sync::Once,
};

use parking_lot::Mutex;
use rds_local::{Answer, MAX_FDS, Record, Request};
use rustix::net::{RecvFlags, SendFlags};

use super::node;
use crate::{
    config,
    fork::Own,
    ret::{Errno, Result},
};

/// A connection, with the file's identity: programs close all descriptors when they become daemons, and have other files under the number.
struct Connection {
    socket: OwnedFd,
    inode: u64,
    /// Number of this process's memory, which the node has got over this connection.
    memory: Option<u64>,
}

impl Connection {
    fn open() -> Result<Self> {
        let socket = node::connect()?;
        let inode = inode(socket.as_fd()).ok_or(Errno::IO)?;
        Ok(Self {
            socket,
            inode,
            memory: None,
        })
    }

    fn is_intact(&self) -> bool {
        inode(self.socket.as_fd()) == Some(self.inode)
    }

    /// Exchanges a request and its answer; `None` when the node has gone.
    fn exchange(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Option<Result<(Answer, Vec<OwnedFd>)>> {
        let bytes = request.to_bytes();
        rds_local::send(&self.socket, &[IoSlice::new(&bytes)], fds, SendFlags::empty()).ok()?;
        let mut buffer = [0; Answer::LEN];
        let Record { len, fds, .. } = rds_local::receive(&self.socket, &mut buffer, RecvFlags::empty()).ok()??;
        Some(result(&buffer[..len]).map(|answer| (answer, fds)))
    }

    /// Returns the number of this process's memory, which the node gets the first time; `None` when the node has gone.
    fn memory(&mut self) -> Option<Result<u64>> {
        if let Some(number) = self.memory {
            return Some(Ok(number));
        }
        let file = match OpenOptions::new().read(true).write(true).open("/proc/self/mem") {
            Ok(file) => file,
            Err(e) => return Some(Err(no_memory(format_args!("/proc/self/mem: {e}")))),
        };
        let answer = self.exchange(&Request::Memory, &[file.as_fd()])?;
        let number = answer.map(|(answer, _)| answer.value);
        self.memory = number.ok();
        Some(number.map_err(|e| {
            let e = io::Error::from_raw_os_error(e.0);
            no_memory(format_args!("the RDS node refuses it: {e}"))
        }))
    }
}

/// Error of an operation when the node can't have this process's memory.
fn no_memory(why: std::fmt::Arguments<'_>) -> Errno {
    static SAID: Once = Once::new();
    SAID.call_once(|| config::complain(format_args!("AF_RDS: no RDMA with this process's memory: {why}")));
    Errno(libc::EPERM).because(why)
}

/// The answer in a packet, or the error in it.
pub(crate) fn result(packet: &[u8]) -> Result<Answer> {
    let answer = Answer::parse(packet).map_err(|e| Errno(libc::EPROTO).because(e))?;
    match answer.errno {
        0 => Ok(answer),
        number => Err(Errno(number)),
    }
}

fn inode(socket: BorrowedFd<'_>) -> Option<u64> {
    let stat = rustix::fs::fstat(socket).ok()?;
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// The connection of this process. That of the process that it was forked from stays that one's.
static CONNECTION: Own<Mutex<Option<Connection>>> = Own::new(Mutex::default);

/// Has the node answer a request. Descriptors that come with the answer are close-on-exec.
///
/// # Errors
/// The answer's; `ENETDOWN` when there is no node.
pub(crate) fn ask(request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>)> {
    debug_assert!(fds.len() <= MAX_FDS);
    with_connection(|connection| connection.exchange(request, fds))
}

/// Has the node answer a request about this process's memory.
///
/// # Errors
/// As [`ask`], and `EPERM` when the node can't have the memory.
pub(crate) fn ask_with_memory(request: &Request) -> Result<Answer> {
    with_connection(|connection| match connection.memory()? {
        Ok(_) => Some(connection.exchange(request, &[])?.map(|(answer, _)| answer)),
        Err(e) => Some(Err(e)),
    })
}

/// Returns the number of this process's memory for operations.
///
/// # Errors
/// As [`ask_with_memory`].
pub(crate) fn memory() -> Result<u64> {
    with_connection(Connection::memory)
}

/// Calls with the connection; again with one to a new node if it returns `None`.
fn with_connection<T>(mut f: impl FnMut(&mut Connection) -> Option<Result<T>>) -> Result<T> {
    let mut slot = CONNECTION.get().lock();
    if slot.as_ref().is_some_and(|connection| !connection.is_intact()) {
        // The number is another file's.
        if let Some(lost) = slot.take() {
            let _ = lost.socket.into_raw_fd();
        }
    }
    // Of the second node, too, the connection may be one that it has not accepted, as it ends.
    for _ in 0..3 {
        let connection = match &mut *slot {
            Some(connection) => connection,
            empty => empty.insert(Connection::open()?),
        };
        if let Some(answer) = f(connection) {
            return answer;
        }
        *slot = None;
    }
    Err(Errno(libc::ENETDOWN).because("the RDS node has gone"))
}

/// Opens a connection of its own for a request whose answer comes later, and sends it. The descriptor is the caller's to close.
///
/// # Errors
/// `ENETDOWN` when there is no node.
pub(crate) fn ask_later(request: &Request) -> Result<i32> {
    let socket = node::connect()?;
    let bytes = request.to_bytes();
    rds_local::send(&socket, &[IoSlice::new(&bytes)], &[], SendFlags::empty())?;
    Ok(socket.as_raw_fd()).inspect(|_| std::mem::forget(socket))
}
