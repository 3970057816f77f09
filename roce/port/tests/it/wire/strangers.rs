//! Forged packets from the peer's address: management datagrams, datagrams, and packets with guessed PSNs.
//!
//! They never cause the peer's own packets to be dropped. Legitimate changes of a peer's behaviour are accepted.

use core::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Aeth, Bth, Header, Msn, Opcode, QKey, Syndrome};
use roce_icrc::Flow;
use roce_verbs::{QpAttr, QpType};

use super::{
    datagrams::{datagram, group, ud},
    drops::{mad, source},
    *,
};

/// IPv4 Identifications of a peer's packets.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ids {
    /// Index in a train, as ferroce; hardware sends each packet with 0.
    Index,
    /// Counter over all packets, as rdma_rxe.
    Counter(u16),
}

/// IPv4 Identifications of forged packets.
#[derive(Clone, Copy, Debug)]
enum Forged {
    Counter(u16),
    Zeros,
    Random,
    Alternating(bool),
}

impl Forged {
    const ALL: [Self; 4] = [
        Self::Counter(40_000),
        Self::Zeros,
        Self::Random,
        Self::Alternating(false),
    ];

    fn next(&mut self, rng: &mut ChaCha8Rng) -> u16 {
        match self {
            Self::Counter(n) => {
                *n = n.wrapping_add(1);
                *n
            }
            Self::Zeros => 0,
            Self::Random => rng.random(),
            Self::Alternating(odd) => {
                *odd = !*odd;
                if *odd { 7000 } else { 50_000 }
            }
        }
    }
}

/// Kind of forged packets.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Mad,
    Datagram,
    Multicast,
    Request,
    Acknowledge,
    Cnp,
}

/// Builds a packet whose ICRC is correct for an Identification.
fn sealed(id: u16, src: SocketAddr, dst: IpAddr, header: &Header, payload: &[u8]) -> Datagram {
    let mut d = super::drops::sealed(src, dst, header, payload);
    reseal(&mut d, id);
    d
}

fn reseal(d: &mut Datagram, id: u16) {
    let flow = Flow::try_from((d.src, SocketAddr::new(d.dst, ROCE))).unwrap();
    flow.seal(id, &mut d.bytes);
}

/// Returns a host's packets as its peer receives them.
fn sent(from: &mut Host, ids: &mut Ids) -> Vec<Datagram> {
    let trains = from.take();
    let Ids::Counter(next) = ids else { return trains };
    let mut out = Vec::new();
    for train in trains {
        for bytes in train.bytes.chunks(train.segment_len) {
            let mut d = Datagram {
                segment_len: 0,
                segments: 1,
                bytes: bytes.to_vec(),
                ..train.clone()
            };
            reseal(&mut d, *next);
            *next = next.wrapping_add(1);
            out.push(d);
        }
    }
    out
}

/// Exchanges packets until neither host sends any. Returns how many were dropped.
fn carry(a: &mut Host, b: &mut Host, ids: &mut [Ids; 2]) -> u64 {
    let dropped = |a: &Host, b: &Host| a.port.counters().icrc_implausible + b.port.counters().icrc_implausible;
    let before = dropped(a, b);
    for _ in 0..100 {
        let (from_a, from_b) = (sent(a, &mut ids[0]), sent(b, &mut ids[1]));
        if from_a.is_empty() && from_b.is_empty() {
            break;
        }
        from_a.iter().for_each(|d| b.give(d));
        from_b.iter().for_each(|d| a.give(d));
    }
    dropped(a, b) - before
}

fn advance(a: &mut Host, b: &mut Host, time: Duration) {
    a.now = a.now + time;
    b.now = a.now;
    for host in [a, b] {
        host.port.handle_timeout(host.now);
    }
}

/// Sends a message of three packets from A and one from B. Returns how many packets were dropped.
fn talk(a: &mut Host, b: &mut Host, qps: [Qpn; 2], ids: &mut [Ids; 2]) -> u64 {
    let (mine, theirs) = (a.region(3000), b.region(3000));
    a.send(qps[0], 1, SendOp::Write(remote(&theirs)), &mine, 3000);
    b.send(qps[1], 2, SendOp::Write(remote(&mine)), &theirs, 8);
    let dropped = carry(a, b, ids);
    // Acknowledgements may wait for an answer.
    advance(a, b, Duration::from_micros(20));
    dropped + carry(a, b, ids)
}

/// Returns whether both hosts have completed the message of `talk`.
fn is_done(a: &Host, b: &Host) -> bool {
    [a, b]
        .into_iter()
        .all(|h| matches!(&h.completions()[..], [c] if c.is_ok()))
}

