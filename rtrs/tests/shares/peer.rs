//! A path of a client by hand, which can send what a proper client never would.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_local::{Fabric, FabricConfig, Several};
use roce_mem::{MemoryTable, Pages};
use roce_port::{Port, PortConfig, QpnSlot};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Instant, Mtu, Payload, QpCaps, RKey, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Sge, WcOpcode,
    provider::{CmKind, CmRef, ConnParams, CqId, DeviceIx, Event, MrInfo, PdId, Provider, QpId, QpSpec, Registration},
};
use rtrs::proto::{
    ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc, Uuid,
    info::ChunkAddr,
};
use zerocopy::IntoBytes;

use crate::devices;

const RECV_BYTES: usize = 4096;
const RECVS: usize = 16;
/// Where reads go to, a piece per chunk, and where sends are put together.
const DATA_AT: usize = 16 * RECVS * RECV_BYTES;
const PIECE: usize = 4096;
const SENDS: usize = 64;
const SEND_AT: usize = DATA_AT + 16 * PIECE;

/// A fabric with a device at each of these addresses, each with these keys; one of several of the addresses if there is a slot.
pub(crate) fn fabric(
    lasts: &[u8],
    tables: &[Arc<MemoryTable>],
    limits: &DeviceLimits,
    slot: Option<QpnSlot>,
    keys: FabricConfig,
) -> Fabric<Several> {
    let (mut ports, mut devices) = (Vec::new(), Vec::new());
    for (last, mem) in lasts.iter().copied().zip(tables) {
        let addrs = vec![IpAddr::from([192, 0, 2, last])];
        let mut config = PortConfig::new(addrs.clone(), Mtu::B1024, last.into());
        let mut seed = [last; 32];
        if let Some(slot) = slot {
            config.qpns = slot.qpns();
            config.cm.comm_ids = slot.comm_ids();
            seed[0] = slot.slot as u8;
        }
        config.limits = limits.clone();
        ports.push((Port::new(config, mem.clone(), seed), mem.clone(), addrs.clone()));
        devices.push((limits.clone(), addrs));
    }
    Fabric::new(Several::new(ports), keys, devices)
}

struct Conn {
    cm: CmRef,
    qp: QpId,
    stands: bool,
}

/// See the module.
pub(crate) struct Peer {
    pub(crate) fabric: Fabric<Several>,
    pub(crate) session: Uuid,
    /// The server's address.
    to: IpAddr,
    path: Uuid,
    connections: u16,
    pages: Arc<Pages>,
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
    conns: BTreeMap<u16, Conn>,
    pub(crate) refused: Vec<Option<i32>>,
    wcs: Vec<(QpId, Completion)>,
    pub(crate) chunks: Vec<ChunkAddr>,
    rsp: Option<ConnRsp>,
    sends: usize,
    /// A connection has ended.
    pub(crate) broken: bool,
}

