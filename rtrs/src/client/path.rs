//! A path of a session: its connections, its requests in flight, and the threads that drive them.

use core::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};
use std::{
    collections::HashSet,
    sync::Arc,
    thread::{Builder, JoinHandle},
    time::Instant,
};

use parking_lot::{Condvar, Mutex};
use roce_verbs::{
    AccessFlags, Completion, RKey, Sge, WcFlags, WcOpcode,
    provider::{CmChannel, CmEventKind, MemoryRegion, Provider},
    wr::PostError,
};
use smallvec::SmallVec;

use super::{
    buffer::IoBuffer,
    handshake::{Connector, ServerTerms},
    permit::{Permit, Permits},
    post::{ClientWork, InfoPoster},
    session::{ConType, Outcome, SessionInfo},
};
use crate::{
    Direction, Error, IoError, PathError,
    addr::PathAddr,
    conn::{Conn, WrId, WrKind, caps},
    heartbeat::{HeartbeatConfig, Pulse},
    poller::{self, Flushed, Handler, IoSide, Queue},
    proto::{
        ChunkLayout, Imm, IoReply, MsgFlags, ProtoError, RdmaRead, RkeyRsp, SERVICE_QUEUE_DEPTH, Uuid, info::ChunkAddr,
    },
};

/// Send queue of an I/O connection at most: more requests wait their turn.
const IO_SEND_WR: u32 = 1024;
/// How long a close waits for the server to confirm.
const CLOSE_WAIT: Duration = Duration::from_secs(1);

/// What a path is opened with.
#[derive(Clone, Debug)]
pub(super) struct PathConfig {
    pub(super) addr: PathAddr,
    pub(super) name: String,
    pub(super) connections: u16,
    pub(super) connect_timeout: Duration,
    pub(super) heartbeat: HeartbeatConfig,
    pub(super) max_user_header: u16,
    pub(super) invalidate_reads: bool,
    pub(super) progress_threads: usize,
    pub(super) spin: Duration,
}

pub(super) type ClientConn<P> = Conn<P, ClientWork>;
type Done<P> = Box<dyn FnOnce(Outcome<P>) + Send>;
type DownHook = Box<dyn FnOnce(&PathError) + Send>;

impl<P: Provider> ClientConn<P> {
    pub(super) fn submit_info(&self, sge: Sge) -> Result<(), PostError> {
        self.submit(ClientWork::Info(sge), &InfoPoster)
    }

    pub(super) fn reclaim_info(&self) -> Result<(), PostError> {
        self.reclaim(&InfoPoster)
    }
}

/// A request on its way into a path.
pub(super) struct Submission<P: Provider> {
    pub(super) permit: Permit,
    pub(super) con: ConType,
    pub(super) direction: Direction,
    pub(super) data: Option<IoBuffer<P>>,
    pub(super) done: Done<P>,
}

impl<P: Provider> Submission<P> {
    /// Ends it unsent.
    pub(super) fn fail(self, error: IoError) {
        drop(self.permit);
        (self.done)(Outcome {
            result: Err(error),
            data: self.data,
        });
    }
}

/// What a request in flight waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waits {
    /// Room in the send queue.
    Room,
    /// The server's answer.
    Answer,
    /// The end of its buffer's key, which the server has not revoked; then it ends with this error number.
    Revocation(u16),
}

/// A request in flight.
pub(super) struct Flight<P: Provider> {
    pub(super) request: Submission<P>,
    pub(super) cid: u16,
    pub(super) usr_len: u16,
    /// The key under which the server may write the buffer of a read.
    pub(super) key: Option<RKey>,
    pub(super) waits: Waits,
}

impl<P: Provider> Flight<P> {
    fn finish(self, result: Result<(), IoError>) {
        let Submission { permit, data, done, .. } = self.request;
        drop(permit);
        done(Outcome { result, data });
    }
}

/// One of the server's chunks, and the request that uses it.
pub(super) struct Slot<P: Provider> {
    pub(super) addr: u64,
    pub(super) rkey: AtomicU32,
    pub(super) revocable: Option<P::Revocable>,
    pub(super) flight: Mutex<Option<Flight<P>>>,
}

