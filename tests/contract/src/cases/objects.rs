//! Numbers, limits, and what outlives what.

use std::sync::Arc;

use roce_verbs::mem::Pages;
use roce_verbs::{
    AccessFlags, Payload, RemoteAddr, SendOp,
    provider::{CmRef, CqId, DeviceIx, KeyId, KeyKind, MrId, PdId, QpId, QpSpec, Registration, VerbsError},
    wr::PostError,
};

use super::cases;
use crate::{Bed, RIGHTS, Side};

cases![
    numbers_of_nobody,
    numbers_of_what_is_gone,
    limits_are_refused,
    memory_stays_as_long_as_a_registration_has_it,
    a_range_outside_of_memory_is_not_registered,
    a_region_has_the_address_that_was_asked_for,
    devices_tell_what_they_can,
];

const A: Side = Side::A;
const B: Side = Side::B;
const NOBODY: u32 = 0xfff_fffff;

fn whole(pages: &Arc<Pages>) -> Registration {
    Registration {
        memory: pages.clone(),
        offset: 0,
        len: pages.len(),
        iova: None,
        access: RIGHTS,
    }
}

/// None of these does harm.
fn ask_of_nobody(bed: &mut Bed, qp: QpId, cm: CmRef, (pd, mr, cq): (PdId, MrId, CqId), key: KeyId) {
    let spec = bed.spec(A);
    let pages = Pages::allocate(4096).expect("memory");
    let a = bed.provider(A);
    assert_eq!(a.post_send(qp, &[]), Err((0, PostError::NoQueuePair)));
    assert_eq!(a.post_recv(qp, &[]), Err((0, PostError::NoQueuePair)));
    assert_eq!(a.qpn(qp), None);
    assert!(!a.access_violated(qp));
    assert_eq!(a.cm_addrs(cm), None);
    assert!(a.register(pd, &whole(&pages)).is_err());
    for kind in [KeyKind::FastRegistration, KeyKind::Window1, KeyKind::Window2] {
        assert!(a.alloc_key(pd, kind).is_err());
    }
    assert!(a.create_qp(&QpSpec { pd, ..spec }).is_err());
    assert!(a.create_qp(&QpSpec { cq, ..spec }).is_err());
    a.drain(qp);
    a.destroy_qp(qp);
    a.cm_disconnect(cm);
    a.cm_disconnect_by(cm, &[cm]);
    a.cm_destroy(cm);
    a.close_key(key);
    a.free_key(key);
    a.deregister(mr);
    a.destroy_cq(cq);
    a.free_pd(pd);
}

fn numbers_of_nobody(bed: &mut Bed) {
    let of = (PdId(NOBODY), MrId(NOBODY), CqId(NOBODY));
    ask_of_nobody(bed, QpId(NOBODY), CmRef(NOBODY), of, KeyId(NOBODY));
    let none = DeviceIx(u16::MAX);
    assert!(bed.provider(A).alloc_pd(none).is_err());
    assert!(bed.provider(A).create_cq(none, 1).is_err());
    // What there is is as it was.
    let link = bed.connect();
    bed.give_back(link);
}

fn numbers_of_what_is_gone(bed: &mut Bed) {
    let link = bed.connect();
    let (of, mr) = (bed.at(A).device, bed.at(A).mr.id);
    let a = bed.provider(A);
    let (pd, cq) = (a.alloc_pd(of).expect("a domain"), a.create_cq(of, 8).expect("a queue"));
    a.destroy_cq(cq);
    a.free_pd(pd);
    bed.give_back(link);
    let key = KeyId(NOBODY);
    let gone = (pd, MrId(mr.0 ^ 1 << MrId::SLOT_BITS), cq);
    ask_of_nobody(bed, link.qp(A), link.cm(A), gone, key);
    // What has their places now is something else.
    let again = bed.connect();
    assert!(again.qp(A) != link.qp(A) && again.cm(A) != link.cm(A));
    let to = bed.remote(B, 0);
    bed.post(A, again.qp(A), 1, SendOp::Write(to), Payload::Inline(b"x"));
    bed.success(A, again.qp(A), 1);
    bed.give_back(again);
}

