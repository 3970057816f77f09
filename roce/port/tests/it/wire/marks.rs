//! Congestion marks of switches: notifications and the reaction to them.

use core::time::Duration;

use roce_bth::{Class, Packet};
use roce_icrc::Flow;
use roce_port::RxMeta;
use roce_verbs::{Qpn, SendOp};

use super::*;

const CE: u8 = 3;
const ECT: u8 = 2;

/// Delivers datagrams with a congestion mark.
fn give_marked(to: &mut Host, trains: &[Datagram]) {
    for d in trains {
        let meta = RxMeta {
            segment_len: d.segment_len,
            tos: CE,
            ..RxMeta::new(d.dst, d.src)
        };
        to.port.handle_datagram(to.now, &meta, &d.bytes);
    }
}

fn class(d: &Datagram) -> Class {
    Packet::parse(&d.bytes[..d.segment_len])
        .unwrap()
        .header
        .bth
        .opcode
        .info()
        .class
}

fn notifications(trains: &[Datagram]) -> Vec<Datagram> {
    trains.iter().filter(|d| class(d) == Class::Cnp).cloned().collect()
}

/// Creates two hosts with connected queue pairs that send with ECT.
fn ect_pair() -> (Host, Host, Qpn, Qpn) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (qa, qb) = (a.qp(), b.qp());
    a.raise_class(qa, b.addr, qb, ECT);
    b.raise_class(qb, a.addr, qa, ECT);
    let ports = [a.port.promise_source(qa), b.port.promise_source(qb)].map(Option::unwrap);
    a.port.set_peer_source(qa, ports[1]).unwrap();
    b.port.set_peer_source(qb, ports[0]).unwrap();
    (a, b, qa, qb)
}

fn advance(hosts: [&mut Host; 2], by: Duration) {
    for host in hosts {
        host.now = host.now + by;
        host.port.handle_timeout(host.now);
    }
}

#[test]
fn notifications_of_marks_are_rate_limited() {
    let (mut a, mut b, qa, qb) = ect_pair();
    let (src, dst) = (a.region(1 << 20), b.region(1 << 20));
    for i in 0..4 {
        a.send(qa, i, SendOp::Write(remote(&dst)), &src, 16_000);
        give_marked(&mut b, &a.take());
        let out = b.take();
        out.iter().filter(|d| class(d) != Class::Cnp).for_each(|d| a.give(d));
        let cnps = notifications(&out);
        assert_eq!(cnps.len(), usize::from(i % 2 == 0), "{i}");
        for d in &cnps {
            let packet = Packet::parse(&d.bytes).unwrap();
            assert_eq!((packet.header.bth.dest_qp, packet.header.bth.becn), (qa, true));
            assert_eq!((d.segments, d.dst, d.tos), (1, a.addr, 48 << 2));
        }
        if i % 2 == 1 {
            advance([&mut a, &mut b], Duration::from_micros(51));
        }
    }
    let c = b.port.counters();
    assert_eq!((c.np_cnp_sent, c.np_ecn_marked_roce_packets), (2, 64));
    // Marked acknowledgements cause no notification.
    b.send(qb, 1, SendOp::Write(remote(&src)), &dst, 100);
    advance([&mut a, &mut b], Duration::from_micros(51));
    let data = b.take();
    data.iter().for_each(|d| a.give(d));
    give_marked(&mut b, &a.take());
    assert!(notifications(&b.take()).is_empty());
    assert!(b.completions().iter().all(|c| c.is_ok()));
}

/// Returns the bytes that A sends in `time`, acknowledged at once.
fn sent(a: &mut Host, b: &mut Host, qa: Qpn, (src, dst): (&Region, &Region), time: Duration, marked: bool) -> usize {
    let end = a.now + time;
    let mut bytes = 0;
    while a.now < end {
        let out = a.take();
        bytes += out.iter().map(|d| d.bytes.len()).sum::<usize>();
        match marked {
            true => give_marked(b, &out),
            false => out.iter().for_each(|d| b.give(d)),
        }
        b.take().iter().for_each(|d| a.give(d));
        for _ in a.completions() {
            a.send(qa, 1, SendOp::Write(remote(dst)), src, 50_000);
        }
        advance([a, b], Duration::from_micros(10));
    }
    bytes
}

#[test]
fn a_notified_sender_slows_down_and_recovers() {
    let (mut a, mut b, qa, _) = ect_pair();
    let (src, dst) = (a.region(1 << 20), b.region(1 << 20));
    let regions = (&*src, &*dst);
    for i in 0..4 {
        a.send(qa, i, SendOp::Write(remote(&dst)), &src, 50_000);
    }
    let ms = Duration::from_millis;
    let free = sent(&mut a, &mut b, qa, regions, ms(5), false);
    sent(&mut a, &mut b, qa, regions, ms(5), true);
    let slow = sent(&mut a, &mut b, qa, regions, ms(5), true);
    assert!(slow < free / 10 && slow > 0, "{slow} of {free}");
    assert!(a.port.counters().rp_cnp_handled > 20);
    assert_eq!(a.port.counters().tx_retransmissions, 0);
    sent(&mut a, &mut b, qa, regions, ms(600), false);
    let again = sent(&mut a, &mut b, qa, regions, ms(5), false);
    assert!(again > free / 2, "{again} of {free}");
}

/// A notification counts only from the peer's port and for a recently sent packet.
#[test]
fn a_forged_notification_is_ignored() {
    let (mut a, mut b, qa, _) = ect_pair();
    let (src, dst) = (a.region(1000), b.region(1000));
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 1000);
    give_marked(&mut b, &a.take());
    let [cnp] = &notifications(&b.take())[..] else {
        panic!("expected one notification")
    };
    let forge = |psn: u32, port: u16| {
        let mut d = cnp.clone();
        d.src.set_port(port);
        d.bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
        let flow = Flow::try_from((d.src, SocketAddr::new(d.dst, ROCE))).unwrap();
        flow.seal(0, &mut d.bytes);
        d
    };
    let port = cnp.src.port();
    // A hardware peer's PSN, a distant one, and the right one from other ports.
    for (psn, port) in [(0x80_0000, port), (100 + 4096, port), (100, port ^ 1), (100, 0)] {
        a.give(&forge(psn, port));
        assert_eq!(a.port.counters().rp_cnp_handled, 0, "{psn} {port}");
    }
    a.give(&forge(100, port));
    assert_eq!(
        (a.port.counters().rp_cnp_handled, a.port.counters().rp_cnp_ignored),
        (1, 4)
    );
}

#[test]
fn notifications_change_nothing_without_ect() {
    let (mut a, mut b, qa, _) = pair();
    let (src, dst) = (a.region(1 << 20), b.region(1 << 20));
    let regions = (&*src, &*dst);
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 50_000);
    let ms = Duration::from_millis;
    let free = sent(&mut a, &mut b, qa, regions, ms(5), false);
    let marked = sent(&mut a, &mut b, qa, regions, ms(5), true);
    assert!(marked > free * 9 / 10, "{marked} of {free}");
    let c = a.port.counters();
    assert!(c.rp_cnp_handled == 0 && c.rp_cnp_ignored > 20);
}
