//! LISTEN, CONNECT, ACCEPT, REJECT and DISCONNECT, and the transport's events of connections.

use std::{
    net::{Ipv4Addr, SocketAddr},
    os::fd::RawFd,
    time::{Duration, Instant},
};

use roce::{Psn, Qpn, RejectReason, verbs::QKey};
use roce_port::cm::{
    AcceptArgs, ConnParams, ConnTransport, ConnectArgs, Event as CmEventKind, ListenArgs, LocalQp, RemoteQp,
    ResolveArgs, SidrAnswer, mad::sidr_status,
};

use super::{
    Errno, Result,
    abi::{ConnParam, EventType},
    addr::Addr,
    backend::{Backend, Report},
    context::{Attempt, Context, Retry, Service},
    event::{Event, Param},
    query::Path,
    state::{Op, State},
    ucma::Ucma,
};

/// `net.rdma_ucm.max_backlog`.
const MAX_BACKLOG: u32 = 1024;
/// Retry counts are three bits.
const MAX_RETRIES: u8 = 7;
/// `IB_CM_REJ_CONSUMER_DEFINED` and `IB_CM_REJ_VENDOR_OPTION_NOT_SUPPORTED`: the reasons that a program may give.
const REASONS: [u8; 2] = [28, 35];
/// The one asynchronous event that means something to a connection (`IBV_EVENT_COMM_EST`).
const COMM_EST: u32 = 4;

fn private_data(param: &ConnParam) -> Vec<u8> {
    param.private_data[..usize::from(param.private_data_len)].to_vec()
}

/// How long an attempt is repeated while the peer has no listener.
const RETRY_FOR: Duration = Duration::from_millis(500);
/// Pause between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

fn send_attempt<B: Backend>(backend: &mut B, attempt: &Attempt) -> Result<B::Handle> {
    match attempt {
        Attempt::Connect(args) => backend.connect(args),
        Attempt::Resolve(args) => backend.resolve(args),
    }
}

fn params(param: &ConnParam) -> ConnParams {
    ConnParams {
        private_data: private_data(param),
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        retry_count: param.retry_count.min(MAX_RETRIES),
        rnr_retry_count: param.rnr_retry_count.min(MAX_RETRIES),
        ..ConnParams::default()
    }
}

fn connect_args<B: Backend>(ctx: &Context<B>, transport: ConnTransport, param: &ConnParam) -> Result<ConnectArgs> {
    let (local, remote) = ctx.ips()?;
    let mtu = ctx.cma_dev()?.mtu;
    Ok(ConnectArgs {
        local,
        remote,
        qp: LocalQp {
            transport,
            ..local_qp(ctx, param)
        },
        mtu,
        params: ConnParams {
            tos: Some(ctx.tos),
            ..params(param)
        },
        space: ctx.space,
    })
}

fn local_qp<B: Backend>(ctx: &Context<B>, param: &ConnParam) -> LocalQp {
    LocalQp {
        flow_control: param.flow_control != 0,
        srq: ctx.srq,
        ..LocalQp::new(Qpn::new(ctx.qpn), Psn::new(ctx.psn))
    }
}