/// Creates two hosts that have exchanged messages, with datagram queue pairs in a multicast group.
fn acquainted(ids: &mut [Ids; 2]) -> (Host, Host, [Qpn; 2], [Qpn; 2]) {
    let (mut a, mut b, qa, qb) = pair();
    let datagram = [&mut a, &mut b].map(|h| {
        let qpn = ud(h);
        h.port.attach_mcast(qpn, group(1)).unwrap();
        qpn
    });
    for _ in 0..8 {
        assert_eq!(talk(&mut a, &mut b, [qa, qb], ids), 0);
        assert!(is_done(&a, &b));
    }
    (a, b, [qa, qb], datagram)
}

/// Forges a packet from the peer's address. `psn`: the one that the queue pair expects or waits for.
fn forge(kind: Kind, id: u16, from: &Host, to: &Host, qps: [Qpn; 2], psn: Psn, rng: &mut ChaCha8Rng) -> Datagram {
    let [connected, unconnected] = qps;
    let src = SocketAddr::new(from.addr, rng.random());
    // Around the current PSN.
    let guess = psn.add(rng.random_range(0..6000)).add((1 << 24) - 3000);
    let unicast = |header: Header, payload: &[u8]| sealed(id, src, to.addr, &header, payload);
    match kind {
        Kind::Mad => unicast(mad(QKey::GSI, Qpn::GSI), &[0; 256]),
        Kind::Datagram => unicast(datagram(unconnected), b"data"),
        Kind::Multicast => sealed(id, src, group(1), &datagram(Qpn::MULTICAST), b"data"),
        Kind::Request => {
            let mut bth = Bth::new(Opcode::RcSendOnly, connected, guess);
            bth.ack_req = true;
            unicast(Header::new(bth), b"data")
        }
        Kind::Acknowledge => {
            let mut header = Header::new(Bth::new(Opcode::RcAcknowledge, connected, guess));
            header.aeth = Some(Aeth {
                syndrome: Syndrome::from_byte(rng.random()),
                msn: Msn::new(0),
            });
            unicast(header, &[])
        }
        Kind::Cnp => unicast(Header::new(Bth::new(Opcode::Cnp, connected, guess)), &[]),
    }
}

/// Sends fifty rounds of forged packets to both hosts among their own. Checks that no own packet is dropped or resent.
fn check_forgery(kind: Kind, mut forged: Forged, peers: Ids) {
    let mut ids = [peers; 2];
    let (mut a, mut b, qps, datagram) = acquainted(&mut ids);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for round in 0..50u32 {
        for _ in 0..20 {
            let id = forged.next(&mut rng);
            // A sends three packets a round and B one, both from PSN 100 on. `acquainted` ran eight rounds.
            let (psn_a, psn_b) = (Psn::new(108 + round), Psn::new(124 + 3 * round));
            let d = forge(kind, id, &a, &b, [qps[1], datagram[1]], psn_b, &mut rng);
            b.give(&d);
            let d = forge(kind, id, &b, &a, [qps[0], datagram[0]], psn_a, &mut rng);
            a.give(&d);
        }
        let dropped = talk(&mut a, &mut b, qps, &mut ids);
        assert_eq!(dropped, 0, "{kind:?} {forged:?} {peers:?} round {round}");
        assert!(is_done(&a, &b), "{kind:?} {forged:?} {peers:?} round {round}");
        advance(&mut a, &mut b, Duration::from_millis(1));
    }
    // Forged packets change nothing but a counter.
    let connected = matches!(kind, Kind::Request | Kind::Acknowledge);
    for host in [&a, &b] {
        let c = host.port.counters();
        assert_eq!(c.tx_retransmissions, 0, "{kind:?} {forged:?} {peers:?}: {c:?}");
        assert_eq!(c.gso_switched_off, 0, "{kind:?} {forged:?} {peers:?}");
        assert_eq!(c.drop_stranger, if connected { 50 * 20 } else { 0 }, "{kind:?}");
        let t = c.transport;
        assert_eq!(
            (t.duplicate_request, t.out_of_seq_request, t.naks_sent),
            (0, 0, 0),
            "{kind:?}"
        );
        assert_eq!(
            (t.dropped_requests, t.dropped_responses, c.rp_cnp_handled),
            (0, 0, 0),
            "{kind:?}"
        );
        let mut dropped = c
            .named()
            .filter(|(name, _)| name.starts_with("drop_") && *name != "drop_stranger" || *name == "icrc_errors");
        assert!(dropped.all(|(_, n)| n == 0), "forged packets are well-formed: {c:?}");
    }
}

