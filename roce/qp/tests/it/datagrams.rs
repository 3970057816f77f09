//! Unreliable datagrams.

use std::net::{IpAddr, Ipv6Addr};

use roce_bth::{Opcode, Packet};
use roce_qp::{Ctx, DatagramSource, GRH_LEN};
use roce_verbs::{
    Completion, Mtu, Payload, QpAttr, QpState, QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr, Srqn, Target, WcFlags,
    WcOpcode, WcStatus,
};

use crate::harness::*;

fn pair() -> Pair {
    Pair::of(QpType::Ud, Setup::default())
}

fn ids(completions: &[Completion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn a_datagram_lands_behind_the_network_header() {
    let mut p = pair();
    let (src, dst) = (p.a.filled(700, 1), p.b.region(1000));
    p.b.recv(9, &[sge(&dst, 0, 1000)]);
    p.a.send_to(1, SendOp::Send, &[sge(&src, 0, 700)], datagram(B, QKEY));
    p.run();
    assert_eq!(p.a.sink.directed, Some((SOURCE.dst, Qpn::new(B))));
    let sent = p.a.completions();
    assert_eq!(
        (ids(&sent), sent[0].opcode),
        (vec![(1, WcStatus::Success)], WcOpcode::Send)
    );
    let got = p.b.received();
    assert_eq!(
        got,
        [Completion {
            wr_id: 9,
            status: WcStatus::Success,
            opcode: WcOpcode::Recv,
            byte_len: 740,
            qpn: Qpn::new(B),
            src_qp: Qpn::new(A),
            sl: 2,
            flags: WcFlags::GRH,
            timestamp: got[0].timestamp,
            ..Completion::default()
        }]
    );
    assert_eq!(bytes(&dst, GRH_LEN, 700), pattern(700, 1));
    // 20 unused bytes, then the IPv4 header: UDP, length 20 + 8 + 12 + 8 + 700 + 4.
    let header = bytes(&dst, 0, GRH_LEN);
    assert_eq!(header[..20], [0; 20]);
    let ip = &header[20..];
    let sum: u32 = ip.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the checksum is right");
    assert_eq!(ip[..10], [0x45, 0x68, 2, 0xf0, 0x12, 0x34, 0x40, 0, 63, 17]);
    assert_eq!(ip[12..], [10, 0, 0, 1, 10, 0, 0, 2]);
    assert_eq!(p.b.counters.rdma_recvs, 1);
    assert_eq!(p.a.headers().len() + p.b.headers().len(), 0, "nothing is acknowledged");
}

#[test]
fn over_ipv6_the_header_is_a_grh() {
    let mut p = pair();
    let (src, dst) = (p.a.filled(5, 1), p.b.region(100));
    p.b.recv(9, &[sge(&dst, 0, 45)]);
    p.a.send_to(1, SendOp::Send, &[sge(&src, 0, 5)], datagram(B, QKEY));
    let (_, packet) = p.a.drain().remove(0);
    let from: Ipv6Addr = "fd00::1".parse().unwrap();
    let to: Ipv6Addr = "ff0e::7".parse().unwrap();
    let source = DatagramSource {
        traffic_class: 0x68,
        hop_limit: 3,
        ..DatagramSource::new(IpAddr::V6(from), IpAddr::V6(to))
    };
    let packet = Packet::parse(&packet).unwrap();
    p.b.qp.handle_datagram(ctx!(p.b), &packet, &source);
    let header = bytes(&dst, 0, GRH_LEN);
    // UDP: 8 + 12 + 8 + 5 + 3 pad + 4.
    assert_eq!(header[..8], [0x66, 0x80, 0, 0, 0, 40, 17, 3]);
    assert_eq!((&header[8..24], &header[24..]), (&from.octets()[..], &to.octets()[..]));
    assert_eq!(bytes(&dst, GRH_LEN, 5), pattern(5, 1));
    assert_eq!(p.b.received()[0].byte_len, 45);
}

#[test]
fn immediate_data_and_solicitation_arrive() {
    let mut p = pair();
    let src = p.a.filled(8, 1);
    let dst = p.b.region(100);
    p.b.recv(9, &[sge(&dst, 0, 100)]);
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::SendWithImm(0xfeed_f00d),
        flags: SendFlags::SIGNALED | SendFlags::SOLICITED,
        payload: Payload::Sges(&[sge(&src, 0, 8)]),
    };
    p.a.try_send_to(&wr, datagram(B, QKEY)).unwrap();
    p.run();
    let got = p.b.received()[0];
    assert_eq!((got.imm, got.solicited), (0xfeed_f00d, true));
    assert_eq!(got.flags, WcFlags::GRH | WcFlags::WITH_IMM);
}

#[test]
fn the_queue_key_must_be_right_and_a_privileged_one_stands_for_the_senders_own() {
    let mut p = pair();
    let dst = p.b.region(100);
    p.b.recv(9, &[sge(&dst, 0, 100)]);
    p.a.send_to(1, SendOp::Send, &[], datagram(B, QKEY + 1));
    p.run();
    assert_eq!(p.b.counters.qkey_violations, 1);
    assert!(p.b.received().is_empty());
    // The top bit: the key of the work request is not used.
    p.a.send_to(2, SendOp::Send, &[], datagram(B, 0x8000_0005));
    let sent = p.a.drain();
    assert_eq!(Packet::parse(&sent[0].1).unwrap().header.deth().unwrap().qkey.0, QKEY);
    p.b.handle(&sent[0].1);
    assert_eq!(ids(&p.b.received()), [(9, WcStatus::Success)]);
    assert_eq!(p.a.completions().len(), 2, "the sender does not learn of it");
}

#[test]
fn the_general_service_interface_has_its_own_key() {
    let setup = Setup::default();
    let a = Side::with(1, &setup, |c| c.qp_type = QpType::Gsi);
    let b = Side::with(1, &setup, |c| c.qp_type = QpType::Gsi);
    let mut p = Pair::up(setup, a, b);
    let dst = p.b.region(100);
    p.b.recv(9, &[sge(&dst, 0, 100)]);
    p.a.send_to(1, SendOp::Send, &[], datagram(1, 0x8001_0000));
    let header = p.a.drain();
    let deth = Packet::parse(&header[0].1).unwrap().header.deth().unwrap();
    assert_eq!((deth.qkey.0, deth.src_qp), (0x8001_0000, Qpn::GSI));
    p.b.handle(&header[0].1);
    assert_eq!(ids(&p.b.received()), [(9, WcStatus::Success)]);
}

#[test]
fn what_does_not_fit_is_dropped_and_the_receive_stays() {
    let mut p = pair();
    let (src, dst) = (p.a.filled(100, 1), p.b.region(200));
    p.b.recv(8, &[sge(&dst, 0, GRH_LEN + 59)]);
    p.b.recv(9, &[sge(&dst, 100, 100)]);
    p.a.send_to(1, SendOp::Send, &[sge(&src, 0, 60)], datagram(B, QKEY));
    p.a.send_to(2, SendOp::Send, &[sge(&src, 0, 59)], datagram(B, QKEY));
    p.run();
    assert_eq!(p.b.counters.dropped_length, 1);
    assert_eq!(ids(&p.b.received()), [(8, WcStatus::Success)]);
    assert_eq!((p.b.qp.recv_queue_len(), p.b.qp.state()), (1, QpState::Rts));
    // Nothing posted: dropped as well.
    p.a.send_to(3, SendOp::Send, &[], datagram(B, QKEY));
    p.a.send_to(4, SendOp::Send, &[], datagram(B, QKEY));
    p.run();
    assert_eq!(ids(&p.b.received()), [(9, WcStatus::Success)]);
    assert_eq!(p.b.counters.dropped_no_receive, 1);
    assert!(p.b.events.is_empty());
}

#[test]
fn a_receive_of_a_shared_queue_that_is_too_short_completes_in_error() {
    let setup = Setup::default();
    let a = Side::with(A, &setup, |c| c.qp_type = QpType::Ud);
    let b = Side::with(B, &setup, |c| {
        c.qp_type = QpType::Ud;
        c.srq = Some(shared_queue(c.pd));
    });
    let mut p = Pair::up(setup, a, b);
    let (src, dst) = (p.a.filled(100, 1), p.b.region(200));
    let srq = p.b.qp.config().srq.clone().unwrap();
    for (wr_id, len) in [(8, 50), (9, 150)] {
        let sges = [sge(&dst, 0, len)];
        srq.post(&RecvWr { wr_id, sges: &sges }).unwrap();
    }
    for wr_id in [1, 2] {
        p.a.send_to(wr_id, SendOp::Send, &[sge(&src, 0, 100)], datagram(B, QKEY));
    }
    p.run();
    assert_eq!(
        ids(&p.b.received()),
        [(8, WcStatus::LocalLengthError), (9, WcStatus::Success)]
    );
    assert_eq!(p.b.qp.state(), QpState::Rts);
}

#[test]
fn a_datagram_longer_than_the_mtu_is_not_sent_and_not_an_error() {
    let mut p = Pair::of(
        QpType::Ud,
        Setup {
            mtu: Mtu::B512,
            ..Setup::default()
        },
    );
    let src = p.a.filled(1000, 1);
    for (wr_id, len) in [(1, 513), (2, 512), (3, 1000), (4, 1)] {
        p.a.send_to(wr_id, SendOp::Send, &[sge(&src, 0, len)], datagram(B, QKEY));
    }
    let headers = p.a.headers();
    let psns: Vec<u32> = headers.iter().map(|h| h.bth.psn.value()).collect();
    assert_eq!(psns, [p.setup.psn, p.setup.psn + 1]);
    assert!(headers.iter().all(|h| h.bth.opcode == Opcode::UdSendOnly));
    let all = [1, 2, 3, 4].map(|id| (id, WcStatus::Success));
    assert_eq!(ids(&p.a.completions()), all);
}

#[test]
fn a_failing_send_stops_the_send_queue_until_it_is_set_going_again() {
    let mut p = pair();
    let dst = p.b.region(100);
    for wr_id in 0..3 {
        p.b.recv(wr_id, &[sge(&dst, 0, 100)]);
    }
    let gone = p.a.region(10);
    let bad = sge(&gone, 0, 10);
    p.a.mem.deregister(&gone).unwrap();
    p.a.send_to(1, SendOp::Send, &[], datagram(B, QKEY));
    p.a.send_to(2, SendOp::Send, &[bad], datagram(B, QKEY));
    p.a.send_to(3, SendOp::Send, &[], datagram(B, QKEY));
    p.run();
    assert_eq!(
        ids(&p.a.completions()),
        [
            (1, WcStatus::Success),
            (2, WcStatus::LocalProtectionError),
            (3, WcStatus::FlushError)
        ]
    );
    assert_eq!(p.a.qp.state(), QpState::Sqe);
    let text = p.a.qp.take_failure().unwrap().to_string();
    assert!(text.contains(&format!("key {:#x}", bad.lkey.0)), "{text}");
    // Receiving goes on, sends are flushed.
    let own = p.a.region(100);
    p.a.recv(7, &[sge(&own, 0, 100)]);
    p.b.send_to(1, SendOp::Send, &[], datagram(A, QKEY));
    p.a.send_to(4, SendOp::Send, &[], datagram(B, QKEY));
    p.run();
    assert_eq!(ids(&p.a.received()), [(7, WcStatus::Success)]);
    assert_eq!(ids(&p.a.completions()), [(4, WcStatus::FlushError)]);
    p.a.modify(&QpAttr {
        state: Some(QpState::Rts),
        ..QpAttr::default()
    });
    p.a.send_to(5, SendOp::Send, &[], datagram(B, QKEY));
    p.run();
    assert_eq!(ids(&p.a.completions()), [(5, WcStatus::Success)]);
    assert_eq!(ids(&p.b.received()), [(0, WcStatus::Success), (1, WcStatus::Success)]);
}

#[test]
fn a_datagram_with_no_way_to_its_receiver_fails() {
    let mut p = pair();
    p.a.sink.unroutable = true;
    p.a.send_to(1, SendOp::Send, &[], datagram(B, QKEY));
    assert!(p.a.drain().is_empty());
    assert_eq!(ids(&p.a.completions()), [(1, WcStatus::LocalQpOperationError)]);
    assert_eq!(p.a.qp.state(), QpState::Sqe);
    let text = p.a.qp.take_failure().unwrap().to_string();
    assert!(text.ends_with("there is no path to the destination"), "{text}");
}

#[test]
fn memory_that_can_not_take_a_datagram_fails_the_queue_pair() {
    let mut p = pair();
    p.b.recv(
        9,
        &[roce_verbs::Sge {
            addr: 0,
            length: 100,
            lkey: NO_KEY,
        }],
    );
    p.b.recv(10, &[]);
    p.a.send_to(1, SendOp::Send, &[], datagram(B, QKEY));
    p.run();
    assert_eq!(
        ids(&p.b.received()),
        [(9, WcStatus::LocalProtectionError), (10, WcStatus::FlushError)]
    );
    assert_eq!(p.b.qp.state(), QpState::Err);
}

#[test]
fn targets_that_datagrams_do_not_have_are_refused() {
    let mut p = pair();
    let src = p.a.filled(8, 1);
    let sges = [sge(&src, 0, 8)];
    let wr = |op| SendWr {
        wr_id: 1,
        op,
        flags: SendFlags::SIGNALED,
        payload: Payload::Sges(&sges),
    };
    assert!(p.a.try_send(&wr(SendOp::Send)).is_err(), "no receiver");
    assert!(p.a.try_send_to(&wr(SendOp::Send), Target::Srq(Srqn::new(1))).is_err());
    let Target::Datagram(mut to) = datagram(B, QKEY) else {
        unreachable!()
    };
    to.av.remote = IpAddr::V6(Ipv6Addr::LOCALHOST);
    assert!(p.a.try_send_to(&wr(SendOp::Send), Target::Datagram(to)).is_err());
    assert_eq!(p.a.qp.send_queue_len(), 0);
    let mut rc = Pair::new(Setup::default());
    assert!(rc.a.try_send_to(&wr(SendOp::Send), datagram(B, QKEY)).is_err());
}

#[test]
fn packets_of_other_services_are_dropped() {
    let mut p = pair();
    p.b.recv(9, &[]);
    for opcode in Opcode::ALL {
        if !matches!(opcode, Opcode::UdSendOnly | Opcode::UdSendOnlyImm) {
            p.b.handle(&Raw::new(*opcode, B, 0).bytes());
        }
    }
    assert_eq!(p.b.counters.dropped_opcode as usize, Opcode::ALL.len() - 2);
    assert_eq!(p.b.qp.state(), QpState::Rts);
    assert!(p.b.events.is_empty(), "{:?}", p.b.events);
    assert!(p.b.received().is_empty() && p.b.drain().is_empty());
}

#[test]
fn datagrams_do_not_care_for_packet_numbers() {
    let mut p = pair();
    for wr_id in 0..4 {
        let dst = p.b.region(64);
        p.b.recv(wr_id, &[sge(&dst, 0, 64)]);
    }
    for wr_id in 0..3 {
        p.a.send_to(wr_id, SendOp::SendWithImm(wr_id as u32), &[], datagram(B, QKEY));
    }
    let sent = p.a.drain();
    for i in [2, 0, 1, 1] {
        p.b.handle(&sent[i].1);
    }
    let imms: Vec<u32> = p.b.received().iter().map(|c| c.imm).collect();
    assert_eq!(imms, [2, 0, 1, 1]);
}
