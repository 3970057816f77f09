//! Memory windows through queue pairs.

use std::sync::Arc;

use roce_verbs::mem::{MemError, Region, Window, WindowKind};
use roce_verbs::{
    AccessFlags, AsyncEvent, Completion, QpState, QpType, Qpn, RKey, RemoteAddr, SendFlags, SendOp, WcOpcode, WcStatus,
    wr::BindWindow,
};

use crate::harness::*;

const REMOTE: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_READ);

fn bind(window: &Window, region: &Region, offset: usize, length: u64, access: AccessFlags) -> SendOp {
    SendOp::BindWindow(BindWindow {
        key: window.rkey().next(),
        lkey: region.lkey(),
        addr: region.addr() + offset as u64,
        length,
        access,
    })
}

fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

/// B has a window on 100..300 of a region.
fn opened(kind: WindowKind, access: AccessFlags) -> (Pair, Arc<Region>, Arc<Window>) {
    let mut p = Pair::new(Setup::default());
    let region = p.b.region(1000);
    let window = p.b.mem.alloc_window(p.b.pd, kind).unwrap();
    p.b.send(1, bind(&window, &region, 100, 200, access), &[]);
    p.b.drain();
    let done = p.b.completions();
    assert_eq!(
        (ids(&done), done[0].opcode),
        (vec![(1, WcStatus::Success)], WcOpcode::BindWindow)
    );
    (p, region, window)
}

/// Outcome of a write of `len` bytes to an address under a key.
fn write(p: &mut Pair, addr: u64, rkey: RKey, len: usize) -> WcStatus {
    let src = p.a.filled(len, 7);
    p.a.send(2, SendOp::Write(RemoteAddr { addr, rkey }), &[sge(&src, 0, len)]);
    p.run();
    p.a.completions()[0].status
}

#[test]
fn a_window_opens_its_range_and_no_more() {
    for kind in [WindowKind::Type1, WindowKind::Type2, WindowKind::Type2A] {
        for (offset, len, ok) in [
            (100, 200, true),
            (150, 10, true),
            (99, 10, false),
            (100, 201, false),
            (290, 11, false),
        ] {
            let (mut p, region, window) = opened(kind, REMOTE);
            let status = write(&mut p, region.addr() + offset, window.rkey(), len);
            let expected = if ok {
                WcStatus::Success
            } else {
                WcStatus::RemoteAccessError
            };
            assert_eq!(status, expected, "{kind:?} {offset} {len}");
        }
    }
}

#[test]
fn a_zero_based_window_of_type_2_counts_from_its_own_start() {
    let zero = REMOTE | AccessFlags::ZERO_BASED;
    for kind in [WindowKind::Type2, WindowKind::Type2A] {
        let (mut p, region, window) = opened(kind, zero);
        assert_eq!(write(&mut p, 0, window.rkey(), 200), WcStatus::Success);
        assert_eq!(bytes(&region, 100, 200), pattern(200, 7));
    }
}

#[test]
fn rights_are_those_of_the_bind() {
    let (mut p, region, window) = opened(WindowKind::Type2, AccessFlags::REMOTE_READ);
    assert_eq!(
        write(&mut p, region.addr() + 100, window.rkey(), 8),
        WcStatus::RemoteAccessError
    );
    assert_eq!(p.b.events, [AsyncEvent::QpAccessError(Qpn::new(B))]);
}

#[test]
fn binds_that_are_not_allowed_fail_and_change_nothing() {
    let no_local = AccessFlags::MW_BIND | AccessFlags::REMOTE_READ;
    let no_bind = ALL - AccessFlags::MW_BIND;
    let zero_region = ALL | AccessFlags::ZERO_BASED;
    let zero = REMOTE | AccessFlags::ZERO_BASED;
    let cases = [
        (
            WindowKind::Type2,
            no_bind,
            REMOTE,
            10,
            "the region lets no window be bound",
        ),
        (
            WindowKind::Type2,
            no_local,
            REMOTE,
            10,
            "remote write needs the region's local write",
        ),
        (WindowKind::Type2, zero_region, REMOTE, 10, "a zero-based region"),
        (WindowKind::Type1, ALL, zero, 10, "a zero-based window of type 1"),
        (
            WindowKind::Type2,
            ALL,
            REMOTE,
            0,
            "a type 2 window is not unbound by a bind",
        ),
        (WindowKind::Type2, ALL, REMOTE, 1001, "beyond the region"),
        (WindowKind::Type1, ALL, REMOTE, 1001, "beyond the region"),
    ];
    for (kind, region_access, access, length, what) in cases {
        let mut p = Pair::new(Setup::default());
        let region = p.b.mem.alloc_region(p.b.pd, 1000, region_access).unwrap();
        let window = p.b.mem.alloc_window(p.b.pd, kind).unwrap();
        let key = window.rkey();
        p.b.send(1, bind(&window, &region, 0, length, access), &[]);
        p.run();
        assert_eq!(ids(&p.b.completions()), [(1, WcStatus::MwBindError)], "{what}");
        assert_eq!((window.rkey(), p.b.qp.state()), (key, QpState::Err));
        p.b.mem.deregister(&region).unwrap();
    }
    // A read-only window needs no local write right.
    let mut p = Pair::new(Setup::default());
    let region = p.b.mem.alloc_region(p.b.pd, 1000, no_local).unwrap();
    let window = p.b.mem.alloc_window(p.b.pd, WindowKind::Type2).unwrap();
    p.b.send(1, bind(&window, &region, 0, 10, AccessFlags::REMOTE_READ), &[]);
    p.run();
    assert_eq!(ids(&p.b.completions()), [(1, WcStatus::Success)]);
}