macro_rules! teach_nothing {
    ($($test:ident: $kind:ident;)*) => { $(
        #[test]
        fn $test() {
            for forged in Forged::ALL {
                for peers in [Ids::Index, Ids::Counter(20_000), Ids::Counter(65_000)] {
                    check_forgery(Kind::$kind, forged, peers);
                }
            }
        }
    )* };
}

teach_nothing! {
    forged_mads_teach_nothing: Mad;
    forged_datagrams_teach_nothing: Datagram;
    forged_multicast_teaches_nothing: Multicast;
    forged_requests_with_guessed_psns_teach_nothing: Request;
    forged_acknowledgements_with_guessed_psns_teach_nothing: Acknowledge;
    forged_congestion_notifications_teach_nothing: Cnp;
}

/// A guessed PSN gets no answer; from the peer's port, at most one packet.
#[test]
fn a_guessed_psn_is_answered_only_to_the_peer_s_port() {
    let mut ids = [Ids::Index; 2];
    let (mut a, mut b, qps, datagram) = acquainted(&mut ids);
    let port = source_port(&mut a, &mut b, qps);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut answers = [0; 2];
    for n in 0..1000 {
        let mut d = forge(Kind::Request, 0, &a, &b, [qps[1], datagram[1]], Psn::new(124), &mut rng);
        if n % 2 == 1 {
            d.src.set_port(port);
            reseal(&mut d, 0);
        }
        b.give(&d);
        let out = b.take();
        assert!(out.iter().map(|d| d.segments).sum::<usize>() <= 1);
        assert!(out.iter().all(|answer| answer.bytes.len() <= d.bytes.len()));
        answers[n % 2] += out.len();
    }
    // From the peer's port duplicates are answered.
    assert_eq!(answers[0], 0);
    assert!((150..350).contains(&answers[1]), "{answers:?}");
}

/// Returns the UDP source port of A's queue pair.
fn source_port(a: &mut Host, b: &mut Host, qps: [Qpn; 2]) -> u16 {
    let (mine, theirs) = (a.region(8), b.region(8));
    a.send(qps[0], 1, SendOp::Write(remote(&theirs)), &mine, 8);
    let sent = a.take();
    sent.iter().for_each(|d| b.give(d));
    exchange(a, b);
    assert!(a.completions()[0].is_ok());
    sent[0].src.port()
}

#[test]
fn a_peer_may_change_its_identifications() {
    let sequence = [
        Ids::Index,
        Ids::Counter(9000),
        Ids::Counter(40_000),
        Ids::Index,
        Ids::Counter(200),
    ];
    let mut ids = [Ids::Index; 2];
    let (mut a, mut b, qps, _) = acquainted(&mut ids);
    for new in sequence {
        // At once, without an idle time before.
        ids = [new; 2];
        let mut dropped = talk(&mut a, &mut b, qps, &mut ids);
        let mut done = [a.completions().len(), b.completions().len()];
        for _ in 0..100 {
            if done == [1, 1] {
                break;
            }
            let next = [&mut a, &mut b].map(|h| h.port.poll_timeout());
            let next = next.into_iter().flatten().min().expect("a timer is set");
            let time = next.saturating_since(a.now);
            advance(&mut a, &mut b, time);
            dropped += carry(&mut a, &mut b, &mut ids);
            done = [done[0] + a.completions().len(), done[1] + b.completions().len()];
        }
        assert_eq!(done, [1, 1], "{new:?}");
        assert!(dropped <= 6, "{new:?}: three in each direction, not {dropped}");
        assert_eq!(b.port.qp_state(qps[1]), Some(QpState::Rts));
        for _ in 0..8 {
            assert_eq!(talk(&mut a, &mut b, qps, &mut ids), 0, "{new:?}");
            assert!(is_done(&a, &b));
        }
    }
}

/// rdma_rxe has one counter for all packets to an address: data, management, and other queue pairs' datagrams.
#[test]
fn a_counter_also_counts_unauthenticated_packets() {
    let mut ids = [Ids::Counter(500); 2];
    let (mut a, mut b, qps, datagram) = acquainted(&mut ids);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for round in 0..50 {
        let Ids::Counter(next) = &mut ids[0] else {
            unreachable!()
        };
        // Half a million packets a second. B receives a MAD and two datagrams of them.
        advance(&mut a, &mut b, Duration::from_millis(10));
        *next = next.wrapping_add(5000);
        for kind in [Kind::Mad, Kind::Datagram, Kind::Multicast] {
            let d = forge(kind, *next, &a, &b, [qps[1], datagram[1]], Psn::new(0), &mut rng);
            b.give(&d);
            *next = next.wrapping_add(1);
        }
        assert_eq!(b.port.counters().icrc_implausible, 0, "round {round}");
        assert_eq!(talk(&mut a, &mut b, qps, &mut ids), 0, "round {round}");
        assert!(is_done(&a, &b));
    }
}

