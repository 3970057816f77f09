//! Ids of RDMA_CM.

use core::net::SocketAddr;
use std::{os::fd::RawFd, time::Instant};

use roce_port::cm::{ConnTransport, ConnectArgs, RemoteQp, ResolveArgs, cma::PortSpace};

use super::{
    Errno, Result,
    abi::ConnParam,
    addr::{Addr, IbAddr},
    backend::{Backend, CmaDevice},
    ports::random,
    state::{Op, State},
};

/// Q_Key of the UDP port space (`RDMA_UDP_QKEY`).
pub(crate) const UDP_QKEY: u32 = 0x0123_4567;

/// Service of an id's queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Service {
    /// Connected.
    Connected(ConnTransport),
    /// Datagrams: resolved, not connected.
    Datagram,
    /// An InfiniBand listener for whatever comes.
    Any,
}

/// Numbers of queue pair types that programs name (`enum ibv_qp_type`).
const QP_TYPES: [(u8, Service); 6] = [
    (0, Service::Any),
    (2, Service::Connected(ConnTransport::Rc)),
    (3, Service::Connected(ConnTransport::Uc)),
    (4, Service::Datagram),
    (9, Service::Connected(ConnTransport::Xrc)),
    (10, Service::Connected(ConnTransport::Xrc)),
];

impl Service {
    /// By port space; only the InfiniBand port space lets the program choose.
    pub(crate) fn choose(space: PortSpace, qp_type: u8) -> Result<Self> {
        match space {
            PortSpace::Tcp => Ok(Self::Connected(ConnTransport::Rc)),
            PortSpace::Udp | PortSpace::Ipoib => Ok(Self::Datagram),
            PortSpace::Ib => QP_TYPES
                .iter()
                .find(|(n, _)| *n == qp_type)
                .map(|(_, s)| *s)
                .ok_or(Errno::INVAL),
        }
    }

    pub(crate) const fn is_datagram(self) -> bool {
        matches!(self, Self::Datagram)
    }

    pub(crate) const fn transport(self) -> Option<ConnTransport> {
        match self {
            Self::Connected(t) => Some(t),
            Self::Datagram | Self::Any => None,
        }
    }
}

/// A message to a listener.
#[derive(Clone)]
pub(crate) enum Attempt {
    /// A REQ.
    Connect(Box<ConnectArgs>),
    /// A SIDR REQ.
    Resolve(Box<ResolveArgs>),
}

/// An attempt that is repeated while the peer has no listener.
///
/// Programs (perftest's, for one) agree over another channel that they are about to listen and to connect, and then do
/// both at the same time. With the kernel connecting is slower than listening; here it is not.
pub(crate) struct Retry {
    pub(crate) attempt: Attempt,
    /// No more after this.
    pub(crate) until: Instant,
}

/// Address resolution that an id waits for, and what it sets.
pub(crate) struct Resolution<B: Backend> {
    /// The query's name.
    pub(crate) ticket: u64,
    /// Dropping it cancels the query.
    pub(crate) _query: B::Query,
    /// The addresses as they are once the peer's is resolved.
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    /// The device of the local one.
    pub(crate) cma_dev: CmaDevice,
}

/// Membership of an id in a multicast group.
pub(crate) struct Member<B: Backend> {
    pub(crate) id: u32,
    /// librdmacm's name for it.
    pub(crate) uid: u64,
    /// Events that were taken from the channel.
    pub(crate) reported: u32,
    /// Dropping it leaves the group.
    pub(crate) _membership: B::Member,
}

