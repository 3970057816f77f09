//! A server on the scripted provider, and clients by hand, which can send what a proper one never would.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    Instant, RKey, SendOp,
    provider::{CmKind, CmRef, Event, Provider, QpId},
};
use rtrs::{
    cx::Cx,
    heartbeat::HeartbeatConfig,
    proto::{
        ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc,
        Uuid, info::ChunkAddr,
    },
    server::{
        Server, ServerConfig,
        request::{Output, Request, RequestKey, SessionKey, Ticket},
    },
};
use zerocopy::IntoBytes;

use crate::provider::{Keys, Scripted};

/// Chunks of the usual configuration, and their bytes.
pub(crate) const DEPTH: u32 = 8;
pub(crate) const CHUNK: u32 = 8192;

/// Few small chunks, and the kernel's heartbeats.
pub(crate) fn config() -> ServerConfig {
    ServerConfig {
        queue_depth: DEPTH,
        max_chunk_size: CHUNK,
        heartbeat: HeartbeatConfig::default(),
        ..ServerConfig::default()
    }
}

pub(crate) fn fixed_keys() -> ServerConfig {
    ServerConfig {
        always_invalidate: false,
        ..config()
    }
}

pub(crate) struct Bed {
    pub(crate) provider: Scripted,
    pub(crate) server: Server,
    pub(crate) listener: CmRef,
    pub(crate) now: Instant,
    /// What the server has told, until the test takes it; memory it gets at once, unless the test says otherwise.
    pub(crate) outputs: Vec<Output>,
    pub(crate) hold_memory: bool,
}

