//! Clients of an RTRS server on [`Fake`]: they keep to the protocol or not, as the input says, and check what the server
//! sends them.

use std::net::{IpAddr, SocketAddr};

use roce_verbs::{SendOp, provider::CmEventKind};
use rtrs::proto::{
    ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc,
    Uuid, imm, info::check_name,
};
use zerocopy::IntoBytes;

use crate::{
    input::Input,
    provider::{Answer, Fake, Id, Message},
};

/// Connections of a run: enough for every limit of the servers here.
const MAX_CONNECTIONS: usize = 48;
/// Where clients say that their buffers are.
const BUFFER: u64 = 0x10_0000;

/// A client's connection that the server has accepted.
pub(crate) struct Conn {
    pub(crate) id: Id,
    /// Index of its path.
    pub(crate) path: usize,
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
    id: Id,
    session: u8,
    number: u8,
    /// It can be read.
    sound: bool,
}

pub(crate) struct Peers {
    pub(crate) fake: Fake,
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

impl Peers {
    pub(crate) fn new(fake: Fake, layout: ChunkLayout) -> Self {
        Self {
            fake,
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
        let id = self.fake.request(local, SocketAddr::new(addr(host), 0), private_data);
        self.asked.push(Asked {
            id,
            session,
            number,
            sound: ConnReq::parse(private_data).is_ok(),
        });
        let before = self.conns.len();
        self.fake.quiet(&|| usize::MAX);
        self.answers();
        self.conns.len() > before
    }

    /// Looks for answers to connect requests.
    fn answers(&mut self) {
        for asked in std::mem::take(&mut self.asked) {
            match self.fake.answer(&asked.id) {
                Some(Answer::Accepted(bytes)) => {
                    let rsp = ConnRsp::parse(&bytes).expect("a connection response");
                    assert_eq!((rsp.errno(), rsp.layout()), (0, Ok(self.layout)));
                    assert!(asked.sound, "what is no request is accepted");
                    let path = self.path(asked.session, asked.number);
                    self.conns.push(Conn { id: asked.id, path });
                }
                Some(Answer::Rejected(bytes)) => {
                    assert_ne!(ConnRsp::parse(&bytes).expect("a connection response").errno(), 0);
                }
                None => self.asked.push(asked),
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

    /// A request for a connection, as the protocol has it.
    pub(crate) fn conn_req(session: u8, number: u8, cid: u16, count: u16, first: bool) -> Vec<u8> {
        let (path, session) = (Uuid([number; 16]), Uuid([0x80 | session; 16]));
        ConnReq::new(cid, count, 0, path, session, first).as_bytes().to_vec()
    }

    pub(crate) fn established(&self, conn: usize) {
        if let Some(c) = self.conns.get(conn) {
            let private_data = Vec::new();
            self.fake.event(&c.id, CmEventKind::Established { private_data });
        }
    }

    /// A whole handshake of a path of `count` connections. True if the server has told its chunks.
    pub(crate) fn handshake(&mut self, session: u8, number: u8, count: u16, host: u8, name: &str) -> bool {
        let first = self.conns.len();
        for cid in 0..count {
            let req = Self::conn_req(session, number, cid, count, true);
            if !self.connect(session, number, &req, host, number) {
                return false;
            }
            self.established(self.conns.len() - 1);
            self.fake.quiet(&|| usize::MAX);
        }
        let Ok(info) = InfoReq::new(name) else { return false };
        self.fake.deliver(&self.conns[first].id, Message::Send(info.as_bytes()));
        self.collect(&|| usize::MAX);
        !self.paths[self.conns[first].path].chunks.is_empty()
    }

    /// Puts a request into a chunk and tells the server, over this connection. False if the chunk is not open.
    pub(crate) fn ask(&mut self, conn: usize, ask: &Ask<'_>) -> bool {
        let Some(Conn { id, path }) = self.conns.get(conn) else {
            return false;
        };
        let Some(&(start, key)) = self.paths[*path].chunks.get(ask.chunk) else {
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
        let written = self.fake.write(key, start, data)
            && self.fake.write(key, start + u64::from(len), ask.user)
            && self.fake.write(key, start + u64::from(offset), &message);
        if !written || offset >= self.layout.chunk_size() {
            return false;
        }
        let payload = self.layout.pack(ask.chunk as u32, offset);
        self.fake
            .deliver(id, Message::WriteWithImm(Imm::IoReq(payload).encode()))
    }

    /// Waits for the server and reads what it has sent.
    pub(crate) fn collect(&mut self, held: &dyn Fn() -> usize) -> Vec<Reply> {
        self.fake.quiet(held);
        self.answers();
        let mut replies = Vec::new();
        for conn in 0..self.conns.len() {
            let sent = self.fake.take_sent(&self.conns[conn].id);
            let chunks = &mut self.paths[self.conns[conn].path].chunks;
            let mut data = Vec::new();
            for s in sent {
                let imm = match s.op {
                    SendOp::Send => {
                        let info = InfoRsp::parse(&s.bytes).expect("an information response");
                        let told = info.chunks(&self.layout).expect("the chunks");
                        *chunks = told.into_iter().map(|c| (c.addr, c.rkey)).collect();
                        continue;
                    }
                    SendOp::Write(to) => {
                        let fits = |d: &SgDesc| {
                            (d.addr.get(), d.key.get()) == (to.addr, to.rkey.0) && s.bytes.len() == d.len.get() as usize
                        };
                        assert!(self.raw || self.named.iter().any(fits), "a write that nobody asked for");
                        data = s.bytes;
                        continue;
                    }
                    SendOp::SendWithInv(key) => {
                        assert!(self.raw || key.0 == 77, "a key that nobody named");
                        continue;
                    }
                    SendOp::SendWithImm(imm) => {
                        let rsp = RkeyRsp::parse(&s.bytes).expect("a key response");
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
                        let data = std::mem::take(&mut data);
                        replies.push(Reply { conn, reply, data });
                    }
                    Imm::HbMsg | Imm::HbAck => {}
                    Imm::IoReq(_) => panic!("a request from a server"),
                }
            }
        }
        replies
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
    use rtrs::proto::Request::{self, Read, Write};
    let copy = &bytes[..bytes.len().min(Request::MAX_LEN)];
    let Ok(request) = Request::parse(copy, offset, rtrs::proto::MAX_HDR_SIZE) else {
        return;
    };
    let (Write { usr_len, data_len } | Read { usr_len, data_len, .. }) = request;
    assert!(u32::from(usr_len) <= rtrs::proto::MAX_HDR_SIZE);
    assert_eq!(u32::from(usr_len) + data_len, offset);
}
