//! RDMA of sockets: memory, regions that peers may use, and operations.

use std::{
    fmt,
    future::Future,
    io,
    net::SocketAddr,
    ops::Range,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use rds::{
    Attachment, Operation, OperationFlags, OperationKind, RdmaStatus, RegionRights, SocketId, proto::RdmaCookie,
};
use roce_verbs::mem::Pages;

use crate::{socket::Socket, thread::Thread};

/// Memory for RDMA operations, zeroed at first. Clones are handles of the same memory. Peers and operations may change it at any time, so
/// it is only copied.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Pages>);

impl Buffer {
    /// Allocates.
    ///
    /// # Errors
    /// Without memory.
    pub fn new(len: usize) -> io::Result<Self> {
        let pages = Pages::allocate(len);
        pages
            .map(Self)
            .map_err(|e| io::Error::new(io::ErrorKind::OutOfMemory, e))
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// `InvalidInput` if they are outside.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> io::Result<()> {
        let done = self.0.read(offset, out);
        done.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// `InvalidInput` if they are outside.
    pub fn write(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        let done = self.0.write(offset, data);
        done.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
    }
}

/// Memory of a socket that peers may use, until it is dropped. A peer that uses it later loses its connection to this node.
pub struct Region {
    node: Arc<Thread>,
    socket: SocketId,
    cookie: RdmaCookie,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("cookie", &self.cookie)
            .finish_non_exhaustive()
    }
}

impl Region {
    pub(crate) fn new(node: Arc<Thread>, socket: SocketId, cookie: RdmaCookie) -> Self {
        Self { node, socket, cookie }
    }

    /// Name of the memory for [`Socket::send_cookie_to`].
    pub fn cookie(&self) -> RdmaCookie {
        self.cookie
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // It may be gone: with its socket, with the node, or since it was for use once.
        let _ = self.node.call(|node| node.free_region(self.socket, self.cookie));
    }
}

/// Operation on memory of a peer, with local memory.
#[derive(Clone, Debug)]
pub struct Rdma {
    kind: OperationKind,
    cookie: RdmaCookie,
    remote: u64,
    buffer: Buffer,
    range: Range<usize>,
}

impl Rdma {
    fn new(kind: OperationKind, cookie: RdmaCookie, buffer: &Buffer, range: Range<usize>) -> Self {
        Self {
            kind,
            cookie,
            remote: 0,
            buffer: buffer.clone(),
            range,
        }
    }

    /// Writes a range of a buffer to the peer's memory.
    pub fn write(buffer: &Buffer, range: Range<usize>, cookie: RdmaCookie) -> Self {
        Self::new(OperationKind::Write, cookie, buffer, range)
    }

    /// Reads the peer's memory into a range of a buffer.
    pub fn read(buffer: &Buffer, range: Range<usize>, cookie: RdmaCookie) -> Self {
        Self::new(OperationKind::Read, cookie, buffer, range)
    }

    /// Adds to the peer's 8-byte word, whose former value comes to an offset of a buffer. Memory of the kernel's RDS does not allow it.
    pub fn fetch_add(add: u64, buffer: &Buffer, offset: usize, cookie: RdmaCookie) -> Self {
        let kind = OperationKind::FetchAdd { add };
        Self::new(kind, cookie, buffer, offset..offset.saturating_add(8))
    }

    /// Replaces the peer's 8-byte word if it equals `compare`; its former value comes to an offset of a buffer. Memory of the kernel's RDS
    /// does not allow it.
    pub fn compare_swap(compare: u64, swap: u64, buffer: &Buffer, offset: usize, cookie: RdmaCookie) -> Self {
        let kind = OperationKind::CompareSwap { compare, swap };
        Self::new(kind, cookie, buffer, offset..offset.saturating_add(8))
    }

    /// Begins so many bytes behind the first one of the peer's memory.
    #[must_use]
    pub fn at(mut self, offset: u64) -> Self {
        self.remote = offset;
        self
    }

    /// Returns what goes with a message, or without one.
    fn attachment(&self, token: u64, is_silent: bool) -> Attachment {
        let mut flags = OperationFlags::NOTIFY;
        flags.set(OperationFlags::SILENT, is_silent);
        Attachment::Operation(Box::new(Operation {
            kind: self.kind,
            cookie: self.cookie,
            remote: self.remote,
            memory: self.buffer.0.clone(),
            pieces: vec![self.range.clone()],
            flags,
            token,
        }))
    }
}

/// Operation under way: a future of its end, to which [`wait`](Self::wait) blocks. If it is dropped the operation goes on.
#[derive(Debug)]
#[must_use = "the operation is done once this says so"]
pub struct Pending<'a> {
    socket: &'a Socket,
    token: u64,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.socket.node.forget_operation(self.token);
    }
}

impl Pending<'_> {
    /// Waits until the operation is done, and the message with it has left.
    ///
    /// # Errors
    /// `PermissionDenied` if the peer refused the cookie, the offset or the kind of access; `ConnectionReset` if the connection ended first;
    /// `Other` if it was canceled or failed here. It may or may not have been done, and is not repeated. Also when the node has ended.
    pub fn wait(self) -> io::Result<()> {
        result(self.socket.node.wait_for_operation(self.token)?)
    }

    /// Returns its end, if it has ended; without waiting.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn try_wait(&mut self) -> io::Result<Option<()>> {
        let ended = self.socket.node.operation(self.token)?;
        ended.map(result).transpose()
    }
}

