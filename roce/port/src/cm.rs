//! Connections: the connection manager's calls and events, for this port's addresses.
//!
//! Events are those of [`roce_cm`]. The application modifies the queue pairs, or has that done by [`Port::connect_qp`] and
//! [`Port::accept_qp`].
//!
//! Where an address has several ports, one of them has its [GSI](crate::ToShard): the others' calls of this module fail.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

use roce_bth::Qpn;
use roce_cm::{
    AcceptArgs, CmError, ConnChange, ConnId, ConnectArgs, Event, ListenArgs, ListenId, ResolveArgs, SidrAnswer,
    mad::Mad, state::State,
};
use roce_verbs::{
    AddressVector, Instant,
    provider::{NoAnswer, RejectReason, VerbsError},
};

use crate::{
    gsi::{Agreement, Gsi, GsiLink},
    message::{FromShard, QpCommand, QpKey},
    port::{Port, invalid},
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

/// Messages between shards and GSI.
impl Port {
    /// Makes this port a shard of an address whose GSI another port has. Call before creating queue pairs.
    pub fn leave_gsi(&mut self) {
        self.gsi = GsiLink::Elsewhere(VecDeque::new());
    }

    /// Returns the GSI.
    ///
    /// # Errors
    /// Another port of the address has it.
    pub(crate) fn gsi(&mut self) -> Result<&mut Gsi, VerbsError> {
        let elsewhere = || VerbsError::State("another port of this address has the connection manager".into());
        self.gsi.get_mut().ok_or_else(elsewhere)
    }

    /// Performs a command of the GSI.
    pub fn handle_command(&mut self, now: Instant, command: QpCommand) {
        self.now = now;
        if let Some(report) = self.perform(now, command) {
            self.handle_report(now, report);
        }
    }

    /// Takes the report of a shard, or keeps it for the port that has the GSI.
    pub fn handle_report(&mut self, now: Instant, report: FromShard) {
        self.now = now;
        match &mut self.gsi {
            GsiLink::Here(gsi) => gsi.handle_report(now, report),
            GsiLink::Elsewhere(reports) => reports.push_back(report),
        }
    }

    /// Returns the next report for the port that has the GSI.
    pub fn poll_report(&mut self) -> Option<FromShard> {
        match &mut self.gsi {
            GsiLink::Here(_) => None,
            GsiLink::Elsewhere(reports) => reports.pop_front(),
        }
    }

    /// Returns the next command for the shard that has a queue pair. Commands for own queue pairs have been performed.
    pub fn poll_command(&mut self) -> Option<QpCommand> {
        self.commands.pop_front()
    }

    /// Performs the GSI's commands for own queue pairs.
    pub(crate) fn run_commands(&mut self, now: Instant) {
        while let Some(command) = self.gsi.get_mut().and_then(Gsi::poll_command) {
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
        let made = self.gsi()?.manager().listen_for(&ListenArgs { addr, ..*args });
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
        if let Ok(gsi) = self.gsi() {
            gsi.manager().unlisten(id);
        }
    }

    /// Takes an unanswered request out of its listener's backlog ([`roce_cm::Manager::leave_backlog`]).
    pub fn cm_leave_backlog(&mut self, conn: ConnId) {
        if let Ok(gsi) = self.gsi() {
            gsi.manager().leave_backlog(conn);
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
        self.now = now;
        let (local, remote) = self.endpoints(args.local, args.remote)?;
        self.check_mtu(args.mtu, Some(local.ip()))?;
        let args = ConnectArgs {
            local,
            remote,
            src_port: self.promise_source(args.qpn).or(args.src_port),
            ..args.clone()
        };
        self.gsi()?.manager().connect(now, &args).map_err(cm_error)
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
        self.gsi()?.manager().resolve(now, &args).map_err(cm_error)
    }

    /// Accepts a request with a queue pair in RTS. [`Event::Established`] follows.
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), VerbsError> {
        self.now = now;
        let args = AcceptArgs {
            src_port: self.promise_source(args.qpn).or(args.src_port),
            ..args.clone()
        };
        let agreement = self.cm_agreement(conn, Some(args.qpn));
        self.gsi()?.manager().accept(now, conn, &args).map_err(cm_error)?;
        agreement.iter().for_each(|agreement| self.agree(agreement));
        Ok(())
    }

    /// Returns the terms that the peer has announced for a connection whose queue pair the application moves. `qpn`: the queue pair that
    /// accepts it; `None`: the one that requested it.
    ///
    /// Where another shard has the queue pair, call [`Port::agree`] there before [`Port::cm_accept`] or [`Port::cm_establish`].
    pub fn cm_agreement(&self, conn: ConnId, qpn: Option<Qpn>) -> Option<Agreement> {
        let gsi = self.gsi.get()?;
        // The port itself moves the queue pair.
        if gsi.qp_of(conn).is_some() {
            return None;
        }
        let manager = gsi.manager_ref();
        let path = manager.peer(conn)?;
        Some(Agreement::of(qpn.or_else(|| manager.local_qpn(conn))?, &path))
    }

    /// Answers an [`Event::SidrRequest`].
    ///
    /// # Errors
    /// The request is no longer pending, or the private data is too long.
    pub fn cm_answer(&mut self, now: Instant, conn: ConnId, answer: &SidrAnswer) -> Result<(), VerbsError> {
        self.now = now;
        self.gsi()?.manager().answer(now, conn, answer).map_err(cm_error)
    }

    /// Sends the RTU after [`Event::Reply`]: the queue pair is in RTS and the connection established.
    ///
    /// # Errors
    /// The connection is in another state.
    pub fn cm_establish(&mut self, now: Instant, conn: ConnId) -> Result<(), VerbsError> {
        self.now = now;
        let agreement = self.cm_agreement(conn, None);
        self.gsi()?.manager().qp_ready(now, conn).map_err(cm_error)?;
        agreement.iter().for_each(|agreement| self.agree(agreement));
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
        self.now = now;
        let cm = self.gsi()?.manager();
        let done = match cm.state(conn) {
            Some(State::RepReceived) => cm.refuse_reply(now, conn, reason, private_data),
            _ => cm.reject(now, conn, reason, private_data),
        };
        done.map_err(cm_error)
    }

    /// Treats a packet received on a connection's queue pair as its RTU (`rdma_notify`).
    ///
    /// Has no effect unless the connection waits for the RTU.
    pub fn cm_notify(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.handle_report(now, FromShard::FirstPacket(conn));
    }

    /// Sends a DREQ. A second call does nothing. The queue pair of [`Port::connect_qp`] and [`Port::accept_qp`] moves to error first.
    ///
    /// [`Event::Disconnected`] follows when the peer answers, or after the DREQ's last retry.
    pub fn cm_disconnect(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        let Ok(gsi) = self.gsi() else { return };
        gsi.fail(conn);
        self.run_commands(now);
        if let Ok(gsi) = self.gsi() {
            gsi.manager().disconnect(now, conn);
        }
    }

    /// Returns the DREQ of a connection that waits for its DREP, for [`Port::cm_send_farewell`].
    pub fn cm_farewell(&self, conn: ConnId) -> Option<Mad> {
        self.gsi.get()?.manager_ref().farewell(conn)
    }

    /// Sends a DREQ, possibly of another port's connection, over the path of connection `by`.
    ///
    /// Returns false unless `by` is established: before that its peer's address is unverified.
    pub fn cm_send_farewell(&mut self, now: Instant, by: ConnId, dreq: &Mad) -> bool {
        self.now = now;
        let Ok(gsi) = self.gsi() else { return false };
        let cm = gsi.manager();
        let established = cm.state(by) == Some(State::Established);
        let Some((local, remote)) = cm.addresses(by).filter(|_| established) else {
            return false;
        };
        cm.send_farewell(now, local.ip(), remote.ip(), dreq);
        true
    }

    /// Disconnects if necessary and destroys the connection. Reports no more of its events; the queue pair remains.
    pub fn cm_destroy(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        let Ok(gsi) = self.gsi() else { return };
        gsi.fail(conn);
        self.run_commands(now);
        if let Ok(gsi) = self.gsi() {
            gsi.destroy(now, conn);
        }
        self.run_commands(now);
    }

    /// Returns the queue pair that is moved for a connection ([`Port::connect_qp`], [`Port::accept_qp`]).
    pub fn qp_of(&self, conn: ConnId) -> Option<QpKey> {
        self.gsi.get()?.qp_of(conn)
    }

    /// Returns the next event of a connection, resolution or listener.
    ///
    /// Moves the queue pair of [`Port::connect_qp`] or [`Port::accept_qp`] as the event demands. The connection is then
    /// [`Event::Established`] or [`Event::Failed`]; no [`Event::Reply`] is returned.
    pub fn poll_cm_event(&mut self, now: Instant) -> Option<Event> {
        self.now = now;
        loop {
            self.run_commands(now);
            let gsi = self.gsi.get_mut()?;
            if let Some(event) = gsi.poll_event() {
                return Some(event);
            }
            if !gsi.advance_events() {
                return None;
            }
        }
    }

    /// Returns the next change for the processes that share the address ([`roce_cm::CmConfig::report_changes`]).
    pub fn poll_change(&mut self) -> Option<PortChange> {
        match self.qpns.take_spread() {
            true => Some(PortChange::Spread),
            false => self.gsi().ok()?.manager().poll_change().map(PortChange::Connection),
        }
    }

    /// Returns the connection manager's state of a connection, for diagnosis.
    pub fn cm_state(&self, conn: ConnId) -> Option<State> {
        self.gsi.get()?.manager_ref().state(conn)
    }

    /// Returns how much the connection manager holds, for diagnosis.
    pub fn cm_usage(&self) -> roce_cm::Usage {
        self.gsi.get().map(|gsi| gsi.manager_ref().usage()).unwrap_or_default()
    }

    /// Returns whether a connect request waits for an answer, so that an ICMP error could end the wait.
    pub fn awaits_answer(&self) -> bool {
        self.gsi.get().is_some_and(|gsi| gsi.manager_ref().awaits_answer())
    }

    /// Takes an ICMP error about a packet sent to `remote`, of which it quotes the beginning. Only a connect request that waits for an
    /// answer can end by it, and only if its own numbers are quoted.
    pub fn handle_undeliverable(&mut self, now: Instant, remote: IpAddr, quoted: &[u8], why: NoAnswer) {
        self.now = now;
        if let Ok(gsi) = self.gsi() {
            gsi.handle_undeliverable(now, remote, quoted, why);
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
