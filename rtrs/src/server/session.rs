//! A session: its chunks, its paths, and the requests that come by them.

use core::net::SocketAddr;
use std::{collections::BTreeMap, sync::Arc};

use roce_verbs::mem::Pages;
use roce_verbs::{
    Completion, WcFlags, WcOpcode,
    provider::{DeviceIx, MrInfo, RangeError, Revoked},
};
use smallvec::SmallVec;

use crate::{
    Cx, PathError,
    admission::PathKey,
    mark::{Mark, MarkKind},
    proto::{self, ChunkLayout, Imm, InfoReq, MAX_HDR_SIZE, ProtoError, Uuid},
    server::{
        chunks::{Chunks, Pending},
        effects::{Effects, Place},
        keepalive::{Awaited, Watch},
        listing::SessionListing,
        path::Path,
        post::{Answer, Done, Renewal, ServerWork, revoke_mark, revoked},
        request::{Output, Request, RequestKey, SessionKey, SessionSummary, Ticket},
        state::PathState,
    },
};

/// State of a session once a client has given its name.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) name: String,
    /// Connections of the path that brought it, the service connection included.
    pub(crate) connections: u16,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) key: SessionKey,
    pub(crate) uuid: Uuid,
    /// The client's address on the first path.
    pub(crate) peer: SocketAddr,
    pub(crate) named: Option<Named>,
    layout: ChunkLayout,
    /// The user knows of it.
    pub(crate) introduced: bool,
    /// Names the memory that was asked for and has not come.
    pub(crate) ticket: Option<Ticket>,
    /// All chunks, one after the other: the only large allocation.
    memory: Option<Arc<Pages>>,
    /// The chunks' registrations, one for each device that paths lead through.
    mrs: SmallVec<[(DeviceIx, MrInfo); 1]>,
    pub(super) chunks: Chunks,
    pub(super) awaited: Awaited,
    pub(crate) paths: BTreeMap<PathKey, Path>,
    /// Paths that the user knows of.
    pub(crate) up: usize,
    pub(super) watch: Watch,
}

const NO_CONN: PathError = PathError::Unexpected("a completion of no connection");

impl Session {
    /// A session without paths and memory.
    pub(crate) fn new(key: SessionKey, uuid: Uuid, peer: SocketAddr, layout: ChunkLayout) -> Self {
        Self {
            key,
            uuid,
            peer,
            named: None,
            layout,
            introduced: false,
            ticket: None,
            memory: None,
            mrs: SmallVec::new(),
            chunks: Chunks::new(layout.queue_depth()),
            awaited: Awaited::default(),
            paths: BTreeMap::new(),
            up: 0,
            watch: Watch::default(),
        }
    }

    /// The name that the client gave, if it has.
    pub(crate) fn name(&self) -> &str {
        self.named.as_ref().map_or("", |named| &named.name)
    }

    /// For the operator.
    pub(crate) fn summary(&self) -> SessionSummary {
        SessionSummary {
            session: self.key,
            uuid: self.uuid,
            name: self.name().into(),
            peer: self.peer,
            connections: self.named.as_ref().map_or(0, |named| named.connections),
            paths: self.up,
            requests: self.paths.values().map(|path| path.with_user).sum(),
        }
    }

    /// Details, for the operator.
    pub(crate) fn listing(&self) -> SessionListing {
        SessionListing {
            session: self.key,
            uuid: self.uuid,
            name: self.name().into(),
            paths: self.paths.values().map(Path::listing).collect(),
        }
    }

    /// Whether the user still has requests of paths that are lost: until it is done with them no new path may bring others,
    /// as the client may have given up all that it had in the chunks.
    pub(crate) fn has_late_requests(&self) -> bool {
        self.paths.values().any(|path| !path.is_alive() && path.with_user > 0)
    }

    /// Whether a path waits for requests that were executed when it asked for the chunks.
    pub(crate) fn awaits(&self, path: PathKey) -> bool {
        self.awaited.has(path)
    }

    /// The chunks.
    pub(crate) fn memory(&self) -> Option<&Arc<Pages>> {
        self.memory.as_ref()
    }

    /// The chunks, of a session that is over.
    pub(crate) fn into_memory(self) -> Option<Arc<Pages>> {
        self.memory
    }

    /// The memory that was asked for has come.
    pub(crate) fn set_memory(&mut self, memory: Arc<Pages>) {
        self.memory = Some(memory);
    }

