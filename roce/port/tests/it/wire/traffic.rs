//! Data transfer between two ports: trains, GRO buffers, turns, timers, limits.

use std::collections::{HashSet, VecDeque};

use roce_bth::{Opcode, Packet};
use roce_port::cm::guid;
use roce_port::{QpnSlot, RxMeta};
use roce_qp::{SharedReceiveQueue, SrqConfig, WindowConfig};
use roce_verbs::{
    AddressVector, QpAttr, QpState, Qpn, SendOp, SendRequest, SrqAttr, SrqType, Srqn, Target, provider::VerbsError,
    wr::PostError,
};

use super::*;

#[test]
fn a_write_is_sent_in_trains_and_arrives_complete() {
    let (mut a, mut b, qa, qb) = pair();
    acquaint(&mut a, &mut b, qa, qb);
    let (src, dst) = (a.region(100_000), b.region(100_000));
    src.write(0, &noise(100_000)).unwrap();
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 30_000);
    let trains = a.take();
    let packets: usize = trains.iter().map(|t| t.segments).sum();
    assert_eq!(packets, 30);
    assert!(trains.len() <= 3, "{} sends for 30 packets", trains.len());
    assert!(trains.iter().all(|t| t.src.port() >= 0xc000 && t.dst == b.addr));
    trains.iter().for_each(|t| b.give(t));
    exchange(&mut a, &mut b);
    assert_eq!(contents(&dst)[..30_000], noise(100_000)[..30_000]);
    assert!(contents(&dst)[30_000..].iter().all(|b| *b == 0));
    let done = a.completions();
    assert_eq!(done.len(), 1);
    assert!(done[0].is_ok());
    assert_eq!(b.port.counters().icrc_errors, 0);
    assert_eq!(a.port.in_flight().map(|(_, n)| n).sum::<usize>(), 0);
}

#[test]
fn packets_of_a_train_may_arrive_one_by_one() {
    let (mut a, mut b, qa, _) = pair();
    let (src, dst) = (a.region(20_000), b.region(20_000));
    src.write(0, &noise(20_000)).unwrap();
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 20_000);
    for train in a.take() {
        for (i, packet) in train.bytes.chunks(train.segment_len).enumerate() {
            // Every other one as from a raw socket, with the Identification that Linux gives the segment.
            let meta = RxMeta {
                identification: (i % 2 == 0).then_some(i as u16),
                ..RxMeta::new(train.dst, train.src)
            };
            b.port.handle_datagram(b.now, &meta, packet);
        }
    }
    exchange(&mut a, &mut b);
    assert_eq!(contents(&dst), noise(20_000));
    assert!(a.completions()[0].is_ok());
}

#[test]
fn a_train_never_mixes_queue_pairs() {
    let (mut a, mut b, qa, _) = pair();
    let (qa2, qb2) = (a.qp(), b.qp());
    a.raise(qa2, b.addr, qb2);
    b.raise(qb2, a.addr, qa2);
    let (src, dst) = (a.region(64_000), b.region(64_000));
    for wr in 0..4 {
        a.send(qa, wr, SendOp::Write(remote(&dst)), &src, 16_000);
        a.send(qa2, wr, SendOp::Write(remote(&dst)), &src, 16_000);
    }
    for train in a.take() {
        let dests: Vec<&[u8]> = train.bytes.chunks(train.segment_len).map(|p| &p[5..8]).collect();
        assert!(dests.iter().all(|d| *d == dests[0]));
        b.give(&train);
    }
    exchange(&mut a, &mut b);
    assert_eq!(a.completions().iter().filter(|c| c.is_ok()).count(), 8);
}

/// Posts so many WRITEs of 64 bytes, and returns the packets of each train.
fn trains(a: &mut Host, b: &Host, qpn: Qpn, writes: u64) -> Vec<usize> {
    let (src, dst) = (a.region(64), b.region(64));
    for wr in 0..writes {
        a.send(qpn, wr, SendOp::Write(remote(&dst)), &src, 64);
    }
    a.take().iter().map(|t| t.segments).collect()
}

