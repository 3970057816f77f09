//! Connections: the connection manager's events turned into queue pair transitions, and the program's calls into both.

use core::net::{IpAddr, SocketAddr};

use roce_bth::{Psn, Qpn, RnrTimer};
use roce_cm::{
    AcceptArgs, CmError, ConnChange, ConnId, ConnTransport, ConnectArgs, Event, ListenId, RemoteQp, mad::Mad,
    state::State,
};
use roce_verbs::{
    AccessFlags, Instant, QpAttr, QpState, QpType, ToRts,
    provider::{ConnParams, RejectReason, VerbsError},
};

use crate::{
    handshake::Terms,
    port::{Port, invalid},
};

/// What happened to a connection or on a listener.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortCmEvent {
    /// Somebody wants to connect. Answer with [`Port::cm_accept`] or [`Port::cm_reject`].
    ConnectRequest {
        /// Where it arrived.
        listener: ListenId,
        /// The new half-open connection.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// The program's private data: 56 bytes, zero-padded.
        private_data: Vec<u8>,
        /// READs and atomics that the peer will answer at a time.
        initiator_depth: u8,
        /// READs and atomics that the peer will send at a time.
        responder_resources: u8,
    },
    /// The connection stands, its queue pair is in RTS.
    Established {
        /// The connection.
        conn: ConnId,
        /// On the active side the accept's private data: 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// The peer refused. The queue pair is in error.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: RejectReason,
        /// The program's private data: 148 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// No answer. The queue pair is in error.
    Unreachable {
        /// The connection.
        conn: ConnId,
    },
    /// The peer accepted, but the queue pair could not be brought up.
    ConnectError {
        /// The connection.
        conn: ConnId,
        /// What failed.
        text: String,
    },
    /// The connection is over. The queue pair is in error and flushed.
    Disconnected {
        /// The connection.
        conn: ConnId,
    },
    /// Nothing of the connection is on its way any more.
    TimewaitExit {
        /// The connection.
        conn: ConnId,
    },
    /// Whatever happened to a listener, connection or resolution whose queue pair is the program's own affair
    /// ([`Port::cm_listen_raw`] and its like).
    Raw(Event),
}

impl PortCmEvent {
    /// The connection that it is about.
    pub const fn conn(&self) -> ConnId {
        match self {
            Self::ConnectRequest { conn, .. }
            | Self::Established { conn, .. }
            | Self::Rejected { conn, .. }
            | Self::Unreachable { conn }
            | Self::ConnectError { conn, .. }
            | Self::Disconnected { conn }
            | Self::TimewaitExit { conn } => *conn,
            Self::Raw(event) => event.conn(),
        }
    }

    /// The listener and the new connection or resolution, when somebody asks for something.
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

/// What the port keeps of a connection.
#[derive(Debug, Default)]
pub(crate) struct Conn {
    /// Its queue pair, once it has one and as long as that lives.
    pub(crate) qpn: Option<Qpn>,
    /// What its queue pair is brought up with.
    ours: Ours,
}

/// Our side's part in bringing a queue pair up.
#[derive(Clone, Copy, Debug, Default)]
struct Ours {
    /// The first PSN that it expects.
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
    /// Listens on a port of the RDMA_CM TCP port space, on one address or on all.
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    pub fn cm_listen(&mut self, addr: Option<IpAddr>, port: u16, backlog: u32) -> Result<ListenId, VerbsError> {
        let addr = addr.map(|a| a.to_canonical()).filter(|a| !a.is_unspecified());
        if let Some(addr) = addr.filter(|a| !self.config.is_local(*a)) {
            return Err(VerbsError::Address(format!("{addr} is not an address of this port")));
        }
        self.cm.listen(addr, port, backlog).map_err(cm_error)
    }

    /// Stops listening. Requests already reported stay.
    pub fn cm_unlisten(&mut self, id: ListenId) {
        self.cm.unlisten(id);
        self.raw_listeners.remove(&id);
    }

    /// Starts to connect a queue pair in RESET or INIT. It is in RTS when [`PortCmEvent::Established`] comes.
    ///
    /// `local` may be unspecified if the port has one address of the family, and its UDP-like port 0 (any).
    ///
    /// # Errors
    /// When the queue pair can't be used or an argument is wrong.
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
        let ours = self.ours(&params);
        let args = ConnectArgs {
            params,
            srq,
            transport,
            src_port: self.handshakes.promise(qpn),
            ..ConnectArgs::new(
                SocketAddr::new(av.local, local.port()),
                SocketAddr::new(av.remote, remote.port()),
                qpn,
                ours.rq_psn,
                self.config.mtus.of(av.local),
            )
        };
        let conn = self.cm.connect(now, &args).map_err(cm_error)?;
        self.bind(conn, qpn, ours, false);
        Ok(conn)
    }

