//! Clients of an RTRS server: they keep to the protocol or not, as the input says, and check what the server sends them.

use std::net::{IpAddr, SocketAddr};

use roce_verbs::{
    RKey, SendOp, WcStatus,
    provider::{CmKind, CmRef, QpId},
};
use rtrs::proto::{
    ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc,
    Uuid, imm, info::check_name,
};
use zerocopy::IntoBytes;

use crate::{
    host::{Host, User},
    input::Input,
};

/// Connections of a run: enough for every limit of the servers here.
const MAX_CONNECTIONS: usize = 48;
/// Where clients say that their buffers are.
const BUFFER: u64 = 0x10_0000;

/// A client's connection that the server has accepted.
pub(crate) struct Conn {
    pub(crate) id: CmRef,
    qp: QpId,
    /// Index of its path.
    pub(crate) path: usize,
    /// Requests that came over it and are not answered.
    open: usize,
}

/// What a client sends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message<'a> {
    Send(&'a [u8]),
    SendWithImm(&'a [u8], u32),
    /// An RDMA WRITE with immediate data, after its data.
    WriteWithImm(u32),
}

/// A path as its client sees it.
pub(crate) struct Path {
    session: u8,
    number: u8,
    /// Address and key of each chunk, once the server has told them.
    pub(crate) chunks: Vec<(u64, u32)>,
}

/// What the client puts into a chunk.
pub(crate) struct Ask<'a> {
    pub(crate) chunk: usize,
    /// Bytes of a write, or room for a read.
    pub(crate) data: Result<&'a [u8], u32>,
    pub(crate) user: &'a [u8],
    pub(crate) invalidate: bool,
}

/// An answer to a request.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) conn: usize,
    pub(crate) reply: IoReply,
    /// What the server wrote into the client's buffer before.
    pub(crate) data: Vec<u8>,
}

/// A connect request that is not answered yet.
struct Asked {
    id: CmRef,
    session: u8,
    number: u8,
    /// It can be read.
    sound: bool,
}

pub(crate) struct Peers<U> {
    pub(crate) host: Host<U>,
    layout: ChunkLayout,
    asked: Vec<Asked>,
    pub(crate) conns: Vec<Conn>,
    pub(crate) paths: Vec<Path>,
    /// Buffers that requests have named.
    named: Vec<SgDesc>,
    /// Something else than whole requests lies in the chunks: it may name any buffer.
    pub(crate) raw: bool,
}

fn addr(host: u8) -> IpAddr {
    [10, 0, host / 8, host % 8 + 1].into()
}

/// A request for a connection, as the protocol has it.
pub(crate) fn conn_req(session: u8, number: u8, cid: u16, count: u16, first: bool) -> Vec<u8> {
    let (path, session) = (Uuid([number; 16]), Uuid([0x80 | session; 16]));
    ConnReq::new(cid, count, 0, path, session, first).as_bytes().to_vec()
}

impl<U: User> Peers<U> {
    pub(crate) fn new(host: Host<U>, layout: ChunkLayout) -> Self {
        Self {
            host,
            layout,
            asked: Vec::new(),
            conns: Vec::new(),
            paths: Vec::new(),
            named: Vec::new(),
            raw: false,
        }
    }

    /// Asks for a connection; true if the server wants it. It may also keep the request for later.
    pub(crate) fn connect(&mut self, session: u8, number: u8, private_data: &[u8], host: u8, local: u8) -> bool {
        if self.conns.len() + self.asked.len() >= MAX_CONNECTIONS {
            return false;
        }
        let local = SocketAddr::new([10, 1, 0, local].into(), 1234);
        let id = self.host.request(local, SocketAddr::new(addr(host), 0), private_data);
        self.asked.push(Asked {
            id,
            session,
            number,
            sound: ConnReq::parse(private_data).is_ok(),
        });
        let before = self.conns.len();
        self.host.quiet();
        self.answers();
        self.conns.len() > before
    }

