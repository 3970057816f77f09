//! Opening a path: connection 0 first, because its answer brings the sizes; then the others, those of other shares at the same
//! time; then the session's name for the addresses of the chunks.

use core::ops::Range;
use std::sync::Arc;

use roce_mem::Pages;
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
        lane::Lane,
        letter::{Offer, Word},
        path::{Path, Region, Report, Step},
        state::PathEvent,
        terms::Terms,
    },
    mark::{Mark, MarkKind},
    proto::{ConnReq, ConnRsp, InfoReq, InfoRsp, RkeyRsp, SERVICE_QUEUE_DEPTH, Uuid, info::ChunkAddr},
    sendq::SendQueue,
};

/// Send queue of an I/O connection at most: more requests wait their turn.
const IO_SEND_WR: u32 = 1024;

/// Arguments of a step.
pub(super) struct Handshake<'a, 'b, 'c> {
    pub(super) path: &'a mut Path,
    pub(super) env: &'a mut Env<'b, 'c>,
    pub(super) lane: &'a mut Lane,
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

impl Handshake<'_, '_, '_> {
    /// Looks for the way to the server, for the first connection: at home number 0. Other shares have got an
    /// [`Offer`](Self::offered).
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        self.path.device = None;
        if self.env.share.is_home() {
            self.path.recon_cnt = self.path.recon_cnt.wrapping_add(1);
            self.path.terms = None;
        }
        self.resolve(0)
    }

    /// Home has connection 0, and asks for ours.
    pub(super) fn offered(&mut self, offer: Offer) {
        self.path.terms = Some(offer.terms);
        (self.path.recon_cnt, self.path.first) = (offer.recon_cnt, offer.first_conn);
        self.path.asked = true;
    }

    /// I/O connections that the path has at this share.
    fn io_connections(&self) -> u16 {
        self.env.share.io_connections(self.config.connections)
    }

    /// Our part of the session's permits.
    fn permits(&self) -> Range<u32> {
        let depth = self.path.terms.map_or(0, |terms| terms.layout.queue_depth());
        self.env.share.permits(depth)
    }

    fn resolve(&mut self, place: u16) -> Result<(), Error> {
        let addr = &self.path.addr;
        let cm = self.env.cx.provider.cm_resolve(addr.src, addr.dst)?;
        self.env.names.add_cm(cm, self.path.key(place));
        self.path.conns.push(Conn::new(cm));
        self.step(Step::Resolving { place });
        Ok(())
    }

    fn step(&mut self, step: Step) {
        self.path.step = step;
        self.path.step_due = Some(self.env.cx.now + self.config.connect_timeout);
    }

    /// An event of one of the connections.
    pub(super) fn event(&mut self, place: u16, kind: CmKind) -> Result<(), Error> {
        match (kind, self.path.step) {
            (CmKind::Resolved { device }, Step::Resolving { place: of }) if of == place => self.connect(place, device),
            (CmKind::Established { private_data }, Step::Connecting { place: of }) if of == place => {
                self.established(place, &private_data)
            }
            (CmKind::Rejected { reason, private_data }, _) => {
                let errno = ConnRsp::parse(&private_data).ok().map(ConnRsp::errno);
                Err(Error::Rejected {
                    cid: self.env.share.cid(place),
                    reason,
                    errno,
                })
            }
            (CmKind::Unreachable(why), _) => Err(Error::Unreachable(why)),
            (CmKind::ConnectError(text), _) => Err(Error::Path(PathError::Cm(text))),
            (CmKind::AddressChange, _) => Err(Error::Path(PathError::Cm("our address is gone".into()))),
            // `Disconnected` is the path's business.
            _ => Ok(()),
        }
    }

    /// The way is known: makes the queue pair and connects it.
    fn connect(&mut self, place: u16, device: DeviceIx) -> Result<(), Error> {
        if self.path.device.is_some_and(|of| of != device) {
            let why = "the way to the server changed while the path was being connected";
            return Err(Error::Path(PathError::Cm(why.into())));
        }
        let pd = self.lane.enter(self.env.cx, device, self.config.invalidate_reads)?;
        (self.path.device, self.path.pd) = (Some(device), Some(pd));
        self.path.entered = Some(device);
        let io = place >= self.env.share.service();
        if place == 0 && io {
            self.furnish()?;
        }
        self.make_qp(place, device, pd)?;
        if io {
            self.post_receives(place)?;
        }
        let req = ConnReq::new(
            self.env.share.cid(place),
            self.config.connections + 1,
            self.path.recon_cnt,
            self.path.uuid,
            self.uuid,
            self.path.first,
        );
        let params = ConnParams {
            private_data: req.as_bytes().to_vec(),
            responder_resources: 0,
            initiator_depth: 0,
            // A kernel's server registers the memory of all its chunks before it answers, or says that it needs time.
            patience: Some(self.config.connect_timeout),
            ..ConnParams::default()
        };
        let conn = &self.path.conns[usize::from(place)];
        if let Some(qp) = conn.qp {
            self.env.cx.provider.cm_connect(conn.cm, qp, &params)?;
        }
        self.step(Step::Connecting { place });
        Ok(())
    }

    fn make_qp(&mut self, place: u16, device: DeviceIx, pd: PdId) -> Result<(), Error> {
        let limits = self.env.cx.provider.devices()[usize::from(device.0)].limits.clone();
        let service = caps(&limits, 2 * SERVICE_QUEUE_DEPTH + 2, 2 * SERVICE_QUEUE_DEPTH + 2);
        let depth = self.permits().len() as u32;
        let io = caps(&limits, (4 * depth + 1).min(IO_SEND_WR), 2 * depth);
        let is_service = place < self.env.share.service();
        let caps = if is_service { service } else { io };
        let cq = match self.path.cq {
            Some(cq) => cq,
            None => {
                // A server that keeps to the queue depth never fills so many.
                let per_conn = u64::from(service.max_send_wr + service.max_recv_wr);
                let entries = per_conn * u64::from(self.env.share.service() + self.io_connections());
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
        self.env.names.add_qp(qp, self.path.key(place));
        // One receive of connection 0 is that of the information.
        let receives = if is_service {
            caps.max_recv_wr - 2
        } else {
            caps.max_recv_wr
        };
        let before = place
            .checked_sub(1)
            .map(|place| self.path.conns[usize::from(place)].receives);
        let first = before.map_or(0, |(first, count)| first + count);
        let conn = &mut self.path.conns[usize::from(place)];
        conn.qp = Some(qp);
        conn.queue = SendQueue::new(caps.max_send_wr);
        conn.receives = (first, receives);
        Ok(())
    }

    fn established(&mut self, place: u16, private_data: &[u8]) -> Result<(), Error> {
        let terms = Terms::parse(private_data)?;
        self.path.conns[usize::from(place)].established = true;
        if place < self.env.share.service() {
            self.path.ever_accepted = true;
            self.agree(terms)?;
        }
        match place + 1 < self.env.share.service() + self.io_connections() {
            true => self.resolve(place + 1),
            false => self.connected(),
        }
    }

    /// The server's sizes are known.
    fn agree(&mut self, terms: Terms) -> Result<(), Error> {
        if self.agreed.is_some_and(|agreed| !agreed.agree_with(&terms)) {
            return Err(Error::OtherSizes);
        }
        let (depth, shares) = (terms.layout.queue_depth(), self.env.share.count());
        if depth < shares.into() {
            return Err(Error::Config(format!(
                "a session over {shares} loops needs a request for each, and the server takes {depth} at a time"
            )));
        }
        self.path.terms = Some(terms);
        self.furnish()?;
        self.path.others.ask();
        let offer = Offer {
            terms,
            recon_cnt: self.path.recon_cnt,
            first_conn: self.path.first,
        };
        for share in self.env.share.others() {
            let path = self.path.index;
            self.env.tell(share, self.path.session, Word::Connect { path, offer });
        }
        Ok(())
    }

    /// All connections here stand.
    pub(super) fn connected(&mut self) -> Result<(), Error> {
        (self.path.step, self.path.step_due) = (Step::Gathering, None);
        if !self.env.share.is_home() {
            let path = self.path.index;
            self.env.tell_home(self.path.session, Word::Connected { path });
            return Ok(());
        }
        // A kernel's server expects the question when it has all connections.
        if !self.path.others.all_connected() {
            return Ok(());
        }
        if self.ask_at.is_some() {
            (self.path.step, self.path.step_due) = (Step::Resting, self.ask_at);
            return Ok(());
        }
        self.ask()
    }

    /// Gets what requests of the path need.
    fn furnish(&mut self) -> Result<(), Error> {
        let (Some(terms), Some(device), Some(pd)) = (self.path.terms, self.path.device, self.path.pd) else {
            return Ok(());
        };
        let info = terms.info(self.config.max_user_header);
        let permits = self.permits();
        let depth = permits.len() as u64;
        self.lane.furnish(self.env.cx, device, permits, info.max_user_header)?;
        if terms.new_rkeys() {
            let service = match self.path.conns.first() {
                Some(conn) if self.env.share.is_home() => conn.receives.1,
                _ => 0,
            };
            let io = 2 * depth * u64::from(self.io_connections());
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
    fn post_receives(&mut self, place: u16) -> Result<(), Error> {
        let (first, count) = self.path.conns[usize::from(place)].receives;
        self.path.conns[usize::from(place)].used = (first..first + count).collect();
        self.path.mark_dirty(self.env, place);
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
        let (Step::Informing, Some(region), Some(terms)) =
            (self.path.step, self.path.information.as_ref(), self.path.terms)
        else {
            return Err(again());
        };
        if self.path.first && self.others_up {
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
        let mut chunks = chunks.map_err(|source| Error::Protocol {
            what: "session information",
            source,
        })?;
        for share in self.env.share.others() {
            let word = Word::Up {
                path: self.path.index,
                chunks: self.env.share.part_of(share, &chunks).to_vec(),
            };
            self.env.tell(share, self.path.session, word);
        }
        // The first permits are home's.
        chunks.truncate(self.permits().len());
        self.shaken(chunks);
        Ok(())
    }

    /// The path is up, with these chunks for our permits.
    pub(super) fn shaken(&mut self, chunks: Vec<ChunkAddr>) {
        self.path.chunks = chunks;
        (self.path.step, self.path.step_due) = (Step::Idle, None);
        self.path.meet(PathEvent::Handshaken);
    }

    /// A failure ends the attempt.
    pub(super) fn settle(&mut self, done: Result<(), Error>, reports: &mut Vec<Report>) {
        if let Err(e) = done {
            self.path.fail(e, reports);
        }
    }
}
