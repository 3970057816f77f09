//! Connections: the connection manager's calls and events, for this port's addresses.
//!
//! Events are those of [`roce_cm`]. The application modifies the queue pairs, or has that done by [`Port::connect_qp`] and
//! [`Port::accept_qp`].

use core::net::{IpAddr, SocketAddr};

use roce_cm::{
    AcceptArgs, CmError, ConnChange, ConnId, ConnectArgs, Event, ListenArgs, ListenId, ResolveArgs, SidrAnswer,
    mad::Mad, state::State,
};
use roce_verbs::{
    AddressVector, Instant,
    provider::{NoAnswer, RejectReason, VerbsError},
};

use crate::{
    port::{Port, invalid},
    tx::MAD_OFFSET,
};

/// Change of a port that processes which share its address have to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortChange {
    /// A connection has been established or has ended.
    Connection(ConnChange),
    /// Queue pairs have numbers of all [parts](crate::QpnParts) from now on.
    Spread,
}

pub(crate) fn cm_error(e: CmError) -> VerbsError {
    match e {
        CmError::AddressInUse | CmError::Address => VerbsError::Address(e.to_string()),
        CmError::PrivateData { .. } => invalid(e),
        CmError::Limit => VerbsError::Limit("connections"),
        CmError::NoConnection | CmError::State(_) | CmError::Answered => VerbsError::State(e.to_string()),
    }
}

impl Port {
    /// Listens. [`Event::Request`] reports requests, [`Event::SidrRequest`] those in a datagram port space.
    ///
    /// # Errors
    /// The port is in use, or the address is not local.
    pub fn cm_listen(&mut self, args: &ListenArgs) -> Result<ListenId, VerbsError> {
        let addr = args.addr.map(|a| a.to_canonical());
        if let Some(addr) = addr.filter(|a| !a.is_unspecified() && !self.config.is_local(*a)) {
            return Err(VerbsError::Address(format!("{addr} is not an address of this port")));
        }
        let made = self.cm.listen_for(&ListenArgs { addr, ..*args });
        made.map_err(|e| match e {
            CmError::AddressInUse => {
                let at = addr.map_or_else(|| "all addresses".to_owned(), |addr| addr.to_string());
                VerbsError::Address(format!(
                    "port {} of {at} has another listener of this process",
                    args.port
                ))
            }
            other => cm_error(other),
        })
    }

    /// Stops listening. Requests already reported remain valid.
    pub fn cm_unlisten(&mut self, id: ListenId) {
        self.cm.unlisten(id);
    }

    /// Takes an unanswered request out of its listener's backlog ([`roce_cm::Manager::leave_backlog`]).
    pub fn cm_leave_backlog(&mut self, conn: ConnId) {
        self.cm.leave_backlog(conn);
    }

    /// Sends a REQ. [`Event::Reply`], [`Event::Rejected`] or [`Event::Unreachable`] follows.
    ///
    /// `args.local` may be unspecified if the port has a single address of the family. After [`Event::Reply`] call
    /// [`Port::cm_establish`].
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn cm_connect(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, VerbsError> {
        self.now = now;
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        self.check_mtu(args.mtu, Some(local.ip()))?;
        let args = ConnectArgs {
            local,
            remote,
            src_port: self.handshakes.promise(args.qpn),
            ..args.clone()
        };
        self.cm.connect(now, &args).map_err(cm_error)
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
        self.cm.resolve(now, &args).map_err(cm_error)
    }

    /// Accepts a request with a queue pair in RTS. [`Event::Established`] follows.
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
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
    pub fn cm_reject(
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
    }

    /// Sends a DREQ. A second call does nothing. The queue pair of [`Port::connect_qp`] and [`Port::accept_qp`] moves to error first.
    ///
    /// [`Event::Disconnected`] follows when the peer answers, or after the DREQ's last retry.
    pub fn cm_disconnect(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.fail_qp_of(now, conn);
        self.cm.disconnect(now, conn);
    }

    /// Returns the DREQ of a connection that waits for its DREP, for [`Port::cm_send_farewell`].
    pub fn cm_farewell(&self, conn: ConnId) -> Option<Mad> {
        self.cm.farewell(conn)
    }

    /// Sends a DREQ, possibly of another port's connection, over the path of connection `by`.
    ///
    /// Returns false unless `by` is established: before that its peer's address is unverified.
    pub fn cm_send_farewell(&mut self, now: Instant, by: ConnId, dreq: &Mad) -> bool {
        self.now = now;
        let established = self.cm.state(by) == Some(State::Established);
        let Some((local, remote)) = self.cm.addresses(by).filter(|_| established) else {
            return false;
        };
        self.cm.send_farewell(now, local.ip(), remote.ip(), dreq);
        true
    }

    /// Disconnects if necessary and destroys the connection. Reports no more of its events; the queue pair remains.
    pub fn cm_destroy(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.fail_qp_of(now, conn);
        self.unbind(conn);
        self.handshakes.remove(conn);
        self.cm.destroy(now, conn);
    }

    /// Returns the next event of a connection, resolution or listener.
    ///
    /// Moves the queue pair of [`Port::connect_qp`] or [`Port::accept_qp`] as the event demands. The connection is then
    /// [`Event::Established`] or [`Event::Failed`]; no [`Event::Reply`] is returned.
    pub fn poll_cm_event(&mut self, now: Instant) -> Option<Event> {
        self.now = now;
        let event = self.cm.poll_event()?;
        match &event {
            Event::Request { conn, path, .. } | Event::Reply { conn, path, .. } if !self.is_bound(*conn) => {
                self.handshakes.insert(*conn, path);
            }
            Event::Disconnected { conn, .. } => self.handshakes.remove(*conn),
            _ => {}
        }
        Some(self.follow_event(now, event))
    }

    /// Returns the next change for the processes that share the address ([`roce_cm::CmConfig::report_changes`]).
    pub fn poll_change(&mut self) -> Option<PortChange> {
        match self.qpns.take_spread() {
            true => Some(PortChange::Spread),
            false => self.cm.poll_change().map(PortChange::Connection),
        }
    }

    /// Returns the connection manager's state of a connection, for diagnosis.
    pub fn cm_state(&self, conn: ConnId) -> Option<State> {
        self.cm.state(conn)
    }

    /// Returns how much the connection manager holds, for diagnosis.
    pub fn cm_usage(&self) -> roce_cm::Usage {
        self.cm.usage()
    }

    /// Returns whether a connect request waits for an answer, so that an ICMP error could end the wait.
    pub fn awaits_answer(&self) -> bool {
        self.cm.awaits_answer()
    }

    /// Takes an ICMP error about a packet sent to `remote`, of which it quotes the beginning. Only a connect request that waits for an
    /// answer can end by it, and only if its own numbers are quoted.
    pub fn handle_undeliverable(&mut self, now: Instant, remote: IpAddr, quoted: &[u8], why: NoAnswer) {
        self.now = now;
        if let Some(mad) = quoted.get(MAD_OFFSET..) {
            self.cm.handle_undeliverable(now, remote, mad, why);
        }
    }

    /// Returns both addresses in canonical form, with an unspecified local address resolved.
    pub(crate) fn endpoints(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<(SocketAddr, SocketAddr), VerbsError> {
        let av = self.check_av(&AddressVector::new(local.ip(), remote.ip()))?;
        Ok((
            SocketAddr::new(av.local, local.port()),
            SocketAddr::new(av.remote, remote.port()),
        ))
    }
}
