//! Queries, changes and limits of objects.

use crate::common::*;
use roce::{
    AccessFlags, AddressVector, Device, Payload, QpCaps, QpInit, QpOptions, QpType, Reregister, SendOp, VerbsError,
    WcStatus,
};

#[test]
fn counters_have_rdma_rxe_s_names() {
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    recv(&p.qb, 1, &[mb.sge(0, 64)]);
    post(&p.qa, 2, SendOp::Send, Payload::Sges(&[ma.sge(0, 64)]));
    p.a.good(1);
    p.b.good(1);
    let value = |device: &Device, name: &str| {
        let all = device.hw_counters();
        all.iter()
            .find(|(n, _)| *n == name)
            .unwrap_or_else(|| panic!("{name}"))
            .1
    };
    assert!(value(&p.a.device, "sent_pkts") > 0 && value(&p.b.device, "rcvd_pkts") > 0);
    assert_eq!(value(&p.a.device, "rdma_sends"), 1);
    assert_eq!(value(&p.b.device, "rdma_recvs"), 1);
    assert_eq!(value(&p.a.device, "link_downed"), 0);
}

#[test]
fn completion_queues_are_resized_and_looked_into() {
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    for i in 0..3 {
        post(&p.qa, i, SendOp::Write(remote(&mb, 0)), Payload::Sges(&[ma.sge(0, 8)]));
    }
    let until = std::time::Instant::now() + TIMEOUT;
    while p.a.cq.peek(10) < 3 {
        assert!(std::time::Instant::now() < until);
        p.a.device.progress();
    }
    assert_eq!((p.a.cq.peek(2), p.a.cq.capacity()), (2, 8191));
    assert!(p.a.cq.resize(2).is_err());
    p.a.cq.resize(3).unwrap();
    assert_eq!(p.a.cq.capacity(), 3);
    let limits = p.a.device.limits();
    assert!(matches!(p.a.cq.resize(limits.max_cqe + 1), Err(VerbsError::Invalid(_))));
    assert_eq!(p.a.good(3).len(), 3);
}

#[test]
fn memory_is_registered_anew_with_other_rights_place_and_domain() {
    let p = pair();
    let mut memory = vec![0u8; 8192];
    let ptr = memory.as_mut_ptr();
    // SAFETY: the memory outlives all regions of it, and is looked at only when those are gone.
    unsafe {
        let mr = p.b.device.register_mr(&p.b.pd, ptr, 4096, 0x5000, ALL).unwrap();
        assert_eq!((mr.addr(), mr.len()), (0x5000, 4096));
        post(&p.qa, 1, SendOp::Write(remote(&mr, 0)), Payload::Inline(b"one"));
        p.a.good(1);

        // Another place.
        let moved = Reregister {
            memory: Some((ptr.add(4096), 4096, 0x9000)),
            ..Reregister::default()
        };
        let other = mr.reregister(&moved).unwrap();
        assert_eq!((other.addr(), other.access()), (0x9000, mr.access()));
        post(&p.qa, 2, SendOp::Write(remote(&other, 0)), Payload::Inline(b"two"));
        p.a.good(1);

        // Rights that don't go together change nothing.
        let wrong = Reregister {
            access: Some(AccessFlags::REMOTE_WRITE),
            ..Reregister::default()
        };
        assert!(other.reregister(&wrong).is_err());
        post(&p.qa, 3, SendOp::Write(remote(&other, 8)), Payload::Inline(b"still"));
        p.a.good(1);

        // Another domain: the queue pair's keys don't open it.
        let pd = p.b.device.alloc_pd().unwrap();
        let foreign = Reregister {
            pd: Some(&pd),
            ..Reregister::default()
        };
        let foreign = other.reregister(&foreign).unwrap();
        post(&p.qa, 4, SendOp::Write(remote(&foreign, 0)), Payload::Inline(b"no"));
        assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteAccessError);
        foreign.deregister().unwrap();
        assert!(foreign.deregister().is_err());
        assert!(p.b.mr(64).reregister(&moved).is_err(), "memory of the region's own");
    }
    assert_eq!(
        (&memory[..3], &memory[4096..4099], &memory[4104..4109]),
        (&b"one"[..], &b"two"[..], &b"still"[..])
    );
}

