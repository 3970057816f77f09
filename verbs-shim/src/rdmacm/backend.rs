//! Transport that RDMA_CM needs. [`super::facade`] is the real one; tests have their own.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce::{Mtu, RejectReason};
use roce_port::cm::{
    AcceptArgs, ConnectArgs, Event as CmEventKind, ListenArgs, ResolveArgs, SidrAnswer, cma::PortSpace,
};

use super::Result;

/// The device that has an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CmaDevice {
    /// Number of the device, as `ibv_get_device_index` gives it.
    pub(crate) index: u32,
    /// Its GUID, big-endian.
    pub(crate) guid: [u8; 8],
    /// Index of the address in its GID table.
    pub(crate) gid_index: u8,
    /// The path MTU that its interface carries.
    pub(crate) mtu: Mtu,
}

/// A connection, a resolution or a listener at the transport. Dropping it ends it: a connection is disconnected, a
/// request that waits is refused.
pub(crate) trait Handle: Send {
    /// Its number, different from every other's.
    fn key(&self) -> u64;
}

/// The transport.
pub(crate) trait Backend: Send {
    /// Connections, resolutions and listeners.
    type Handle: Handle;
    /// Address resolution of a next hop; dropping it cancels it.
    type Query: Send;
    /// Membership in a multicast group; dropping it leaves.
    type Member: Send;
    /// A port kept from other processes; dropping it gives it back.
    type Hold: Send;

    /// The device that has a local address.
    ///
    /// # Errors
    /// EADDRNOTAVAIL when no interface has it, ENODEV when no device has it.
    fn cma_dev_of(&mut self, local: IpAddr) -> Result<CmaDevice>;
    /// The local address from which a peer is reached.
    ///
    /// # Errors
    /// ENETUNREACH and the like.
    fn source_for(&mut self, remote: SocketAddr) -> Result<IpAddr>;
    /// An address of some device, for programs that name none.
    fn some_address(&mut self, v6: bool) -> Option<IpAddr>;
    /// Resolves the next hop from a local address to a peer. `None`: it is resolved already; else [`Report::Neighbour`] with this
    /// ticket follows, within the timeout (`None`: there is none). Does not wait.
    ///
    /// # Errors
    /// ENETUNREACH and the like when there is no route.
    fn resolve_neighbour(
        &mut self,
        ticket: u64,
        route: (IpAddr, SocketAddr),
        timeout: Option<Duration>,
    ) -> Result<Option<Self::Query>>;
    /// Keeps a port from other processes, on one address or all; port 0: any that is free. Returns the port too: 0 when
    /// other processes are not concerned.
    ///
    /// # Errors
    /// EADDRINUSE when another process has it.
    fn reserve(&mut self, space: PortSpace, port: u16, addr: Option<IpAddr>, reuse: bool) -> Result<(u16, Self::Hold)>;
    /// Listens.
    ///
    /// # Errors
    /// EADDRINUSE when another process does.
    fn listen(&mut self, args: &ListenArgs) -> Result<Self::Handle>;
    /// Sends a REQ.
    ///
    /// # Errors
    /// When an argument is wrong or the transport can't be had.
    fn connect(&mut self, args: &ConnectArgs) -> Result<Self::Handle>;
    /// Sends a SIDR REQ.
    ///
    /// # Errors
    /// As for `connect`.
    fn resolve(&mut self, args: &ResolveArgs) -> Result<Self::Handle>;
    /// Takes a request out of its listener's backlog: the program has fetched its event.
    fn leave_backlog(&mut self, conn: &Self::Handle);
    /// Answers a request with a queue pair that is in RTS.
    ///
    /// # Errors
    /// When it has ended.
    fn accept(&mut self, conn: &Self::Handle, args: &AcceptArgs) -> Result<()>;
    /// Answers a SIDR request.
    ///
    /// # Errors
    /// When it has ended.
    fn answer(&mut self, conn: &Self::Handle, answer: &SidrAnswer) -> Result<()>;
    /// Tells the peer that our queue pair is in RTS too.
    ///
    /// # Errors
    /// When the peer's answer is not there, or the connection has ended.
    fn establish(&mut self, conn: &Self::Handle) -> Result<()>;
    /// Refuses a request or an answer.
    ///
    /// # Errors
    /// When there is nothing to refuse.
    fn reject(&mut self, conn: &Self::Handle, reason: RejectReason, data: &[u8]) -> Result<()>;
    /// The first packet came on the queue pair of a connection: as good as an RTU.
    ///
    /// # Errors
    /// When the transport is gone.
    fn notify(&mut self, conn: &Self::Handle) -> Result<()>;
    /// Ends a connection.
    ///
    /// # Errors
    /// When the transport is gone.
    fn disconnect(&mut self, conn: &Self::Handle) -> Result<()>;
    /// Joins a multicast group on the interface of a local address; `send_only`: only to send to it.
    ///
    /// # Errors
    /// When the system refuses.
    fn join(&mut self, local: IpAddr, group: IpAddr, send_only: bool) -> Result<Self::Member>;
}

/// Report of the transport.
pub(crate) enum Report<H> {
    /// Event of a connection, resolution or listener with this [key](Handle::key).
    Cm {
        key: u64,
        /// The new connection or resolution of a request.
        new: Option<H>,
        event: CmEventKind,
    },
    /// The next hop of a query is resolved, or its time is up.
    Neighbour { ticket: u64, resolved: bool },
    /// The transport has stopped.
    Gone,
}
