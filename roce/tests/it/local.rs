//! Devices that the test's own loop drives, with a device that has a thread, and with each other.

use std::{
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use crate::common::{
    Side, address, open,
    own_loop::{LEN, Loop, SERVICE},
};
use roce::{
    ConnParams, Flush, RecvWr, RemoteAddr, SendOp,
    verbs::provider::{CmKind, Event},
};

#[test]
fn a_loop_writes_to_and_reads_from_a_device_with_a_thread() {
    let (mut l, b) = (Loop::new(), Side::new(open()));
    let mr = b.mr(LEN);
    let to = SocketAddr::new(b.addr(), SERVICE);
    let _listener = b.device.listen(&b.channel, to, 1).unwrap();
    let (id, qp) = l.connect(to);
    l.device.flush(roce::now());
    let theirs = b.request().0;
    assert_eq!(theirs.peer_addr().unwrap().ip(), l.addr);
    let qb = b.qp();
    theirs.accept(&qb, ConnParams::default()).unwrap();
    l.until("established", |l| l.is_up(id));
    let data: Vec<u8> = (0..LEN).map(|i| (i / 3) as u8).collect();
    l.pages.write(0, &data).unwrap();
    let remote = RemoteAddr {
        addr: mr.addr(),
        rkey: mr.rkey(),
    };
    l.send(qp, SendOp::Write(remote), LEN);
    l.until("written", |l| l.done() == 1);
    let mut there = vec![0; LEN];
    mr.read(0, &mut there).unwrap();
    assert!(there == data);
    mr.write(0, &vec![7; LEN]).unwrap();
    l.send(qp, SendOp::Read(remote), LEN);
    l.until("read", |l| l.done() == 2);
    l.pages.read(0, &mut there).unwrap();
    assert!(there.iter().all(|b| *b == 7));
    theirs.disconnect().unwrap();
    l.until("disconnected", |l| l.is_over(id));
    let stats = l.device.stats(0).unwrap();
    assert_eq!(stats.icrc_errors(), 0);
}

#[test]
fn nothing_leaves_before_the_flush_and_then_all_at_once() {
    let (mut l, b) = (Loop::new(), Side::new(open()));
    let to = SocketAddr::new(b.addr(), SERVICE);
    let _listener = b.device.listen(&b.channel, to, 1).unwrap();
    let (id, qp) = l.connect(to);
    l.device.flush(roce::now());
    let theirs = b.request().0;
    let qb = b.qp();
    let mr = b.mr(4096);
    let sge = [mr.sge(0, 64)];
    let recv = RecvWr { wr_id: 1, sges: &sge };
    qb.post_recv(&[recv; 8]).unwrap();
    theirs.accept(&qb, ConnParams::default()).unwrap();
    l.until("established", |l| l.is_up(id));
    for _ in 0..3 {
        l.turn();
    }
    let before = l.device.stats(0).unwrap().path;
    for _ in 0..8 {
        l.send(qp, SendOp::Send, 64);
    }
    assert_eq!(l.device.stats(0).unwrap().path.tx_calls, before.tx_calls);
    assert_eq!(l.device.flush(roce::now()), Flush::Done);
    let after = l.device.stats(0).unwrap().path;
    assert_eq!(after.tx_calls, before.tx_calls + 1);
    assert_eq!(b.good(8).len(), 8);
}

#[test]
fn two_loops_listen_connect_and_end() {
    let (mut a, mut b) = (Loop::new(), Loop::new());
    let to = SocketAddr::new(b.addr, SERVICE);
    let listener = b.device.provider().cm_listen(to, 1).unwrap();
    let (id, qp) = a.connect(to);
    a.device.flush(roce::now());
    let request = |l: &Loop| {
        l.events.iter().find_map(|e| match e {
            Event::Cm {
                id,
                kind: CmKind::ConnectRequest { .. },
            } => Some(*id),
            _ => None,
        })
    };
    b.until("a request", |l| request(l).is_some());
    let theirs = request(&b).unwrap();
    let their_qp = b.qp();
    let done = b.device.provider().cm_accept(theirs, their_qp, &ConnParams::default());
    done.unwrap();
    b.device.flush(roce::now());
    a.until("established", |l| l.is_up(id));
    a.device.flush(roce::now());
    b.until("established", |l| l.is_up(theirs));
    let provider = a.device.provider();
    provider.cm_disconnect(id);
    a.device.flush(roce::now());
    b.until("disconnected", |l| l.is_over(theirs));
    b.device.flush(roce::now());
    a.until("disconnected", |l| l.is_over(id));
    for (l, qp, ids) in [(&mut a, qp, vec![id]), (&mut b, their_qp, vec![theirs, listener])] {
        let provider = l.device.provider();
        provider.drain(qp);
        provider.destroy_qp(qp);
        ids.into_iter().for_each(|id| provider.cm_destroy(id));
        let usage = l.device.usage();
        assert_eq!((usage.qps, usage.cms, usage.mrs), (0, 0, 1));
    }
}

#[test]
fn a_connection_begun_before_the_first_iteration_has_its_whole_time() {
    const TIME: Duration = Duration::from_millis(100);
    // Longer than the process's clock has run when devices are opened early.
    roce::now();
    thread::sleep(2 * TIME);
    // The time of a device begins when it is opened.
    let begun = roce::now();
    let mut l = Loop::new();
    let silent = UdpSocket::bind((address(), 4791)).unwrap();
    let to = SocketAddr::new(silent.local_addr().unwrap().ip(), SERVICE);
    let id = l.device.provider().cm_resolve(Some(l.addr), to).unwrap();
    let qp = l.qp();
    let params = ConnParams {
        timeout: Some(TIME),
        ..ConnParams::default()
    };
    l.device.provider().cm_connect(id, qp, &params).unwrap();
    l.until("given up", |l| {
        let given_up = |e: &Event| matches!(e, Event::Cm { id: of, kind: CmKind::Unreachable(_) } if *of == id);
        l.events.iter().any(given_up)
    });
    assert!(roce::now().saturating_since(begun) >= TIME);
}
