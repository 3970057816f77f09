//! The connection manager through the device: who may connect, and how connections end.

use std::{net::SocketAddr, time::Duration};

use crate::common::*;
use roce::{
    CmEventKind, ConnParams, Device, DeviceConfig, Id, Mtu, Payload, Qp, QpState, RejectReason, RemoteAddr, SendOp,
    WcStatus,
};

#[test]
fn a_connection_names_both_ends_and_ends_on_both() {
    let p = pair();
    let [ia, ib] = p.ids.as_ref().unwrap();
    assert_eq!(ia.peer_addr().unwrap().ip(), p.b.addr());
    assert_eq!(ia.peer_addr().unwrap().port(), 7000);
    assert_eq!(ib.peer_addr().unwrap().ip(), p.a.addr());
    assert_eq!(ib.local_addr(), SocketAddr::new(p.b.addr(), 7000));
    let mb = p.b.mr(64);
    recv(&p.qb, 1, &[mb.sge(0, 64)]);
    ia.disconnect().unwrap();
    ia.disconnect().unwrap();
    assert!(matches!(p.b.event().kind, CmEventKind::Disconnected { .. }));
    assert!(matches!(p.a.event().kind, CmEventKind::Disconnected { .. }));
    assert_eq!(p.b.completions(1)[0].status, WcStatus::FlushError);
    assert_eq!(p.qa.state().unwrap(), QpState::Err);
    assert_eq!(p.qb.state().unwrap(), QpState::Err);
}

#[test]
fn dropping_the_handle_and_the_queue_pair_tells_the_peer() {
    for handle_first in [true, false] {
        let mut p = pair();
        let [ia, _ib] = p.ids.take().unwrap();
        match handle_first {
            true => drop((ia, p.qa)),
            false => drop((p.qa, ia)),
        }
        // `_ib` keeps the other end.
        assert!(matches!(p.b.event().kind, CmEventKind::Disconnected { .. }));
    }
}

#[test]
fn a_queue_pair_keeps_its_connection() {
    let mut p = pair();
    drop(p.ids.take());
    exercise(&p);
    assert!(p.a.channel.wait(Some(Duration::ZERO)).unwrap().is_none());
    drop(p.qa);
    let event = p.b.event();
    assert!(matches!(event.kind, CmEventKind::Disconnected { .. }));
    assert_eq!(event.id.peer_addr().map(|peer| peer.ip()), Some(p.a.addr()));
}

/// Asks for a connection with a new queue pair.
fn ask(side: &Side, addr: SocketAddr) -> (Qp, Id) {
    let qp = side.qp();
    let id = side
        .device
        .connect(&side.channel, None, addr, &qp, ConnParams::default());
    (qp, id.unwrap())
}

#[test]
fn nobody_listening_is_told_at_once() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (qp, _id) = ask(&a, SocketAddr::new(b.addr(), 7001));
    let CmEventKind::Rejected { reason, .. } = a.event().kind else {
        panic!("not rejected");
    };
    assert_eq!(reason, RejectReason::INVALID_SERVICE_ID);
    assert_eq!(qp.state().unwrap(), QpState::Err);
}

#[test]
fn a_refusal_carries_its_words() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let addr = SocketAddr::new(b.addr(), 7000);
    let _listener = b.device.listen(&b.channel, addr, 8).unwrap();
    let (_qp, _id) = ask(&a, addr);
    let (id, _) = b.request();
    id.reject(b"not today").unwrap();
    let CmEventKind::Rejected {
        reason, private_data, ..
    } = a.event().kind
    else {
        panic!("not rejected");
    };
    assert_eq!(reason, RejectReason::CONSUMER);
    assert_eq!(&private_data[..9], b"not today");
}

#[test]
fn a_request_that_nobody_takes_is_rejected_with_its_listener() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let addr = SocketAddr::new(b.addr(), 7000);
    let channel = b.device.create_cm_channel().unwrap();
    let listener = b.device.listen(&channel, addr, 8).unwrap();
    let (_qp, _id) = ask(&a, addr);
    // It waits in the queue.
    assert!(roce_readable(&channel));
    drop(listener);
    drop(channel);
    assert!(matches!(a.event().kind, CmEventKind::Rejected { .. }));
}

fn roce_readable(channel: &roce::EventChannel) -> bool {
    roce_net::wait_readable(channel.as_fd(), Some(TIMEOUT)).unwrap()
}

#[test]
fn a_port_has_one_listener_and_is_free_after_it() {
    let b = Side::new(open());
    let addr = SocketAddr::new(b.addr(), 7000);
    let first = b.device.listen(&b.channel, addr, 8).unwrap();
    assert!(b.device.listen(&b.channel, addr, 8).is_err());
    let elsewhere = SocketAddr::new(address(), 7000);
    assert!(b.device.listen(&b.channel, elsewhere, 8).is_err(), "not our address");
    drop(first);
    b.device.listen(&b.channel, addr, 8).unwrap();
}

#[test]
fn a_path_mtu_that_the_passive_side_lacks_is_not_used() {
    let a = Side::new(open());
    let b = Side::new(
        Device::open(DeviceConfig {
            mtu: Some(Mtu::B1024),
            ..config()
        })
        .unwrap(),
    );
    let addr = SocketAddr::new(b.addr(), 7000);
    let _listener = b.device.listen(&b.channel, addr, 8).unwrap();
    let (qa, _id) = ask(&a, addr);
    let (id, _) = b.request();
    let qb = b.qp();
    id.accept(&qb, ConnParams::default()).unwrap();
    assert!(matches!(a.event().kind, CmEventKind::Established { .. }));
    assert_eq!([&qa, &qb].map(|qp| qp.query().unwrap().path_mtu), [Some(Mtu::B1024); 2]);
}

