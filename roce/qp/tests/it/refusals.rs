//! Every refusal, with what it does on both sides.

use roce_bth::{Aeth, AtomicEth, Credits, Msn, NakCode, Opcode, Packet, Psn, RKey, Syndrome};
use roce_verbs::{
    AccessFlags, AsyncEvent, LKey, Mtu, QpState, QpType, Qpn, RecvWr, RemoteAddr, SendOp, Sge, WcOpcode, WcStatus,
    wr::{BindWindow, FastRegister},
};

use crate::harness::*;

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B256,
        ..Setup::default()
    }
}

/// Feeds hand-made requests to B, and returns its answer's syndrome and PSN offset.
fn answer(p: &mut Pair, requests: &[Raw]) -> Vec<(Syndrome, u32)> {
    for raw in requests {
        p.b.handle(&raw.bytes());
    }
    let first = Psn::new(p.setup.psn);
    let headers = p.b.headers();
    headers
        .iter()
        .filter_map(|h| h.aeth.map(|a| (a.syndrome, h.bth.psn.offset_from(first))))
        .collect()
}

fn nak(code: NakCode) -> Syndrome {
    Syndrome::Nak(code)
}

const INVALID: Syndrome = Syndrome::Nak(NakCode::InvalidRequest);

struct Case {
    name: &'static str,
    requests: Vec<Raw>,
    /// Answer of B, and the packet that it is about.
    says: (NakCode, u32),
    event: Option<AsyncEvent>,
    /// Status of B's only receive.
    receive: WcStatus,
}

fn raw(opcode: Opcode, psn: u32) -> Raw {
    Raw::new(opcode, B, Setup::default().psn + psn)
}

fn malformed(va: u64, rkey: RKey) -> Vec<Case> {
    use Opcode as O;
    let full = [1; 256];
    let invalid = |name, requests, at| Case {
        name,
        requests,
        says: (NakCode::InvalidRequest, at),
        event: Some(AsyncEvent::QpRequestError(Qpn::new(B))),
        receive: WcStatus::FlushError,
    };
    let taken = |name, requests, at, receive| Case {
        name,
        requests,
        says: (NakCode::InvalidRequest, at),
        event: None,
        receive,
    };
    let write = |o, n: usize, len| raw(o, 0).reth(va, rkey, len).payload(&vec![1; n]);
    vec![
        invalid("middle first", vec![raw(O::RcSendMiddle, 0).payload(&full)], 0),
        invalid("last first", vec![raw(O::RcWriteLast, 0).payload(&[1])], 0),
        taken(
            "send in a send",
            vec![raw(O::RcSendFirst, 0).payload(&full), raw(O::RcSendOnly, 1)],
            1,
            WcStatus::RemoteInvalidRequestError,
        ),
        invalid(
            "send in a write",
            vec![write(O::RcWriteFirst, 256, 600), raw(O::RcSendMiddle, 1).payload(&full)],
            1,
        ),
        invalid(
            "read in a write",
            vec![
                write(O::RcWriteFirst, 256, 600),
                raw(O::RcReadRequest, 1).reth(va, rkey, 1),
            ],
            1,
        ),
        taken(
            "short first",
            vec![raw(O::RcSendFirst, 0).payload(&[1; 255])],
            0,
            WcStatus::RemoteInvalidRequestError,
        ),
        taken(
            "long only",
            vec![raw(O::RcSendOnly, 0).payload(&[1; 257])],
            0,
            WcStatus::RemoteInvalidRequestError,
        ),
        taken(
            "empty last",
            vec![raw(O::RcSendFirst, 0).payload(&full), raw(O::RcSendLast, 1)],
            1,
            WcStatus::RemoteInvalidRequestError,
        ),
        taken(
            "more than the receive holds",
            vec![
                raw(O::RcSendFirst, 0).payload(&full),
                raw(O::RcSendMiddle, 1).payload(&full),
                raw(O::RcSendLast, 2).payload(&[1; 89]),
            ],
            2,
            WcStatus::LocalLengthError,
        ),
        invalid("write shorter than it says", vec![write(O::RcWriteOnly, 10, 11)], 0),
        invalid("write longer than it says", vec![write(O::RcWriteOnly, 10, 9)], 0),
        invalid("first write packet is all", vec![write(O::RcWriteFirst, 256, 256)], 0),
        invalid(
            "write goes on past its end",
            vec![
                write(O::RcWriteFirst, 256, 300),
                raw(O::RcWriteMiddle, 1).payload(&full),
            ],
            1,
        ),
        invalid(
            "read of 2 GiB and a byte",
            vec![raw(O::RcReadRequest, 0).reth(va, rkey, (1 << 31) + 1)],
            0,
        ),
        invalid(
            "atomic on an odd address",
            vec![raw(O::RcFetchAdd, 0).atomic(AtomicEth {
                va: va + 4,
                rkey,
                swap_add: 1,
                compare: 0,
            })],
            0,
        ),
    ]
}

