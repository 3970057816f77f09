//! Unreliable connections, shared receive queues, extended reliable connections, windows of type 1, and the newer
//! operations, between two devices of this process.

use std::{
    net::IpAddr,
    os::fd::AsFd,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use crate::common::*;
use roce::{
    AccessFlags, AddressVector, AsyncEvent, Grant, Mtu, Payload, Psn, Qp, QpAttr, QpCaps, QpOptions, QpState, QpType,
    Qpn, RecvWr, RemoteAddr, SendFlags, SendOp, SendRequest, SendWr, Srq, SrqAttr, SrqInit, SrqModify, Target,
    VerbsError, WcFlags, WcOpcode, WcStatus, WindowKind,
    verbs::{Flush, Placement, Selectivity},
};

fn options(side: &Side, qp_type: QpType) -> QpOptions<'_> {
    QpOptions {
        qp_type,
        send_cq: Some(&side.cq),
        recv_cq: Some(&side.cq),
        srq: None,
        xrcd: None,
        caps: QpCaps::default(),
        signal_all: false,
    }
}

/// To RTS, with the attributes that each service takes.
fn raise_as(qp: &Qp, local: IpAddr, remote: IpAddr, dest: Qpn) {
    let usual = QpAttr::to_rts(AddressVector::new(local, remote), Mtu::B1024, dest);
    let way = QpAttr {
        access: usual
            .access
            .map(|access| access | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT),
        rq_psn: Some(Psn::new(500)),
        sq_psn: Some(Psn::new(500)),
        retry_cnt: Some(6),
        ..usual
    };
    for attr in way.steps(qp.qp_type()) {
        qp.modify(&attr).unwrap();
    }
}

fn sides() -> (Side, Side) {
    (Side::new(roce::Device::open(config()).unwrap()), Side::new(open()))
}

/// Two queue pairs of one service, connected by hand; `srq` is b's.
fn hand_made(a: &Side, b: &Side, qp_type: QpType, srq: Option<&Srq>) -> (Qp, Qp) {
    let qa = a.device.create_qp_as(Some(&a.pd), &options(a, qp_type)).unwrap();
    let with_srq = QpOptions {
        srq,
        ..options(b, qp_type)
    };
    let qb = b.device.create_qp_as(Some(&b.pd), &with_srq).unwrap();
    raise_as(&qa, a.addr(), b.addr(), qb.qpn());
    raise_as(&qb, b.addr(), a.addr(), qa.qpn());
    (qa, qb)
}

/// Waits for an asynchronous event of the device.
fn async_event(side: &Side) -> AsyncEvent {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(event) = side.device.async_event().unwrap() {
            return event;
        }
        assert!(Instant::now() < until, "no asynchronous event");
        let _ = side.device.async_fd();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn unreliable_connections_send_and_write() {
    let (a, b) = sides();
    let (qa, qb) = hand_made(&a, &b, QpType::Uc, None);
    let (ma, mb) = (a.mr(1 << 17), b.mr(1 << 17));
    for (round, len) in [0usize, 1, 1024, 1025, 60_000].into_iter().enumerate() {
        let data = pattern(len, round as u8);
        ma.write(0, &data).unwrap();
        let sges = [ma.sge(0, len)];
        recv(&qb, 1, &[mb.sge(0, len)]);
        post(&qa, 2, SendOp::SendWithImm(3), Payload::Sges(&sges));
        a.good(1);
        let got = b.good(1)[0];
        assert_eq!((got.wr_id, got.byte_len as usize, got.imm), (1, len, 3));
        assert_eq!(contents(&mb, 0, len), data, "SEND of {len}");

        mb.write(0, &vec![0; len]).unwrap();
        recv(&qb, 4, &[]);
        post(&qa, 5, SendOp::WriteWithImm(remote(&mb, 0), 6), Payload::Sges(&sges));
        a.good(1);
        let got = b.good(1)[0];
        assert_eq!((got.wr_id, got.opcode, got.imm), (4, WcOpcode::RecvRdmaWithImm, 6));
        assert_eq!(contents(&mb, 0, len), data, "WRITE of {len}");
    }
    // Nobody hears of what is dropped: no receive, then all goes on.
    post(&qa, 7, SendOp::Send, Payload::Inline(b"lost"));
    a.good(1);
    let until = Instant::now() + TIMEOUT;
    while b.device.stats().port.transport.dropped_no_receive == 0 {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    recv(&qb, 8, &[mb.sge(0, 16)]);
    post(&qa, 9, SendOp::Send, Payload::Inline(b"found"));
    a.good(1);
    assert_eq!(b.good(1)[0].wr_id, 8);
    assert_eq!(contents(&mb, 0, 5), b"found");
    assert_eq!(a.device.stats().retransmits(), 0);
    // No READ on this service: it is posted and fails.
    let read = SendWr {
        wr_id: 1,
        op: SendOp::Read(remote(&mb, 0)),
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&[ma.sge(0, 8)]),
    };
    qa.post_send(&[read]).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::LocalQpOperationError);
}

