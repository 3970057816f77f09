//! Every operation between two devices of this process, over loopback.

use std::time::Instant;

use crate::common::*;
use roce::{
    AccessFlags, Device, DeviceConfig, Grant, Mtu, Payload, QpAttr, QpState, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, WcFlags, WcOpcode, WcStatus,
};

#[test]
fn all_operations() {
    exercise(&pair());
}

#[test]
fn all_operations_without_segmentation_and_merging() {
    let plain = || DeviceConfig {
        gso: false,
        gro: false,
        ..config()
    };
    let pair = connected(plain(), plain());
    exercise(&pair);
    let stats = pair.a.device.stats();
    assert_eq!(stats.path.tx_bursts, stats.port.tx_packets, "one packet per send");
}

#[test]
fn all_operations_at_every_path_mtu() {
    for mtu in Mtu::ALL {
        let small = || DeviceConfig {
            mtu: Some(mtu),
            ..config()
        };
        let pair = connected(small(), small());
        assert_eq!(pair.qa.query().unwrap().path_mtu, Some(mtu));
        exercise(&pair);
    }
}

#[test]
fn all_operations_over_ipv6() {
    let _only = ferroce_loopback::only_one();
    let v6 = std::net::Ipv6Addr::LOCALHOST.into();
    // One address only: both queue pairs are the same device's.
    let device = match Device::open(DeviceConfig::new(v6)) {
        Ok(device) => device,
        Err(e) => panic!("no IPv6 on this host: {e}"),
    };
    let (a, b) = (Side::new(device.clone()), Side::new(device));
    let addr = std::net::SocketAddr::new(v6, 7000);
    let _listener = b.device.listen(&b.channel, addr, 8).unwrap();
    let (qa, qb) = (a.qp(), b.qp());
    let (ia, ib) = connect(&a, &b, &qa, &qb, addr);
    exercise(&Pair {
        a,
        b,
        qa,
        qb,
        ids: Some([ia, ib]),
    });
}

#[test]
fn a_small_socket_buffer_only_slows_down() {
    let small = || DeviceConfig {
        socket_buffer: 64 << 10,
        ..config()
    };
    exercise(&connected(small(), small()));
}

#[test]
fn without_a_background_thread_polling_moves_everything() {
    let (ca, cb) = (
        DeviceConfig {
            background: false,
            ..config()
        },
        config(),
    );
    let pair = connected(ca, cb);
    exercise(&pair);
}

#[test]
fn a_send_that_is_acknowledged_when_its_queue_pair_stops_is_not_flushed() {
    let still = DeviceConfig {
        background: false,
        ..config()
    };
    let pair = connected(still, config());
    let (a, b) = (&pair.a, &pair.b);
    let mb = b.mr(64);
    recv(&pair.qb, 1, &[mb.sge(0, 64)]);
    let before = b.device.stats().port.tx_packets;
    post(&pair.qa, 2, SendOp::Send, Payload::Inline(b"x"));
    b.good(1);
    let until = Instant::now() + TIMEOUT;
    while b.device.stats().port.tx_packets == before {
        assert!(Instant::now() < until, "no acknowledgement");
    }
    let stop = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    pair.qa.modify(&stop).unwrap();
    assert_eq!(a.good(1)[0].wr_id, 2);
}

#[test]
fn inline_data_unsignalled_sends_and_solicited_events() {
    let pair = pair();
    let (a, b) = (&pair.a, &pair.b);
    let mb = b.mr(64);
    recv(&pair.qb, 1, &[mb.sge(0, 64)]);
    recv(&pair.qb, 2, &[mb.sge(32, 32)]);
    let mut text = *b"inline bytes may change at once";
    let wr = |data| SendWr {
        wr_id: 9,
        op: SendOp::Send,
        flags: SendFlags::empty(),
        payload: Payload::Inline(data),
    };
    pair.qa.post_send(&[wr(&text)]).unwrap();
    text.fill(0);
    post(&pair.qa, 10, SendOp::Send, Payload::Inline(b"x"));
    let c = b.good(2);
    assert_eq!((c[0].wr_id, c[1].wr_id), (1, 2));
    assert_eq!(contents(&mb, 0, 31), b"inline bytes may change at once");
    assert_eq!(a.good(1)[0].wr_id, 10, "only the signalled one completes");
}