#[test]
fn malformed_requests_are_refused_as_invalid() {
    let cases = malformed(0, RKey(0)).len();
    for i in 0..cases {
        let mut p = Pair::new(setup());
        let dst = p.b.region(1000);
        p.b.recv(5, &[sge(&dst, 0, 600)]);
        let case = malformed(dst.addr(), dst.rkey()).swap_remove(i);
        assert_eq!(
            answer(&mut p, &case.requests),
            [(nak(case.says.0), case.says.1)],
            "{}",
            case.name
        );
        assert_eq!(p.b.qp.state(), QpState::Err, "{}", case.name);
        assert_eq!(p.b.events, case.event.into_iter().collect::<Vec<_>>(), "{}", case.name);
        let r = p.b.received();
        assert_eq!(
            r.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
            [(5, case.receive)],
            "{}",
            case.name
        );
        assert_eq!(p.b.counters.naks_sent, 1);
        // From now on it is silent.
        assert!(answer(&mut p, &[raw(Opcode::RcSendOnly, 0)]).is_empty());
    }
}

#[test]
fn keys_ranges_and_rights_are_checked() {
    let mut shape = Pair::new(setup());
    let limited = AccessFlags::LOCAL_WRITE;
    let requests = |va: u64, rkey: RKey, len: u32| {
        let eth = AtomicEth {
            va,
            rkey,
            swap_add: 1,
            compare: 0,
        };
        [
            raw(Opcode::RcWriteOnly, 0)
                .reth(va, rkey, len)
                .payload(&vec![1; len as usize]),
            raw(Opcode::RcReadRequest, 0).reth(va, rkey, len),
            raw(Opcode::RcFetchAdd, 0).atomic(eth),
            raw(Opcode::RcCompareSwap, 0).atomic(eth),
        ]
    };
    shape.run();
    for which in 0..4 {
        for fault in ["key", "byte", "before", "behind", "right", "domain", "gone"] {
            let mut p = Pair::new(setup());
            let open = p.b.region(64);
            let closed = p.b.mem.alloc_region(p.b.pd, 64, limited).unwrap();
            let other = p.b.mem.alloc_pd().unwrap();
            let foreign = p.b.mem.alloc_region(other, 64, ALL).unwrap();
            let (va, rkey) = match fault {
                "key" => (open.addr(), RKey(open.rkey().0 ^ 0x100)),
                "byte" => (open.addr(), open.rkey().next()),
                "before" => (open.addr() - 8, open.rkey()),
                "behind" => (open.addr() + 64, open.rkey()),
                "right" => (closed.addr(), closed.rkey()),
                "domain" => (foreign.addr(), foreign.rkey()),
                _ => {
                    p.b.mem.deregister(&open).unwrap();
                    (open.addr(), open.rkey())
                }
            };
            let request = requests(va, rkey, 8)[which].clone();
            assert_eq!(
                answer(&mut p, &[request]),
                [(nak(NakCode::RemoteAccessError), 0)],
                "{fault} {which}"
            );
            assert_eq!(p.b.events, [AsyncEvent::QpAccessError(Qpn::new(B))]);
            assert_eq!(p.b.qp.state(), QpState::Err);
            assert_eq!(bytes(&open, 0, 64), [0; 64]);
        }
        // 0 bytes need no key.
        if which < 2 {
            let mut p = Pair::new(setup());
            let says = answer(&mut p, &[requests(7, RKey(7), 0)[which].clone().ack_req()]);
            assert_eq!(says, [(Syndrome::Ack(Credits::INVALID), 0)]);
            assert_eq!(p.b.qp.state(), QpState::Rts);
        }
    }
}

