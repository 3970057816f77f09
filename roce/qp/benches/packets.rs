//! Cost of a packet in the engine without the copy of its payload.

use std::{collections::VecDeque, hint::black_box, sync::Arc};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use roce_bth::{Packet, Qpn, RnrTimer};
use roce_qp::{
    CompletionQueue, Counters, Ctx, FreePaces, Poll, QpConfig, QueuePair, TxKind, TxSink, Window, WindowConfig,
};
use roce_verbs::mem::{MemoryTable, PdHandle, Region};
use roce_verbs::{
    AccessFlags, AddressVector, DeviceLimits, Instant, Mtu, Payload, QpAttr, QpCaps, QpType, RemoteAddr, SendFlags,
    SendOp, SendWr, Sge,
};

/// Packets side by side in one buffer, reused.
struct Slab {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    at: usize,
    pending: usize,
}

impl TxSink for Slab {
    fn reserve(&mut self, _: TxKind, len: usize) -> Option<&mut [u8]> {
        self.pending = len;
        self.bytes.get_mut(self.at..self.at + len)
    }

    fn commit(&mut self) {
        self.at += self.pending + 4;
        self.ends.push(self.at);
    }
}

struct End {
    qp: QueuePair,
    window: Window,
    counters: Counters,
    slab: Slab,
    cq: Arc<CompletionQueue>,
}

struct World {
    mem: MemoryTable,
    pd: PdHandle,
    region: Arc<Region>,
}

const LEN: usize = 1 << 20;

impl World {
    fn new() -> Self {
        let mem = MemoryTable::new([1; 32], &DeviceLimits::software(1));
        let pd = mem.alloc_pd().unwrap();
        let all = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let region = mem.alloc_region(pd, 4 * LEN, all).unwrap();
        Self { mem, pd, region }
    }

    fn end(&self, qpn: u32, peer: u32, mtu: Mtu) -> End {
        let cq = CompletionQueue::new(1, 10_000, None);
        let qp = QueuePair::new(QpConfig {
            qpn: Qpn::new(qpn),
            pd: self.pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            max_msg_size: 1 << 31,
            port_mtu: Mtu::B4096,
            srq: None,
            xrcd: None,
        });
        let open = WindowConfig {
            initial: 4 * LEN,
            min: 4 * LEN,
            max: 4 * LEN,
        };
        let mut end = End {
            qp: qp.unwrap(),
            window: Window::new(open),
            counters: Counters::default(),
            slab: Slab {
                bytes: vec![0; 2 * LEN],
                ends: Vec::new(),
                at: 0,
                pending: 0,
            },
            cq,
        };
        let addr = "10.0.0.1".parse().unwrap();
        let way = QpAttr {
            access: Some(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE),
            max_dest_rd_atomic: Some(16),
            max_rd_atomic: Some(16),
            min_rnr_timer: Some(RnrTimer::new(1)),
            ..QpAttr::to_rts(AddressVector::new(addr, addr), mtu, Qpn::new(peer))
        };
        for attr in way.steps(QpType::Rc) {
            self.with(&mut end, |qp, ctx, _| qp.modify(ctx, &attr).unwrap());
        }
        end
    }

    fn with<R>(&self, end: &mut End, f: impl FnOnce(&mut QueuePair, &mut Ctx<'_>, &mut Slab) -> R) -> R {
        let mut ctx = Ctx {
            now: Instant::from_nanos(1),
            mem: &self.mem,
            window: &mut end.window,
            paces: &mut FreePaces::new(None),
            events: &mut VecDeque::new(),
            counters: &mut end.counters,
        };
        f(&mut end.qp, &mut ctx, &mut end.slab)
    }

    fn post(&self, end: &mut End, op: SendOp, len: usize) {
        let sges = [Sge {
            addr: self.region.addr(),
            length: len as u32,
            lkey: self.region.lkey(),
        }];
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::empty(),
            payload: Payload::Sges(&sges),
        };
        self.with(end, |qp, ctx, _| {
            qp.post_send(ctx, &wr, roce_verbs::Target::Peer, usize::MAX).unwrap()
        });
    }

    /// Sends until idle; the packets are in the slab.
    fn send(&self, end: &mut End) {
        end.slab.at = 0;
        end.slab.ends.clear();
        while self.with(end, |qp, ctx, slab| qp.poll_transmit(ctx, slab)) == Poll::More {}
    }

    /// Hands everything in the slab of `from` to `to`.
    fn deliver(&self, from: &mut End, to: &mut End) {
        let (bytes, ends) = (&from.slab.bytes, &from.slab.ends);
        let mut start = 0;
        self.with(to, |qp, ctx, _| {
            for end in ends {
                let packet = Packet::parse(&bytes[start..*end]).unwrap();
                qp.handle_packet(ctx, &packet);
                start = *end;
            }
        });
    }
}

fn transfer(c: &mut Criterion) {
    let world = World::new();
    let remote = RemoteAddr {
        addr: world.region.addr() + 2 * LEN as u64,
        rkey: world.region.rkey(),
    };
    let mut group = c.benchmark_group("1 MiB through the engine, both sides, in packets");
    for (name, op, mtu) in [
        ("write 4096", SendOp::Write(remote), Mtu::B4096),
        ("write 1024", SendOp::Write(remote), Mtu::B1024),
        ("read 4096", SendOp::Read(remote), Mtu::B4096),
    ] {
        let (mut a, mut b) = (world.end(1, 2, mtu), world.end(2, 1, mtu));
        let mut out = Vec::new();
        group.throughput(Throughput::Elements((LEN / mtu.bytes()) as u64));
        group.bench_function(name, |bench| {
            bench.iter(|| {
                world.post(&mut a, op, LEN);
                out.clear();
                while a.cq.poll(&mut out, 1).unwrap() == 0 {
                    world.send(&mut a);
                    world.deliver(&mut a, &mut b);
                    world.send(&mut b);
                    world.deliver(&mut b, &mut a);
                }
            });
        });
    }
    group.throughput(Throughput::Elements((LEN / 4096) as u64));
    group.bench_function("the two copies alone, 4096", |bench| {
        let (src, mut slab, mut dst) = (vec![1u8; LEN], vec![0u8; LEN], vec![0u8; LEN]);
        bench.iter(|| {
            for (s, d) in src.chunks(4096).zip(slab.chunks_mut(4096)) {
                d.copy_from_slice(s);
            }
            for (s, d) in black_box(&slab).chunks(4096).zip(dst.chunks_mut(4096)) {
                d.copy_from_slice(s);
            }
            black_box(&mut dst);
        });
    });
    group.finish();
}

fn messages(c: &mut Criterion) {
    let world = World::new();
    let remote = RemoteAddr {
        addr: world.region.addr() + 2 * LEN as u64,
        rkey: world.region.rkey(),
    };
    let (mut a, mut b) = (world.end(1, 2, Mtu::B4096), world.end(2, 1, Mtu::B4096));
    let mut out = Vec::new();
    let mut group = c.benchmark_group("messages");
    group.throughput(Throughput::Elements(64));
    group.bench_function("write of 64 bytes, 64 at a time", |bench| {
        bench.iter(|| {
            for _ in 0..64 {
                world.post(&mut a, SendOp::Write(remote), 64);
            }
            world.send(&mut a);
            world.deliver(&mut a, &mut b);
            world.send(&mut b);
            world.deliver(&mut b, &mut a);
            out.clear();
            assert_eq!(a.cq.poll(&mut out, 64).unwrap(), 64);
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2)).warm_up_time(std::time::Duration::from_millis(500));
    targets = transfer, messages
}
criterion_main!(benches);