    /// Registers the chunks for a path, if they are there.
    ///
    /// # Errors
    /// When the path's device can't register so much.
    pub(crate) fn register(&mut self, cx: &mut Cx<'_>, path: PathKey) -> Result<(), PathError> {
        let (Some(memory), Some(path)) = (&self.memory, self.paths.get_mut(&path)) else {
            return Ok(());
        };
        let bytes = self.layout.queue_depth() as usize * self.layout.chunk_size() as usize;
        Ok(path.use_chunks(&mut self.mrs, |path| path.register(cx, memory, bytes))?)
    }

    /// Ends the registrations with devices that no path leads through.
    pub(crate) fn deregister_unused(&mut self, cx: &mut Cx<'_>) {
        let paths = &self.paths;
        self.mrs.retain(|(device, mr)| {
            let used = paths.values().any(|path| path.id.device == *device);
            if !used {
                cx.provider.deregister(mr.id);
            }
            used
        });
    }

    fn place(&self, path: PathKey, cid: u16) -> Place {
        Place {
            session: self.key,
            path,
            cid,
        }
    }

    /// A work request of a path is done. Returns the session's name if the client has asked for the chunks with it.
    ///
    /// # Errors
    /// What ends the path.
    pub(crate) fn completion(
        &mut self,
        cx: &mut Cx<'_>,
        place: Place,
        wc: &Completion,
        effects: &mut Effects,
    ) -> Result<Option<String>, PathError> {
        let path = self.paths.get_mut(&place.path).filter(|path| path.is_alive());
        let Some(path) = path else { return Ok(None) };
        if !wc.is_ok() {
            path.judge(cx.now, wc)?;
            return Ok(None);
        }
        let mark = Mark::decode(wc.wr_id).ok_or(PathError::Unexpected("a completion without our mark"))?;
        match mark.kind {
            MarkKind::Send => self.reclaim(place, mark.index, effects)?,
            MarkKind::Revoke => {
                let (chunk, signals) = revoked(mark.index);
                self.reclaim(place, signals, effects)?;
                self.begin_revoked(place, chunk, effects)?;
            }
            MarkKind::Info => return self.information(place, wc).map(Some),
            MarkKind::Recv => {
                let conn = path.conn_mut(place.cid).ok_or(NO_CONN)?;
                conn.use_recv();
                if conn.list() {
                    effects.dirty.push(place);
                }
                path.heard();
                if wc.opcode != WcOpcode::RecvRdmaWithImm || !wc.flags.contains(WcFlags::WITH_IMM) {
                    return Err(PathError::Unexpected(
                        "a SEND where an RDMA WRITE with immediate belongs",
                    ));
                }
                match Imm::decode(wc.imm)? {
                    Imm::IoReq(payload) if path.phase.state() == PathState::Connected => {
                        self.request(cx, place, payload, effects)?;
                    }
                    imm => self.heartbeat(place, imm, effects)?,
                }
            }
        }
        Ok(None)
    }

    /// A send is done that accounts for others.
    fn reclaim(&mut self, place: Place, signals: u32, effects: &mut Effects) -> Result<(), PathError> {
        let path = self.paths.get_mut(&place.path);
        let conn = path.and_then(|path| path.conn_mut(place.cid)).ok_or(NO_CONN)?;
        conn.out.reclaim(signals);
        if conn.out.queue.is_ready() && conn.list() {
            effects.dirty.push(place);
        }
        Ok(())
    }

    /// The client's last step of the handshake: the name that it gives.
    fn information(&mut self, place: Place, wc: &Completion) -> Result<String, PathError> {
        let path = self.paths.get_mut(&place.path).ok_or(PathError::Closed)?;
        path.heard();
        if wc.opcode != WcOpcode::Recv {
            return Err(PathError::Unexpected(
                "an RDMA WRITE where the information request belongs",
            ));
        }
        let bytes = path.information(wc.byte_len)?;
        let name = InfoReq::parse(&bytes)?.name()?;
        if !path.is_complete() {
            return Err(PathError::Unexpected(
                "an information request before all connections are made",
            ));
        }
        Ok(name.into())
    }

