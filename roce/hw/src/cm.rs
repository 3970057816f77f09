//! Connections: the kernel's connection manager by librdmacm.
//!
//! librdmacm can make queue pairs of its own, of devices that it has opened, once a connection's way is known. Ours are made before
//! that; for such the library leaves the states to its user.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use roce_verbs::{
    QpState,
    provider::{CmKind, CmRef, ConnParams, DeviceIx, NoAnswer, RejectReason, VerbsError},
};

use crate::{
    advice,
    device::{Device, device_of},
    qp::Qp,
    sys::{CmId, Context, EventChannel, News, Offer, Reply, State, kind},
};

/// Bytes of private data of a connect, an accept and a reject.
const CONNECT_DATA: usize = 56;
const ACCEPT_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// State of a connection or listener.
enum Progress {
    Listening {
        backlog: u32,
    },
    /// A listener whose device is gone.
    Lost {
        backlog: u32,
    },
    Resolving,
    Resolved,
    /// The path is being resolved; then it connects.
    Routing(Box<ConnParams>),
    Connecting(Box<ConnParams>),
    /// The peer has asked for it: READs that it answers, and that it sends.
    Requested {
        initiator_depth: u8,
        responder_resources: u8,
    },
    Accepted,
    Up,
    Over,
}

/// Connection or listener.
pub(crate) struct Cm {
    raw: CmId,
    /// Its number in the fabric: the token of its events.
    id: CmRef,
    device: Option<usize>,
    /// The device stays open as long as the connection.
    _context: Option<Arc<Context>>,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    progress: Progress,
}

fn nowhere() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
}

/// Why an address won't do, or what else is wrong.
fn refused(what: String, e: io::Error) -> VerbsError {
    match e.raw_os_error() {
        Some(libc::EADDRNOTAVAIL | libc::ENODEV) => VerbsError::Address(format!(
            "{what}: no RDMA device has the address, or leads there ({e}); `rdma link` shows the devices"
        )),
        Some(libc::EADDRINUSE | libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN) => {
            VerbsError::Address(format!("{what}: {e}"))
        }
        Some(libc::EINVAL) => VerbsError::Invalid(format!("{what}: {e}")),
        _ => advice::failed(what, e),
    }
}

fn check_data(data: &[u8], max: usize) -> Result<(), VerbsError> {
    match data.len() <= max {
        true => Ok(()),
        false => Err(VerbsError::Invalid(format!(
            "{} bytes of private data, at most {max}",
            data.len()
        ))),
    }
}

