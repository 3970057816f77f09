//! Managed connections: turns connection manager events and application calls into queue pair transitions.

use core::net::{IpAddr, SocketAddr};

use roce_bth::{Psn, Qpn, RnrTimer};
use roce_cm::{
    AcceptArgs, CmError, ConnChange, ConnId, ConnTransport, ConnectArgs, Event, ListenId, RemoteQp, mad::Mad,
    state::State,
};
use roce_verbs::{
    AccessFlags, Instant, QpAttr, QpState, QpType, ToRts,
    provider::{ConnParams, NoAnswer, RejectReason, VerbsError},
};

use crate::{
    handshake::Terms,
    port::{Port, invalid},
    tx::MAD_OFFSET,
};

/// Event of a connection or listener.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortCmEvent {
    /// A peer requests a connection. Answer with [`Port::cm_accept`] or [`Port::cm_reject`].
    ConnectRequest {
        /// Listener that got the request.
        listener: ListenId,
        /// The new half-open connection.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// The peer's private data: 56 bytes, zero-padded.
        private_data: Vec<u8>,
        /// READs and atomics that the peer answers at a time.
        initiator_depth: u8,
        /// READs and atomics that the peer sends at a time.
        responder_resources: u8,
    },
    /// The connection is established and its queue pair in RTS.
    Established {
        /// The connection.
        conn: ConnId,
        /// On the active side the peer's private data from the accept: 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// The peer rejected the connection. The queue pair is in error.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Reject reason.
        reason: RejectReason,
        /// The peer's private data: 148 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// The peer did not answer. The queue pair is in error.
    Unreachable {
        /// The connection.
        conn: ConnId,
        /// Timeout, or what ICMP said of our request.
        why: NoAnswer,
    },
    /// The peer accepted, but the queue pair could not be moved to RTS.
    ConnectError {
        /// The connection.
        conn: ConnId,
        /// Error text.
        text: String,
    },
    /// The connection has ended. The queue pair is in error and flushed.
    Disconnected {
        /// The connection.
        conn: ConnId,
    },
    /// Timewait has expired: no packet of the connection is in the network any more.
    TimewaitExit {
        /// The connection.
        conn: ConnId,
    },
    /// Event of a raw listener, connection or resolution ([`Port::cm_listen_raw`] and related calls).
    ///
    /// The application manages the queue pair.
    Raw(Event),
}

/// Change of a port that processes which share its address have to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortChange {
    /// A connection has been established or has ended.
    Connection(ConnChange),
    /// Queue pairs have numbers of all [parts](crate::QpnParts) from now on.
    Spread,
}

impl PortCmEvent {
    /// Returns the connection of the event.
    pub const fn conn(&self) -> ConnId {
        match self {
            Self::ConnectRequest { conn, .. }
            | Self::Established { conn, .. }
            | Self::Rejected { conn, .. }
            | Self::Unreachable { conn, .. }
            | Self::ConnectError { conn, .. }
            | Self::Disconnected { conn }
            | Self::TimewaitExit { conn } => *conn,
            Self::Raw(event) => event.conn(),
        }
    }

    /// Returns the listener and the new connection or resolution of a request.
    pub const fn request(&self) -> Option<(ListenId, ConnId)> {
        match self {
            Self::ConnectRequest { listener, conn, .. }
            | Self::Raw(Event::Request { listener, conn, .. } | Event::SidrRequest { listener, conn, .. }) => {
                Some((*listener, *conn))
            }
            _ => None,
        }
    }
}

/// State of a managed connection.
#[derive(Debug, Default)]
pub(crate) struct Conn {
    /// Its queue pair. `None` before it has one and after that is destroyed.
    pub(crate) qpn: Option<Qpn>,
    terms: LocalTerms,
}

/// Local attributes for the transition to RTS.
#[derive(Clone, Copy, Debug, Default)]
struct LocalTerms {
    /// First PSN that the queue pair expects.
    rq_psn: Psn,
    min_rnr_timer: RnrTimer,
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
    /// Listens on a port of the RDMA_CM TCP port space. `addr`: `None` or unspecified for all addresses.
    ///
    /// # Errors
    /// The port is in use, or the address is not local.
    pub fn cm_listen(&mut self, addr: Option<IpAddr>, port: u16, backlog: u32) -> Result<ListenId, VerbsError> {
        let addr = addr.map(|a| a.to_canonical()).filter(|a| !a.is_unspecified());
        if let Some(addr) = addr.filter(|a| !self.config.is_local(*a)) {
            return Err(VerbsError::Address(format!("{addr} is not an address of this port")));
        }
        self.cm.listen(addr, port, backlog).map_err(cm_error)
    }

