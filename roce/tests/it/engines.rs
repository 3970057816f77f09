//! Devices of several engines: where queue pairs are, and that a program sees one device.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use crate::common::*;
use roce::{
    CmEventKind, Cq, Device, DeviceConfig, Notify, Payload, Qp, QpCaps, QpInit, QpOptions, QpState, QpType, SendOp,
    VerbsError, WcStatus,
};
use roce_port::Steering;

const SHARDS: usize = 3;

fn of(shards: usize) -> DeviceConfig {
    DeviceConfig { shards, ..config() }
}

fn open_shards() -> Device {
    Device::open(of(SHARDS)).unwrap()
}

/// Which of the engines a queue pair is in, as everybody sees by its number.
fn shard(qp: &Qp) -> usize {
    Steering::new(SHARDS).unwrap().of_qpn(qp.qpn())
}

fn with_cq(device: &Device, cq: &Cq) -> Qp {
    let init = QpInit {
        send_cq: cq,
        recv_cq: cq,
        caps: QpCaps::default(),
        signal_all: false,
    };
    device.create_qp(&device.alloc_pd().unwrap(), &init).unwrap()
}

/// Pairs whose queue pairs are in each of the engines of both devices.
fn pairs(a: &Device, b: &Device) -> Vec<Pair> {
    let connect = |port: u16| {
        let (a, b) = (Side::new(a.clone()), Side::new(b.clone()));
        let addr = SocketAddr::new(b.addr(), port);
        let listener = b.device.listen(&b.channel, addr, 8).unwrap();
        let (qa, qb) = (a.qp(), b.qp());
        let ids = connect(&a, &b, &qa, &qb, addr);
        drop(listener);
        Pair {
            a,
            b,
            qa,
            qb,
            ids: Some(ids.into()),
        }
    };
    (7000..7000 + SHARDS as u16).map(connect).collect()
}

#[test]
fn every_operation_works_in_every_engine() {
    let (a, b) = (open_shards(), open_shards());
    let pairs = pairs(&a, &b);
    for side in [|p: &Pair| shard(&p.qa), |p: &Pair| shard(&p.qb)] {
        let mut shards: Vec<_> = pairs.iter().map(side).collect();
        shards.sort_unstable();
        assert_eq!(shards, [0, 1, 2]);
    }
    pairs.iter().for_each(exercise);
    // They count together.
    let sent = a.stats().port.tx_packets;
    assert!(sent > 0);
    assert_eq!(a.hw_counters()[0], ("sent_pkts", sent));
}

#[test]
fn an_engine_speaks_with_devices_of_one() {
    let (a, b) = (open_shards(), open());
    pairs(&a, &b).iter().for_each(exercise);
    pairs(&b, &a).iter().for_each(exercise);
}

#[test]
fn connections_end_wherever_their_queue_pairs_are() {
    let (a, b) = (open_shards(), open_shards());
    for (index, mut pair) in pairs(&a, &b).into_iter().enumerate() {
        let [ia, ib] = pair.ids.take().unwrap();
        let mr = pair.b.mr(64);
        recv(&pair.qb, 1, &[mr.sge(0, 64)]);
        match index {
            0 => {
                ia.disconnect().unwrap();
                assert_eq!(pair.qa.state().unwrap(), QpState::Err);
            }
            _ => drop((ia, pair.qa)),
        }
        assert!(matches!(pair.b.event().kind, CmEventKind::Disconnected { .. }));
        assert_eq!(pair.b.completions(1)[0].status, WcStatus::FlushError);
        assert_eq!(pair.qb.state().unwrap(), QpState::Err);
        drop(ib);
    }
}

#[test]
fn a_refused_queue_pair_is_in_error_in_any_engine() {
    let (a, b) = (open_shards(), open());
    let addr = SocketAddr::new(b.addr(), 7000);
    for _ in 0..SHARDS {
        let side = Side::new(a.clone());
        let qp = side.qp();
        let params = roce::ConnParams::default();
        let _id = a.connect(&side.channel, None, addr, &qp, params).unwrap();
        assert!(matches!(side.event().kind, CmEventKind::Rejected { .. }));
        assert_eq!(qp.state().unwrap(), QpState::Err, "in {}", shard(&qp));
    }
}

#[test]
fn queue_pairs_of_a_polled_queue_stay_together_and_others_are_spread() {
    let device = open_shards();
    let channel = device.create_channel().unwrap();
    let waited = device.create_cq(64, Some(&channel), 0).unwrap();
    let spread: Vec<_> = (0..6).map(|_| with_cq(&device, &waited)).collect();
    let count = |n| spread.iter().filter(|qp| shard(qp) == n).count();
    assert_eq!([0, 1, 2].map(count), [2; 3]);
    drop(spread);
    let mut homes = Vec::new();
    let mut keep = Vec::new();
    for _ in 0..SHARDS {
        let cq = device.create_cq(64, None, 0).unwrap();
        let together: Vec<_> = (0..4).map(|_| with_cq(&device, &cq)).collect();
        let home = shard(&together[0]);
        assert!(together.iter().all(|qp| shard(qp) == home));
        homes.push(home);
        keep.push(together);
    }
    homes.sort_unstable();
    assert_eq!(homes, [0, 1, 2]);
}

