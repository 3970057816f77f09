//! Operations on memory of programs. The programs are this process.

use std::fs::OpenOptions;

use rds_local::{AtomicKind, AtomicOp, Control, Op, RdmaOp, RecvKind, Request, Socket};
use rustix::{event::PollFlags, net::RecvFlags};
use zerocopy::IntoBytes;

use crate::support::{Host, Program, ask, at, errno, put, until, wait_for};

const READWRITE: u64 = 1;
const NOTIFY: u64 = 0x20;
const SILENT: u64 = 0x40;
const USE_ONCE: u32 = 8;
const CANCELED: i32 = 2;
const OTHER_ERROR: i32 = 4;

fn next(socket: &Socket<'_>) -> RecvKind {
    wait_for(socket, PollFlags::IN);
    socket.recv(RecvFlags::DONTWAIT).unwrap().kind
}

/// Bytes that operations change behind the compiler's back.
fn now(bytes: &[u8]) -> Vec<u8> {
    std::hint::black_box(bytes).to_vec()
}

struct Ends<'a> {
    near: Socket<'a>,
    far: Socket<'a>,
    at: std::net::SocketAddr,
}

fn ends<'a>(hosts: &[Host; 2], controls: &'a [Control; 2]) -> Ends<'a> {
    let [near, far] = [0, 1].map(|n: usize| controls[n].socket().unwrap());
    near.bind((hosts[0].addr, 4000).into()).unwrap();
    let at = far.bind((hosts[1].addr, 5000).into()).unwrap();
    Ends { near, far, at }
}

fn hosts() -> [Host; 2] {
    [Host::new(|_| {}), Host::new(|_| {})]
}

#[test]
fn bytes_are_written_and_read_and_words_changed_and_what_fails_ends_alone() {
    let hosts = hosts();
    let controls = [hosts[0].program(), hosts[1].program()];
    let Ends { near, far, at: to } = ends(&hosts, &controls);
    let (program, owner) = (Program::new(&hosts[0]), Program::new(&hosts[1]));
    let target = vec![0u64; 20_000];
    let target = target.as_bytes();
    let cookie = owner.map(&far, target, READWRITE as u32).unwrap();
    // As it is told.
    put(&far, &Op::Dest(cookie), b"here", (hosts[0].addr, 4000).into());
    assert_eq!(next(&near), RecvKind::Message(Some(cookie)));
    let source: Vec<u8> = (0..target.len()).map(|n| (n * 7 + n / 256) as u8).collect();
    let operation = |local: Vec<(u64, u64)>, flags, token| {
        Op::Rdma(RdmaOp {
            memory: program.memory,
            cookie,
            remote_len: target.len() as u64,
            flags: flags | NOTIFY,
            token,
            local,
            ..RdmaOp::default()
        })
    };
    let (first, rest) = (1001, source.len() as u64 - 1001);
    let pieces = vec![(at(&source), first), (at(&source) + first, rest)];
    put(&near, &operation(pieces, READWRITE, 1), b"written", to);
    assert_eq!(next(&far), RecvKind::Message(None));
    assert!(now(target) == source);
    let copy = vec![0; source.len()];
    put(
        &near,
        &operation(vec![(at(&copy), source.len() as u64)], 0, 2),
        b"read",
        to,
    );
    for token in [1, 2] {
        assert_eq!(next(&near), RecvKind::Notification { token, status: 0 });
    }
    assert!(now(&copy) == source);
    assert_eq!(next(&far), RecvKind::Message(None));
    // Memory that is not there, to send or to receive, ends that operation, and the connection goes on.
    for (flags, token) in [(READWRITE, 3), (0, 4)] {
        put(&near, &operation(vec![(8192, 8)], flags, token), b"perhaps", to);
        let status = OTHER_ERROR;
        assert_eq!(next(&near), RecvKind::Notification { token, status });
    }
}

#[test]
fn operations_of_many_mebibytes_take_turns_and_a_cancel_leaves_memory_alone() {
    let hosts = hosts();
    let controls = [hosts[0].program(), hosts[1].program()];
    let Ends { near, far, at: to } = ends(&hosts, &controls);
    let (program, owner) = (Program::new(&hosts[0]), Program::new(&hosts[1]));
    let target = vec![7u8; 1 << 20];
    let cookie = owner.map(&far, &target, 0).unwrap();
    let copies: Vec<_> = (0..6).map(|_| vec![0u8; 1 << 20]).collect();
    let read = |to, copy: &[u8], token| {
        let op = Op::Rdma(RdmaOp {
            memory: program.memory,
            cookie,
            remote_len: 1 << 20,
            flags: NOTIFY | SILENT,
            token,
            local: vec![(at(copy), 1 << 20)],
            ..RdmaOp::default()
        });
        put(&near, &op, b"", to);
    };
    for (token, copy) in (0..).zip(&copies) {
        read(to, copy, token);
    }
    for (token, copy) in (0..).zip(&copies) {
        assert_eq!(next(&near), RecvKind::Notification { token, status: 0 });
        assert!(now(copy) == target, "{token}");
    }
    // Nobody is there.
    let absent = (ferroce_loopback::address(), 5000).into();
    let alone = vec![0u8; 1 << 20];
    read(absent, &alone, 9);
    let cancel = Request::Cancel(near.key(), absent);
    ask(&program.socket, &cancel, &[]).unwrap();
    let status = CANCELED;
    assert_eq!(next(&near), RecvKind::Notification { token: 9, status });
    assert!(now(&alone).iter().all(|byte| *byte == 0));
}

