//! A path of a session on the server: its connections, chunks in use, and the threads that drive it.

use core::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    time::Duration,
};
use std::{
    sync::{Arc, OnceLock, Weak},
    time::Instant,
};

use parking_lot::{Condvar, Mutex};
use roce_verbs::{
    AccessFlags, Completion, QpCaps, Sge, WcFlags, WcOpcode, WcStatus,
    provider::{MemoryRegion, Provider, QueuePair, VerbsError},
    wr::{PostError, RecvWr},
};
use smallvec::SmallVec;

use super::{
    Request, ServerConfig, desk::HalfOpen, listener::Shared, post::ServerWork, request::Answer, session::SrvSession,
};
use crate::{
    Error, PathError,
    admission::PathKey,
    conn::{self, Conn, WrId, WrKind},
    heartbeat::Pulse,
    poller::{self, Flushed, Handler, IoSide, Queue},
    proto::{self, ChunkLayout, Imm, InfoReq, InfoRsp, MAX_HDR_SIZE, ProtoError, SERVICE_QUEUE_DEPTH},
};

/// Send queue of an I/O connection at most: more answers wait their turn.
const IO_SEND_WR: u32 = 1024;

pub(super) type SrvConn<P> = Conn<P, ServerWork>;

/// A chunk belongs to the client.
const IDLE: u8 = 0;
/// Its key is being taken back.
const REVOKING: u8 = 1;
/// The user works on its request.
const BUSY: u8 = 2;

/// One of the session's chunks as this path sees it.
pub(super) struct Chunk<P: Provider> {
    pub(super) revocable: Option<P::Revocable>,
    state: AtomicU8,
    /// Where the request's message starts.
    offset: AtomicU32,
}

/// How far a path is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Connections are being made. The desk keeps the time.
    Connecting,
    /// The handshake is done.
    Connected,
    Closing,
}

/// What is known of a path from its first connection request.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathId {
    pub(super) key: PathKey,
    pub(super) con_num: u16,
    pub(super) peer: SocketAddr,
}

/// A path.
pub(super) struct Path<P: Provider> {
    shared: Arc<Shared<P>>,
    pub(super) session: Arc<SrvSession<P>>,
    pub(super) id: PathId,
    pub(super) layout: ChunkLayout,
    conns: Vec<OnceLock<SrvConn<P>>>,
    /// Of the I/O connections.
    cqs: Vec<P::Cq>,
    io_caps: QpCaps,
    pub(super) chunks: Vec<Chunk<P>>,
    /// The information request, and behind it the response.
    pub(super) info: P::Mr,
    pulse: Pulse,
    flushed: Flushed,
    state: Mutex<State>,
    alive: AtomicBool,
    /// The session has been announced to the user for this path.
    established: AtomicBool,
    inflight: Mutex<usize>,
    all_done: Condvar,
    me: Weak<Self>,
}

/// Queue sizes of a service connection.
pub(super) fn service_caps<P: Provider>(provider: &P, config: &ServerConfig) -> QpCaps {
    conn::caps(provider, config.service_send_wr(), SERVICE_QUEUE_DEPTH + 1, 1)
}

/// What the threads of a path poll.
pub(super) struct Queues<P: Provider> {
    service: Queue<P>,
    io: Vec<Queue<P>>,
}

impl<P: Provider> Path<P> {
    /// Makes the objects of a path whose connection 0 stands. [`Path::run`] starts its threads.
    pub(super) fn new(
        shared: &Arc<Shared<P>>,
        session: &Arc<SrvSession<P>>,
        half_open: HalfOpen<P>,
    ) -> Result<(Arc<Self>, Queues<P>), Error> {
        let (provider, config) = (&shared.provider, &shared.config);
        let HalfOpen {
            id,
            service,
            caps,
            conn,
            ..
        } = half_open;
        let depth = config.queue_depth;
        let per_answer = if config.always_invalidate { 5 } else { 3 };
        let io_caps = conn::caps(provider, (depth * per_answer + 1).min(IO_SEND_WR), depth + 1, 1);
        let count = usize::from(id.con_num).saturating_sub(1);
        let threads = config.progress_threads.min(count);
        let io = Queue::spread(provider, count, threads, io_caps)?;
        let chunk = |_| -> Result<Chunk<P>, VerbsError> {
            let revocable = config
                .always_invalidate
                .then(|| provider.alloc_revocable(&session.pd))
                .transpose()?;
            Ok(Chunk {
                revocable,
                state: AtomicU8::new(IDLE),
                offset: AtomicU32::new(0),
            })
        };
        let chunks = (0..depth).map(chunk).collect::<Result<Vec<_>, _>>()?;
        let pieces = if config.always_invalidate { depth as usize } else { 1 };
        let info = provider.alloc_mr(
            &session.pd,
            InfoReq::LEN + InfoRsp::len_for(pieces),
            AccessFlags::LOCAL_WRITE,
        )?;
        Self::expect_messages(&conn, &info, caps).map_err(VerbsError::from)?;
        let conns: Vec<_> = (0..id.con_num).map(|_| OnceLock::new()).collect();
        let _ = conns[0].set(conn);
        let path = Arc::new_cyclic(|me| Self {
            shared: shared.clone(),
            session: session.clone(),
            id,
            layout: shared.layout,
            conns,
            cqs: io.iter().map(|q| q.cq.clone()).collect(),
            io_caps,
            chunks,
            info,
            pulse: Pulse::new(config.heartbeat),
            flushed: Flushed::default(),
            state: Mutex::new(State::Connecting),
            alive: AtomicBool::new(true),
            established: AtomicBool::new(false),
            inflight: Mutex::new(0),
            all_done: Condvar::new(),
            me: me.clone(),
        });
        Ok((path, Queues { service, io }))
    }

