//! A path of a session: its connections and their keys, and how long it waits for its peer.

use core::time::Duration;
use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Completion, Instant, QpCaps, RecvWr, Sge, WcStatus,
    provider::{
        CmRef, ConnParams, CqId, DeviceIx, KeyId, KeyKind, KeyStrategy, MrInfo, PdId, QpId, Registration, VerbsError,
    },
    wr::PostError,
};
use smallvec::SmallVec;

use crate::{
    Cx, PathError,
    mark::{Mark, MarkKind},
    proto::{ChunkLayout, Imm, InfoReq, InfoRsp},
    server::{
        config::ServerConfig,
        conn::{Conn, caps, cq_entries, device_caps},
        effects::{Effects, Place},
        half_open::{HalfOpen, PathId},
        keepalive::Keepalive,
        listing::PathListing,
        post::{InfoMemory, NO_KEY, PostContext, Renewal, ServerWork},
        state::Phase,
    },
    stats::RdmaStats,
};

/// Send queue of an I/O connection at most: more answers wait their turn.
const IO_SEND_WR: u32 = 1024;
/// How long flushed work requests may wait for the event that explains them.
const FLUSH_GRACE: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    pub(crate) phase: Phase,
    /// By number.
    conns: Vec<Option<Conn>>,
    pd: PdId,
    /// Completion queues of connection 0 and of the others.
    cqs: Vec<CqId>,
    io_caps: QpCaps,
    strategy: KeyStrategy,
    /// As the system calls the device.
    hca: Option<Arc<str>>,
    renewal: Renewal,
    /// By chunk, unless they are never renewed.
    keys: Vec<KeyId>,
    info: Option<InfoMemory>,
    /// The session's chunks as its device knows them, once they are there.
    chunks: Option<MrInfo>,
    pub(crate) keepalive: Keepalive,
    /// When flushed work requests that nothing has explained end the path.
    flushed: Option<Instant>,
    /// Requests of it that are with the user.
    pub(crate) with_user: usize,
    /// Traffic of the path.
    pub(crate) rdma: RdmaStats,
}

impl Path {
    /// Makes the objects of a path whose connection 0 is established.
    ///
    /// # Errors
    /// At the device's limits, or without memory: nothing of it is left, but for its place in the domain.
    pub(crate) fn open(cx: &mut Cx<'_>, half_open: HalfOpen, config: &ServerConfig) -> Result<Self, PathError> {
        let HalfOpen {
            id,
            pd,
            cq,
            caps: service,
            conn,
            ..
        } = half_open;
        let mut path = Self::new(id, pd, service);
        path.cqs.push(cq);
        if let Some(first) = path.conns.first_mut() {
            *first = Some(conn);
        }
        let made = path
            .equip(cx, config)
            .and_then(|()| path.make_keys(cx, config))
            .and_then(|()| path.expect_information(cx, service));
        match made {
            Ok(()) => Ok(path),
            Err(e) => {
                path.destroy(cx);
                Err(e)
            }
        }
    }

    fn new(id: PathId, pd: PdId, io_caps: QpCaps) -> Self {
        let mut conns = Vec::new();
        conns.resize_with(usize::from(id.connections).max(1), || None);
        Self {
            id,
            phase: Phase::Connecting { asked: false },
            conns,
            pd,
            cqs: Vec::new(),
            io_caps,
            strategy: KeyStrategy::Static,
            hca: None,
            renewal: Renewal::Never,
            keys: Vec::new(),
            info: None,
            chunks: None,
            keepalive: Keepalive::default(),
            flushed: None,
            with_user: 0,
            rdma: RdmaStats::default(),
        }
    }

    /// Creates the resources that its I/O connections need.
    fn equip(&mut self, cx: &mut Cx<'_>, config: &ServerConfig) -> Result<(), PathError> {
        let (depth, device) = (config.queue_depth, self.id.device);
        let known = device_caps(cx, device)?;
        self.strategy = KeyStrategy::for_chunks(known, config.always_invalidate);
        self.renewal = Renewal::of(self.strategy, known);
        self.hca.clone_from(&known.name);
        let send = (depth * self.renewal.answer_slots() + 1).min(IO_SEND_WR);
        self.io_caps = caps(&known.limits, send, depth + 1);
        let count = usize::from(self.id.connections).saturating_sub(1);
        let entries = cq_entries(&known.limits, &self.io_caps, count);
        self.cqs.push(cx.provider.create_cq(device, entries)?);
        Ok(())
    }

