//! The server's state machine over the software transport, with a client by hand; a wire between them that the test holds.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use roce_port::fabric::{Fabric, FabricConfig, Ports, Several, Usage};
use roce_port::{Port, PortConfig, RxMeta, TxBatch, TxConfig};
use roce_verbs::mem::{MemoryTable, Pages};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Instant, Mtu, Payload, QpCaps, RKey, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Sge, WcOpcode,
    provider::{CmKind, CmRef, ConnParams, CqId, DeviceIx, Event, MrInfo, PdId, Provider, QpId, QpSpec, Registration},
};
use rtrs::{
    cx::Cx,
    proto::{
        ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, SgDesc, Uuid, info::ChunkAddr,
    },
    server::{
        Server, ServerConfig,
        request::{Output, Request},
    },
};
use zerocopy::IntoBytes;

const RECV_BYTES: usize = 4096;
const RECVS: usize = 16;
/// Where the client's reads go to, and where its sends are put together.
const DATA_AT: usize = RECVS * RECV_BYTES;
const SEND_AT: usize = DATA_AT + (64 << 10);

fn fabric(last: u8, config: FabricConfig) -> Fabric<Several> {
    let ip = IpAddr::from([192, 0, 2, last]);
    let port = PortConfig::new(vec![ip], Mtu::B1024, last.into());
    let mem = Arc::new(MemoryTable::new([last; 32], &port.limits));
    let one = Several::new(vec![(Port::new(port, mem.clone(), [last; 32]), mem, vec![ip])]);
    Fabric::new(one, config, vec![(DeviceLimits::software(last.into()), vec![ip])])
}

/// Both ends, and the wire.
struct Bed {
    now: Instant,
    server: Server,
    host: Fabric<Several>,
    outputs: Vec<Output>,
    client: Client,
}

struct Client {
    fabric: Fabric<Several>,
    pages: Arc<Pages>,
    pd: PdId,
    cq: CqId,
    mr: MrInfo,
    conns: Vec<(CmRef, QpId)>,
    events: Vec<Event>,
    wcs: Vec<(QpId, Completion)>,
    chunks: Vec<ChunkAddr>,
    rsp: Option<ConnRsp>,
}

fn carry(now: Instant, from: &mut Fabric<Several>, to: &mut Fabric<Several>, batch: &mut TxBatch) -> bool {
    let mut moved = false;
    loop {
        let more = from.ports().port(0).poll_transmit(now, batch);
        for train in batch.trains() {
            moved = true;
            let meta = RxMeta {
                segment_len: train.segment_len,
                ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
            };
            to.ports().port(0).handle_datagram(now, &meta, train.bytes);
        }
        batch.clear();
        if !more {
            return moved;
        }
    }
}