#[test]
fn a_list_is_cut_into_two_trains_unless_packets_of_others_are_under_way() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let [first, second] = [(); 2].map(|()| connected(&mut a, &mut b));
    assert_eq!(trains(&mut a, &b, first, 48), [24, 24]);
    assert_eq!(trains(&mut a, &b, second, 48), [48]);
}

#[test]
fn one_acknowledgement_covers_a_drained_batch() {
    let (mut a, mut b, qa, qb) = pair();
    acquaint(&mut a, &mut b, qa, qb);
    let (src, dst) = (a.region(64), b.region(64));
    for wr in 0..8 {
        b.receive(qb, wr, &dst);
        a.send(qa, wr, SendOp::Send, &src, 64);
    }
    a.take().iter().for_each(|t| b.give(t));
    let acks = b.take();
    assert_eq!(acks.iter().map(|t| t.segments).sum::<usize>(), 1);
    a.give(&acks[0]);
    assert_eq!(a.completions().len(), 8);
}

#[test]
fn a_lost_packet_is_resent_on_timeout_and_no_timer_remains() {
    let (mut a, mut b, qa, _) = pair();
    let (src, dst) = (a.region(500), b.region(500));
    src.write(0, &noise(500)).unwrap();
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 500);
    assert_eq!(a.take().len(), 1);
    let mut runs = 0;
    while a.completions().is_empty() {
        a.now = a.port.poll_timeout().expect("a timer is set");
        a.port.handle_timeout(a.now);
        assert!(a.port.poll_timeout().is_none_or(|t| t > a.now), "a timer must not spin");
        exchange(&mut a, &mut b);
        runs += 1;
        assert!(runs < 10);
    }
    assert_eq!(contents(&dst), noise(500));
    assert!(a.port.counters().tx_retransmissions >= 1);
    // Timers left in the heap are stale and send nothing.
    for host in [&mut a, &mut b] {
        for _ in 0..5 {
            let Some(t) = host.port.poll_timeout() else { break };
            host.now = t;
            host.port.handle_timeout(t);
            assert!(host.take().is_empty());
        }
        assert_eq!(host.port.poll_timeout(), None);
    }
}

#[test]
fn queue_pairs_take_turns() {
    let (mut a, mut b) = (Host::with(1, |c| c.turn_packets = 4), Host::new(2));
    let (src, dst) = (a.region(1 << 20), b.region(1 << 20));
    let mut dests = [(Qpn::default(), Qpn::default()); 2];
    for pair in &mut dests {
        let (qa, qb) = (a.qp(), b.qp());
        a.raise(qa, b.addr, qb);
        b.raise(qb, a.addr, qa);
        acquaint(&mut a, &mut b, qa, qb);
        *pair = (qa, qb);
    }
    for (qa, _) in &dests {
        a.send(*qa, 1, SendOp::Write(remote(&dst)), &src, 16_000);
    }
    let dests = dests.map(|(_, qb)| qb);
    let order: Vec<Qpn> = a
        .take()
        .iter()
        .flat_map(|t| t.bytes.chunks(t.segment_len).map(|p| p.to_vec()).collect::<Vec<_>>())
        .map(|p| Qpn::new(u32::from_be_bytes([0, p[5], p[6], p[7]])))
        .collect();
    assert_eq!(
        order[..8],
        [
            dests[0], dests[0], dests[0], dests[0], dests[1], dests[1], dests[1], dests[1]
        ]
    );
}

/// Creates a queue pair connected to a new one of `to`, with source ports learned.
fn connected(a: &mut Host, to: &mut Host) -> Qpn {
    let (qa, qb) = (a.qp(), to.qp());
    a.raise(qa, to.addr, qb);
    to.raise(qb, a.addr, qa);
    acquaint(a, to, qa, qb);
    qa
}

/// Posts a WRITE of `len` bytes.
fn write(a: &mut Host, to: &Host, qa: Qpn, len: u32) {
    let (src, dst) = (a.region(len as usize), to.region(len as usize));
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, len);
}