    fn make_keys(&mut self, cx: &mut Cx<'_>, config: &ServerConfig) -> Result<(), PathError> {
        let kind = match self.strategy {
            KeyStrategy::FastRegistration => KeyKind::FastRegistration,
            KeyStrategy::Window1 => KeyKind::Window1,
            // A type 2 window would belong to one connection.
            KeyStrategy::Window2 | KeyStrategy::Static => return Ok(()),
        };
        for _ in 0..config.queue_depth {
            self.keys.push(cx.provider.alloc_key(self.pd, kind)?);
        }
        Ok(())
    }

    /// Posts the receives of connection 0: the information request, then messages.
    fn expect_information(&mut self, cx: &mut Cx<'_>, service: QpCaps) -> Result<(), PathError> {
        let info = self.make_info(cx)?;
        let sge = Sge {
            addr: info.mr.addr,
            length: InfoReq::LEN as u32,
            lkey: info.mr.lkey,
        };
        self.info = Some(info);
        let first = RecvWr {
            wr_id: Mark::new(MarkKind::Info, 0).encode(),
            sges: &[sge],
        };
        let Some(conn) = self.conn_mut(0) else { return Ok(()) };
        cx.provider.post_recv(conn.qp, &[first]).map_err(|(_, e)| e)?;
        Ok(conn.post_recvs(cx, service.max_recv_wr.saturating_sub(1))?)
    }

    /// Memory for the information request and the response: a piece per key.
    fn make_info(&self, cx: &mut Cx<'_>) -> Result<InfoMemory, VerbsError> {
        let len = InfoReq::LEN + InfoRsp::len_for(self.keys.len().max(1));
        let pages = Pages::allocate(len).map_err(|_| VerbsError::Limit("memory"))?;
        let what = Registration {
            memory: pages.clone(),
            offset: 0,
            len,
            iova: None,
            access: AccessFlags::LOCAL_WRITE,
        };
        let mr = cx.provider.register(self.pd, &what)?;
        Ok(InfoMemory { pages, mr })
    }

    /// Registers the session's chunks, the first `len` bytes of the pages, for this path's device.
    ///
    /// # Errors
    /// When the device can't register so much.
    pub(crate) fn register(&self, cx: &mut Cx<'_>, pages: &Arc<Pages>, len: usize) -> Result<MrInfo, VerbsError> {
        let access = match self.strategy {
            KeyStrategy::Static => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            // Only renewed keys open the chunks.
            _ => AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND,
        };
        let what = Registration {
            memory: pages.clone(),
            offset: 0,
            len,
            iova: None,
            access,
        };
        cx.provider.register(self.pd, &what)
    }

    /// The chunks are there: their session has them registered for this path's device, or they are now.
    ///
    /// # Errors
    /// Of `register`.
    pub(crate) fn use_chunks(
        &mut self,
        registered: &mut SmallVec<[(DeviceIx, MrInfo); 1]>,
        register: impl FnOnce(&mut Self) -> Result<MrInfo, VerbsError>,
    ) -> Result<(), VerbsError> {
        let device = self.id.device;
        let chunks = match registered.iter().find(|(of, _)| *of == device) {
            Some((_, chunks)) => *chunks,
            None => {
                let chunks = register(self)?;
                registered.push((device, chunks));
                chunks
            }
        };
        self.chunks = Some(chunks);
        Ok(())
    }

    /// Makes the queue pair of an I/O connection, with its receives posted, and accepts. Returns the queue pair.
    ///
    /// # Errors
    /// When the path can't have this connection, or at the device's limits. The connection request still waits.
    pub(crate) fn add_connection(
        &mut self,
        cx: &mut Cx<'_>,
        cid: u16,
        cm: CmRef,
        params: &ConnParams,
    ) -> Result<QpId, PathError> {
        let place = self.conns.get(usize::from(cid)).filter(|_| cid > 0);
        match place {
            None => return Err(PathError::Unexpected("a connection that can't be")),
            Some(Some(_)) => return Err(PathError::Unexpected("a connection that exists already")),
            Some(None) => {}
        }
        let cq = *self.cqs.last().ok_or(PathError::Closed)?;
        let conn = Conn::make(cx, self.pd, cq, self.io_caps, cm)?;
        let posted = conn.post_recvs(cx, self.io_caps.max_recv_wr.saturating_sub(1));
        let accepted = posted.map_err(VerbsError::from);
        let accepted = accepted.and_then(|()| cx.provider.cm_accept(cm, conn.qp, params));
        if let Err(e) = accepted {
            cx.provider.destroy_qp(conn.qp);
            return Err(e.into());
        }
        let qp = conn.qp;
        self.conns[usize::from(cid)] = Some(conn);
        Ok(qp)
    }