#[test]
fn queue_pairs_share_receives_and_the_limit_is_reported() {
    let (a, b) = sides();
    let attr = SrqAttr {
        max_wr: 16,
        max_sge: 2,
        limit: 0,
    };
    let srq = b.device.create_srq(&b.pd, &SrqInit { attr, xrc: None }).unwrap();
    assert_eq!(srq.query(), attr);
    let pairs: Vec<_> = (0..2).map(|_| hand_made(&a, &b, QpType::Rc, Some(&srq))).collect();
    let mb = b.mr(4096);
    let sges: Vec<_> = (0..8).map(|i| [mb.sge(i * 64, 64)]).collect();
    let wrs: Vec<_> = sges
        .iter()
        .enumerate()
        .map(|(i, sges)| RecvWr { wr_id: i as u64, sges })
        .collect();
    srq.post_recv(&wrs).unwrap();
    let limit = SrqModify {
        limit: Some(6),
        max_wr: None,
    };
    srq.modify(&limit).unwrap();
    assert_eq!(srq.query().limit, 6);
    for i in 0..3usize {
        post(&pairs[i % 2].0, 1, SendOp::Send, Payload::Inline(&[i as u8; 8]));
        a.good(1);
        let got = b.good(1)[0];
        assert_eq!((got.wr_id, got.qpn), (i as u64, pairs[i % 2].1.qpn()));
        assert_eq!(contents(&mb, i * 64, 8), [i as u8; 8]);
    }
    assert_eq!(async_event(&b), AsyncEvent::SrqLimitReached(srq.handle()));
    assert_eq!((srq.query().limit, srq.len()), (0, 5));
    // A queue pair of its own receives takes none from outside; one with a shared queue has none of its own.
    let wr = RecvWr { wr_id: 1, sges: &[] };
    assert!(pairs[0].1.post_recv(&[wr]).is_err());
    // Resizing keeps what is in it.
    let size = |n| SrqModify {
        max_wr: Some(n),
        limit: None,
    };
    assert!(srq.modify(&size(4)).is_err());
    srq.modify(&size(5)).unwrap();
    assert!(matches!(srq.post_recv(&[wr]), Err((0, roce::PostError::QueueFull))));
    // In error a queue pair takes nothing more from it, and says so.
    let err = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    pairs[0].1.modify(&err).unwrap();
    assert_eq!(async_event(&b), AsyncEvent::LastWqeReached(pairs[0].1.qpn()));
    let wanting = SrqInit {
        attr: SrqAttr {
            max_wr: 1 << 30,
            ..attr
        },
        xrc: None,
    };
    assert!(matches!(
        b.device.create_srq(&b.pd, &wanting),
        Err(VerbsError::Invalid(_))
    ));
}

#[test]
fn extended_connections_find_the_queue_that_a_message_names() {
    let (a, b) = sides();
    let xrcd = b.device.open_xrcd().unwrap();
    let attr = SrqAttr {
        max_wr: 16,
        max_sge: 1,
        limit: 0,
    };
    let make = || {
        let init = SrqInit {
            attr,
            xrc: Some((&xrcd, &b.cq)),
        };
        b.device.create_srq(&b.pd, &init).unwrap()
    };
    let (one, two) = (make(), make());
    let ini = QpOptions {
        recv_cq: None,
        ..options(&a, QpType::XrcIni)
    };
    let ini = a.device.create_qp_as(Some(&a.pd), &ini).unwrap();
    let tgt = QpOptions {
        send_cq: None,
        recv_cq: None,
        xrcd: Some(&xrcd),
        ..options(&b, QpType::XrcTgt)
    };
    let tgt = b.device.create_qp_as(None, &tgt).unwrap();
    raise_as(&ini, a.addr(), b.addr(), tgt.qpn());
    raise_as(&tgt, b.addr(), a.addr(), ini.qpn());
    let mb = b.mr(4096);
    for (i, srq) in [&one, &two, &one].into_iter().enumerate() {
        let sges = [mb.sge(i * 64, 64)];
        srq.post_recv(&[RecvWr {
            wr_id: i as u64,
            sges: &sges,
        }])
        .unwrap();
        let request = SendRequest {
            wr: SendWr {
                wr_id: 1,
                op: SendOp::Send,
                flags: SendFlags::SIGNALED,
                payload: Payload::Inline(&[i as u8; 8]),
            },
            target: Target::Srq(srq.number()),
        };
        ini.post_requests(&[request]).unwrap();
        a.good(1);
        assert_eq!(b.good(1)[0].wr_id, i as u64);
        assert_eq!(contents(&mb, i * 64, 8), [i as u8; 8]);
    }
    assert!(one.is_empty() && two.is_empty());
}

