//! RDS calls of a program, with a node that is a few threads of this test: what the calls make of each packet that a node can send.

#[path = "rds/node.rs"]
mod node;

use std::{
    ffi::{c_int, c_void},
    io, mem,
    net::SocketAddr,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::Duration,
};

// The library under test; its functions are reached by their C names.
use ferroce_verbs as _;
use libc::{iovec, msghdr, sockaddr_in, timeval};
use node::Node;
use rds_local::{Op, RdmaOp, RecvKind};

const SOL_RDS: c_int = 276;

/// The node of this process, for one test at a time.
fn node() -> (&'static Node, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    static NODE: OnceLock<Node> = OnceLock::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let node = NODE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap().keep();
        // SAFETY: before any call that looks at the environment; one test at a time comes here.
        unsafe { std::env::set_var("FERROCE_BROKER_DIR", &dir) };
        Node::start(&dir)
    });
    // Sockets of the test before.
    node.await_closed();
    (node, turn)
}

fn addr(port: u16) -> SocketAddr {
    ([192, 0, 2, 1], port).into()
}

fn raw(addr: SocketAddr) -> sockaddr_in {
    let SocketAddr::V4(addr) = addr else { panic!("IPv4") };
    sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: addr.port().to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(addr.ip().octets()),
        },
        sin_zero: [0; 8],
    }
}

fn result(value: isize) -> Result<usize, i32> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn socket() -> OwnedFd {
    // SAFETY: makes a socket, which is this value's.
    unsafe {
        let fd = libc::socket(libc::AF_RDS, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    }
}

fn bound(port: u16) -> OwnedFd {
    let socket = socket();
    let name = raw(addr(port));
    // SAFETY: a name of this length.
    let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), size_of_val(&name) as u32) };
    assert_eq!(result(done as isize), Ok(0));
    socket
}

fn send_to(socket: &OwnedFd, data: &[u8], port: u16, flags: c_int) -> Result<usize, i32> {
    let (name, fd) = (raw(addr(port)), socket.as_raw_fd());
    let len = size_of_val(&name) as u32;
    // SAFETY: a buffer and a name.
    result(unsafe {
        libc::sendto(
            fd,
            data.as_ptr().cast(),
            data.len(),
            flags,
            (&raw const name).cast(),
            len,
        )
    })
}

fn recv(socket: &OwnedFd, buffer: &mut [u8], flags: c_int) -> Result<usize, i32> {
    // SAFETY: a buffer.
    result(unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) })
}

fn set(socket: &OwnedFd, level: c_int, option: c_int, value: &[u8]) -> Result<usize, i32> {
    let (fd, len) = (socket.as_raw_fd(), value.len() as u32);
    // SAFETY: a buffer.
    result(unsafe { libc::setsockopt(fd, level, option, value.as_ptr().cast(), len) } as isize)
}

/// Results of recvmsg: result, flags, length of the name, and the control messages' bytes.
fn recv_message(
    socket: &OwnedFd,
    room: usize,
    control_room: usize,
    flags: c_int,
) -> Result<(usize, c_int, u32, Vec<u8>), i32> {
    let (mut data, mut control) = (vec![0u8; room], vec![0u8; control_room]);
    let mut name = raw(addr(0));
    let mut part = iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: data.len(),
    };
    // SAFETY: zeroes are a message; everything it names lives until the end.
    unsafe {
        let mut message: msghdr = mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_name, message.msg_namelen) = ((&raw mut name).cast(), size_of_val(&name) as u32);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), control.len());
        let got = result(libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags))?;
        control.truncate(message.msg_controllen);
        Ok((got, message.msg_flags, message.msg_namelen, control))
    }
}

/// A control message's bytes.
fn cmsg(level: c_int, kind: c_int, data: &[u8]) -> Vec<u8> {
    let len = 16 + data.len();
    [&len.to_ne_bytes()[..], &level.to_ne_bytes(), &kind.to_ne_bytes(), data].concat()
}

#[test]
fn messages_go_there_and_back() {
    let (node, _turn) = node();
    let (a, b) = (bound(1000), bound(1001));
    assert_eq!(send_to(&a, b"hello", 1001, 0), Ok(5));
    assert_eq!(recv_message(&b, 100, 0, libc::MSG_PEEK), Ok((5, 0, 16, vec![])));
    assert_eq!(node.received(addr(1001)), 0, "peeked");
    assert_eq!(
        recv_message(&b, 3, 0, libc::MSG_TRUNC),
        Ok((5, libc::MSG_TRUNC, 16, vec![]))
    );
    assert_eq!(node.received(addr(1001)), 5);
    assert_eq!(recv(&b, &mut [0; 9], libc::MSG_DONTWAIT), Err(libc::EAGAIN));
    let time = timeval {
        tv_sec: 0,
        tv_usec: 50_000,
    };
    let bytes = [time.tv_sec, time.tv_usec].map(i64::to_ne_bytes).concat();
    assert_eq!(set(&b, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &bytes), Ok(0));
    assert_eq!(recv(&b, &mut [0; 9], 0), Err(libc::ETIMEDOUT));
}