/// The receive that a WRITE with immediate has taken ends with it (IBA 11.6.2); the sender sees a remote error.
#[test]
fn a_write_with_immediate_that_is_refused_is_a_local_access_error_of_its_receive() {
    let cases: [(&str, usize, bool); 4] = [
        ("key", 8, true),
        ("range", 0, true),
        ("right", 0, true),
        ("key of many packets, which takes no receive", 600, false),
    ];
    for qp_type in [QpType::Rc, QpType::Uc] {
        for (fault, len, taken) in cases {
            let mut p = Pair::of(qp_type, setup());
            let open = p.b.region(64);
            let closed = p.b.mem.alloc_region(p.b.pd, 64, AccessFlags::LOCAL_WRITE).unwrap();
            let src = p.a.filled(600, 1);
            let to = match fault {
                "range" => at(&open, 60),
                "right" => at(&closed, 0),
                _ => RemoteAddr {
                    rkey: RKey(open.rkey().0 ^ 0x100),
                    ..at(&open, 0)
                },
            };
            p.b.recv(5, &[]);
            p.b.recv(6, &[]);
            p.a.send(1, SendOp::WriteWithImm(to, 7), &[sge(&src, 0, len.max(8))]);
            p.run();
            let ended: Vec<_> = p.b.received().iter().map(|c| (c.wr_id, c.status)).collect();
            if qp_type == QpType::Uc {
                assert!(ended.is_empty(), "UC drops it and keeps the receive: {fault}");
                continue;
            }
            let first = if taken {
                WcStatus::LocalAccessError
            } else {
                WcStatus::FlushError
            };
            assert_eq!(ended, [(5, first), (6, WcStatus::FlushError)], "{fault}");
            assert_eq!(p.a.completions()[0].status, WcStatus::RemoteAccessError, "{fault}");
            assert_eq!(bytes(&open, 0, 64), [0; 64]);
        }
    }
}

/// As above, with a key that is taken back under the message, when its receive comes from a shared queue.
#[test]
fn memory_taken_back_under_a_write_with_immediate_is_a_local_access_error() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let setup = setup();
        let b = Side::with(B, &setup, |c| {
            c.qp_type = qp_type;
            c.srq = Some(shared_queue(c.pd));
        });
        let a = Side::with(A, &setup, |c| c.qp_type = qp_type);
        let mut p = Pair::up(setup, a, b);
        let srq = p.b.qp.config().srq.clone().unwrap();
        srq.post(&RecvWr { wr_id: 5, sges: &[] }).unwrap();
        let (src, dst) = (p.a.filled(300, 1), p.b.region(300));
        p.a.send(1, SendOp::WriteWithImm(at(&dst, 0), 7), &[sge(&src, 0, 300)]);
        let packets = p.a.drain();
        p.b.handle(&packets[0].1);
        p.b.mem.deregister(&dst).unwrap();
        p.b.handle(&packets[1].1);
        let ended: Vec<_> = p.b.received().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(ended, [(5, WcStatus::LocalAccessError)], "{qp_type:?}");
    }
}

/// An error of the request itself is reported before one of its key.
#[test]
fn alignment_goes_before_the_key() {
    for which in 0..3 {
        let mut p = Pair::new(setup());
        let dst = p.b.region(64);
        let (va, rkey) = (dst.addr() + 4, RKey(dst.rkey().0 ^ 0x100));
        let eth = AtomicEth {
            va,
            rkey,
            swap_add: 1,
            compare: 0,
        };
        let request = match which {
            0 => raw(Opcode::RcFetchAdd, 0).atomic(eth),
            1 => raw(Opcode::RcCompareSwap, 0).atomic(eth),
            _ => raw(Opcode::RcAtomicWrite, 0).reth(va, rkey, 8).payload(&[1; 8]),
        };
        assert_eq!(answer(&mut p, &[request]), [(INVALID, 0)], "{which}");
        assert_eq!(p.b.events, [AsyncEvent::QpRequestError(Qpn::new(B))]);
    }
}