enum State {
    Up,
    Down(PathError),
}

struct Status {
    state: State,
    on_down: Vec<DownHook>,
}

/// A path. It owns its connections; the threads hold it until they are told to stop.
pub(super) struct Path<P: Provider> {
    config: PathConfig,
    info: SessionInfo,
    pub(super) layout: ChunkLayout,
    pub(super) conns: Vec<ClientConn<P>>,
    pub(super) slots: Vec<Slot<P>>,
    /// User header and message of each request, `header_stride` bytes per slot.
    pub(super) headers: P::Mr,
    pub(super) header_stride: usize,
    /// Where key responses land: 8 bytes per posted receive. `None` if the server sends none.
    key_messages: Option<P::Mr>,
    /// Keys that the server has revoked with a SEND, whose answers are still to come.
    revoked: Mutex<HashSet<RKey>>,
    permits: Arc<Permits>,
    pulse: Pulse,
    flushed: Flushed,
    status: Mutex<Status>,
    alive: AtomicBool,
    /// The CM thread ends when it sees this.
    stop: AtomicBool,
    disconnected: Mutex<usize>,
    disconnect_seen: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Connections and queues of a path that is being opened.
struct Opening<P: Provider> {
    conns: Vec<ClientConn<P>>,
    service: Queue<P>,
    io: Vec<Queue<P>>,
    /// Receives of each connection: first buffer and number.
    receives: Vec<(u32, u32)>,
}

impl<P: Provider> Path<P> {
    pub(super) fn connect(provider: &P, pd: &P::Pd, config: PathConfig, session: Uuid) -> Result<Arc<Self>, Error> {
        let channel = provider.create_cm_channel()?;
        let connector = Connector {
            provider,
            channel: &channel,
            config: &config,
            session,
            path: Uuid::random().map_err(|e| Error::System("random bytes", e))?,
        };
        let service_caps = caps(provider, 2 * SERVICE_QUEUE_DEPTH + 2, 2 * SERVICE_QUEUE_DEPTH + 2, 2);
        let service = Queue::new(provider, service_caps.max_send_wr + service_caps.max_recv_wr + 16)?;
        let con0 = ClientConn::new(provider, pd, &service.cq, 0, service_caps)?;
        let mut opening = Opening {
            conns: vec![con0],
            service,
            io: Vec::new(),
            receives: vec![(0, service_caps.max_recv_wr - 2)],
        };
        let opened = Self::open_all(&connector, pd, &mut opening);
        let (terms, chunks, key_messages) = opened.inspect_err(|_| {
            for conn in &opening.conns {
                conn.disconnect();
            }
        })?;
        let Opening { conns, service, io, .. } = opening;
        let path = Self::assemble(provider, pd, config.clone(), &terms, &chunks, conns, key_messages)?;
        path.start(service, io, channel)?;
        tracing::info!(session = %path.config.name, path = %path.config.addr, info = ?path.info, "path is up");
        Ok(path)
    }