#[test]
fn a_message_may_have_as_many_parts_as_the_system_allows() {
    let (_, _turn) = node();
    let (a, b) = (bound(1000), bound(1001));
    for count in [1022, 1023, 1024] {
        let bytes: Vec<u8> = (0..count * 2).map(|n| n as u8).collect();
        let mut back = vec![0u8; bytes.len()];
        let parts = |base: *const u8| -> Vec<iovec> {
            let part = |n: usize| iovec {
                iov_base: base.wrapping_add(2 * n).cast_mut().cast(),
                iov_len: 2,
            };
            (0..count).map(part).collect()
        };
        let (mut out, mut into) = (parts(bytes.as_ptr()), parts(back.as_mut_ptr()));
        let mut name = raw(addr(1001));
        // SAFETY: messages of this frame.
        unsafe {
            let mut message: msghdr = mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (out.as_mut_ptr(), count);
            (message.msg_name, message.msg_namelen) = ((&raw mut name).cast(), 16);
            assert_eq!(
                result(libc::sendmsg(a.as_raw_fd(), &raw const message, 0)),
                Ok(2 * count)
            );
            message.msg_iov = into.as_mut_ptr();
            assert_eq!(result(libc::recvmsg(b.as_raw_fd(), &raw mut message, 0)), Ok(2 * count));
            message.msg_iovlen = 1025;
            assert_eq!(
                result(libc::recvmsg(b.as_raw_fd(), &raw mut message, 0)),
                Err(libc::EMSGSIZE)
            );
        }
        assert_eq!(back, bytes);
    }
}

#[test]
fn notifications_are_control_messages_and_wakes_are_nothing() {
    let (node, _turn) = node();
    let a = bound(1000);
    node.push(addr(1000), RecvKind::Wake, None, b"");
    assert_eq!(recv(&a, &mut [0; 9], libc::MSG_DONTWAIT), Err(libc::EAGAIN));
    node.push(addr(1000), RecvKind::Wake, None, b"");
    assert_eq!(
        recv(&a, &mut [0; 9], libc::MSG_DONTWAIT | libc::MSG_PEEK),
        Err(libc::EAGAIN)
    );
    node.push(addr(1000), RecvKind::Congestion(5), None, b"");
    node.push(addr(1000), RecvKind::Notification { token: 9, status: -3 }, None, b"");
    node.push(addr(1000), RecvKind::Message(Some(7)), Some(addr(3)), b"hello");
    assert_eq!(
        recv_message(&a, 9, 99, libc::MSG_PEEK),
        Ok((0, 0, 0, cmsg(SOL_RDS, 5, &5u64.to_ne_bytes())))
    );
    let status = cmsg(SOL_RDS, 4, &[9u64.to_ne_bytes(), 0xffff_fffdu64.to_ne_bytes()].concat());
    assert_eq!(
        recv_message(&a, 9, 99, 0),
        Ok((0, 0, 0, status)),
        "the kernel's congestion is gone when it was peeked at"
    );
    assert_eq!(
        set(&a, libc::SOL_SOCKET, libc::SO_TIMESTAMP, &1i32.to_ne_bytes()),
        Ok(0)
    );
    let time = cmsg(
        libc::SOL_SOCKET,
        libc::SO_TIMESTAMP,
        &[1000i64, 7].map(i64::to_ne_bytes).concat(),
    );
    let both = [cmsg(SOL_RDS, 2, &7u64.to_ne_bytes()), time].concat();
    assert_eq!(recv_message(&a, 9, 99, libc::MSG_PEEK), Ok((5, 0, 16, both.clone())));
    assert_eq!(recv_message(&a, 9, 99, 0), Ok((5, 0, 16, both)));
    node.push(addr(1000), RecvKind::Message(None), Some(addr(3)), b"hello");
    assert_eq!(recv_message(&a, 9, 0, 0).map(|got| got.1), Ok(libc::MSG_CTRUNC));
}

#[test]
fn long_messages_come_in_files() {
    let (node, _turn) = node();
    let a = bound(1000);
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 7) as u8).collect();
    node.push_file(addr(1000), &data);
    let mut back = vec![0; data.len() + 9];
    assert_eq!(recv(&a, &mut back, libc::MSG_PEEK), Ok(data.len()));
    assert!(back.starts_with(&data));
    back.fill(0);
    assert_eq!(recv(&a, &mut back, 0), Ok(data.len()));
    assert!(back.starts_with(&data) && node.received(addr(1000)) == 1 << 20);
    node.push_file(addr(1000), &data);
    assert_eq!(recv_message(&a, 4, 0, 0), Ok((4, libc::MSG_TRUNC, 16, vec![])));
}

