//! Thread that a node and its sockets keep alive.

use std::{
    io,
    net::IpAddr,
    sync::Arc,
    task::{Poll, Waker},
    time::Duration,
};

use rds::{Config, Error, Node, RdmaStatus, RegionRights, SocketId, proto::RdmaCookie};
use roce::{DeviceConfig, Hardware};
use roce_host::Hosted;
use roce_verbs::mem::Pages;

use crate::machine::RdsMachine;

/// Thread of a node, which ends with it.
pub(crate) struct Thread(Hosted<RdsMachine>);

impl Thread {
    /// Starts the node at a device's address.
    ///
    /// # Errors
    /// When the address can't be used.
    pub(crate) fn start(device: DeviceConfig, rdma: Option<Box<dyn Hardware>>, config: Config) -> io::Result<Self> {
        let addr = device.addr;
        let hosted = Hosted::start("rds-node", (device, rdma), move |cx| {
            Node::listen(cx, config, &[addr], []).map(RdsMachine::new)
        })?;
        Ok(Self(hosted))
    }

    /// Address of the node.
    pub(crate) fn addr(&self) -> IpAddr {
        self.0.addr()
    }

    /// Works on the node for a socket.
    ///
    /// # Errors
    /// The errors of `f`, and why the node has ended.
    pub(crate) fn call<T>(&self, f: impl FnOnce(&mut Node) -> Result<T, Error>) -> io::Result<T> {
        self.0.call(|machine| f(&mut machine.node))?.map_err(errno)
    }

    /// Calls `f` until it no longer would block, or the time is over.
    ///
    /// # Errors
    /// `TimedOut`, and the errors of [`call`](Self::call).
    pub(crate) fn wait<T>(
        &self,
        timeout: Option<Duration>,
        mut f: impl FnMut(&mut Node) -> Result<T, Error>,
    ) -> io::Result<T> {
        let result = self.0.wait(timeout, |machine| match f(&mut machine.node) {
            Err(Error::WouldBlock | Error::Congested) => Poll::Pending,
            result => Poll::Ready(result),
        })?;
        result.map_err(errno)
    }

    /// Registers memory for a socket, in a turn of the node's thread.
    ///
    /// # Errors
    /// Errors of the node, and `NotConnected` when it has ended.
    pub(crate) fn register(
        &self,
        socket: SocketId,
        memory: Arc<Pages>,
        rights: RegionRights,
    ) -> io::Result<RdmaCookie> {
        let registered = self.0.run(move |machine, cx| {
            let range = 0..memory.len();
            machine.node.register(cx, socket, memory, range, rights)
        })?;
        registered.map_err(errno)
    }

    /// Returns the number of a new operation.
    ///
    /// # Errors
    /// Why the node has ended.
    pub(crate) fn new_operation(&self) -> io::Result<u64> {
        self.0.call(RdsMachine::new_operation)
    }

    /// Forgets an operation, ended or not.
    pub(crate) fn forget_operation(&self, token: u64) {
        // The node may have ended.
        let _ = self.0.call(|machine| machine.forget_operation(token));
    }

    /// Returns the end of an operation, if it has ended.
    ///
    /// # Errors
    /// Why the node has ended.
    pub(crate) fn operation(&self, token: u64) -> io::Result<Option<RdmaStatus>> {
        self.0.call(|machine| machine.operation(token))
    }

    /// Waits for the end of an operation.
    ///
    /// # Errors
    /// Why the node has ended.
    pub(crate) fn wait_for_operation(&self, token: u64) -> io::Result<RdmaStatus> {
        self.0.wait(None, |machine| match machine.operation(token) {
            Some(status) => Poll::Ready(status),
            None => Poll::Pending,
        })
    }

    /// Has a task woken when a socket changes.
    pub(crate) fn wake(&self, id: SocketId, waker: &Waker) {
        self.0.wake(id, waker);
    }

    /// Forgets the tasks of a socket.
    pub(crate) fn forget(&self, id: SocketId) {
        self.0.forget(id);
    }
}

/// Returns an error as the kernel's.
fn errno(error: Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

/// Whether a call is to be tried again once the socket has changed.
pub(crate) fn would_block(e: &io::Error) -> bool {
    let of = |error: Error| Some(error.errno());
    e.raw_os_error() == of(Error::WouldBlock) || e.raw_os_error() == of(Error::Congested)
}
