//! A forked child has copies of all objects, but the device is its parent's.

mod common;

use common::*;
use roce::{Payload, PostError, QpCaps, QpInit, SendFlags, SendOp, SendWr};

fn init(side: &Side) -> QpInit<'_> {
    QpInit {
        send_cq: &side.cq,
        recv_cq: &side.cq,
        caps: QpCaps::default(),
        signal_all: false,
    }
}

/// Makes the calls of a child. `Err` names a call that worked and must not.
fn try_everything(pair: Pair) -> Result<(), &'static str> {
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        payload: Payload::Inline(b"from the child"),
    };
    if !matches!(pair.qa.post_send(&[wr]), Err((0, PostError::NoQueuePair))) {
        return Err("posting");
    }
    if !pair.a.device.is_inherited() || !pair.a.device.is_closed() {
        return Err("the device");
    }
    if pair.a.cq.poll(&mut vec![], 1).is_ok() {
        return Err("polling");
    }
    if pair.qa.state().is_ok() || pair.a.device.create_qp(&pair.a.pd, &init(&pair.a)).is_ok() {
        return Err("calls");
    }
    // Dropping connections would disconnect them, dropping the device would close it.
    drop(pair);
    Ok(())
}

#[test]
fn a_child_touches_neither_the_wire_nor_the_parent_s_objects() {
    let pair = pair();
    let (ma, mb) = (pair.a.mr(64), pair.b.mr(64));
    let before = pair.a.device.stats().port.tx_packets;
    // SAFETY: the child only runs this crate's code, and ends with _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| try_everything(pair))) {
            Ok(Ok(())) => 0,
            Ok(Err(_)) => 1,
            Err(_) => 2,
        };
        // SAFETY: ends the child without running anything of the test harness.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above, writing to a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0);
    // The parent's connection is as it was.
    assert_eq!(pair.a.device.stats().port.tx_packets, before);
    recv(&pair.qb, 1, &[mb.sge(0, 64)]);
    post(&pair.qa, 2, SendOp::Send, Payload::Sges(&[ma.sge(0, 64)]));
    pair.a.good(1);
    pair.b.good(1);
}