impl Bed {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Self::with(config, &[Keys::INSTANT])
    }

    pub(crate) fn with(config: ServerConfig, devices: &[Keys]) -> Self {
        Self::on(config, Scripted::new(devices))
    }

    pub(crate) fn on(config: ServerConfig, mut provider: Scripted) -> Self {
        let now = Instant::ZERO + Duration::from_secs(1);
        let (server, local) = Server::listen(&mut cx(now, &mut provider), config).unwrap();
        let listener = *provider.cms.keys().next().unwrap();
        assert_eq!(local.port(), 1234);
        Self {
            provider,
            server,
            listener,
            now,
            outputs: Vec::new(),
            hold_memory: false,
        }
    }

    /// Calls the server, then lets it finish its turn.
    pub(crate) fn call<T>(&mut self, f: impl FnOnce(&mut Server, &mut Cx<'_>) -> T) -> T {
        let out = f(&mut self.server, &mut cx(self.now, &mut self.provider));
        self.turn();
        out
    }

    /// All that waits is told to the server, until nothing more comes of it.
    pub(crate) fn turn(&mut self) {
        let mut quiet = 0;
        // What the end of a turn posts may be done in the next.
        while quiet < 2 {
            let mut wcs = Vec::new();
            self.provider.poll_completions(&mut wcs, 64).unwrap();
            for (qp, wc) in &wcs {
                assert!(self.server.completion(&mut cx(self.now, &mut self.provider), *qp, wc));
            }
            let event = if wcs.is_empty() {
                self.provider.poll_event()
            } else {
                None
            };
            if let Some(event) = &event {
                self.event(event);
            }
            let told = self.outputs();
            self.server.end_batch(&mut cx(self.now, &mut self.provider));
            quiet = if wcs.is_empty() && event.is_none() && !told {
                quiet + 1
            } else {
                0
            };
        }
    }

    fn event(&mut self, event: &Event) {
        let mine = self.server.event(&mut cx(self.now, &mut self.provider), event);
        assert_eq!(
            mine,
            !matches!(event, Event::Async(..) | Event::DeviceRemoved(_)),
            "{event:?}"
        );
    }

    /// Takes what the server tells. True: there was something.
    fn outputs(&mut self) -> bool {
        let mut told = false;
        while let Some(output) = self.server.poll_output() {
            told = true;
            match output {
                Output::Allocate { ticket, bytes } if !self.hold_memory => {
                    let mut cx = cx(self.now, &mut self.provider);
                    self.server.ready(&mut cx, ticket, Pages::allocate(bytes));
                }
                // Nobody else has it any more.
                Output::Free(memory) => assert_eq!(Arc::strong_count(&memory), 1),
                output => self.outputs.push(output),
            }
        }
        told
    }

    /// The memory that was asked for comes, or does not.
    pub(crate) fn memory(&mut self, there: bool) -> Ticket {
        let at = self.outputs.iter().position(|o| matches!(o, Output::Allocate { .. }));
        let Output::Allocate { ticket, bytes } = self.outputs.remove(at.expect("memory is asked for")) else {
            unreachable!();
        };
        let memory = match there {
            true => Pages::allocate(bytes),
            false => Err(MemError::OutOfMemory(bytes)),
        };
        self.call(|server, cx| server.ready(cx, ticket, memory));
        ticket
    }

    /// Time goes by, with all its timers.
    pub(crate) fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.server.next_timeout().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.call(|server, cx| server.timeout(cx));
            assert!(
                self.server.next_timeout().is_none_or(|next| next > self.now),
                "timers stand still"
            );
        }
        self.now = end;
    }

    /// The requests that have come to the user, taken out.
    pub(crate) fn requests(&mut self) -> Vec<Request> {
        let (requests, others) = core::mem::take(&mut self.outputs)
            .into_iter()
            .partition(|o| matches!(o, Output::Request(_)));
        self.outputs = others;
        let requests: Vec<Output> = requests;
        let request = |output| match output {
            Output::Request(request) => Some(request),
            _ => None,
        };
        requests.into_iter().filter_map(request).collect()
    }

    /// The one request that has come.
    pub(crate) fn request(&mut self) -> Request {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    pub(crate) fn answer(&mut self, key: RequestKey, errno: i32) {
        self.answer_all(&[key], errno);
    }

    /// Answers; what comes of it leaves with the next turn.
    pub(crate) fn answer_later(&mut self, key: RequestKey, errno: i32) {
        self.server.answer(&mut cx(self.now, &mut self.provider), key, errno);
    }

    /// Answers within one turn.
    pub(crate) fn answer_all(&mut self, keys: &[RequestKey], errno: i32) {
        self.call(|server, cx| {
            for key in keys {
                server.answer(cx, *key, errno);
            }
        });
    }

    /// What happened to sessions and paths, as words; taken out.
    pub(crate) fn news(&mut self) -> Vec<String> {
        let word = |output| match output {
            Output::SessionOpened(s) => format!("opened {}", s.name),
            Output::SessionClosed { why, .. } => format!("closed: {why}"),
            Output::PathUp { .. } => "path up".into(),
            Output::PathDown { why, .. } => format!("path down: {why}"),
            Output::Request(r) => format!("request in {}", r.key.chunk),
            Output::Allocate { .. } => "memory".into(),
            Output::Free(_) => "free".into(),
        };
        self.outputs.drain(..).map(word).collect()
    }

    /// The number of the only session.
    pub(crate) fn session(&self) -> SessionKey {
        let sessions = self.server.sessions();
        assert_eq!(sessions.len(), 1, "{sessions:?}");
        sessions[0].session
    }

    /// Everything has been given back but the listener.
    pub(crate) fn is_clean(&mut self) {
        let usage = self.provider.usage();
        assert_eq!((usage.pds, usage.mrs, usage.keys), (0, 0, 0), "{usage:?}");
        assert_eq!((usage.cqs, usage.qps, usage.cms), (0, 0, 1), "{usage:?}");
        assert!(self.server.sessions().is_empty());
    }

    /// The server goes, and nothing is left.
    pub(crate) fn stop(&mut self) {
        self.call(|server, cx| server.stop(cx));
        assert!(self.server.is_idle());
        assert_eq!(self.provider.usage(), crate::provider::Usage::default());
    }
}

/// The server throws no dice. What has no size leaks nothing.
fn cx(now: Instant, provider: &mut Scripted) -> Cx<'_> {
    fn dice(_: &mut [u8]) {
        panic!("the server throws no dice");
    }
    Cx {
        now,
        provider,
        random: Box::leak(Box::new(dice)),
    }
}