    /// Stops listening. Requests already reported remain valid.
    pub fn cm_unlisten(&mut self, id: ListenId) {
        self.cm.unlisten(id);
        self.raw_listeners.remove(&id);
    }

    /// Starts to connect a queue pair in RESET or INIT. [`PortCmEvent::Established`] reports it in RTS.
    ///
    /// `local` may be unspecified if the port has a single address of the family. Its port may be 0 (any).
    ///
    /// # Errors
    /// The queue pair can't be used, or an argument is invalid.
    pub fn cm_connect(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
        qpn: Qpn,
        params: ConnParams,
    ) -> Result<ConnId, VerbsError> {
        self.now = now;
        let (transport, srq) = self.at(qpn, |port| port.check_free(qpn, QpType::XrcIni))??;
        let av = self.check_av(&roce_verbs::AddressVector::new(local.ip(), remote.ip()))?;
        self.at(qpn, |port| port.init_qp(now, qpn))??;
        let terms = self.local_terms(&params);
        let args = ConnectArgs {
            params,
            srq,
            transport,
            src_port: self.handshakes.promise(qpn),
            ..ConnectArgs::new(
                SocketAddr::new(av.local, local.port()),
                SocketAddr::new(av.remote, remote.port()),
                qpn,
                terms.rq_psn,
                self.config.mtus.of(av.local),
            )
        };
        let conn = self.cm.connect(now, &args).map_err(cm_error)?;
        self.bind(conn, qpn, terms, false);
        Ok(conn)
    }

    /// Accepts a connect request with a queue pair in RESET or INIT. [`PortCmEvent::Established`] follows.
    ///
    /// Moves the queue pair to RTS at once, because the peer's first packet may overtake its RTU.
    ///
    /// # Errors
    /// There is no such request, or the queue pair can't be used and may now be in error. The request stays open.
    pub fn cm_accept(&mut self, now: Instant, conn: ConnId, qpn: Qpn, params: ConnParams) -> Result<(), VerbsError> {
        self.now = now;
        let (transport, srq) = self.at(qpn, |port| port.check_free(qpn, QpType::XrcTgt))??;
        let path = self.cm.accept_path(conn, &params).map_err(cm_error)?;
        if path.transport != transport {
            return Err(invalid(format_args!(
                "the peer requests transport {:?}, the queue pair has {transport:?}",
                path.transport
            )));
        }
        let terms = self.local_terms(&params);
        let accepted = self
            .at(qpn, |port| port.bring_to_rts(now, qpn, &path, terms))
            .flatten()
            .and_then(|()| {
                let args = AcceptArgs {
                    srq,
                    src_port: self.handshakes.promise(qpn),
                    ..AcceptArgs::new(qpn, terms.rq_psn, params)
                };
                self.cm.accept(now, conn, &args).map_err(cm_error)
            });
        if let Err(e) = accepted {
            // An error here means that the port is closed, and its queue pairs with it.
            let _ = self.at(qpn, |port| port.fail_qp(now, qpn));
            return Err(e);
        }
        self.bind(conn, qpn, terms, true);
        self.pump_cm(now);
        Ok(())
    }

    /// Rejects a connect request and destroys the connection.
    ///
    /// # Errors
    /// There is no such request, or the private data is too long.
    pub fn cm_reject(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), VerbsError> {
        self.now = now;
        self.cm.reject(now, conn, reason, private_data).map_err(cm_error)?;
        self.cm_destroy(now, conn);
        Ok(())
    }

    /// Moves the connection's queue pair to error and sends a DREQ. A second call does nothing.
    ///
    /// [`PortCmEvent::Disconnected`] follows when the peer answers, or after the DREQ's last retry.
    pub fn cm_disconnect(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.fail_conn(now, conn);
        self.cm.disconnect(now, conn);
        self.pump_cm(now);
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
        self.fail_conn(now, conn);
        self.raw_conns.remove(&conn);
        self.handshakes.remove(conn);
        self.cm.destroy(now, conn);
        self.at_qp_of(conn, |port, _, slot| {
            let entry = &mut *port.qps[slot];
            entry.conn = None;
            entry.half_open = false;
        });
        self.conns.remove(&conn);
        self.pump_cm(now);
    }

