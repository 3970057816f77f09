//! Sockets of nodes on loopback addresses.

mod rdma;

use std::{io::ErrorKind, net::SocketAddr, thread, time::Duration};

use ferroce_loopback::address;
use rds_host::{NodeOptions, RdsNode, Socket};

/// A node at an address of its own, with a socket.
fn node(port: u16) -> (RdsNode, Socket, SocketAddr) {
    let node = RdsNode::open(NodeOptions::new(address().into())).unwrap();
    let socket = node.socket().unwrap();
    socket.set_buffers(Some(1 << 20), Some(1 << 20)).unwrap();
    let at = socket.bind((node.addr(), port).into()).unwrap();
    (node, socket, at)
}

fn errno(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[test]
fn messages_of_all_lengths_go_there_and_back() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..7 {
                let message = far.recv().unwrap();
                assert_eq!(message.from, at_near);
                far.send_to(&message.data, message.from).unwrap();
            }
        });
        for len in [0, 1, 4095, 4096, 4097, 100_000, 1 << 20] {
            let data: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            near.send_to(&data, at_far).unwrap();
            let message = near.recv().unwrap();
            assert!(message.data == data && message.from == at_far, "{len} bytes");
        }
    });
}

#[test]
fn errors_are_the_kernels() {
    let (node, socket, at) = node(4000);
    let other = node.socket().unwrap();
    assert_eq!(errno(other.send_to(b"x", at)), Some(107), "not bound");
    assert_eq!(errno(other.bind(at)), Some(98), "taken");
    assert_eq!(errno(other.bind("192.0.2.1:5".parse().unwrap())), Some(99), "not ours");
    assert_eq!(errno(other.bind((at.ip(), 1).into())), Some(22), "port 1");
    let free = other.bind((at.ip(), 0).into()).unwrap();
    assert!(free.port() >= 2 && free != at && other.local_addr().unwrap() == free);
    assert_eq!(errno(socket.try_recv()), Some(11));
    assert_eq!(errno(socket.send_to(&vec![0; (1 << 20) + 1], at)), Some(90), "too long");
    assert_eq!(
        errno(socket.send_to(b"x", "[2001:db8::1]:5".parse().unwrap())),
        Some(95)
    );
    let late = socket.recv_timeout(Duration::from_millis(1)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
}

#[test]
fn an_address_has_one_node() {
    let (first, ..) = node(4000);
    let second = RdsNode::open(NodeOptions::new(first.addr()));
    assert!(second.is_err());
}

#[test]
fn a_reader_that_sleeps_holds_up_only_its_senders() {
    let (_a, near, at_near) = node(4000);
    let (far_node, sleeper, at_sleeper) = node(4001);
    let reader = far_node.socket().unwrap();
    let at_reader = reader.bind((far_node.addr(), 4002).into()).unwrap();
    sleeper.set_buffers(None, Some(1000)).unwrap();
    // Until the map is here.
    let full = loop {
        match near.try_send_to(&[0; 900], at_sleeper) {
            Ok(()) => thread::yield_now(),
            Err(e) if e.raw_os_error() == Some(11) => thread::yield_now(),
            Err(e) => break e,
        }
    };
    assert_eq!(full.raw_os_error(), Some(105), "ENOBUFS");
    near.send_to(b"others go on", at_reader).unwrap();
    assert_eq!(reader.recv().unwrap().data, b"others go on");
    thread::scope(|scope| {
        scope.spawn(|| near.send_to(b"last", at_sleeper).unwrap());
        while sleeper.recv().unwrap().data != b"last" {}
    });
    assert_eq!(near.local_addr().unwrap(), at_near);
}

#[test]
fn a_peer_that_is_started_again_gets_what_waits() {
    let (_a, near, _) = node(4000);
    let (far, socket, at_far) = node(4001);
    near.send_to(b"first", at_far).unwrap();
    assert_eq!(socket.recv().unwrap().data, b"first");
    let addr = far.addr();
    drop((socket, far));
    near.send_to(b"second", at_far).unwrap();
    let far = RdsNode::open(NodeOptions::new(addr)).unwrap();
    let socket = far.socket().unwrap();
    socket.bind(at_far).unwrap();
    // What comes before the socket is there is for nobody.
    near.send_to(b"third", at_far).unwrap();
    let message = socket.recv().unwrap().data;
    assert!(message == b"second" || message == b"third", "{message:?}");
}

#[tokio::test]
async fn tasks_send_and_receive() {
    let (_a, near, at_near) = node(4000);
    let (_b, far, at_far) = node(4001);
    let answers = tokio::spawn(async move {
        for _ in 0..100 {
            let message = far.recv_async().await.unwrap();
            far.send_to_async(&message.data, message.from).await.unwrap();
        }
        far
    });
    for n in 0..100u32 {
        near.send_to_async(&n.to_le_bytes(), at_far).await.unwrap();
        let message = near.recv_async().await.unwrap();
        assert_eq!((message.data, message.from), (n.to_le_bytes().to_vec(), at_far));
    }
    answers.await.unwrap();
    assert_eq!(near.local_addr().unwrap(), at_near);
}