#[test]
fn windows_of_type_1_are_bound_anew_and_unbound() {
    let (a, b) = sides();
    let (qa, qb) = hand_made(&a, &b, QpType::Rc, None);
    let region = b.device.alloc_mr(&b.pd, 4096, ALL | AccessFlags::MW_BIND).unwrap();
    let window = b.device.alloc_window(&b.pd, WindowKind::Type1).unwrap();
    let grant = |offset| Grant {
        region: &region,
        offset,
        len: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    let first = qb.post_bind(&window, &grant(0), 1, SendFlags::SIGNALED).unwrap();
    assert_eq!(b.good(1)[0].opcode, WcOpcode::BindWindow);
    assert_eq!(window.rkey(), first);
    assert!(matches!(region.deregister(), Err(VerbsError::Busy(_))));
    let at = |offset, rkey| RemoteAddr {
        addr: region.addr() + offset,
        rkey,
    };
    post(&qa, 2, SendOp::Write(at(0, first)), Payload::Inline(b"first"));
    a.good(1);
    assert_eq!(contents(&region, 0, 5), b"first");

    let second = qb.post_bind(&window, &grant(64), 3, SendFlags::SIGNALED).unwrap();
    b.good(1);
    assert_ne!(first, second);
    post(&qa, 4, SendOp::Write(at(64, second)), Payload::Inline(b"second"));
    a.good(1);
    assert_eq!(contents(&region, 64, 6), b"second");

    qb.post_unbind(&window, 5, SendFlags::SIGNALED).unwrap();
    b.good(1);
    region.deregister().unwrap();
    post(&qa, 6, SendOp::Write(at(64, second)), Payload::Inline(b"third"));
    assert_eq!(a.completions(1)[0].status, WcStatus::RemoteAccessError);
}

#[derive(Debug, Default)]
struct Log(Mutex<Vec<(usize, usize)>>);

impl roce::Persist for Log {
    fn persist(&self, offset: usize, len: usize) -> bool {
        self.0.lock().unwrap().push((offset, len));
        true
    }
}

#[test]
fn an_atomic_write_and_a_flush_reach_the_peer_s_memory() {
    let (a, b) = sides();
    let (qa, _qb) = hand_made(&a, &b, QpType::Rc, None);
    let ma = a.mr(64);
    let mut memory = vec![0u64; 512];
    let log = Arc::new(Log::default());
    let rights = ALL | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    let ptr = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: the memory outlives the region, and is looked at only through it until then.
    let mb = unsafe {
        b.device
            .register_persistent_mr(&b.pd, ptr, 4096, 0x10_0000, rights, log.clone())
    };
    let mb = mb.unwrap();
    ma.write(0, &7u64.to_ne_bytes()).unwrap();
    post(
        &qa,
        1,
        SendOp::AtomicWrite(remote(&mb, 8)),
        Payload::Sges(&[ma.sge(0, 8)]),
    );
    assert_eq!(a.good(1)[0].opcode, WcOpcode::AtomicWrite);
    assert_eq!(contents(&mb, 8, 8), 7u64.to_ne_bytes());
    let flush = |mr: &roce::Mr, placement| {
        SendOp::Flush(Flush {
            remote: remote(mr, 8),
            length: 8,
            placement,
            selectivity: Selectivity::Range,
        })
    };
    post(&qa, 2, flush(&mb, Placement::GLOBAL_VISIBILITY), Payload::Sges(&[]));
    assert_eq!(a.good(1)[0].opcode, WcOpcode::Flush);
    assert!(log.0.lock().unwrap().is_empty());
    post(&qa, 3, flush(&mb, Placement::PERSISTENT), Payload::Sges(&[]));
    a.good(1);
    assert_eq!(*log.0.lock().unwrap(), [(8, 8)]);
    // Ordinary memory does not survive the loss of power: the right can't even be given.
    assert!(b.device.alloc_mr(&b.pd, 64, rights).is_err());
    let volatile = b.device.alloc_mr(&b.pd, 64, ALL | AccessFlags::FLUSH_GLOBAL).unwrap();
    post(&qa, 4, flush(&volatile, Placement::PERSISTENT), Payload::Sges(&[]));
    assert_eq!(a.completions(1)[0].status, WcStatus::RemoteAccessError);
    drop(mb);
    assert_eq!(memory[1], 7);
}

/// Says when it begins, waits until it may end, or panics if nobody will say so.
#[derive(Debug)]
struct Gate {
    begun: Mutex<mpsc::Sender<()>>,
    open: Mutex<mpsc::Receiver<()>>,
    ends: Arc<Mutex<Vec<&'static str>>>,
}

impl roce::Persist for Gate {
    fn persist(&self, _offset: usize, _len: usize) -> bool {
        self.begun.lock().unwrap().send(()).unwrap();
        self.open
            .lock()
            .unwrap()
            .recv_timeout(TIMEOUT)
            .expect("somebody opens it");
        self.ends.lock().unwrap().push("persistent");
        true
    }
}

/// Memory behind a gate: word of its beginning, what opens it, and what has ended.
struct Gated {
    mr: roce::Mr,
    begun: mpsc::Receiver<()>,
    open: mpsc::Sender<()>,
    ends: Arc<Mutex<Vec<&'static str>>>,
}

fn gated(side: &Side) -> Gated {
    let ((tell, begun), (open, wait)) = (mpsc::channel(), mpsc::channel());
    let ends = Arc::<Mutex<Vec<_>>>::default();
    let gate = Gate {
        begun: tell.into(),
        open: wait.into(),
        ends: ends.clone(),
    };
    let memory: &'static mut [u64] = vec![0; 512].leak();
    let rights = ALL | AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    let (device, ptr) = (&side.device, memory.as_mut_ptr().cast());
    // SAFETY: leaked, and looked at only through the region.
    let mr = unsafe { device.register_persistent_mr(&side.pd, ptr, 4096, 0x10_0000, rights, Arc::new(gate)) };
    let mr = mr.unwrap();
    Gated { mr, begun, open, ends }
}

fn flush_of(mr: &roce::Mr) -> SendOp {
    SendOp::Flush(Flush {
        remote: remote(mr, 0),
        length: 64,
        placement: Placement::PERSISTENT,
        selectivity: Selectivity::Range,
    })
}

#[test]
fn a_flush_that_takes_long_keeps_up_nobody_else() {
    let (a, b) = sides();
    let (slow, _s) = hand_made(&a, &b, QpType::Rc, None);
    let (quick, _q) = hand_made(&a, &b, QpType::Rc, None);
    let gated = gated(&b);
    post(&slow, 1, flush_of(&gated.mr), Payload::Sges(&[]));
    post(
        &slow,
        2,
        SendOp::Write(remote(&gated.mr, 8)),
        Payload::Inline(b"behind"),
    );
    gated.begun.recv_timeout(TIMEOUT).unwrap();
    let mb = b.mr(64);
    for i in 0..100 {
        post(
            &quick,
            100 + i,
            SendOp::Write(remote(&mb, 0)),
            Payload::Inline(b"quick"),
        );
        assert_eq!(a.good(1)[0].wr_id, 100 + i);
    }
    assert_eq!(contents(&gated.mr, 8, 6), [0; 6]);
    gated.open.send(()).unwrap();
    let done: Vec<u64> = a.good(2).iter().map(|c| c.wr_id).collect();
    assert_eq!(done, [1, 2]);
    assert_eq!(contents(&gated.mr, 8, 6), b"behind");
}

#[test]
fn memory_is_not_given_back_before_what_makes_it_persistent_has_ended() {
    let (a, b) = sides();
    let (qa, _qb) = hand_made(&a, &b, QpType::Rc, None);
    let gated = gated(&b);
    post(&qa, 1, flush_of(&gated.mr), Payload::Sges(&[]));
    gated.begun.recv_timeout(TIMEOUT).unwrap();
    let (mr, ends) = (gated.mr, gated.ends.clone());
    let back = std::thread::spawn(move || {
        mr.deregister().unwrap();
        ends.lock().unwrap().push("given back");
    });
    // It has to be seen waiting to be caught at not waiting; one that waits is right in any case.
    std::thread::sleep(Duration::from_millis(50));
    gated.open.send(()).unwrap();
    back.join().unwrap();
    assert_eq!(*gated.ends.lock().unwrap(), ["persistent", "given back"]);
    a.good(1);
}

#[test]
fn a_flush_whose_memory_panics_fails_alone() {
    let (a, b) = sides();
    let (qa, _qb) = hand_made(&a, &b, QpType::Rc, None);
    let (other, _o) = hand_made(&a, &b, QpType::Rc, None);
    let Gated { mr, open, .. } = gated(&b);
    drop(open);
    post(&qa, 1, flush_of(&mr), Payload::Sges(&[]));
    assert_eq!(a.completions(1)[0].status, WcStatus::RemoteOperationError);
    let mb = b.mr(64);
    post(&other, 2, SendOp::Write(remote(&mb, 0)), Payload::Inline(b"other"));
    a.good(1);
}

#[test]
fn a_descriptor_tells_of_asynchronous_events() {
    let (a, b) = sides();
    let (qa, qb) = hand_made(&a, &b, QpType::Rc, None);
    let mb = b.mr(64);
    // The peer writes where it may not: the responder's side is told.
    let wrong = RemoteAddr {
        rkey: roce::RKey(mb.rkey().0 ^ 0x100),
        ..remote(&mb, 0)
    };
    post(&qa, 1, SendOp::Write(wrong), Payload::Inline(b"x"));
    a.completions(1);
    let mut poll = mio::Poll::new().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&b.device.async_fd().as_fd());
    poll.registry()
        .register(&mut mio::unix::SourceFd(&fd), mio::Token(0), mio::Interest::READABLE)
        .unwrap();
    let mut events = mio::Events::with_capacity(1);
    poll.poll(&mut events, Some(TIMEOUT)).unwrap();
    assert!(!events.is_empty());
    let mut seen = vec![];
    while let Some(event) = b.device.async_event().unwrap() {
        seen.push(event);
    }
    assert!(seen.contains(&AsyncEvent::QpAccessError(qb.qpn())), "{seen:?}");
}