    /// Whether all its connections have been made.
    pub(crate) fn is_complete(&self) -> bool {
        self.conns.iter().all(Option::is_some)
    }

    /// For the operator.
    pub(crate) fn listing(&self) -> PathListing {
        PathListing {
            path: self.id.key,
            uuid: self.id.uuid,
            client: self.id.peer,
            server: self.id.local,
            device: self.id.device,
            hca: self.hca.clone(),
            keys: self.strategy,
            state: self.phase.state(),
            connections: self.id.connections,
            made: self.conns().count(),
            requests: self.with_user,
            rdma: self.rdma,
        }
    }

    /// Whether it takes requests, or will.
    pub(crate) fn is_alive(&self) -> bool {
        matches!(self.phase, Phase::Connecting { .. } | Phase::Connected(_))
    }

    /// Whether the chunks can be given to the client.
    pub(crate) fn has_chunks(&self) -> bool {
        self.chunks.is_some()
    }

    /// A connection.
    pub(crate) fn conn(&self, cid: u16) -> Option<&Conn> {
        self.conns.get(usize::from(cid))?.as_ref()
    }

    /// A connection.
    pub(crate) fn conn_mut(&mut self, cid: u16) -> Option<&mut Conn> {
        self.conns.get_mut(usize::from(cid))?.as_mut()
    }

    /// All its connections.
    pub(crate) fn conns(&self) -> impl Iterator<Item = &Conn> {
        self.conns.iter().flatten()
    }

    /// Records that a packet came from the peer.
    pub(crate) fn heard(&mut self) {
        self.keepalive.heard();
        self.phase.heard();
    }

    /// Sorts a failed completion: what must end the path at once. That work requests were flushed tells only that the queue
    /// pair is in error. Mostly the peer has disconnected and the event is on its way; if none comes, something else is wrong.
    ///
    /// # Errors
    /// What the completion says.
    pub(crate) fn judge(&mut self, now: Instant, wc: &Completion) -> Result<(), PathError> {
        if wc.status == WcStatus::FlushError {
            self.flushed.get_or_insert(now + FLUSH_GRACE);
            return Ok(());
        }
        Err(PathError::Completion {
            what: Mark::what(wc.wr_id),
            status: wc.status,
        })
    }

    /// The information request, as it was received.
    ///
    /// # Errors
    /// When there is no memory for one.
    pub(crate) fn information(&self, len: u32) -> Result<Vec<u8>, PathError> {
        const OUTSIDE: PathError = PathError::Unexpected("an information request outside its buffer");
        let mut bytes = vec![0; (len as usize).min(InfoReq::LEN)];
        let info = self.info.as_ref().ok_or(OUTSIDE)?;
        info.pages.read(0, &mut bytes).map_err(|_| OUTSIDE)?;
        Ok(bytes)
    }

    /// The client asks for the chunks.
    pub(crate) fn ask(&mut self) {
        if let Phase::Connecting { asked } = &mut self.phase {
            *asked = true;
        }
    }

    /// Takes the path down.
    pub(crate) fn close(&mut self, why: PathError) {
        self.flushed = None;
        self.phase.close(why);
    }

    /// Whether none of its work requests is in flight.
    pub(crate) fn is_drained(&self) -> bool {
        self.phase.ending().is_some_and(|ending| ending.drained)
    }