#[test]
fn words_are_changed_here_and_there() {
    let hosts = hosts();
    let controls = [hosts[0].program(), hosts[1].program()];
    let Ends { near, far, at: to } = ends(&hosts, &controls);
    let [program, owner] = [0, 1].map(|n: usize| Program::new(&hosts[n]));
    let (word, target) = ([0u64; 1], [0u64, 10, 0]);
    for (socket, owner, to) in [(&far, &owner, to), (&near, &program, (hosts[0].addr, 4000).into())] {
        let cookie = owner.map(socket, target.as_bytes(), READWRITE as u32).unwrap();
        let change = |kind, values, offset: u64, token| {
            let op = Op::Atomic(AtomicOp {
                kind,
                memory: program.memory,
                cookie,
                local_addr: at(word.as_bytes()),
                remote_addr: offset,
                values,
                flags: NOTIFY | SILENT,
                token,
            });
            put(&near, &op, b"", to);
            let RecvKind::Notification { status, .. } = next(&near) else {
                panic!("no report");
            };
            status
        };
        use AtomicKind::{CompareSwap, FetchAdd, MaskedCompareSwap, MaskedFetchAdd};
        let all = u64::MAX;
        let before = u64::from_ne_bytes(now(target.as_bytes())[8..16].try_into().unwrap());
        for (kind, values, after) in [
            (FetchAdd, [5, 0, 0, 0], 15),
            (CompareSwap, [15, 20, 0, 0], 20),
            (CompareSwap, [15, 30, 0, 0], 20),
            (MaskedFetchAdd, [1, 0, 0, 0], 21),
            (MaskedCompareSwap, [21, before, all, all], before),
        ] {
            let former = now(&target.as_bytes()[8..16]);
            assert_eq!(change(kind, values, 8, 5), 0);
            assert_eq!(now(word.as_bytes()), former);
            assert_eq!(now(&target.as_bytes()[8..16]), after.to_ne_bytes());
        }
        assert_ne!(change(FetchAdd, [1, 0, 0, 0], 24, 6), 0, "outside");
    }
}

#[test]
fn regions_are_their_socket_s_until_they_are_freed_or_used_once() {
    let hosts = hosts();
    let controls = [hosts[0].program(), hosts[1].program()];
    let Ends { near, far, at: to } = ends(&hosts, &controls);
    let (program, owner) = (Program::new(&hosts[0]), Program::new(&hosts[1]));
    let bytes = vec![1; 100];
    let unbound = controls[1].socket().unwrap();
    assert_eq!(errno(owner.map(&unbound, &bytes, 0)), libc::ENOTCONN);
    let cookie = owner.map(&far, &bytes, USE_ONCE).unwrap();
    let names = |socket: &Socket<'_>| ask(&owner.socket, &Request::Region(socket.key(), cookie), &[]);
    names(&far).unwrap();
    assert_eq!(errno(names(&unbound)), libc::EINVAL);
    let copy = vec![0; 100];
    let read = Op::Rdma(RdmaOp {
        memory: program.memory,
        cookie,
        remote_len: 100,
        flags: NOTIFY,
        local: vec![(at(&copy), 100)],
        ..RdmaOp::default()
    });
    put(&near, &read, b"read", to);
    assert_eq!(next(&far), RecvKind::Message(None));
    assert_eq!(errno(names(&far)), libc::EINVAL, "used");
    assert_eq!(errno(owner.unmap(&far, cookie)), libc::EINVAL);
    let cookie = owner.map(&far, &bytes, 0).unwrap();
    owner.unmap(&far, cookie).unwrap();
    assert_eq!(errno(owner.unmap(&far, cookie)), libc::EINVAL);
    owner.unmap(&far, 0).unwrap();
    assert_eq!(now(&copy), bytes);
}

#[test]
fn memory_is_its_process_s_and_no_other_file() {
    let host = Host::new(|config| config.limits.process_regions = 3);
    let control = host.program();
    let socket = control.socket().unwrap();
    let own = socket.bind((host.addr, 4000).into()).unwrap();
    let bytes = [0; 10];
    let program = Program::new(&host);
    let raw = rds_local::connect(&host.dir.path().join(rds_local::SOCKET))
        .unwrap()
        .unwrap();
    let file = OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
    assert_eq!(errno(ask(&raw, &Request::Memory, &[])), libc::EBADF);
    assert_eq!(errno(ask(&raw, &Request::Memory, &[file.into()])), libc::EBADF);
    let without = Program { socket: raw, memory: 0 };
    assert_eq!(errno(without.map(&socket, &bytes, 0)), libc::EPERM);
    // A number that was guessed.
    let operation = Op::Rdma(RdmaOp {
        memory: program.memory ^ 1,
        cookie: program.map(&socket, &bytes, 0).unwrap(),
        remote_len: 10,
        flags: NOTIFY,
        token: 7,
        local: vec![(at(&bytes), 10)],
        ..RdmaOp::default()
    });
    put(&socket, &operation, b"", own);
    let status = OTHER_ERROR;
    assert_eq!(next(&socket), RecvKind::Notification { token: 7, status });
    let second = control.socket().unwrap();
    second.bind((host.addr, 4001).into()).unwrap();
    for _ in 0..2 {
        program.map(&second, &bytes, 0).unwrap();
    }
    assert_eq!(
        errno(program.map(&second, &bytes, 0)),
        libc::EAGAIN,
        "the process's share"
    );
    drop(second);
    until("regions go with their socket", || {
        program.map(&socket, &bytes, 0).is_ok()
    });
}
