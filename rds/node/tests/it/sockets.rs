//! Promises to programs.

use std::{net::SocketAddr, time::Duration};

use rds_host::{NodeOptions, RdsNode};
use rds_local::{Control, RecvHeader, RecvKind, Request, SocketFlags, SocketKey, SocketOption, info};
use rds_node::{NodeEvent, PairKey};
use rustix::{
    event::PollFlags,
    net::{RecvFlags, SendFlags},
};

use crate::support::{Host, errno, receive, send, until, wait_for};

fn stays(_: &mut rds_node::Config) {}

fn connections(program: &Control) -> Vec<info::Connection> {
    let (bytes, size) = program.info(info::CONNECTIONS).unwrap();
    assert_eq!(size, 42);
    info::elements(&bytes).collect()
}

#[test]
fn programs_at_one_address_share_one_connection() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let programs = [near.program(), near.program()];
    let sockets = [0, 1].map(|n| {
        let socket = programs[n].socket().unwrap();
        let at = socket.bind((near.addr, 4000 + n as u16).into()).unwrap();
        assert_eq!(socket.page().bound(), Some(at));
        (socket, at)
    });
    let far_program = far.program();
    let echo = far_program.socket().unwrap();
    let at_echo = echo.bind((far.addr, 5000).into()).unwrap();
    for len in [0, 1, 4095, 4096, 4097, 100_000] {
        let data: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        for (socket, at) in &sockets {
            send(socket, &data, at_echo);
            let (from, came) = receive(&echo);
            assert!(from == *at && came == data, "{len} bytes there");
            send(&echo, &came, from);
            assert!(receive(socket) == (at_echo, came), "{len} bytes back");
        }
    }
    let all = connections(&programs[0]);
    assert_eq!(all.len(), 1);
    assert_eq!((all[0].flags & info::CONNECTED, all[0].tos), (info::CONNECTED, 0));
    assert_eq!(connections(&far_program).len(), 1);
    let (bytes, size) = programs[1].info(info::SOCKETS).unwrap();
    assert_eq!(bytes.len() / size, 2);
    // Two on one host.
    send(&sockets[0].0, b"neighbour", sockets[1].1);
    assert_eq!(receive(&sockets[1].0), (sockets[0].1, b"neighbour".to_vec()));
}

#[test]
fn errors_are_the_kernels() {
    let (host, other) = (Host::new(stays), Host::new(stays));
    let program = host.program();
    let socket = program.socket().unwrap();
    let call = |request: Request| program.call(&request).map(|(answer, _)| answer);
    let key = socket.key();
    let unset: SocketAddr = "0.0.0.0:7".parse().unwrap();
    let at: SocketAddr = (host.addr, 4000).into();
    for (what, request, expected) in [
        ("tos before bind", Request::SetTos(key, 1), libc::ENOTTY),
        ("cancel before bind", Request::Cancel(key, at), libc::ENOTCONN),
        ("no address", Request::Bind(key, unset), libc::EINVAL),
        (
            "multicast",
            Request::Bind(key, "224.0.0.1:7".parse().unwrap()),
            libc::EINVAL,
        ),
        ("port 1", Request::Bind(key, (host.addr, 1).into()), libc::EINVAL),
        (
            "another host's",
            Request::Bind(key, "192.0.2.1:7".parse().unwrap()),
            libc::EADDRNOTAVAIL,
        ),
        ("connect to none", Request::Connect(key, unset), libc::EDESTADDRREQ),
        (
            "connect to many",
            Request::Connect(key, "255.255.255.255:7".parse().unwrap()),
            libc::EINVAL,
        ),
        ("no such socket", Request::Bind(SocketKey(1), at), libc::ENOTSOCK),
        ("no such information", Request::Info(10_002), libc::ENOPROTOOPT),
        (
            "TCP",
            Request::SetOption(key, SocketOption::Transport, 2),
            libc::ENOPROTOOPT,
        ),
        (
            "no transport",
            Request::SetOption(key, SocketOption::Transport, 9),
            libc::EINVAL,
        ),
    ] {
        assert_eq!(errno(call(request)), expected, "{what}");
    }
    call(Request::SetOption(key, SocketOption::Transport, 0)).unwrap();
    assert_eq!(
        errno(call(Request::SetOption(key, SocketOption::Transport, 0))),
        libc::EOPNOTSUPP
    );
    socket.bind(at).unwrap();
    assert_eq!(
        errno(socket.bind((host.addr, 4001).into())),
        libc::EINVAL,
        "bound already"
    );
    let second = program.socket().unwrap();
    assert_eq!(errno(second.bind(at)), libc::EADDRINUSE);
    let free = second.bind((host.addr, 0).into()).unwrap();
    assert!(free.port() >= 2 && free != at);
    call(Request::SetTos(key, 3)).unwrap();
    assert_eq!(socket.page().tos(), 3);
    assert_eq!(errno(call(Request::SetTos(key, 3))), libc::EINVAL, "once");
    // Another node process has no part in the address.
    let stranger = other.program();
    let socket = stranger.socket().unwrap();
    assert_eq!(errno(socket.bind((host.addr, 4002).into())), libc::EADDRINUSE);
    assert_eq!(errno(stranger.call(&Request::Attach(key))), libc::ENOTSOCK);
}