#[test]
fn an_idle_counter_may_be_anywhere() {
    let mut ids = [Ids::Counter(500); 2];
    let (mut a, mut b, qps, _) = acquainted(&mut ids);
    for step in [1100, 1500, 5000, 60_000] {
        advance(&mut a, &mut b, Duration::from_millis(step));
        for ids in &mut ids {
            let Ids::Counter(next) = ids else { unreachable!() };
            *next = next.wrapping_add(33_333);
        }
        assert_eq!(talk(&mut a, &mut b, qps, &mut ids), 0);
        assert!(is_done(&a, &b));
    }
}

#[test]
fn management_datagrams_of_unknown_addresses_are_accepted() {
    let mut b = Host::new(2);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for n in 0..100 {
        let src = SocketAddr::new(ip(100 + n % 10), rng.random());
        b.give(&sealed(rng.random(), src, b.addr, &mad(QKey::GSI, Qpn::GSI), &[0; 256]));
    }
    let c = b.port.counters();
    assert_eq!((c.rx_mads, c.icrc_implausible), (100, 0));
}

/// A peer can connect again after a restart, perhaps with another kernel.
///
/// Our queue pairs of its previous connections still exist, and its MADs may be forged.
#[test]
fn a_restarted_peer_s_mads_are_accepted() {
    for forged in Forged::ALL.into_iter().map(Some).chain([None]) {
        let mut ids = [Ids::Index; 2];
        let (a, mut b, qps, datagram) = acquainted(&mut ids);
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let mut own = 30_000;
        let mut accepted = 0;
        for _ in 0..4 {
            b.now = b.now + Duration::from_secs(4);
            if let Some(mut forged) = forged {
                for _ in 0..500 {
                    let id = forged.next(&mut rng);
                    b.give(&forge(
                        Kind::Mad,
                        id,
                        &a,
                        &b,
                        [qps[1], datagram[1]],
                        Psn::new(0),
                        &mut rng,
                    ));
                }
            }
            let before = b.port.counters().rx_mads;
            b.give(&sealed(own, source(&a), b.addr, &mad(QKey::GSI, Qpn::GSI), &[0; 256]));
            own += 2;
            accepted += b.port.counters().rx_mads - before;
        }
        assert!(
            accepted >= 3,
            "{forged:?}: only the first may count as corrupt, not {}",
            4 - accepted
        );
    }
}

/// The first packets of a restarted peer on a new connection are accepted.
#[test]
fn a_restarted_peer_s_first_packets_are_accepted() {
    let mut ids = [Ids::Index; 2];
    let (mut a, mut b, _, _) = acquainted(&mut ids);
    for new in [Ids::Counter(30_000), Ids::Index, Ids::Counter(60_000)] {
        let qps = [a.qp(), b.qp()];
        a.raise(qps[0], b.addr, qps[1]);
        b.raise(qps[1], a.addr, qps[0]);
        ids = [new; 2];
        for _ in 0..8 {
            assert_eq!(talk(&mut a, &mut b, qps, &mut ids), 0, "{new:?}");
            assert!(is_done(&a, &b));
        }
    }
}

/// Identifications are also learned from an unreliable connection, if the PSNs are consecutive.
#[test]
fn an_unreliable_connection_s_identifications_are_learned() {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let init = QpInit {
        qp_type: QpType::Uc,
        ..b.init()
    };
    let qb = b.port.create_qp(init).unwrap();
    let steps = QpAttr {
        access: Some(RIGHTS),
        rq_psn: Some(Psn::new(100)),
        ..QpAttr::to_rts(AddressVector::new(b.addr, a.addr), Mtu::B1024, Qpn::new(9))
    };
    for attr in steps.steps(QpType::Uc) {
        b.port.modify_qp(b.now, qb, &attr).unwrap();
    }
    let give = |b: &mut Host, a: &mut Host, psn: u32, id: u16| {
        let mut header = Header::new(Bth::new(Opcode::UcWriteOnly, qb, Psn::new(psn)));
        header.reth = Some(roce_bth::Reth::default());
        b.give(&sealed(id, source(a), b.addr, &header, &[]));
        b.port.counters().icrc_implausible
    };
    for psn in 100..110 {
        assert_eq!(give(&mut b, &mut a, psn, 0), 0);
    }
    assert_eq!(give(&mut b, &mut a, 110, 30_000), 1);
    // Guessed PSNs are not learned from.
    for n in 1..10u32 {
        assert_eq!(
            give(&mut b, &mut a, 110 + n * 100_000, 30_000 + n as u16),
            1 + u64::from(n)
        );
    }
    assert_eq!(give(&mut b, &mut a, 111, 0), 10);
}