#[test]
fn flags_of_windows_and_invalidation_arrive() {
    let (a, b) = sides();
    let (qa, qb) = hand_made(&a, &b, QpType::Rc, None);
    let region = b.device.alloc_mr(&b.pd, 4096, ALL | AccessFlags::MW_BIND).unwrap();
    let window = b.device.alloc_window(&b.pd, WindowKind::Type2A).unwrap();
    let grant = Grant {
        region: &region,
        offset: 0,
        len: 64,
        access: AccessFlags::REMOTE_WRITE,
    };
    let key = qb.post_bind(&window, &grant, 1, SendFlags::SIGNALED).unwrap();
    b.good(1);
    recv(&qb, 2, &[region.sge(128, 64)]);
    post(&qa, 3, SendOp::SendWithInv(key), Payload::Inline(b"closed"));
    a.good(1);
    let got = b.good(1)[0];
    assert!(got.flags.contains(WcFlags::WITH_INV));
    assert_eq!(got.invalidated, key);
    region.deregister().unwrap();
}

/// However many queue pairs fail before the program looks; what one that is gone had to tell goes with it.
#[test]
fn events_of_queue_pairs_all_wait_for_the_program() {
    const MANY: usize = 1500;
    let (_a, b) = sides();
    let attr = SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };
    let srq = b.device.create_srq(&b.pd, &SrqInit { attr, xrc: None }).unwrap();
    let with_srq = QpOptions {
        srq: Some(&srq),
        ..options(&b, QpType::Rc)
    };
    let err = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    let mut failed: Vec<Qp> = (0..MANY + 1)
        .map(|_| {
            let qp = b.device.create_qp_as(Some(&b.pd), &with_srq).unwrap();
            raise_as(&qp, b.addr(), b.addr(), qp.qpn());
            qp.modify(&err).unwrap();
            qp
        })
        .collect();
    let gone = failed.remove(0).qpn();
    for qp in &failed {
        assert_eq!(async_event(&b), AsyncEvent::LastWqeReached(qp.qpn()), "not {gone}");
    }
    assert_eq!(b.device.async_event().unwrap(), None);
    failed[0]
        .modify(&QpAttr {
            state: Some(QpState::Reset),
            ..err
        })
        .unwrap();
    raise_as(&failed[0], b.addr(), b.addr(), failed[0].qpn());
    failed[0].modify(&err).unwrap();
    drop(failed);
    assert_eq!(b.device.async_event().unwrap(), None);
}