impl<B: Backend> Ucma<B> {
    /// Listens (`rdma_listen`).
    ///
    /// # Errors
    /// EADDRINUSE when the port is another's, EINVAL when the id's state does not allow it.
    pub(crate) fn listen(&mut self, fd: RawFd, id: u32, backlog: u32) -> Result<()> {
        let ctx = self.get(fd, id)?;
        ctx.check(Op::Listen)?;
        if ctx.state == State::Idle {
            self.bind(fd, id, Addr::Ip(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))), true)?;
        }
        let ctx = self.get(fd, id)?;
        let (space, port, transport) = (ctx.space, ctx.local.port(), ctx.service.transport());
        let args = ListenArgs {
            addr: self.ports.owner(space as u16, port, id).and_then(|o| o.scope()),
            space,
            port,
            transport,
            backlog: match backlog {
                1..=MAX_BACKLOG => backlog,
                _ => MAX_BACKLOG,
            },
        };
        self.ports.claim(space as u16, port, id)?;
        let handle = self.backend.listen(&args)?;
        self.attach(id, handle);
        let ctx = self.get(fd, id)?;
        ctx.reuse = false;
        ctx.step(Op::Listen)
    }

    /// Connects, or asks for the peer's queue pair if that takes datagrams (`rdma_connect`).
    ///
    /// # Errors
    /// EINVAL when the route is not resolved or there is too much private data.
    pub(crate) fn connect(&mut self, fd: RawFd, id: u32, param: &ConnParam) -> Result<()> {
        if param.valid == 0 {
            return Err(Errno::INVAL.because("no connection parameters are given"));
        }
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.check(Op::Connect)?;
        ctx.set_qp(param);
        ctx.responder_resources = param.responder_resources;
        let attempt = match ctx.service {
            Service::Connected(transport) => Attempt::Connect(Box::new(connect_args(ctx, transport, param)?)),
            Service::Datagram => {
                let (local, remote) = ctx.ips()?;
                Attempt::Resolve(Box::new(ResolveArgs {
                    local,
                    remote,
                    space: ctx.space,
                    private_data: private_data(param),
                }))
            }
            Service::Any => return Err(Errno::INVAL),
        };
        let handle = send_attempt(backend, &attempt)?;
        let until = Instant::now() + RETRY_FOR;
        ctx.retry = Some(Retry { attempt, until });
        ctx.step(Op::Connect)?;
        self.attach(id, handle);
        Ok(())
    }

    /// Schedules another attempt after the peer had no listener. Returns whether there will be one.
    fn retry_later(&mut self, key: u64, now: Instant) -> bool {
        let Some(id) = self.by_key(key) else { return false };
        let patient = self.parts(id).is_some_and(|(ctx, _)| {
            ctx.state == State::Connect && ctx.retry.as_ref().is_some_and(|retry| now < retry.until)
        });
        if patient {
            self.retries.push((now + RETRY_INTERVAL, id));
        }
        patient
    }

    /// Repeats the attempts that are due. Returns when to call again.
    pub(crate) fn retry_due(&mut self, now: Instant) -> Option<Instant> {
        let due: Vec<u32> = self
            .retries
            .extract_if(.., |(at, _)| *at <= now)
            .map(|(_, id)| id)
            .collect();
        for id in due {
            let Some((ctx, backend)) = self.parts(id) else { continue };
            let Some(retry) = ctx.retry.as_ref().filter(|_| ctx.state == State::Connect) else {
                continue;
            };
            match send_attempt(backend, &retry.attempt) {
                Ok(handle) => self.attach(id, handle),
                Err(e) => self.report_event(id, &Event::failed(EventType::Unreachable, -e.0)),
            }
        }
        self.retries.iter().map(|(at, _)| *at).min()
    }

    /// Accepts a request (`rdma_accept`); without parameters (`valid` is 0) confirms the peer's accept.
    ///
    /// # Errors
    /// EINVAL when there is nothing to accept; the peer is refused then.
    pub(crate) fn accept(&mut self, fd: RawFd, id: u32, uid: u64, param: &ConnParam) -> Result<()> {
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.check(Op::Accept)?;
        ctx.handle()?;
        let done = match (param.valid != 0, ctx.service) {
            (false, Service::Connected(_)) => backend.establish(ctx.handle()?),
            (with_param, Service::Datagram) => Self::answer(ctx, backend, with_param.then_some(param)),
            (true, _) => Self::accept_connection(ctx, backend, param),
            (false, Service::Any) => Err(Errno::INVAL),
        };
        match done {
            Ok(()) if param.valid != 0 => ctx.uid = uid,
            Ok(()) => {}
            Err(e) => {
                let _ = Self::refuse(ctx, backend, RejectReason::CONSUMER, &[]);
                return Err(e);
            }
        }
        Ok(())
    }

    fn accept_connection(ctx: &mut Context<B>, backend: &mut B, param: &ConnParam) -> Result<()> {
        ctx.set_qp(param);
        let args = AcceptArgs {
            qp: local_qp(ctx, param),
            params: params(param),
        };
        backend.accept(ctx.handle()?, &args)?;
        if let Some(path) = &mut ctx.path {
            path.responder_resources = param.responder_resources;
            path.initiator_depth = param.initiator_depth;
        }
        Ok(())
    }

    fn answer(ctx: &mut Context<B>, backend: &mut B, param: Option<&ConnParam>) -> Result<()> {
        if let Some(param) = param {
            ctx.set_qp(param);
        }
        let qkey = ctx.qkey();
        ctx.set_qkey(qkey)?;
        let answer = SidrAnswer {
            status: sidr_status::SUCCESS,
            qpn: Qpn::new(ctx.qpn),
            qkey: QKey(qkey),
            private_data: param.map_or_else(Vec::new, private_data),
        };
        backend.answer(ctx.handle()?, &answer)
    }

    /// Refuses a request or an answer (`rdma_reject`).
    ///
    /// # Errors
    /// EINVAL when there is nothing to refuse, or for a reason that programs can't give.
    pub(crate) fn reject(&mut self, fd: RawFd, id: u32, reason: u8, data: &[u8]) -> Result<()> {
        let reason = match reason {
            0 => REASONS[0],
            given if REASONS.contains(&given) => given,
            _ => return Err(Errno::INVAL),
        };
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.cma_dev()?;
        Self::refuse(ctx, backend, RejectReason(reason.into()), data)
    }

    fn refuse(ctx: &Context<B>, backend: &mut B, reason: RejectReason, data: &[u8]) -> Result<()> {
        let handle = ctx.handle()?;
        match ctx.service {
            Service::Datagram => {
                let answer = SidrAnswer {
                    status: sidr_status::REJECT,
                    private_data: data.to_vec(),
                    ..SidrAnswer::default()
                };
                backend.answer(handle, &answer)
            }
            _ => backend.reject(handle, reason, data),
        }
    }

    /// Ends a connection (`rdma_disconnect`). DISCONNECTED follows, unless it came already.
    ///
    /// # Errors
    /// EINVAL when there is none.
    pub(crate) fn disconnect(&mut self, fd: RawFd, id: u32) -> Result<()> {
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.cma_dev()?;
        let handle = ctx.handle()?;
        match ctx.service {
            Service::Connected(_) => backend.disconnect(handle),
            Service::Datagram | Service::Any => Ok(()),
        }
    }

    /// Handles an event of the program's queue pair (`rdma_notify`).
    ///
    /// # Errors
    /// EINVAL for events that don't concern connections.
    pub(crate) fn notify(&mut self, fd: RawFd, id: u32, event: u32) -> Result<()> {
        let (ctx, backend) = self.get_with(fd, id)?;
        ctx.cma_dev()?;
        match event {
            COMM_EST => backend.notify(ctx.handle()?),
            _ => Err(Errno::INVAL),
        }
    }

    /// Takes a report of the transport.
    pub(crate) fn on_report(&mut self, report: Report<B::Handle>) {
        match report {
            Report::Cm { key, new, event } => self.on_cm_event(key, new, event),
            Report::Neighbour { ticket, resolved } => self.on_neighbour(ticket, resolved),
            Report::Gone => self.device_gone(),
        }
    }

    fn on_cm_event(&mut self, key: u64, new: Option<B::Handle>, event: CmEventKind) {
        match event {
            CmEventKind::Request {
                local,
                remote,
                path,
                private_data,
                ..
            } => self.on_request(key, new, (local, remote), Some(path), private_data),
            CmEventKind::SidrRequest {
                local,
                remote,
                private_data,
                ..
            } => self.on_request(key, new, (local, remote), None, private_data),
            CmEventKind::Reply { path, private_data, .. } => self.on_reply(key, path, private_data),
            CmEventKind::Resolved {
                status,
                qpn,
                qkey,
                private_data,
                ..
            } => {
                let answer = SidrAnswer {
                    status,
                    qpn,
                    qkey,
                    private_data,
                };
                self.on_resolved(key, answer);
            }
            CmEventKind::Established { .. } => self.on_progress(key, Op::Progress, &Event::new(EventType::Established)),
            CmEventKind::Rejected {
                reason, private_data, ..
            } => {
                if reason == RejectReason::INVALID_SERVICE_ID && self.retry_later(key, Instant::now()) {
                    return;
                }
                let event = Event::failed(EventType::Rejected, reason.0.into());
                self.on_progress(key, Op::Progress, &event.with_data(private_data));
            }
            CmEventKind::Unreachable { why, .. } => {
                let event = Event::failed(EventType::Unreachable, -why.errno());
                self.on_progress(key, Op::Progress, &event);
            }
            CmEventKind::Disconnected { timed_out, .. } => {
                let status = if timed_out { -libc::ETIMEDOUT } else { 0 };
                self.on_progress(key, Op::Disconnected, &Event::failed(EventType::Disconnected, status));
            }
            CmEventKind::TimewaitExit { .. } => {
                self.on_progress(key, Op::TimewaitExit, &Event::new(EventType::TimewaitExit));
            }
            // Only of queue pairs that the transport moves.
            CmEventKind::Failed { .. } => {}
        }
    }

    fn on_request(
        &mut self,
        listener: u64,
        conn: Option<B::Handle>,
        route: (SocketAddr, SocketAddr),
        path: Option<RemoteQp>,
        private_data: Vec<u8>,
    ) {
        // A request that can't be reported is dropped, which refuses it.
        let Some(listener) = self.by_key(listener) else { return };
        let Some((ctx, backend)) = self.parts(listener) else {
            return;
        };
        let other_family = ctx.local.ip().is_some_and(|a| a.is_ipv4() != route.0.is_ipv4());
        if other_family && ctx.afonly == Some(true) {
            return;
        }
        let Ok(cma_dev) = backend.cma_dev_of(route.0.ip()) else {
            return;
        };
        let service = match path {
            Some(path) => Service::Connected(path.transport),
            None => Service::Datagram,
        };
        let mut new = Context::new(ctx.channel, 0, ctx.space, service);
        (new.local, new.remote) = (Addr::Ip(route.0), Addr::Ip(route.1));
        (new.cma_dev, new.path, new.handle) = (Some(cma_dev), path, conn);
        (new.tos, new.ack_timeout) = (ctx.tos, ctx.ack_timeout);
        (new.state, new.passive) = (State::Connect, true);
        let param = path.map_or(Param::None, Param::Conn);
        let event = Event::new(EventType::ConnectRequest)
            .with(param)
            .with_data(private_data);
        let request = self.insert(new);
        self.report_request(listener, request, &event);
    }

    fn on_reply(&mut self, key: u64, path: RemoteQp, private_data: Vec<u8>) {
        let id = self.by_key(key);
        let Some((ctx, _)) = id.and_then(|id| self.parts(id)) else {
            return;
        };
        ctx.path = Some(path);
        let event = Event::new(EventType::ConnectResponse).with(Param::Conn(path));
        self.on_progress(key, Op::Progress, &event.with_data(private_data));
    }

    fn on_resolved(&mut self, key: u64, answer: SidrAnswer) {
        if answer.status == sidr_status::UNSUPPORTED && self.retry_later(key, Instant::now()) {
            return;
        }
        let id = self.by_key(key);
        let Some((ctx, _)) = id.and_then(|id| self.parts(id)) else {
            return;
        };
        let event = if answer.status != sidr_status::SUCCESS {
            Event::failed(EventType::Unreachable, answer.status.into())
        } else if let Err(e) = ctx.set_qkey(answer.qkey.0) {
            Event::failed(EventType::AddrError, -e.0)
        } else {
            Event::new(EventType::Established).with(Param::Ud {
                qpn: answer.qpn.value(),
                qkey: answer.qkey.0,
                ah: Path::of(ctx).map(|p| p.ah()).unwrap_or_default(),
            })
        };
        self.on_progress(key, Op::Progress, &event.with_data(answer.private_data));
    }

    /// Reports an event of a connection if its state allows for it.
    fn on_progress(&mut self, key: u64, op: Op, event: &Event) {
        let Some(id) = self.by_key(key) else { return };
        if self.parts(id).is_some_and(|(ctx, _)| ctx.step(op).is_ok()) {
            self.report_event(id, event);
        }
    }
}