impl Client {
    fn new() -> Self {
        let mut fabric = fabric(2, FabricConfig::default());
        let pages = Pages::allocate(SEND_AT + (64 << 10)).unwrap();
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
            pages,
            pd,
            cq,
            conns: Vec::new(),
            events: Vec::new(),
            wcs: Vec::new(),
            chunks: Vec::new(),
            rsp: None,
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

    fn connect(&mut self, cid: u16) {
        let spec = QpSpec {
            pd: self.pd,
            cq: self.cq,
            caps: QpCaps::default(),
            signal_all: true,
        };
        let qp = self.fabric.create_qp(&spec).unwrap();
        for i in 0..RECVS as u64 {
            self.post_recv(qp, i);
        }
        let to = SocketAddr::from(([192, 0, 2, 1], 1234));
        let cm = self.fabric.cm_resolve(None, to).unwrap();
        let request = ConnReq::new(cid, 2, 1, Uuid([1; 16]), Uuid([2; 16]), true);
        let params = ConnParams {
            private_data: request.as_bytes().to_vec(),
            ..ConnParams::default()
        };
        self.fabric.cm_connect(cm, qp, &params).unwrap();
        self.conns.push((cm, qp));
    }

    fn send(&mut self, cid: usize, op: SendOp, bytes: &[u8]) {
        self.pages.write(SEND_AT, bytes).unwrap();
        let sges = [self.sge(SEND_AT, bytes.len())];
        let wr = SendWr {
            wr_id: 100,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(if bytes.is_empty() { &[] } else { &sges }),
        };
        self.fabric.post_send(self.conns[cid].1, &[wr]).unwrap();
    }

    /// Messages that have come over a connection: immediate value, and bytes. They are taken.
    fn messages(&mut self, cid: usize) -> Vec<(u32, Vec<u8>)> {
        let qp = self.conns[cid].1;
        let received = |wc: &Completion| [WcOpcode::Recv, WcOpcode::RecvRdmaWithImm].contains(&wc.opcode) && wc.is_ok();
        let mine = self.wcs.extract_if(.., |(of, wc)| *of == qp && received(wc));
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
    fn request(&mut self, chunk: u16, bytes: &[u8], at: u32, offset: u32) {
        let to = self.chunks[usize::from(chunk)];
        let remote = RemoteAddr {
            addr: to.addr + u64::from(at),
            rkey: RKey(to.rkey),
        };
        let layout = self.rsp.unwrap().layout().unwrap();
        let imm = Imm::IoReq(layout.pack(chunk.into(), offset)).encode();
        self.send(1, SendOp::WriteWithImm(remote, imm), bytes);
    }
}

impl Bed {
    fn new(always_invalidate: bool, keys: FabricConfig) -> Self {
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut host = fabric(1, keys);
        host.set_now(now);
        let config = ServerConfig {
            addr: [192, 0, 2, 1].into(),
            queue_depth: 8,
            max_chunk_size: 16 << 10,
            always_invalidate,
            ..ServerConfig::default()
        };
        let mut client = Client::new();
        client.fabric.set_now(now);
        let (server, _) = Server::listen(&mut cx(now, &mut host), config).unwrap();
        Self {
            now,
            server,
            host,
            outputs: Vec::new(),
            client,
        }
    }

    /// Everything goes over and is worked off, until nothing happens any more.
    fn settle(&mut self) {
        let mut batch = TxBatch::new(TxConfig::default());
        loop {
            let there = carry(self.now, &mut self.client.fabric, &mut self.host, &mut batch);
            let worked = self.turn();
            let back = carry(self.now, &mut self.host, &mut self.client.fabric, &mut batch);
            let before = (self.client.wcs.len(), self.client.events.len());
            self.client.fabric.poll_completions(&mut self.client.wcs, 1000).unwrap();
            self.client
                .events
                .extend(core::iter::from_fn(|| self.client.fabric.poll_event()));
            let heard = before != (self.client.wcs.len(), self.client.events.len());
            if !(there || worked || back || heard) {
                return;
            }
        }
    }

    /// A turn of the server's loop. True: something happened.
    fn turn(&mut self) -> bool {
        let mut wcs = Vec::new();
        self.host.poll_completions(&mut wcs, 1000).unwrap();
        for (qp, wc) in &wcs {
            assert!(self.server.completion(&mut cx(self.now, &mut self.host), *qp, wc));
        }
        let event = if wcs.is_empty() { self.host.poll_event() } else { None };
        if let Some(event) = &event {
            self.server.event(&mut cx(self.now, &mut self.host), event);
        }
        let mut told = false;
        while let Some(output) = self.server.poll_output() {
            told = true;
            match output {
                Output::Allocate { ticket, bytes } => {
                    let mut cx = cx(self.now, &mut self.host);
                    self.server.ready(&mut cx, ticket, Pages::allocate(bytes));
                }
                output => self.outputs.push(output),
            }
        }
        self.server.end_batch(&mut cx(self.now, &mut self.host));
        told || event.is_some() || !wcs.is_empty()
    }

    fn open(&mut self) {
        for cid in 0..2 {
            self.client.connect(cid);
            self.settle();
            let up = self.client.events.drain(..).find_map(|event| match event {
                Event::Cm {
                    kind: CmKind::Established { private_data },
                    ..
                } => Some(private_data),
                _ => None,
            });
            self.client.rsp = Some(*ConnRsp::parse(&up.expect("a connection")).unwrap());
        }
        self.client
            .send(0, SendOp::Send, InfoReq::new("s1").unwrap().as_bytes());
        self.settle();
        let (_, bytes) = self.client.messages(0).pop().expect("session information");
        let layout = self.client.rsp.unwrap().layout().unwrap();
        self.client.chunks = InfoRsp::parse(&bytes).unwrap().chunks(&layout).unwrap();
    }

    fn request(&mut self) -> Request {
        self.settle();
        let requests = self.outputs.extract_if(.., |o| matches!(o, Output::Request(_)));
        let mut requests: Vec<Output> = requests.collect();
        assert_eq!(requests.len(), 1);
        let Some(Output::Request(request)) = requests.pop() else {
            unreachable!();
        };
        request
    }

    /// Answers well; the client takes the new key if there is one.
    fn answer(&mut self, request: &Request) {
        self.server.answer(&mut cx(self.now, &mut self.host), request.key, 0);
        self.settle();
        let answers = self.client.messages(1);
        let [(imm, bytes)] = &answers[..] else {
            panic!("{answers:?}");
        };
        let Ok(Imm::IoRsp(reply)) = Imm::decode(*imm) else {
            panic!("{imm:#x}");
        };
        assert_eq!((reply.msg_id, reply.errno), (request.key.chunk.into(), 0));
        if self.client.rsp.unwrap().flags().contains(MsgFlags::NEW_RKEY) {
            let key = RkeyRsp::parse(bytes).unwrap().rkey.get();
            self.client.chunks[usize::from(request.key.chunk)].rkey = key;
        }
    }

    fn write_and_read(&mut self, round: u8) {
        let header = b"where";
        let message = RdmaWrite::new(header.len() as u16);
        let bytes = [&[round; 3000][..], header, message.as_bytes()].concat();
        self.client.request(3, &bytes, 0, 3000 + header.len() as u32);
        let request = self.request();
        assert_eq!((&request.header[..], request.data_len), (&header[..], 3000));
        let mut data = vec![0; 3000];
        let memory = self.server.memory(request.key.session).unwrap();
        memory.read(request.data_offset, &mut data).unwrap();
        assert!(data.iter().all(|b| *b == round));
        self.answer(&request);

        let desc = SgDesc::new(self.client.mr.addr + DATA_AT as u64, self.client.mr.rkey.0, 5000);
        let message = RdmaRead::new(header.len() as u16, MsgFlags::empty(), 1);
        let bytes = [header, message.as_bytes(), desc.as_bytes()].concat();
        self.client.request(5, &bytes, 5000, 5000 + header.len() as u32);
        let request = self.request();
        self.server.write_data(request.key, 0, &[round ^ 0xff; 5000]).unwrap();
        self.answer(&request);
        let mut data = vec![0; 5000];
        self.client.pages.read(DATA_AT, &mut data).unwrap();
        assert!(data.iter().all(|b| *b == round ^ 0xff));
    }

    /// What is told at the end, and that nothing is left.
    fn ends(&mut self, why: &str) {
        self.settle();
        let told: Vec<_> = self.outputs.iter().map(|o| format!("{o:?}")).collect();
        let [.., Output::SessionClosed { why: closed, .. }, Output::Free(_)] = &self.outputs[..] else {
            panic!("{told:?}");
        };
        assert_eq!(closed.to_string(), why);
        assert!(self.client.events.iter().any(|event| {
            matches!(
                event,
                Event::Cm {
                    kind: CmKind::Disconnected,
                    ..
                }
            )
        }));
        self.server.stop(&mut cx(self.now, &mut self.host));
        assert!(self.server.is_idle());
        assert_eq!(self.host.usage(), Usage::default());
    }
}

/// The server throws no dice. What has no size leaks nothing.
fn cx(now: Instant, provider: &mut Fabric<Several>) -> Cx<'_> {
    fn dice(_: &mut [u8]) {
        panic!("the server throws no dice");
    }
    Cx {
        now,
        provider,
        random: Box::leak(Box::new(dice)),
    }
}

fn all_keys() -> [FabricConfig; 3] {
    let instant = FabricConfig::default();
    let queued = FabricConfig {
        instant_keys: false,
        ..instant
    };
    let windows = FabricConfig {
        fast_registration: false,
        ..queued
    };
    [instant, queued, windows]
}

#[test]
fn data_goes_both_ways_with_each_kind_of_keys() {
    for keys in all_keys() {
        for always_invalidate in [true, false] {
            let mut bed = Bed::new(always_invalidate, keys);
            bed.open();
            for round in 0..50 {
                bed.write_and_read(round);
            }
            let service = bed.client.conns[0].0;
            bed.client.fabric.cm_disconnect(service);
            bed.ends("the peer disconnected");
        }
    }
}

#[test]
fn the_server_closes_a_session_when_its_requests_are_answered() {
    let mut bed = Bed::new(true, FabricConfig::default());
    bed.open();
    bed.write_and_read(1);
    bed.client.request(0, RdmaWrite::new(0).as_bytes(), 0, 0);
    let request = bed.request();
    bed.server
        .close_session(&mut cx(bed.now, &mut bed.host), request.key.session);
    bed.settle();
    assert_eq!(bed.server.sessions()[0].requests, 1);
    bed.server.answer(&mut cx(bed.now, &mut bed.host), request.key, 0);
    bed.ends("closed");
}

#[test]
fn a_chunk_that_is_worked_on_is_out_of_reach() {
    for keys in all_keys() {
        let mut bed = Bed::new(true, keys);
        bed.open();
        let bytes = [&b"data"[..], RdmaWrite::new(0).as_bytes()].concat();
        bed.client.request(2, &bytes, 0, 4);
        let request = bed.request();
        let to = bed.client.chunks[2];
        let remote = RemoteAddr {
            addr: to.addr,
            rkey: RKey(to.rkey),
        };
        bed.client.send(1, SendOp::Write(remote), b"evil");
        bed.settle();
        let mut data = [0; 4];
        let memory = bed.server.memory(request.key.session).unwrap();
        memory.read(request.data_offset, &mut data).unwrap();
        assert_eq!(&data, b"data");
        bed.server.answer(&mut cx(bed.now, &mut bed.host), request.key, 0);
        // The queue pair has failed, and nothing says why: the server gives the client a moment to take leave.
        if !bed.server.sessions().is_empty() {
            bed.now = bed.now + Duration::from_secs(3);
            bed.host.set_now(bed.now);
            bed.client.fabric.set_now(bed.now);
            bed.server.timeout(&mut cx(bed.now, &mut bed.host));
        }
        bed.ends("the peer used a key that it had no right to");
        assert_eq!(bed.server.counters().access_errors, 1, "{keys:?}");
    }
}
