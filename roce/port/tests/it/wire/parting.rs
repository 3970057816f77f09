//! Final acknowledgements of a stopping queue pair: work completed at one end does not fail at the other.

use roce_port::Port;
use roce_verbs::SendOp;

use super::*;

/// Creates two hosts; B has received a message from A without acknowledging it.
fn received() -> (Host, Host, Qpn) {
    let (mut a, mut b, qa, qb) = pair();
    acquaint(&mut a, &mut b, qa, qb);
    let (src, dst) = (a.region(3000), b.region(3000));
    b.receive(qb, 7, &dst);
    a.send(qa, 1, SendOp::Send, &src, 3000);
    a.take().iter().for_each(|d| b.give(d));
    assert!(b.completions()[0].is_ok());
    (a, b, qb)
}

/// Action that stops a queue pair.
type Stop<'a> = &'a dyn Fn(&mut Port, Instant, Qpn);

fn to_state(state: QpState) -> impl Fn(&mut Port, Instant, Qpn) {
    move |port, now, qpn| {
        let attr = QpAttr {
            state: Some(state),
            ..QpAttr::default()
        };
        port.modify_qp(now, qpn, &attr).unwrap();
    }
}

#[test]
fn received_messages_are_acknowledged_however_the_queue_pair_stops() {
    let destroy = |port: &mut Port, now, qpn| port.destroy_qp(now, qpn).unwrap();
    let error_and_destroy = |port: &mut Port, now, qpn| {
        to_state(QpState::Err)(port, now, qpn);
        destroy(port, now, qpn);
    };
    let stops: [(&str, Stop<'_>); 4] = [
        ("destroyed", &destroy),
        ("reset", &to_state(QpState::Reset)),
        ("error", &to_state(QpState::Err)),
        ("error and destroyed", &error_and_destroy),
    ];
    for (name, stop) in stops {
        let (mut a, mut b, qb) = received();
        stop(&mut b.port, b.now, qb);
        let acks = b.take();
        assert_eq!(acks.iter().map(|d| d.segments).sum::<usize>(), 1, "{name}");
        acks.iter().for_each(|d| a.give(d));
        let done = a.completions();
        assert!(matches!(&done[..], [c] if c.is_ok()), "{name}: {done:?}");
        assert!(b.take().is_empty(), "{name}");
    }
}

#[test]
fn a_queue_pair_without_unacknowledged_messages_sends_nothing() {
    let (mut a, mut b, qb) = received();
    exchange(&mut a, &mut b);
    assert!(a.completions()[0].is_ok());
    b.port.destroy_qp(b.now, qb).unwrap();
    assert!(b.take().is_empty());
}

#[test]
fn an_unanswered_read_is_not_acknowledged() {
    let (mut a, mut b, qa, qb) = pair();
    let (src, dst) = (a.region(3000), b.region(3000));
    a.send(qa, 1, SendOp::Read(remote(&dst)), &src, 3000);
    a.send(qa, 2, SendOp::Write(remote(&dst)), &src, 3000);
    a.take().iter().for_each(|d| b.give(d));
    b.port.destroy_qp(b.now, qb).unwrap();
    b.take().iter().for_each(|d| a.give(d));
    assert!(a.completions().is_empty());
}
