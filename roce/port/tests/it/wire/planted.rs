//! Forged packets ahead of the expected PSN: they never reach memory, end a connection or get an answer.

use std::sync::Arc;

use roce_bth::{Aeth, Bth, Header, Msn, NakCode, Opcode, Reth, Syndrome};
use roce_port::QpnRange;
use roce_port::cm::guid;

use super::{drops::sealed, *};

/// First PSN of both directions.
const FIRST: u32 = 100;
/// Payload byte of forged packets.
const FORGED: u8 = 0xee;
/// Packets in a flood, each with its own PSN. So many once wrote forged bytes to a disk.
const FLOOD: u32 = 4208;

/// Source of the UDP ports of a pair: named in REQ and REP, or learned.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ports {
    Agreed,
    Learned,
}

struct Pair {
    a: Host,
    b: Host,
    qa: Qpn,
    qb: Qpn,
    /// PSN that B expects next.
    next: u32,
}

/// Creates a connected pair that knows each other's ports.
fn pair_of(ports: Ports) -> Pair {
    if ports == Ports::Learned {
        let (mut a, mut b, qa, qb) = pair();
        acquaint(&mut a, &mut b, qa, qb);
        let next = FIRST + 1;
        return Pair { a, b, qa, qb, next };
    }
    let host = |last: u8| Host::with(last, |c| c.cm.ca_guid = guid::keeping(last.into()));
    let (mut a, mut b) = (host(1), host(2));
    let (qa, qb) = (a.qp(), b.qp());
    let next = connect(&mut a, &mut b, qa, qb);
    Pair { a, b, qa, qb, next }
}

/// Connects two queue pairs; returns the first PSN that B's expects.
fn connect(a: &mut Host, b: &mut Host, qa: Qpn, qb: Qpn) -> u32 {
    b.port.cm_listen(&ListenArgs::new(None, 7471, 4)).unwrap();
    let (from, to) = (SocketAddr::new(a.addr, 0), SocketAddr::new(b.addr, 7471));
    a.port.connect_qp(a.now, from, to, qa, params(b"")).unwrap();
    let mut psn = None;
    for _ in 0..10 {
        for d in a.take() {
            b.give(&d);
        }
        for event in b.events() {
            if let CmEventKind::Request { conn, .. } = event {
                b.port.accept_qp(b.now, conn, qb, params(b"")).unwrap();
                psn = b.port.query_qp(qb).unwrap().rq_psn;
            }
        }
        for d in b.take() {
            a.give(&d);
        }
    }
    assert_eq!(b.port.qp_state(qb), Some(QpState::Rts));
    psn.unwrap().value()
}

impl Pair {
    /// Forges a packet from A to B with a wrong source port.
    fn forge(&self, opcode: Opcode, psn: u32, change: impl FnOnce(&mut Header), payload: &[u8]) -> Datagram {
        let mut header = Header::new(Bth::new(opcode, self.qb, Psn::new(psn & 0x00ff_ffff)));
        header.bth.ack_req = true;
        change(&mut header);
        sealed(SocketAddr::new(self.a.addr, 4000), self.b.addr, &header, payload)
    }

    /// Sends B a flood: a packet at each PSN from the expected one on.
    fn flood(&mut self, make: impl Fn(&Self, u32) -> Datagram) {
        for n in 0..FLOOD {
            let d = make(self, self.next + n);
            self.b.give(&d);
            assert!(self.b.take().is_empty(), "packet {n} is answered");
        }
    }

    fn assert_untouched(&self) {
        assert_eq!(self.b.port.qp_state(self.qb), Some(QpState::Rts));
        assert!(self.b.completions().is_empty());
        assert_eq!(self.b.port.counters().drop_stranger, u64::from(FLOOD));
        let t = self.b.port.counters().transport;
        assert_eq!(
            (t.out_of_seq_request, t.dropped_requests, t.dropped_responses),
            (0, 0, 0)
        );
    }
}

