//! Sockets of programs.

use std::{
    fmt,
    future::poll_fn,
    io,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use rds::{Error, Message, Node, Received, SocketId};

use crate::thread::{Thread, would_block};

/// Socket of a node. It may be used by several threads and tasks at once; it is closed when it is dropped. Errors have the kernel's numbers.
///
/// A message is sent when the peer has it: its socket may never read it, and nobody is told whether there is one. While the destination
/// is congested, because its socket has more unread bytes than it wants, messages to it wait, and only those.
pub struct Socket {
    pub(crate) node: Arc<Thread>,
    pub(crate) id: SocketId,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.node.forget(self.id);
        // The node may have ended.
        let _ = self.node.call(|node| node.close(self.id));
    }
}

impl Socket {
    pub(crate) fn new(node: Arc<Thread>, id: SocketId) -> Self {
        Self { node, id }
    }

    pub(crate) fn call<T>(&self, f: impl FnOnce(&mut Node) -> Result<T, Error>) -> io::Result<T> {
        self.node.call(f)
    }

    /// Binds to an address of the node; port 0: a free one. Returns the address.
    ///
    /// # Errors
    /// `EINVAL` if it is bound, and for port 1; `EADDRNOTAVAIL`; `EADDRINUSE`.
    pub fn bind(&self, addr: SocketAddr) -> io::Result<SocketAddr> {
        let mut random = [0; 2];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        self.call(|node| node.bind(self.id, addr, u16::from_ne_bytes(random)))
    }

    /// Returns the address that it is bound to.
    ///
    /// # Errors
    /// `ENOTCONN` if it is not bound.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.call(|node| node.names(self.id)?.0.ok_or(Error::NotConnected))
    }

    /// Sets the type of service of its connections, once, after it was bound and before it sends.
    ///
    /// # Errors
    /// `ENOTTY` if it is not bound, `EINVAL` later.
    pub fn set_tos(&self, tos: u8) -> io::Result<()> {
        self.call(|node| node.set_tos(self.id, tos))
    }

    /// Sets the buffer sizes in bytes: of messages that are not acknowledged, and of unread ones from which on senders wait.
    ///
    /// # Errors
    /// When the node has ended.
    pub fn set_buffers(&self, send: Option<usize>, recv: Option<usize>) -> io::Result<()> {
        self.call(|node| node.set_buffers(self.id, send, recv))
    }

    /// Sends a message. Waits while the socket's buffer is full or the destination congested.
    ///
    /// # Errors
    /// `ENOTCONN` if it is not bound, `EMSGSIZE` above the send buffer or 1 MiB, `EOPNOTSUPP` to another address family.
    pub fn send_to(&self, data: &[u8], to: SocketAddr) -> io::Result<()> {
        self.node.wait(None, |node| node.send(self.id, Some(to), data))
    }

    /// Sends a message without waiting.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `EAGAIN` while the socket's buffer is full, `ENOBUFS` while the destination is congested.
    pub fn try_send_to(&self, data: &[u8], to: SocketAddr) -> io::Result<()> {
        self.call(|node| node.send(self.id, Some(to), data))
    }

    /// Receives the next message. Waits until there is one.
    ///
    /// # Errors
    /// When the node has ended.
    pub fn recv(&self) -> io::Result<Message> {
        self.node.wait(None, |node| receive(node, self.id))
    }

    /// Receives the next message. Waits for it so long.
    ///
    /// # Errors
    /// `TimedOut`, and when the node has ended.
    pub fn recv_timeout(&self, timeout: Duration) -> io::Result<Message> {
        self.node.wait(Some(timeout), |node| receive(node, self.id))
    }

    /// Receives the next message without waiting.
    ///
    /// # Errors
    /// `EAGAIN`, and when the node has ended.
    pub fn try_recv(&self) -> io::Result<Message> {
        self.call(|node| receive(node, self.id))
    }

    /// Waits until peers have acknowledged all that the socket has sent, for so long at most.
    ///
    /// # Errors
    /// `TimedOut`, and when the node has ended.
    pub fn flush(&self, timeout: Duration) -> io::Result<()> {
        self.node.wait(Some(timeout), |node| match node.unacked(self.id)? {
            0 => Ok(()),
            _ => Err(Error::WouldBlock),
        })
    }

    /// Drops messages to an address that were not acknowledged. They may or may not have come.
    ///
    /// # Errors
    /// `ENOTCONN` if it is not bound.
    pub fn cancel_sent_to(&self, to: SocketAddr) -> io::Result<()> {
        self.call(|node| node.cancel_sent_to(self.id, to))
    }

    /// Sends a message when there is room, from a task of any runtime.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send_to_async(&self, data: &[u8], to: SocketAddr) -> io::Result<()> {
        poll_fn(|cx| self.poll(cx, || self.try_send_to(data, to))).await
    }

    /// Receives the next message, in a task of any runtime. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// When the node has ended.
    pub async fn recv_async(&self) -> io::Result<Message> {
        poll_fn(|cx| self.poll(cx, || self.try_recv())).await
    }

    pub(crate) fn poll<T>(&self, cx: &Context<'_>, f: impl Fn() -> io::Result<T>) -> Poll<io::Result<T>> {
        // First, so that no change between is missed.
        self.node.wake(self.id, cx.waker());
        match f() {
            Err(e) if would_block(&e) => Poll::Pending,
            result => Poll::Ready(result),
        }
    }
}

/// Returns the next message; these sockets do not ask for reports of congestion.
fn receive(node: &mut Node, id: SocketId) -> Result<Message, Error> {
    loop {
        if let Received::Message(message) = node.receive(id)? {
            return Ok(message);
        }
    }
}