    /// Any message but a request of a path that takes them.
    fn heartbeat(&mut self, place: Place, imm: Imm, effects: &mut Effects) -> Result<(), PathError> {
        let Some(path) = self.paths.get_mut(&place.path) else {
            return Ok(());
        };
        let beat = matches!(imm, Imm::HbMsg | Imm::HbAck);
        // A client that waits for the chunks may send heartbeats meanwhile.
        if path.phase.state() != PathState::Connected && !(path.phase.has_asked() && beat && place.cid == 0) {
            return Err(PathError::Unexpected("a message before the handshake is done"));
        }
        match imm {
            _ if beat && place.cid != 0 => Err(PathError::Unexpected("a heartbeat on an I/O connection")),
            Imm::HbMsg => Ok(path.push(place, ServerWork::imm(Imm::HbAck), effects)?),
            Imm::HbAck => {
                self.heartbeat_answered(place.path, effects);
                Ok(())
            }
            Imm::IoReq(_) | Imm::IoRsp(_) => Err(PathError::Unexpected("an answer from the client")),
        }
    }

    /// A request has come.
    fn request(&mut self, cx: &mut Cx<'_>, place: Place, payload: u32, effects: &mut Effects) -> Result<(), PathError> {
        if self.paths.len() > 1 {
            self.note_request(cx.now, effects);
        }
        let (chunk, offset) = self.layout.unpack(payload)?;
        let (chunk, request) = (chunk as u16, Pending::new(place.path, place.cid, offset));
        if self.chunks.claim(chunk, request)? {
            return self.start(cx, chunk, request, effects);
        }
        effects.counters.requests_parked += 1;
        Ok(())
    }

    /// A request gets its chunk, which is kept for it: first the client's key is taken back. If that fails the path is over, and with
    /// it the chunk is free.
    fn start(&mut self, cx: &mut Cx<'_>, chunk: u16, request: Pending, effects: &mut Effects) -> Result<(), PathError> {
        let place = self.place(request.path, request.cid);
        let path = self.paths.get_mut(&request.path).filter(|path| path.is_alive());
        let Some(path) = path else { return Ok(()) };
        let queued = match path.renewal() {
            Renewal::Never => false,
            Renewal::Instant => {
                let (qp, key) = path.chunk_key(request.cid, chunk)?;
                cx.provider.revoke(qp, key, revoke_mark(chunk, 0))? == Revoked::Queued
            }
            Renewal::Queued => {
                path.push(place, ServerWork::revoke(chunk), effects)?;
                true
            }
        };
        match queued {
            true => self.chunks.revoking(chunk, request),
            false => self.begin(chunk, request, effects),
        }
    }

    /// The key of a request's chunk is taken back.
    fn begin_revoked(&mut self, place: Place, chunk: u16, effects: &mut Effects) -> Result<(), PathError> {
        let request = self.chunks.revoked(chunk, place.path, place.cid);
        let request = request.ok_or(PathError::Unexpected("the end of a key that no request waits for"))?;
        self.begin(chunk, request, effects)
    }

    /// The chunk is ours: checks the request and hands it to the user.
    fn begin(&mut self, chunk: u16, mut request: Pending, effects: &mut Effects) -> Result<(), PathError> {
        let outside = |_| PathError::Unexpected("a message outside its chunk");
        let (Some(memory), Some(path)) = (&self.memory, self.paths.get_mut(&request.path)) else {
            return Err(PathError::Unexpected("a request without memory"));
        };
        let (size, offset) = (self.layout.chunk_size(), request.offset);
        let start = usize::from(chunk) * size as usize;
        // A copy: without always_invalidate the client could change the message while it is checked.
        let mut bytes = [0; proto::Request::MAX_LEN];
        let len = (size.saturating_sub(offset) as usize).min(bytes.len());
        memory
            .read(start + offset as usize, &mut bytes[..len])
            .map_err(outside)?;
        let message = proto::Request::parse(&bytes[..len], offset, MAX_HDR_SIZE)?;
        let too_long = |len: &u32| *len == 0 || *len > message.data_len;
        if let Some(len) = message.dest.map(|dest| dest.len.get()).filter(too_long) {
            return Err(ProtoError::field("length of a read", len, "1 to what the chunk sets aside").into());
        }
        let mut header = SmallVec::from_elem(0, message.usr_len.into());
        memory
            .read(start + message.data_len as usize, &mut header)
            .map_err(outside)?;
        request.message = Some(message);
        let serial = self.chunks.begin(chunk, request)?;
        path.with_user += 1;
        path.rdma.count(message.direction, offset.into());
        effects.outputs.push_back(Output::Request(Request {
            key: RequestKey {
                session: self.key,
                chunk,
                serial,
            },
            direction: message.direction,
            connection: request.cid,
            header,
            data_len: message.data_len,
            data_offset: start,
        }));
        Ok(())
    }