#[test]
fn type_1_may_be_bound_again_and_unbound_type_2_must_be_invalidated_first() {
    let (mut p, region, window) = opened(WindowKind::Type1, REMOTE);
    let first = window.rkey();
    p.b.send(2, bind(&window, &region, 500, 10, REMOTE), &[]);
    p.run();
    assert_eq!(ids(&p.b.completions()), [(2, WcStatus::Success)]);
    assert_ne!(window.rkey(), first);
    assert_eq!(write(&mut p, region.addr() + 500, window.rkey(), 10), WcStatus::Success);
    p.b.send(3, bind(&window, &region, 0, 0, REMOTE), &[]);
    p.run();
    assert_eq!(ids(&p.b.completions()), [(3, WcStatus::Success)]);
    assert_eq!(
        write(&mut p, region.addr() + 500, window.rkey(), 10),
        WcStatus::RemoteAccessError
    );

    let (mut p, region, window) = opened(WindowKind::Type2, REMOTE);
    p.b.send(2, SendOp::LocalInvalidate(window.rkey()), &[]);
    p.b.send(3, bind(&window, &region, 500, 10, REMOTE), &[]);
    p.b.send(4, bind(&window, &region, 500, 10, REMOTE), &[]);
    p.run();
    assert_eq!(
        ids(&p.b.completions()),
        [
            (2, WcStatus::Success),
            (3, WcStatus::Success),
            (4, WcStatus::MwBindError)
        ]
    );
}

#[test]
fn a_region_is_busy_while_windows_are_bound() {
    let (mut p, region, window) = opened(WindowKind::Type2, REMOTE);
    assert!(matches!(p.b.mem.deregister(&region), Err(MemError::Busy(_))));
    p.b.send(2, SendOp::LocalInvalidate(window.rkey()), &[]);
    p.run();
    p.b.mem.deregister(&region).unwrap();
    let (p, region, window) = opened(WindowKind::Type1, REMOTE);
    assert!(matches!(p.b.mem.deregister(&region), Err(MemError::Busy(_))));
    p.b.mem.dealloc_window(&window).unwrap();
    p.b.mem.deregister(&region).unwrap();
}

#[test]
fn a_type_2_window_belongs_to_the_queue_pair_that_bound_it() {
    for kind in [WindowKind::Type2, WindowKind::Type2A, WindowKind::Type1] {
        let (p, region, window) = opened(kind, REMOTE);
        let (addr, rkey) = (region.addr() + 100, window.rkey());
        let resolve = |qpn| p.b.mem.resolve_remote(p.b.pd, Qpn::new(qpn), rkey, addr, 8, REMOTE);
        assert!(resolve(B).is_ok());
        assert_eq!(resolve(B + 1).is_ok(), kind == WindowKind::Type1);
        let invalidate = |qpn| p.b.mem.invalidate(p.b.pd, Qpn::new(qpn), rkey);
        assert!(invalidate(B + 1).is_err());
        assert_eq!(invalidate(B).is_ok(), kind != WindowKind::Type1);
    }
}

#[test]
fn only_type_2a_looks_at_the_queue_pair_alone() {
    for (kind, ok) in [
        (WindowKind::Type1, false),
        (WindowKind::Type2, false),
        (WindowKind::Type2A, true),
    ] {
        let mut p = Pair::new(Setup::default());
        let region = p.b.region(100);
        let other = p.b.mem.alloc_pd().unwrap();
        let window = p.b.mem.alloc_window(other, kind).unwrap();
        p.b.send(1, bind(&window, &region, 0, 100, REMOTE), &[]);
        p.run();
        let status = if ok { WcStatus::Success } else { WcStatus::MwBindError };
        assert_eq!(ids(&p.b.completions()), [(1, status)], "{kind:?}");
        if ok {
            assert_eq!(write(&mut p, region.addr(), window.rkey(), 100), WcStatus::Success);
            p.b.send(3, SendOp::LocalInvalidate(window.rkey()), &[]);
            p.run();
            assert_eq!(ids(&p.b.completions()), [(3, WcStatus::Success)]);
        }
    }
}

