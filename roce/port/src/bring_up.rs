//! Queue pairs of connections, for applications that don't modify them: INIT, RTR and RTS while a connection is
//! established, ERR when it ends (as rdma_cm does for `id->qp`).
//!
//! The application's calls work in steps, because GSI and queue pair may be different ports'.

use core::net::SocketAddr;

use crate::cm::{AcceptArgs, ConnId, ConnTransport, ConnectArgs, LocalQp, RemoteQp};
use rand::Rng;
use roce_bth::{Psn, Qpn};
use roce_verbs::{
    AccessFlags, Instant, QpAttr, QpState, QpType,
    provider::{ConnParams, VerbsError},
};

use crate::{
    entry::Binding,
    message::{FromShard, Offer, QpCommand, QpKey},
    port::{Port, invalid},
};

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
        let (local, remote) = self.endpoints(local, remote)?;
        let offer = self.offer_qp(now, qpn, &params)?;
        let connected = self.connect_offered(now, local, remote, &offer, params);
        if connected.is_err() {
            self.perform(now, QpCommand::Release(offer.qp()));
        }
        connected
    }

    /// Accepts a connect request with a queue pair in RESET or INIT ([`Port::cm_accept`]).
    ///
    /// Moves the queue pair to RTS at once, because the peer's first packet may overtake its RTU.
    ///
    /// # Errors
    /// There is no such request, or the queue pair can't be used and may now be in error. The request stays open.
    pub fn accept_qp(&mut self, now: Instant, conn: ConnId, qpn: Qpn, params: ConnParams) -> Result<(), VerbsError> {
        let path = self.accept_path(conn, &params)?;
        let offer = self.offer_accepted(now, conn, qpn, &path, &params)?;
        let accepted = self.accept_offered(now, conn, &offer, params);
        if accepted.is_err() {
            self.withdraw(now, &offer);
        }
        accepted
    }

    /// Reserves a queue pair in RESET or INIT for a connection. [`Port::connect_offered`] or [`QpCommand::Release`] follows.
    ///
    /// # Errors
    /// The queue pair can't be used.
    pub fn offer_qp(&mut self, now: Instant, qpn: Qpn, params: &ConnParams) -> Result<Offer, VerbsError> {
        let qp = self.check_free(qpn, QpType::XrcIni)?;
        self.init_qp(now, qpn)?;
        self.reserve(qp, params)
    }

    /// Moves a queue pair in RESET or INIT to RTS, for a connect request that it is going to accept. [`Port::accept_offered`] or
    /// [`Port::withdraw`] follows.
    ///
    /// # Errors
    /// The queue pair can't be used and may now be in error.
    pub fn offer_accepted(
        &mut self,
        now: Instant,
        conn: ConnId,
        qpn: Qpn,
        path: &RemoteQp,
        params: &ConnParams,
    ) -> Result<Offer, VerbsError> {
        let qp = self.check_free(qpn, QpType::XrcTgt)?;
        if path.transport != qp.transport {
            return Err(invalid(format_args!(
                "the peer requests transport {:?}, the queue pair has {:?}",
                path.transport, qp.transport
            )));
        }
        let offer = self.reserve(qp, params)?;
        if let Err(e) = self.bring_up(now, offer.qp(), path) {
            self.withdraw(now, &offer);
            return Err(e);
        }
        let slot = self.slot(qpn)?;
        self.qps[slot].binding = Binding::HalfOpen(conn);
        Ok(offer)
    }

    /// Moves a queue pair whose request could not be accepted to error. It is free for another connection.
    pub fn withdraw(&mut self, now: Instant, offer: &Offer) {
        if self.keyed(offer.qp()).is_some() {
            self.fail_qp(now, offer.qp.qpn);
            self.perform(now, QpCommand::Release(offer.qp()));
        }
    }

    /// Sends the REQ for a queue pair that its shard has reserved.
    ///
    /// # Errors
    /// An argument is invalid, or a limit is reached.
    pub fn connect_offered(
        &mut self,
        now: Instant,
        local: SocketAddr,
        remote: SocketAddr,
        offer: &Offer,
        params: ConnParams,
    ) -> Result<ConnId, VerbsError> {
        let mtu = self.config.mtus.of(self.endpoints(local, remote)?.0.ip());
        let args = ConnectArgs {
            params,
            qp: offer.qp,
            ..ConnectArgs::new(local, remote, offer.qp.qpn, offer.qp.start_psn, mtu)
        };
        let conn = self.cm_connect(now, &args)?;
        self.gsi()?.bind(conn, offer.qp());
        Ok(conn)
    }

    /// Returns the path of a connect request that waits for its answer.
    ///
    /// # Errors
    /// There is no such request, or the private data is too long.
    pub fn accept_path(&mut self, conn: ConnId, params: &ConnParams) -> Result<RemoteQp, VerbsError> {
        self.gsi()?.cm.accept_path(conn, params)
    }

    /// Sends the REP for a queue pair that its shard has moved to RTS.
    ///
    /// # Errors
    /// The request is no longer pending.
    pub fn accept_offered(
        &mut self,
        now: Instant,
        conn: ConnId,
        offer: &Offer,
        params: ConnParams,
    ) -> Result<(), VerbsError> {
        let qp = offer.qp;
        self.cm_accept(now, conn, &AcceptArgs { qp, params })?;
        self.gsi()?.bind(conn, offer.qp());
        Ok(())
    }

    /// Performs a command of the GSI. Returns the report that it asks for.
    pub(crate) fn perform(&mut self, now: Instant, command: QpCommand) -> Option<FromShard> {
        match command {
            QpCommand::BringUp { qp, conn, path } => Some(FromShard::BroughtUp(conn, self.bring_up(now, qp, &path))),
            QpCommand::Fail { qp, conn } => {
                if self.keyed(qp).is_some() {
                    self.fail_qp(now, qp.qpn);
                }
                Some(FromShard::Failed(conn))
            }
            QpCommand::Release(qp) => {
                self.set_binding(qp, Binding::Free);
                None
            }
        }
    }

    /// Returns the slot of a queue pair, unless it is gone.
    fn keyed(&self, qp: QpKey) -> Option<usize> {
        let slot = self.qpns.get(qp.qpn)?;
        (self.qps[slot].serial == qp.serial).then_some(slot)
    }

    fn set_binding(&mut self, qp: QpKey, binding: Binding) {
        if let Some(slot) = self.keyed(qp) {
            self.qps[slot].binding = binding;
        }
    }

    /// Checks that a queue pair can be connected; returns it with a random PSN.
    ///
    /// `xrc` is the type for XRC connections, which differs between the active and the passive side.
    fn check_free(&mut self, qpn: Qpn, xrc: QpType) -> Result<LocalQp, VerbsError> {
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
        match (entry.qp.state(), entry.binding) {
            (QpState::Reset | QpState::Init, Binding::Free) => Ok(LocalQp {
                transport,
                srq: config.srq.is_some(),
                ..LocalQp::new(qpn, Psn::new(self.rng.random()))
            }),
            (state, Binding::Free) => Err(VerbsError::State(format!(
                "the queue pair is in state {state:?}, expected RESET or INIT"
            ))),
            _ => Err(VerbsError::Busy("the queue pair already has a connection")),
        }
    }

    /// Reserves a queue pair for a connection.
    fn reserve(&mut self, qp: LocalQp, params: &ConnParams) -> Result<Offer, VerbsError> {
        let slot = self.slot(qp.qpn)?;
        let entry = &mut *self.qps[slot];
        entry.binding = Binding::Offered {
            rq_psn: qp.start_psn,
            min_rnr_timer: params.min_rnr_timer.unwrap_or(self.config.min_rnr_timer),
        };
        let serial = entry.serial;
        let qp = self.promised(&qp);
        Ok(Offer { qp, serial })
    }

    /// Moves a queue pair from RESET to INIT, with rdma_cm's access flags (`cm_init_qp_init_attr`).
    pub(crate) fn init_qp(&mut self, now: Instant, qpn: Qpn) -> Result<(), VerbsError> {
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

    /// Moves a reserved queue pair to RTS (`cm_init_qp_rtr_attr`, `cm_init_qp_rts_attr`).
    fn bring_up(&mut self, now: Instant, qp: QpKey, path: &RemoteQp) -> Result<(), VerbsError> {
        let entry = self.keyed(qp).map(|slot| &*self.qps[slot]);
        let Some((Binding::Offered { rq_psn, min_rnr_timer }, qp_type)) =
            entry.map(|entry| (entry.binding, entry.qp.config().qp_type))
        else {
            return Err(VerbsError::State("the connection's queue pair was destroyed".into()));
        };
        let qpn = qp.qpn;
        self.init_qp(now, qpn)?;
        let steps = QpAttr {
            rq_psn: Some(rq_psn),
            sq_psn: Some(path.sq_psn),
            max_dest_rd_atomic: Some(path.responder_resources),
            max_rd_atomic: Some(path.initiator_depth),
            min_rnr_timer: Some(min_rnr_timer),
            timeout: Some(path.timeout),
            retry_cnt: Some(path.retry_cnt),
            rnr_retry: Some(path.rnr_retry),
            ..QpAttr::to_rts(path.av, path.mtu, path.qpn)
        };
        self.modify_with(now, qpn, &steps.step(qp_type, QpState::Rtr), Some(path))?;
        self.modify_qp(now, qpn, &steps.step(qp_type, QpState::Rts))?;
        self.set_binding(qp, Binding::Bound);
        Ok(())
    }

    /// Moves a queue pair to the error state, unless it is in RESET.
    pub(crate) fn fail_qp(&mut self, now: Instant, qpn: Qpn) {
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

    /// Reports the peer's first packet on a half-open connection, which counts as its RTU.
    pub(crate) fn on_first_packet(&mut self, now: Instant, slot: usize) {
        let entry = &mut *self.qps[slot];
        if let Binding::HalfOpen(conn) = entry.binding {
            entry.binding = Binding::Bound;
            self.handle_report(now, FromShard::FirstPacket(conn));
        }
    }
}