#[test]
fn packets_from_another_address_are_dropped() {
    let p = pair();
    let c = Side::new(open());
    let mb = p.b.mr(64);
    // A queue pair of a third device that claims to be connected to `qb`, with everything right but its address.
    let stranger = c.qp();
    let attr = p.qb.query().unwrap();
    raise(
        &stranger,
        c.addr(),
        &p.qb,
        p.b.addr(),
        [attr.rq_psn.unwrap().value(), 0],
    );
    let mc = c.mr(64);
    mc.write(0, &[0xbb; 64]).unwrap();
    let target = RemoteAddr {
        addr: mb.addr(),
        rkey: mb.rkey(),
    };
    post(&stranger, 1, SendOp::Write(target), Payload::Sges(&[mc.sge(0, 64)]));
    let until = std::time::Instant::now() + TIMEOUT;
    while p.b.device.stats().port.drop_peer_address == 0 {
        assert!(std::time::Instant::now() < until, "{:?}", p.b.device.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut seen = [0; 64];
    mb.read(0, &mut seen).unwrap();
    assert_eq!(seen, [0; 64]);
}

#[test]
fn a_completion_channel_works_with_mio_and_with_a_blocking_thread() {
    use mio::{Events, Interest, Poll, Token, unix::SourceFd};
    use std::os::fd::AsRawFd;
    let p = pair();
    let channel = p.b.device.create_channel().unwrap();
    let cq = p.b.device.create_cq(16, Some(&channel), 77).unwrap();
    let init = roce::QpInit {
        send_cq: &cq,
        recv_cq: &cq,
        caps: roce::QpCaps::default(),
        signal_all: false,
    };
    let (qa, qb) = (p.a.qp(), p.b.device.create_qp(&p.b.pd, &init).unwrap());
    raise(&qa, p.a.addr(), &qb, p.b.addr(), [1, 2]);
    raise(&qb, p.b.addr(), &qa, p.a.addr(), [2, 1]);
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    let mut poll = Poll::new().unwrap();
    let fd = channel.as_fd().as_raw_fd();
    poll.registry()
        .register(&mut SourceFd(&fd), Token(1), Interest::READABLE)
        .unwrap();
    let mut events = Events::with_capacity(4);
    let mut out = vec![];
    for round in 0..20u64 {
        recv(&qb, round, &[mb.sge(0, 64)]);
        cq.arm(false).unwrap();
        assert_eq!(channel.wait(Some(Duration::ZERO)).unwrap(), None);
        post(&qa, round, SendOp::Send, Payload::Sges(&[ma.sge(0, 64)]));
        if round % 2 == 0 {
            events.clear();
            poll.poll(&mut events, Some(TIMEOUT)).unwrap();
            assert!(!events.is_empty(), "round {round}");
            assert_eq!(channel.wait(Some(Duration::ZERO)).unwrap(), Some(77));
        } else {
            assert_eq!(channel.wait(Some(TIMEOUT)).unwrap(), Some(77));
            let _ = poll.poll(&mut events, Some(Duration::ZERO));
        }
        let until = std::time::Instant::now() + TIMEOUT;
        while out.len() as u64 <= round {
            assert!(std::time::Instant::now() < until);
            cq.poll(&mut out, 8).unwrap();
        }
        assert_eq!(out.last().unwrap().wr_id, round);
        p.a.good(1);
    }
}

#[test]
fn one_sided_operations_land_while_the_target_makes_no_call() {
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    let target = RemoteAddr {
        addr: mb.addr(),
        rkey: mb.rkey(),
    };
    // First poll long enough that the target's background thread stands back.
    for _ in 0..1000 {
        p.b.cq.poll(&mut vec![], 1).unwrap();
    }
    for i in 0..50u64 {
        ma.write(0, &i.to_ne_bytes()).unwrap();
        post(&p.qa, i, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 64)]));
        p.a.good(1);
    }
}

#[test]
fn many_threads_on_one_device() {
    let p = pair();
    let addr = SocketAddr::new(p.b.addr(), 7002);
    // Each thread has objects of its own on the two devices.
    let listener = Side::new(p.b.device.clone());
    let _listening = listener.device.listen(&listener.channel, addr, 64).unwrap();
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let (a, b) = (Side::new(p.a.device.clone()), Side::new(p.b.device.clone()));
            let (qa, qb) = (a.qp(), b.qp());
            let ids = connect(&a, &listener, &qa, &qb, addr);
            (a, b, qa, qb, ids)
        })
        .collect();
    std::thread::scope(|scope| {
        for (i, (a, b, qa, _qb, _ids)) in workers.iter().enumerate() {
            scope.spawn(move || {
                let (ma, mb) = (a.mr(100_000), b.mr(100_000));
                let mut seen = vec![0; 100_000];
                for round in 0..20 {
                    let data = pattern(100_000, i as u8 ^ round);
                    ma.write(0, &data).unwrap();
                    let target = RemoteAddr {
                        addr: mb.addr(),
                        rkey: mb.rkey(),
                    };
                    let sges = [ma.sge(0, 100_000)];
                    post(qa, i as u64, SendOp::Write(target), Payload::Sges(&sges));
                    assert_eq!(a.good(1)[0].wr_id, i as u64);
                    mb.read(0, &mut seen).unwrap();
                    assert!(seen == data, "thread {i}, round {round}");
                }
            });
        }
    });
}
