//! Ends, limits, and programs that break the rules.

use std::{io::IoSlice, time::Duration};

use proptest::{collection::vec, prelude::*};
use rds_local::{Request, SocketOption};
use rds_node::{NodeEvent, start};
use rustix::net::SendFlags;
use zerocopy::IntoBytes;

use crate::support::{Host, config, errno, program, receive, send, until};

#[test]
fn it_ends_after_the_last_program() {
    let host = Host::new(|config| config.linger = Some(Duration::from_millis(100)));
    let first = host.program();
    {
        let socket = first.socket().unwrap();
        socket.bind((host.addr, 4000).into()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert!(!host.running.is_over(), "a socket is open");
    }
    drop(first);
    until("it ends", || host.running.is_over());
    host.running.wait().unwrap();
    assert!(rds_local::Control::find(host.dir.path()).unwrap().is_none());
    assert!(!host.dir.path().join(rds_local::SOCKET).exists());
    // The next one takes the directory and the address over.
    let next = start(config(host.dir.path())).unwrap();
    let program = program(host.dir.path());
    program.socket().unwrap().bind((host.addr, 4000).into()).unwrap();
    next.stop();
    next.wait().unwrap();
    assert_eq!(errno(program.socket().map(drop)), libc::EPIPE);
}

#[test]
fn a_directory_has_one() {
    let host = Host::new(|_| {});
    let second = start(config(host.dir.path())).unwrap_err();
    assert!(second.to_string().contains("another one runs"), "{second}");
    host.program().socket().unwrap();
}

#[test]
fn an_address_has_one_and_opens_from_the_start() {
    let first = Host::new(|_| {});
    first.running.control().open(first.addr);
    first.event(|event| matches!(event, NodeEvent::Opened(addr) if *addr == first.addr));
    let second = Host::new(|config| config.addrs = vec![first.addr]);
    let refused = second.event(|event| matches!(event, NodeEvent::NotOpened { .. }));
    let NodeEvent::NotOpened { addr, why } = refused else {
        unreachable!()
    };
    assert!(addr == first.addr && why.contains("another RDS node has it"), "{why}");
    let program = second.program();
    let socket = program.socket().unwrap();
    assert_eq!(errno(socket.bind((first.addr, 4000).into())), libc::EADDRINUSE);
}

#[test]
fn a_process_has_no_more_than_its_share() {
    let host = Host::new(|config| {
        config.limits.process_sockets = 3;
        config.limits.process_connections = 2;
        config.limits.process_buffers = 4 << 20;
    });
    let program = host.program();
    let sockets: Vec<_> = (0..3).map(|_| program.socket().unwrap()).collect();
    assert_eq!(errno(program.socket().map(drop)), libc::ENOBUFS);
    assert_eq!(errno(sockets[0].set(SocketOption::RecvBuffer, 64 << 20)), libc::ENOBUFS);
    sockets[0].set(SocketOption::RecvBuffer, 1 << 20).unwrap();
    // Whether or not the node has learned of it.
    drop(sockets);
    program.socket().unwrap();
    let second = host.program();
    second.call(&Request::Info(10_000)).unwrap();
    let third = host.program().call(&Request::Info(10_000));
    assert!(third.is_err(), "a third connection");
    drop(second);
    until("connections are free again", || {
        host.program().call(&Request::Info(10_000)).is_ok()
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn whatever_programs_send_others_go_on(packets in vec((vec(any::<u8>(), 1..300), any::<bool>(), any::<bool>()), 200)) {
        let host = Host::new(|config| config.limits.process_connections = 10_000);
        let (good, bad) = (host.program(), host.program());
        let reader = good.socket().unwrap();
        let at = reader.bind((host.addr, 4000).into()).unwrap();
        let hostile = bad.socket().unwrap();
        hostile.bind((host.addr, 4001).into()).unwrap();
        let unbound = bad.socket().unwrap();
        for (mut bytes, has_magic, is_request) in packets {
            if let (true, Some(magic)) = (has_magic, bytes.first_chunk_mut::<4>()) {
                *magic = rds_local::MAGIC.to_ne_bytes();
            }
            if is_request {
                bytes.resize(Request::LEN, 0);
                // The kind, so that more of them are requests.
                let kind = u32::from(bytes[8] % 12);
                bytes[4..8].copy_from_slice(&kind.to_ne_bytes());
                let key = hostile.key().0;
                bytes[8..16].copy_from_slice(key.as_bytes());
                let raw = rds_local::connect(&host.dir.path().join(rds_local::SOCKET)).unwrap().unwrap();
                let _ = rds_local::send(&raw, &[IoSlice::new(&bytes)], &[], SendFlags::empty());
            } else {
                let _ = rds_local::send(&hostile, &[IoSlice::new(&bytes)], &[], SendFlags::DONTWAIT);
                let _ = rds_local::send(&unbound, &[IoSlice::new(&bytes)], &[], SendFlags::DONTWAIT);
            }
        }
        // Its page is its own to spoil.
        hostile.page().add_received(usize::MAX);
        send(&reader, b"to itself", at);
        prop_assert_eq!(receive(&reader), (at, b"to itself".to_vec()));
        prop_assert!(!host.running.is_over());
    }
}