    /// Looks for answers to connect requests.
    fn answers(&mut self) {
        for asked in std::mem::take(&mut self.asked) {
            let provider = &self.host.provider;
            if let Some((_, bytes)) = provider.rejected.iter().find(|(id, _)| *id == asked.id) {
                let rsp = ConnRsp::parse(bytes).expect("a connection response");
                assert_ne!(rsp.errno(), 0);
                continue;
            }
            // Who has not proved its address gives way without an answer.
            let Some(cm) = provider.cms.get(&asked.id) else {
                continue;
            };
            match (cm.qp, &cm.params) {
                (Some(qp), Some(params)) => {
                    let rsp = ConnRsp::parse(&params.private_data).expect("a connection response");
                    assert_eq!((rsp.errno(), rsp.layout()), (0, Ok(self.layout)));
                    assert!(asked.sound, "what is no request is accepted");
                    let path = self.path(asked.session, asked.number);
                    self.conns.push(Conn {
                        id: asked.id,
                        qp,
                        path,
                        open: 0,
                    });
                }
                _ => self.asked.push(asked),
            }
        }
    }

    fn path(&mut self, session: u8, number: u8) -> usize {
        let known = self
            .paths
            .iter()
            .rposition(|p| (p.session, p.number) == (session, number));
        known.unwrap_or_else(|| {
            self.paths.push(Path {
                session,
                number,
                chunks: Vec::new(),
            });
            self.paths.len() - 1
        })
    }

    /// Something happens to a connection.
    pub(crate) fn event(&mut self, conn: usize, kind: CmKind) {
        if let Some(c) = self.conns.get(conn) {
            self.host.event(c.id, kind);
        }
    }

    pub(crate) fn established(&mut self, conn: usize) {
        let private_data = Vec::new();
        self.event(conn, CmKind::Established { private_data });
    }

    /// A message comes. Without a receive for it nothing happens; one that does not fit ends the queue pair.
    pub(crate) fn deliver(&mut self, conn: usize, message: Message<'_>) -> bool {
        let Some(c) = self.conns.get_mut(conn) else {
            return false;
        };
        let provider = &mut self.host.provider;
        let Some(qp) = provider.live(c.id).filter(|qp| provider.recvs(*qp) > 0) else {
            return false;
        };
        match message {
            Message::Send(bytes) => provider.deliver(qp, bytes, None),
            Message::SendWithImm(bytes, imm) => provider.deliver(qp, bytes, Some(imm)),
            Message::WriteWithImm(imm) => {
                provider.deliver_imm(qp, imm);
                c.open += usize::from(matches!(Imm::decode(imm), Ok(Imm::IoReq(_))));
            }
        }
        let last = provider.completions.back();
        if last.is_some_and(|(_, wc)| wc.status == WcStatus::LocalLengthError) {
            provider.fail_qp(qp, WcStatus::FlushError);
        }
        true
    }

    /// An RDMA WRITE of a client. False, and nothing is written, if the key does not open the range.
    pub(crate) fn write(&mut self, conn: usize, key: u32, addr: u64, bytes: &[u8]) -> bool {
        let provider = &self.host.provider;
        let Some(qp) = self.conns.get(conn).and_then(|c| provider.live(c.id)) else {
            return false;
        };
        let found = provider.reach(qp, RKey(key), addr, bytes.len() as u32);
        found.is_ok_and(|span| span.write(0, bytes).is_ok())
    }

    /// The client has used a key that opens nothing to it: its connection fails.
    pub(crate) fn violate(&mut self, conn: usize) {
        let Some(qp) = self.conns.get(conn).and_then(|c| self.host.provider.live(c.id)) else {
            return;
        };
        self.host.provider.violate(qp);
        self.host.provider.fail_qp(qp, WcStatus::FlushError);
        self.event(conn, CmKind::Disconnected);
    }

    /// The transport gives a connection up: its oldest send fails with this status, everything else is flushed.
    pub(crate) fn fail(&mut self, conn: usize, status: WcStatus) {
        if let Some(qp) = self.conns.get(conn).and_then(|c| self.host.provider.live(c.id)) {
            self.host.provider.fail_qp(qp, status);
        }
    }