    /// The receives of connection 0: the information request, then messages.
    fn expect_messages(conn: &SrvConn<P>, info: &P::Mr, caps: QpCaps) -> Result<(), PostError> {
        let sge = Sge {
            addr: info.addr(),
            length: InfoReq::LEN as u32,
            lkey: info.lkey(),
        };
        let recv = RecvWr {
            wr_id: WrId::new(WrKind::InfoRecv, conn.cid, 0).encode(),
            sges: &[sge],
        };
        conn.qp.post_recv(&[recv]).map_err(|(_, e)| e)?;
        conn.post_recvs(0..caps.max_recv_wr - 1, |_| None)
    }

    /// Starts the path's threads. If that fails the path ends.
    pub(super) fn run(self: &Arc<Self>, queues: Queues<P>) -> Result<(), Error> {
        let started = poller::spawn("rtrs-srv-svc", queues.service, Duration::ZERO, self.clone());
        if let Err(e) = started {
            // Nobody else cleans up.
            self.finish();
            return Err(e);
        }
        for queue in queues.io {
            let side = Arc::new(IoSide(self.clone()));
            poller::spawn("rtrs-srv-io", queue, self.config().spin, side)
                .inspect_err(|_| self.fail(PathError::Closed))?;
        }
        Ok(())
    }

    pub(super) fn config(&self) -> &ServerConfig {
        &self.shared.config
    }

    /// Makes the queue pair of an I/O connection, with its receives posted.
    pub(super) fn add_connection(&self, cid: u16, cm: &P::CmId) -> Result<&SrvConn<P>, PathError> {
        let slot = self.conns.get(usize::from(cid)).filter(|_| cid > 0);
        let slot = slot.ok_or(PathError::Unexpected("a connection that can't be"))?;
        let cq = &self.cqs[(usize::from(cid) - 1) % self.cqs.len()];
        let conn = SrvConn::new(&self.shared.provider, &self.session.pd, cq, cid, self.io_caps)?;
        conn.post_recvs(0..self.io_caps.max_recv_wr - 1, |_| None)?;
        conn.set_cm(cm.clone());
        if slot.set(conn).is_err() {
            return Err(PathError::Unexpected("a connection that exists already"));
        }
        // The path may have gone down before it could see this connection.
        slot.get().filter(|_| !self.stopped()).ok_or(PathError::Closed)
    }

    /// The connection has been accepted: if the path went down meanwhile, it must go too.
    pub(super) fn accepted(&self, conn: &SrvConn<P>) {
        if self.stopped() {
            conn.disconnect();
        }
    }

    /// What is behind the end of a path: that the client used a key that it had no right to shows in the queue pair alone.
    fn cause(&self, why: PathError) -> PathError {
        let mut conns = self.conns.iter().filter_map(OnceLock::get);
        match why {
            PathError::Completion {
                // Of a receive that a refused WRITE with immediate has taken. A remote access error would be of our own WRITE:
                // a client may take its buffer back.
                status: WcStatus::LocalAccessError,
                ..
            } => PathError::AccessError,
            PathError::Flushed | PathError::PeerDisconnected if conns.any(|c| c.qp.access_violated()) => {
                PathError::AccessError
            }
            why => why,
        }
    }

