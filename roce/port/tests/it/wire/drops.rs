//! Packets that must not reach a queue pair, and the counter of each.

use roce_bth::{Bth, Deth, Header, Opcode, PKey, QKey};
use roce_icrc::Flow;
use roce_port::PortCounters;
use roce_verbs::{Psn, Qpn};

use super::*;

/// A packet with a correct ICRC.
pub(crate) fn sealed(src: SocketAddr, dst: IpAddr, header: &Header, payload: &[u8]) -> Datagram {
    let mut bytes = vec![0; header.wire_len()];
    header.emit(&mut bytes);
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(&[0; 4]);
    let flow = Flow::try_from((src, SocketAddr::new(dst, ROCE))).unwrap();
    flow.seal(0, &mut bytes);
    Datagram {
        src,
        dst,
        segment_len: 0,
        segments: 1,
        tos: 0,
        ttl: 64,
        bytes,
    }
}

fn send_only(dest: Qpn) -> Header {
    let mut bth = Bth::new(Opcode::RcSendOnly, dest, Psn::new(100));
    bth.ack_req = true;
    Header::new(bth)
}

/// Delivers a packet to host 2 of a pair and returns what was counted; a receive waits, which must stay untouched
/// unless the packet is good.
fn counted(make: impl FnOnce(&Host, &Host, Qpn) -> Datagram) -> (PortCounters, usize) {
    let (a, mut b, _, qb) = pair();
    let memory = b.region(64);
    b.receive(qb, 1, &memory);
    let datagram = make(&a, &b, qb);
    b.give(&datagram);
    (b.port.counters(), b.completions().len())
}

pub(crate) fn source(host: &Host) -> SocketAddr {
    SocketAddr::new(host.addr, 0xc000)
}

#[test]
fn a_good_packet_arrives() {
    let (c, received) = counted(|a, b, q| sealed(source(a), b.addr, &send_only(q), &[1, 2, 3, 4]));
    assert_eq!(received, 1);
    assert!(c.named().all(|(name, n)| n == 0 || name.starts_with("rx_")), "{c:?}");
}

macro_rules! dropped {
    ($test:ident, $counter:ident, $make:expr) => {
        #[test]
        fn $test() {
            let (c, received) = counted($make);
            assert_eq!(received, 0);
            assert_eq!(c.$counter, 1, "{c:?}");
            let drops = c.named().filter(|(name, _)| !name.starts_with("rx_"));
            assert_eq!(drops.map(|(_, n)| n).sum::<u64>(), 1, "{c:?}");
        }
    };
}

dropped!(from_another_address, drop_peer_address, |_, b, q| sealed(
    SocketAddr::new(ip(9), 0xc000),
    b.addr,
    &send_only(q),
    b"data"
));
dropped!(to_an_address_that_is_not_ours, drop_local_address, |a, _, q| sealed(
    source(a),
    ip(77),
    &send_only(q),
    b"data"
));
dropped!(to_nobody, drop_no_qp, |a, b, q| sealed(
    source(a),
    b.addr,
    &send_only(Qpn::new(q.value() ^ 0x10)),
    b"data"
));
dropped!(to_qp0, drop_qp0, |a, b, _| sealed(
    source(a),
    b.addr,
    &send_only(Qpn::SMI),
    b"data"
));
dropped!(to_multicast, drop_multicast, |a, b, _| sealed(
    source(a),
    b.addr,
    &send_only(Qpn::MULTICAST),
    b"data"
));
dropped!(of_another_service, drop_service, |a, b, q| {
    let header = Header::new(Bth::new(Opcode::UcSendOnly, q, Psn::new(100)));
    sealed(source(a), b.addr, &header, b"data")
});
dropped!(of_another_partition, drop_pkey, |a, b, q| {
    let mut header = send_only(q);
    header.bth.pkey = PKey(0x8001);
    sealed(source(a), b.addr, &header, b"data")
});
dropped!(with_a_flipped_bit, icrc_errors, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.bytes[13] ^= 0x40;
    d
});
dropped!(with_a_changed_source_port, icrc_errors, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.src.set_port(0xc123);
    d
});
dropped!(cut_off, drop_truncated, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.bytes.truncate(15);
    d
});
dropped!(empty, drop_truncated, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.bytes.clear();
    d
});
dropped!(with_half_a_word, drop_malformed, |a, b, q| sealed(
    source(a),
    b.addr,
    &send_only(q),
    b"dat"
));
dropped!(of_an_unknown_opcode, drop_opcode, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.bytes[0] = 0x1f;
    d
});
dropped!(of_another_header_version, drop_version, |a, b, q| {
    let mut d = sealed(source(a), b.addr, &send_only(q), b"data");
    d.bytes[1] |= 3;
    d
});