impl Peer {
    /// A path from address `n` to one of the server's, of that session, with so many connections.
    pub(crate) fn new(n: u8, to: u8, session: u8, connections: u16) -> Self {
        let limits = DeviceLimits::software(n.into());
        let mem = Arc::new(MemoryTable::new([n; 32], &limits));
        let mut fabric = fabric(&[n], &[mem], &limits, None, FabricConfig::default());
        let pages = Pages::allocate(SEND_AT + SENDS * PIECE).unwrap();
        let pd = fabric.alloc_pd(DeviceIx(0)).unwrap();
        let cq = fabric.create_cq(DeviceIx(0), 1000).unwrap();
        let whole = Registration {
            memory: pages.clone(),
            offset: 0,
            len: pages.len(),
            iova: None,
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        };
        Self {
            mr: fabric.register(pd, &whole).unwrap(),
            fabric,
            session: Uuid([session; 16]),
            to: IpAddr::from([192, 0, 2, to]),
            path: Uuid([n; 16]),
            connections,
            pages,
            pd,
            cq,
            conns: BTreeMap::new(),
            refused: Vec::new(),
            wcs: Vec::new(),
            chunks: Vec::new(),
            rsp: None,
            sends: 0,
            broken: false,
        }
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + at as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    fn post_recv(&mut self, qp: QpId, wr_id: u64) {
        let sges = [self.sge(wr_id as usize * RECV_BYTES, RECV_BYTES)];
        // A connection that is over takes none.
        let _ = self.fabric.post_recv(qp, &[RecvWr { wr_id, sges: &sges }]);
    }

    pub(crate) fn connect(&mut self, cid: u16) {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps {
                max_send_wr: 64,
                max_recv_wr: RECVS as u32,
                ..QpCaps::default()
            },
            signal_all: true,
        };
        let qp = self.fabric.create_qp(&spec).unwrap();
        for i in 0..RECVS as u64 {
            self.post_recv(qp, u64::from(cid % 16) * RECVS as u64 + i);
        }
        let cm = self.fabric.cm_resolve(None, SocketAddr::new(self.to, 1234)).unwrap();
        let request = ConnReq::new(cid, self.connections, 1, self.path, self.session, true);
        let params = ConnParams {
            private_data: request.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        self.fabric.cm_connect(cm, qp, &params).unwrap();
        let stands = false;
        self.conns.insert(cid, Conn { cm, qp, stands });
    }

    /// Takes completions and events. True: there were some.
    pub(crate) fn look(&mut self) -> bool {
        let before = self.wcs.len();
        self.fabric.poll_completions(&mut self.wcs, 1000).unwrap();
        self.wcs.retain(|(_, wc)| !wc.is_ok() || is_received(wc));
        self.broken |= self.wcs.iter().any(|(_, wc)| !wc.is_ok());
        let mut moved = before != self.wcs.len();
        while let Some(event) = self.fabric.poll_event() {
            moved = true;
            let Event::Cm { id, kind } = event else { continue };
            let Some(conn) = self.conns.values_mut().find(|conn| conn.cm == id) else {
                continue;
            };
            match kind {
                CmKind::Established { private_data } => {
                    conn.stands = true;
                    self.rsp = Some(*ConnRsp::parse(&private_data).unwrap());
                }
                CmKind::Rejected { private_data, .. } => {
                    self.refused
                        .push(ConnRsp::parse(&private_data).ok().map(|rsp| rsp.errno()));
                    self.broken = true;
                }
                CmKind::Resolved { .. } | CmKind::TimewaitExit => {}
                _ => self.broken = true,
            }
        }
        if self.chunks.is_empty() && self.rsp.is_some() {
            let layout = self.rsp.unwrap().layout().unwrap();
            if let Some((_, bytes)) = self.messages(0).into_iter().find(|(_, bytes)| !bytes.is_empty()) {
                self.chunks = InfoRsp::parse(&bytes).unwrap().chunks(&layout).unwrap();
            }
        }
        moved
    }

    /// Whether all connections stand.
    pub(crate) fn is_connected(&self) -> bool {
        self.conns.len() == usize::from(self.connections) && self.conns.values().all(|conn| conn.stands)
    }

    pub(crate) fn inform(&mut self, name: &str) {
        self.send(0, SendOp::Send, InfoReq::new(name).unwrap().as_bytes());
    }

    fn send(&mut self, cid: u16, op: SendOp, bytes: &[u8]) {
        let at = SEND_AT + self.sends % SENDS * PIECE;
        self.sends += 1;
        self.pages.write(at, bytes).unwrap();
        let sges = [self.sge(at, bytes.len())];
        let wr = SendWr {
            wr_id: 100_000,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(if bytes.is_empty() { &[] } else { &sges }),
        };
        let Some(conn) = self.conns.get(&cid) else { return };
        // One that is over takes none.
        let _ = self.fabric.post_send(conn.qp, &[wr]);
    }

    /// Messages that have come over a connection: immediate value, and bytes. They are taken.
    fn messages(&mut self, cid: u16) -> Vec<(u32, Vec<u8>)> {
        let Some(qp) = self.conns.get(&cid).map(|conn| conn.qp) else {
            return Vec::new();
        };
        let mine = self.wcs.extract_if(.., |(of, wc)| *of == qp && is_received(wc));
        let mine: Vec<_> = mine.map(|(_, wc)| wc).collect();
        let mut messages = Vec::new();
        for wc in mine {
            let mut bytes = vec![0; wc.byte_len as usize];
            self.pages.read(wc.wr_id as usize * RECV_BYTES, &mut bytes).unwrap();
            messages.push((wc.imm, bytes));
            self.post_recv(qp, wc.wr_id);
        }
        messages
    }

    /// Writes a request into a chunk and announces it.
    fn request(&mut self, cid: u16, chunk: u16, bytes: &[u8], at: usize, offset: usize) {
        let Some(to) = self.chunks.get(usize::from(chunk)).copied() else {
            return;
        };
        let remote = RemoteAddr {
            addr: to.addr + at as u64,
            rkey: RKey(to.rkey),
        };
        let layout = self.rsp.unwrap().layout().unwrap();
        let imm = Imm::IoReq(layout.pack(chunk.into(), offset as u32)).encode();
        self.send(cid, SendOp::WriteWithImm(remote, imm), bytes);
    }

    /// A write of these bytes, over that connection and in that chunk.
    pub(crate) fn write(&mut self, cid: u16, chunk: u16, header: &[u8], data: &[u8]) {
        let message = RdmaWrite::new(header.len() as u16);
        let bytes = [data, header, message.as_bytes()].concat();
        self.request(cid, chunk, &bytes, 0, data.len() + header.len());
    }

    /// A read of so many bytes.
    pub(crate) fn read(&mut self, cid: u16, chunk: u16, header: &[u8], len: usize) {
        let message = RdmaRead::new(header.len() as u16, MsgFlags::empty(), 1);
        let dest = self.mr.addr + (DATA_AT + usize::from(chunk % 16) * PIECE) as u64;
        let dest = SgDesc::new(dest, self.mr.rkey.0, len as u32);
        let bytes = [header, message.as_bytes(), dest.as_bytes()].concat();
        self.request(cid, chunk, &bytes, len, len + header.len());
    }

    /// What the last read in a chunk has brought.
    pub(crate) fn data(&self, chunk: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pages
            .read(DATA_AT + usize::from(chunk % 16) * PIECE, &mut bytes)
            .unwrap();
        bytes
    }

    /// Announces what lies in a chunk, though the server may have its key.
    pub(crate) fn announce(&mut self, cid: u16, chunk: u16) {
        let Some(rsp) = self.rsp else { return };
        let imm = Imm::IoReq(rsp.layout().unwrap().pack(chunk.into(), 0)).encode();
        self.send(cid, SendOp::WriteWithImm(RemoteAddr::default(), imm), &[]);
    }

    /// Answers all questions for a sign of life.
    pub(crate) fn answer_beats(&mut self) {
        let asked = self
            .messages(0)
            .iter()
            .filter(|(imm, _)| Imm::decode(*imm) == Ok(Imm::HbMsg))
            .count();
        for _ in 0..asked {
            self.send(0, SendOp::WriteWithImm(RemoteAddr::default(), Imm::HbAck.encode()), &[]);
        }
    }

    /// Whether a connection stands.
    pub(crate) fn stands(&self, cid: u16) -> bool {
        self.conns.get(&cid).is_some_and(|conn| conn.stands)
    }

    /// Connections that were begun.
    pub(crate) fn has(&self) -> u16 {
        self.conns.len() as u16
    }

    /// Uses a key that there is not.
    pub(crate) fn violate(&mut self, cid: u16) {
        let remote = RemoteAddr {
            addr: 0x1000,
            rkey: RKey(0x1234_5678),
        };
        self.send(cid, SendOp::Write(remote), b"evil");
    }

    /// Asks whether the server lives, on any connection: on those for I/O that is an error.
    pub(crate) fn beat(&mut self, cid: u16) {
        self.send(
            cid,
            SendOp::WriteWithImm(RemoteAddr::default(), Imm::HbMsg.encode()),
            &[],
        );
    }

    /// Answers that have come, and the connections that they came over; new keys are taken over.
    pub(crate) fn answers(&mut self) -> Vec<(u16, IoReply)> {
        let cids: Vec<u16> = self.conns.keys().copied().collect();
        let mut replies = Vec::new();
        for cid in cids {
            for (imm, bytes) in self.messages(cid) {
                let Ok(Imm::IoRsp(reply)) = Imm::decode(imm) else {
                    continue;
                };
                if self.rsp.unwrap().flags().contains(MsgFlags::NEW_RKEY) {
                    let message = RkeyRsp::parse(&bytes).unwrap();
                    assert_eq!(u32::from(message.buf_id.get()), reply.msg_id);
                    self.chunks[reply.msg_id as usize].rkey = message.rkey.get();
                }
                replies.push((cid, reply));
            }
        }
        replies
    }

    /// Ends one connection.
    pub(crate) fn disconnect(&mut self, cid: u16) {
        if let Some(conn) = self.conns.get(&cid) {
            self.fabric.cm_disconnect(conn.cm);
        }
    }

    /// Forgets everything, to begin anew with another path of the same session.
    pub(crate) fn forget(&mut self) {
        for conn in core::mem::take(&mut self.conns).into_values() {
            self.fabric.cm_destroy(conn.cm);
            self.fabric.destroy_qp(conn.qp);
        }
        self.wcs.clear();
        self.chunks.clear();
        self.refused.clear();
        (self.rsp, self.broken) = (None, false);
        let [first, ..] = &mut self.path.0;
        *first = first.wrapping_add(1);
    }

    pub(crate) fn tick(&mut self, now: Instant) {
        self.fabric.set_now(now);
        devices::timers(self.fabric.ports(), now);
    }
}

fn is_received(wc: &Completion) -> bool {
    wc.is_ok() && [WcOpcode::Recv, WcOpcode::RecvRdmaWithImm].contains(&wc.opcode)
}