#[test]
fn writes_ahead_of_the_expected_psn_are_not_buffered() {
    for ports in [Ports::Agreed, Ports::Learned] {
        let mut p = pair_of(ports);
        let (src, dst) = (p.a.region(8192), p.b.region(8192));
        src.write(0, &noise(8192)).unwrap();
        p.flood(|p, psn| {
            let opcode = if psn % 2 == 0 {
                Opcode::RcWriteMiddle
            } else {
                Opcode::RcWriteLast
            };
            p.forge(opcode, psn, |_| {}, &[FORGED; 1024])
        });
        p.assert_untouched();
        p.a.send(p.qa, 1, SendOp::Write(remote(&dst)), &src, 8192);
        exchange(&mut p.a, &mut p.b);
        assert!(p.a.completions()[0].is_ok(), "{ports:?}");
        assert_eq!(contents(&dst), noise(8192), "{ports:?}");
    }
}

#[test]
fn forged_requests_that_would_be_refused_do_not_end_the_connection() {
    for ports in [Ports::Agreed, Ports::Learned] {
        let makes: [fn(&Pair, u32) -> Datagram; 3] = [
            |p, psn| {
                let wrong_key = |h: &mut Header| {
                    h.reth = Some(Reth {
                        dma_len: 4,
                        ..Reth::default()
                    })
                };
                p.forge(Opcode::RcWriteOnly, psn, wrong_key, b"data")
            },
            |p, psn| p.forge(Opcode::RcSendLast, psn, |_| {}, b""),
            |p, psn| p.forge(Opcode::RcSendOnly, psn, |_| {}, b"data"),
        ];
        for make in makes {
            let mut p = pair_of(ports);
            let memory = p.b.region(64);
            p.b.receive(p.qb, 1, &memory);
            p.flood(make);
            p.assert_untouched();
            assert_eq!(contents(&memory), [0; 64]);
        }
    }
}

#[test]
fn forged_responses_complete_nothing_and_stay_out_of_memory() {
    let responses: [(Opcode, Option<u8>, usize); 5] = [
        (Opcode::RcReadResponseMiddle, None, 1024),
        (Opcode::RcReadResponseFirst, Some(0x1f), 1024),
        (Opcode::RcAcknowledge, Some(0x1f), 0),
        (
            Opcode::RcAcknowledge,
            Some(Syndrome::Nak(NakCode::InvalidRequest).to_byte()),
            0,
        ),
        (
            Opcode::RcAcknowledge,
            Some(Syndrome::Nak(NakCode::PsnSequenceError).to_byte()),
            0,
        ),
    ];
    for ports in [Ports::Agreed, Ports::Learned] {
        for (opcode, syndrome, len) in responses {
            let mut p = pair_of(ports);
            let (src, dst) = (p.a.region(20_480), p.b.region(20_480));
            src.write(0, &noise(20_480)).unwrap();
            // The forger knows the PSNs of B's READ.
            p.b.send(p.qb, 1, SendOp::Read(remote(&src)), &dst, 20_480);
            let requests = p.b.take();
            let psn = u32::from_be_bytes([0, requests[0].bytes[9], requests[0].bytes[10], requests[0].bytes[11]]);
            for n in 0..20 {
                let aeth = |h: &mut Header| {
                    h.aeth = syndrome.map(|s| Aeth {
                        syndrome: Syndrome::from_byte(s),
                        msn: Msn::new(0),
                    });
                };
                let d = p.forge(opcode, psn + n, aeth, &vec![FORGED; len]);
                p.b.give(&d);
                assert!(p.b.take().is_empty() && p.b.completions().is_empty(), "{opcode:?} {n}");
            }
            requests.iter().for_each(|d| p.a.give(d));
            exchange(&mut p.a, &mut p.b);
            assert!(p.b.completions()[0].is_ok(), "{ports:?} {opcode:?} {syndrome:?}");
            assert_eq!(contents(&dst), noise(20_480), "{ports:?} {opcode:?}");
            assert_eq!(p.b.port.counters().tx_retransmissions, 0);
        }
    }
}