pub(crate) fn mad(qkey: QKey, src_qp: Qpn) -> Header {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0)));
    header.deth = Some(Deth {
        qkey,
        reserved: 0,
        src_qp,
    });
    header
}

dropped!(a_mad_with_a_wrong_queue_key, drop_qkey, |a, b, _| sealed(
    source(a),
    b.addr,
    &mad(QKey(0x1234), Qpn::GSI),
    &[0; 256]
));
dropped!(a_mad_of_a_program, drop_bad_mad, |a, b, _| sealed(
    source(a),
    b.addr,
    &mad(QKey::GSI, Qpn::new(77)),
    &[0; 256]
));
dropped!(a_short_mad, drop_bad_mad, |a, b, _| sealed(
    source(a),
    b.addr,
    &mad(QKey::GSI, Qpn::GSI),
    &[0; 128]
));
dropped!(a_reliable_packet_to_qp1, drop_bad_mad, |a, b, _| sealed(
    source(a),
    b.addr,
    &send_only(Qpn::GSI),
    &[0; 256]
));

#[test]
fn a_peer_that_sends_zero_is_held_to_all_of_the_icrc() {
    let (mut a, mut b, qa, qb) = pair();
    let memory = b.region(64);
    let mut peer = source(&a);
    for wr in 0..8 {
        b.receive(qb, wr, &memory);
        a.send(qa, wr, roce_verbs::SendOp::Send, &memory_of(&a), 4);
        let sent = a.take();
        sent.iter().for_each(|d| b.give(d));
        peer = sent[0].src;
        exchange(&mut a, &mut b);
    }
    assert_eq!(b.completions().len(), 8);
    // Right, but for an Identification that this peer has never sent.
    let mut d = sealed(peer, b.addr, &send_only(qb), b"data");
    let flow = Flow::try_from((d.src, SocketAddr::new(d.dst, ROCE))).unwrap();
    flow.seal(0x5555, &mut d.bytes);
    b.give(&d);
    assert_eq!(b.port.counters().icrc_implausible, 1);
}

fn memory_of(host: &Host) -> Arc<Region> {
    host.region(64)
}

#[test]
fn a_damaged_packet_in_a_gro_buffer_spoils_only_itself() {
    let (mut a, mut b, qa, qb) = pair();
    acquaint(&mut a, &mut b, qa, qb);
    let (src, dst) = (a.region(10_240), b.region(10_240));
    src.write(0, &noise(10_240)).unwrap();
    a.send(qa, 1, roce_verbs::SendOp::Write(remote(&dst)), &src, 10_240);
    let mut trains = a.take();
    let longest = trains.iter_mut().max_by_key(|t| t.segments).unwrap();
    assert!(longest.segments > 4);
    let at = longest.segment_len * 2 + 40;
    longest.bytes[at] ^= 1;
    trains.iter().for_each(|t| b.give(t));
    assert_eq!(b.port.counters().icrc_errors, 1);
    exchange(&mut a, &mut b);
    assert_eq!(contents(&dst), noise(10_240));
}