#[test]
fn operations_that_the_queue_pair_does_not_allow_are_invalid() {
    for (right, which) in [
        (AccessFlags::REMOTE_WRITE, 0),
        (AccessFlags::REMOTE_READ, 1),
        (AccessFlags::REMOTE_ATOMIC, 2),
    ] {
        let mut p = Pair::new(Setup {
            access: ALL - right,
            ..setup()
        });
        let dst = p.b.region(64);
        let (va, rkey) = (dst.addr(), dst.rkey());
        let request = match which {
            0 => raw(Opcode::RcWriteOnly, 0).reth(va, rkey, 1).payload(&[1]),
            1 => raw(Opcode::RcReadRequest, 0).reth(va, rkey, 1),
            _ => raw(Opcode::RcFetchAdd, 0).atomic(AtomicEth {
                va,
                rkey,
                ..AtomicEth::default()
            }),
        };
        assert_eq!(answer(&mut p, &[request]), [(INVALID, 0)]);
    }
}

#[test]
fn more_reads_than_agreed_are_refused() {
    let mut p = Pair::new(Setup {
        rd_atomic: 2,
        ..setup()
    });
    let src = p.b.filled(100, 1);
    let ask = |psn| raw(Opcode::RcReadRequest, psn).reth(src.addr(), src.rkey(), 100);
    // Answered ones don't count.
    assert_eq!(answer(&mut p, &[ask(0), ask(1)]).len(), 2);
    let says = answer(&mut p, &[ask(2), ask(3), ask(4)]);
    assert_eq!(says.last(), Some(&(INVALID, 4)));
    assert_eq!(says.len(), 3, "those before the refusal are answered first");
    assert_eq!(p.b.qp.state(), QpState::Err);
}

#[test]
fn messages_longer_than_the_device_allows_are_invalid_whatever_the_receive_holds() {
    let limited = || Setup {
        max_msg_size: 500,
        ..setup()
    };
    let mut p = Pair::new(limited());
    let dst = p.b.region(1000);
    p.b.recv(5, &[sge(&dst, 0, 1000)]);
    let send = |n: usize| {
        [
            raw(Opcode::RcSendFirst, 0).payload(&[1; 256]),
            raw(Opcode::RcSendLast, 1).payload(&vec![1; n]).ack_req(),
        ]
    };
    assert_eq!(answer(&mut p, &send(245)), [(INVALID, 1)]);
    assert_eq!(p.b.received()[0].status, WcStatus::RemoteInvalidRequestError);
    let mut p = Pair::new(limited());
    let dst = p.b.region(1000);
    p.b.recv(5, &[sge(&dst, 0, 1000)]);
    assert_eq!(answer(&mut p, &send(244)), [(Syndrome::Ack(Credits::INVALID), 1)]);
    assert_eq!(p.b.received()[0].byte_len, 500);
    for opcode in [Opcode::RcWriteFirst, Opcode::RcReadRequest] {
        let mut p = Pair::new(limited());
        let mut request = raw(opcode, 0).reth(dst.addr(), dst.rkey(), 501);
        if opcode == Opcode::RcWriteFirst {
            request = request.payload(&[1; 256]);
        }
        assert_eq!(answer(&mut p, &[request]), [(INVALID, 0)]);
    }
}

#[test]
fn the_near_past_is_a_duplicate_and_the_near_future_may_be_a_gap() {
    let ago = |n: u32| (1 << 24) - n;
    for ahead in [1, 1 << 12, ago(1 << 14), ago(1)] {
        let mut p = Pair::new(setup());
        p.b.recv(1, &[]);
        let answers = answer(&mut p, &[raw(Opcode::RcSendOnly, ahead)]);
        let counted = (p.b.counters.out_of_seq_request, p.b.counters.duplicate_request);
        match ahead <= 1 << 12 {
            true => assert_eq!((answers, counted), (vec![(nak(NakCode::PsnSequenceError), 0)], (1, 0))),
            false => assert_eq!(
                (answers, counted),
                (vec![(Syndrome::Ack(Credits::INVALID), ahead)], (0, 1))
            ),
        }
        assert!(p.b.received().is_empty());
    }
}