/// Returns the source port of A's packets after a WRITE to B.
fn port_of_a(p: &mut Pair) -> u16 {
    let (src, dst) = (p.a.region(8), p.b.region(8));
    p.a.send(p.qa, 9, SendOp::Write(remote(&dst)), &src, 8);
    let sent = p.a.take();
    sent.iter().for_each(|d| p.b.give(d));
    exchange(&mut p.a, &mut p.b);
    assert!(p.a.completions()[0].is_ok());
    p.next += 1;
    sent[0].src.port()
}

/// Copies a packet with another source port.
fn from_port(d: &Datagram, port: u16) -> Datagram {
    let mut d = d.clone();
    d.src.set_port(port);
    let flow = roce_icrc::Flow::try_from((d.src, SocketAddr::new(d.dst, ROCE))).unwrap();
    flow.seal(0, &mut d.bytes);
    d
}

#[test]
fn a_peer_s_new_port_is_accepted_on_retransmission() {
    for ports in [Ports::Agreed, Ports::Learned] {
        let mut p = pair_of(ports);
        let port = port_of_a(&mut p);
        let (src, dst) = (p.a.region(8), p.b.region(8));
        p.a.send(p.qa, 1, SendOp::Write(remote(&dst)), &src, 8);
        let [sent] = &p.a.take()[..] else { panic!("one packet") };
        let moved = from_port(sent, port ^ 1);
        p.b.give(&moved);
        assert!(p.b.take().is_empty(), "{ports:?}: an expected PSN alone is not enough");
        p.b.give(&moved);
        let answers = p.b.take().len();
        // An agreed port never changes.
        assert_eq!(answers, if ports == Ports::Learned { 1 } else { 0 });
        if ports == Ports::Learned {
            // The new port is the peer's now: a gap is reported to it only.
            let ahead = p.forge(Opcode::RcSendOnly, p.next + 5, |_| {}, b"data");
            p.b.give(&from_port(&ahead, port));
            assert!(p.b.take().is_empty());
            p.b.give(&from_port(&ahead, port ^ 1));
            assert_eq!(p.b.take().len(), 1);
        }
    }
}

#[test]
fn before_a_port_is_known_one_packet_is_outstanding_and_nothing_is_buffered() {
    let (mut a, mut b, qa, qb) = pair();
    let (src, dst) = (a.region(8192), b.region(8192));
    src.write(0, &noise(8192)).unwrap();
    a.send(qa, 1, SendOp::Write(remote(&dst)), &src, 8192);
    let first = a.take();
    assert_eq!(first.iter().map(|d| d.segments).sum::<usize>(), 1);
    let ahead = sealed(
        first[0].src,
        b.addr,
        &Header::new(Bth::new(Opcode::RcWriteMiddle, qb, Psn::new(FIRST + 1))),
        &[FORGED; 1024],
    );
    b.give(&ahead);
    assert!(b.take().is_empty(), "no NAK either");
    assert_eq!(b.port.counters().drop_stranger, 1);
    first.iter().for_each(|d| b.give(d));
    exchange(&mut a, &mut b);
    assert!(a.completions()[0].is_ok());
    assert_eq!(contents(&dst), noise(8192));
}

