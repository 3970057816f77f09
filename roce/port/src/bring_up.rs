//! Queue pairs of connections, for applications that don't modify them: INIT, RTR and RTS while a connection is
//! established, ERR when it ends (as rdma_cm does for `id->qp`).

use core::net::SocketAddr;

use rand::Rng;
use roce_bth::{Psn, Qpn, RnrTimer};
use roce_cm::{AcceptArgs, ConnId, ConnTransport, ConnectArgs, Event, RemoteQp};
use roce_verbs::{
    AccessFlags, Instant, QpAttr, QpState, QpType, ToRts,
    provider::{ConnParams, RejectReason, VerbsError},
};

use crate::{
    cm::cm_error,
    handshake::Terms,
    port::{Port, invalid},
};

/// Queue pair of a connection, with its local attributes for the transition to RTS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) qpn: Qpn,
    /// First PSN that the queue pair expects.
    rq_psn: Psn,
    min_rnr_timer: RnrTimer,
}

impl Port {
    /// Starts to connect a queue pair in RESET or INIT ([`Port::cm_connect`]). [`Port::poll_cm_event`] moves it to RTS.
    ///
    /// # Errors
    /// The queue pair can't be used, or an argument is invalid.
    pub fn connect_qp(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
        qpn: Qpn,
        params: ConnParams,
    ) -> Result<ConnId, VerbsError> {
        self.now = now;
        let (transport, srq) = self.at(qpn, |port| port.check_free(qpn, QpType::XrcIni))??;
        let (local, remote) = self.endpoints(local, remote)?;
        self.at(qpn, |port| port.init_qp(now, qpn))??;
        let bound = self.new_bound(qpn, &params);
        let mtu = self.config.mtus.of(local.ip());
        let args = ConnectArgs {
            params,
            srq,
            transport,
            ..ConnectArgs::new(local, remote, qpn, bound.rq_psn, mtu)
        };
        let conn = self.cm_connect(now, &args)?;
        self.bind(conn, bound, false);
        Ok(conn)
    }

    /// Accepts a connect request with a queue pair in RESET or INIT ([`Port::cm_accept`]).
    ///
    /// Moves the queue pair to RTS at once, because the peer's first packet may overtake its RTU.
    ///
    /// # Errors
    /// There is no such request, or the queue pair can't be used and may now be in error. The request stays open.
    pub fn accept_qp(&mut self, now: Instant, conn: ConnId, qpn: Qpn, params: ConnParams) -> Result<(), VerbsError> {
        self.now = now;
        let (transport, srq) = self.at(qpn, |port| port.check_free(qpn, QpType::XrcTgt))??;
        let path = self.cm.accept_path(conn, &params).map_err(cm_error)?;
        if path.transport != transport {
            return Err(invalid(format_args!(
                "the peer requests transport {:?}, the queue pair has {transport:?}",
                path.transport
            )));
        }
        let bound = self.new_bound(qpn, &params);
        let brought = self.at(qpn, |port| port.bring_to_rts(now, &path, bound)).flatten();
        let accepted = brought.and_then(|()| {
            let args = AcceptArgs {
                srq,
                ..AcceptArgs::new(qpn, bound.rq_psn, params)
            };
            self.cm_accept(now, conn, &args)
        });
        if let Err(e) = accepted {
            // An error here means that the port is closed, and its queue pairs with it.
            let _ = self.at(qpn, |port| port.fail_qp(now, qpn));
            return Err(e);
        }
        self.bind(conn, bound, true);
        self.handshakes.remove(conn);
        Ok(())
    }

    /// Moves the queue pair of [`Port::connect_qp`] or [`Port::accept_qp`] as an event of its connection demands. Changes nothing for
    /// other connections.
    ///
    /// [`Event::Reply`] moves it to RTS and becomes [`Event::Established`] or [`Event::Failed`].
    pub(crate) fn follow_event(&mut self, now: Instant, event: Event) -> Event {
        let id = event.conn();
        let Some(bound) = self.conns.get(&id).copied() else {
            return event;
        };
        match event {
            Event::Reply {
                conn,
                path,
                private_data,
            } => match self.on_reply(now, conn, &path, bound) {
                Ok(()) => Event::Established { conn, private_data },
                Err(e) => {
                    self.fail_qp_of(now, conn);
                    let text = e.to_string();
                    Event::Failed { conn, text }
                }
            },
            Event::Established { .. } => {
                self.at_qp_of(id, |port, _, slot| port.qps[slot].half_open = false);
                event
            }
            Event::Rejected { .. } | Event::Unreachable { .. } | Event::Disconnected { .. } => {
                self.fail_qp_of(now, id);
                event
            }
            _ => event,
        }
    }

    /// Moves the queue pair to RTS after the peer accepted, then sends the RTU.
    fn on_reply(&mut self, now: Instant, conn: ConnId, path: &RemoteQp, bound: Bound) -> Result<(), VerbsError> {
        let done = self.at_qp_of(conn, |port, _, _| port.bring_to_rts(now, path, bound));
        match done.unwrap_or_else(|| Err(VerbsError::State("the connection's queue pair was destroyed".into()))) {
            Ok(()) => self.cm_establish(now, conn),
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

    fn new_bound(&mut self, qpn: Qpn, params: &ConnParams) -> Bound {
        Bound {
            qpn,
            rq_psn: Psn::new(self.rng.random()),
            min_rnr_timer: params.min_rnr_timer.unwrap_or(self.config.min_rnr_timer),
        }
    }

    /// Assigns a queue pair to a connection. `half_open`: the connection waits for the RTU.
    fn bind(&mut self, conn: ConnId, bound: Bound, half_open: bool) {
        // An error here means that the port is closed, and its queue pairs with it.
        let _ = self.at(bound.qpn, |port| {
            if let Some(slot) = port.qpns.get(bound.qpn) {
                let entry = &mut *port.qps[slot];
                (entry.conn, entry.half_open) = (Some(conn), half_open);
            }
        });
        self.conns.insert(conn, bound);
    }

    /// Ends the assignment of a queue pair to a connection.
    pub(crate) fn unbind(&mut self, conn: ConnId) {
        self.at_qp_of(conn, |port, _, slot| {
            let entry = &mut *port.qps[slot];
            entry.conn = None;
            entry.half_open = false;
        });
        self.conns.remove(&conn);
    }

    pub(crate) fn is_bound(&self, conn: ConnId) -> bool {
        self.conns.contains_key(&conn)
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
    fn bring_to_rts(&mut self, now: Instant, path: &RemoteQp, bound: Bound) -> Result<(), VerbsError> {
        let qpn = bound.qpn;
        self.init_qp(now, qpn)?;
        let qp_type = self.qps[self.slot(qpn)?].qp.config().qp_type;
        let steps = ToRts {
            rq_psn: bound.rq_psn,
            sq_psn: path.sq_psn,
            max_dest_rd_atomic: path.responder_resources,
            max_rd_atomic: path.initiator_depth,
            min_rnr_timer: bound.min_rnr_timer,
            timeout: path.timeout,
            retry_cnt: path.retry_cnt,
            rnr_retry: path.rnr_retry,
            ..ToRts::new(path.av, path.mtu, path.qpn)
        };
        self.modify_with(now, qpn, &steps.step(qp_type, QpState::Rtr), Some(Terms::of(path)))?;
        self.modify_qp(now, qpn, &steps.step(qp_type, QpState::Rts))
    }

    /// Moves a connection's queue pair to error.
    pub(crate) fn fail_qp_of(&mut self, now: Instant, conn: ConnId) {
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