    /// Accepts a connect request with a queue pair in RESET or INIT, which is brought to RTS at once: the peer's first
    /// packet may come before its RTU. [`PortCmEvent::Established`] follows.
    ///
    /// # Errors
    /// When there is no such request or the queue pair can't be used. The request then still waits; the queue pair may
    /// be in error.
    pub fn cm_accept(&mut self, now: Instant, conn: ConnId, qpn: Qpn, params: ConnParams) -> Result<(), VerbsError> {
        self.now = now;
        let (transport, srq) = self.at(qpn, |port| port.check_free(qpn, QpType::XrcTgt))??;
        let path = self.cm.accept_path(conn, &params).map_err(cm_error)?;
        if path.transport != transport {
            return Err(invalid(format_args!(
                "the peer asks for {:?}, not for {transport:?}",
                path.transport
            )));
        }
        let ours = self.ours(&params);
        let raised = self
            .at(qpn, |port| port.raise(now, qpn, &path, ours))
            .flatten()
            .and_then(|()| {
                let args = AcceptArgs {
                    srq,
                    src_port: self.handshakes.promise(qpn),
                    ..AcceptArgs::new(qpn, ours.rq_psn, params)
                };
                self.cm.accept(now, conn, &args).map_err(cm_error)
            });
        if let Err(e) = raised {
            // If its port is closed there is nothing left to fail.
            let _ = self.at(qpn, |port| port.fail_qp(now, qpn));
            return Err(e);
        }
        self.bind(conn, qpn, ours, true);
        self.pump_cm(now);
        Ok(())
    }

    /// Refuses a connect request, or (`RejectReason`) says why it can't be served. The connection is gone after it.
    ///
    /// # Errors
    /// When there is no such request or the data is too long.
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

    /// Moves the connection's queue pair to error and tells the peer. [`PortCmEvent::Disconnected`] follows, at the
    /// latest when the peer does not answer. A second call does nothing.
    pub fn cm_disconnect(&mut self, now: Instant, conn: ConnId) {
        self.now = now;
        self.fail_conn(now, conn);
        self.cm.disconnect(now, conn);
        self.pump_cm(now);
    }

    /// The DREQ of a connection that waits for its DREP, for [`Port::cm_send_farewell`].
    pub fn cm_farewell(&self, conn: ConnId) -> Option<Mad> {
        self.cm.farewell(conn)
    }

    /// Sends a DREQ, perhaps another port's, by the way of a connection of this port that stands.
    ///
    /// False if that is not established: its peer's address may be anybody's.
    pub fn cm_send_farewell(&mut self, now: Instant, by: ConnId, dreq: &Mad) -> bool {
        self.now = now;
        let stands = self.cm.state(by) == Some(State::Established);
        let Some((local, remote)) = self.cm.addresses(by).filter(|_| stands) else {
            return false;
        };
        self.cm.send_farewell(now, local.ip(), remote.ip(), dreq);
        true
    }

    /// Disconnects if need be and forgets the connection; no more events of it come. Its queue pair stays.
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

    /// Takes one event of a connection or listener.
    pub fn poll_cm_event(&mut self) -> Option<PortCmEvent> {
        while let Some(event) = self.cm_events.pop_front() {
            // Nothing comes after destroy, not even what had happened before.
            let conn = event.conn();
            if self.conns.contains_key(&conn) || self.raw_conns.contains(&conn) {
                return Some(event);
            }
        }
        None
    }

    /// Takes one change of a connection that [`roce_cm::CmConfig::report_changes`] asks for.
    pub fn poll_conn_change(&mut self) -> Option<ConnChange> {
        self.cm.poll_change()
    }

    /// The connection manager's state of a connection, for diagnosis.
    pub fn cm_state(&self, conn: ConnId) -> Option<roce_cm::state::State> {
        self.cm.state(conn)
    }

    /// What the connection manager keeps, for diagnosis.
    pub fn cm_usage(&self) -> roce_cm::Usage {
        self.cm.usage()
    }