fn in_flight(a: &Host, to: &Host) -> usize {
    a.port
        .in_flight()
        .filter(|(addr, _)| *addr == to.addr)
        .map(|(_, n)| n)
        .sum()
}

#[test]
fn bytes_in_flight_follow_a_queue_pair_to_its_new_path() {
    let (mut a, mut b, mut c) = (Host::new(1), Host::new(2), Host::new(3));
    let [staying, moving] = [(); 2].map(|()| connected(&mut a, &mut b));
    let other = connected(&mut a, &mut c);
    write(&mut a, &b, staying, 100);
    write(&mut a, &b, moving, 10_000);
    write(&mut a, &c, other, 100);
    a.take();
    let (small, all) = (in_flight(&a, &c), in_flight(&a, &b));
    let sqd = QpAttr {
        state: Some(QpState::Sqd),
        ..QpAttr::default()
    };
    a.port.modify_qp(a.now, moving, &sqd).unwrap();
    let path = QpAttr {
        av: Some(AddressVector::new(a.addr, c.addr)),
        ..sqd
    };
    a.port.modify_qp(a.now, moving, &path).unwrap();
    assert_eq!((in_flight(&a, &b), in_flight(&a, &c)), (small, all));
}

#[test]
fn queue_pairs_blocked_by_their_old_peer_s_window_are_woken_by_their_new_peer_s() {
    let window = WindowConfig {
        initial: 16 << 10,
        min: 16 << 10,
        max: 16 << 10,
    };
    let (mut a, mut b, mut c) = (Host::with(1, |p| p.window = window), Host::new(2), Host::new(3));
    let packets = |d: &[Datagram]| d.iter().map(|t| t.segments).sum::<usize>();
    let full = connected(&mut a, &mut c);
    let moving = [(); 3].map(|()| connected(&mut a, &mut c));
    let other = connected(&mut a, &mut b);
    write(&mut a, &c, full, 100_000);
    let fill = packets(&a.take()) as u32;
    for q in moving {
        write(&mut a, &c, q, 100_000);
    }
    assert_eq!(packets(&a.take()), 3, "each may have one packet in flight");
    let reset = QpAttr {
        state: Some(QpState::Reset),
        ..QpAttr::default()
    };
    for q in &moving {
        a.port.modify_qp(a.now, *q, &reset).unwrap();
    }
    // Another queue pair fills the new peer's window.
    write(&mut a, &b, other, fill << 10);
    let filling = a.take();
    let (src, dst) = (a.region(2 << 10), b.region(2 << 10));
    for q in &moving {
        let qb = b.qp();
        a.raise(*q, b.addr, qb);
        b.raise(qb, a.addr, *q);
        acquaint(&mut a, &mut b, *q, qb);
    }
    for q in &moving {
        a.send(*q, 2, SendOp::Write(remote(&dst)), &src, 2 << 10);
    }
    assert_eq!(packets(&a.take()), 3);
    filling.iter().for_each(|t| b.give(t));
    b.take().iter().for_each(|t| a.give(t));
    assert_eq!(packets(&a.take()), 3, "all resume");
}