    /// Returns the next event of a connection or listener.
    pub fn poll_cm_event(&mut self) -> Option<PortCmEvent> {
        while let Some(event) = self.cm_events.pop_front() {
            // Drop queued events of destroyed connections.
            let conn = event.conn();
            if self.conns.contains_key(&conn) || self.raw_conns.contains(&conn) {
                return Some(event);
            }
        }
        None
    }

    /// Returns the next change for the processes that share the address ([`roce_cm::CmConfig::report_changes`]).
    pub fn poll_change(&mut self) -> Option<PortChange> {
        match self.qpns.take_spread() {
            true => Some(PortChange::Spread),
            false => self.cm.poll_change().map(PortChange::Connection),
        }
    }

    /// Returns the connection manager's state of a connection, for diagnosis.
    pub fn cm_state(&self, conn: ConnId) -> Option<roce_cm::state::State> {
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
        if let Some(mad) = quoted.get(MAD_OFFSET..)
            && self.cm.handle_undeliverable(now, remote, mad, why)
        {
            self.pump_cm(now);
        }
    }

    /// Processes the connection manager's pending events.
    pub(crate) fn pump_cm(&mut self, now: Instant) {
        while let Some(event) = self.cm.poll_event() {
            self.on_cm_event(now, event);
        }
    }

    fn on_cm_event(&mut self, now: Instant, event: Event) {
        if let Some(event) = self.as_raw(&event) {
            match &event {
                PortCmEvent::Raw(Event::Request { conn, path, .. } | Event::Reply { conn, path, .. }) => {
                    self.handshakes.insert(*conn, path);
                }
                PortCmEvent::Raw(Event::Disconnected { conn, .. }) => self.handshakes.remove(*conn),
                _ => {}
            }
            self.cm_events.push_back(event);
            return;
        }
        if let Event::Rejected { conn, .. } | Event::Unreachable { conn, .. } | Event::Disconnected { conn, .. } = event
        {
            self.fail_conn(now, conn);
        }
        let event = match event {
            Event::Request {
                listener,
                conn,
                local,
                remote,
                private_data,
                path,
            } => {
                self.conns.insert(conn, Conn::default());
                PortCmEvent::ConnectRequest {
                    listener,
                    conn,
                    local,
                    remote,
                    private_data,
                    initiator_depth: path.initiator_depth,
                    responder_resources: path.responder_resources,
                }
            }
            Event::Reply {
                conn,
                path,
                private_data,
            } => match self.on_reply(now, conn, &path) {
                Ok(()) => PortCmEvent::Established { conn, private_data },
                Err(e) => {
                    self.fail_conn(now, conn);
                    let text = e.to_string();
                    PortCmEvent::ConnectError { conn, text }
                }
            },
            Event::Established { conn } => {
                self.at_qp_of(conn, |port, _, slot| port.qps[slot].half_open = false);
                PortCmEvent::Established {
                    conn,
                    private_data: Vec::new(),
                }
            }
            Event::Rejected {
                conn,
                reason,
                private_data,
                ..
            } => PortCmEvent::Rejected {
                conn,
                reason,
                private_data,
            },
            Event::Unreachable { conn, why } => PortCmEvent::Unreachable { conn, why },
            Event::Disconnected { conn, .. } => PortCmEvent::Disconnected { conn },
            Event::TimewaitExit { conn } => PortCmEvent::TimewaitExit { conn },
            // Datagram services exist only as raw ones.
            Event::SidrRequest { conn, .. } | Event::Resolved { conn, .. } => {
                self.cm.destroy(now, conn);
                return;
            }
        };
        self.cm_events.push_back(event);
    }

    /// Moves the queue pair to RTS after the peer accepted, then sends the RTU.
    fn on_reply(&mut self, now: Instant, conn: ConnId, path: &RemoteQp) -> Result<(), VerbsError> {
        let terms = self.conns.get(&conn).map(|c| c.terms).unwrap_or_default();
        let done = self.at_qp_of(conn, |port, qpn, _| port.bring_to_rts(now, qpn, path, terms));
        match done.unwrap_or_else(|| Err(VerbsError::State("the connection's queue pair was destroyed".into()))) {
            Ok(()) => self.cm.qp_ready(now, conn).map_err(cm_error),
            Err(e) => {
                // An error here means that the peer has ended the connection and needs no REJ.
                let _ = self.cm.qp_failed(now, conn, RejectReason::NO_QP);
                Err(e)
            }
        }
    }

