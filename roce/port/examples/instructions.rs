//! Operations between two ports in memory, for `cargo xtask bench` to count instructions of:
//! `instructions OPERATION BYTES COUNT [QUEUE_PAIRS DEPTH]`.
//!
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
/// Operations outstanding on each queue pair.
const DEPTH: u32 = 16;

/// End with queue pairs and memory.
struct Host {
    end: End,
    region: Arc<Region>,
    qpns: Vec<Qpn>,
}

impl Host {
    fn new(last: u8, queue_pairs: u32, depth: u32) -> Self {
        let mut end = End::new(last, Mtu::B4096, 4 * queue_pairs * depth);
        end.init.signal_all = true;
        (end.init.caps.max_send_wr, end.init.caps.max_recv_wr) = (depth, depth);
        let qpns = (0..queue_pairs).map(|_| end.port.create_qp(end.init.clone()).expect("a queue pair"));
        let qpns = qpns.collect();
        let region = end.mem.alloc_region(end.init.pd, 1 << 20, RIGHTS).expect("memory");
        Self { end, region, qpns }
    }

    fn raise(&mut self, peer: &Self) {
        for (qpn, theirs) in self.qpns.iter().zip(&peer.qpns) {
            let way = QpAttr {
                access: Some(RIGHTS),
                max_rd_atomic: Some(16),
                max_dest_rd_atomic: Some(16),
                ..QpAttr::to_rts(AddressVector::new(self.end.addr, peer.end.addr), Mtu::B4096, *theirs)
            };
            for attr in way.steps(QpType::Rc) {
                self.end.port.modify_qp(NOW, *qpn, &attr).expect("a transition");
            }
        }
    }

    fn sge(&self, bytes: u32) -> [Sge; 1] {
        [Sge {
            addr: self.region.addr(),
            length: bytes,
            lkey: self.region.lkey(),
        }]
    }

    fn post(&mut self, qpn: Qpn, op: SendOp, bytes: u32) {
        let sges = self.sge(bytes);
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.end.port.post_send(NOW, qpn, &[wr]).expect("posting");
    }

    fn post_recv(&mut self, qpn: Qpn) {
        let sges = self.sge(1 << 20);
        let wr = RecvWr { wr_id: 0, sges: &sges };
        self.end.port.post_recv(NOW, qpn, &[wr]).expect("posting");
    }
}

fn operations(operation: &str, bytes: u32, count: u32, [queue_pairs, depth]: [u32; 2]) {
    let [mut a, mut b] = [1, 2].map(|last| Host::new(last, queue_pairs, depth));
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
        let turn = (queue_pairs * depth).min(count - done);
        for i in 0..turn as usize {
            let at = i / depth as usize;
            if op == SendOp::Send {
                b.post_recv(b.qpns[at]);
            }
            a.post(a.qpns[at], op, bytes);
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
    let number = |text: &String| text.parse().unwrap_or_else(|_| panic!("{text} is no number"));
    let (operation, bytes, count, ends) = match &words[..] {
        [operation, bytes, count] => (operation, bytes, count, [1, DEPTH]),
        [operation, bytes, count, queue_pairs, depth] => (operation, bytes, count, [queue_pairs, depth].map(number)),
        _ => panic!("usage: instructions OPERATION BYTES COUNT [QUEUE_PAIRS DEPTH]"),
    };
    match &**operation {
        "bare" => bare(number(bytes), number(count)),
        other => operations(other, number(bytes), number(count), ends),
    }
}