    /// Works off what the connection manager reports.
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
        if let Event::Rejected { conn, .. } | Event::Unreachable { conn } | Event::Disconnected { conn, .. } = event {
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
            Event::Unreachable { conn } => PortCmEvent::Unreachable { conn },
            Event::Disconnected { conn, .. } => PortCmEvent::Disconnected { conn },
            Event::TimewaitExit { conn } => PortCmEvent::TimewaitExit { conn },
            // Only what is raw has those.
            Event::SidrRequest { conn, .. } | Event::Resolved { conn, .. } => {
                self.cm.destroy(now, conn);
                return;
            }
        };
        self.cm_events.push_back(event);
    }

    /// The peer accepted: the queue pair goes to RTS, then the RTU may leave.
    fn on_reply(&mut self, now: Instant, conn: ConnId, path: &RemoteQp) -> Result<(), VerbsError> {
        let ours = self.conns.get(&conn).map(|c| c.ours).unwrap_or_default();
        let raised = self.at_qp_of(conn, |port, qpn, _| port.raise(now, qpn, path, ours));
        match raised.unwrap_or_else(|| Err(VerbsError::State("its queue pair is gone".into()))) {
            Ok(()) => self.cm.qp_ready(now, conn).map_err(cm_error),
            Err(e) => {
                // If the peer has ended it meanwhile there is nothing to tell it.
                let _ = self.cm.qp_failed(now, conn, RejectReason::NO_QP);
                Err(e)
            }
        }
    }

    /// Whether a queue pair can be connected; its transport, and whether it shares its receives. Of extended reliable
    /// connections each side has its own type.
    fn check_free(&self, qpn: Qpn, xrc: QpType) -> Result<(ConnTransport, bool), VerbsError> {
        let entry = &self.qps[self.slot(qpn)?];
        let config = entry.qp.config();
        let transport = match config.qp_type {
            QpType::Rc => ConnTransport::Rc,
            QpType::Uc => ConnTransport::Uc,
            t if t == xrc => ConnTransport::Xrc,
            t => return Err(invalid(format_args!("a queue pair of type {t:?} is not connected so"))),
        };
        match entry.qp.state() {
            _ if entry.conn.is_some() => Err(VerbsError::Busy("the queue pair has a connection")),
            QpState::Reset | QpState::Init => Ok((transport, config.srq.is_some())),
            state => Err(VerbsError::State(format!(
                "the queue pair is in {state:?}, not in RESET or INIT"
            ))),
        }
    }

    /// A queue pair has a connection from now on; `half_open`: that waits for the RTU.
    fn bind(&mut self, conn: ConnId, qpn: Qpn, ours: Ours, half_open: bool) {
        let bound = self.at(qpn, |port| {
            let entry = &mut *port.qps[port.qpns.get(qpn)?];
            (entry.conn, entry.half_open) = (Some(conn), half_open);
            Some(())
        });
        let qpn = bound.ok().flatten().map(|()| qpn);
        self.conns.insert(conn, Conn { qpn, ours });
    }

    fn ours(&mut self, params: &ConnParams) -> Ours {
        use rand::Rng;
        Ours {
            rq_psn: Psn::new(self.rng.random()),
            min_rnr_timer: params.min_rnr_timer.unwrap_or(self.config.min_rnr_timer),
        }
    }

    /// RESET to INIT, with the rights that rdma_cm gives (`cm_init_qp_init_attr`). In INIT already: left alone.
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

    /// Brings a queue pair to RTS (`cm_init_qp_rtr_attr`, `cm_init_qp_rts_attr`).
    fn raise(&mut self, now: Instant, qpn: Qpn, path: &RemoteQp, ours: Ours) -> Result<(), VerbsError> {
        self.init_qp(now, qpn)?;
        let qp_type = self.qps[self.slot(qpn)?].qp.config().qp_type;
        let way = ToRts {
            rq_psn: ours.rq_psn,
            sq_psn: path.sq_psn,
            max_dest_rd_atomic: path.responder_resources,
            max_rd_atomic: path.initiator_depth,
            min_rnr_timer: ours.min_rnr_timer,
            timeout: path.timeout,
            retry_cnt: path.retry_cnt,
            rnr_retry: path.rnr_retry,
            ..ToRts::new(path.av, path.mtu, path.qpn)
        };
        self.modify_qp(now, qpn, &way.step(qp_type, QpState::Rtr))?;
        let slot = self.slot(qpn)?;
        self.agree(slot, Terms::of(path));
        self.modify_qp(now, qpn, &way.step(qp_type, QpState::Rts))
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
            tracing::error!(%qpn, error = %e, "a queue pair could not be moved to error");
        }
    }
}
