//! Memory of an idle connected queue pair.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::VecDeque,
    sync::atomic::{AtomicIsize, Ordering},
};

use roce_bth::{Packet, Qpn, RnrTimer};
use roce_qp::{
    CompletionQueue, Counters, Ctx, FreePaces, Poll, QpConfig, QueuePair, TxKind, TxSink, Window, WindowConfig,
};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    AccessFlags, AddressVector, DeviceLimits, Instant, Mtu, Payload, QpAttr, QpCaps, QpType, RemoteAddr, SendFlags,
    SendOp, SendWr, Sge,
};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static CALLS: AtomicIsize = AtomicIsize::new(0);

// SAFETY: passes everything on to the system's allocator and only counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Hands packets over through one buffer.
struct OneSlot {
    buf: Vec<u8>,
    len: usize,
    full: bool,
}

impl TxSink for OneSlot {
    fn reserve(&mut self, _: TxKind, len: usize) -> Option<&mut [u8]> {
        if self.full {
            return None;
        }
        self.len = len;
        Some(&mut self.buf[..len])
    }

    fn commit(&mut self) {
        self.full = true;
    }
}

struct End {
    qp: QueuePair,
    window: Window,
}

struct World {
    mem: MemoryTable,
    counters: Counters,
    slot: OneSlot,
    now: Instant,
}