/// A client with one path.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) session: Uuid,
    pub(crate) path: Uuid,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) device: u16,
    pub(crate) connections: u16,
    pub(crate) first: bool,
    /// Attempts to connect the path.
    pub(crate) attempt: u16,
    /// By number.
    pub(crate) cms: BTreeMap<u16, CmRef>,
    pub(crate) rsp: Option<ConnRsp>,
    pub(crate) chunks: Vec<ChunkAddr>,
}

impl Client {
    /// Number `n`, with an address, a session and a path of its own, and one I/O connection.
    pub(crate) fn new(n: u8) -> Self {
        Self {
            session: Uuid([n; 16]),
            path: Uuid([n; 16]),
            peer: SocketAddr::new(IpAddr::from([10, 0, 0, n]), 40_000),
            local: SocketAddr::new(IpAddr::from([192, 0, 2, 1]), 1234),
            device: 0,
            connections: 2,
            first: true,
            attempt: 1,
            cms: BTreeMap::new(),
            rsp: None,
            chunks: Vec::new(),
        }
    }

    /// Another path of the same session, from another address.
    pub(crate) fn second_path(&self, n: u8) -> Self {
        Self {
            session: self.session,
            first: false,
            ..Self::new(n)
        }
    }

    /// The same path, after its client has lost it: nothing of it stands any more on that side.
    pub(crate) fn once_more(&self) -> Self {
        Self {
            attempt: self.attempt + 1,
            first: true,
            cms: BTreeMap::new(),
            chunks: Vec::new(),
            ..self.clone()
        }
    }

    pub(crate) fn request(&self, cid: u16) -> Vec<u8> {
        ConnReq::new(cid, self.connections, self.attempt, self.path, self.session, self.first)
            .as_bytes()
            .to_vec()
    }

    /// Asks for a connection and waits for the answer; the error number when it is refused. The connection does not stand yet.
    pub(crate) fn ask(&mut self, bed: &mut Bed, cid: u16, private_data: Vec<u8>) -> Result<CmRef, i32> {
        let cm = bed
            .provider
            .ask(bed.listener, self.device, self.local, self.peer, private_data);
        bed.turn();
        if let Some((_, data)) = bed.provider.rejected.iter().find(|(of, _)| *of == cm) {
            return Err(ConnRsp::parse(data).unwrap().errno());
        }
        self.cms.insert(cid, cm);
        if let Some(params) = &bed.provider.cms[&cm].params {
            self.rsp = Some(*ConnRsp::parse(&params.private_data).unwrap());
        }
        Ok(cm)
    }

    /// Makes a connection.
    pub(crate) fn connect(&mut self, bed: &mut Bed, cid: u16) -> Result<(), i32> {
        let cm = self.ask(bed, cid, self.request(cid))?;
        let private_data = Vec::new();
        bed.provider.tell(cm, CmKind::Established { private_data });
        bed.turn();
        Ok(())
    }

    pub(crate) fn connect_all(&mut self, bed: &mut Bed) {
        for cid in 0..self.connections {
            self.connect(bed, cid).unwrap();
        }
    }

    pub(crate) fn qp(&self, bed: &Bed, cid: u16) -> QpId {
        bed.provider.qp_of(self.cms[&cid])
    }

    pub(crate) fn layout(&self) -> ChunkLayout {
        self.rsp.unwrap().layout().unwrap()
    }

    pub(crate) fn has_new_keys(&self) -> bool {
        self.rsp.unwrap().flags().contains(MsgFlags::NEW_RKEY)
    }

    /// Sends the information request.
    pub(crate) fn inform(&self, bed: &mut Bed, bytes: &[u8]) {
        let qp = self.qp(bed, 0);
        bed.provider.deliver(qp, bytes, None);
        bed.turn();
    }

    /// Reads the information response; false if there is none.
    pub(crate) fn informed(&mut self, bed: &mut Bed) -> bool {
        let Some(cm) = self.cms.get(&0).filter(|cm| bed.provider.cms.contains_key(cm)) else {
            return false;
        };
        let qp = bed.provider.qp_of(*cm);
        let sends = bed.provider.take_sends(qp);
        let Some((_, bytes)) = sends.iter().find(|(op, _)| *op == SendOp::Send) else {
            return false;
        };
        self.chunks = InfoRsp::parse(bytes).unwrap().chunks(&self.layout()).unwrap();
        true
    }

