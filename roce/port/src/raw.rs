//! The connection manager without queue pairs: for programs that make and move those themselves (librdmacm's), and for
//! datagram services. What happens is told as it is, in [`PortCmEvent::Raw`].

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
    /// Listens; requests come as [`Event::Request`] or, in a port space of datagrams, [`Event::SidrRequest`].
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    pub fn cm_listen_raw(&mut self, args: &ListenArgs) -> Result<ListenId, VerbsError> {
        let addr = args.addr.map(|a| a.to_canonical());
        if let Some(addr) = addr.filter(|a| !a.is_unspecified() && !self.config.is_local(*a)) {
            return Err(VerbsError::Address(format!("{addr} is not an address of this port")));
        }
        let id = self.cm.listen_for(&ListenArgs { addr, ..*args }).map_err(cm_error)?;
        self.raw_listeners.insert(id);
        Ok(id)
    }

    /// Sends a REQ. [`Event::Reply`] (then call [`Port::cm_establish`]), [`Event::Rejected`] or [`Event::Unreachable`]
    /// follows.
    ///
    /// # Errors
    /// When an argument is wrong or a limit is reached.
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

    /// Asks which queue pair serves a port by datagrams. [`Event::Resolved`] or [`Event::Unreachable`] follows.
    ///
    /// # Errors
    /// When an argument is wrong or a limit is reached.
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

    /// Accepts a request with a queue pair that is in RTS. [`Event::Established`] follows.
    ///
    /// # Errors
    /// When it does not wait any more or there is too much private data.
    pub fn cm_accept_raw(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
        self.now = now;
        let args = AcceptArgs {
            src_port: self.handshakes.promise(args.qpn),
            ..args.clone()
        };
        self.cm.accept(now, conn, &args).map_err(cm_error)
    }

    /// Answers who asks for a queue pair.
    ///
    /// # Errors
    /// When the question is not open any more or there is too much private data.
    pub fn cm_answer(&mut self, now: Instant, conn: ConnId, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.now = now;
        self.cm.answer(now, conn, answer).map_err(cm_error)
    }

    /// After [`Event::Reply`]: our queue pair is in RTS, the peer is told (RTU) and the connection stands.
    ///
    /// # Errors
    /// When the connection does not wait for it.
    pub fn cm_establish(&mut self, now: Instant, conn: ConnId) -> Result<(), VerbsError> {
        self.now = now;
        self.cm.qp_ready(now, conn).map_err(cm_error)
    }

    /// Refuses a request or a reply. The connection is over, and remains to be destroyed.
    ///
    /// # Errors
    /// When there is nothing to refuse or there is too much private data.
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

    /// A packet came on the queue pair of a connection that waits for the RTU, which is as good
    /// (`rdma_notify`). Harmless at any other time.
    pub fn cm_notify(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.cm.communication_established(now, conn);
        self.pump_cm(now);
    }

    /// Both ends in the form in which the connection manager takes them, the local address filled in if it is clear.
    fn endpoints(&self, local: SocketAddr, remote: SocketAddr) -> Result<(SocketAddr, SocketAddr), VerbsError> {
        let av = self.check_av(&AddressVector::new(local.ip(), remote.ip()))?;
        Ok((
            SocketAddr::new(av.local, local.port()),
            SocketAddr::new(av.remote, remote.port()),
        ))
    }

    /// The event as it is, if it is about something raw.
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
