//! Connections: the kernel's connection manager by librdmacm.
//!
//! librdmacm can create queue pairs itself, on devices that it has opened, once a connection's route is known. Ours are created before
//! that; then the library leaves the states to its user.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use roce_verbs::{
    QpState,
    provider::{CmKind, CmRef, ConnParams, DeviceIx, NoAnswer, QpId, RejectReason, VerbsError},
};

use crate::{
    advice,
    device::{Device, device_of},
    qp::Qp,
    sys::{CmId, Context, EventChannel, News, Reads, kind},
};

/// Bytes of private data of a connect, an accept and a reject.
const CONNECT_DATA: usize = 56;
const ACCEPT_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// State of a connection or listener.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// `lost`: the listener's device is gone.
    Listening {
        backlog: u32,
        lost: bool,
    },
    Resolving,
    Resolved,
    /// The path is being resolved; then it connects.
    Routing,
    Connecting,
    /// The peer requests it, with these limits.
    Requested(Reads),
    Accepted,
    Established,
    Ended,
}

/// Connection or listener.
pub(crate) struct Cm {
    raw: CmId,
    /// Its number in the fabric: the token of its events.
    id: CmRef,
    device: Option<usize>,
    /// The device stays open as long as the connection.
    _context: Option<Arc<Context>>,
    qp: Option<QpId>,
    /// Parameters of a connect.
    params: ConnParams,
    /// Local address while the library does not know it.
    local: SocketAddr,
    remote: SocketAddr,
    progress: Progress,
}

/// Returns an address that is none.
fn nowhere() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
}

/// Returns an error of the connection manager for an address, or another, as ours.
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

