//! Local memory of work requests: the rights that each operation needs, and elements without bytes.

use roce_verbs::{AccessFlags, Mtu, SendOp, Sge, WcStatus};

use crate::harness::*;

fn pair() -> Pair {
    Pair::new(Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    })
}

#[test]
fn what_a_response_brings_needs_memory_that_may_be_written() {
    for rights in [AccessFlags::REMOTE_READ, AccessFlags::LOCAL_WRITE] {
        for n in 0..5 {
            let mut p = pair();
            let local = p.a.mem.alloc_region(p.a.pd, 8, rights).unwrap();
            let there = p.b.region(8);
            p.b.recv(1, &[sge(&there, 0, 8)]);
            let remote = at(&there, 0);
            let (op, writes) = match n {
                0 => (SendOp::Send, false),
                1 => (SendOp::Write(remote), false),
                2 => (SendOp::Read(remote), true),
                3 => (SendOp::FetchAdd { remote, add: 1 }, true),
                _ => {
                    let (compare, swap) = (0, 1);
                    (SendOp::CompareSwap { remote, compare, swap }, true)
                }
            };
            p.a.send(1, op, &[sge(&local, 0, 8)]);
            p.run();
            let status: Vec<WcStatus> = p.a.completions().iter().map(|c| c.status).collect();
            let expected = match writes && rights != AccessFlags::LOCAL_WRITE {
                true => WcStatus::LocalProtectionError,
                false => WcStatus::Success,
            };
            assert_eq!(status, [expected], "{op:?} with {rights:?}");
        }
    }
}

/// IBA 10.7.3.1 does not check the key of an element without bytes.
#[test]
fn the_key_of_an_empty_element_does_not_matter() {
    let empty = Sge {
        addr: 0,
        length: 0,
        lkey: NO_KEY,
    };
    for place in 0..=2 {
        let mut p = pair();
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        let mut from = vec![sge(&src, 0, 300), sge(&src, 300, 300)];
        let mut into = vec![sge(&dst, 0, 100), sge(&dst, 100, 500)];
        from.insert(place, empty);
        into.insert(place, empty);
        p.b.recv(1, &into);
        p.a.send(1, SendOp::Send, &from);
        p.run();
        let ends = [p.a.completions(), p.b.received()].map(|c| c[0].status);
        assert_eq!(ends, [WcStatus::Success; 2], "element {place}");
        assert_eq!(bytes(&dst, 0, 600), pattern(600, 1));
    }
}