#[test]
fn what_is_not_reliable_connected_is_in_the_first_engine() {
    let device = open_shards();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64, None, 0).unwrap());
    // The next would be in another.
    let _first = with_cq(&device, &device.create_cq(64, None, 0).unwrap());
    for qp_type in [QpType::Uc, QpType::Ud, QpType::XrcTgt] {
        let xrcd = device.open_xrcd().unwrap();
        let target = qp_type == QpType::XrcTgt;
        let qp = device.create_qp_as(
            (!target).then_some(&pd),
            &QpOptions {
                qp_type,
                send_cq: (!target).then_some(&cq),
                recv_cq: (!target).then_some(&cq),
                srq: None,
                xrcd: target.then_some(&xrcd),
                caps: QpCaps::default(),
                signal_all: false,
            },
        );
        assert_eq!(shard(&qp.unwrap()), 0, "{qp_type:?}");
    }
}

/// One queue for queue pairs of all engines: whoever polls, or waits, finds what each brings.
#[test]
fn one_queue_has_the_completions_of_all_engines() {
    let (a, b) = (open_shards(), open_shards());
    let channel = b.create_channel().unwrap();
    let waited = b.create_cq(64, Some(&channel), 7).unwrap();
    let side = Side::new(a.clone());
    let qps: Vec<_> = (0..SHARDS).map(|_| (side.qp(), with_cq(&b, &waited))).collect();
    let mr = b.alloc_mr(&b.alloc_pd().unwrap(), 64, ALL).unwrap();
    for (qa, qb) in &qps {
        raise(qa, a.addr(), qb, b.addr(), [1, 2]);
        raise(qb, b.addr(), qa, a.addr(), [2, 1]);
        recv(qb, qb.qpn().value().into(), &[]);
    }
    for (qa, qb) in &qps {
        waited.arm(false).unwrap();
        post(qa, 1, SendOp::Send, Payload::Inline(b""));
        assert_eq!(channel.wait(Some(TIMEOUT)).unwrap(), Some(7));
        let (mut got, until) = (Vec::new(), Instant::now() + TIMEOUT);
        while got.is_empty() && Instant::now() < until {
            waited.poll(&mut got, 1).unwrap();
        }
        assert_eq!(got[0].wr_id, u64::from(qb.qpn().value()));
    }
    side.good(SHARDS);
    drop(mr);
}

#[test]
fn a_device_has_as_many_queue_pairs_as_it_says_whatever_its_engines() {
    let device = Device::open(of(2)).unwrap();
    let cqs = [0, 1].map(|_| device.create_cq(64, None, 0).unwrap());
    let most = device.limits().max_qp as usize;
    let pd = device.alloc_pd().unwrap();
    let make = |n: usize| {
        let caps = QpCaps {
            max_send_wr: 1,
            max_recv_wr: 1,
            ..QpCaps::default()
        };
        let cq = &cqs[n % 2];
        device.create_qp(
            &pd,
            &QpInit {
                send_cq: cq,
                recv_cq: cq,
                caps,
                signal_all: false,
            },
        )
    };
    let mut all: Vec<_> = (0..most).map(|n| make(n).unwrap()).collect();
    assert!(matches!(make(0), Err(VerbsError::Limit(_))));
    all.pop();
    make(0).unwrap();
}

#[test]
fn numbers_of_engines_that_are_not_possible_are_refused() {
    for shards in [0, 65, usize::MAX] {
        let refused = Device::open(of(shards));
        assert!(matches!(refused, Err(VerbsError::Invalid(_))), "{shards}: {refused:?}");
    }
    drop(Device::open(of(64)).unwrap());
}

/// Notifier that panics under an engine's lock.
struct Broken;

impl Notify for Broken {
    fn notify(&self, _: u32) {
        panic!("as a program's own code may");
    }
}

#[test]
fn an_engine_that_fails_takes_the_device_with_it() {
    let device = open_shards();
    let side = Side::new(device.clone());
    let _first = side.qp();
    let cq = device.create_cq_notifying(4, Some(Arc::new(Broken))).unwrap();
    let qp = with_cq(&device, &cq);
    assert_ne!(shard(&qp), 0);
    recv(&qp, 1, &[]);
    cq.arm(false).unwrap();
    let err = roce::QpAttr {
        state: Some(QpState::Err),
        ..roce::QpAttr::default()
    };
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| qp.modify(&err)));
    assert!(failed.is_err());
    assert!(device.is_closed());
    let mut out = Vec::new();
    assert!(matches!(side.cq.poll(&mut out, 1), Err(VerbsError::Closed)));
    assert!(matches!(device.async_event(), Err(VerbsError::Closed)));
    assert!(matches!(side.channel.wait(Some(TIMEOUT)), Err(VerbsError::Closed)));
}
