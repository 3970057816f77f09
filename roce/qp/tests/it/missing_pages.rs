//! Registered memory whose pages the program has unmapped or protected, or whose file is truncated: an error at the right end, for
//! every operation, in both directions and on every path.

use std::{sync::Arc, time::Duration};

use ferroce_pages::{Loss, PAGE, Pages};
use roce_bth::{Class, NakCode, Opcode, Syndrome};
use roce_verbs::mem::Region;
use roce_verbs::{AsyncEvent, Mtu, Payload, QpState, QpType, Qpn, SendFlags, SendOp, SendWr, Sge, WcStatus};

use crate::{harness::*, memory_placement::ids};

/// Bytes of a message, the last of which are on the page that is lost.
const LEN: usize = 3000;
/// Place of the message in the region: it begins on the page before.
const AT: usize = PAGE - 2000;

/// Two pages, registered.
fn pages(side: &Side) -> (Arc<Pages>, Arc<Region>) {
    let pages = Pages::new(2).unwrap();
    let region = side
        .mem
        .register_memory(side.pd, &pages.memory(), 0..2 * PAGE, None, ALL);
    (pages, region.unwrap())
}

fn setup() -> Setup {
    Setup {
        mtu: Mtu::B1024,
        ..Setup::default()
    }
}

/// Selective acknowledgements place responses early and send single packets again.
fn setups() -> [Setup; 2] {
    [setup(), Setup { keeps: true, ..setup() }]
}

/// Operations with LEN bytes, or a word, at both ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Op {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    CompareSwap,
    AtomicWrite,
}

impl Op {
    const ALL: [Self; 8] = [
        Self::Send,
        Self::SendImm,
        Self::Write,
        Self::WriteImm,
        Self::Read,
        Self::FetchAdd,
        Self::CompareSwap,
        Self::AtomicWrite,
    ];

    /// Offset and bytes at either end.
    fn range(self) -> (usize, usize) {
        match self {
            Self::FetchAdd | Self::CompareSwap | Self::AtomicWrite => (PAGE, 8),
            _ => (AT, LEN),
        }
    }

    fn op(self, remote: &Region) -> SendOp {
        let to = at(remote, self.range().0);
        match self {
            Self::Send => SendOp::Send,
            Self::SendImm => SendOp::SendWithImm(7),
            Self::Write => SendOp::Write(to),
            Self::WriteImm => SendOp::WriteWithImm(to, 7),
            Self::Read => SendOp::Read(to),
            Self::FetchAdd => SendOp::FetchAdd { remote: to, add: 1 },
            Self::CompareSwap => SendOp::CompareSwap {
                remote: to,
                compare: 1,
                swap: 2,
            },
            Self::AtomicWrite => SendOp::AtomicWrite(to),
        }
    }

    fn takes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImm | Self::WriteImm)
    }

    /// Whether our own memory is written.
    fn scatters(self) -> bool {
        matches!(self, Self::Read | Self::FetchAdd | Self::CompareSwap)
    }

    /// Whether the responder reads its memory, and no more.
    fn only_reads_remote(self) -> bool {
        self == Self::Read
    }
}

/// Posts an operation from A to B.
fn post(p: &mut Pair, op: Op, local: &Region, remote: &Region) {
    let (from, len) = op.range();
    if op.takes_receive() {
        let scatter = match op {
            Op::WriteImm => vec![],
            _ => vec![sge(remote, from, len)],
        };
        p.b.recv(10, &scatter);
        p.b.recv(11, &[]);
    }
    p.a.send(1, op.op(remote), &[sge(local, from, len)]);
    p.a.send(2, SendOp::Send, &[]);
}

#[test]
fn our_own_missing_page_is_a_local_protection_error() {
    for (op, loss, setup) in cases() {
        // A page that can be read can be sent.
        if loss.is_readable() && !op.scatters() {
            continue;
        }
        let mut p = Pair::new(setup);
        let ((lost, local), remote) = (pages(&p.a), p.b.region(2 * PAGE));
        lost.lose(1..2, loss);
        post(&mut p, op, &local, &remote);
        p.run();
        let expected = [(1, WcStatus::LocalProtectionError), (2, WcStatus::FlushError)];
        assert_eq!(ids(&p.a.completions()), expected, "{op:?} {loss:?}");
        assert_eq!(p.a.qp.state(), QpState::Err, "{op:?} {loss:?}");
        assert_eq!(p.b.qp.state(), QpState::Rts, "{op:?} {loss:?}: the peer is not told");
    }
}

