//! An RTRS peer by hand, straight on verbs: it can send what a proper client or server never would.

use std::{
    net::{IpAddr, SocketAddr},
    thread,
    time::Instant,
};

use roce::{
    AccessFlags, CmEvent, CmEventKind, Completion, ConnParams, Cq, Device, EventChannel, Id, Mr, Payload, Pd, Qp,
    QpCaps, QpInit, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr,
};
use rtrs::proto::{ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, MsgFlags, Uuid, info::ChunkAddr};
use zerocopy::IntoBytes;

use super::{PATIENCE, uuid};

/// Receives and their size: large enough for session information.
const RECVS: usize = 64;
const RECV_BYTES: usize = 4096;
/// Where sends are put together.
const SEND_AT: usize = RECVS * RECV_BYTES;
const SEND_BYTES: usize = 128 << 10;

/// Objects of one end.
pub(crate) struct End {
    pub(crate) dev: Device,
    pub(crate) channel: EventChannel,
    pub(crate) cq: Cq,
    pub(crate) mr: Mr,
    pd: Pd,
}

/// One connection of it.
pub(crate) struct Con {
    pub(crate) qp: Qp,
    pub(crate) id: Id,
}

impl End {
    pub(crate) fn new(dev: &Device) -> Self {
        let pd = dev.alloc_pd().unwrap();
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        Self {
            channel: dev.create_cm_channel().unwrap(),
            cq: dev.create_cq(4096, None, 0).unwrap(),
            mr: dev.alloc_mr(&pd, SEND_AT + SEND_BYTES, access).unwrap(),
            dev: dev.clone(),
            pd,
        }
    }

    pub(crate) fn qp(&self) -> Qp {
        let init = QpInit {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            caps: QpCaps::default(),
            signal_all: true,
        };
        let qp = self.dev.create_qp(&self.pd, &init).unwrap();
        for i in 0..RECVS as u64 {
            self.post_recv(&qp, i);
        }
        qp
    }

    fn post_recv(&self, qp: &Qp, i: u64) {
        let sges = [self.mr.sge(i as usize * RECV_BYTES, RECV_BYTES)];
        qp.post_recv(&[RecvWr { wr_id: i, sges: &sges }]).unwrap();
    }

    pub(crate) fn received(&self, wc: &Completion) -> Vec<u8> {
        let mut bytes = vec![0; wc.byte_len as usize];
        self.mr.read(wc.wr_id as usize * RECV_BYTES, &mut bytes).unwrap();
        bytes
    }

    /// The next completion of a receive of this queue pair, or of a send that failed; `None` when the queue pair was flushed.
    pub(crate) fn next(&self, qp: &Qp) -> Option<Completion> {
        let deadline = Instant::now() + PATIENCE;
        let mut out = Vec::new();
        loop {
            self.cq.poll(&mut out, 1).unwrap();
            match out.pop() {
                Some(wc) if wc.qpn != qp.qpn() => {}
                Some(wc) if !wc.is_ok() => return None,
                Some(wc) if wc.opcode as u32 >= 128 => {
                    if wc.opcode == roce::WcOpcode::RecvRdmaWithImm {
                        // A closed path refuses this; the flush tells.
                        let sges = [self.mr.sge(wc.wr_id as usize * RECV_BYTES, RECV_BYTES)];
                        let _ = qp.post_recv(&[RecvWr {
                            wr_id: wc.wr_id,
                            sges: &sges,
                        }]);
                    }
                    return Some(wc);
                }
                Some(_) => {}
                None => {
                    assert!(Instant::now() < deadline, "no completion came");
                    thread::yield_now();
                }
            }
        }
    }