#[test]
fn a_peer_may_invalidate_type_2_windows_of_its_queue_pair_and_nothing_else() {
    for kind in [WindowKind::Type2, WindowKind::Type2A] {
        let (mut p, region, window) = opened(kind, REMOTE);
        let key = window.rkey();
        p.b.recv(5, &[]);
        p.a.send(2, SendOp::SendWithInv(key), &[]);
        p.run();
        assert_eq!(ids(&p.a.completions()), [(2, WcStatus::Success)]);
        let got = p.b.received()[0];
        assert_eq!((got.wr_id, got.invalidated), (5, key));
        assert_eq!(write(&mut p, region.addr() + 100, key, 8), WcStatus::RemoteAccessError);
    }
    // Type 1 windows, regions, keys of nothing: the SEND is acknowledged, the receiver fails (class J).
    for case in 0..3 {
        let (mut p, region, window) = opened(WindowKind::Type1, REMOTE);
        let key = [window.rkey(), region.rkey(), RKey(region.rkey().0 ^ 0x100)][case];
        p.b.recv(5, &[]);
        p.a.send(2, SendOp::SendWithInv(key), &[]);
        p.run();
        assert_eq!(ids(&p.a.completions()), [(2, WcStatus::Success)]);
        assert_eq!(ids(&p.b.received()), [(5, WcStatus::RemoteInvalidRequestError)]);
        assert_eq!(p.b.qp.state(), QpState::Err);
    }
}

#[test]
fn a_bind_is_done_in_its_place_in_the_queue() {
    let mut p = Pair::new(Setup::default());
    let region = p.b.filled(100, 1);
    let window = p.b.mem.alloc_window(p.b.pd, WindowKind::Type2).unwrap();
    let key = window.rkey().next();
    let told = p.b.filled(4, 0);
    let dst = p.a.region(4);
    p.a.recv(9, &[sge(&dst, 0, 4)]);
    // The peer learns of the key by a message behind the bind; before that it opens nothing.
    p.b.send_flags(1, bind(&window, &region, 0, 100, REMOTE), &[], SendFlags::empty());
    p.b.send(2, SendOp::Send, &[sge(&told, 0, 4)]);
    let early =
        p.b.mem
            .resolve_remote(p.b.pd, Qpn::new(B), key, region.addr(), 1, REMOTE);
    assert!(early.is_err());
    p.run();
    assert_eq!(p.a.received().len(), 1);
    let mut status = Vec::new();
    let back = p.a.region(100);
    let remote = RemoteAddr {
        addr: region.addr(),
        rkey: key,
    };
    p.a.send(3, SendOp::Read(remote), &[sge(&back, 0, 100)]);
    p.run();
    status.extend(ids(&p.a.completions()));
    assert_eq!(status, [(3, WcStatus::Success)]);
    assert_eq!(bytes(&back, 0, 100), pattern(100, 1));
}

#[test]
fn the_end_of_a_queue_pair_closes_its_windows() {
    let (mut p, region, _window) = opened(WindowKind::Type2, REMOTE);
    assert!(p.b.mem.deregister(&region).is_err());
    p.b.qp.destroy(&mut roce_qp::Ctx {
        now: p.b.now,
        mem: &p.b.mem,
        window: &mut p.b.window,
        paces: &mut p.b.paces,
        events: &mut p.b.events,
        counters: &mut p.b.counters,
    });
    p.b.mem.deregister(&region).unwrap();
}

#[test]
fn unreliable_connections_bind_windows_too() {
    let mut p = Pair::of(QpType::Uc, Setup::default());
    let region = p.b.region(100);
    let window = p.b.mem.alloc_window(p.b.pd, WindowKind::Type2).unwrap();
    p.b.send(1, bind(&window, &region, 0, 100, REMOTE), &[]);
    p.run();
    assert_eq!(ids(&p.b.completions()), [(1, WcStatus::Success)]);
    let src = p.a.filled(50, 3);
    let to = RemoteAddr {
        addr: region.addr(),
        rkey: window.rkey(),
    };
    p.a.send(1, SendOp::Write(to), &[sge(&src, 0, 50)]);
    p.run();
    assert_eq!(bytes(&region, 0, 50), pattern(50, 3));
    // A bind that fails stops the send queue, not the queue pair.
    p.b.send(2, bind(&window, &region, 0, 100, REMOTE), &[]);
    p.run();
    assert_eq!(ids(&p.b.completions()), [(2, WcStatus::MwBindError)]);
    assert_eq!(p.b.qp.state(), QpState::Sqe);
}