impl Future for Pending<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // First, so that no end between is missed.
        self.socket.node.wake(self.socket.id, cx.waker());
        match self.try_wait() {
            Ok(None) => Poll::Pending,
            Ok(Some(())) => Poll::Ready(Ok(())),
            Err(e) => Poll::Ready(Err(e)),
        }
    }
}

fn result(status: RdmaStatus) -> io::Result<()> {
    let kind = match status {
        RdmaStatus::Success => return Ok(()),
        RdmaStatus::RemoteError => io::ErrorKind::PermissionDenied,
        RdmaStatus::Dropped => io::ErrorKind::ConnectionReset,
        RdmaStatus::Canceled | RdmaStatus::OtherError => io::ErrorKind::Other,
    };
    Err(io::Error::new(kind, status.to_string()))
}

impl Socket {
    /// Lets peers use a buffer whose cookie they get. Waits for a turn of the node's thread.
    ///
    /// # Errors
    /// `ENOTCONN` if the socket is not bound, `EMSGSIZE` above 1 MiB and 4 KiB, `EINVAL` of an empty buffer, `ENFILE` at a limit of the node
    /// or the device, `EOPNOTSUPP` if the device has no registrations that begin at address 0.
    pub fn register(&self, buffer: &Buffer, rights: RegionRights) -> io::Result<Region> {
        let cookie = self.node.register(self.id, buffer.0.clone(), rights)?;
        Ok(Region::new(self.node.clone(), self.id, cookie))
    }

    /// Sends a message with the cookie of memory that the receiver may use; [`Message::cookie`](rds::Message::cookie) is that. Waits as
    /// [`send_to`](Self::send_to).
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub fn send_cookie_to(&self, data: &[u8], cookie: RdmaCookie, to: SocketAddr) -> io::Result<()> {
        let send = |node: &mut rds::Node| node.send_with(self.id, Some(to), data, Attachment::Cookie(cookie));
        self.node.wait(None, send)
    }

    /// Sends a message with a cookie without waiting.
    ///
    /// # Errors
    /// As [`try_send_to`](Self::try_send_to).
    pub fn try_send_cookie_to(&self, data: &[u8], cookie: RdmaCookie, to: SocketAddr) -> io::Result<()> {
        self.call(|node| node.send_with(self.id, Some(to), data, Attachment::Cookie(cookie)))
    }

    /// Sends a message with a cookie when there is room, from a task of any runtime.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send_cookie_to_async(&self, data: &[u8], cookie: RdmaCookie, to: SocketAddr) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll(cx, || self.try_send_cookie_to(data, cookie, to))).await
    }

    /// Begins an operation on memory of the node at an address. `data`: message to its socket, which arrives when the operation is done;
    /// `None`: no message. Waits while the socket's buffer is full or the destination congested.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to); `EFAULT` if the range is outside the buffer, `EINVAL` if it is empty, `EMSGSIZE` above 1 MiB,
    /// `EOPNOTSUPP` for atomics on memory of the socket's own node.
    pub fn operate(&self, rdma: &Rdma, data: Option<&[u8]>, to: SocketAddr) -> io::Result<Pending<'_>> {
        let pending = self.pending()?;
        let send = |node: &mut rds::Node| self.begin(node, pending.token, rdma, data, to);
        self.node.wait(None, send)?;
        Ok(pending)
    }

    /// Begins an operation without waiting.
    ///
    /// # Errors
    /// As [`operate`](Self::operate); `EAGAIN` while the socket's buffer is full or it has 1024 operations, `ENOBUFS` while the destination
    /// is congested.
    pub fn try_operate(&self, rdma: &Rdma, data: Option<&[u8]>, to: SocketAddr) -> io::Result<Pending<'_>> {
        let pending = self.pending()?;
        self.call(|node| self.begin(node, pending.token, rdma, data, to))?;
        Ok(pending)
    }

    /// Begins an operation when there is room, from a task of any runtime. What it returns is to be awaited as well.
    ///
    /// # Errors
    /// As [`operate`](Self::operate).
    pub async fn operate_async(&self, rdma: &Rdma, data: Option<&[u8]>, to: SocketAddr) -> io::Result<Pending<'_>> {
        std::future::poll_fn(|cx| self.poll(cx, || self.try_operate(rdma, data, to))).await
    }

    fn pending(&self) -> io::Result<Pending<'_>> {
        let token = self.node.new_operation()?;
        Ok(Pending { socket: self, token })
    }

    fn begin(
        &self,
        node: &mut rds::Node,
        token: u64,
        rdma: &Rdma,
        data: Option<&[u8]>,
        to: SocketAddr,
    ) -> Result<(), rds::Error> {
        let attachment = rdma.attachment(token, data.is_none());
        node.send_with(self.id, Some(to), data.unwrap_or(&[]), attachment)
    }
}
