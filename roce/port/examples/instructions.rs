//! Operations between two ports in memory, for `cargo xtask bench` to count instructions of: `instructions OPERATION BYTES COUNT`.
//! `bare` copies payloads twice, as the two ends do, and makes two ICRCs of each packet.

use std::{
    hint::black_box,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_icrc::Flow;
use roce_mem::{MemoryTable, Region};
use roce_port::{Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::{
    AccessFlags, AddressVector, Instant, Mtu, Payload, QpCaps, QpType, Qpn, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Sge, ToRts,
};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ);
/// Operations outstanding.
const DEPTH: u32 = 16;

struct End {
    addr: IpAddr,
    port: Port,
    cq: Arc<CompletionQueue>,
    region: Arc<Region>,
    batch: TxBatch,
    qpn: Qpn,
}

impl End {
    fn new(last: u8) -> Self {
        let addr = IpAddr::from([192, 0, 2, last]);
        let config = PortConfig::new(vec![addr], Mtu::B4096, u64::from(last));
        let mem = Arc::new(MemoryTable::new([last; 32], &config.limits));
        let pd = mem.alloc_pd().expect("a protection domain");
        let cq = CompletionQueue::new(0, 4 * DEPTH, None);
        let mut port = Port::new(config, mem.clone(), [last; 32]);
        let init = QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        };
        let qpn = port.create_qp(init).expect("a queue pair");
        Self {
            addr,
            port,
            cq,
            region: mem.alloc_region(pd, 1 << 20, RIGHTS).expect("memory"),
            batch: TxBatch::new(TxConfig::default()),
            qpn,
        }
    }

    fn raise(&mut self, peer: &Self) {
        let way = ToRts {
            access: RIGHTS,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            ..ToRts::new(AddressVector::new(self.addr, peer.addr), Mtu::B4096, peer.qpn)
        };
        for attr in way.steps(QpType::Rc) {
            self.port.modify_qp(NOW, self.qpn, &attr).expect("a transition");
        }
    }

    fn sge(&self, bytes: u32) -> [Sge; 1] {
        [Sge {
            addr: self.region.addr(),
            length: bytes,
            lkey: self.region.lkey(),
        }]
    }

    fn post(&mut self, op: SendOp, bytes: u32) {
        let sges = self.sge(bytes);
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.port.post_send(NOW, self.qpn, &[wr]).expect("posting");
    }

    fn post_recv(&mut self) {
        let sges = self.sge(1 << 20);
        let wr = RecvWr { wr_id: 0, sges: &sges };
        self.port.post_recv(NOW, self.qpn, &[wr]).expect("posting");
    }

    /// Hands everything that it has to send to the other end, as buffers of a socket with GRO.
    fn send_to(&mut self, other: &mut Self) {
        loop {
            let more = self.port.poll_transmit(NOW, &mut self.batch);
            for train in self.batch.trains() {
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                other.port.handle_datagram(NOW, &meta, train.bytes);
            }
            self.batch.clear();
            if !more {
                return;
            }
        }
    }
}

const NOW: Instant = Instant::from_nanos(1);

fn operations(operation: &str, bytes: u32, count: u32) {
    let (mut a, mut b) = (End::new(1), End::new(2));
    a.raise(&b);
    b.raise(&a);
    let remote = RemoteAddr {
        addr: b.region.addr(),
        rkey: b.region.rkey(),
    };
    let op = match operation {
        "write" => SendOp::Write(remote),
        "read" => SendOp::Read(remote),
        "send" => SendOp::Send,
        other => panic!("{other}: write, read, send or bare"),
    };
    let mut out = Vec::new();
    let mut done = 0;
    while done < count {
        let turn = DEPTH.min(count - done);
        for _ in 0..turn {
            if op == SendOp::Send {
                b.post_recv();
            }
            a.post(op, bytes);
        }
        let mut completed = 0;
        while completed < turn {
            a.send_to(&mut b);
            b.send_to(&mut a);
            out.clear();
            completed += a.cq.poll(&mut out, turn as usize).expect("completions") as u32;
        }
        b.cq.poll(&mut out, turn as usize).expect("completions");
        done += turn;
    }
}

fn bare(bytes: u32, count: u32) {
    let [from, to] = [([192, 0, 2, 1], 50_000), ([192, 0, 2, 2], 4791)].map(SocketAddr::from);
    let flow = Flow::try_from((from, to)).expect("one family");
    let payload = vec![7u8; bytes.min(4096) as usize];
    // BTH and RETH before it, the ICRC behind.
    let mut packet = vec![0u8; 28 + payload.len() + 4];
    let mut landed = payload.clone();
    for _ in 0..count * bytes.div_ceil(4096) {
        packet[28..28 + payload.len()].copy_from_slice(black_box(&payload));
        flow.seal(0, &mut packet);
        assert!(flow.verify(0, black_box(&packet)));
        landed.copy_from_slice(&packet[28..28 + payload.len()]);
        black_box(&mut landed);
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [operation, bytes, count] = &words[..] else {
        panic!("usage: instructions OPERATION BYTES COUNT");
    };
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("{text} is no number"));
    match &**operation {
        "bare" => bare(number(bytes), number(count)),
        other => operations(other, number(bytes), number(count)),
    }
}