    /// Takes the path down. Its service thread does the rest.
    pub(super) fn fail(&self, why: PathError) {
        {
            let mut state = self.state.lock();
            if *state == State::Closing {
                return;
            }
            *state = State::Closing;
        }
        let why = self.cause(why);
        self.shared.path_closing(self, matches!(why, PathError::AccessError));
        self.shared.counters.count(&why);
        let (session, peer) = (self.session.handle.name(), self.id.peer);
        match why {
            PathError::Closed | PathError::PeerDisconnected => {
                tracing::info!(session, %peer, reason = %why, "path closed");
            }
            _ => tracing::warn!(session, %peer, error = %why, "path closed"),
        }
        self.alive.store(false, Ordering::Release);
        for conn in self.conns.iter().filter_map(OnceLock::get) {
            conn.disconnect();
        }
    }

    fn request_done(&self) {
        let mut inflight = self.inflight.lock();
        *inflight = inflight.saturating_sub(1);
        if *inflight == 0 {
            self.all_done.notify_all();
        }
    }

    /// The answer is about to be sent: the chunk is the client's again.
    pub(super) fn release_chunk(&self, msg_id: usize) {
        self.chunks[msg_id].state.store(IDLE, Ordering::Release);
    }

    /// The user is done with a request.
    pub(super) fn answer(&self, cid: u16, answer: Answer) {
        if self.alive.load(Ordering::Acquire)
            && let Some(conn) = self.conns.get(usize::from(cid)).and_then(OnceLock::get)
            && let Err(e) = conn.submit(ServerWork::Answer(answer), self)
        {
            self.fail(e.into());
        }
        self.request_done();
    }

    fn conn(&self, cid: u16) -> Result<&SrvConn<P>, PathError> {
        let conn = self.conns.get(usize::from(cid)).and_then(OnceLock::get);
        conn.ok_or(PathError::Unexpected("a completion of no connection"))
    }

    fn completion(&self, wc: &Completion) -> Result<(), PathError> {
        let id = WrId::decode(wc.wr_id).ok_or(PathError::Unexpected("a completion without our mark"))?;
        let conn = self.conn(id.cid)?;
        match id.kind {
            WrKind::Send => conn.reclaim(self)?,
            WrKind::Revoke => {
                conn.reclaim(self)?;
                let msg_id = u16::try_from(id.index).map_err(|_| PathError::Unexpected("a mark out of range"))?;
                self.begin(conn.cid, msg_id)?;
            }
            WrKind::InfoRecv => self.information(conn, wc)?,
            WrKind::Recv => {
                self.pulse.heard();
                if wc.opcode != WcOpcode::RecvRdmaWithImm || !wc.flags.contains(WcFlags::WITH_IMM) {
                    return Err(PathError::Unexpected(
                        "a SEND where an RDMA WRITE with immediate belongs",
                    ));
                }
                self.message(conn, Imm::decode(wc.imm)?)?;
            }
        }
        Ok(())
    }

    fn message(&self, conn: &SrvConn<P>, imm: Imm) -> Result<(), PathError> {
        if *self.state.lock() != State::Connected {
            return match self.alive.load(Ordering::Acquire) {
                true => Err(PathError::Unexpected("a message before the handshake is done")),
                false => Ok(()),
            };
        }
        match imm {
            Imm::IoReq(payload) => self.io_request(conn, payload),
            Imm::HbMsg | Imm::HbAck if conn.cid != 0 => Err(PathError::Unexpected("a heartbeat on an I/O connection")),
            Imm::HbMsg => Ok(self.conn(0)?.submit(ServerWork::Imm(Imm::HbAck), self)?),
            Imm::HbAck => Ok(()),
            Imm::IoRsp(_) => Err(PathError::Unexpected("an answer from the client")),
        }
    }

    fn io_request(&self, conn: &SrvConn<P>, payload: u32) -> Result<(), PathError> {
        let (msg_id, offset) = self.layout.unpack(payload)?;
        let chunk = &self.chunks[msg_id as usize];
        if chunk
            .state
            .compare_exchange(IDLE, REVOKING, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            return Err(PathError::Unexpected("a request in a chunk that is in use"));
        }
        chunk.offset.store(offset, Ordering::Release);
        let msg_id = msg_id as u16;
        if self.config().always_invalidate {
            return Ok(conn.submit(ServerWork::Revoke(msg_id), self)?);
        }
        self.begin(conn.cid, msg_id)
    }

