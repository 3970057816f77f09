//! Ends, limits, and programs that break the rules.

use std::{io::IoSlice, time::Duration};

use proptest::{collection::vec, prelude::*};
use rds_local::{AtomicKind, AtomicOp, Op, RdmaOp, Request, SendHeader, SocketOption};
use rds_node::{NodeEvent, start};
use rustix::net::SendFlags;
use zerocopy::IntoBytes;

use crate::support::{Host, Program, at, config, errno, program, receive, send, until};

#[test]
fn it_ends_after_the_last_program() {
    let host = Host::new(|config| config.linger = Some(Duration::from_secs(1)));
    let first = host.program();
    {
        let socket = first.socket().unwrap();
        socket.bind((host.addr, 4000).into()).unwrap();
        std::thread::sleep(Duration::from_millis(1200));
        assert!(!host.running.is_over(), "a socket is open");
    }
    drop(first);
    until("it ends", || host.running.is_over());
    host.running.wait().unwrap();
    assert!(rds_local::Control::find(host.dir.path()).unwrap().is_none());
    assert!(!host.dir.path().join(rds_local::SOCKET).exists());
    // The next one takes the directory and the address over.
    let next = start(config(host.dir.path()), None).unwrap();
    let program = program(host.dir.path());
    program.socket().unwrap().bind((host.addr, 4000).into()).unwrap();
    next.stop();
    next.wait().unwrap();
    assert_eq!(errno(program.socket().map(drop)), libc::EPIPE);
}

#[test]
fn a_directory_has_one() {
    let host = Host::new(|_| {});
    let second = start(config(host.dir.path()), None).unwrap_err();
    assert!(second.to_string().contains("another one runs"), "{second}");
    host.program().socket().unwrap();
}

#[test]
fn an_address_has_one_and_opens_from_the_start() {
    let first = Host::new(|_| {});
    first.running.control().open(first.addr);
    first.event(|event| matches!(event, NodeEvent::Opened { addr, .. } if *addr == first.addr));
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

/// Bytes that hostile operations may change.
const SANDBOX: usize = 1 << 14;
/// Bytes of it that peers may use.
const REGION: usize = 4096;

/// Operation as nobody should ask for it, or as somebody may: on bytes of the sandbox from 0 on, or on what is none.
fn operation() -> impl Strategy<Value = Op> {
    let at = prop_oneof![0..200u64, Just(1 << 46), Just(u64::MAX - 10)];
    let len = prop_oneof![0..300u64, Just(1 << 20), Just(1 << 40), Just(u64::MAX)];
    let local = vec((at.clone(), len.clone()), 1..4);
    let some = prop_oneof![Just(0u64), any::<u64>()];
    let rdma = (local, [some.clone(), some.clone()], len, any::<[u64; 2]>());
    let rdma = rdma.prop_map(|(local, [memory, cookie], remote, [flags, token])| {
        Op::Rdma(RdmaOp {
            memory,
            cookie,
            remote_addr: remote,
            remote_len: remote,
            flags,
            token,
            local,
        })
    });
    use AtomicKind::{CompareSwap, FetchAdd, MaskedCompareSwap, MaskedFetchAdd};
    let kind = prop::sample::select(vec![FetchAdd, CompareSwap, MaskedFetchAdd, MaskedCompareSwap]);
    let atomic = (kind, at, [some.clone(), some], any::<[u64; 3]>());
    let atomic = atomic.prop_map(|(kind, local_addr, [memory, cookie], [value, flags, token])| {
        Op::Atomic(AtomicOp {
            kind,
            memory,
            cookie,
            local_addr,
            remote_addr: value % 10_000,
            values: [value, 0, u64::MAX, u64::MAX],
            flags,
            token,
        })
    });
    prop_oneof![rdma, atomic]
}

/// Puts an operation into the sandbox, on the region with a cookie unless it names another.
fn aim(op: Op, program: &Program, sandbox: &[u8], region: u64) -> Op {
    let (number, first) = (program.memory, at(sandbox));
    let place = |at: u64| if at < 1 << 46 { first + at } else { at };
    match op {
        Op::Rdma(mut op) => {
            op.memory ^= number;
            op.cookie ^= region;
            for (at, _) in &mut op.local {
                *at = place(*at);
            }
            Op::Rdma(op)
        }
        Op::Atomic(mut op) => {
            op.memory ^= number;
            op.cookie ^= region;
            op.local_addr = place(op.local_addr);
            Op::Atomic(op)
        }
        other => other,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn whatever_operations_programs_send_others_go_on(ops in vec((operation(), any::<bool>()), 200)) {
        let hosts = [Host::new(|_| {}), Host::new(|_| {})];
        let controls = [hosts[0].program(), hosts[1].program()];
        let hostile = controls[0].socket().unwrap();
        let own = hostile.bind((hosts[0].addr, 4001).into()).unwrap();
        let [good, owner] = [0, 1].map(|n: usize| controls[n].socket().unwrap());
        good.bind((hosts[0].addr, 4000).into()).unwrap();
        let to = owner.bind((hosts[1].addr, 5000).into()).unwrap();
        let sandbox = vec![0u8; SANDBOX];
        let regions = [(&hostile, &hosts[0]), (&owner, &hosts[1])].map(|(socket, host)| {
            let program = Program::new(host);
            let cookie = program.map(socket, &sandbox[..REGION], 1).unwrap();
            (program, cookie)
        });
        for (op, is_here) in ops {
            let (to, region) = if is_here { (own, regions[0].1) } else { (to, regions[1].1) };
            let op = aim(op, &regions[0].0, &sandbox, region);
            let bytes = op.to_bytes();
            let header = SendHeader::new(Some(to), &op, bytes.len(), 0);
            let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(&bytes)];
            // It reads no reports, and has only so many operations until it does.
            let _ = rds_local::send(&hostile, &parts, &[], SendFlags::DONTWAIT);
        }
        send(&good, b"to another", to);
        loop {
            // Messages of operations that were done.
            let (from, data) = receive(&owner);
            if from.port() == 4000 {
                prop_assert_eq!(data, b"to another");
                break;
            }
        }
        prop_assert!(hosts.iter().all(|host| !host.running.is_over()));
    }

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
                let kind = u32::from(bytes[8] % 14);
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
