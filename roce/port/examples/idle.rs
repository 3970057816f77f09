//! Memory of a connected idle queue pair: all that the port, the connection manager and the engine keep for it, at either end, bytes.
//! `cargo xtask bench` prints it, `tests/memory.rs` limits it.

#[path = "ends/mod.rs"]
#[allow(dead_code, reason = "for other examples")]
mod ends;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicIsize, Ordering},
};

use ends::{End, NOW};
use roce_port::{CmEventKind, ListenArgs};
use roce_verbs::{Mtu, QpState, Qpn, provider::ConnParams};

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

fn connect(a: &mut End, b: &mut End) -> [Qpn; 2] {
    let [qa, qb] = [&mut *a, &mut *b].map(|h| h.port.create_qp(h.init.clone()).unwrap());
    let (local, remote) = ((a.addr, 0).into(), (b.addr, 7000).into());
    a.port
        .connect_qp(NOW, local, remote, qa, ConnParams::default())
        .unwrap();
    a.send_to(b);
    while let Some(event) = b.port.poll_cm_event(NOW) {
        if let CmEventKind::Request { conn, .. } = event {
            b.port.accept_qp(NOW, conn, qb, ConnParams::default()).unwrap();
        }
    }
    b.send_to(a);
    while a.port.poll_cm_event(NOW).is_some() {}
    a.send_to(b);
    while b.port.poll_cm_event(NOW).is_some() {}
    [qa, qb]
}

/// Bytes of each queue pair with its connection, of so many connections.
pub(crate) fn bytes_each(connections: u32) -> usize {
    let [mut a, mut b] = [1, 2].map(|last| End::new(last, Mtu::B1024, 1000));
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
