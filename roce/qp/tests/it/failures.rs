//! Reports of failed queue pairs to people.

use std::time::Duration;

use roce_bth::{Aeth, Credits, Msn, NakCode, Opcode, RKey, Syndrome};
use roce_verbs::{
    AccessFlags, LKey, RemoteAddr, SendOp, Sge, WcStatus,
    wr::{BindWindow, FastRegister},
};

use crate::harness::*;

const LONG: Duration = Duration::from_secs(600);

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

type Operation = fn(RemoteAddr) -> SendOp;

/// Text of A after the peer refused a request.
fn refused(op: Operation, len: usize, code: NakCode) -> String {
    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(len, 1), p.b.region(len));
    p.a.send(9, op(at(&dst, 0)), &[sge(&src, 0, len)]);
    p.a.drain();
    let nak = Aeth {
        syndrome: Syndrome::Nak(code),
        msn: Msn::new(0),
    };
    p.a.handle(&Raw::new(Opcode::RcAcknowledge, A, p.setup.psn).aeth(nak).bytes());
    p.a.qp.take_failure().expect("a failure").to_string()
}

#[test]
fn a_refusal_names_the_operation_and_what_probably_is_wrong() {
    let fetch_add = |remote| SendOp::FetchAdd { remote, add: 1 };
    let cases: [(Operation, usize, NakCode, &str, &str); 6] = [
        (
            |_| SendOp::Send,
            64,
            NakCode::InvalidRequest,
            "SEND of QP",
            "remote invalid request error: 64 bytes; probably more than",
        ),
        (
            SendOp::Write,
            64,
            NakCode::InvalidRequest,
            "WRITE of QP",
            "; probably the peer's queue pair does not permit",
        ),
        (
            SendOp::Read,
            64,
            NakCode::InvalidRequest,
            "READ of QP",
            "; probably the peer's queue pair does not permit",
        ),
        (
            fetch_add,
            8,
            NakCode::InvalidRequest,
            "atomic of QP",
            "; probably the address is not a multiple of 8",
        ),
        (
            SendOp::Read,
            64,
            NakCode::RemoteAccessError,
            "READ of QP",
            "; the peer has no such memory open to it",
        ),
        (
            SendOp::Write,
            64,
            NakCode::RemoteOperationalError,
            "WRITE of QP",
            "; the peer could not access its own memory",
        ),
    ];
    for (op, len, code, begin, part) in cases {
        let text = refused(op, len, code);
        assert!(
            text.starts_with(begin) && text.contains("refused by ") && text.contains(part),
            "{text}"
        );
    }
}

#[test]
fn retries_that_are_used_up_name_the_peer_that_is_silent_or_has_no_receive() {
    let mut p = Pair::new(Setup {
        rnr_retry: 1,
        ..Setup::default()
    });
    let src = p.a.filled(64, 1);
    p.a.send(9, SendOp::Send, &[sge(&src, 0, 64)]);
    let [a, b] = texts(&mut p);
    let a = a.unwrap();
    assert!(a.contains(" failed: ") && a.contains("had no receive posted"), "{a}");
    assert_eq!(b, None);

    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(64, 1), p.b.region(64));
    p.a.send(9, SendOp::Write(at(&dst, 0)), &[sge(&src, 0, 64)]);
    p.run_with(LONG, |_, _| Fate::Drop);
    let a = p.a.qp.take_failure().unwrap().to_string();
    assert!(a.contains(&format!("QP {B:#x} (timeout 14, retry_cnt 7)")), "{a}");
}

#[test]
fn an_answer_of_the_wrong_length_is_told_from_a_refusal() {
    let mut p = Pair::new(Setup::default());
    let (dst, src) = (p.a.region(64), p.b.region(64));
    p.a.send(9, SendOp::Read(at(&src, 0)), &[sge(&dst, 0, 64)]);
    p.a.drain();
    let ack = Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(1),
    };
    let response = Raw::new(Opcode::RcReadResponseOnly, A, p.setup.psn).aeth(ack);
    p.a.handle(&response.payload(&[0; 32]).bytes());
    let text = p.a.qp.take_failure().unwrap().to_string();
    assert!(text.ends_with("does not fit the request"), "{text}");
}