impl World {
    fn with<R>(&mut self, end: &mut End, f: impl FnOnce(&mut QueuePair, &mut Ctx<'_>, &mut OneSlot) -> R) -> R {
        let mut ctx = Ctx {
            now: self.now,
            mem: &self.mem,
            window: &mut end.window,
            paces: &mut FreePaces::default(),
            events: &mut VecDeque::new(),
            counters: &mut self.counters,
        };
        f(&mut end.qp, &mut ctx, &mut self.slot)
    }

    /// Carries packets until both have nothing more to send. Allocates nothing itself.
    fn settle(&mut self, a: &mut End, b: &mut End) {
        let mut quiet = 0;
        let (mut from, mut to) = (a, b);
        while quiet < 4 {
            let poll = self.with(from, |qp, ctx, slot| qp.poll_transmit(ctx, slot));
            if self.slot.full {
                quiet = 0;
                self.slot.full = false;
                let len = self.slot.len;
                self.slot.buf[len..len + 4].fill(0);
                let bytes = std::mem::take(&mut self.slot.buf);
                let packet = Packet::parse(&bytes[..len + 4]).unwrap();
                self.with(to, |qp, ctx, _| qp.handle_packet(ctx, &packet));
                self.slot.buf = bytes;
            } else {
                quiet += 1;
            }
            if poll != Poll::More {
                std::mem::swap(&mut from, &mut to);
            }
        }
    }
}

fn connect(world: &mut World, end: &mut End, peer: u32) {
    let addr = "10.0.0.1".parse().unwrap();
    let way = QpAttr {
        access: Some(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE),
        max_dest_rd_atomic: Some(16),
        max_rd_atomic: Some(16),
        min_rnr_timer: Some(RnrTimer::new(1)),
        ..QpAttr::to_rts(AddressVector::new(addr, addr), Mtu::B4096, Qpn::new(peer))
    };
    for attr in way.steps(QpType::Rc) {
        world.with(end, |qp, ctx, _| qp.modify(ctx, &attr).unwrap());
    }
}

#[test]
fn an_idle_connection_is_small_and_a_packet_allocates_nothing() {
    let mem = MemoryTable::new([1; 32], &DeviceLimits::software(1));
    let pd = mem.alloc_pd().unwrap();
    let cq = CompletionQueue::new(1, 10_000, None);
    let mut world = World {
        mem,
        counters: Counters::default(),
        slot: OneSlot {
            buf: vec![0; 5000],
            len: 0,
            full: false,
        },
        now: Instant::from_nanos(1),
    };
    let all = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let region = world.mem.alloc_region(pd, 8 << 20, all).unwrap();
    let make = |qpn: u32| End {
        qp: QueuePair::new(QpConfig {
            qpn: Qpn::new(qpn),
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            caps: QpCaps {
                max_send_wr: 1000,
                max_recv_wr: 1000,
                ..QpCaps::default()
            },
            signal_all: true,
            max_msg_size: 1 << 31,
            port_mtu: Mtu::B1024,
            srq: None,
            xrcd: None,
        })
        .unwrap(),
        window: Window::new(WindowConfig {
            initial: 1 << 20,
            min: 1 << 20,
            max: 1 << 20,
        }),
    };
    let sge = |len| Sge {
        addr: region.addr(),
        length: len,
        lkey: region.lkey(),
    };
    let remote = RemoteAddr {
        addr: region.addr() + (4 << 20),
        rkey: region.rkey(),
    };
    let mut out = Vec::with_capacity(10_000);
    let before = LIVE.load(Ordering::SeqCst);
    let mut pair = Box::new((make(1), make(2)));
    connect(&mut world, &mut pair.0, 2);
    connect(&mut world, &mut pair.1, 1);
    let used = |what: &str| {
        let each = (LIVE.load(Ordering::SeqCst) - before) / 2;
        assert!(each < 8 * 1024, "{what}: {each} bytes per connected queue pair");
    };
    used("new");
    // Neither does it stay big after a burst.
    for round in 0..3 {
        for i in 0..900 {
            let op = if i % 10 == 0 {
                SendOp::Read(remote)
            } else {
                SendOp::Write(remote)
            };
            let sges = [sge(64 + i)];
            let wr = SendWr {
                wr_id: u64::from(i),
                op,
                flags: SendFlags::empty(),
                payload: Payload::Sges(&sges),
            };
            let (a, b) = if round % 2 == 0 {
                (&mut pair.0, &mut pair.1)
            } else {
                (&mut pair.1, &mut pair.0)
            };
            world.with(a, |qp, ctx, _| {
                qp.post_send(ctx, &wr, roce_verbs::Target::Peer, usize::MAX).unwrap()
            });
            if i == 899 {
                world.settle(a, b);
            }
        }
        assert_eq!(cq.poll(&mut out, 10_000).unwrap(), 900);
        assert!(out.iter().all(|c| c.is_ok()));
        out.clear();
    }
    // The completion queue's own memory is shared; it is not the queue pair's.
    let cq_bytes = 2048 * size_of::<roce_verbs::Completion>() as isize;
    let each = (LIVE.load(Ordering::SeqCst) - before - cq_bytes) / 2;
    assert!(each < 8 * 1024, "after bursts: {each} bytes per connected queue pair");

    // A long message: 1024 packets and their acknowledgements, without touching the heap.
    let (a, b) = (&mut pair.0, &mut pair.1);
    for round in 0..2 {
        let sges = [sge(4 << 20)];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Write(remote),
            flags: SendFlags::empty(),
            payload: Payload::Sges(&sges),
        };
        world.with(a, |qp, ctx, _| {
            qp.post_send(ctx, &wr, roce_verbs::Target::Peer, usize::MAX).unwrap()
        });
        let calls = CALLS.load(Ordering::SeqCst);
        world.settle(a, b);
        let calls = CALLS.load(Ordering::SeqCst) - calls;
        assert!(round == 0 || calls == 0, "{calls} allocations for a thousand packets");
        assert_eq!(cq.poll(&mut out, 10).unwrap(), 1);
    }

    // What was read by the peer is not kept alive for the case that it asks again.
    let before = LIVE.load(Ordering::SeqCst);
    let granted = world.mem.alloc_region(pd, 8 << 20, all).unwrap();
    let sges = [sge(100)];
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Read(RemoteAddr {
            addr: granted.addr(),
            rkey: granted.rkey(),
        }),
        flags: SendFlags::empty(),
        payload: Payload::Sges(&sges),
    };
    world.with(a, |qp, ctx, _| {
        qp.post_send(ctx, &wr, roce_verbs::Target::Peer, usize::MAX).unwrap()
    });
    world.settle(a, b);
    assert_eq!(cq.poll(&mut out, 10).unwrap(), 1);
    world.mem.deregister(&granted).unwrap();
    drop(granted);
    let kept = LIVE.load(Ordering::SeqCst) - before;
    assert!(kept < 64 << 10, "{kept} bytes are kept");
}