/// A peer may acknowledge each message, as rdma_rxe does: then room in the window comes in small pieces, to the queue pair that is busy.
#[test]
fn a_busy_queue_pair_leaves_room_in_the_window_for_others() {
    const SIZE: usize = 64 << 10;
    let window = WindowConfig {
        initial: SIZE,
        min: SIZE,
        max: SIZE,
    };
    let (mut a, mut b) = (Host::with(1, |p| p.window = window), Host::new(2));
    let [busy, writer, reader] = [(); 3].map(|()| connected(&mut a, &mut b));
    let (src, dst) = (a.region(SIZE), b.region(SIZE));
    let small = |a: &mut Host| a.send(busy, 0, SendOp::Write(remote(&dst)), &src, 1000);
    (0..100).for_each(|_| small(&mut a));
    let mut wire: VecDeque<Datagram> = a.take().into();
    a.send(writer, 1, SendOp::Write(remote(&dst)), &src, SIZE as u32 / 2);
    a.send(reader, 2, SendOp::Read(remote(&dst)), &src, SIZE as u32 / 2);
    let (mut waits, mut rounds) = (HashSet::from([1, 2]), 0);
    while !waits.is_empty() {
        wire.extend(a.take());
        let train = wire.pop_front().expect("something is under way");
        for packet in train.bytes.chunks(train.segment_len) {
            let meta = RxMeta::new(train.dst, train.src);
            b.port.handle_datagram(b.now, &meta, packet);
            b.take().iter().for_each(|answer| a.give(answer));
            wire.extend(a.take());
            for done in a.completions() {
                assert!(done.is_ok(), "{done:?}");
                if !waits.remove(&done.wr_id) {
                    small(&mut a);
                }
            }
        }
        rounds += 1;
        assert!(rounds < 1000, "those wait for ever: {waits:?}");
    }
}

#[test]
fn limits_of_the_device_hold() {
    let mut a = Host::with(1, |c| c.limits.max_qp = 3);
    let mut init = a.init();
    init.caps.max_send_sge = 1000;
    assert!(matches!(a.port.create_qp(init), Err(VerbsError::Invalid(_))));
    let mut init = a.init();
    init.caps.max_recv_wr = 1 << 20;
    assert!(matches!(a.port.create_qp(init), Err(VerbsError::Invalid(_))));
    let first = a.qp();
    a.qp();
    a.qp();
    let init = a.init();
    assert!(matches!(a.port.create_qp(init), Err(VerbsError::Limit(_))));
    a.port.destroy_qp(a.now, first).unwrap();
    assert!(a.port.destroy_qp(a.now, first).is_err());
    assert_ne!(a.qp(), first);
    assert_eq!(a.port.queue_pairs(), 3);
}

/// Processes that share an address never run out of QPNs, even with all in quarantine.
#[test]
fn queue_pairs_are_made_and_ended_a_million_times() {
    let numbers = QpnSlot { bits: 11, slot: 77 }.qpns();
    let mut a = Host::with(1, |c| c.qpns = numbers);
    let permanent = a.qp();
    for i in 0..1_000_000 {
        let q = a.qp();
        assert!(
            q != permanent && (numbers.first..=numbers.last).contains(&q.value()),
            "{i}: {q}"
        );
        a.port.destroy_qp(a.now, q).unwrap();
        if i % 1000 == 0 {
            assert!(a.take().is_empty());
        }
    }
    assert_eq!(a.port.queue_pairs(), 1);
}

#[test]
fn a_path_must_fit_this_port() {
    let (mut a, b) = (Host::new(1), Host::new(2));
    let q = a.qp();
    let init = QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        access: Some(RIGHTS),
        ..QpAttr::default()
    };
    a.port.modify_qp(a.now, q, &init).unwrap();
    let rtr = |av, mtu| QpAttr {
        state: Some(QpState::Rtr),
        av: Some(av),
        path_mtu: Some(mtu),
        dest_qpn: Some(Qpn::new(5)),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(RnrTimer::new(1)),
        ..QpAttr::default()
    };
    let any = IpAddr::from([0, 0, 0, 0]);
    for (local, to) in [(b.addr, b.addr), (a.addr, any), (a.addr, "::1".parse().unwrap())] {
        let attr = rtr(AddressVector::new(local, to), Mtu::B256);
        assert!(
            matches!(a.port.modify_qp(a.now, q, &attr), Err(VerbsError::Address(_))),
            "{local} {to}"
        );
    }
    let attr = rtr(AddressVector::new(a.addr, b.addr), Mtu::B4096);
    assert!(matches!(a.port.modify_qp(a.now, q, &attr), Err(VerbsError::Invalid(_))));
    // An unspecified local address means the only one, a mapped address the IPv4 address, hop limit 0 the default.
    let mapped = "::ffff:192.0.2.2".parse().unwrap();
    let path = AddressVector {
        hop_limit: 0,
        ..AddressVector::new(any, mapped)
    };
    a.port.modify_qp(a.now, q, &rtr(path, Mtu::B256)).unwrap();
    let av = a.port.query_qp(q).unwrap().av.unwrap();
    assert_eq!(av, AddressVector::new(a.addr, b.addr));
}