/// An id: `struct ucma_context` and the `rdma_cm_id` behind it.
pub(crate) struct Context<B: Backend> {
    /// The event channel that its events go to.
    pub(crate) channel: RawFd,
    /// librdmacm's name for it; 0 until a request is accepted.
    pub(crate) uid: u64,
    pub(crate) space: PortSpace,
    pub(crate) service: Service,
    pub(crate) state: State,
    pub(crate) local: Addr,
    pub(crate) remote: Addr,
    /// Whether `local` has a port of the process's table.
    pub(crate) bound: bool,
    /// Keeps that port from other processes, if it was chosen by or for a program that may listen.
    pub(crate) hold: Option<B::Hold>,
    /// The device, once the local address is known.
    pub(crate) cma_dev: Option<CmaDevice>,
    /// The address resolution that it waits for.
    pub(crate) resolution: Option<Resolution<B>>,
    /// Its listener, connection or resolution.
    pub(crate) handle: Option<B::Handle>,
    /// The first PSN that our queue pair expects.
    pub(crate) psn: u32,
    pub(crate) qpn: u32,
    pub(crate) srq: bool,
    pub(crate) qkey: Option<u32>,
    /// It came as a request.
    pub(crate) passive: bool,
    /// The peer's queue pair: known in a request and after a reply.
    pub(crate) path: Option<RemoteQp>,
    /// Attempt to repeat if the peer has no listener yet.
    pub(crate) retry: Option<Retry>,
    /// READs and atomics that we answer at a time, as requested when connecting.
    pub(crate) responder_resources: u8,
    pub(crate) tos: u8,
    pub(crate) reuse: bool,
    pub(crate) afonly: Option<bool>,
    pub(crate) ack_timeout: Option<u8>,
    /// Events that were taken from the channel.
    pub(crate) reported: u32,
}

impl<B: Backend> Context<B> {
    pub(crate) fn new(channel: RawFd, uid: u64, space: PortSpace, service: Service) -> Self {
        let any = Addr::Ib(IbAddr::default());
        Self {
            channel,
            uid,
            space,
            service,
            state: State::Idle,
            local: any,
            remote: any,
            bound: false,
            hold: None,
            cma_dev: None,
            resolution: None,
            handle: None,
            psn: random() & 0x00ff_ffff,
            qpn: 0,
            srq: false,
            qkey: None,
            passive: false,
            path: None,
            retry: None,
            responder_resources: 0,
            tos: 0,
            reuse: false,
            afonly: None,
            ack_timeout: None,
            reported: 0,
        }
    }

    /// Takes the program's queue pair from the parameters of a connection.
    pub(crate) fn set_qp(&mut self, param: &ConnParam) {
        self.qpn = param.qp_num & 0x00ff_ffff;
        self.srq = param.srq != 0;
    }

    /// Applies an operation to the state.
    ///
    /// # Errors
    /// EINVAL when the state does not allow it.
    pub(crate) fn step(&mut self, op: Op) -> Result<()> {
        self.state = self.after(op)?;
        Ok(())
    }

    /// EINVAL unless the state allows it; nothing changes.
    pub(crate) fn check(&self, op: Op) -> Result<()> {
        self.after(op).map(drop)
    }

    fn after(&self, op: Op) -> Result<State> {
        let state = self.state;
        let next = state.after(op);
        next.ok_or_else(|| Errno::INVAL.because(format_args!("{op:?} is not possible in the id's state, {state:?}")))
    }

    /// Its device.
    ///
    /// # Errors
    /// EINVAL before it has one.
    pub(crate) fn cma_dev(&self) -> Result<CmaDevice> {
        self.cma_dev
            .ok_or_else(|| Errno::INVAL.because("the id has no device yet: bind it to an address, or resolve one"))
    }

    /// Its connection, resolution or listener.
    ///
    /// # Errors
    /// EINVAL when it has none.
    pub(crate) fn handle(&self) -> Result<&B::Handle> {
        let handle = self.handle.as_ref();
        handle.ok_or_else(|| Errno::INVAL.because("the id has no connection and no listener"))
    }

    /// Both IP addresses.
    ///
    /// # Errors
    /// EINVAL for InfiniBand addresses.
    pub(crate) fn ips(&self) -> Result<(SocketAddr, SocketAddr)> {
        self.local.ip().zip(self.remote.ip()).ok_or(Errno::INVAL)
    }

    /// The Q_Key, the port space's own unless another was set (`cma_set_default_qkey`).
    pub(crate) fn qkey(&self) -> u32 {
        self.qkey.unwrap_or(UDP_QKEY)
    }

    /// Sets the Q_Key (`cma_set_qkey`).
    ///
    /// # Errors
    /// EINVAL when it has another.
    pub(crate) fn set_qkey(&mut self, qkey: u32) -> Result<()> {
        match *self.qkey.get_or_insert(qkey) == qkey {
            true => Ok(()),
            false => Err(Errno::INVAL),
        }
    }

    /// Whether there is a path to describe: after route resolution and for requests.
    pub(crate) fn is_routed(&self) -> bool {
        let routed = matches!(self.state, State::RouteResolved | State::Connect | State::Disconnect);
        routed && self.cma_dev.is_some()
    }
}
