//! Reports of failed queue pairs to people.

use roce_bth::RKey;
use roce_verbs::{RemoteAddr, SendOp, WcStatus};

use crate::harness::*;

/// Texts of both sides after one work request.
fn texts(p: &mut Pair) -> [Option<String>; 2] {
    p.run();
    [&mut p.a, &mut p.b].map(|side| side.qp.take_failure().map(|failure| failure.to_string()))
}

#[test]
fn a_range_beyond_the_region_is_measured_and_reported_once() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(9, SendOp::Write(at(&dst, 40)), &[sge(&src, 0, 64)]);
    let [a, b] = texts(&mut p);
    let (key, from) = (dst.rkey().0, dst.addr());
    let to = from + 40;
    let peer = [&p.a, &p.b].map(|side| side.qp.remote().unwrap().0.remote);
    let a = a.unwrap();
    let expected = format!(
        "WRITE of QP {A:#x} (wr_id 0x9) refused by {}: remote access error: rkey {key:#x}, 64 bytes at {to:#x}",
        peer[0]
    );
    assert!(a.starts_with(&expected), "{a}");
    let expected = format!(
        "QP {B:#x} refused WRITE of {}: remote access error: key {key:#x}, 64 bytes at {to:#x} are beyond the region by 40 \
         (64 bytes at {from:#x})",
        peer[1]
    );
    assert_eq!(b, Some(expected));
    assert_eq!(texts(&mut p), [None, None], "taken");
}

#[test]
fn a_range_before_the_region_and_a_key_of_nothing_are_told_apart() {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    let before = RemoteAddr {
        addr: dst.addr() - 8,
        ..at(&dst, 0)
    };
    p.a.send(9, SendOp::Write(before), &[sge(&src, 0, 64)]);
    let [_, b] = texts(&mut p);
    assert!(b.unwrap().contains("begin 8 bytes before the region"));

    let mut p = Pair::new(Setup::default());
    let src = p.a.filled(64, 1);
    let nothing = RemoteAddr {
        addr: 0x1000,
        rkey: RKey(0x700),
    };
    p.a.send(9, SendOp::Read(nothing), &[sge(&src, 0, 64)]);
    let [_, b] = texts(&mut p);
    assert!(b.unwrap().ends_with("key 0x700, 64 bytes at 0x1000: unknown key"));
}

#[test]
fn flushed_work_requests_and_a_reset_leave_no_failure() {
    let mut p = Pair::new(Setup::default());
    let src = p.a.filled(64, 1);
    // Without a receive, and then the program gives up.
    p.a.send(9, SendOp::Send, &[sge(&src, 0, 64)]);
    p.a.modify(&roce_verbs::QpAttr {
        state: Some(roce_verbs::QpState::Err),
        ..roce_verbs::QpAttr::default()
    });
    assert_eq!(p.a.completions()[0].status, WcStatus::FlushError);
    assert_eq!(p.a.qp.take_failure(), None);
}