#[test]
fn a_late_copy_of_a_read_of_revoked_memory_does_not_fail_the_queue_pair() {
    let (mut a, mut b, qa, qb) = pair();
    let (into, from) = (a.region(64), b.region(64));
    a.send(qa, 1, SendOp::Read(remote(&from)), &into, 64);
    let request = a.take();
    request.iter().for_each(|d| b.give(d));
    exchange(&mut a, &mut b);
    assert!(a.completions()[0].is_ok());
    b.mem.deregister(&from).unwrap();
    // The network duplicates the request after the memory was deregistered.
    request.iter().for_each(|d| b.give(d));
    exchange(&mut a, &mut b);
    assert_eq!(b.port.qp_state(qb), Some(QpState::Rts));
    assert_eq!(a.port.qp_state(qa), Some(QpState::Rts));

    // The memory is deregistered while the response to a duplicate waits.
    let from = b.region(64);
    a.send(qa, 2, SendOp::Read(remote(&from)), &into, 64);
    let request = a.take();
    request.iter().for_each(|d| b.give(d));
    exchange(&mut a, &mut b);
    request.iter().for_each(|d| b.give(d));
    b.mem.deregister(&from).unwrap();
    exchange(&mut a, &mut b);
    assert!(a.completions()[0].is_ok());
    assert_eq!(b.port.qp_state(qb), Some(QpState::Rts));
    // An outstanding READ of revoked memory is still refused.
    a.send(qa, 3, SendOp::Read(remote(&from)), &into, 64);
    exchange(&mut a, &mut b);
    assert_eq!(a.completions()[0].status, roce_verbs::WcStatus::RemoteAccessError);
}

#[test]
fn a_batch_is_posted_completely_or_not_at_all() {
    let (mut a, mut b, qa, _) = pair();
    let (src, dst) = (a.region(64), b.region(64));
    let sges = [Sge {
        addr: src.addr(),
        length: 64,
        lkey: src.lkey(),
    }];
    let one = |wr_id: usize, op| SendRequest {
        wr: SendWr {
            wr_id: wr_id as u64,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        },
        target: Target::Peer,
    };
    let write = SendOp::Write(remote(&dst));
    let room = QpCaps::default().max_send_wr as usize;
    let elements = QpCaps::default().max_send_sge as usize + 1;
    let too_many = vec![sges[0]; elements];
    let mut bad = [one(0, write), one(1, write)];
    bad[1].wr.payload = Payload::Sges(&too_many);
    let refused = a.port.post_batch(a.now, qa, &bad);
    assert!(
        matches!(refused, Err((1, PostError::TooManySges { given, .. })) if given == elements),
        "{refused:?}"
    );
    let many: Vec<_> = (0..=room).map(|i| one(i, write)).collect();
    let refused = a.port.post_batch(a.now, qa, &many);
    assert!(
        matches!(refused, Err((n, PostError::QueueFull)) if n == room),
        "{refused:?}"
    );
    assert!(a.take().is_empty());
    a.port.post_batch(a.now, qa, &many[..room]).unwrap();
    exchange(&mut a, &mut b);
    assert_eq!(a.completions().len(), room);
    // In the error state work requests complete at once and take no room.
    let err = QpAttr {
        state: Some(QpState::Err),
        ..QpAttr::default()
    };
    a.port.modify_qp(a.now, qa, &err).unwrap();
    a.port.post_batch(a.now, qa, &many).unwrap();
    assert_eq!(a.completions().len(), room + 1);
}