#[test]
fn a_socket_that_was_passed_on_is_known_and_its_page_had_again() {
    let host = Host::new(stays);
    let (first, second) = (host.program(), host.program());
    let socket = first.socket().unwrap();
    let at = socket.bind((host.addr, 4000).into()).unwrap();
    let key = SocketKey::of_peer(&socket).unwrap();
    let (_, fds) = second.call(&Request::Attach(key)).unwrap();
    let page = rds_local::Page::map(&fds[0]).unwrap();
    assert_eq!((key, page.bound()), (socket.key(), Some(at)));
    // The program that created it is gone, the descriptor is not.
    let kept = rustix::io::dup(&socket).unwrap();
    drop(socket);
    drop(first);
    let other = second.socket().unwrap();
    other.bind((host.addr, 4001).into()).unwrap();
    send(&other, b"still here", at);
    let mut buffer = [0; 200];
    let record = rds_local::receive(&kept, &mut buffer, RecvFlags::empty())
        .unwrap()
        .unwrap();
    assert!(buffer[..record.len].ends_with(b"still here"));
    drop(kept);
    let third = second.socket().unwrap();
    until("its port is free", || third.bind(at).is_ok());
}

fn counter(program: &Control, number: u32, name: &str) -> u64 {
    let (bytes, _) = program.info(number).unwrap();
    let all = info::elements::<info::Counter>(&bytes);
    let of = |counter: &info::Counter| counter.name == info::name::<32>(name);
    all.filter(of).map(|counter| counter.value).next().unwrap()
}

#[test]
fn counters_are_of_what_was_done() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let programs = [near.program(), far.program()];
    let [sender, reader] = [0, 1].map(|n: usize| programs[n].socket().unwrap());
    let from = sender.bind((near.addr, 4000).into()).unwrap();
    let to = reader.bind((far.addr, 5000).into()).unwrap();
    send(&sender, b"", (far.addr, 0).into());
    receive(&sender);
    for _ in 0..10 {
        send(&sender, &[1; 5000], to);
        receive(&reader);
    }
    send(&reader, b"answer", from);
    receive(&sender);
    send(&sender, b"nobody", (far.addr, 9).into());
    let [near_has, far_has] = [0, 1].map(|n: usize| {
        let program = &programs[n];
        move |name: &str| counter(program, info::COUNTERS, name)
    });
    for (name, at_near, at_far) in [
        ("send_queued", 12, 2),
        ("send_pong", 0, 1),
        ("recv_ping", 0, 1),
        ("recv_queued", 2, 10),
        ("recv_delivered", 2, 10),
        ("recv_drop_no_sock", 0, 1),
        ("copy_from_user", 50_006, 6),
        ("copy_to_user", 6, 50_000),
        ("recv_bytes_added_to_sock", 6, 50_000),
        ("recv_bytes_freed_fromsock", 6, 50_000),
        ("conn_reset", 0, 0),
        ("page_remainder_hit", 0, 0),
    ] {
        until(name, || (near_has(name), far_has(name)) == (at_near, at_far));
    }
    // A message of 5000 bytes is two fragments. The peer was told of all, with answers or alone.
    assert!(near_has("ib_tx_cq_event") > 0 && far_has("ib_rx_cq_event") >= 22);
    assert!(far_has("recv_ack_required") > 0 && far_has("recv_ack_required") == near_has("send_ack_required"));
    until("acknowledgements come", || {
        near_has("ib_ack_received") == far_has("ib_ack_sent") && near_has("send_queue_empty") > 0
    });
}