fn new_id(channel: &Arc<EventChannel>, id: CmRef) -> Result<CmId, VerbsError> {
    let made = CmId::create(channel, id.0.into());
    made.map_err(|e| advice::failed("making an object of the connection manager", e))
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

impl Cm {
    fn new(raw: CmId, id: CmRef, [local, remote]: [SocketAddr; 2], progress: Progress) -> Self {
        Self {
            raw,
            id,
            device: None,
            _context: None,
            qp: None,
            params: ConnParams::default(),
            local,
            remote,
            progress,
        }
    }

    pub(crate) fn listen(
        channel: &Arc<EventChannel>,
        addr: SocketAddr,
        backlog: u32,
        id: CmRef,
    ) -> Result<Self, VerbsError> {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        let raw = new_id(channel, id)?;
        let listens = raw.listen(addr, backlog);
        listens.map_err(|e| refused(format!("listening at {addr}"), e))?;
        let progress = Progress::Listening { backlog, lost: false };
        Ok(Self::new(raw, id, [addr, nowhere()], progress))
    }

    /// Detaches a listener from a device that is gone.
    pub(crate) fn lose(&mut self, channel: &Arc<EventChannel>, device: &str) {
        let Progress::Listening { lost: lost @ false, .. } = &mut self.progress else {
            return;
        };
        if self.raw.device().as_deref() != Some(device) {
            return;
        }
        let local = self.raw.local_addr().unwrap_or(self.local);
        match CmId::create(channel, self.id.0.into()) {
            Ok(raw) => (self.local, self.raw, *lost) = (local, raw, true),
            Err(e) => tracing::warn!("the listener at {local} stays with its device: {e}"),
        }
    }

    /// Listens again if it was lost. An address may come later than its device.
    pub(crate) fn listen_again(&mut self, channel: &Arc<EventChannel>) {
        let Progress::Listening {
            backlog,
            lost: lost @ true,
        } = &mut self.progress
        else {
            return;
        };
        let local = self.local;
        let made = CmId::create(channel, self.id.0.into());
        match made.and_then(|raw| raw.listen(local, *backlog).map(|()| raw)) {
            Ok(raw) => {
                tracing::info!("listening at {local} again");
                (self.raw, *lost) = (raw, false);
            }
            Err(e) => tracing::debug!("listening at {local} again: {e}"),
        }
    }

    pub(crate) fn resolve(
        channel: &Arc<EventChannel>,
        src: IpAddr,
        dst: SocketAddr,
        id: CmRef,
    ) -> Result<Self, VerbsError> {
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        let raw = new_id(channel, id)?;
        let resolves = raw.resolve_addr(src, dst);
        resolves.map_err(|e| refused(format!("looking for the way to {dst}"), e))?;
        Ok(Self::new(raw, id, [SocketAddr::new(src, 0), dst], Progress::Resolving))
    }

    /// Makes a connection of a request on a device.
    pub(crate) fn of_request(mut raw: CmId, id: CmRef, device: usize, devices: &[Device], reads: Reads) -> Self {
        raw.set_token(id.0.into());
        let remote = raw.peer_addr().unwrap_or_else(nowhere);
        let mut this = Self::new(raw, id, [nowhere(), remote], Progress::Requested(reads));
        (this.device, this._context) = (Some(device), devices[device].context.clone());
        this
    }

    pub(crate) fn addrs(&self) -> (SocketAddr, SocketAddr) {
        (self.raw.local_addr().unwrap_or(self.local), self.remote)
    }

    pub(crate) fn qp(&self) -> Option<QpId> {
        self.qp
    }

    pub(crate) fn is_listener(&self) -> bool {
        matches!(self.progress, Progress::Listening { .. })
    }

    /// Returns its device. A listener at an address has one, too.
    pub(crate) fn device_on(&self, devices: &[Device]) -> Option<usize> {
        self.device.or_else(|| device_of(devices, &self.raw))
    }

    /// Checks that a queue pair is of its device, and ready to be connected.
    fn check_qp(&self, qp: &Qp) -> Result<(), VerbsError> {
        if Some(qp.device()) != self.device {
            return Err(VerbsError::Invalid("the queue pair is another device's".into()));
        }
        match qp.state() {
            QpState::Init => Ok(()),
            state => Err(VerbsError::State(format!("the queue pair is in state {state:?}"))),
        }
    }

    pub(crate) fn connect(&mut self, (id, qp): (QpId, &Qp), params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, CONNECT_DATA)?;
        if self.progress != Progress::Resolved {
            return Err(VerbsError::State("the connection is not resolved".into()));
        }
        self.check_qp(qp)?;
        // The path is resolved only now because the type of service is a part of it.
        let tos = params.tos.map_or(Ok(()), |tos| self.raw.set_tos(tos));
        let begun = tos.and_then(|()| self.raw.resolve_route());
        begun.map_err(|e| refused("looking for the path to the peer".into(), e))?;
        (self.params, self.qp, self.progress) = (params.clone(), Some(id), Progress::Routing);
        Ok(())
    }

    /// Sends the REQ, once the path is known.
    fn route_resolved(&mut self, qp: Option<&Qp>) -> Option<CmKind> {
        if self.progress != Progress::Routing {
            return None;
        }
        self.progress = Progress::Ended;
        let Some(qp) = qp.filter(|qp| self.check_qp(qp).is_ok()) else {
            return Some(CmKind::ConnectError("the queue pair is gone".into()));
        };
        let reads = Reads::of(&self.params).min(qp.reads());
        if let Err(e) = self.raw.connect(&self.params, reads, qp.qpn()) {
            return Some(CmKind::ConnectError(format!("asking for a connection: {e}")));
        }
        self.progress = Progress::Connecting;
        None
    }

    /// Establishes it, once the peer has accepted.
    fn answered(&mut self, qp: Option<&mut Qp>, private_data: Vec<u8>) -> Option<CmKind> {
        if self.progress != Progress::Connecting {
            return None;
        }
        let up = match qp {
            Some(qp) => {
                let up = qp.bring_up(&self.raw, &self.params, qp.reads(), None);
                let up = up.and_then(|()| self.raw.establish());
                up.inspect_err(|_| _ = qp.fail())
            }
            None => Err(io::ErrorKind::NotFound.into()),
        };
        Some(match up {
            Ok(()) => {
                self.progress = Progress::Established;
                CmKind::Established { private_data }
            }
            Err(e) => {
                self.progress = Progress::Ended;
                let _ = self.raw.reject(&[]);
                CmKind::ConnectError(format!("bringing the queue pair up: {e}"))
            }
        })
    }

    pub(crate) fn accept(&mut self, (id, qp): (QpId, &mut Qp), params: &ConnParams) -> Result<(), VerbsError> {
        check_data(&params.private_data, ACCEPT_DATA)?;
        let Progress::Requested(requested) = self.progress else {
            return Err(VerbsError::State("not a request that waits".into()));
        };
        self.check_qp(qp)?;
        // Not more than the peer can, and we.
        let reads = Reads::of(params).min(requested).min(qp.reads());
        let up = qp.bring_up(&self.raw, params, reads, params.tos);
        up.map_err(|e| advice::failed("bringing the queue pair up", e))?;
        let accepted = self.raw.accept(params, reads, qp.qpn());
        accepted.map_err(|e| advice::failed("accepting a connection", e))?;
        self.progress = Progress::Accepted;
        self.qp = Some(id);
        Ok(())
    }

    pub(crate) fn reject(&mut self, reason: RejectReason, data: &[u8]) -> Result<(), VerbsError> {
        check_data(data, REJECT_DATA)?;
        if !matches!(self.progress, Progress::Requested(_)) {
            return Err(VerbsError::State("not a request that waits".into()));
        }
        if reason != RejectReason::CONSUMER {
            tracing::debug!("a request is rejected for reason {}; the kernel sends 28", reason.0);
        }
        let rejected = self.raw.reject(data);
        rejected.map_err(|e| advice::failed("refusing a connection", e))
    }

    pub(crate) fn disconnect(&mut self, qp: Option<&mut Qp>) {
        if !matches!(
            self.progress,
            Progress::Established | Progress::Accepted | Progress::Connecting
        ) {
            return;
        }
        qp.map(Qp::fail);
        self.progress = Progress::Ended;
        if let Err(e) = self.raw.disconnect() {
            tracing::debug!("disconnecting: {e}");
        }
    }

    /// Notes that a packet has arrived on its queue pair before the peer's confirmation, which may be lost.
    pub(crate) fn communication_established(&self) {
        if self.progress == Progress::Accepted {
            let _ = self.raw.notify_established();
        }
    }

    /// Processes an event of the connection manager. Returns what it means to the user.
    pub(crate) fn event(&mut self, devices: &[Device], qp: Option<&mut Qp>, news: News) -> Option<CmKind> {
        match news.kind {
            kind::RDMA_CM_EVENT_ADDR_RESOLVED => {
                let Some(device) = device_of(devices, &self.raw) else {
                    self.progress = Progress::Ended;
                    tracing::debug!("the route leads through a device that is not in use");
                    return Some(CmKind::Unreachable(NoAnswer::Timeout));
                };
                (self.device, self.progress) = (Some(device), Progress::Resolved);
                self._context = devices[device].context.clone();
                let device = DeviceIx(device as u16);
                Some(CmKind::Resolved { device })
            }
            kind::RDMA_CM_EVENT_ROUTE_RESOLVED => self.route_resolved(qp.as_deref()),
            kind::RDMA_CM_EVENT_CONNECT_RESPONSE => self.answered(qp, news.private_data),
            kind::RDMA_CM_EVENT_ESTABLISHED => {
                if self.progress != Progress::Accepted {
                    return None;
                }
                self.progress = Progress::Established;
                Some(CmKind::Established {
                    private_data: news.private_data,
                })
            }
            kind::RDMA_CM_EVENT_DISCONNECTED => {
                // The peer waits for an answer, which this is. To our own disconnect it was one.
                let _ = self.raw.disconnect();
                self.progress = Progress::Ended;
                qp.map(Qp::fail);
                Some(CmKind::Disconnected)
            }
            kind::RDMA_CM_EVENT_TIMEWAIT_EXIT => Some(CmKind::TimewaitExit),
            kind::RDMA_CM_EVENT_ADDR_CHANGE => Some(CmKind::AddressChange),
            failed => {
                self.progress = Progress::Ended;
                failure(failed, news)
            }
        }
    }
}

/// Returns the reason that a connection was not established.
fn failure(what: u32, news: News) -> Option<CmKind> {
    match what {
        kind::RDMA_CM_EVENT_REJECTED => Some(CmKind::Rejected {
            reason: RejectReason(u16::try_from(news.status).unwrap_or(0)),
            private_data: news.private_data,
        }),
        kind::RDMA_CM_EVENT_ADDR_ERROR | kind::RDMA_CM_EVENT_ROUTE_ERROR | kind::RDMA_CM_EVENT_UNREACHABLE => {
            Some(CmKind::Unreachable(NoAnswer::Timeout))
        }
        kind::RDMA_CM_EVENT_CONNECT_ERROR => Some(CmKind::ConnectError(match news.status {
            status if status < 0 => io::Error::from_raw_os_error(-status).to_string(),
            status => format!("status {status} of the connection manager"),
        })),
        other => {
            tracing::debug!("an event {other} of the connection manager");
            None
        }
    }
}