/// A forger that knows the port can't replace bytes of a packet that also arrives.
#[test]
fn if_copies_of_a_packet_differ_neither_is_executed() {
    let mut p = pair_of(Ports::Agreed);
    let port = port_of_a(&mut p);
    let (src, dst) = (p.a.region(8192), p.b.region(8192));
    src.write(0, &noise(8192)).unwrap();
    p.a.send(p.qa, 1, SendOp::Write(remote(&dst)), &src, 8192);
    let trains = p.a.take();
    let forged = p.forge(Opcode::RcWriteMiddle, p.next + 2, |_| {}, &[FORGED; 1024]);
    p.b.give(&from_port(&forged, port));
    // The peer's first packet is lost, the others arrive.
    for train in &trains {
        for (i, bytes) in train.bytes.chunks(train.segment_len).enumerate() {
            if bytes[9..12] == p.next.to_be_bytes()[1..] {
                continue;
            }
            let meta = RxMeta {
                identification: Some(i as u16),
                ..RxMeta::new(train.dst, train.src)
            };
            p.b.port.handle_datagram(p.b.now, &meta, bytes);
        }
    }
    let mut rounds = 0;
    while p.a.completions().is_empty() {
        exchange(&mut p.a, &mut p.b);
        if let Some(t) = p.a.port.poll_timeout() {
            p.a.now = t;
            p.b.now = t;
            p.a.port.handle_timeout(t);
        }
        rounds += 1;
        assert!(rounds < 50);
    }
    assert_eq!(contents(&dst), noise(8192));
}

/// Two hosts with a queue pair each. A stranger has asked the first for a connection in the second's name, with the number of the
/// second's queue pair, a source port and a GUID that it made up. The request waits for the program's answer.
fn with_forged_request() -> (Host, Host, Qpn, Qpn) {
    let only = QpnRange {
        first: 0x123,
        last: 0x123,
    };
    let keeping = |c: &mut PortConfig, last: u64| c.cm.ca_guid = guid::keeping(last);
    let mut a = Host::with(1, |c| keeping(c, 1));
    let mut b = Host::with(2, |c| c.qpns = only);
    let mut stranger = Host::with(3, |c| {
        *c = PortConfig::new(vec![ip(2)], Mtu::B1024, 2);
        keeping(c, 2);
        c.qpns = only;
    });
    let (qa, qb, of_stranger) = (a.qp(), b.qp(), stranger.qp());
    assert_eq!(qb, of_stranger);
    a.port.cm_listen(&ListenArgs::new(None, 7000, 4)).unwrap();
    let (from, to) = (SocketAddr::new(b.addr, 0), SocketAddr::new(a.addr, 7000));
    stranger
        .port
        .connect_qp(stranger.now, from, to, of_stranger, params(b""))
        .unwrap();
    for d in stranger.take() {
        a.give(&d);
    }
    assert!(matches!(a.events()[..], [CmEventKind::Request { .. }]));
    (a, b, qa, qb)
}

fn assert_writes_arrive(mut a: Host, mut b: Host, qb: Qpn) {
    let (src, dst) = (b.region(64), a.region(64));
    src.write(0, &noise(64)).unwrap();
    b.send(qb, 1, SendOp::Write(remote(&dst)), &src, 64);
    exchange(&mut a, &mut b);
    assert_eq!(a.port.counters().drop_stranger, 0);
    assert_eq!(contents(&dst), noise(64));
}

#[test]
fn a_forged_request_does_not_change_the_terms_of_a_connection_of_ours() {
    let (mut a, mut b, qa, qb) = with_forged_request();
    connect(&mut a, &mut b, qa, qb);
    assert_writes_arrive(a, b, qb);
}

#[test]
fn a_forged_request_does_not_change_the_terms_of_a_queue_pair_that_the_program_moves() {
    let (mut a, mut b, qa, qb) = with_forged_request();
    a.raise(qa, b.addr, qb);
    b.raise(qb, a.addr, qa);
    assert_writes_arrive(a, b, qb);
}

/// A client of several ports can't exceed the memory limit of the process.
#[test]
fn ports_of_a_process_share_one_budget() {
    let config = |last| PortConfig::new(vec![ip(last)], Mtu::B1024, 1);
    assert!(Arc::ptr_eq(&config(1).reorder_budget, &config(2).reorder_budget));
}