#[test]
fn errors_of_the_peer_reach_the_completion() {
    // A key that does not exist.
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    let wrong = RemoteAddr {
        rkey: roce::RKey(mb.rkey().0 ^ 0x100),
        ..remote(&mb, 0)
    };
    post(&p.qa, 1, SendOp::Write(wrong), Payload::Sges(&[ma.sge(0, 64)]));
    assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteAccessError);
    // Everything after it is flushed.
    let wr = RecvWr {
        wr_id: 2,
        sges: &[ma.sge(0, 64)],
    };
    p.qa.post_recv(&[wr]).unwrap();
    assert_eq!(p.a.completions(1)[0].status, WcStatus::FlushError);

    // A range that ends outside of the region.
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    post(&p.qa, 1, SendOp::Read(remote(&mb, 1)), Payload::Sges(&[ma.sge(0, 64)]));
    assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteAccessError);

    // A receive that is too short.
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    recv(&p.qb, 1, &[mb.sge(0, 63)]);
    post(&p.qa, 1, SendOp::Send, Payload::Sges(&[ma.sge(0, 64)]));
    assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteInvalidRequestError);
    assert_eq!(p.b.completions(1)[0].status, WcStatus::LocalLengthError);
}

#[test]
fn a_deregistered_region_is_out_of_reach() {
    let p = pair();
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    let target = remote(&mb, 0);
    drop(mb);
    post(&p.qa, 1, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 64)]));
    assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteAccessError);
}

#[test]
fn borrowed_memory_is_written_in_place() {
    let p = pair();
    let ma = p.a.mr(64);
    ma.write(0, &[7; 64]).unwrap();
    let mut place = vec![0u64; 8];
    let ptr = place.as_mut_ptr().cast::<u8>();
    // SAFETY: `place` lives until after `mb` is dropped, and is not looked at before.
    let mb = unsafe { p.b.device.register_mr(&p.b.pd, ptr, 64, 0x1000, ALL) }.unwrap();
    assert_eq!(mb.addr(), 0x1000);
    post(&p.qa, 1, SendOp::Write(remote(&mb, 0)), Payload::Sges(&[ma.sge(0, 64)]));
    p.a.good(1);
    drop(mb);
    assert_eq!(place, [0x0707_0707_0707_0707; 8]);
}

#[test]
fn revocable_regions_renew_and_end_their_keys() {
    let p = pair();
    let (ma, mb) = (p.a.mr(4096), p.b.mr(4096));
    let key = p.b.device.alloc_revocable(&p.b.pd).unwrap();
    let grant = |offset| Grant {
        region: &mb,
        offset,
        len: 64,
        access: AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE,
    };
    let write = |addr: u64, rkey| {
        ma.write(0, &[rkey as u8; 64]).unwrap();
        let target = RemoteAddr {
            addr,
            rkey: roce::RKey(rkey),
        };
        post(&p.qa, 1, SendOp::Write(target), Payload::Sges(&[ma.sge(0, 64)]));
        p.a.completions(1)[0].status
    };
    let mut last = None;
    for round in 0..5u64 {
        let offset = 64 * round as usize;
        let rkey =
            p.qb.post_grant(&key, &grant(offset), round, SendFlags::SIGNALED)
                .unwrap();
        let c = p.b.good(1);
        assert_eq!((c[0].wr_id, c[0].opcode), (round, WcOpcode::FastRegister));
        assert_eq!(key.rkey(), rkey);
        assert_ne!(Some(rkey), last);
        let addr = mb.addr() + offset as u64;
        assert_eq!(write(addr, rkey.0), WcStatus::Success);
        assert_eq!(contents(&mb, offset, 64), [rkey.0 as u8; 64]);
        last = Some(rkey);
    }
    assert!(p.qb.post_grant(&key, &grant(4096 - 63), 0, SendFlags::empty()).is_err());
    p.qb.post_revoke(&key, 9, SendFlags::SIGNALED).unwrap();
    assert_eq!(p.b.good(1)[0].opcode, WcOpcode::LocalInvalidate);
    assert_eq!(write(mb.addr(), last.unwrap().0), WcStatus::RemoteAccessError);
}