    /// Connects everything and makes the handshake.
    #[allow(clippy::type_complexity)]
    fn open_all(
        connector: &Connector<'_, P>,
        pd: &P::Pd,
        opening: &mut Opening<P>,
    ) -> Result<(ServerTerms, Vec<ChunkAddr>, Option<P::Mr>), Error> {
        let (provider, config) = (connector.provider, connector.config);
        let terms = connector.connect(&opening.conns[0])?;
        let depth = terms.layout.queue_depth();
        let io_caps = caps(provider, (4 * depth + 1).min(IO_SEND_WR), 2 * depth, 2);
        let threads = config.progress_threads;
        opening.io = Queue::spread(provider, config.connections.into(), threads, io_caps)?;
        for cid in 1..=config.connections {
            let queue = &opening.io[(usize::from(cid) - 1) % threads];
            let (first, n) = opening.receives[usize::from(cid) - 1];
            opening
                .conns
                .push(ClientConn::new(provider, pd, &queue.cq, cid, io_caps)?);
            opening.receives.push((first + n, io_caps.max_recv_wr));
        }
        let total: u32 = opening.receives.iter().map(|(_, n)| n).sum();
        let key_messages = match terms.flags.contains(MsgFlags::NEW_RKEY) {
            true => Some(provider.alloc_mr(pd, total as usize * RkeyRsp::LEN, AccessFlags::LOCAL_WRITE)?),
            false => None,
        };
        let receive = |conn: &ClientConn<P>| {
            let (first, n) = opening.receives[usize::from(conn.cid)];
            conn.post_recvs(first..first + n, |i| key_sge(key_messages.as_ref(), i))
                .map_err(|e| Error::Path(PathError::Post(e)))
        };
        for conn in &opening.conns[1..] {
            receive(conn)?;
            connector.connect(conn)?;
        }
        let con0 = &opening.conns[0];
        let chunks = connector.information(con0, &opening.service, pd, &terms.layout)?;
        receive(con0)?;
        Ok((terms, chunks, key_messages))
    }

    #[allow(clippy::too_many_arguments)]
    fn assemble(
        provider: &P,
        pd: &P::Pd,
        config: PathConfig,
        terms: &ServerTerms,
        chunks: &[ChunkAddr],
        conns: Vec<ClientConn<P>>,
        key_messages: Option<P::Mr>,
    ) -> Result<Arc<Self>, Error> {
        let layout = terms.layout;
        let room = terms.max_hdr_size.saturating_sub(RdmaRead::LEN_ONE as u32);
        let max_user_header = u32::from(config.max_user_header).min(room);
        let header_stride = (max_user_header as usize + RdmaRead::LEN_ONE).next_multiple_of(64);
        let bytes = header_stride * layout.queue_depth() as usize;
        let slot = |c: &ChunkAddr| -> Result<Slot<P>, Error> {
            Ok(Slot {
                addr: c.addr,
                rkey: AtomicU32::new(c.rkey),
                revocable: config
                    .invalidate_reads
                    .then(|| provider.alloc_revocable(pd))
                    .transpose()?,
                flight: Mutex::new(None),
            })
        };
        Ok(Arc::new(Self {
            info: SessionInfo {
                max_io_size: terms.max_io_size,
                queue_depth: layout.queue_depth(),
                max_segments: 1,
                max_user_header,
                new_rkeys: key_messages.is_some(),
            },
            layout,
            conns,
            slots: chunks.iter().map(slot).collect::<Result<_, _>>()?,
            headers: provider.alloc_mr(pd, bytes, AccessFlags::LOCAL_WRITE)?,
            header_stride,
            key_messages,
            revoked: Mutex::new(HashSet::new()),
            permits: Permits::new(layout.queue_depth()),
            pulse: Pulse::new(config.heartbeat),
            flushed: Flushed::default(),
            status: Mutex::new(Status {
                state: State::Up,
                on_down: Vec::new(),
            }),
            alive: AtomicBool::new(true),
            stop: AtomicBool::new(false),
            disconnected: Mutex::new(0),
            disconnect_seen: Condvar::new(),
            threads: Mutex::new(Vec::new()),
            config,
        }))
    }

    fn start(self: &Arc<Self>, service: Queue<P>, io: Vec<Queue<P>>, channel: P::CmChannel) -> Result<(), Error> {
        let mut threads = Vec::new();
        let started = (|| -> Result<(), Error> {
            let path = self.clone();
            let cm = Builder::new()
                .name("rtrs-clt-cm".into())
                .spawn(move || path.watch(&channel));
            threads.push(cm.map_err(|e| Error::System("starting a thread", e))?);
            threads.push(poller::spawn("rtrs-clt-svc", service, Duration::ZERO, self.clone())?);
            for queue in io {
                let path = IoSide(self.clone());
                threads.push(poller::spawn("rtrs-clt-io", queue, self.config.spin, Arc::new(path))?);
            }
            Ok(())
        })();
        *self.threads.lock() = threads;
        started.inspect_err(|_| self.close())
    }