    /// A whole handshake of a path of `count` connections. True if the server has told its chunks.
    pub(crate) fn handshake(&mut self, session: u8, number: u8, count: u16, host: u8, name: &str) -> bool {
        let first = self.conns.len();
        for cid in 0..count {
            let req = conn_req(session, number, cid, count, true);
            if !self.connect(session, number, &req, host, number) {
                return false;
            }
            self.established(self.conns.len() - 1);
            self.host.quiet();
        }
        let Ok(info) = InfoReq::new(name) else { return false };
        self.deliver(first, Message::Send(info.as_bytes()));
        self.collect();
        !self.paths[self.conns[first].path].chunks.is_empty()
    }

    /// Puts a request into a chunk and tells the server, over this connection. False if the chunk is not open.
    pub(crate) fn ask(&mut self, conn: usize, ask: &Ask<'_>) -> bool {
        let Some(path) = self.conns.get(conn).map(|c| c.path) else {
            return false;
        };
        let Some(&(start, key)) = self.paths[path].chunks.get(ask.chunk) else {
            return false;
        };
        let usr_len = ask.user.len() as u16;
        let (data, len) = match ask.data {
            Ok(bytes) => (bytes, bytes.len() as u32),
            Err(len) => (&[][..], len),
        };
        let message = match ask.data {
            Ok(_) => RdmaWrite::new(usr_len).as_bytes().to_vec(),
            Err(_) => {
                let flags = if ask.invalidate {
                    MsgFlags::NEED_INVAL
                } else {
                    MsgFlags::empty()
                };
                let head = RdmaRead::new(usr_len, flags, 1);
                let desc = SgDesc::new(BUFFER + self.named.len() as u64 * 0x10_0000, 77, len);
                self.named.push(desc);
                [head.as_bytes(), desc.as_bytes()].concat()
            }
        };
        let offset = len + u32::from(usr_len);
        let written = self.write(conn, key, start, data)
            && self.write(conn, key, start + u64::from(len), ask.user)
            && self.write(conn, key, start + u64::from(offset), &message);
        if !written || offset >= self.layout.chunk_size() {
            return false;
        }
        let payload = self.layout.pack(ask.chunk as u32, offset);
        self.deliver(conn, Message::WriteWithImm(Imm::IoReq(payload).encode()))
    }

    /// Lets the server work, and reads what it has sent.
    pub(crate) fn collect(&mut self) -> Vec<Reply> {
        self.host.quiet();
        self.answers();
        let mut replies = Vec::new();
        for conn in 0..self.conns.len() {
            let mut data = Vec::new();
            for (op, bytes) in self.host.provider.take_sends(self.conns[conn].qp) {
                if let Some(reply) = self.sent(conn, op, bytes, &mut data) {
                    self.conns[conn].open = self.conns[conn].open.checked_sub(1).expect("an answer to a request");
                    let data = std::mem::take(&mut data);
                    replies.push(Reply { conn, reply, data });
                }
            }
        }
        replies
    }

    /// Checks what the server has sent over a connection; an answer, if it is one. `data` is what it has written before.
    fn sent(&mut self, conn: usize, op: SendOp, bytes: Vec<u8>, data: &mut Vec<u8>) -> Option<IoReply> {
        let chunks = &mut self.paths[self.conns[conn].path].chunks;
        let imm = match op {
            SendOp::Send => {
                let info = InfoRsp::parse(&bytes).expect("an information response");
                let told = info.chunks(&self.layout).expect("the chunks");
                *chunks = told.into_iter().map(|c| (c.addr, c.rkey)).collect();
                return None;
            }
            SendOp::Write(to) => {
                let fits = |d: &SgDesc| {
                    (d.addr.get(), d.key.get()) == (to.addr, to.rkey.0) && bytes.len() == d.len.get() as usize
                };
                assert!(self.raw || self.named.iter().any(fits), "a write that nobody asked for");
                *data = bytes;
                return None;
            }
            SendOp::SendWithInv(key) => {
                assert!(self.raw || key.0 == 77, "a key that nobody named");
                return None;
            }
            SendOp::SendWithImm(imm) => {
                let rsp = RkeyRsp::parse(&bytes).expect("a key response");
                let chunk = usize::from(rsp.buf_id.get());
                assert!(chunk < self.layout.queue_depth() as usize);
                if let Some((_, key)) = chunks.get_mut(chunk) {
                    *key = rsp.rkey.get();
                }
                imm
            }
            SendOp::WriteWithImm(_, imm) => imm,
            op => panic!("a server that posts {op:?}"),
        };
        match Imm::decode(imm).expect("an immediate value") {
            Imm::IoRsp(reply) => {
                assert!(reply.msg_id < self.layout.queue_depth());
                Some(reply)
            }
            Imm::HbMsg | Imm::HbAck => None,
            Imm::IoReq(_) => panic!("a request from a server"),
        }
    }