    /// The chunk is ours: checks the request and hands it to the user.
    fn begin(&self, cid: u16, msg_id: u16) -> Result<(), PathError> {
        let chunk = &self.chunks[usize::from(msg_id)];
        chunk.state.store(BUSY, Ordering::Release);
        let offset = chunk.offset.load(Ordering::Acquire);
        let size = self.layout.chunk_size();
        let start = usize::from(msg_id) * size as usize;
        // A copy: without always_invalidate the client could change the message while it is checked.
        let mut bytes = [0; proto::Request::MAX_LEN];
        let len = ((size - offset) as usize).min(bytes.len());
        let region = &self.session.chunks;
        let outside = |_| PathError::Unexpected("a message outside its chunk");
        region
            .read(start + offset as usize, &mut bytes[..len])
            .map_err(outside)?;
        let message = proto::Request::parse(&bytes[..len], offset, MAX_HDR_SIZE)?;
        let (usr_len, data_len) = match message {
            proto::Request::Write { usr_len, data_len } => (usr_len, data_len),
            proto::Request::Read {
                usr_len,
                data_len,
                dest,
                ..
            } => {
                if let Some(len) = dest.map(|d| d.len.get()).filter(|len| *len == 0 || *len > data_len) {
                    return Err(ProtoError::field("length of a read", len, "1 to what the chunk sets aside").into());
                }
                (usr_len, data_len)
            }
        };
        let mut header = SmallVec::from_elem(0, usr_len.into());
        region.read(start + data_len as usize, &mut header).map_err(outside)?;
        let Some(me) = self.me.upgrade() else { return Ok(()) };
        *self.inflight.lock() += 1;
        self.shared
            .ops
            .rdma_request(Request::new(me, cid, msg_id, message, header));
        Ok(())
    }

    /// The client's last step of the handshake.
    fn information(&self, conn: &SrvConn<P>, wc: &Completion) -> Result<(), PathError> {
        self.pulse.heard();
        if wc.opcode != WcOpcode::Recv {
            return Err(PathError::Unexpected(
                "an RDMA WRITE where the information request belongs",
            ));
        }
        let mut bytes = vec![0; (wc.byte_len as usize).min(InfoReq::LEN)];
        let outside = |_| PathError::Unexpected("an information request outside its buffer");
        self.info.read(0, &mut bytes).map_err(outside)?;
        let name = InfoReq::parse(&bytes)?.name()?;
        if self.conns.iter().any(|c| c.get().is_none()) {
            return Err(PathError::Unexpected(
                "an information request before all connections are made",
            ));
        }
        self.shared.take_name(name, self)?;
        self.pulse.restart();
        {
            let mut state = self.state.lock();
            match *state {
                State::Connecting => *state = State::Connected,
                _ => return Ok(()),
            }
        }
        self.established.store(true, Ordering::Release);
        self.shared.path_up(self);
        tracing::info!(session = name, peer = %self.id.peer, connections = self.id.con_num, "path is up");
        Ok(conn.submit(ServerWork::Info(self.config().queue_depth), self)?)
    }

    fn beat(&self, now: Instant) -> Instant {
        let ask = || Ok(self.conn(0)?.submit(ServerWork::Imm(Imm::HbMsg), self)?);
        let (due, sent) = self.pulse.run(now, ask);
        if let Err(e) = sent {
            self.fail(e);
        }
        due
    }
}

/// The thread of connection 0: handshake, heartbeats and user messages; it also cleans up.
impl<P: Provider> Handler for Path<P> {
    /// Handles a batch: all receives go back to their queues first, as a peer that is answered expects.
    fn completions(&self, wcs: &[Completion]) -> Result<(), PathError> {
        let mut used: SmallVec<[u16; 64]> = SmallVec::new();
        for wc in wcs {
            if !wc.is_ok() {
                self.flushed.judge(wc)?;
                continue;
            }
            used.extend(
                WrId::decode(wc.wr_id)
                    .filter(|id| id.kind == WrKind::Recv)
                    .map(|id| id.cid),
            );
        }
        used.sort_unstable();
        for same in used.chunk_by(|a, b| a == b) {
            self.conn(same[0])?.post_recvs(0..same.len() as u32, |_| None)?;
        }
        for wc in wcs.iter().filter(|wc| wc.is_ok()) {
            self.completion(wc)?;
        }
        Ok(())
    }

    fn broken(&self, why: PathError) {
        self.fail(why);
    }

    /// A heartbeat.
    fn timers(&self, now: Instant) -> Option<Instant> {
        if let Err(e) = self.flushed.check(now) {
            self.fail(e);
        }
        let connected = *self.state.lock() == State::Connected;
        let next = connected.then(|| self.beat(now));
        self.flushed.due().into_iter().chain(next).min()
    }

    /// Whether it was taken down; its threads may still be cleaning up.
    fn stopped(&self) -> bool {
        !self.alive.load(Ordering::Acquire)
    }

    /// Waits for the user's requests, then takes leave.
    fn finish(&self) {
        // The queue may have broken without a failure of the path.
        self.fail(PathError::Closed);
        let mut inflight = self.inflight.lock();
        while *inflight > 0 {
            self.all_done.wait(&mut inflight);
        }
        drop(inflight);
        self.shared.path_gone(self, self.established.load(Ordering::Acquire));
    }
}