#[test]
fn a_window_opens_a_part_of_a_region() {
    let p = pair();
    let ma = p.a.mr(4096);
    let mb = p.b.device.alloc_mr(&p.b.pd, 4096, ALL | AccessFlags::MW_BIND).unwrap();
    let window = p.b.device.alloc_mw(&p.b.pd).unwrap();
    let grant = Grant {
        region: &mb,
        offset: 1024,
        len: 512,
        access: AccessFlags::REMOTE_READ,
    };
    let rkey = p.qb.post_bind(&window, &grant, 1, SendFlags::SIGNALED).unwrap();
    assert_eq!(p.b.good(1)[0].opcode, WcOpcode::BindWindow);
    mb.write(1024, &[5; 512]).unwrap();
    let target = RemoteAddr {
        addr: mb.addr() + 1024,
        rkey,
    };
    post(&p.qa, 1, SendOp::Read(target), Payload::Sges(&[ma.sge(0, 512)]));
    p.a.good(1);
    assert_eq!(contents(&ma, 0, 512), [5; 512]);
    // A SEND that invalidates closes it for good.
    recv(&p.qb, 2, &[]);
    post(&p.qa, 3, SendOp::SendWithInv(rkey), Payload::Sges(&[]));
    p.a.good(1);
    let c = p.b.good(1);
    assert_eq!((c[0].flags.contains(WcFlags::WITH_INV), c[0].invalidated), (true, rkey));
    post(&p.qa, 4, SendOp::Read(target), Payload::Sges(&[ma.sge(0, 512)]));
    assert_eq!(p.a.completions(1)[0].status, WcStatus::RemoteAccessError);
}

#[test]
fn queue_pairs_connected_by_hand() {
    let (a, b) = (Side::new(open()), Side::new(open()));
    let (qa, qb) = (a.qp(), b.qp());
    raise(&qa, a.addr(), &qb, b.addr(), [0x00ff_fff0, 5]);
    raise(&qb, b.addr(), &qa, a.addr(), [5, 0x00ff_fff0]);
    exercise(&Pair {
        a,
        b,
        qa,
        qb,
        ids: None,
    });
}

#[test]
fn a_word_that_another_thread_counts_up_costs_no_packet() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let p = pair();
    let (ma, mb) = (p.a.mr(1 << 16), p.b.mr(1 << 16));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mr in [&ma, &mb] {
            let done = &done;
            // SAFETY: the region is page-aligned, larger than 8 KiB and outlives the scope; all access is atomic here.
            let word = unsafe { AtomicU64::from_ptr(mr.as_ptr().add(4096).cast()) };
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    word.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..200u64 {
            let half = |mr: &roce::Mr| [mr.sge(0, 32 << 10)];
            // Both words lie in the first half: read from there, and land in the second.
            let to_a = [ma.sge(32 << 10, 32 << 10)];
            post(
                &p.qa,
                round,
                SendOp::Write(remote(&mb, 32 << 10)),
                Payload::Sges(&half(&ma)),
            );
            post(&p.qa, round, SendOp::Read(remote(&mb, 0)), Payload::Sges(&to_a));
            p.a.good(2);
        }
        done.store(true, Ordering::Relaxed);
    });
    for stats in [p.a.device.stats(), p.b.device.stats()] {
        assert_eq!(stats.icrc_errors(), 0, "{stats:?}");
    }
    assert!(u64::from_ne_bytes(contents(&mb, (32 << 10) + 4096, 8).try_into().unwrap()) > 0);
}

#[test]
fn a_full_completion_queue_is_an_error_not_a_loss() {
    let p = pair();
    let small = p.a.device.create_cq(2, None, 0).unwrap();
    let init = roce::QpInit {
        send_cq: &small,
        recv_cq: &small,
        caps: roce::QpCaps::default(),
        signal_all: true,
    };
    let (qa, qb) = (p.a.device.create_qp(&p.a.pd, &init).unwrap(), p.b.qp());
    raise(&qa, p.a.addr(), &qb, p.b.addr(), [1, 2]);
    raise(&qb, p.b.addr(), &qa, p.a.addr(), [2, 1]);
    let (ma, mb) = (p.a.mr(64), p.b.mr(64));
    for i in 0..4 {
        post(&qa, i, SendOp::Write(remote(&mb, 0)), Payload::Sges(&[ma.sge(0, 64)]));
    }
    let until = std::time::Instant::now() + TIMEOUT;
    let mut out = vec![];
    let error = loop {
        assert!(std::time::Instant::now() < until);
        // Leaves the queue full until it has overflowed.
        if p.a.device.stats().port.transport.cq_overflow == 0 {
            p.a.device.progress();
            continue;
        }
        if let Err(e) = small.poll(&mut out, 8) {
            break e;
        }
    };
    assert!(error.to_string().contains("overflow"), "{error}");
    assert!(p.a.device.async_event().unwrap().is_some());
}
