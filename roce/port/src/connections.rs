//! Connections: the connection manager's calls and events, for this port's addresses.
//!
//! Events are those of [the connection manager](crate::cm). The application modifies the queue pairs, or has that done by [`Port::connect_qp`] and
//! [`Port::accept_qp`].
//!
//! If an address has several ports, one of them has its [GSI](crate::ToShard). The others' calls of this module fail.

use core::net::{IpAddr, SocketAddr};

use crate::cm::{
    AcceptArgs, ConnChange, ConnId, ConnectArgs, Event, ListenArgs, ListenId, LocalQp, Manager, RemoteQp, ResolveArgs,
    SidrAnswer, datagram::MAD_OFFSET, mad::Mad,
};
use roce_bth::Qpn;
use roce_verbs::{
    AddressVector, Instant,
    provider::{NoAnswer, RejectReason, VerbsError},
};

use crate::{
    gsi::Gsi,
    message::{FromShard, QpCommand, QpKey},
    port::Port,
};

/// Change of a port that processes which share its address have to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortChange {
    /// A connection has been established or has ended.
    Connection(ConnChange),
    /// Queue pairs have numbers of all [parts](crate::QpnParts) from now on.
    Spread,
}

/// Messages between shards and GSI.
impl Port {
    /// Makes this port a shard of an address whose GSI another port has. Call before creating queue pairs.
    pub fn leave_gsi(&mut self) {
        self.gsi = None;
    }

    /// Returns the GSI.
    ///
    /// # Errors
    /// Another port of the address has it.
    pub(crate) fn gsi(&mut self) -> Result<&mut Gsi, VerbsError> {
        let elsewhere = || VerbsError::State("another port of this address has the connection manager".into());
        self.gsi.as_deref_mut().ok_or_else(elsewhere)
    }

    /// Performs a command of the GSI.
    pub fn handle_command(&mut self, now: Instant, command: QpCommand) {
        if let Some(report) = self.perform(now, command) {
            self.handle_report(now, report);
        }
    }

    /// Takes the report of a shard, or keeps it for the port that has the GSI.
    pub fn handle_report(&mut self, now: Instant, report: FromShard) {
        match &mut self.gsi {
            Some(gsi) => gsi.handle_report(now, report),
            None => self.reports.push_back(report),
        }
    }

    /// Returns the next report for the port that has the GSI.
    pub fn poll_report(&mut self) -> Option<FromShard> {
        self.reports.pop_front()
    }

    /// Returns the next command for the shard that has a queue pair. Commands for own queue pairs have been performed.
    pub fn poll_command(&mut self) -> Option<QpCommand> {
        self.commands.pop_front()
    }

    /// Performs the GSI's commands for own queue pairs.
    pub(crate) fn run_commands(&mut self, now: Instant) {
        while let Some(command) = self.gsi.as_mut().and_then(|gsi| gsi.commands.pop_front()) {
            match self.qpns.includes(command.qp().qpn) {
                true => self.handle_command(now, command),
                false => self.commands.push_back(command),
            }
        }
    }
}