#[test]
fn events_say_what_happens() {
    let near = Host::new(|config| config.limits.process_sockets = 1);
    let far = Host::new(stays);
    let programs = [near.program(), far.program()];
    let [sender, reader] = [0, 1].map(|n: usize| programs[n].socket().unwrap());
    sender.bind((near.addr, 4000).into()).unwrap();
    let to = reader.bind((far.addr, 5000).into()).unwrap();
    near.event(|event| matches!(event, NodeEvent::Opened { addr, .. } if *addr == near.addr));
    send(&sender, b"first", to);
    receive(&reader);
    let is_pair = |key: &PairKey| (key.local, key.remote) == (near.addr, far.addr);
    near.event(|event| matches!(event, NodeEvent::Up(key) if is_pair(key)));
    assert_eq!(errno(programs[0].socket().map(drop)), libc::ENOBUFS);
    let own = std::process::id();
    near.event(|event| matches!(event, NodeEvent::Limit { process, .. } if *process == own));
    reader.set(SocketOption::RecvBuffer, 4096).unwrap();
    send(&sender, &[0; 8192], to);
    far.event(|event| matches!(event, NodeEvent::Congested(addr) if *addr == to));
    near.event(|event| matches!(event, NodeEvent::PeerCongested(peer) if *peer == far.addr));
    far.running.stop();
    near.event(|event| matches!(event, NodeEvent::Down(key, _) if is_pair(key)));
    // There is something to send still, or not: then a message makes that so.
    send(&sender, b"nobody is there", (ferroce_loopback::address(), 9).into());
    near.event(|event| matches!(event, NodeEvent::ConnectFailed(key, _) if key.local == near.addr));
    // One that was not to be there.
    near.running.control().open("192.0.2.99".parse().unwrap());
    near.event(|event| matches!(event, NodeEvent::NotOpened { .. }));
    let stats = near.running.control().stats().unwrap();
    assert_eq!((stats.sockets, stats.own_counters.len()), (1, 2));
}

#[test]
fn a_ping_comes_back_from_port_0() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let programs = [near.program(), far.program()];
    let [socket, open] = [0, 1].map(|n: usize| programs[n].socket().unwrap());
    socket.bind((near.addr, 0).into()).unwrap();
    open.bind((far.addr, 0).into()).unwrap();
    for _ in 0..3 {
        send(&socket, b"", (far.addr, 0).into());
        assert_eq!(receive(&socket), ((far.addr, 0).into(), vec![]));
    }
}

#[test]
fn what_a_program_sent_before_it_ended_arrives() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let (near_program, far_program) = (near.program(), far.program());
    let reader = far_program.socket().unwrap();
    let at_reader = reader.bind((far.addr, 5000).into()).unwrap();
    for n in 0..20u32 {
        let socket = near_program.socket().unwrap();
        let at = socket.bind((near.addr, 4000 + n as u16).into()).unwrap();
        if n == 0 {
            // There is no link yet: the kernel would drop it with its socket.
            send(&socket, b"first", at_reader);
            assert_eq!(receive(&reader), (at, b"first".to_vec()));
        }
        for k in 0..5u32 {
            send(&socket, &[n, k].map(u32::to_le_bytes).concat(), at_reader);
        }
        drop(socket);
        for k in 0..5u32 {
            assert_eq!(receive(&reader), (at, [n, k].map(u32::to_le_bytes).concat()));
        }
    }
}

#[test]
fn a_program_that_does_not_read_stops_only_its_senders() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let (near_program, far_program) = (near.program(), far.program());
    let sender = near_program.socket().unwrap();
    sender.bind((near.addr, 4000).into()).unwrap();
    sender.set(SocketOption::CongMonitor, 1).unwrap();
    assert!(sender.page().flag(SocketFlags::CongMonitor));
    let [slow, quick] = [5000, 5001].map(|port| {
        let socket = far_program.socket().unwrap();
        let at = socket.bind((far.addr, port).into()).unwrap();
        (socket, at)
    });
    slow.0.set(SocketOption::RecvBuffer, 16_384).unwrap();
    let mut sent = 0;
    let refused = loop {
        match sender.send_to(&[7; 4096], Some(slow.1), SendFlags::DONTWAIT) {
            Ok(()) => sent += 1,
            Err(e) if e.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
            Err(e) => break e,
        }
    };
    assert_eq!(refused.raw_os_error(), Some(libc::ENOBUFS));
    assert!(sent > 4, "{sent} messages");
    send(&sender, b"others go on", quick.1);
    assert_eq!(receive(&quick.0).1, b"others go on");
    // One that waits for the port has its connection for itself.
    std::thread::scope(|scope| {
        let waiter = near.program();
        let (key, to) = (sender.key(), Some(slow.1));
        let waits = scope.spawn(move || {
            waiter.call(&Request::Congestion {
                socket: key,
                to,
                wait: true,
            })
        });
        // To half of its buffer: not yet.
        for left in (2..sent).rev() {
            assert_eq!(receive(&slow.0).1.len(), 4096, "{left} left");
        }
        assert_eq!(
            errno(sender.send_to(b"x", to, SendFlags::DONTWAIT)),
            libc::ENOBUFS,
            "8192 bytes are unread"
        );
        assert!(!waits.is_finished());
        receive(&slow.0);
        waits.join().unwrap().unwrap();
    });
    let received = sender.recv(RecvFlags::empty()).unwrap();
    assert_eq!(received.kind, RecvKind::Congestion(1 << (5000 % 64)));
    receive(&slow.0);
    send(&sender, b"again", slow.1);
    assert_eq!(receive(&slow.0).1, b"again");
}

