//! What a connected queue pair costs while nothing happens: everything that the port, the connection manager and the engine keep
//! for it, on both its ends. Prints it, bytes; `cargo xtask bench` asks for that, and `tests/memory.rs` has it tested.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicIsize, Ordering},
    },
};

use roce_mem::MemoryTable;
use roce_port::{CmEventKind, ListenArgs, Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::{Instant, Mtu, QpCaps, QpState, QpType, Qpn, provider::ConnParams};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting has no effect on it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NOW: Instant = Instant::from_nanos(1_000_000);

struct Host {
    addr: IpAddr,
    port: Port,
    init: QpInit,
    batch: TxBatch,
}

fn host(last: u8) -> Host {
    let addr = IpAddr::from([192, 0, 2, last]);
    let mut config = PortConfig::new(vec![addr], Mtu::B1024, u64::from(last));
    config.cm.max_half_open_per_peer = 4096;
    let mem = Arc::new(MemoryTable::new([last; 32], &config.limits));
    let pd = mem.alloc_pd().unwrap();
    let cq = CompletionQueue::new(0, 1000, None);
    Host {
        addr,
        port: Port::new(config, mem, [last; 32]),
        init: QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq,
            caps: QpCaps::default(),
            signal_all: false,
            srq: None,
            xrcd: None,
        },
        batch: TxBatch::new(TxConfig::default()),
    }
}

fn carry(from: &mut Host, to: &mut Host) {
    while from.port.poll_transmit(NOW, &mut from.batch) || !from.batch.is_empty() {
        for t in from.batch.trains() {
            let meta = RxMeta {
                segment_len: t.segment_len,
                ..RxMeta::new(t.remote.ip(), (t.local, t.src_port).into())
            };
            to.port.handle_datagram(NOW, &meta, t.bytes);
        }
        from.batch.clear();
    }
}

fn connect(a: &mut Host, b: &mut Host) -> [Qpn; 2] {
    let [qa, qb] = [&mut *a, &mut *b].map(|h| h.port.create_qp(h.init.clone()).unwrap());
    let (local, remote) = ((a.addr, 0).into(), (b.addr, 7000).into());
    a.port
        .connect_qp(NOW, local, remote, qa, ConnParams::default())
        .unwrap();
    carry(a, b);
    while let Some(event) = b.port.poll_cm_event(NOW) {
        if let CmEventKind::Request { conn, .. } = event {
            b.port.accept_qp(NOW, conn, qb, ConnParams::default()).unwrap();
        }
    }
    carry(b, a);
    while a.port.poll_cm_event(NOW).is_some() {}
    carry(a, b);
    while b.port.poll_cm_event(NOW).is_some() {}
    [qa, qb]
}

/// Bytes of each queue pair with its connection, of so many connections.
pub(crate) fn bytes_each(connections: u32) -> usize {
    let (mut a, mut b) = (host(1), host(2));
    b.port.cm_listen(&ListenArgs::new(None, 7000, 4096)).unwrap();
    connect(&mut a, &mut b);
    let before = LIVE.load(Ordering::Relaxed);
    let last = (0..connections).map(|_| connect(&mut a, &mut b)).last();
    let [qa, qb] = last.expect("a connection");
    assert_eq!(a.port.qp_state(qa), Some(QpState::Rts));
    assert_eq!(b.port.qp_state(qb), Some(QpState::Rts));
    let more = LIVE.load(Ordering::Relaxed) - before;
    more.unsigned_abs() / (2 * connections as usize)
}

#[allow(dead_code, reason = "the test has a main function of its own")]
fn main() {
    println!("{}", bytes_each(1000));
}