#[test]
fn sizes_of_an_absent_receive_queue_are_ignored() {
    let mut a = Host::new(1);
    let srq = SharedReceiveQueue::new(SrqConfig {
        handle: 5,
        number: Srqn::new(5),
        pd: a.pd,
        srq_type: SrqType::Basic,
        attr: SrqAttr {
            max_wr: 4,
            max_sge: 1,
            limit: 0,
        },
        cq: None,
    });
    let garbage = QpCaps {
        max_recv_wr: u32::MAX,
        max_recv_sge: u32::MAX,
        ..QpCaps::default()
    };
    let init = QpInit {
        caps: garbage,
        ..a.init()
    };
    assert!(matches!(a.port.create_qp(init), Err(VerbsError::Invalid(_))));
    let init = QpInit {
        caps: garbage,
        srq: Some(srq),
        ..a.init()
    };
    a.port.create_qp(init).unwrap();
    let init = QpInit {
        caps: garbage,
        qp_type: QpType::XrcIni,
        ..a.init()
    };
    a.port.create_qp(init).unwrap();
}

/// Delivers everything that a host sends to its own address, but for the packet at an index. Returns the opcodes.
fn exchange_alone(host: &mut Host, mut lost: Option<usize>) -> Vec<Opcode> {
    let mut opcodes = Vec::new();
    loop {
        let sent = host.take();
        if sent.is_empty() {
            return opcodes;
        }
        for d in sent {
            for bytes in d.bytes.chunks(d.segment_len) {
                let packet = Packet::parse(bytes).unwrap();
                let lose = lost == Some(opcodes.len());
                opcodes.push(packet.header.bth.opcode);
                if lose {
                    lost = None;
                    continue;
                }
                host.give(&Datagram {
                    segment_len: 0,
                    bytes: bytes.to_vec(),
                    ..d.clone()
                });
            }
        }
    }
}

/// Packets to our own address come to our own sockets: the peer is ferroce, although no REQ or REP says so.
#[test]
fn queue_pairs_of_one_address_acknowledge_selectively() {
    let mut host = Host::with(1, |config| config.cm.ca_guid = guid::keeping(1));
    let (q1, q2) = (host.qp(), host.qp());
    let addr = host.addr;
    host.raise(q1, addr, q2);
    host.raise(q2, addr, q1);
    let region = host.region(8 * 1024);
    for qpn in [q1, q2] {
        host.send(qpn, 0, SendOp::Write(remote(&region)), &region, 0);
    }
    exchange_alone(&mut host, None);
    host.send(q1, 1, SendOp::Write(remote(&region)), &region, 8 * 1024);
    let opcodes = exchange_alone(&mut host, Some(1));
    assert!(opcodes.contains(&Opcode::SelectiveAck), "{opcodes:?}");
    let ok = host.completions().iter().filter(|c| c.is_ok()).count();
    assert_eq!(ok, 3, "no timer is needed: {opcodes:?}");
}

/// As the address vector has them, and without ECT: the peer does not say that it slows down when it is notified.
#[test]
fn packets_have_the_traffic_class_and_hop_limit_of_the_address_vector() {
    let v6 = |last: u16| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last]);
    for [local, remote] in [[ip(1), ip(2)], [v6(1), v6(2)]] {
        for (traffic_class, hop_limit) in [(0, 64), (0x68, 1), (0xb8, 255)] {
            let mut a = Host::with(1, |config| config.local = vec![local]);
            let q = a.qp();
            let av = AddressVector {
                traffic_class,
                hop_limit,
                ..AddressVector::new(local, remote)
            };
            let steps = QpAttr {
                rq_psn: Some(Psn::new(100)),
                sq_psn: Some(Psn::new(100)),
                ..QpAttr::to_rts(av, Mtu::B1024, Qpn::new(0x1234))
            };
            for attr in steps.steps(QpType::Rc) {
                a.port.modify_qp(a.now, q, &attr).unwrap();
            }
            let src = a.region(64);
            a.send(q, 1, SendOp::Send, &src, 64);
            let sent = a.take();
            assert_eq!(sent.len(), 1);
            assert_eq!((sent[0].src.ip(), sent[0].dst), (local, remote));
            assert_eq!((sent[0].tos, sent[0].ttl), (traffic_class, hop_limit));
        }
    }
}
