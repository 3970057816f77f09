//! Connections: the kernel's connection manager by librdmacm.
//!
//! librdmacm can make queue pairs of its own, of devices that it has opened, once a connection's way is known. Ours are made before
//! that; for such the library leaves the states to its user.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use roce_verbs::{
    QpState,
    provider::{CmKind, CmRef, ConnParams, DeviceIx, Event, NoAnswer, QpId, RejectReason, VerbsError},
};

use crate::{
    advice,
    device::{FULL, HwDevice, gone},
    qp,
    sys::{CmId, News, Offer, Reply, State, kind},
};

/// Bytes of private data of a connect, an accept and a reject.
const CONNECT_DATA: usize = 56;
const ACCEPT_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// How far a connection is.
pub(crate) enum Progress {
    Listening {
        backlog: u32,
    },
    /// A listener whose device is gone.
    Lost {
        backlog: u32,
    },
    Resolving,
    Resolved,
    /// The path is asked for, and then the connection.
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

/// A connection or a listener.
pub(crate) struct Cm {
    pub(crate) raw: CmId,
    device: Option<usize>,
    qp: Option<QpId>,
    local: SocketAddr,
    remote: Option<SocketAddr>,
    pub(crate) progress: Progress,
}

impl Cm {
    pub(crate) fn addrs(&self) -> (SocketAddr, Option<SocketAddr>) {
        (self.local, self.remote)
    }

    /// The device of a connection, once it is known.
    pub(crate) const fn device(&self) -> Option<usize> {
        self.device
    }

    fn see_local(&mut self) {
        if let Some(local) = self.raw.local_addr() {
            self.local = local;
        }
    }
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

impl HwDevice {
    fn insert_cm(&mut self, make: impl FnOnce(CmId) -> Cm) -> Result<CmRef, VerbsError> {
        let (channel, mut failed) = (&self.channel, None);
        let id = self.cms.insert_with(|id: CmRef| {
            let raw = CmId::create(channel, id.0.into()).map_err(|e| failed = Some(e));
            raw.ok().map(make)
        });
        let why = |e| advice::failed("making an object of the connection manager", e);
        id.ok_or_else(|| failed.map_or(FULL, why))
    }

    pub(crate) fn listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        let id = self.insert_cm(|raw| Cm {
            raw,
            device: None,
            qp: None,
            local: addr,
            remote: None,
            progress: Progress::Listening { backlog },
        })?;
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("listener"))?;
        if let Err(e) = cm.raw.listen(addr, backlog) {
            self.cms.remove(id);
            return Err(refused(format!("listening at {addr}"), e));
        }
        cm.see_local();
        Ok(id)
    }