/// No peer has so much outstanding. Half of the PSNs that a forger guesses are there: each would be acknowledged.
#[test]
fn a_duplicate_from_long_ago_is_not_answered() {
    for ago in [(1 << 14) + 1, 1 << 20, 1 << 23] {
        let mut p = Pair::new(setup());
        assert!(answer(&mut p, &[raw(Opcode::RcSendOnly, (1 << 24) - ago)]).is_empty());
        assert_eq!(p.b.counters.dropped_requests, 1);
    }
}

/// Half of all PSNs that somebody guesses are ahead: each would have the peer send again what it has under way.
#[test]
fn a_gap_that_no_peer_can_have_made_is_not_reported() {
    for ahead in [(1u32 << 12) + 1, 1 << 20, (1 << 23) - 1] {
        let mut p = Pair::new(setup());
        p.b.recv(1, &[]);
        assert!(answer(&mut p, &[raw(Opcode::RcSendOnly, ahead)]).is_empty());
        let counted = (p.b.counters.out_of_seq_request, p.b.counters.dropped_requests);
        assert_eq!(counted, (0, 1));
        // A true gap afterwards is.
        let says = answer(&mut p, &[raw(Opcode::RcSendOnly, 1)]);
        assert_eq!(says, [(nak(NakCode::PsnSequenceError), 0)]);
    }
}

#[test]
fn memory_taken_back_in_mid_message_is_a_remote_access_error() {
    let mut p = Pair::new(setup());
    let dst = p.b.region(1000);
    let first = raw(Opcode::RcWriteFirst, 0)
        .reth(dst.addr(), dst.rkey(), 600)
        .payload(&[1; 256]);
    assert!(answer(&mut p, &[first]).is_empty());
    p.b.mem.deregister(&dst).unwrap();
    let says = answer(&mut p, &[raw(Opcode::RcWriteMiddle, 1).payload(&[1; 256])]);
    assert_eq!(says, [(nak(NakCode::RemoteAccessError), 1)]);
    assert_eq!(bytes(&dst, 256, 256), [0; 256]);
}

#[test]
fn memory_taken_back_while_it_is_read_ends_the_stream() {
    let mut p = Pair::new(setup());
    let src = p.b.filled(1000, 1);
    p.b.handle(&raw(Opcode::RcReadRequest, 0).reth(src.addr(), src.rkey(), 1000).bytes());
    p.b.sink.room = Some(2);
    p.b.poll_transmit();
    p.b.sink.sent.clear();
    p.b.sink.room = None;
    p.b.mem.deregister(&src).unwrap();
    assert_eq!(answer(&mut p, &[]), [(nak(NakCode::RemoteAccessError), 2)]);
    assert_eq!(p.b.qp.state(), QpState::Err);
}

/// The receive is a later request's, which was not refused.
#[test]
fn a_read_that_is_refused_while_its_data_is_sent_flushes_the_receive_of_a_later_message() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.b.filled(1000, 1), p.b.region(600));
    p.b.recv(5, &[sge(&dst, 0, 600)]);
    p.b.handle(&raw(Opcode::RcReadRequest, 0).reth(src.addr(), src.rkey(), 1000).bytes());
    p.b.sink.room = Some(2);
    p.b.poll_transmit();
    p.b.sink.sent.clear();
    p.b.handle(&raw(Opcode::RcSendFirst, 4).payload(&[1; 256]).bytes());
    p.b.sink.room = None;
    p.b.mem.deregister(&src).unwrap();
    assert_eq!(answer(&mut p, &[]), [(nak(NakCode::RemoteAccessError), 2)]);
    let ended = p.b.received();
    assert_eq!(
        ended.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>(),
        [(5, WcStatus::FlushError)]
    );
}

#[test]
fn a_receive_into_bad_memory_is_an_operational_error() {
    for revoke in [false, true] {
        let mut p = Pair::new(setup());
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        let mut into = sge(&dst, 0, 600);
        if !revoke {
            into.lkey = NO_KEY;
        }
        p.b.recv(5, &[into]);
        p.a.send(1, SendOp::Send, &[sge(&src, 0, 600)]);
        let packets = p.a.drain();
        p.b.handle(&packets[0].1);
        if revoke {
            p.b.mem.deregister(&dst).unwrap();
            p.b.handle(&packets[1].1);
        }
        p.run();
        assert_eq!(p.a.completions()[0].status, WcStatus::RemoteOperationError);
        assert_eq!(p.b.received()[0].status, WcStatus::LocalProtectionError);
        assert_eq!((p.a.qp.state(), p.b.qp.state()), (QpState::Err, QpState::Err));
    }
}