    /// The server's user has no request, and all that was sent is done: nothing waits for anything.
    pub(crate) fn check_rest(&self) {
        let provider = &self.host.provider;
        for c in self.conns.iter().filter(|c| provider.live(c.id).is_some()) {
            assert_eq!(c.open, 0, "a request is not answered");
        }
        let ended = provider.cms.values().any(|cm| cm.disconnected);
        assert!(!ended, "a connection that was ended is still there");
    }
}

/// Every parser of what a peer sends: what is read is in its bounds, and written again as it came.
pub(crate) fn parse(input: &mut Input<'_>) {
    let (depth, size) = (input.number_or_zeros(3) as u32, input.number_or_zeros(4) as u32);
    let (offset, value) = (input.number_or_zeros(4) as u32, input.number_or_zeros(4) as u32);
    let bytes = input.0;
    if let Ok(req) = ConnReq::parse(bytes) {
        assert!(req.cid.get() < req.cid_num.get());
        assert_eq!(req.as_bytes(), &bytes[..ConnReq::LEN]);
    }
    if let Ok(rsp) = ConnRsp::parse(bytes) {
        assert_eq!(rsp.as_bytes(), &bytes[..ConnRsp::LEN]);
        assert!(rsp.errno() >= 0);
        let _ = rsp.layout().map(|l| layout(&l, value));
    }
    if let Some(name) = InfoReq::parse(bytes).ok().and_then(|r| r.name().ok()) {
        assert_eq!(check_name(name), Ok(()));
        let again = InfoReq::new(name).expect("a name that was read");
        assert_eq!(again.name(), Ok(name));
    }
    if let Ok(rsp) = InfoRsp::parse(bytes) {
        assert!(bytes.starts_with(&rsp.to_bytes()));
        if let Ok(l) = ChunkLayout::new(depth, size)
            && let Ok(chunks) = rsp.chunks(&l)
        {
            assert_eq!(chunks.len(), depth as usize);
        }
    }
    if let Ok(rsp) = RkeyRsp::parse(bytes) {
        assert_eq!(rsp.as_bytes(), &bytes[..RkeyRsp::LEN]);
    }
    if let Ok(l) = ChunkLayout::new(depth, size) {
        layout(&l, value);
    }
    request(bytes, offset);
    if let Ok(read) = Imm::decode(value)
        && !matches!(read, Imm::HbMsg | Imm::HbAck)
    {
        assert_eq!(read.encode(), value);
    }
}

fn layout(layout: &ChunkLayout, payload: u32) {
    if let Ok((chunk, offset)) = layout.unpack(payload) {
        assert!(chunk < layout.queue_depth() && offset < layout.chunk_size());
        assert_eq!(layout.pack(chunk, offset), payload & imm::PAYLOAD_MASK);
    }
}

fn request(bytes: &[u8], offset: u32) {
    use rtrs::proto::Request;
    let copy = &bytes[..bytes.len().min(Request::MAX_LEN)];
    let Ok(request) = Request::parse(copy, offset, rtrs::proto::MAX_HDR_SIZE) else {
        return;
    };
    assert!(u32::from(request.usr_len) <= rtrs::proto::MAX_HDR_SIZE);
    assert_eq!(u32::from(request.usr_len) + request.data_len, offset);
}
