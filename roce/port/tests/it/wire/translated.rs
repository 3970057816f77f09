//! Requests whose addresses were translated on the way, and ICMP errors about requests.

use roce_port::{CmEventKind, ListenArgs};
use roce_verbs::{Qpn, provider::NoAnswer};

use super::{
    Datagram, Host,
    connections::{SERVICE, connect},
    ip, params,
};

/// A host that asks another one, the request, and the queue pair.
fn asked() -> (Host, Host, Datagram, Qpn) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let qp = a.qp();
    connect(&mut a, &b, qp, b"");
    let request = a.take().remove(0);
    (a, b, request, qp)
}

#[test]
fn a_translated_request_is_counted_and_dropped() {
    let (_, mut b, request, _) = asked();
    let mut translated = request.clone();
    translated.src.set_ip(ip(77));
    for _ in 0..3 {
        b.give(&translated);
    }
    let counters = b.port.counters();
    assert_eq!(
        (counters.icrc_errors, counters.icrc_translated, counters.rx_mads),
        (3, 3, 0)
    );
    assert!(
        b.events().is_empty() && b.take().is_empty(),
        "neither accepted nor answered"
    );
    // A corrupt one is no translated one.
    let mut corrupt = translated.clone();
    corrupt.bytes[100] ^= 1;
    b.give(&corrupt);
    assert_eq!(
        (b.port.counters().icrc_errors, b.port.counters().icrc_translated),
        (4, 3)
    );
    // The real one gets in all the same.
    b.give(&request);
    assert!(matches!(b.events()[..], [CmEventKind::Request { .. }]));
}

#[test]
fn an_error_ends_the_wait_of_the_request_that_it_quotes_and_nothing_else() {
    let (mut a, b, request, qp) = asked();
    let why = NoAnswer::PortUnreachable;
    assert!(a.port.awaits_answer());
    let before = a.port.qp_state(qp);
    for forged in [&request.bytes[..40], &[0; 280][..]] {
        a.port.handle_undeliverable(a.now, b.addr, forged, why);
    }
    assert_eq!((a.events(), a.port.qp_state(qp)), (vec![], before));
    a.port.handle_undeliverable(a.now, b.addr, &request.bytes, why);
    match a.events()[..] {
        [CmEventKind::Unreachable { why, .. }] => assert_eq!(why, NoAnswer::PortUnreachable),
        ref other => panic!("{other:?}"),
    }
    assert!(!a.port.awaits_answer());
    assert_eq!(a.port.qp_state(qp), Some(roce_verbs::QpState::Err));

    // What stands is not ended by errors about its packets, even if all of them are quoted.
    let (mut a, mut b, request, qp) = asked();
    b.give(&request);
    let [CmEventKind::Request { conn, .. }] = b.events()[..] else {
        panic!("no request");
    };
    let qb = b.qp();
    b.port.accept_qp(b.now, conn, qb, params(b"")).unwrap();
    let mut sent = vec![request];
    for _ in 0..4 {
        b.take().iter().for_each(|d| a.give(d));
        let packets = a.take();
        packets.iter().for_each(|d| b.give(d));
        sent.extend(packets);
    }
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    for packet in &sent {
        a.port.handle_undeliverable(a.now, b.addr, &packet.bytes, why);
    }
    assert_eq!(
        (a.events(), a.port.qp_state(qp)),
        (vec![], Some(roce_verbs::QpState::Rts))
    );
}