    pub(super) fn info(&self) -> &SessionInfo {
        &self.info
    }

    pub(super) fn permits(&self) -> &Arc<Permits> {
        &self.permits
    }

    pub(super) fn state(&self) -> Result<(), PathError> {
        if self.alive.load(Ordering::Acquire) {
            return Ok(());
        }
        match &self.status.lock().state {
            State::Down(e) => Err(e.clone()),
            State::Up => Ok(()),
        }
    }

    pub(super) fn on_down(&self, hook: DownHook) {
        let mut status = self.status.lock();
        match &status.state {
            State::Up => status.on_down.push(hook),
            State::Down(e) => {
                let e = e.clone();
                drop(status);
                hook(&e);
            }
        }
    }

    /// The connection for a request: hints map to I/O connections.
    fn conn_for(&self, con: ConType) -> &ClientConn<P> {
        match con {
            ConType::Admin => &self.conns[0],
            ConType::Io(hint) => &self.conns[1 + hint % (self.conns.len() - 1)],
        }
    }

    /// Sends a request whose lengths are checked.
    pub(super) fn send(&self, request: Submission<P>, header: &[u8]) {
        let msg_id = request.permit.msg_id();
        let slot = &self.slots[usize::from(msg_id)];
        let conn = self.conn_for(request.con);
        if let Err(e) = self.headers.write(usize::from(msg_id) * self.header_stride, header) {
            // Lengths were checked against the stride when the path came up.
            let max = e.size;
            return request.fail(IoError::TooLong {
                what: "user header",
                len: header.len(),
                max,
            });
        }
        *slot.flight.lock() = Some(Flight {
            request,
            cid: conn.cid,
            usr_len: header.len() as u16,
            key: None,
            waits: Waits::Room,
        });
        if let Err(e) = conn.submit(ClientWork::Request(msg_id), self) {
            self.fail(PathError::Post(e));
            // If the path was down before, nobody else ends this request.
            let flight = slot.flight.lock().take();
            if let Some(flight) = flight {
                let why = self.state().err().unwrap_or(PathError::Closed);
                flight.finish(Err(IoError::Path(why)));
            }
        }
    }

    /// Takes the path down: nothing is sent any more, and every request ends with this error.
    pub(super) fn fail(&self, why: PathError) {
        let hooks = {
            let mut status = self.status.lock();
            if matches!(status.state, State::Down(_)) {
                return;
            }
            status.state = State::Down(why.clone());
            core::mem::take(&mut status.on_down)
        };
        if matches!(why, PathError::Closed) {
            tracing::info!(session = %self.config.name, path = %self.config.addr, "path closed");
        } else {
            tracing::warn!(session = %self.config.name, path = %self.config.addr, error = %why, "path lost");
        }
        self.alive.store(false, Ordering::Release);
        self.permits.close(why.clone());
        // First the queue pairs: when a request has ended, nothing may touch its buffer any more.
        for conn in &self.conns {
            conn.disconnect();
        }
        for slot in &self.slots {
            let flight = slot.flight.lock().take();
            if let Some(flight) = flight {
                flight.finish(Err(IoError::Path(why.clone())));
            }
        }
        for hook in hooks {
            hook(&why);
        }
    }

    /// Ends the path and its threads. Waits a moment for the server to confirm.
    pub(super) fn close(&self) {
        let was_up = self.alive.load(Ordering::Acquire);
        self.fail(PathError::Closed);
        if was_up {
            let deadline = Instant::now() + CLOSE_WAIT;
            let mut seen = self.disconnected.lock();
            while *seen < self.conns.len() && !self.disconnect_seen.wait_until(&mut seen, deadline).timed_out() {}
        }
        self.stop.store(true, Ordering::Release);
        let me = std::thread::current().id();
        let threads = core::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A callback may drop the last handle of the session on a thread of the session.
            if thread.thread().id() != me {
                let _ = thread.join();
            }
        }
    }