#[test]
fn a_forbidden_invalidation_fails_the_receiver_only() {
    let mut p = Pair::new(setup());
    let region = p.b.region(64);
    p.b.recv(5, &[]);
    // A plain region can't be invalidated.
    p.a.send(1, SendOp::SendWithInv(region.rkey()), &[]);
    p.run();
    assert!(p.a.completions()[0].is_ok());
    assert_eq!(p.b.received()[0].status, WcStatus::RemoteInvalidRequestError);
    assert_eq!(p.b.qp.state(), QpState::Err);
}

#[test]
fn each_nak_fails_its_work_request_and_flushes_the_rest() {
    for (code, status) in [
        (NakCode::InvalidRequest, WcStatus::RemoteInvalidRequestError),
        (NakCode::RemoteAccessError, WcStatus::RemoteAccessError),
        (NakCode::RemoteOperationalError, WcStatus::RemoteOperationError),
        (NakCode::InvalidRdRequest, WcStatus::RemoteInvalidRdRequest),
    ] {
        let mut p = Pair::new(Setup {
            signal_all: false,
            ..setup()
        });
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        for i in 0..4 {
            // Also unsignalled ones report errors.
            let flags = if i == 0 {
                roce_verbs::SendFlags::SIGNALED
            } else {
                roce_verbs::SendFlags::empty()
            };
            p.a.send_flags(i, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 300)], flags);
        }
        p.a.recv(9, &[]);
        p.a.drain();
        let aeth = Aeth {
            syndrome: nak(code),
            msn: Msn::new(0),
        };
        // It acknowledges what comes before the packet, here the second of the second message.
        p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn + 3).aeth(aeth).bytes());
        let c: Vec<_> = p.a.completions().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(
            c,
            [
                (0, WcStatus::Success),
                (1, status),
                (2, WcStatus::FlushError),
                (3, WcStatus::FlushError)
            ]
        );
        assert_eq!(p.a.received()[0].status, WcStatus::FlushError);
        assert_eq!(p.a.qp.state(), QpState::Err);
        assert_eq!(p.a.window.in_flight(), 0);
    }
}

#[test]
fn reserved_syndromes_are_ignored() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    p.a.drain();
    for byte in [0x40, 0x5f, 0x65, 0x80, 0xff] {
        let aeth = Aeth {
            syndrome: Syndrome::from_byte(byte),
            msn: Msn::new(0),
        };
        p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn).aeth(aeth).bytes());
    }
    assert!(p.a.completions().is_empty());
    assert_eq!(p.a.counters.dropped_responses, 5);
}

#[test]
fn responses_that_don_t_fit_the_request_are_bad() {
    let ack = Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(1),
    };
    let refused = Aeth {
        syndrome: nak(NakCode::RemoteAccessError),
        ..ack
    };
    use Opcode as O;
    let cases: Vec<(&str, Raw)> = vec![
        (
            "short first",
            Raw::new(O::RcReadResponseFirst, A, 0).aeth(ack).payload(&[1; 255]),
        ),
        (
            "only instead of first",
            Raw::new(O::RcReadResponseOnly, A, 0).aeth(ack).payload(&[1; 256]),
        ),
        (
            "last instead of first",
            Raw::new(O::RcReadResponseLast, A, 0).aeth(ack).payload(&[1; 256]),
        ),
        (
            "middle at the start",
            Raw::new(O::RcReadResponseMiddle, A, 0).payload(&[1; 256]),
        ),
        (
            "refusal with data",
            Raw::new(O::RcReadResponseFirst, A, 0).aeth(refused).payload(&[1; 256]),
        ),
        ("atomic result", {
            let mut raw = Raw::new(O::RcAtomicAcknowledge, A, 0).aeth(ack);
            raw.header.atomic_ack = Some(1);
            raw
        }),
    ];
    for (name, mut raw) in cases {
        let mut p = Pair::new(setup());
        let (src, dst) = (p.b.filled(600, 1), p.a.region(600));
        p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 600)]);
        p.a.drain();
        raw.header.bth.psn = Psn::new(p.setup.psn);
        p.a.handle(&raw.bytes());
        assert_eq!(p.a.completions()[0].status, WcStatus::BadResponseError, "{name}");
        assert_eq!(bytes(&dst, 0, 600), [0; 600]);
    }
}