    /// The whole handshake.
    pub(crate) fn open(&mut self, bed: &mut Bed, name: &str) {
        self.connect_all(bed);
        self.inform(bed, InfoReq::new(name).unwrap().as_bytes());
        assert!(self.informed(bed), "{name} is not let in");
    }

    /// A client that is in.
    pub(crate) fn opened(bed: &mut Bed, n: u8, name: &str) -> Self {
        let mut client = Self::new(n);
        client.open(bed, name);
        bed.outputs.clear();
        client
    }

    /// Writes bytes into a chunk, as far as its key is open.
    pub(crate) fn write(&self, bed: &mut Bed, chunk: u16, at: u32, bytes: &[u8]) -> bool {
        let to = self.chunks[usize::from(chunk)];
        let qp = self.qp(bed, 1);
        let addr = to.addr + u64::from(at);
        bed.provider.peer_write(qp, RKey(to.rkey), addr, bytes).is_ok()
    }

    /// Sends an immediate value over a connection.
    pub(crate) fn imm(&self, bed: &mut Bed, cid: u16, imm: u32) {
        let qp = self.qp(bed, cid);
        bed.provider.deliver_imm(qp, imm);
        bed.turn();
    }

    /// Announces a message in a chunk.
    pub(crate) fn announce(&self, bed: &mut Bed, chunk: u16, offset: u32) {
        let payload = self.layout().pack(chunk.into(), offset);
        self.imm(bed, 1, Imm::IoReq(payload).encode());
    }

    /// A write request with this data and header.
    pub(crate) fn send_write(&self, bed: &mut Bed, chunk: u16, data: &[u8], header: &[u8]) {
        let message = RdmaWrite::new(header.len() as u16);
        let bytes = [data, header, message.as_bytes()].concat();
        assert!(self.write(bed, chunk, 0, &bytes), "chunk {chunk} is closed");
        self.announce(bed, chunk, (data.len() + header.len()) as u32);
    }

    /// A read request for so many bytes, to a place of the client's.
    pub(crate) fn send_read(&self, bed: &mut Bed, chunk: u16, len: u32, header: &[u8], invalidate: bool) {
        let flags = if invalidate {
            MsgFlags::NEED_INVAL
        } else {
            MsgFlags::empty()
        };
        let message = RdmaRead::new(header.len() as u16, flags, 1);
        let bytes = [header, message.as_bytes(), dest(len).as_bytes()].concat();
        assert!(self.write(bed, chunk, len, &bytes), "chunk {chunk} is closed");
        self.announce(bed, chunk, len + header.len() as u32);
    }

    /// The answers that it has got over a connection; new keys are taken over.
    pub(crate) fn answers(&mut self, bed: &mut Bed, cid: u16) -> Vec<IoReply> {
        let qp = self.qp(bed, cid);
        let mut replies = Vec::new();
        for (op, bytes) in bed.provider.take_sends(qp) {
            let (SendOp::SendWithImm(imm) | SendOp::WriteWithImm(_, imm)) = op else {
                continue;
            };
            let Ok(Imm::IoRsp(reply)) = Imm::decode(imm) else {
                continue;
            };
            if let SendOp::SendWithImm(_) = op {
                let message = RkeyRsp::parse(&bytes).unwrap();
                assert_eq!(u32::from(message.buf_id.get()), reply.msg_id);
                self.chunks[reply.msg_id as usize].rkey = message.rkey.get();
            }
            replies.push(reply);
        }
        replies
    }

    /// The connection manager says that the client is gone.
    pub(crate) fn leave(&self, bed: &mut Bed) {
        bed.provider.tell(self.cms[&0], CmKind::Disconnected);
        bed.turn();
    }

    /// Whether nothing is left of its path.
    pub(crate) fn is_gone(&self, bed: &Bed) -> bool {
        self.cms.values().all(|cm| !bed.provider.cms.contains_key(cm))
    }
}

/// The place that reads of so many bytes go to.
pub(crate) fn dest(len: u32) -> SgDesc {
    SgDesc::new(0x2010, 7, len)
}