#[test]
fn a_full_send_buffer_stops_the_program_and_a_cancel_frees_it() {
    let host = Host::new(stays);
    let program = host.program();
    let socket = program.socket().unwrap();
    socket.bind((host.addr, 4000).into()).unwrap();
    // A host of this network that has no node.
    let nobody: SocketAddr = (ferroce_loopback::address(), 9).into();
    let mut sent = 0;
    let full = loop {
        match socket.send_to(&[0; 10_000], Some(nobody), SendFlags::DONTWAIT) {
            Ok(()) => sent += 1,
            Err(e) => break e,
        }
        assert!(sent < 10_000);
        std::thread::yield_now();
    };
    assert_eq!(full.raw_os_error(), Some(libc::EAGAIN));
    program.call(&Request::Cancel(socket.key(), nobody)).unwrap();
    until("there is room", || {
        socket.send_to(b"x", Some(nobody), SendFlags::DONTWAIT).is_ok()
    });
    let (bytes, size) = program.info(info::SEND_MESSAGES).unwrap();
    assert!(bytes.len() <= size, "all are dropped");
}

#[test]
fn a_port_is_free_when_its_socket_is_closed() {
    let (near, far) = (Host::new(stays), Host::new(stays));
    let (near_program, far_program) = (near.program(), far.program());
    let reader = far_program.socket().unwrap();
    let at_reader = reader.bind((far.addr, 5000).into()).unwrap();
    let at: SocketAddr = (near.addr, 4000).into();
    let bind = || {
        let socket = near_program.socket().unwrap();
        socket.bind(at).unwrap();
        socket
    };
    let mut last = bind();
    send(&last, b"", at_reader);
    receive(&reader);
    // The node learns of the close by an event, perhaps after the bind.
    for n in 0..100u8 {
        send(&last, &[n], at_reader);
        drop(last);
        last = bind();
    }
    let mut came: Vec<_> = (0..100).map(|_| receive(&reader)).collect();
    came.sort();
    assert_eq!(came, (0..100).map(|n| (at, vec![n])).collect::<Vec<_>>());
    // One that has more to send than the node takes, and has not read what has made its port congested.
    last.set(SocketOption::RecvBuffer, 4096).unwrap();
    let writer = far_program.socket().unwrap();
    writer.bind((far.addr, 5001).into()).unwrap();
    send(&writer, &[0; 8192], at);
    until("the port is congested", || {
        writer.send_to(b"x", Some(at), SendFlags::DONTWAIT).is_err()
    });
    let nobody: SocketAddr = (ferroce_loopback::address(), 9).into();
    while last.send_to(&[0; 10_000], Some(nobody), SendFlags::DONTWAIT).is_ok() {}
    drop(last);
    let next = bind();
    until("the port is not congested", || {
        writer.send_to(b"to the next", Some(at), SendFlags::DONTWAIT).is_ok()
    });
    assert_eq!(receive(&next), ((far.addr, 5001).into(), b"to the next".to_vec()));
    assert_eq!(errno(near_program.socket().unwrap().bind(at)), libc::EADDRINUSE);
}

#[test]
fn the_longest_messages_of_other_nodes_arrive() {
    receive_longest(&Host::new(stays), false);
}

#[test]
fn messages_longer_than_a_pair_holds_come_in_files() {
    receive_longest(&Host::new(|config| config.limits.pair = 64 << 10), true);
}

fn receive_longest(host: &Host, in_files: bool) {
    let program = host.program();
    let socket = program.socket().unwrap();
    let at = socket.bind((host.addr, 4000).into()).unwrap();
    let far = RdsNode::open(NodeOptions::new(ferroce_loopback::address().into())).unwrap();
    let sender = far.socket().unwrap();
    sender.set_buffers(Some(1 << 20), None).unwrap();
    sender.bind((far.addr(), 5000).into()).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 + i / 999) as u8).collect();
    for _ in 0..3 {
        sender.send_to(&data, at).unwrap();
        wait_for(&socket, PollFlags::IN);
        let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
        let record = rds_local::receive(&socket, &mut [0; RecvHeader::LEN], flags)
            .unwrap()
            .unwrap();
        assert_eq!(record.fds.len(), usize::from(in_files));
        let (_, came) = receive(&socket);
        assert!(came == data);
    }
    sender.flush(Duration::from_secs(20)).unwrap();
}