    /// Sends bytes; the queue pair may be in error already.
    pub(crate) fn send(&self, qp: &Qp, op: SendOp, bytes: &[u8]) {
        self.mr.write(SEND_AT, bytes).unwrap();
        let sges = [self.mr.sge(SEND_AT, bytes.len())];
        let payload = if bytes.is_empty() {
            Payload::Sges(&[])
        } else {
            Payload::Sges(&sges)
        };
        let wr = SendWr {
            wr_id: 1 << 32,
            op,
            flags: SendFlags::SIGNALED,
            payload,
        };
        let _ = qp.post_send(&[wr]);
    }

    /// Sends bytes, and waits until the peer has them.
    pub(crate) fn deliver(&self, qp: &Qp, op: SendOp, bytes: &[u8]) {
        self.send(qp, op, bytes);
        let deadline = Instant::now() + PATIENCE;
        let mut out = Vec::new();
        while !out
            .iter()
            .any(|wc: &Completion| wc.qpn == qp.qpn() && wc.wr_id == 1 << 32)
        {
            assert!(Instant::now() < deadline, "no completion came");
            self.cq.poll(&mut out, 1).unwrap();
        }
        assert!(out.iter().all(Completion::is_ok));
    }

    pub(crate) fn imm(&self, qp: &Qp, imm: u32) {
        self.send(qp, SendOp::WriteWithImm(RemoteAddr::default(), imm), &[]);
    }

    fn event(&self) -> CmEvent {
        self.channel
            .wait(Some(PATIENCE))
            .unwrap()
            .expect("an event of the connection manager")
    }
}

/// A client.
pub(crate) struct Client {
    pub(crate) end: End,
    pub(crate) session: Uuid,
    pub(crate) path: Uuid,
    src: IpAddr,
    dst: SocketAddr,
    pub(crate) cons: Vec<Con>,
    pub(crate) chunks: Vec<ChunkAddr>,
    pub(crate) layout: Option<ChunkLayout>,
}

impl Client {
    pub(crate) fn new(dev: &Device, src: IpAddr, dst: SocketAddr) -> Self {
        Self {
            end: End::new(dev),
            session: uuid(),
            path: uuid(),
            src,
            dst,
            cons: Vec::new(),
            chunks: Vec::new(),
            layout: None,
        }
    }

    pub(crate) fn request(&self, cid: u16, num: u16) -> Vec<u8> {
        ConnReq::new(cid, num, 1, self.path, self.session, true)
            .as_bytes()
            .to_vec()
    }

