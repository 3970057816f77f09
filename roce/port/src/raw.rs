//! Raw connections and datagram services: the application creates and modifies queue pairs itself, as with librdmacm.
//!
//! [`PortCmEvent::Raw`] passes the connection manager's events on unchanged.

use core::net::SocketAddr;

use roce_cm::{AcceptArgs, ConnId, ConnectArgs, Event, ListenArgs, ListenId, ResolveArgs, SidrAnswer, state::State};
use roce_verbs::{
    AddressVector, Instant,
    provider::{RejectReason, VerbsError},
};

use crate::{
    connect::{PortCmEvent, cm_error},
    port::Port,
};

impl Port {
    /// Listens. [`Event::Request`] reports requests, [`Event::SidrRequest`] those in a datagram port space.
    ///
    /// # Errors
    /// The port is in use, or the address is not local.
    pub fn cm_listen_raw(&mut self, args: &ListenArgs) -> Result<ListenId, VerbsError> {
        let addr = args.addr.map(|a| a.to_canonical());
        if let Some(addr) = addr.filter(|a| !a.is_unspecified() && !self.config.is_local(*a)) {
            return Err(VerbsError::Address(format!("{addr} is not an address of this port")));
        }
        let id = self.cm.listen_for(&ListenArgs { addr, ..*args }).map_err(cm_error)?;
        self.raw_listeners.insert(id);
        Ok(id)
    }

    /// Takes an unanswered request out of its listener's backlog ([`roce_cm::Manager::leave_backlog`]).
    pub fn cm_leave_backlog(&mut self, conn: ConnId) {
        self.cm.leave_backlog(conn);
    }

    /// Sends a REQ. [`Event::Reply`], [`Event::Rejected`] or [`Event::Unreachable`] follows.
    ///
    /// After [`Event::Reply`] call [`Port::cm_establish`].
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn cm_connect_raw(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, VerbsError> {
        self.now = now;
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        self.check_mtu(args.mtu, Some(local.ip()))?;
        let args = ConnectArgs {
            local,
            remote,
            src_port: self.handshakes.promise(args.qpn),
            ..args.clone()
        };
        let conn = self.cm.connect(now, &args).map_err(cm_error)?;
        self.raw_conns.insert(conn);
        Ok(conn)
    }

    /// Resolves the queue pair of a datagram service. [`Event::Resolved`] or [`Event::Unreachable`] follows.
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn cm_resolve(&mut self, now: Instant, args: &ResolveArgs) -> Result<ConnId, VerbsError> {
        self.now = now;
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        let args = ResolveArgs {
            local,
            remote,
            ..args.clone()
        };
        let conn = self.cm.resolve(now, &args).map_err(cm_error)?;
        self.raw_conns.insert(conn);
        Ok(conn)
    }

    /// Accepts a request with a queue pair in RTS. [`Event::Established`] follows.
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_accept_raw(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
        self.now = now;
        let args = AcceptArgs {
            src_port: self.handshakes.promise(args.qpn),
            ..args.clone()
        };
        self.cm.accept(now, conn, &args).map_err(cm_error)
    }

    /// Answers an [`Event::SidrRequest`].
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_answer(&mut self, now: Instant, conn: ConnId, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.now = now;
        self.cm.answer(now, conn, answer).map_err(cm_error)
    }

    /// Sends the RTU after [`Event::Reply`]: the queue pair is in RTS and the connection established.
    ///
    /// # Errors
    /// The connection is in another state.
    pub fn cm_establish(&mut self, now: Instant, conn: ConnId) -> Result<(), VerbsError> {
        self.now = now;
        self.cm.qp_ready(now, conn).map_err(cm_error)
    }

    /// Rejects a request or a reply. The connection ends, but the caller must still destroy it.
    ///
    /// # Errors
    /// There is no request or reply to reject, or the private data is too long.
    pub fn cm_reject_raw(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), VerbsError> {
        self.now = now;
        let done = match self.cm.state(conn) {
            Some(State::RepReceived) => self.cm.refuse_reply(now, conn, reason, private_data),
            _ => self.cm.reject(now, conn, reason, private_data),
        };
        done.map_err(cm_error)
    }

    /// Treats a packet received on a connection's queue pair as its RTU (`rdma_notify`).
    ///
    /// Has no effect unless the connection waits for the RTU.
    pub fn cm_notify(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.cm.communication_established(now, conn);
        self.pump_cm(now);
    }

    /// Returns both addresses in canonical form, with an unspecified local address resolved.
    fn endpoints(&self, local: SocketAddr, remote: SocketAddr) -> Result<(SocketAddr, SocketAddr), VerbsError> {
        let av = self.check_av(&AddressVector::new(local.ip(), remote.ip()))?;
        Ok((
            SocketAddr::new(av.local, local.port()),
            SocketAddr::new(av.remote, remote.port()),
        ))
    }

    /// Wraps the event of a raw listener, connection or resolution.
    pub(crate) fn as_raw(&mut self, event: &Event) -> Option<PortCmEvent> {
        let conn = event.conn();
        if let Event::Request { listener, .. } | Event::SidrRequest { listener, .. } = event {
            if !self.raw_listeners.contains(listener) {
                return None;
            }
            self.raw_conns.insert(conn);
        }
        self.raw_conns.contains(&conn).then(|| PortCmEvent::Raw(event.clone()))
    }
}