fn gone() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Cm {
    fn create(
        channel: &Arc<EventChannel>,
        id: CmRef,
        local: SocketAddr,
        progress: Progress,
    ) -> Result<Self, VerbsError> {
        let raw = CmId::create(channel, id.0.into());
        Ok(Self {
            raw: raw.map_err(|e| advice::failed("making an object of the connection manager", e))?,
            id,
            device: None,
            _context: None,
            local,
            remote: None,
            progress,
        })
    }

    pub(crate) fn listen(
        channel: &Arc<EventChannel>,
        addr: SocketAddr,
        backlog: u32,
        id: CmRef,
    ) -> Result<Self, VerbsError> {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        let mut this = Self::create(channel, id, addr, Progress::Listening { backlog })?;
        let listening = this.raw.listen(addr, backlog);
        listening.map_err(|e| refused(format!("listening at {addr}"), e))?;
        this.see_local();
        Ok(this)
    }

    /// Detaches a listener from a device that is gone.
    pub(crate) fn lose(&mut self, channel: &Arc<EventChannel>, device: &str) {
        let Progress::Listening { backlog } = self.progress else {
            return;
        };
        if self.raw.device().as_deref() != Some(device) {
            return;
        }
        match CmId::create(channel, self.id.0.into()) {
            Ok(raw) => (self.raw, self.progress) = (raw, Progress::Lost { backlog }),
            Err(e) => tracing::warn!("the listener at {} stays with its device: {e}", self.local),
        }
    }

    /// Listens again if it was lost. An address may come later than its device.
    pub(crate) fn listen_again(&mut self, channel: &Arc<EventChannel>) {
        let Progress::Lost { backlog } = self.progress else {
            return;
        };
        let local = self.local;
        let listening = CmId::create(channel, self.id.0.into()).and_then(|raw| {
            raw.listen(local, backlog)?;
            Ok(raw)
        });
        match listening {
            Ok(raw) => {
                tracing::info!("listening at {local} again");
                (self.raw, self.progress) = (raw, Progress::Listening { backlog });
            }
            Err(e) => tracing::debug!("listening at {local} again: {e}"),
        }
    }

    pub(crate) fn resolve(
        channel: &Arc<EventChannel>,
        src: Option<IpAddr>,
        dst: SocketAddr,
        id: CmRef,
    ) -> Result<Self, VerbsError> {
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        let local = src.map_or_else(nowhere, |ip| SocketAddr::new(ip, 0));
        let mut this = Self::create(channel, id, local, Progress::Resolving)?;
        this.remote = Some(dst);
        let resolving = this.raw.resolve_addr(src, dst);
        resolving.map_err(|e| refused(format!("looking for the way to {dst}"), e))?;
        Ok(this)
    }

    /// Makes a connection of a request on a device, without a number yet.
    pub(crate) fn of_request(raw: CmId, device: usize, devices: &[Device], reply: &Reply) -> Self {
        Self {
            local: raw.local_addr().unwrap_or_else(nowhere),
            remote: raw.peer_addr(),
            raw,
            id: CmRef(0),
            device: Some(device),
            _context: devices[device].context(),
            progress: Progress::Requested {
                initiator_depth: reply.initiator_depth,
                responder_resources: reply.responder_resources,
            },
        }
    }

    pub(crate) fn set_id(&mut self, id: CmRef) {
        self.id = id;
        self.raw.set_token(id.0.into());
    }

    pub(crate) fn addrs(&self) -> (SocketAddr, Option<SocketAddr>) {
        (self.local, self.remote)
    }

    /// Returns its device. A listener at an address has one, too.
    pub(crate) fn device_on(&self, devices: &[Device]) -> Option<usize> {
        self.device.or_else(|| device_of(devices, &self.raw))
    }

    fn see_local(&mut self) {
        if let Some(local) = self.raw.local_addr() {
            self.local = local;
        }
    }

    /// Checks that a queue pair is of its device, and ready to be connected.
    fn check_qp(&self, qp: &Qp) -> Result<(), VerbsError> {
        if Some(qp.device) != self.device {
            return Err(VerbsError::Invalid("the queue pair is another device's".into()));
        }
        match qp.state {
            QpState::Init => Ok(()),
            state => Err(VerbsError::State(format!("the queue pair is in state {state:?}"))),
        }
    }

    pub(crate) fn connect(&mut self, qp: &Qp, params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, CONNECT_DATA)?;
        if !matches!(self.progress, Progress::Resolved) {
            return Err(VerbsError::State("the connection is not resolved".into()));
        }
        self.check_qp(qp)?;
        // The path is resolved only now because the type of service is a part of it.
        let begun = match params.tos {
            Some(tos) => self.raw.set_tos(tos).and_then(|()| self.raw.resolve_route()),
            None => self.raw.resolve_route(),
        };
        begun.map_err(|e| refused("looking for the path to the peer".into(), e))?;
        self.progress = Progress::Routing(Box::new(params.clone()));
        Ok(())
    }

    /// Sends the REQ, once the path is known.
    fn routed(&mut self, qp: Option<&Qp>) -> Option<CmKind> {
        let progress = std::mem::replace(&mut self.progress, Progress::Over);
        let Progress::Routing(params) = progress else {
            self.progress = progress;
            return None;
        };
        self.see_local();
        let Some(qp) = qp.filter(|qp| self.check_qp(qp).is_ok()) else {
            return Some(CmKind::ConnectError("the queue pair is gone".into()));
        };
        let (responder, initiator) = qp.reads;
        let asked = self.raw.connect(&Offer {
            private_data: &params.private_data,
            responder_resources: params.responder_resources.min(responder),
            initiator_depth: params.initiator_depth.min(initiator),
            retry_count: params.retry_count,
            rnr_retry_count: params.rnr_retry_count,
            qpn: qp.qpn.value(),
        });
        match asked {
            Ok(()) => {
                self.progress = Progress::Connecting(params);
                None
            }
            Err(e) => Some(CmKind::ConnectError(format!("asking for a connection: {e}"))),
        }
    }

    /// Brings its queue pair to RTS with what the connection manager knows. `depths`: READs that we answer and send at a time, at most.
    /// `tos`: of our packets, if it is not that of the path.
    fn bring_up(&self, qp: &mut Qp, params: &ConnParams, depths: (u8, u8), tos: Option<u8>) -> io::Result<()> {
        let raw = qp.raw.as_ref().ok_or_else(gone)?;
        let mut init = self.raw.attributes(State::Init)?;
        init.set_access(qp.access);
        raw.modify(&mut init)?;
        let mut rtr = self.raw.attributes(State::Rtr)?;
        rtr.limit_reads(depths.0, depths.1);
        if let Some(timer) = params.min_rnr_timer {
            rtr.set_min_rnr_timer(timer.code());
        }
        if let Some(tos) = tos {
            rtr.set_traffic_class(tos);
        }
        raw.modify(&mut rtr)?;
        let mut rts = self.raw.attributes(State::Rts)?;
        rts.limit_reads(depths.0, depths.1);
        raw.modify(&mut rts)?;
        qp.state = QpState::Rts;
        Ok(())
    }

    /// Establishes it, once the peer has accepted.
    fn answered(&mut self, qp: Option<&mut Qp>, reply: Reply) -> Option<CmKind> {
        let progress = std::mem::replace(&mut self.progress, Progress::Over);
        let Progress::Connecting(params) = progress else {
            self.progress = progress;
            return None;
        };
        let Some(qp) = qp else {
            return Some(self.not_up(&gone()));
        };
        let up = self.bring_up(qp, &params, qp.reads, None);
        match up.and_then(|()| self.raw.establish()) {
            Ok(()) => {
                self.progress = Progress::Up;
                let private_data = reply.private_data;
                Some(CmKind::Established { private_data })
            }
            Err(e) => {
                qp.fail();
                Some(self.not_up(&e))
            }
        }
    }

    fn not_up(&self, e: &io::Error) -> CmKind {
        let _ = self.raw.reject(&[]);
        CmKind::ConnectError(format!("bringing the queue pair up: {e}"))
    }

    pub(crate) fn accept(&mut self, qp: &mut Qp, params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, ACCEPT_DATA)?;
        let Progress::Requested {
            initiator_depth,
            responder_resources,
        } = self.progress
        else {
            return Err(VerbsError::State("not a request that waits".into()));
        };
        self.check_qp(qp)?;
        // Not more than the peer can, and we.
        let (responder, initiator) = qp.reads;
        let depths = (
            params.responder_resources.min(responder_resources).min(responder),
            params.initiator_depth.min(initiator_depth).min(initiator),
        );
        let up = self.bring_up(qp, params, depths, params.tos);
        up.map_err(|e| advice::failed("bringing the queue pair up", e))?;
        let offer = Offer {
            private_data: &params.private_data,
            responder_resources: depths.0,
            initiator_depth: depths.1,
            retry_count: params.retry_count,
            rnr_retry_count: params.rnr_retry_count,
            qpn: qp.qpn.value(),
        };
        let accepted = self.raw.accept(&offer);
        accepted.map_err(|e| advice::failed("accepting a connection", e))?;
        self.progress = Progress::Accepted;
        Ok(())
    }

    pub(crate) fn reject(&mut self, reason: RejectReason, data: &[u8]) -> Result<(), VerbsError> {
        check_data(data, REJECT_DATA)?;
        if !matches!(self.progress, Progress::Requested { .. }) {
            return Err(VerbsError::State("not a request that waits".into()));
        }
        if reason != RejectReason::CONSUMER {
            tracing::debug!("a request is refused for reason {}; the kernel says 28", reason.0);
        }
        let rejected = self.raw.reject(data);
        rejected.map_err(|e| advice::failed("refusing a connection", e))
    }

    pub(crate) fn disconnect(&mut self, qp: Option<&mut Qp>) {
        if !matches!(
            self.progress,
            Progress::Up | Progress::Accepted | Progress::Connecting(_)
        ) {
            return;
        }
        qp.map(Qp::fail);
        self.progress = Progress::Over;
        if let Err(e) = self.raw.disconnect() {
            tracing::debug!("disconnecting: {e}");
        }
    }

    /// Notes that a packet has come by its queue pair before the peer's confirmation, which may be lost.
    pub(crate) fn communication_established(&self) {
        if matches!(self.progress, Progress::Accepted) {
            let _ = self.raw.peer_talks();
        }
    }

    /// Processes an event of the connection manager. Returns what it means to the user.
    pub(crate) fn event(&mut self, devices: &[Device], qp: Option<&mut Qp>, news: News) -> Option<CmKind> {
        match news.kind {
            kind::ADDR_RESOLVED => {
                self.see_local();
                let Some(device) = device_of(devices, &self.raw) else {
                    self.progress = Progress::Over;
                    tracing::debug!("the way leads by a device that is not in use");
                    return Some(CmKind::Unreachable(NoAnswer::Timeout));
                };
                (self.device, self.progress) = (Some(device), Progress::Resolved);
                self._context = devices[device].context();
                let device = DeviceIx(device as u16);
                Some(CmKind::Resolved { device })
            }
            kind::ROUTE_RESOLVED => self.routed(qp.as_deref()),
            kind::CONNECT_RESPONSE => self.answered(qp, news.reply),
            kind::ESTABLISHED => {
                if !matches!(self.progress, Progress::Accepted) {
                    return None;
                }
                self.progress = Progress::Up;
                let private_data = news.reply.private_data;
                Some(CmKind::Established { private_data })
            }
            kind::DISCONNECTED => {
                // The peer waits for an answer, which this is. To our own disconnect it was one.
                let _ = self.raw.disconnect();
                self.progress = Progress::Over;
                qp.map(Qp::fail);
                Some(CmKind::Disconnected)
            }
            kind::TIMEWAIT_EXIT => Some(CmKind::TimewaitExit),
            kind::ADDR_CHANGE => Some(CmKind::AddressChange),
            failed => {
                self.progress = Progress::Over;
                failure(failed, news)
            }
        }
    }
}

/// Why a connection did not come about.
fn failure(what: u32, news: News) -> Option<CmKind> {
    match what {
        kind::REJECTED => Some(CmKind::Rejected {
            reason: RejectReason(u16::try_from(news.status).unwrap_or(0)),
            private_data: news.reply.private_data,
        }),
        kind::ADDR_ERROR | kind::ROUTE_ERROR | kind::UNREACHABLE => Some(CmKind::Unreachable(NoAnswer::Timeout)),
        kind::CONNECT_ERROR => Some(CmKind::ConnectError(match news.status {
            status if status < 0 => io::Error::from_raw_os_error(-status).to_string(),
            status => format!("status {status} of the connection manager"),
        })),
        other => {
            tracing::debug!("an event {other} of the connection manager");
            None
        }
    }
}
