//! Opening a path: connection 0 first, because its answer brings the sizes; then the others; then the session's name for the addresses
//! of the chunks.

use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Completion, Instant, Sge, WcOpcode,
    provider::{CmKind, ConnParams, DeviceIx, PdId, QpSpec, Registration, VerbsError},
    wr::RecvWr,
};
use zerocopy::IntoBytes;

use crate::{
    Error, PathError,
    client::{
        config::SessionConfig,
        conn::{Conn, Post, caps},
        env::Env,
        inflight::InFlightTable,
        path::{Path, Region},
        stage::{Reached, Step},
        state::PathEvent,
        terms::Terms,
    },
    mark::{Mark, MarkKind},
    proto::{ConnReq, ConnRsp, InfoReq, InfoRsp, RkeyRsp, SERVICE_QUEUE_DEPTH, Uuid},
    sendq::SendQueue,
};

/// Send queue of an I/O connection at most: more requests wait their turn.
const IO_SEND_WR: u32 = 1024;

/// Arguments of a step.
pub(super) struct Handshake<'a, 'b, 'c, U> {
    pub(super) path: &'a mut Path,
    pub(super) env: &'a mut Env<'b, 'c, U>,
    pub(super) inflight: &'a mut InFlightTable<U>,
    pub(super) config: &'a SessionConfig,
    /// The session's UUID.
    pub(super) uuid: Uuid,
    /// Terms that the session's other paths prescribe.
    pub(super) agreed: Option<Terms>,
    /// Another path is up.
    pub(super) others_up: bool,
    /// When the server may be asked for the chunks, if that is later.
    pub(super) ask_at: Option<Instant>,
}