    /// Copies data into a request's chunk.
    ///
    /// # Errors
    /// When the range is outside the request's data, or the user has no such request.
    pub(crate) fn write_data(&self, key: RequestKey, offset: usize, data: &[u8]) -> Result<(), RangeError> {
        self.chunks.check(key, offset, data.len())?;
        let start = usize::from(key.chunk) * self.layout.chunk_size() as usize;
        let nowhere = RangeError {
            offset,
            len: data.len(),
            size: 0,
        };
        self.memory.as_ref().ok_or(nowhere)?.write(start + offset, data)
    }

    /// The user is done with a request. Returns its path if that is lost: it may be over with this.
    pub(crate) fn answer(
        &mut self,
        cx: &mut Cx<'_>,
        key: RequestKey,
        status: i32,
        effects: &mut Effects,
    ) -> Option<PathKey> {
        let Some(request) = self.chunks.request(key) else {
            tracing::debug!(?key, "an answer to no request");
            return None;
        };
        let place = self.place(request.path, request.cid);
        let path = self.paths.get_mut(&request.path)?;
        path.with_user = path.with_user.saturating_sub(1);
        let (drained, alive, renewal) = (path.is_drained(), path.is_alive(), path.renewal());
        let (dest, need_inval) = request.message.map_or((None, false), |m| (m.dest, m.need_inval));
        let work = ServerWork::answer(Answer::new(key.chunk, status, dest, need_inval), renewal);
        let pushed = match alive {
            true => path.push(place, work, effects),
            // The chunk is idle when the path is drained: until then what it had posted may still read it.
            false => Ok(()),
        };
        if let Err(e) = pushed {
            effects.broken.push_back((self.key, request.path, e.into()));
        }
        self.chunks.answered(key.chunk, request, drained);
        if drained {
            self.release(cx, key.chunk, effects);
        }
        self.look_at_awaited(effects);
        (!alive).then_some(request.path)
    }

    /// The end of the turn: posts the receives that a connection has used.
    pub(crate) fn give_back(&mut self, cx: &mut Cx<'_>, place: Place, effects: &mut Effects) {
        let path = self.paths.get_mut(&place.path).filter(|path| path.is_alive());
        let conn = path.and_then(|path| path.conn_mut(place.cid));
        if let Some(Err(e)) = conn.map(|conn| conn.give_back(cx)) {
            effects.broken.push_back((self.key, place.path, e.into()));
        }
    }

    /// The end of the turn: posts what a connection has to send and fits.
    pub(crate) fn post(&mut self, cx: &mut Cx<'_>, place: Place, effects: &mut Effects) {
        let path = self.paths.get_mut(&place.path).filter(|path| path.is_alive());
        let Some((conn, at)) = path.and_then(|path| path.posting(place.cid, &self.layout)) else {
            return;
        };
        let mut done = Done::default();
        let posted = conn.out.post(cx, &at, &mut done).map_err(PathError::from);
        for chunk in done.sent {
            self.chunks.sent(chunk);
            self.release(cx, chunk, effects);
        }
        let begun = done
            .revoked
            .into_iter()
            .map(|chunk| self.begin_revoked(place, chunk, effects));
        let begun = begun.collect::<Result<(), _>>();
        if let Err(e) = posted.and(begun) {
            effects.broken.push_back((self.key, place.path, e));
        }
    }

    /// A chunk may be free: the request that has waited longest for it gets it.
    pub(crate) fn release(&mut self, cx: &mut Cx<'_>, chunk: u16, effects: &mut Effects) {
        while let Some(asked) = self.chunks.unpark(chunk) {
            if let Err(e) = self.start(cx, chunk, asked, effects) {
                effects.broken.push_back((self.key, asked.path, e));
            }
        }
    }

    /// All idle chunks that requests wait for are given to them.
    pub(crate) fn release_all(&mut self, cx: &mut Cx<'_>, effects: &mut Effects) {
        for chunk in self.chunks.wanted() {
            self.release(cx, chunk, effects);
        }
        self.look_at_awaited(effects);
    }

    /// Requests of a path that wait for their chunks are forgotten.
    pub(crate) fn drop_parked(&mut self, path: PathKey, effects: &mut Effects) {
        self.chunks.drop_parked(path);
        self.awaited.forget(path);
        self.look_at_awaited(effects);
    }

    /// A path is drained: chunks whose answers have not left are idle.
    pub(crate) fn drop_answers(&mut self, path: PathKey) {
        self.chunks.path_gone(path);
    }
}