fn limits_are_refused(bed: &mut Bed) {
    let (limits, device, spec) = (bed.caps(A).limits, bed.at(A).device, bed.spec(A));
    let a = bed.provider(A);
    let queue = a.create_cq(device, limits.max_cqe.saturating_add(1));
    assert!(matches!(queue, Err(VerbsError::Limit(_))), "{queue:?}");
    let with = |change: &dyn Fn(&mut QpSpec)| {
        let mut spec = spec;
        change(&mut spec);
        spec
    };
    for spec in [
        with(&|s| s.caps.max_send_wr = limits.max_qp_wr + 1),
        with(&|s| s.caps.max_recv_wr = limits.max_qp_wr + 1),
        with(&|s| s.caps.max_send_sge = limits.max_sge + 1),
        with(&|s| s.caps.max_recv_sge = limits.max_sge + 1),
        with(&|s| s.caps.max_inline_data = limits.max_inline_data + 1),
    ] {
        assert!(a.create_qp(&spec).is_err(), "{spec:?}");
    }
    // As much inline data as it says.
    let most = a.create_qp(&with(&|s| s.caps.max_inline_data = limits.max_inline_data));
    a.destroy_qp(most.expect("a queue pair with all inline data that there is"));
}

fn memory_stays_as_long_as_a_registration_has_it(bed: &mut Bed) {
    let link = bed.connect();
    let pages = Pages::allocate(8192).expect("memory");
    let pd = bed.at(B).pd;
    let b = bed.provider(B);
    let first = b.register(pd, &whole(&pages)).expect("a registration");
    let second = b.register(pd, &whole(&pages)).expect("another of the same memory");
    assert_eq!((first.addr, first.len), (second.addr, second.len));
    let weak = Arc::downgrade(&pages);
    drop(pages);
    b.deregister(first.id);
    assert!(weak.upgrade().is_some());
    let to = RemoteAddr {
        addr: second.addr + 4096,
        rkey: second.rkey,
    };
    bed.post(A, link.qp(A), 1, SendOp::Write(to), Payload::Inline(b"alive"));
    bed.success(A, link.qp(A), 1);
    let mut there = [0; 5];
    weak.upgrade()
        .expect("it lives")
        .read(4096, &mut there)
        .expect("a range of it");
    assert_eq!(&there, b"alive");
    bed.provider(B).deregister(second.id);
    assert!(weak.upgrade().is_none(), "nobody has it any more");
    bed.give_back(link);
}

fn a_range_outside_of_memory_is_not_registered(bed: &mut Bed) {
    let pages = Pages::allocate(8192).expect("memory");
    let pd = bed.at(A).pd;
    for (offset, len) in [(0, 8193), (1, 8192), (8193, 0), (usize::MAX, 2)] {
        let what = Registration {
            offset,
            len,
            ..whole(&pages)
        };
        assert!(bed.provider(A).register(pd, &what).is_err(), "{len} bytes at {offset}");
    }
    let a_part = Registration {
        offset: 4096,
        len: 100,
        ..whole(&pages)
    };
    let mr = bed.provider(A).register(pd, &a_part).expect("a registration");
    assert_eq!((mr.addr, mr.len), (pages.as_ptr() as u64 + 4096, 100));
    bed.provider(A).deregister(mr.id);
}

fn a_region_has_the_address_that_was_asked_for(bed: &mut Bed) {
    let link = bed.connect();
    let caps = bed.caps(B);
    let pages = Pages::allocate(8192).expect("memory");
    let pd = bed.at(B).pd;
    for (can, iova, access, first) in [
        (caps.iova, Some(0x7000_0000), AccessFlags::empty(), 0x7000_0000),
        (caps.zero_based, None, AccessFlags::ZERO_BASED, 0),
    ] {
        if !can {
            continue;
        }
        let what = Registration {
            iova,
            access: RIGHTS | access,
            ..whole(&pages)
        };
        let mr = bed.provider(B).register(pd, &what).expect("a registration");
        assert_eq!(mr.addr, first);
        let to = RemoteAddr {
            addr: first + 1,
            rkey: mr.rkey,
        };
        bed.post(A, link.qp(A), 1, SendOp::Write(to), Payload::Inline(b"there"));
        bed.success(A, link.qp(A), 1);
        let mut there = [0; 5];
        pages.read(1, &mut there).expect("a range of it");
        assert_eq!(&there, b"there");
        pages.write(0, &[0; 8]).expect("a range of it");
        bed.provider(B).deregister(mr.id);
    }
    bed.give_back(link);
}

fn devices_tell_what_they_can(bed: &mut Bed) {
    for side in Side::ALL {
        let (caps, addr) = (bed.caps(side), bed.addr(side, 0).ip());
        assert!(caps.addrs.contains(&addr), "{caps:?}");
        let l = &caps.limits;
        let enough = [l.max_qp, l.max_cq, l.max_mr, l.max_pd].iter().all(|n| *n > 16);
        assert!(
            enough && l.max_qp_wr >= 64 && l.max_cqe >= 256 && l.max_sge >= 2,
            "{l:?}"
        );
        assert!(
            l.max_msg_size >= 1 << 20 && l.max_qp_rd_atom > 0 && l.max_qp_init_rd_atom > 0,
            "{l:?}"
        );
    }
}