#[test]
fn local_faults_are_reported_in_order() {
    let bad = Sge {
        addr: 0,
        length: 8,
        lkey: LKey(0x1234_5600),
    };
    let key = RKey(0x1234_5600);
    let word = RemoteAddr::default();
    let register = FastRegister {
        key,
        lkey: LKey(0),
        addr: 0,
        length: 1,
        iova: 0,
        access: AccessFlags::empty(),
    };
    let bind = BindWindow {
        key,
        lkey: LKey(0),
        addr: 0,
        length: 1,
        access: AccessFlags::empty(),
    };
    let cases: [(SendOp, &[Sge], WcStatus, WcOpcode); 7] = [
        (SendOp::Send, &[bad], WcStatus::LocalProtectionError, WcOpcode::Send),
        (
            SendOp::Write(word),
            &[bad],
            WcStatus::LocalProtectionError,
            WcOpcode::RdmaWrite,
        ),
        (
            SendOp::Read(word),
            &[bad],
            WcStatus::LocalProtectionError,
            WcOpcode::RdmaRead,
        ),
        (
            SendOp::FetchAdd { remote: word, add: 1 },
            &[bad],
            WcStatus::LocalProtectionError,
            WcOpcode::FetchAdd,
        ),
        (
            SendOp::LocalInvalidate(key),
            &[],
            WcStatus::LocalQpOperationError,
            WcOpcode::LocalInvalidate,
        ),
        (
            SendOp::FastRegister(register),
            &[],
            WcStatus::LocalQpOperationError,
            WcOpcode::FastRegister,
        ),
        (
            SendOp::BindWindow(bind),
            &[],
            WcStatus::MwBindError,
            WcOpcode::BindWindow,
        ),
    ];
    for (op, sges, status, opcode) in cases {
        let mut p = Pair::new(setup());
        let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
        p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
        p.a.send(2, op, sges);
        p.a.send(3, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
        assert_eq!(
            p.a.drain().len(),
            3,
            "what comes before is sent, what comes behind is not"
        );
        assert!(p.a.completions().is_empty());
        assert_eq!(p.a.qp.state(), QpState::Rts);
        for raw in 0..3 {
            p.b.handle(&raw_write(&p, &dst, raw).bytes());
        }
        p.run();
        // The wire was emptied above, so the first message is resent and then acknowledged.
        let c: Vec<_> =
            p.a.completions()
                .iter()
                .map(|c| (c.wr_id, c.status, c.opcode))
                .collect();
        assert_eq!(
            c,
            [
                (1, WcStatus::Success, WcOpcode::RdmaWrite),
                (2, status, opcode),
                (3, WcStatus::FlushError, WcOpcode::RdmaWrite)
            ]
        );
    }
}

fn raw_write(p: &Pair, dst: &roce_verbs::mem::Region, i: u32) -> Raw {
    let (opcode, len) = [
        (Opcode::RcWriteFirst, 256),
        (Opcode::RcWriteMiddle, 256),
        (Opcode::RcWriteLast, 88),
    ][i as usize];
    let raw = Raw::new(opcode, B, p.setup.psn + i).payload(&vec![0; len]);
    if i == 0 {
        raw.reth(dst.addr(), dst.rkey(), 600)
    } else {
        raw
    }
}

#[test]
fn source_memory_taken_back_while_unacknowledged_fails_the_retransmission() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.a.filled(600, 1), p.b.region(600));
    p.a.send(1, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 600)]);
    p.a.drain();
    p.a.mem.deregister(&src).unwrap();
    p.run();
    assert_eq!(p.a.completions()[0].status, WcStatus::LocalProtectionError);
    assert_eq!(p.a.qp.state(), QpState::Err);
}

