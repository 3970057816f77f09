//! Interfaces whose hardware numbers the segments of a train otherwise than they were sealed.

use roce_port::RxMeta;
use roce_verbs::{QpCaps, Qpn, SendOp};

use super::*;

/// Delivers datagrams whose segments were numbered by such an interface: from the second packet of a train on the ICRC is
/// wrong.
fn give_renumbered(to: &mut Host, trains: &[Datagram]) {
    for train in trains {
        for (i, packet) in train.bytes.chunks(train.segment_len).enumerate() {
            let meta = RxMeta {
                identification: Some(if i == 0 { 0 } else { 0x4000 + i as u16 }),
                ..RxMeta::new(train.dst, train.src)
            };
            to.port.handle_datagram(to.now, &meta, packet);
        }
    }
}

/// Exchanges packets and lets time pass until `a` has `n` completions. `renumbered`: whether the segments of a, and of b, are.
fn run(a: &mut Host, b: &mut Host, n: usize, renumbered: (bool, bool)) {
    let mut done = 0;
    for _ in 0..20_000 {
        let (from_a, from_b) = (a.take(), b.take());
        match renumbered.0 {
            true => give_renumbered(b, &from_a),
            false => from_a.iter().for_each(|d| b.give(d)),
        }
        match renumbered.1 {
            true => give_renumbered(a, &from_b),
            false => from_b.iter().for_each(|d| a.give(d)),
        }
        let completions = a.completions();
        assert!(completions.iter().all(|c| c.is_ok()), "{completions:?}");
        done += completions.len();
        if done == n {
            return;
        }
        if from_a.is_empty() && from_b.is_empty() {
            let next = [a.port.poll_timeout(), b.port.poll_timeout()]
                .into_iter()
                .flatten()
                .min();
            let now = next.expect("something is waited for").max(a.now);
            (a.now, b.now) = (now, now);
            a.port.handle_timeout(now);
            b.port.handle_timeout(now);
        }
    }
    panic!(
        "{done} of {n} are done: {:?} {:?}",
        a.port.counters(),
        b.port.counters()
    );
}

const LEN: u32 = 200_000;
const COUNT: usize = 40;

fn transfer(renumbered: (bool, bool), read: bool) -> (Host, Host, Qpn) {
    let (mut a, mut b, qa, _) = pair();
    let (here, there) = (a.region(LEN as usize), b.region(LEN as usize));
    let op = |r| if read { SendOp::Read(r) } else { SendOp::Write(r) };
    let (from, to) = if read { (&there, &here) } else { (&here, &there) };
    from.write(0, &noise(LEN as usize)).unwrap();
    assert!(COUNT <= QpCaps::default().max_send_wr as usize);
    for i in 0..COUNT {
        a.send(qa, i as u64, op(remote(&there)), &here, LEN);
    }
    run(&mut a, &mut b, COUNT, renumbered);
    assert_eq!(contents(to), noise(LEN as usize));
    (a, b, qa)
}

/// How many sends a message of so many packets takes.
fn sends(host: &mut Host, qpn: Qpn, dst: RemoteAddr, src: &Region) -> usize {
    host.send(qpn, 0, SendOp::Write(dst), src, 16_384);
    host.take().len()
}

#[test]
fn requests_in_trains_that_never_arrive_go_out_one_by_one() {
    let (mut a, b, qa) = transfer((true, false), false);
    assert_eq!(a.port.counters().gso_switched_off, 1);
    assert_eq!(b.port.counters().gso_switched_off, 0);
    let (src, dst) = (a.region(16_384), b.region(16_384));
    assert_eq!(sends(&mut a, qa, remote(&dst), &src), 16);
}

#[test]
fn answers_in_trains_that_never_arrive_go_out_one_by_one() {
    let (a, b, _) = transfer((false, true), true);
    assert_eq!(a.port.counters().gso_switched_off, 0);
    assert_eq!(b.port.counters().gso_switched_off, 1);
}

#[test]
fn trains_that_arrive_stay() {
    for read in [false, true] {
        let (mut a, b, qa) = transfer((false, false), read);
        for host in [&a, &b] {
            assert_eq!(host.port.counters().gso_switched_off, 0);
            assert_eq!(host.port.counters().tx_retransmissions, 0);
        }
        let (src, dst) = (a.region(16_384), b.region(16_384));
        assert!(sends(&mut a, qa, remote(&dst), &src) <= 2);
    }
}