#[test]
fn limits_are_enforced() {
    let a = Side::new(open());
    let limits = a.device.limits();
    let caps = |change: &dyn Fn(&mut QpCaps)| {
        let mut caps = QpCaps::default();
        change(&mut caps);
        let init = QpInit {
            send_cq: &a.cq,
            recv_cq: &a.cq,
            caps,
            signal_all: false,
        };
        a.device.create_qp(&a.pd, &init).map(drop)
    };
    assert!(matches!(
        caps(&|c| c.max_send_wr = limits.max_qp_wr + 1),
        Err(VerbsError::Invalid(_))
    ));
    assert!(matches!(
        caps(&|c| c.max_recv_sge = limits.max_sge + 1),
        Err(VerbsError::Invalid(_))
    ));
    assert!(matches!(
        caps(&|c| c.max_inline_data = limits.max_inline_data + 1),
        Err(VerbsError::Invalid(_))
    ));
    let av = AddressVector::new(a.addr(), a.addr());
    let many: Vec<_> = (0..limits.max_ah)
        .map(|_| a.device.create_ah(&a.pd, &av).unwrap())
        .collect();
    assert!(matches!(a.device.create_ah(&a.pd, &av), Err(VerbsError::Limit(_))));
    drop(many);
    a.device.create_ah(&a.pd, &av).unwrap();
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let plain = QpOptions {
        qp_type: QpType::Ud,
        send_cq: Some(&a.cq),
        recv_cq: Some(&a.cq),
        srq: None,
        xrcd: None,
        caps: QpCaps::default(),
        signal_all: true,
    };
    let made = a.device.create_qp_as(Some(&a.pd), &plain).unwrap();
    assert_eq!(
        (made.qp_type(), made.caps(), made.signals_all()),
        (QpType::Ud, QpCaps::default(), true)
    );
    let refused = |pd, options| assert!(a.device.create_qp_as(pd, &options).is_err());
    refused(None, plain);
    refused(Some(&b.pd), plain);
    refused(Some(&a.pd), QpOptions { send_cq: None, ..plain });
    refused(
        Some(&a.pd),
        QpOptions {
            recv_cq: Some(&b.cq),
            ..plain
        },
    );
    let xrcd = a.device.open_xrcd().unwrap();
    refused(
        Some(&a.pd),
        QpOptions {
            xrcd: Some(&xrcd),
            ..plain
        },
    );
    let target = QpOptions {
        qp_type: QpType::XrcTgt,
        ..plain
    };
    refused(Some(&a.pd), target);
}

/// One more of every object than there may be at a time, one after the other: whatever one left behind would show.
#[test]
fn objects_that_come_and_go_leave_nothing() {
    let a = Side::new(open());
    let limits = a.device.limits();
    let av = AddressVector::new(a.addr(), a.addr());
    let times = |n: u32, make: &mut dyn FnMut()| (0..=n).for_each(|_| make());
    times(limits.max_pd, &mut || drop(a.device.alloc_pd().unwrap()));
    times(limits.max_ah, &mut || drop(a.device.create_ah(&a.pd, &av).unwrap()));
    times(limits.max_xrcd, &mut || drop(a.device.open_xrcd().unwrap()));
    times(limits.max_cq, &mut || drop(a.device.create_cq(16, None, 0).unwrap()));
    times(limits.max_mw, &mut || drop(a.device.alloc_mw(&a.pd).unwrap()));
    let xrcd = a.device.open_xrcd().unwrap();
    let attr = roce::SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };
    let mut xrc = false;
    times(limits.max_srq, &mut || {
        xrc = !xrc;
        let init = roce::SrqInit {
            attr,
            xrc: xrc.then_some((&xrcd, &a.cq)),
        };
        drop(a.device.create_srq(&a.pd, &init).unwrap());
    });
    let mut ud = false;
    times(limits.max_qp, &mut || {
        ud = !ud;
        let options = QpOptions {
            qp_type: if ud { QpType::Ud } else { QpType::Rc },
            send_cq: Some(&a.cq),
            recv_cq: Some(&a.cq),
            srq: None,
            xrcd: None,
            caps: QpCaps::default(),
            signal_all: false,
        };
        drop(a.device.create_qp_as(Some(&a.pd), &options).unwrap());
    });
    // Regions have memory: a part of their number must do.
    times(4096, &mut || drop(a.mr(64)));
}
