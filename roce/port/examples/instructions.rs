//! Operations between two ports in memory, for `cargo xtask bench` to count instructions of: `instructions OPERATION BYTES COUNT`.
//! `bare` copies payloads twice, as the two ends do, and makes two ICRCs of each packet.

mod ends;

use std::{hint::black_box, net::SocketAddr, sync::Arc};

use ends::{End, NOW};
use roce_icrc::Flow;
use roce_verbs::mem::Region;
use roce_verbs::{
    AccessFlags, AddressVector, Mtu, Payload, QpAttr, QpType, Qpn, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ);
/// Operations outstanding.
const DEPTH: u32 = 16;

/// End with a queue pair and memory.
struct Host {
    end: End,
    region: Arc<Region>,
    qpn: Qpn,
}

impl Host {
    fn new(last: u8) -> Self {
        let mut end = End::new(last, Mtu::B4096, 4 * DEPTH);
        end.init.signal_all = true;
        let qpn = end.port.create_qp(end.init.clone()).expect("a queue pair");
        let region = end.mem.alloc_region(end.init.pd, 1 << 20, RIGHTS).expect("memory");
        Self { end, region, qpn }
    }

    fn raise(&mut self, peer: &Self) {
        let way = QpAttr {
            access: Some(RIGHTS),
            max_rd_atomic: Some(16),
            max_dest_rd_atomic: Some(16),
            ..QpAttr::to_rts(AddressVector::new(self.end.addr, peer.end.addr), Mtu::B4096, peer.qpn)
        };
        for attr in way.steps(QpType::Rc) {
            self.end.port.modify_qp(NOW, self.qpn, &attr).expect("a transition");
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
        self.end.port.post_send(NOW, self.qpn, &[wr]).expect("posting");
    }

    fn post_recv(&mut self) {
        let sges = self.sge(1 << 20);
        let wr = RecvWr { wr_id: 0, sges: &sges };
        self.end.port.post_recv(NOW, self.qpn, &[wr]).expect("posting");
    }
}

fn operations(operation: &str, bytes: u32, count: u32) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
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
            a.end.send_to(&mut b.end);
            b.end.send_to(&mut a.end);
            out.clear();
            completed += a.end.cq.poll(&mut out, turn as usize).expect("completions") as u32;
        }
        b.end.cq.poll(&mut out, turn as usize).expect("completions");
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