#[test]
fn a_peers_missing_page_is_its_remote_access_error() {
    for (op, loss, setup) in cases() {
        if matches!(op, Op::Send | Op::SendImm) || (loss.is_readable() && op.only_reads_remote()) {
            continue;
        }
        let mut p = Pair::new(setup);
        let (local, (lost, remote)) = (p.a.filled(2 * PAGE, 3), pages(&p.b));
        lost.lose(1..2, loss);
        post(&mut p, op, &local, &remote);
        let mut naks = Vec::new();
        p.run_with(Duration::from_secs(60), |_, packet| {
            if let Some(Syndrome::Nak(code)) = packet.header.aeth().map(|a| a.syndrome) {
                naks.push(code);
            }
            Fate::Deliver
        });
        assert_eq!(naks, [NakCode::RemoteAccessError], "{op:?} {loss:?}");
        let expected = [(1, WcStatus::RemoteAccessError), (2, WcStatus::FlushError)];
        assert_eq!(ids(&p.a.completions()), expected, "{op:?} {loss:?}");
        assert_eq!(
            (p.a.qp.state(), p.b.qp.state()),
            (QpState::Err, QpState::Err),
            "{op:?} {loss:?}"
        );
        let received = ids(&p.b.received());
        match op.takes_receive() {
            true if received[0].1 == WcStatus::LocalAccessError => assert_eq!(received.len(), 2),
            // Middle packets of a WRITE with immediate take no receive yet.
            true => assert_eq!(received, [(10, WcStatus::FlushError), (11, WcStatus::FlushError)]),
            false => assert_eq!(p.b.events, [AsyncEvent::QpAccessError(Qpn::new(B))], "{op:?} {loss:?}"),
        }
    }
}

#[test]
fn a_receives_missing_page_is_a_protection_error_at_the_receiver() {
    for (op, loss, setup) in cases() {
        if !matches!(op, Op::Send | Op::SendImm) {
            continue;
        }
        let mut p = Pair::new(setup);
        let (local, (lost, remote)) = (p.a.filled(2 * PAGE, 3), pages(&p.b));
        lost.lose(1..2, loss);
        post(&mut p, op, &local, &remote);
        p.run();
        let sent = [(1, WcStatus::RemoteOperationError), (2, WcStatus::FlushError)];
        assert_eq!(ids(&p.a.completions()), sent, "{op:?} {loss:?}");
        let received = [(10, WcStatus::LocalProtectionError), (11, WcStatus::FlushError)];
        assert_eq!(ids(&p.b.received()), received, "{op:?} {loss:?}");
        assert_eq!((p.a.qp.state(), p.b.qp.state()), (QpState::Err, QpState::Err));
    }
}

fn cases() -> impl Iterator<Item = (Op, Loss, Setup)> {
    Op::ALL
        .into_iter()
        .flat_map(|op| Loss::ALL.map(|loss| (op, loss)))
        .flat_map(|(op, loss)| setups().map(|setup| (op, loss, setup)))
}

/// Pages that go while a message is under way: of what is sent again, too.
#[test]
fn a_page_that_goes_before_a_packet_is_sent_again_ends_the_work_request() {
    for setup in setups() {
        for op in [Op::Write, Op::Send] {
            let mut p = Pair::new(setup.clone());
            let ((lost, local), remote) = (pages(&p.a), p.b.region(2 * PAGE));
            post(&mut p, op, &local, &remote);
            // The last packet is lost, and its page before it can be sent again.
            let mut dropped = 0;
            p.run_with(Duration::from_secs(60), |dir, packet| {
                let is_last = packet.header.bth.opcode.info().position.ends() && packet.payload.len() == LEN % 1024;
                if dir == Dir::AtoB && is_last && dropped == 0 {
                    dropped += 1;
                    lost.lose(1..2, Loss::Protected);
                    return Fate::Drop;
                }
                Fate::Deliver
            });
            assert_eq!(dropped, 1);
            let expected = [(1, WcStatus::LocalProtectionError), (2, WcStatus::FlushError)];
            assert_eq!(ids(&p.a.completions()), expected, "{op:?}");
        }
    }
}

/// The responder reads its memory when it sends a response: the beginning of the READ arrives.
#[test]
fn a_read_of_a_page_that_goes_fails_after_its_beginning() {
    for setup in setups() {
        let mut p = Pair::new(setup);
        let (local, (lost, remote)) = (p.a.region(2 * PAGE), pages(&p.b));
        remote.write(0, &[9; 2 * PAGE]).unwrap();
        post(&mut p, Op::Read, &local, &remote);
        let mut seen = Vec::new();
        // Of a response that is lost.
        p.run_with(Duration::from_secs(60), |dir, packet| {
            let class = packet.header.bth.opcode.info().class;
            if dir == Dir::BtoA && class == Class::ReadResponse {
                seen.push(packet.header.bth.opcode);
                if packet.header.bth.opcode == Opcode::RcReadResponseLast && seen.len() == 3 {
                    lost.lose(1..2, Loss::Unmapped);
                    return Fate::Drop;
                }
            }
            Fate::Deliver
        });
        let expected = [(1, WcStatus::RemoteAccessError), (2, WcStatus::FlushError)];
        assert_eq!(ids(&p.a.completions()), expected);
        assert_eq!(bytes(&local, AT, 2 * 1024), [9; 2 * 1024]);
        assert_eq!(bytes(&local, AT + 2048, LEN - 2048), [0; LEN - 2048]);
    }
}