    /// Checks that a queue pair can be connected; returns its transport and whether it uses an SRQ.
    ///
    /// `xrc` is the type for XRC connections, which differs between the active and the passive side.
    fn check_free(&self, qpn: Qpn, xrc: QpType) -> Result<(ConnTransport, bool), VerbsError> {
        let entry = &self.qps[self.slot(qpn)?];
        let config = entry.qp.config();
        let transport = match config.qp_type {
            QpType::Rc => ConnTransport::Rc,
            QpType::Uc => ConnTransport::Uc,
            t if t == xrc => ConnTransport::Xrc,
            t => {
                return Err(invalid(format_args!(
                    "queue pair type {t:?} can't be used on this side of a connection"
                )));
            }
        };
        match entry.qp.state() {
            _ if entry.conn.is_some() => Err(VerbsError::Busy("the queue pair already has a connection")),
            QpState::Reset | QpState::Init => Ok((transport, config.srq.is_some())),
            state => Err(VerbsError::State(format!(
                "the queue pair is in state {state:?}, expected RESET or INIT"
            ))),
        }
    }

    /// Assigns a queue pair to a connection. `half_open`: the connection waits for the RTU.
    fn bind(&mut self, conn: ConnId, qpn: Qpn, terms: LocalTerms, half_open: bool) {
        let bound = self.at(qpn, |port| {
            let entry = &mut *port.qps[port.qpns.get(qpn)?];
            (entry.conn, entry.half_open) = (Some(conn), half_open);
            Some(())
        });
        let qpn = bound.ok().flatten().map(|()| qpn);
        self.conns.insert(conn, Conn { qpn, terms });
    }

    fn local_terms(&mut self, params: &ConnParams) -> LocalTerms {
        use rand::Rng;
        LocalTerms {
            rq_psn: Psn::new(self.rng.random()),
            min_rnr_timer: params.min_rnr_timer.unwrap_or(self.config.min_rnr_timer),
        }
    }

    /// Moves a queue pair from RESET to INIT, with rdma_cm's access flags (`cm_init_qp_init_attr`).
    fn init_qp(&mut self, now: Instant, qpn: Qpn) -> Result<(), VerbsError> {
        if self.qp_state(qpn) != Some(QpState::Reset) {
            return Ok(());
        }
        let attr = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC),
            ..QpAttr::default()
        };
        self.modify_qp(now, qpn, &attr)
    }

    /// Moves a queue pair to RTS (`cm_init_qp_rtr_attr`, `cm_init_qp_rts_attr`).
    fn bring_to_rts(&mut self, now: Instant, qpn: Qpn, path: &RemoteQp, terms: LocalTerms) -> Result<(), VerbsError> {
        self.init_qp(now, qpn)?;
        let qp_type = self.qps[self.slot(qpn)?].qp.config().qp_type;
        let steps = ToRts {
            rq_psn: terms.rq_psn,
            sq_psn: path.sq_psn,
            max_dest_rd_atomic: path.responder_resources,
            max_rd_atomic: path.initiator_depth,
            min_rnr_timer: terms.min_rnr_timer,
            timeout: path.timeout,
            retry_cnt: path.retry_cnt,
            rnr_retry: path.rnr_retry,
            ..ToRts::new(path.av, path.mtu, path.qpn)
        };
        self.modify_qp(now, qpn, &steps.step(qp_type, QpState::Rtr))?;
        let slot = self.slot(qpn)?;
        self.apply_terms(slot, Terms::of(path));
        self.modify_qp(now, qpn, &steps.step(qp_type, QpState::Rts))
    }

    /// Moves a connection's queue pair to error.
    fn fail_conn(&mut self, now: Instant, conn: ConnId) {
        self.at_qp_of(conn, |port, qpn, _| port.fail_qp(now, qpn));
    }

    fn fail_qp(&mut self, now: Instant, qpn: Qpn) {
        if matches!(self.qp_state(qpn), None | Some(QpState::Reset | QpState::Err)) {
            return;
        }
        let attr = QpAttr {
            state: Some(QpState::Err),
            ..QpAttr::default()
        };
        if let Err(e) = self.modify_qp(now, qpn, &attr) {
            tracing::error!(%qpn, error = %e, "queue pair could not be moved to the error state");
        }
    }
}