    /// Connection events while the path lives.
    fn watch(&self, channel: &P::CmChannel) {
        while !self.stop.load(Ordering::Acquire) {
            let event = match channel.wait(Some(Duration::from_millis(500))) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(e) => return self.fail(e.into()),
            };
            match event.kind {
                CmEventKind::Disconnected => {
                    *self.disconnected.lock() += 1;
                    self.disconnect_seen.notify_all();
                    self.fail(PathError::PeerDisconnected);
                }
                CmEventKind::ConnectError(text) => self.fail(PathError::Cm(text)),
                CmEventKind::Rejected { reason, .. } => self.fail(PathError::Cm(format!("rejected: {reason:?}"))),
                CmEventKind::Unreachable => self.fail(PathError::Cm("unreachable".into())),
                CmEventKind::ConnectRequest { .. } | CmEventKind::Established { .. } | CmEventKind::TimewaitExit => {}
            }
        }
    }

    fn key_message(&self, index: u32, len: u32) -> Result<RkeyRsp, PathError> {
        let region = self
            .key_messages
            .as_ref()
            .ok_or(PathError::Unexpected("a key response without NEW_RKEY"))?;
        let mut bytes = [0; RkeyRsp::LEN];
        let len = (len as usize).min(RkeyRsp::LEN);
        // The index came back in our own mark, so it is inside the region.
        let _ = region.read(index as usize * RkeyRsp::LEN, &mut bytes[..len]);
        Ok(*RkeyRsp::parse(&bytes[..len])?)
    }

    fn completion(&self, wc: &Completion, message: Option<RkeyRsp>) -> Result<(), PathError> {
        let id = WrId::decode(wc.wr_id).ok_or(PathError::Unexpected("a completion without our mark"))?;
        let conn = &self.conns[usize::from(id.cid)];
        match id.kind {
            WrKind::Send => conn.reclaim(self)?,
            WrKind::Revoke => {
                conn.reclaim(self)?;
                self.key_ended(id.index);
            }
            WrKind::Recv => {
                self.pulse.heard();
                self.received(conn, wc, message)?;
            }
            WrKind::InfoRecv => return Err(PathError::Unexpected("a second information response")),
        }
        Ok(())
    }

    fn received(&self, conn: &ClientConn<P>, wc: &Completion, message: Option<RkeyRsp>) -> Result<(), PathError> {
        if wc.flags.contains(WcFlags::WITH_INV) {
            let mut revoked = self.revoked.lock();
            if revoked.len() >= self.slots.len() {
                return Err(PathError::Unexpected("more keys revoked than requests in flight"));
            }
            revoked.insert(wc.invalidated);
            return Ok(());
        }
        if !wc.flags.contains(WcFlags::WITH_IMM) {
            return Err(PathError::Unexpected("a SEND without immediate value"));
        }
        match (Imm::decode(wc.imm)?, message) {
            (Imm::IoRsp(reply), message) => self.reply(conn, reply, message),
            (Imm::HbMsg, None) => Ok(conn.submit(ClientWork::Imm(Imm::HbAck), self)?),
            (Imm::HbAck, None) => Ok(()),
            (Imm::IoReq(_), _) => Err(PathError::Unexpected("a request from the server")),
            (_, Some(_)) => Err(PathError::Unexpected("a key response with a heartbeat")),
        }
    }

    fn reply(&self, conn: &ClientConn<P>, reply: IoReply, message: Option<RkeyRsp>) -> Result<(), PathError> {
        let slot = self.slots.get(reply.msg_id as usize);
        let slot = slot.ok_or(ProtoError::field(
            "message number",
            reply.msg_id,
            "not below the queue depth",
        ))?;
        if message.is_some_and(|m| u32::from(m.buf_id.get()) != reply.msg_id) {
            return Err(PathError::Unexpected("a key response for another request"));
        }
        let mut guard = slot.flight.lock();
        let flight = guard.as_mut().filter(|f| f.waits == Waits::Answer && f.cid == conn.cid);
        let Some(flight) = flight else {
            drop(guard);
            // A path that goes down has ended its requests already.
            return match self.state() {
                Ok(()) => Err(PathError::Unexpected("an answer to no request")),
                Err(_) => Ok(()),
            };
        };
        if let Some(m) = message {
            slot.rkey.store(m.rkey.get(), Ordering::Release);
        }
        // What counts is that the key is gone, not that the answer says so.
        if flight.key.is_some_and(|key| !self.revoked.lock().remove(&key)) {
            flight.waits = Waits::Revocation(reply.errno);
            drop(guard);
            return Ok(conn.submit(ClientWork::Revoke(reply.msg_id as u16), self)?);
        }
        let flight = guard.take();
        drop(guard);
        if let Some(flight) = flight {
            flight.finish(status(reply.errno));
        }
        Ok(())
    }

    fn key_ended(&self, msg_id: u32) {
        let Some(slot) = self.slots.get(msg_id as usize) else {
            return;
        };
        let mut guard = slot.flight.lock();
        if let Some(Waits::Revocation(errno)) = guard.as_ref().map(|f| f.waits) {
            let flight = guard.take();
            drop(guard);
            if let Some(flight) = flight {
                flight.finish(status(errno));
            }
        }
    }
}