#[test]
fn a_congested_port_refuses_or_is_waited_for() {
    let (node, _turn) = node();
    let a = bound(1000);
    node.set_congested(true);
    assert_eq!(send_to(&a, b"hello", 1000, libc::MSG_DONTWAIT), Err(libc::ENOBUFS));
    thread::scope(|scope| {
        let waits = scope.spawn(|| send_to(&a, b"hello", 1000, 0));
        node.await_waiting();
        assert!(!waits.is_finished());
        node.set_congested(false);
        assert_eq!(waits.join().unwrap(), Ok(5));
    });
    assert_eq!(recv(&a, &mut [0; 9], 0), Ok(5));
}

#[test]
fn a_full_buffer_is_a_time_out_unless_the_call_does_not_wait() {
    let (_, _turn) = node();
    let a = bound(1000);
    // Nobody reads at 1001, so the node stops in the middle.
    let _b = bound(1001);
    assert_eq!(
        set(
            &a,
            libc::SOL_SOCKET,
            libc::SO_SNDTIMEO,
            &[0i64, 50_000].map(i64::to_ne_bytes).concat()
        ),
        Ok(0)
    );
    let data = vec![0; 100_000];
    while send_to(&a, &data, 1001, libc::MSG_DONTWAIT) == Ok(data.len()) {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(send_to(&a, &data, 1001, libc::MSG_DONTWAIT), Err(libc::EAGAIN));
    assert_eq!(send_to(&a, &data, 1001, 0), Err(libc::ETIMEDOUT));
    assert_eq!(send_to(&a, &vec![0; 106_497], 1001, 0), Err(libc::EMSGSIZE));
}

#[test]
fn copies_are_the_same_socket_and_the_last_close_is_seen() {
    let (node, _turn) = node();
    let a = bound(1000);
    let copies: Vec<OwnedFd> = [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC]
        // SAFETY: makes descriptors, which are these values'.
        .map(|command| unsafe { OwnedFd::from_raw_fd(libc::fcntl(a.as_raw_fd(), command, 100)) })
        .into();
    drop(a);
    assert_eq!(send_to(&copies[0], b"x", 1000, 0), Ok(1));
    assert_eq!(recv(&copies[1], &mut [0; 9], 0), Ok(1));
    // Another file takes the number of a copy.
    let file = tempfile::tempfile().unwrap();
    let number = copies[0].as_raw_fd();
    // SAFETY: both are open.
    let taken = unsafe { libc::dup2(file.as_raw_fd(), number) };
    assert_eq!(taken, number);
    assert_eq!(send_to(&copies[0], b"x", 1000, 0), Err(libc::ENOTSOCK));
    // SAFETY: writes to a file, by its number.
    let written = unsafe { libc::write(number, b"abc".as_ptr().cast(), 3) };
    assert_eq!(result(written), Ok(3));
    drop(copies);
    node.await_closed();
}

#[test]
fn a_socket_that_was_passed_on_is_recognised() {
    let (_, _turn) = node();
    let a = bound(1000);
    let (mut over, mut end) = ([0; 2], [0u8; 4]);
    // SAFETY: descriptors of this frame; messages with room for one.
    let passed = unsafe {
        assert_eq!(
            libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, over.as_mut_ptr()),
            0
        );
        let control = cmsg(libc::SOL_SOCKET, libc::SCM_RIGHTS, &a.as_raw_fd().to_ne_bytes());
        let mut control = [control, vec![0; 4]].concat();
        let mut part = iovec {
            iov_base: end.as_mut_ptr().cast(),
            iov_len: 1,
        };
        let mut message: msghdr = mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), control.len());
        assert_eq!(libc::sendmsg(over[0], &raw const message, 0), 1);
        // Its number was another file's before.
        let next = libc::dup(over[0]);
        assert_eq!(libc::send(next, end.as_ptr().cast(), 1, 0), 1);
        libc::close(next);
        drop(a);
        assert_eq!(libc::recvmsg(over[1], &raw mut message, 0), 1);
        over.into_iter().for_each(|fd| drop(OwnedFd::from_raw_fd(fd)));
        OwnedFd::from_raw_fd(c_int::from_ne_bytes(control[16..20].try_into().unwrap()))
    };
    assert_eq!(send_to(&passed, b"hello", 1000, 0), Ok(5));
    assert_eq!(recv(&passed, &mut [0; 9], 0), Ok(5));
}