/// Calls and events of the connection manager.
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
        self.gsi()?.cm.listen_for(&ListenArgs { addr, ..*args })
    }

    /// Stops listening. Requests already reported remain valid.
    pub fn cm_unlisten(&mut self, id: ListenId) {
        if let Ok(gsi) = self.gsi() {
            gsi.cm.unlisten(id);
        }
    }

    /// Takes an unanswered request out of its listener's backlog ([`crate::cm::Manager::leave_backlog`]).
    pub fn cm_leave_backlog(&mut self, conn: ConnId) {
        if let Ok(gsi) = self.gsi() {
            gsi.cm.leave_backlog(conn);
        }
    }

    /// Sends a REQ. [`Event::Reply`], [`Event::Rejected`] or [`Event::Unreachable`] follows.
    ///
    /// `args.local` may be unspecified if the port has a single address of the family. After [`Event::Reply`] call
    /// [`Port::cm_establish`].
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn cm_connect(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, VerbsError> {
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        self.check_mtu(args.mtu, Some(local.ip()))?;
        let args = ConnectArgs {
            local,
            remote,
            qp: self.promised(&args.qp),
            ..args.clone()
        };
        self.gsi()?.cm.connect(now, &args)
    }

    /// Resolves the queue pair of a datagram service. [`Event::Resolved`] or [`Event::Unreachable`] follows.
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn cm_resolve(&mut self, now: Instant, args: &ResolveArgs) -> Result<ConnId, VerbsError> {
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        let args = ResolveArgs {
            local,
            remote,
            ..args.clone()
        };
        self.gsi()?.cm.resolve(now, &args)
    }

    /// Accepts a request with a queue pair in RTS. [`Event::Established`] follows.
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
        let args = AcceptArgs {
            qp: self.promised(&args.qp),
            ..args.clone()
        };
        let agreement = self.cm_agreement(conn, Some(args.qp.qpn));
        self.gsi()?.cm.accept(now, conn, &args)?;
        if let Some((qpn, peer)) = agreement {
            self.agree(qpn, &peer);
        }
        Ok(())
    }

    /// Returns the queue pair of a connection, if the application moves it, and the peer's, which names the terms of the connection.
    /// `qpn`: the queue pair that accepts it; `None`: the one that requested it.
    ///
    /// If another shard has the queue pair, call [`Port::agree`] there before [`Port::cm_accept`] or [`Port::cm_establish`].
    pub fn cm_agreement(&self, conn: ConnId, qpn: Option<Qpn>) -> Option<(Qpn, RemoteQp)> {
        let gsi = self.gsi.as_ref()?;
        // The port itself moves the queue pair.
        if gsi.qp_of(conn).is_some() {
            return None;
        }
        let (ours, peer) = gsi.cm.queue_pairs(conn)?;
        Some((qpn.unwrap_or(ours), peer))
    }

    /// Answers an [`Event::SidrRequest`].
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_answer(&mut self, now: Instant, conn: ConnId, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.gsi()?.cm.answer(now, conn, answer)
    }

    /// Sends the RTU after [`Event::Reply`]: the queue pair is in RTS and the connection established.
    ///
    /// # Errors
    /// The connection is in another state.
    pub fn cm_establish(&mut self, now: Instant, conn: ConnId) -> Result<(), VerbsError> {
        let agreement = self.cm_agreement(conn, None);
        self.gsi()?.cm.qp_ready(now, conn)?;
        if let Some((qpn, peer)) = agreement {
            self.agree(qpn, &peer);
        }
        Ok(())
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
        self.gsi()?.cm.reject(now, conn, reason, private_data)
    }

    /// Treats a packet received on a connection's queue pair as its RTU (`rdma_notify`).
    ///
    /// Has no effect unless the connection waits for the RTU.
    pub fn cm_notify(&mut self, now: Instant, conn: ConnId) {
        self.handle_report(now, FromShard::FirstPacket(conn));
    }

    /// Sends a DREQ. A second call does nothing. The queue pair of [`Port::connect_qp`] and [`Port::accept_qp`] moves to error first.
    ///
    /// [`Event::Disconnected`] follows when the peer answers, or after the DREQ's last retry.
    pub fn cm_disconnect(&mut self, now: Instant, conn: ConnId) {
        if let Some(gsi) = self.failed(now, conn) {
            gsi.cm.disconnect(now, conn);
        }
    }

    /// Moves the queue pair that is moved for a connection to error. Returns the GSI, if this port has it.
    fn failed(&mut self, now: Instant, conn: ConnId) -> Option<&mut Gsi> {
        self.gsi.as_mut()?.fail(conn);
        self.run_commands(now);
        self.gsi.as_deref_mut()
    }

    /// Sends a DREQ, possibly of another port's connection, over the path of connection `by`.
    ///
    /// Returns false unless `by` is established: before that its peer's address is unverified.
    pub fn cm_send_farewell(&mut self, now: Instant, by: ConnId, dreq: &Mad) -> bool {
        self.gsi().is_ok_and(|gsi| gsi.cm.send_farewell(now, by, dreq))
    }

    /// Disconnects if necessary and destroys the connection. Reports no more of its events; the queue pair remains.
    pub fn cm_destroy(&mut self, now: Instant, conn: ConnId) {
        if let Some(gsi) = self.failed(now, conn) {
            gsi.destroy(now, conn);
        }
        self.run_commands(now);
    }

    /// Returns the queue pair that is moved for a connection ([`Port::connect_qp`], [`Port::accept_qp`]).
    pub fn qp_of(&self, conn: ConnId) -> Option<QpKey> {
        self.gsi.as_ref()?.qp_of(conn)
    }

    /// Returns the next event of a connection, resolution or listener.
    ///
    /// Moves the queue pair of [`Port::connect_qp`] or [`Port::accept_qp`] as the event demands. The connection is then
    /// [`Event::Established`] or [`Event::Failed`]; no [`Event::Reply`] is returned.
    pub fn poll_cm_event(&mut self, now: Instant) -> Option<Event> {
        loop {
            self.run_commands(now);
            let gsi = self.gsi.as_deref_mut()?;
            if let Some(event) = gsi.events.pop_front() {
                return Some(event);
            }
            if !gsi.advance_events() {
                return None;
            }
        }
    }

    /// Returns the next change for the processes that share the address ([`crate::cm::CmConfig::report_changes`]).
    pub fn poll_change(&mut self) -> Option<PortChange> {
        match self.qpns.take_spread() {
            true => Some(PortChange::Spread),
            false => self.gsi().ok()?.cm.poll_change().map(PortChange::Connection),
        }
    }

    /// Returns the connection manager, for diagnosis and [`Manager::farewell`]. `None`: another port of the address has it.
    pub fn cm(&self) -> Option<&Manager> {
        Some(&self.gsi.as_ref()?.cm)
    }

    /// Returns whether a connect request waits for an answer, so that an ICMP error could end the wait.
    pub fn awaits_answer(&self) -> bool {
        self.cm().is_some_and(Manager::awaits_answer)
    }

    /// Takes an ICMP error about a packet sent to `remote`, of which it quotes the beginning. Only a connect request that waits for an
    /// answer can end by it, and only if its own numbers are quoted.
    pub fn handle_undeliverable(&mut self, now: Instant, remote: IpAddr, quoted: &[u8], why: NoAnswer) {
        if let (Ok(gsi), Some(mad)) = (self.gsi(), quoted.get(MAD_OFFSET..)) {
            gsi.cm.handle_undeliverable(now, remote, mad, why);
        }
    }

    /// Fixes the UDP source port of a queue pair, if it is this port's, for a REQ or REP that names it.
    pub(crate) fn promised(&mut self, qp: &LocalQp) -> LocalQp {
        LocalQp {
            src_port: self.promise_source(qp.qpn).or(qp.src_port),
            ..*qp
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
