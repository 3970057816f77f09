//! The process's connection to the RDS node of its user, which is started by the first socket.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

use parking_lot::Mutex;
use rds_local::{Answer, MAX_FDS, Record, Request};
use rustix::net::{RecvFlags, SendFlags};
use std::io::IoSlice;

use super::node;
use crate::{
    fork::Own,
    ret::{Errno, Result},
};

/// A connection, with the file's identity: programs close all descriptors when they become daemons, and have other files under the number.
struct Connection {
    socket: OwnedFd,
    inode: u64,
}

impl Connection {
    fn open() -> Result<Self> {
        let socket = node::connect()?;
        let inode = inode(socket.as_fd()).ok_or(Errno::IO)?;
        Ok(Self { socket, inode })
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
    let mut slot = CONNECTION.get().lock();
    if slot.as_ref().is_some_and(|connection| !connection.is_intact()) {
        // The number is another file's.
        if let Some(lost) = slot.take() {
            let _ = lost.socket.into_raw_fd();
        }
    }
    // The second time with a new node.
    for _ in 0..2 {
        let connection = match &mut *slot {
            Some(connection) => connection,
            empty => empty.insert(Connection::open()?),
        };
        if let Some(answer) = connection.exchange(request, fds) {
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