    /// Connects with these private data; the server's error number when it refuses.
    pub(crate) fn connect(&mut self, private_data: Vec<u8>) -> Result<(), i32> {
        let qp = self.end.qp();
        let params = ConnParams {
            private_data,
            ..ConnParams::default()
        };
        let id = self
            .end
            .dev
            .connect(&self.end.channel, Some(self.src), self.dst, &qp, params)
            .unwrap();
        loop {
            match self.end.event().kind {
                CmEventKind::Established { private_data, .. } => {
                    self.layout = Some(ConnRsp::parse(&private_data).unwrap().layout().unwrap());
                    self.cons.push(Con { qp, id });
                    return Ok(());
                }
                CmEventKind::Rejected { private_data, .. } => {
                    return Err(ConnRsp::parse(&private_data).unwrap().errno());
                }
                CmEventKind::Disconnected { .. } | CmEventKind::TimewaitExit { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Sends the information request; false when the server closed the path instead of answering.
    pub(crate) fn information(&mut self, bytes: &[u8]) -> bool {
        let qp = self.cons[0].qp.clone();
        self.end.send(&qp, SendOp::Send, bytes);
        let Some(wc) = self.end.next(&qp) else { return false };
        let rsp = InfoRsp::parse(&self.end.received(&wc)).unwrap();
        self.chunks = rsp.chunks(&self.layout.unwrap()).unwrap();
        true
    }

    /// The whole handshake with one I/O connection.
    pub(crate) fn open(&mut self, name: &str) {
        for cid in 0..2 {
            self.connect(self.request(cid, 2)).unwrap();
        }
        assert!(self.information(InfoReq::new(name).unwrap().as_bytes()));
    }

    /// Writes bytes into a chunk so that they end with the message, and announces an offset.
    pub(crate) fn io(&self, con: usize, msg_id: u32, start: u32, bytes: &[u8], offset: u32) {
        let chunk = self.chunks[msg_id as usize];
        let remote = RemoteAddr {
            addr: chunk.addr + u64::from(start),
            rkey: RKey(chunk.rkey),
        };
        let imm = Imm::IoReq(self.layout.unwrap().pack(msg_id, offset)).encode();
        self.end
            .send(&self.cons[con].qp, SendOp::WriteWithImm(remote, imm), bytes);
    }

    /// Whether the server closes the path: everything is flushed. Messages that come before are skipped.
    pub(crate) fn closed(&self, con: usize) {
        while self.end.next(&self.cons[con].qp).is_some() {}
    }
}

/// A server with a depth of 4 and chunks of 16 KiB, keys never change.
pub(crate) struct Server {
    pub(crate) end: End,
    pub(crate) cons: Vec<Con>,
    listener: Id,
    chunks: Mr,
}

/// What a server says; each may be spoiled.
pub(crate) struct Script {
    pub(crate) conn_rsp: Vec<u8>,
    pub(crate) info_rsp: Option<Box<dyn Fn(InfoRsp) -> Vec<u8> + Send>>,
}

impl Script {
    pub(crate) fn proper() -> Self {
        Self {
            conn_rsp: ConnRsp::accept(4, 12 << 10, 4096, MsgFlags::empty())
                .as_bytes()
                .to_vec(),
            info_rsp: None,
        }
    }
}

impl Server {
    pub(crate) fn new(dev: &Device, addr: SocketAddr) -> Self {
        let end = End::new(dev);
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        Self {
            listener: dev.listen(&end.channel, addr, 8).unwrap(),
            chunks: dev.alloc_mr(&end.pd, 4 * (16 << 10), access).unwrap(),
            cons: Vec::new(),
            end,
        }
    }

    /// Takes one client with one I/O connection through the handshake, as far as it goes along.
    pub(crate) fn serve(&mut self, script: &Script) {
        let handle = self.listener.handle();
        while self.cons.len() < 2 {
            let CmEvent { id, kind, .. } = self.end.event();
            match kind {
                CmEventKind::Request { .. } => {
                    let qp = self.end.qp();
                    let params = ConnParams {
                        private_data: script.conn_rsp.clone(),
                        ..ConnParams::default()
                    };
                    id.accept(&qp, params).unwrap();
                    assert_ne!(id.handle(), handle);
                    self.cons.push(Con { qp, id });
                }
                CmEventKind::Established { .. } => {}
                _ => return,
            }
        }
        let qp = self.cons[0].qp.clone();
        let Some(wc) = self.end.next(&qp) else { return };
        InfoReq::parse(&self.end.received(&wc)).unwrap();
        let desc = rtrs::proto::SgDesc::new(self.chunks.addr(), self.chunks.rkey().0, self.chunks.len() as u32);
        let rsp = InfoRsp::new(vec![desc]);
        let bytes = script
            .info_rsp
            .as_ref()
            .map_or_else(|| rsp.to_bytes(), |spoil| spoil(rsp.clone()));
        self.end.send(&qp, SendOp::Send, &bytes);
    }

    /// Waits for a request: the chunk, and the message in it.
    pub(crate) fn request(&self) -> (u32, Vec<u8>) {
        let wc = self.end.next(&self.cons[1].qp).expect("a request");
        let Ok(Imm::IoReq(payload)) = Imm::decode(wc.imm) else {
            panic!("not a request")
        };
        let (msg_id, offset) = ChunkLayout::new(4, 16 << 10).unwrap().unpack(payload).unwrap();
        let mut message = vec![0; 24];
        let at = (msg_id << 14) + offset;
        self.chunks.read(at as usize, &mut message).unwrap();
        (msg_id, message)
    }
}