#[test]
fn local_keys_are_named() {
    let text = |op: SendOp, sges: &[Sge]| {
        let mut p = Pair::new(Setup::default());
        p.a.send(9, op, sges);
        texts(&mut p)[0].take().unwrap()
    };
    let unknown = Sge {
        addr: 0x1000,
        length: 16,
        lkey: LKey(0x700),
    };
    let empty = Sge { length: 0, ..unknown };
    let other = Sge {
        lkey: LKey(0x900),
        ..unknown
    };
    let send = text(SendOp::Send, &[empty, other]);
    assert!(send.starts_with("SEND of QP"), "{send}");
    assert!(
        send.ends_with("local protection error: key 0x900, 16 bytes at 0x1000: unknown key"),
        "{send}"
    );
    let invalidate = text(SendOp::LocalInvalidate(RKey(0x700)), &[]);
    assert!(invalidate.starts_with("LOCAL_INV of QP"), "{invalidate}");
    assert!(invalidate.contains("key 0x700, 0 bytes at 0x0"), "{invalidate}");
    let (lkey, addr, length) = (LKey(0x700), 0x2000, 32);
    let (key, access) = (RKey(0x901), AccessFlags::REMOTE_READ);
    let register = FastRegister {
        key,
        lkey,
        addr,
        length,
        iova: 0,
        access,
    };
    let bind = BindWindow {
        key,
        lkey,
        addr,
        length,
        access,
    };
    let names = [
        ("REG_MR", SendOp::FastRegister(register)),
        ("BIND_MW", SendOp::BindWindow(bind)),
    ];
    for (name, op) in names {
        let text = text(op, &[]);
        assert!(text.starts_with(&format!("{name} of QP")), "{text}");
        assert!(text.contains("key 0x700, 32 bytes at 0x2000"), "{text}");
    }
}

#[test]
fn a_receiver_tells_its_own_memory_from_the_requests_keys() {
    let mut p = Pair::new(Setup::default());
    let src = p.a.filled(16, 1);
    let unknown = Sge {
        addr: 0x1000,
        length: 16,
        lkey: LKey(0x700),
    };
    p.b.recv(1, &[unknown]);
    p.a.send(9, SendOp::Send, &[sge(&src, 0, 16)]);
    let b = texts(&mut p)[1].take().unwrap();
    assert!(b.contains("can't receive SEND of "), "{b}");
    assert!(
        b.contains("local protection error: the memory of the receive (wr_id 0x1)"),
        "{b}"
    );

    let mut p = Pair::new(Setup::default());
    let (src, dst) = (p.a.filled(16, 1), p.b.region(16));
    p.b.recv(1, &[sge(&dst, 0, 16)]);
    p.a.send(9, SendOp::SendWithInv(RKey(0x700)), &[sge(&src, 0, 16)]);
    let b = texts(&mut p)[1].take().unwrap();
    assert!(
        b.contains("failed after SEND of ") && b.contains("remote invalid request error"),
        "{b}"
    );
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

#[test]
fn rights_are_named_only_if_they_are_what_is_missing() {
    let text = |access: AccessFlags, forged: Raw| {
        let mut p = Pair::new(Setup {
            access,
            ..Setup::default()
        });
        p.b.handle(&forged.bytes());
        p.b.qp.take_failure().unwrap().to_string()
    };
    let psn = Setup::default().psn;
    let write = Raw::new(Opcode::RcWriteOnly, B, psn)
        .reth(0x1000, RKey(1), 8)
        .payload(&[0; 8]);
    let none = text(AccessFlags::LOCAL_WRITE, write);
    assert!(
        none.contains("the queue pair does not permit it: qp_access_flags"),
        "{none}"
    );
    // A FLUSH of a reserved kind needs rights that nobody has.
    let flush = Raw::new(Opcode::RcFlush, B, psn).reth(0x1000, RKey(1), 8);
    let reserved = text(crate::memory_placement::all(), flush);
    assert!(!reserved.contains("qp_access_flags"), "{reserved}");
}