#[test]
fn a_forked_child_has_a_connection_of_its_own() {
    let (_, _turn) = node();
    let a = bound(1000);
    // SAFETY: the child only calls what it tests, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let b = bound(1001);
            let sent = send_to(&a, b"from a child", 1001, 0);
            let got = recv(&b, &mut [0; 99], 0);
            libc::_exit(if (sent, got) == (Ok(12), Ok(12)) { 0 } else { 1 });
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0);
    }
    assert_eq!(send_to(&a, b"x", 1000, 0), Ok(1));
}

#[test]
fn operations_and_options_reach_the_node() {
    let (node, _turn) = node();
    let a = bound(1000);
    let send_with = |kind, data: &[u8]| {
        let control = cmsg(SOL_RDS, kind, data);
        let mut name = raw(addr(1000));
        // SAFETY: a message of this frame.
        unsafe {
            let mut message: msghdr = mem::zeroed();
            (message.msg_name, message.msg_namelen) = ((&raw mut name).cast(), 16);
            let control = (control.as_ptr().cast_mut().cast::<c_void>(), control.len());
            (message.msg_control, message.msg_controllen) = control;
            result(libc::sendmsg(a.as_raw_fd(), &raw const message, 0))
        }
    };
    let cookie = |number: u64| number.to_ne_bytes();
    assert_eq!(
        send_with(2, &cookie(0x1122)),
        Err(libc::EINVAL),
        "no memory of the socket has this cookie"
    );
    assert_eq!(node.last_op(), Op::None);
    assert_eq!(send_with(2, &cookie(0x77)), Ok(0));
    assert_eq!(recv(&a, &mut [], 0), Ok(0));
    assert_eq!(node.last_op(), Op::Dest(0x77));
    let memory = [0u8; 100];
    let at = memory.as_ptr().expose_provenance() as u64;
    let local = [at, 100];
    let args = |remote: u64| {
        let local = local.as_ptr().expose_provenance() as u64;
        [3, 10, remote, local, 1, 0x20, 9].map(u64::to_ne_bytes).concat()
    };
    assert_eq!(
        send_with(1, &args(99)),
        Err(libc::EINVAL),
        "the peer's memory is too short"
    );
    assert_eq!(send_with(1, &args(100)), Ok(0));
    assert_eq!(recv(&a, &mut [], 0), Ok(0));
    let operation = Op::Rdma(RdmaOp {
        memory: 5,
        cookie: 3,
        remote_addr: 10,
        remote_len: 100,
        flags: 0x20,
        token: 9,
        local: vec![(at, 100)],
    });
    assert_eq!(node.last_op(), operation);
    let name = raw(addr(7));
    // SAFETY: plain bytes.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const name).cast::<u8>(), 16) };
    assert_eq!(set(&a, SOL_RDS, 1, bytes), Ok(0));
    assert_eq!(node.cancelled(), [addr(7)]);
    let mut cookie = 0u64;
    let to = (&raw mut cookie).expose_provenance() as u64;
    let map = [at, 100, to, 0].map(u64::to_ne_bytes).concat();
    assert_eq!((set(&a, SOL_RDS, 2, &map), cookie), (Ok(0), 100 << 32 | 0x77));
    let nowhere = [0x5000, 4096, to, 0].map(u64::to_ne_bytes).concat();
    assert_eq!(set(&a, SOL_RDS, 2, &nowhere), Err(libc::EFAULT));
    assert_eq!(set(&a, SOL_RDS, 3, &[0x77, 0].map(u64::to_ne_bytes).concat()), Ok(0));
    assert_eq!(
        set(&a, SOL_RDS, 3, &[0x78, 0].map(u64::to_ne_bytes).concat()),
        Err(libc::EINVAL)
    );
    let (mut bytes, mut len) = ([0u8; 64], 64u32);
    let get = |bytes: *mut u8, len: *mut u32| {
        // SAFETY: room of this length.
        result(unsafe { libc::getsockopt(a.as_raw_fd(), SOL_RDS, 10006, bytes.cast(), len) } as isize)
    };
    assert_eq!(
        (get(bytes.as_mut_ptr(), &raw mut len), len, bytes[55], bytes[56]),
        (Ok(28), 56, 7, 0)
    );
    len = 0;
    assert_eq!((get(ptr::null_mut(), &raw mut len), len), (Err(libc::ENOSPC), 56));
}

#[test]
fn a_node_that_ends_is_enetdown() {
    let (node, _turn) = node();
    let a = bound(1000);
    node.leave(addr(1000));
    assert_eq!(recv(&a, &mut [0; 9], 0), Err(libc::ENETDOWN));
    assert_eq!(send_to(&a, b"x", 1000, 0), Err(libc::ENETDOWN));
}