    pub(crate) fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let src = src.map(|ip| ip.to_canonical()).filter(|ip| !ip.is_unspecified());
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        let id = self.insert_cm(|raw| Cm {
            raw,
            device: None,
            qp: None,
            local: src.map_or_else(nowhere, |ip| SocketAddr::new(ip, 0)),
            remote: Some(dst),
            progress: Progress::Resolving,
        })?;
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("connection"))?;
        if let Err(e) = cm.raw.resolve_addr(src, dst) {
            self.cms.remove(id);
            return Err(refused(format!("looking for the way to {dst}"), e));
        }
        Ok(id)
    }

    /// The device of a connection that is on one of ours.
    fn device_of(&self, id: &CmId) -> Option<usize> {
        let name = id.device()?;
        self.devices.iter().position(|d| d.name == name && !d.gone)
    }

    /// Checks that a queue pair is of a connection's device; its number.
    fn fitting_qp(&self, qp: QpId, device: Option<usize>) -> Result<u32, VerbsError> {
        let of = self.qps.get(qp).ok_or_else(|| gone("queue pair"))?;
        if Some(of.device) != device {
            return Err(VerbsError::Invalid("the queue pair is another device's".into()));
        }
        match of.state {
            QpState::Init => Ok(of.qpn.value()),
            state => Err(VerbsError::State(format!("the queue pair is in state {state:?}"))),
        }
    }

    pub(crate) fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, CONNECT_DATA)?;
        let cm = self.cms.get(id).ok_or_else(|| gone("connection"))?;
        if !matches!(cm.progress, Progress::Resolved) {
            return Err(VerbsError::State("the connection is not resolved".into()));
        }
        self.fitting_qp(qp, cm.device)?;
        // The path is asked for only now because the type of service is a part of it.
        let begun = match params.tos {
            Some(tos) => cm.raw.set_tos(tos).and_then(|()| cm.raw.resolve_route()),
            None => cm.raw.resolve_route(),
        };
        begun.map_err(|e| refused("looking for the path to the peer".into(), e))?;
        if let Some(cm) = self.cms.get_mut(id) {
            cm.qp = Some(qp);
            cm.progress = Progress::Routing(Box::new(params.clone()));
        }
        Ok(())
    }

    /// READs and atomics that the device can answer and send at a time.
    fn reads(&self, device: Option<usize>) -> (u8, u8) {
        let limits = device.and_then(|d| self.caps.get(d)).map(|caps| &caps.limits);
        limits.map_or((0, 0), |l| (l.max_qp_rd_atom, l.max_qp_init_rd_atom))
    }

    /// The path is known.
    fn routed(&mut self, id: CmRef) -> Option<CmKind> {
        let cm = self.cms.get_mut(id)?;
        let progress = std::mem::replace(&mut cm.progress, Progress::Over);
        let Progress::Routing(params) = progress else {
            cm.progress = progress;
            return None;
        };
        cm.see_local();
        let cm = self.cms.get(id)?;
        let (responder, initiator) = self.reads(cm.device);
        let Some(qpn) = cm.qp.and_then(|qp| self.fitting_qp(qp, cm.device).ok()) else {
            return Some(CmKind::ConnectError("the queue pair is gone".into()));
        };
        let asked = cm.raw.connect(&Offer {
            private_data: &params.private_data,
            responder_resources: params.responder_resources.min(responder),
            initiator_depth: params.initiator_depth.min(initiator),
            retry_count: params.retry_count,
            rnr_retry_count: params.rnr_retry_count,
            qpn,
        });
        let cm = self.cms.get_mut(id)?;
        match asked {
            Ok(()) => {
                cm.progress = Progress::Connecting(params);
                None
            }
            Err(e) => Some(CmKind::ConnectError(format!("asking for a connection: {e}"))),
        }
    }

    /// Brings a connection's queue pair to RTS with what the connection manager knows. `depths`: READs that we answer and send at a
    /// time, at most. `tos`: of our packets, if it is not that of the path.
    fn bring_up(&mut self, id: CmRef, params: &ConnParams, depths: (u8, u8), tos: Option<u8>) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let cm = self.cms.get(id).ok_or_else(gone)?;
        let qp = cm.qp.and_then(|qp| self.qps.get_mut(qp)).ok_or_else(gone)?;
        let raw = qp.raw.as_ref().ok_or_else(gone)?;
        let mut init = cm.raw.attributes(State::Init)?;
        init.set_access(qp::access(&self.devices[qp.device]));
        raw.modify(&mut init)?;
        let mut rtr = cm.raw.attributes(State::Rtr)?;
        rtr.limit_reads(depths.0, depths.1);
        if let Some(timer) = params.min_rnr_timer {
            rtr.set_min_rnr_timer(timer.code());
        }
        if let Some(tos) = tos {
            rtr.set_traffic_class(tos);
        }
        raw.modify(&mut rtr)?;
        let mut rts = cm.raw.attributes(State::Rts)?;
        rts.limit_reads(depths.0, depths.1);
        raw.modify(&mut rts)?;
        qp.state = QpState::Rts;
        Ok(())
    }

    /// The peer has accepted.
    fn answered(&mut self, id: CmRef, reply: Reply) -> Option<CmKind> {
        let cm = self.cms.get_mut(id)?;
        let progress = std::mem::replace(&mut cm.progress, Progress::Over);
        let Progress::Connecting(params) = progress else {
            cm.progress = progress;
            return None;
        };
        let depths = self.reads(self.cms.get(id)?.device);
        let up = self.bring_up(id, &params, depths, None);
        let cm = self.cms.get_mut(id)?;
        match up.and_then(|()| cm.raw.establish()) {
            Ok(()) => {
                cm.progress = Progress::Up;
                let private_data = reply.private_data;
                Some(CmKind::Established { private_data })
            }
            Err(e) => {
                let _ = cm.raw.reject(&[]);
                let qp = cm.qp;
                self.fail_qp(qp);
                Some(CmKind::ConnectError(format!("bringing the queue pair up: {e}")))
            }
        }
    }

    pub(crate) fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, ACCEPT_DATA)?;
        let cm = self.cms.get(id).ok_or_else(|| gone("connection"))?;
        let Progress::Requested {
            initiator_depth,
            responder_resources,
        } = cm.progress
        else {
            return Err(VerbsError::State("not a request that waits".into()));
        };
        let qpn = self.fitting_qp(qp, cm.device)?;
        // Not more than the peer can, and we.
        let (responder, initiator) = self.reads(cm.device);
        let depths = (
            params.responder_resources.min(responder_resources).min(responder),
            params.initiator_depth.min(initiator_depth).min(initiator),
        );
        if let Some(cm) = self.cms.get_mut(id) {
            cm.qp = Some(qp);
        }
        let up = self.bring_up(id, params, depths, params.tos);
        up.map_err(|e| advice::failed("bringing the queue pair up", e))?;
        let cm = self.cms.get_mut(id).ok_or_else(|| gone("connection"))?;
        let offer = Offer {
            private_data: &params.private_data,
            responder_resources: depths.0,
            initiator_depth: depths.1,
            retry_count: params.retry_count,
            rnr_retry_count: params.rnr_retry_count,
            qpn,
        };
        let accepted = cm.raw.accept(&offer);
        accepted.map_err(|e| advice::failed("accepting a connection", e))?;
        cm.progress = Progress::Accepted;
        Ok(())
    }

    pub(crate) fn reject(&mut self, id: CmRef, reason: RejectReason, data: &[u8]) -> Result<(), VerbsError> {
        check_data(data, REJECT_DATA)?;
        let cm = self.cms.get(id).ok_or_else(|| gone("connection"))?;
        if !matches!(cm.progress, Progress::Requested { .. }) {
            return Err(VerbsError::State("not a request that waits".into()));
        }
        if reason != RejectReason::CONSUMER {
            tracing::debug!("a request is refused for reason {}; the kernel says 28", reason.0);
        }
        let rejected = cm.raw.reject(data);
        rejected.map_err(|e| advice::failed("refusing a connection", e))?;
        self.forget(id);
        Ok(())
    }

    /// Moves a connection's queue pair to error.
    fn fail_qp(&mut self, qp: Option<QpId>) {
        if let Some(qp) = qp.and_then(|qp| self.qps.get_mut(qp)) {
            qp.fail();
        }
    }

    pub(crate) fn disconnect(&mut self, id: CmRef) {
        let Some(cm) = self.cms.get(id) else { return };
        if !matches!(cm.progress, Progress::Up | Progress::Accepted | Progress::Connecting(_)) {
            return;
        }
        let qp = cm.qp;
        self.fail_qp(qp);
        if let Some(cm) = self.cms.get_mut(id) {
            cm.progress = Progress::Over;
            if let Err(e) = cm.raw.disconnect() {
                tracing::debug!("disconnecting: {e}");
            }
        }
    }

    pub(crate) fn forget(&mut self, id: CmRef) {
        if self.cms.remove(id).is_none() {
            return;
        }
        // Requests that were not told yet go with their listener.
        let cms = &mut self.cms;
        self.events.retain(|e| match e {
            Event::Cm {
                id: request,
                kind: CmKind::ConnectRequest { listener, .. },
            } if *listener == id => {
                cms.remove(*request);
                false
            }
            Event::Cm { id: of, .. } => *of != id,
            _ => true,
        });
    }

    /// Something has come by a queue pair whose connection the peer has not confirmed yet: its confirmation may be lost.
    pub(crate) fn peer_talks(&mut self, qp: QpId) {
        for cm in self.cms.iter_mut() {
            if cm.qp == Some(qp) && matches!(cm.progress, Progress::Accepted) {
                let _ = cm.raw.peer_talks();
            }
        }
    }

    /// Takes an event of the connection manager.
    pub(crate) fn cm_event(&mut self, mut news: News) {
        if let Some(request) = news.request.take() {
            self.requested(request, news);
            return;
        }
        if let Some(device) = Self::anchored(news.token) {
            if news.kind == kind::DEVICE_REMOVAL && device < self.devices.len() {
                self.device_gone(device);
            }
            return;
        }
        let id = CmRef(news.token as u32);
        let Some(kind) = self.told(id, news) else { return };
        if self.cms.get(id).is_some() {
            self.events.push_back(Event::Cm { id, kind });
        }
    }

    /// A request; one that can't be told is dropped, which refuses it.
    fn requested(&mut self, request: CmId, news: News) {
        let listener = CmRef(news.token as u32);
        let device = self.device_of(&request);
        let (Some(device), true) = (device, self.cms.get(listener).is_some()) else {
            return;
        };
        let Reply {
            private_data,
            responder_resources,
            initiator_depth,
        } = news.reply;
        let made = self.cms.insert_with(|id: CmRef| {
            request.set_token(id.0.into());
            Some(Cm {
                local: request.local_addr().unwrap_or_else(nowhere),
                remote: request.peer_addr(),
                raw: request,
                device: Some(device),
                qp: None,
                progress: Progress::Requested {
                    initiator_depth,
                    responder_resources,
                },
            })
        });
        let Some(id) = made else { return };
        let device = DeviceIx(device as u16);
        let kind = CmKind::ConnectRequest {
            listener,
            device,
            private_data,
            initiator_depth,
            responder_resources,
        };
        self.events.push_back(Event::Cm { id, kind });
    }

    /// What an event of a connection means to its user.
    fn told(&mut self, id: CmRef, news: News) -> Option<CmKind> {
        match news.kind {
            kind::ADDR_RESOLVED => {
                let device = self.device_of(&self.cms.get(id)?.raw);
                let cm = self.cms.get_mut(id)?;
                cm.see_local();
                let Some(device) = device else {
                    cm.progress = Progress::Over;
                    tracing::debug!("the way leads by a device that is not in use");
                    return Some(CmKind::Unreachable(NoAnswer::Timeout));
                };
                (cm.device, cm.progress) = (Some(device), Progress::Resolved);
                let device = DeviceIx(device as u16);
                Some(CmKind::Resolved { device })
            }
            kind::ROUTE_RESOLVED => self.routed(id),
            kind::CONNECT_RESPONSE => self.answered(id, news.reply),
            kind::ESTABLISHED => {
                let cm = self.cms.get_mut(id)?;
                if !matches!(cm.progress, Progress::Accepted) {
                    return None;
                }
                cm.progress = Progress::Up;
                let private_data = news.reply.private_data;
                Some(CmKind::Established { private_data })
            }
            kind::DISCONNECTED => {
                let cm = self.cms.get_mut(id)?;
                // The peer waits for an answer, which this is. To our own disconnect it was one.
                let _ = cm.raw.disconnect();
                cm.progress = Progress::Over;
                let qp = cm.qp;
                self.fail_qp(qp);
                Some(CmKind::Disconnected)
            }
            kind::DEVICE_REMOVAL => {
                let cm = self.cms.get(id)?;
                // A listener at an address has a device, too.
                let device = cm.device.or_else(|| self.device_of(&cm.raw))?;
                self.device_gone(device);
                None
            }
            kind::TIMEWAIT_EXIT => Some(CmKind::TimewaitExit),
            kind::ADDR_CHANGE => Some(CmKind::AddressChange),
            failed => {
                self.cms.get_mut(id)?.progress = Progress::Over;
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