#[test]
fn a_read_into_memory_taken_back_fails() {
    let mut p = Pair::new(setup());
    let (src, dst) = (p.b.filled(600, 1), p.a.region(600));
    p.a.send(1, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 600)]);
    for (_, b) in p.a.drain() {
        p.b.handle(&b);
    }
    p.a.mem.deregister(&dst).unwrap();
    for (_, b) in p.b.drain() {
        p.a.handle(&b);
    }
    assert_eq!(p.a.completions()[0].status, WcStatus::LocalProtectionError);
}

#[test]
fn no_bytes_whatever_can_make_it_panic() {
    use rand::{Rng, SeedableRng};
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
    for round in 0..400 {
        let mut p = Pair::new(setup());
        let (src, dst) = (p.a.filled(4096, 1), p.b.filled(4096, 2));
        for i in 0..4 {
            p.b.recv(i, &[sge(&dst, 0, 600)]);
            p.b.send(10 + i, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 600)]);
            p.b.send(20 + i, SendOp::Write(at(&src, 0)), &[sge(&dst, 0, 600)]);
        }
        p.b.drain();
        for _ in 0..60 {
            let opcode = Opcode::ALL[rng.random_range(0..Opcode::ALL.len())];
            let psn = if rng.random() {
                p.setup.psn
            } else {
                p.setup.psn ^ 0x5555
            };
            let mut raw = Raw::new(opcode, B, psn.wrapping_add(rng.random_range(0..12)).wrapping_sub(3));
            raw = raw.reth(
                dst.addr() + rng.random_range(0..64),
                dst.rkey(),
                rng.random_range(0..2000),
            );
            raw.header.aeth = Some(Aeth {
                syndrome: Syndrome::from_byte(rng.random()),
                msn: Msn::new(rng.random()),
            });
            raw.header.bth.ack_req = rng.random();
            raw.header.atomic_eth = Some(AtomicEth {
                va: dst.addr() + rng.random_range(0..64),
                rkey: dst.rkey(),
                swap_add: rng.random(),
                compare: 0,
            });
            if opcode.info().payload {
                raw = raw.payload(&vec![7; [0, 1, 255, 256, 257, 88][rng.random_range(0..6)]]);
            }
            let bytes = raw.bytes();
            if Packet::parse(&bytes).is_ok() {
                p.b.handle(&bytes);
            }
            if rng.random_bool(0.3) {
                p.b.drain();
            }
        }
        p.b.drain();
        p.b.timeout();
        assert!(p.b.qp.send_queue_len() <= 8, "{round}");
    }
}

/// Payload of the only packet, bytes that the receive takes, and what is told: of two faults the malformed packet goes first.
#[test]
fn a_malformed_packet_goes_before_a_receive_that_is_too_short() {
    let case = |payload: usize, room: usize, max_msg_size: u32| {
        let mut p = Pair::new(Setup {
            max_msg_size,
            ..setup()
        });
        let dst = p.b.region(1000);
        p.b.recv(5, &[sge(&dst, 0, room)]);
        let said = answer(&mut p, &[raw(Opcode::RcSendOnly, 0).payload(&vec![1; payload])]);
        assert_eq!(said, [(INVALID, 0)]);
        p.b.received()[0].status
    };
    let (short, invalid) = (WcStatus::LocalLengthError, WcStatus::RemoteInvalidRequestError);
    for (payload, room, max, status) in [
        (256, 100, 1000, short),
        (300, 100, 1000, invalid),
        (256, 100, 200, invalid),
        (300, 1000, 1000, invalid),
    ] {
        assert_eq!(case(payload, room, max), status, "{payload} {room} {max}");
    }
}

/// Half of all PSNs.
#[test]
fn a_read_of_more_responses_than_may_be_outstanding_is_invalid_whatever_its_key() {
    for (len, code) in [
        (1 << 31, NakCode::RemoteAccessError),
        ((1 << 31) + 1, NakCode::InvalidRequest),
        (u32::MAX, NakCode::InvalidRequest),
    ] {
        let mut p = Pair::new(Setup {
            max_msg_size: u32::MAX,
            ..setup()
        });
        let request = raw(Opcode::RcReadRequest, 0).reth(0x1000, RKey(0x700), len);
        assert_eq!(answer(&mut p, &[request]), [(nak(code), 0)], "{len:#x}");
    }
}