fn status(errno: u16) -> Result<(), IoError> {
    match errno {
        0 => Ok(()),
        e => Err(IoError::Remote(e.into())),
    }
}

/// Buffer of a receive: 8 bytes of the region if key responses are expected.
fn key_sge<M: MemoryRegion>(region: Option<&M>, index: u32) -> Option<Sge> {
    region.map(|region| Sge {
        addr: region.addr() + u64::from(index) * RkeyRsp::LEN as u64,
        length: RkeyRsp::LEN as u32,
        lkey: region.lkey(),
    })
}

/// The thread of connection 0: user messages and heartbeats, undisturbed by I/O callbacks.
impl<P: Provider> Handler for Path<P> {
    /// Handles a batch: all receives go back to their queues before any message is acted upon, so that a peer that is
    /// answered always finds a receive for its next message.
    fn completions(&self, wcs: &[Completion]) -> Result<(), PathError> {
        let mut messages: SmallVec<[Option<RkeyRsp>; 64]> = SmallVec::new();
        let mut used: SmallVec<[(u16, u32); 64]> = SmallVec::new();
        for wc in wcs {
            if !wc.is_ok() {
                self.flushed.judge(wc)?;
                messages.push(None);
                continue;
            }
            let id = WrId::decode(wc.wr_id).filter(|id| id.kind == WrKind::Recv);
            let message = match id {
                Some(id) if wc.opcode == WcOpcode::Recv && wc.flags.contains(WcFlags::WITH_IMM) => {
                    Some(self.key_message(id.index, wc.byte_len)?)
                }
                _ => None,
            };
            messages.push(message);
            used.extend(id.map(|id| (id.cid, id.index)));
        }
        used.sort_unstable_by_key(|(cid, _)| *cid);
        for same in used.chunk_by(|a, b| a.0 == b.0) {
            let conn = &self.conns[usize::from(same[0].0)];
            conn.post_recvs(same.iter().map(|(_, i)| *i), |i| key_sge(self.key_messages.as_ref(), i))?;
        }
        for (wc, message) in wcs.iter().zip(messages).filter(|(wc, _)| wc.is_ok()) {
            self.completion(wc, message)?;
        }
        Ok(())
    }

    fn broken(&self, why: PathError) {
        self.fail(why);
    }

    fn timers(&self, now: Instant) -> Option<Instant> {
        if let Err(e) = self.flushed.check(now) {
            self.fail(e);
        }
        let ask = || Ok(self.conns[0].submit(ClientWork::Imm(Imm::HbMsg), self)?);
        let (beat, sent) = self.pulse.run(now, ask);
        if let Err(e) = sent {
            self.fail(e);
        }
        self.flushed.due().into_iter().chain([beat]).min()
    }

    fn stopped(&self) -> bool {
        !self.alive.load(Ordering::Acquire)
    }
}