/// The ends of a window that counts from zero, and the region's own addresses, which it does not have.
#[test]
fn a_zero_based_window_ends_where_it_was_bound_to_end() {
    for kind in [WindowKind::Type2, WindowKind::Type2A] {
        for (addr, len, ok) in [
            (0, 200, true),
            (199, 1, true),
            (0, 201, false),
            (200, 1, false),
            (u64::MAX - 3, 8, false),
        ] {
            let (mut p, region, window) = opened(kind, REMOTE | AccessFlags::ZERO_BASED);
            let status = write(&mut p, addr, window.rkey(), len);
            let expected = if ok {
                WcStatus::Success
            } else {
                WcStatus::RemoteAccessError
            };
            assert_eq!(status, expected, "{kind:?} {addr} {len}");
            let mut all = vec![0; 1000];
            if ok {
                all[100 + addr as usize..][..len].copy_from_slice(&pattern(len, 7));
            }
            assert_eq!(bytes(&region, 0, 1000), all, "{kind:?} {addr} {len}");
        }
        let (mut p, region, window) = opened(kind, REMOTE | AccessFlags::ZERO_BASED);
        let status = write(&mut p, region.addr() + 100, window.rkey(), 8);
        assert_eq!(status, WcStatus::RemoteAccessError);
    }
}

/// Connections of one protection domain, with their queue pairs: a window of one is nothing to the other, whoever asks.
#[test]
fn another_queue_pair_neither_uses_a_type_2_window_nor_takes_it_back() {
    const OTHER: u32 = 0x33;
    for kind in [WindowKind::Type2, WindowKind::Type2A] {
        for attempt in 0..3 {
            let (mut p, region, window) = opened(kind, REMOTE);
            let (key, addr) = (window.rkey(), region.addr() + 100);
            // B's memory with another queue pair on it, and the one that owns the window kept aside.
            let setup = p.setup.clone();
            let mut other = Side::with(OTHER, &setup, |c| c.pd = p.b.pd);
            other.bring_up(&setup, A, setup.psn, setup.psn ^ 0x5555);
            core::mem::swap(&mut p.b.qp, &mut other.qp);
            core::mem::swap(&mut p.b.send_cq, &mut other.send_cq);
            core::mem::swap(&mut p.b.recv_cq, &mut other.recv_cq);
            match attempt {
                0 => assert_eq!(write(&mut p, addr, key, 8), WcStatus::RemoteAccessError),
                1 => {
                    p.b.recv(5, &[]);
                    p.a.send(2, SendOp::SendWithInv(key), &[]);
                    p.run();
                    assert_eq!(ids(&p.a.completions()), [(2, WcStatus::Success)]);
                    assert_eq!(ids(&p.b.received()), [(5, WcStatus::RemoteInvalidRequestError)]);
                }
                _ => {
                    p.b.send(2, SendOp::LocalInvalidate(key), &[]);
                    p.run();
                    assert_eq!(ids(&p.b.completions()), [(2, WcStatus::LocalQpOperationError)]);
                }
            }
            let resolved = |qpn| p.b.mem.resolve_remote(p.b.pd, Qpn::new(qpn), key, addr, 8, REMOTE);
            assert!(resolved(B).is_ok(), "{kind:?} {attempt}: it is still open to its own");
            assert!(resolved(OTHER).is_err());
        }
    }
}

/// A window that is bound again has another key and range; what it had opens nothing.
#[test]
fn the_key_of_a_former_binding_opens_nothing() {
    for kind in [WindowKind::Type1, WindowKind::Type2, WindowKind::Type2A] {
        let (mut p, region, window) = opened(kind, REMOTE);
        let former = window.rkey();
        if kind != WindowKind::Type1 {
            p.b.send(2, SendOp::LocalInvalidate(former), &[]);
        }
        p.b.send(3, bind(&window, &region, 500, 10, REMOTE), &[]);
        p.run();
        assert!(p.b.completions().iter().all(|c| c.status == WcStatus::Success));
        assert_eq!(write(&mut p, region.addr() + 500, window.rkey(), 10), WcStatus::Success);
        for addr in [100, 500] {
            let resolved =
                p.b.mem
                    .resolve_remote(p.b.pd, Qpn::new(B), former, region.addr() + addr, 1, REMOTE);
            assert!(resolved.is_err(), "{kind:?} {addr}");
        }
        assert_eq!(
            write(&mut p, region.addr() + 500, former, 1),
            WcStatus::RemoteAccessError,
            "{kind:?}"
        );
    }
}