impl<U> Handshake<'_, '_, '_, U> {
    /// Looks for the way to the server, for connection 0.
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        (self.path.device, self.path.terms) = (None, None);
        self.path.recon_cnt = self.path.recon_cnt.wrapping_add(1);
        self.resolve(0)
    }

    /// Permits of the session.
    fn depth(&self) -> u32 {
        self.path.terms.map_or(0, |terms| terms.layout.queue_depth())
    }

    fn resolve(&mut self, cid: u16) -> Result<(), Error> {
        let addr = &self.path.addr;
        let cm = self.env.cx.provider.cm_resolve(addr.src, addr.dst)?;
        self.env.names.add_cm(cm, self.path.key(cid));
        self.path.conns.push(Conn::new(cm));
        self.step(Step::Resolving { cid });
        Ok(())
    }

    fn step(&mut self, step: Step) {
        if let Some(attempt) = self.path.attempt_mut() {
            attempt.step = step;
            attempt.due = Some(self.env.cx.now + self.config.connect_timeout);
        }
    }

    /// An event of one of the connections.
    pub(super) fn event(&mut self, cid: u16, kind: CmKind) -> Result<(), Error> {
        match (kind, self.path.attempt().step) {
            (CmKind::Resolved { device }, Step::Resolving { cid: of }) if of == cid => self.connect(cid, device),
            (CmKind::Established { private_data }, Step::Connecting { cid: of }) if of == cid => {
                self.established(cid, &private_data)
            }
            (CmKind::Rejected { reason, private_data }, _) => {
                let errno = ConnRsp::parse(&private_data).ok().map(ConnRsp::errno);
                Err(Error::Rejected { cid, reason, errno })
            }
            (CmKind::Unreachable(why), _) => Err(Error::Unreachable(why)),
            (CmKind::ConnectError(text), _) => Err(Error::Path(PathError::Cm(text))),
            (CmKind::AddressChange, _) => Err(Error::Path(PathError::Cm("our address is gone".into()))),
            // `Disconnected` is the path's business.
            _ => Ok(()),
        }
    }

    /// The way is known: makes the queue pair and connects it.
    fn connect(&mut self, cid: u16, device: DeviceIx) -> Result<(), Error> {
        if self.path.device.is_some_and(|of| of != device) {
            let why = "the way to the server changed while the path was being connected";
            return Err(Error::Path(PathError::Cm(why.into())));
        }
        let pd = self.inflight.pd_on(self.env.cx, device, self.config.invalidate_reads)?;
        (self.path.device, self.path.pd) = (Some(device), Some(pd));
        self.path.entered = Some(device);
        self.make_qp(cid, device, pd)?;
        if cid > 0 {
            self.post_receives(cid)?;
        }
        let req = ConnReq::new(
            cid,
            self.config.connections + 1,
            self.path.recon_cnt,
            self.path.uuid,
            self.uuid,
            self.path.attempt().first,
        );
        let params = ConnParams {
            private_data: req.as_bytes().to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            // A kernel's server registers the memory of all its chunks before it answers, or says that it needs time.
            timeout: Some(self.config.connect_timeout),
            ..ConnParams::default()
        };
        let conn = &self.path.conns[usize::from(cid)];
        if let Some(qp) = conn.qp {
            self.env.cx.provider.cm_connect(conn.cm, qp, &params)?;
        }
        self.step(Step::Connecting { cid });
        Ok(())
    }

    fn make_qp(&mut self, cid: u16, device: DeviceIx, pd: PdId) -> Result<(), Error> {
        let limits = self.env.cx.provider.devices()[usize::from(device.0)].limits.clone();
        let service = caps(&limits, 2 * SERVICE_QUEUE_DEPTH + 2, 2 * SERVICE_QUEUE_DEPTH + 2);
        let depth = self.depth();
        let io = caps(&limits, (4 * depth + 1).min(IO_SEND_WR), 2 * depth);
        let is_service = cid == 0;
        let caps = if is_service { service } else { io };
        let cq = match self.path.cq {
            Some(cq) => cq,
            None => {
                // A server that keeps to the queue depth never fills so many.
                let per_conn = u64::from(service.max_send_wr + service.max_recv_wr);
                let entries = per_conn * u64::from(1 + self.config.connections);
                let entries = u32::try_from(entries).unwrap_or(u32::MAX).min(limits.max_cqe);
                let cq = self.env.cx.provider.create_cq(device, entries)?;
                *self.path.cq.insert(cq)
            }
        };
        let spec = QpSpec {
            pd,
            cq,
            caps,
            signal_all: false,
        };
        let qp = self.env.cx.provider.create_qp(&spec)?;
        self.env.names.add_qp(qp, self.path.key(cid));
        // One receive of connection 0 is that of the information.
        let receives = if is_service {
            caps.max_recv_wr - 2
        } else {
            caps.max_recv_wr
        };
        let before = cid.checked_sub(1).map(|cid| self.path.conns[usize::from(cid)].receives);
        let first = before.map_or(0, |(first, count)| first + count);
        let conn = &mut self.path.conns[usize::from(cid)];
        conn.qp = Some(qp);
        conn.queue = SendQueue::new(caps.max_send_wr);
        conn.receives = (first, receives);
        Ok(())
    }

    fn established(&mut self, cid: u16, private_data: &[u8]) -> Result<(), Error> {
        let terms = Terms::parse(private_data)?;
        self.path.conns[usize::from(cid)].established = true;
        if cid == 0 {
            self.path.reached = self.path.reached.max(Reached::Accepted);
            self.agree(terms)?;
        }
        match cid < self.config.connections {
            true => self.resolve(cid + 1),
            false => self.connected(),
        }
    }

    /// The server's sizes are known.
    fn agree(&mut self, terms: Terms) -> Result<(), Error> {
        if self.agreed.is_some_and(|agreed| !agreed.agree_with(&terms)) {
            return Err(Error::OtherSizes);
        }
        self.path.terms = Some(terms);
        self.prepare_device()
    }

    /// All connections stand.
    pub(super) fn connected(&mut self) -> Result<(), Error> {
        // A kernel's server expects the question when it has all connections.
        if self.ask_at.is_some() {
            if let Some(attempt) = self.path.attempt_mut() {
                (attempt.step, attempt.due) = (Step::Resting, self.ask_at);
            }
            return Ok(());
        }
        self.ask()
    }

    /// Gets what requests of the path need.
    fn prepare_device(&mut self) -> Result<(), Error> {
        let (Some(terms), Some(device), Some(pd)) = (self.path.terms, self.path.device, self.path.pd) else {
            return Ok(());
        };
        let info = terms.info(self.config.max_user_header);
        let depth = self.depth();
        self.inflight
            .prepare_device(self.env.cx, device, depth, info.max_user_header)?;
        if terms.new_rkeys() {
            let service = self.path.conns.first().map_or(0, |conn| conn.receives.1);
            let io = 2 * u64::from(depth) * u64::from(self.config.connections);
            let bytes = (u64::from(service) + io) * RkeyRsp::LEN as u64;
            self.path.key_messages = Some(self.region(pd, bytes as usize)?);
        }
        Ok(())
    }

    fn region(&mut self, pd: PdId, bytes: usize) -> Result<Region, Error> {
        let pages = Pages::allocate(bytes).map_err(|e| VerbsError::Invalid(e.to_string()))?;
        let memory: Arc<Pages> = pages.clone();
        let what = Registration {
            memory,
            offset: 0,
            len: bytes,
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = self.env.cx.provider.register(pd, &what)?;
        Ok(Region { pages, mr })
    }

    /// Posts all receives of a connection.
    fn post_receives(&mut self, cid: u16) -> Result<(), Error> {
        let (first, count) = self.path.conns[usize::from(cid)].receives;
        self.path.conns[usize::from(cid)].used = (first..first + count).collect();
        self.path.mark_dirty(self.env, cid);
        Ok(())
    }

    /// Sends the session's name over connection 0, for the chunks.
    fn ask(&mut self) -> Result<(), Error> {
        let (Some(terms), Some(pd)) = (self.path.terms, self.path.pd) else {
            return Ok(());
        };
        let req = InfoReq::new(&self.config.name).map_err(|e| Error::Config(e.to_string()))?;
        let room = InfoRsp::len_for(terms.layout.queue_depth() as usize);
        let region = self.region(pd, InfoReq::LEN + room)?;
        let outside = |e: roce_verbs::provider::RangeError| Error::Config(e.to_string());
        region.pages.write(0, req.as_bytes()).map_err(outside)?;
        let sge = |offset: usize, len: usize| Sge {
            addr: region.mr.addr + offset as u64,
            length: len as u32,
            lkey: region.mr.lkey,
        };
        let recv = RecvWr {
            wr_id: Mark::new(MarkKind::Info, 0).encode(),
            sges: &[sge(InfoReq::LEN, room)],
        };
        if let Some(qp) = self.path.conns[0].qp {
            // Before the others: what the server sends first is the information.
            let posted = self.env.cx.provider.post_recv(qp, &[recv]);
            posted.map_err(|(_, e)| Error::Path(PathError::Post(e)))?;
        }
        let name = sge(0, InfoReq::LEN);
        self.path.information = Some(region);
        self.post_receives(0)?;
        self.path.push(self.env, 0, Post::Info(name));
        self.step(Step::Informing);
        Ok(())
    }

    /// The server's chunks have come.
    pub(super) fn information(&mut self, wc: &Completion) -> Result<(), Error> {
        let again = || Error::Path(PathError::Unexpected("a second information response"));
        let (Step::Informing, Some(region), Some(terms)) = (
            self.path.attempt().step,
            self.path.information.as_ref(),
            self.path.terms,
        ) else {
            return Err(again());
        };
        if self.path.attempt().first && self.others_up {
            return Err(Error::Overtaken);
        }
        let room = region.pages.len() - InfoReq::LEN;
        let mut bytes = vec![0; (wc.byte_len as usize).min(room)];
        // The region stays as long as the path: the request's acknowledgement may be lost, and then it is sent once more.
        let read = region.pages.read(InfoReq::LEN, &mut bytes);
        read.map_err(|e| Error::Config(e.to_string()))?;
        if wc.opcode != WcOpcode::Recv {
            return Err(Error::Path(PathError::Unexpected(
                "an RDMA WRITE where the session's information belongs",
            )));
        }
        let chunks = InfoRsp::parse(&bytes).and_then(|rsp| rsp.chunks(&terms.layout));
        self.path.chunks = chunks.map_err(|source| Error::Protocol {
            what: "session information",
            source,
        })?;
        self.path.meet(PathEvent::Handshaken);
        Ok(())
    }

    /// A failure ends the attempt.
    pub(super) fn settle(&mut self, done: Result<(), Error>) {
        if let Err(e) = done {
            self.path.fail(e);
        }
    }
}