    /// When [`Path::tick`] wants to be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.flushed.into_iter().chain(self.phase.next_timeout()).min()
    }

    /// Looks at the clock. True: a heartbeat is due.
    ///
    /// # Errors
    /// Why the path ends.
    pub(crate) fn tick(&mut self, now: Instant) -> Result<bool, PathError> {
        if self.flushed.is_some_and(|due| now >= due) {
            return Err(PathError::Flushed);
        }
        self.phase.tick(now)
    }

    /// Cause of the end of a path: that the client used a key that it had no right to shows in the queue pair alone.
    pub(crate) fn cause(&self, cx: &Cx<'_>, why: PathError) -> PathError {
        match why {
            PathError::Completion {
                // Of a receive that a refused WRITE with immediate has taken. A remote access error would be of our own WRITE:
                // a client may take its buffer back.
                status: WcStatus::LocalAccessError,
                ..
            } => PathError::AccessError,
            PathError::Flushed | PathError::PeerDisconnected
                if self.conns().any(|c| cx.provider.access_violated(c.qp)) =>
            {
                PathError::AccessError
            }
            why => why,
        }
    }

    /// How the keys of the chunks are renewed.
    pub(crate) fn renewal(&self) -> Renewal {
        self.renewal
    }

    /// The queue pair of a connection, and the key of a chunk.
    ///
    /// # Errors
    /// When there is no such connection or no key.
    pub(crate) fn chunk_key(&self, cid: u16, chunk: u16) -> Result<(QpId, KeyId), PathError> {
        let conn = self.conn(cid).ok_or(PostError::NoQueuePair)?;
        let key = self.keys.get(usize::from(chunk)).ok_or(NO_KEY)?;
        Ok((conn.qp, *key))
    }

    /// Adds work to a connection, which leaves with the turn.
    ///
    /// # Errors
    /// When the connection is being taken down, or is not there.
    pub(crate) fn push(&mut self, place: Place, work: ServerWork, effects: &mut Effects) -> Result<(), PostError> {
        let conn = self.conn_mut(place.cid).ok_or(PostError::NoQueuePair)?;
        conn.out.queue.push(work)?;
        if conn.list() {
            effects.dirty.push(place);
        }
        Ok(())
    }

    /// Whether a heartbeat request waits to be posted.
    pub(crate) fn has_heartbeat(&self) -> bool {
        self.conn(0).is_some_and(|conn| conn.out.queue.beats(Imm::HbMsg) > 0)
    }

    /// A connection, and how it posts, once the chunks are there.
    pub(crate) fn posting<'a>(
        &'a mut self,
        cid: u16,
        layout: &'a ChunkLayout,
    ) -> Option<(&'a mut Conn, PostContext<'a>)> {
        let conn = self.conns.get_mut(usize::from(cid))?.as_mut()?;
        let at = PostContext {
            qp: conn.qp,
            chunks: self.chunks.as_ref()?,
            layout,
            keys: &self.keys,
            renewal: self.renewal,
            info: self.info.as_ref(),
        };
        Some((conn, at))
    }

    /// Moves the queue pairs to error; what was to be posted is dropped.
    pub(crate) fn drain(&mut self, cx: &mut Cx<'_>) {
        for conn in self.conns.iter_mut().flatten() {
            conn.out.queue.close();
            cx.provider.drain(conn.qp);
        }
    }

    /// Disconnects from the peer, also by the networks of these connections.
    pub(crate) fn disconnect(&self, cx: &mut Cx<'_>, ways: &[CmRef]) {
        for conn in self.conns() {
            cx.provider.cm_disconnect_by(conn.cm, ways);
        }
    }

    /// A connection of a closing path is drained. True if it was the last.
    pub(crate) fn drained(&mut self, cid: u16) -> bool {
        let Phase::Closing(ending) = &mut self.phase else {
            return false;
        };
        if let Some(Some(conn)) = self.conns.get_mut(usize::from(cid)) {
            conn.drained = true;
        }
        let was_drained = ending.drained;
        ending.drained = self.conns.iter().flatten().all(|conn| conn.drained);
        ending.drained && !was_drained
    }

    /// Gives back all objects but the session's. A second call does nothing.
    pub(crate) fn destroy(&mut self, cx: &mut Cx<'_>) {
        for conn in self.conns.drain(..).flatten() {
            cx.provider.cm_destroy(conn.cm);
            cx.provider.destroy_qp(conn.qp);
        }
        for cq in self.cqs.drain(..) {
            cx.provider.destroy_cq(cq);
        }
        for key in self.keys.drain(..) {
            cx.provider.free_key(key);
        }
        if let Some(info) = self.info.take() {
            cx.provider.deregister(info.mr.id);
        }
    }
}