/// READ responses beyond a gap, whose memory is missing, are placed in order or fail.
#[test]
fn a_response_beyond_a_gap_into_a_missing_page_fails_the_read_in_its_turn() {
    let mut p = Pair::new(Setup { keeps: true, ..setup() });
    let ((lost, local), remote) = (pages(&p.a), p.b.filled(2 * PAGE, 4));
    lost.lose(1..2, Loss::Unmapped);
    post(&mut p, Op::Read, &local, &remote);
    let mut responses = 0;
    p.run_with(Duration::from_secs(60), |dir, packet| {
        let is_response = dir == Dir::BtoA && packet.header.bth.opcode.info().class == Class::ReadResponse;
        responses += u32::from(is_response);
        match is_response && responses == 1 {
            true => Fate::Drop,
            false => Fate::Deliver,
        }
    });
    let expected = [(1, WcStatus::LocalProtectionError), (2, WcStatus::FlushError)];
    assert_eq!(ids(&p.a.completions()), expected);
}

/// Inline data is copied when it is posted: what becomes of its memory does not matter.
#[test]
fn inline_data_outlives_its_memory() {
    let mut p = Pair::new(setup());
    let remote = p.b.region(64);
    let data = vec![5; 32];
    p.a.try_send(&SendWr {
        wr_id: 1,
        op: SendOp::Write(at(&remote, 0)),
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(&data),
    })
    .unwrap();
    drop(data);
    p.run();
    assert_eq!(ids(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(bytes(&remote, 0, 32), [5; 32]);
}

/// Nobody is told of messages of the unreliable services; their receivers and senders are.
#[test]
fn unreliable_services_fail_at_the_end_that_has_the_page() {
    for loss in Loss::ALL {
        for (qp_type, len) in [(QpType::Uc, LEN), (QpType::Ud, 500)] {
            let target = |sge: Sge, p: &mut Pair, wr_id| match qp_type {
                QpType::Ud => p.a.send_to(wr_id, SendOp::Send, &[sge], datagram(B, QKEY)),
                _ => p.a.send(wr_id, SendOp::Send, &[sge]),
            };
            // A receive's page.
            let mut p = Pair::of(qp_type, setup());
            let (local, (lost, remote)) = (p.a.filled(2 * PAGE, 3), pages(&p.b));
            lost.lose(1..2, loss);
            p.b.recv(10, &[sge(&remote, PAGE - 100, LEN)]);
            target(sge(&local, 0, len), &mut p, 1);
            p.run();
            assert_eq!(
                ids(&p.a.completions()),
                [(1, WcStatus::Success)],
                "{qp_type:?} {loss:?}"
            );
            assert_eq!(
                ids(&p.b.received()),
                [(10, WcStatus::LocalProtectionError)],
                "{qp_type:?} {loss:?}"
            );
            assert_eq!(p.b.qp.state(), QpState::Err, "{qp_type:?} {loss:?}");
            // A send's page. The send queue alone fails.
            if loss.is_readable() {
                continue;
            }
            let mut p = Pair::of(qp_type, setup());
            let (lost, local) = pages(&p.a);
            lost.lose(1..2, loss);
            target(sge(&local, PAGE - 100, len), &mut p, 1);
            p.run();
            assert_eq!(
                ids(&p.a.completions()),
                [(1, WcStatus::LocalProtectionError)],
                "{qp_type:?} {loss:?}"
            );
            assert_eq!(p.a.qp.state(), QpState::Sqe, "{qp_type:?} {loss:?}");
        }
    }
    // A WRITE of an unreliable connection to a missing page is dropped, and the queue pair goes on.
    let mut p = Pair::of(QpType::Uc, setup());
    let (local, (lost, remote)) = (p.a.filled(2 * PAGE, 3), pages(&p.b));
    lost.lose(1..2, Loss::Protected);
    p.a.send(1, SendOp::Write(at(&remote, AT)), &[sge(&local, 0, LEN)]);
    p.a.send(2, SendOp::Write(at(&remote, 0)), &[sge(&local, 0, 64)]);
    p.run();
    assert_eq!(
        ids(&p.a.completions()),
        [(1, WcStatus::Success), (2, WcStatus::Success)]
    );
    assert_eq!(p.b.qp.state(), QpState::Rts);
    assert_eq!(bytes(&remote, 0, 64), pattern(2 * PAGE, 3)[..64]);
}
