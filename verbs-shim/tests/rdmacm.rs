//! RDMA_CM as librdmacm uses it: commands written to the descriptor of an event channel, here by a program that is both
//! sides of its connections, over the real transport on a loopback address.

use std::{
    ffi::{c_int, c_void},
    io,
    time::Duration,
};

// The library under test; its functions are reached by their C names.
use ferroce_verbs as _;

#[repr(C)]
struct Channel {
    fd: c_int,
}

unsafe extern "C" {
    fn rdma_create_event_channel() -> *mut Channel;
    fn rdma_destroy_event_channel(channel: *mut Channel);
}

/// Commands of `rdma_user_cm.h`.
mod cmd {
    pub(crate) const CREATE_ID: u32 = 0;
    pub(crate) const DESTROY_ID: u32 = 1;
    pub(crate) const BIND_IP: u32 = 2;
    pub(crate) const RESOLVE_IP: u32 = 3;
    pub(crate) const RESOLVE_ROUTE: u32 = 4;
    pub(crate) const CONNECT: u32 = 6;
    pub(crate) const LISTEN: u32 = 7;
    pub(crate) const ACCEPT: u32 = 8;
    pub(crate) const REJECT: u32 = 9;
    pub(crate) const DISCONNECT: u32 = 10;
    pub(crate) const INIT_QP_ATTR: u32 = 11;
    pub(crate) const GET_EVENT: u32 = 12;
}

/// Events of `rdma_cma.h`.
mod event {
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_RESPONSE: u32 = 5;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
}

const TCP: u16 = 0x0106;
const UDP: u16 = 0x0111;
const ADDR: [u8; 4] = [127, 0, 53, 1];
const PORT: u16 = 7471;

/// A `sockaddr_in` in the room of a `sockaddr_in6`.
fn sockaddr(port: u16) -> [u8; 28] {
    let mut out = [0; 28];
    out[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    out[2..4].copy_from_slice(&port.to_be_bytes());
    out[4..8].copy_from_slice(&ADDR);
    out
}

fn conn_param(qpn: u32, data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 272];
    out[..4].copy_from_slice(&qpn.to_ne_bytes());
    out[8..8 + data.len()].copy_from_slice(data);
    // Length, SRQ, responder resources, initiator depth, flow control, retries, RNR retries, valid.
    out[264..].copy_from_slice(&[data.len() as u8, 0, 2, 3, 0, 7, 7, 1]);
    out
}

/// An event as it was read.
struct Event {
    uid: u64,
    id: u32,
    kind: u32,
    status: u32,
    param: Vec<u8>,
}

impl Event {
    fn number(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.param[at..at + 4].try_into().unwrap())
    }

    /// Private data of an id with connections.
    fn data(&self) -> &[u8] {
        &self.param[8..8 + usize::from(self.param[264])]
    }
}

struct Program {
    channel: *mut Channel,
    fd: c_int,
}

impl Program {
    fn new() -> Self {
        // SAFETY: no arguments.
        let channel = unsafe { rdma_create_event_channel() };
        assert!(!channel.is_null(), "{}", io::Error::last_os_error());
        // SAFETY: just made.
        let fd = unsafe { (*channel).fd };
        Self { channel, fd }
    }

    /// Writes a command; `out` gets the answer, whose address stands in the first eight bytes that `body` gives room for.
    fn write(&self, cmd: u32, body: &[u8], out: usize) -> io::Result<()> {
        let mut bytes = cmd.to_ne_bytes().to_vec();
        bytes.extend((body.len() as u16).to_ne_bytes());
        bytes.extend((out as u16).to_ne_bytes());
        bytes.extend(body);
        // SAFETY: readable bytes; addresses in them are of buffers that are large enough.
        let n = unsafe { libc::write(self.fd, bytes.as_ptr().cast::<c_void>(), bytes.len()) };
        match n == bytes.len() as isize {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }

    /// A command whose structure begins with the address of its answer.
    fn ask<const N: usize>(&self, cmd: u32, rest: &[u8]) -> io::Result<[u8; N]> {
        let mut answer = [0; N];
        let mut body = (answer.as_mut_ptr() as u64).to_ne_bytes().to_vec();
        body.extend(rest);
        self.write(cmd, &body, N)?;
        Ok(answer)
    }

    fn create(&self, uid: u64, space: u16) -> u32 {
        let mut answer = 0u32;
        let mut body = uid.to_ne_bytes().to_vec();
        body.extend((&raw mut answer as u64).to_ne_bytes());
        body.extend(space.to_ne_bytes());
        body.extend([2, 0, 0, 0, 0, 0]);
        self.write(cmd::CREATE_ID, &body, 4).unwrap();
        answer
    }

    fn destroy(&self, id: u32) -> u32 {
        let rest = [id, 0].map(u32::to_ne_bytes).concat();
        u32::from_ne_bytes(self.ask(cmd::DESTROY_ID, &rest).unwrap())
    }

    fn simple(&self, cmd: u32, id: u32, value: u32) -> io::Result<()> {
        self.write(cmd, &[id, value].map(u32::to_ne_bytes).concat(), 0)
    }

    fn listener(&self, uid: u64, space: u16) -> u32 {
        let id = self.create(uid, space);
        let mut body = vec![0; 8];
        body.extend(sockaddr(PORT));
        body.extend(id.to_ne_bytes());
        self.write(cmd::BIND_IP, &body, 0).unwrap();
        self.simple(cmd::LISTEN, id, 8).unwrap();
        id
    }

    /// An id with a route to a port of our own address.
    fn routed(&self, uid: u64, space: u16, port: u16) -> u32 {
        let id = self.create(uid, space);
        let mut body = vec![0; 28];
        body.extend(sockaddr(port));
        body.extend([id, 2000].map(u32::to_ne_bytes).concat());
        self.write(cmd::RESOLVE_IP, &body, 0).unwrap();
        assert_eq!(self.expect(event::ADDR_RESOLVED).status, 0);
        self.simple(cmd::RESOLVE_ROUTE, id, 2000).unwrap();
        self.expect(event::ROUTE_RESOLVED);
        id
    }

    fn connect(&self, id: u32, data: &[u8]) {
        let mut body = conn_param(0x1111, data);
        body.extend([id, 0].map(u32::to_ne_bytes).concat());
        self.write(cmd::CONNECT, &body, 0).unwrap();
    }

    /// `data` of `None`: the confirmation of the peer's accept.
    fn accept(&self, id: u32, uid: u64, data: Option<&[u8]>) {
        let mut body = uid.to_ne_bytes().to_vec();
        body.extend(data.map_or_else(|| vec![0; 272], |d| conn_param(0x2222, d)));
        body.extend([id, 0].map(u32::to_ne_bytes).concat());
        self.write(cmd::ACCEPT, &body, 0).unwrap();
    }

    fn event(&self) -> io::Result<Event> {
        let got: [u8; 336] = self.ask(cmd::GET_EVENT, &[])?;
        let number = |at: usize| u32::from_ne_bytes(got[at..at + 4].try_into().unwrap());
        Ok(Event {
            uid: u64::from_ne_bytes(got[..8].try_into().unwrap()),
            id: number(8),
            kind: number(12),
            status: number(16),
            param: got[20..324].to_vec(),
        })
    }

    fn readable(&self, within: Duration) -> bool {
        let mut entry = libc::pollfd {
            fd: self.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry on the stack.
        unsafe { libc::poll(&raw mut entry, 1, within.as_millis() as c_int) == 1 }
    }

    fn next(&self) -> Event {
        assert!(self.readable(Duration::from_secs(60)), "no event");
        self.event().unwrap()
    }

    fn expect(&self, kind: u32) -> Event {
        let event = self.next();
        assert_eq!(event.kind, kind, "status {}", event.status);
        event
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by rdma_create_event_channel, and ours alone.
        unsafe { rdma_destroy_event_channel(self.channel) };
    }
}

/// Confines the library to our address, without a broker.
fn setup() {
    let [a, b, c, d] = ADDR;
    // SAFETY: the only test of this program, before it starts threads.
    unsafe {
        std::env::set_var("FERROCE_ADDR", format!("{a}.{b}.{c}.{d}"));
        std::env::set_var("FERROCE_BROKER", "off");
    }
}

fn connects_and_disconnects(p: &Program) {
    let listener = p.listener(100, TCP);
    let active = p.routed(200, TCP, PORT);
    p.connect(active, b"from the active side");
    let request = p.expect(event::CONNECT_REQUEST);
    assert_eq!(request.uid, 100);
    assert!(request.data().starts_with(b"from the active side"));
    assert_eq!((request.number(0), request.data().len()), (0x1111, 56));
    p.accept(request.id, 300, Some(b"from the passive side"));
    let response = p.expect(event::CONNECT_RESPONSE);
    assert_eq!((response.uid, response.number(0)), (200, 0x2222));
    assert!(response.data().starts_with(b"from the passive side"));
    // What each needs to know of the other's queue pair to bring its own up.
    let rtr = |id: u32| -> [u8; 144] {
        p.ask(cmd::INIT_QP_ATTR, &[id, 2].map(u32::to_ne_bytes).concat())
            .unwrap()
    };
    let (ours, theirs) = (rtr(active), rtr(request.id));
    assert_eq!(ours[32..36], 0x2222u32.to_ne_bytes());
    assert_eq!(theirs[32..36], 0x1111u32.to_ne_bytes());
    assert_eq!(ours[50..56], [0xff, 0xff, 127, 0, 53, 1], "the peer's address");
    p.accept(active, 0, None);
    assert_eq!(p.expect(event::ESTABLISHED).uid, 300);
    p.simple(cmd::DISCONNECT, active, 0).unwrap();
    let mut ended = [p.expect(event::DISCONNECTED).uid, p.expect(event::DISCONNECTED).uid];
    ended.sort_unstable();
    assert_eq!(ended, [200, 300]);
    assert_eq!(
        (p.destroy(active), p.destroy(request.id), p.destroy(listener)),
        (4, 2, 1)
    );
}

fn refusals(p: &Program) {
    // No listener: rejected after the retries.
    let active = p.routed(200, TCP, 9);
    p.connect(active, b"");
    assert_eq!(p.expect(event::REJECTED).status, 8);
    p.destroy(active);

    let listener = p.listener(100, TCP);
    let active = p.routed(200, TCP, PORT);
    p.connect(active, b"");
    let request = p.expect(event::CONNECT_REQUEST);
    let mut body = request.id.to_ne_bytes().to_vec();
    body.extend([2, 0, 0, 0]);
    body.extend([0xab; 256]);
    p.write(cmd::REJECT, &body, 0).unwrap();
    let refused = p.expect(event::REJECTED);
    assert_eq!((refused.uid, refused.status), (200, 28));
    assert!(refused.data().starts_with(&[0xab, 0xab, 0]));
    for id in [active, request.id, listener] {
        p.destroy(id);
    }
}

/// A connection to a listener that comes a little later succeeds. On a busy machine it may come too late.
fn a_listener_that_comes_late(p: &Program) {
    let succeeds = || {
        let active = p.routed(200, TCP, PORT);
        p.connect(active, b"early");
        let listener = p.listener(100, TCP);
        let first = p.next();
        let succeeds = first.kind == event::CONNECT_REQUEST;
        assert!(succeeds || first.kind == event::REJECTED, "{}", first.kind);
        if succeeds {
            assert!(first.data().starts_with(b"early"));
            p.destroy(first.id);
        }
        for id in [active, listener] {
            p.destroy(id);
        }
        while p.readable(Duration::ZERO) {
            p.event().unwrap();
        }
        succeeds
    };
    assert!((0..20).any(|_| succeeds()));
}

fn resolves_datagram_services(p: &Program) {
    let listener = p.listener(100, UDP);
    let active = p.routed(200, UDP, PORT);
    p.connect(active, b"which?");
    let request = p.expect(event::CONNECT_REQUEST);
    assert!(request.param[40..].starts_with(b"which?"));
    p.accept(request.id, 300, Some(b"this"));
    let answer = p.expect(event::ESTABLISHED);
    assert_eq!(
        (answer.uid, answer.number(0), answer.number(4)),
        (200, 0x2222, 0x0123_4567)
    );
    assert!(answer.param[40..].starts_with(b"this"));
    assert_eq!(answer.param[18..24], [0xff, 0xff, 127, 0, 53, 1], "where to send");
    for id in [active, request.id, listener] {
        p.destroy(id);
    }
}

fn waiting(p: &Program) {
    // SAFETY: flags of our own descriptor.
    let flags = unsafe { libc::fcntl(p.fd, libc::F_GETFL) };
    // SAFETY: as above.
    unsafe { libc::fcntl(p.fd, libc::F_SETFL, flags | libc::O_NONBLOCK) };
    let empty = p.event().map(|e| e.kind);
    assert_eq!(empty.unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    // SAFETY: as above.
    unsafe { libc::fcntl(p.fd, libc::F_SETFL, flags) };
    // A blocked thread gets the event that another one causes.
    let (fd, channel) = (p.fd, p.channel as usize);
    let reader = std::thread::spawn(move || {
        let p = std::mem::ManuallyDrop::new(Program {
            channel: channel as *mut Channel,
            fd,
        });
        p.event().unwrap().kind
    });
    std::thread::sleep(Duration::from_millis(50));
    let id = p.create(1, TCP);
    let mut body = vec![0; 28];
    body.extend(sockaddr(PORT));
    body.extend([id, 2000].map(u32::to_ne_bytes).concat());
    p.write(cmd::RESOLVE_IP, &body, 0).unwrap();
    assert_eq!(reader.join().unwrap(), event::ADDR_RESOLVED);
    p.destroy(id);
}

/// Checks that a child can't use its parent's objects, and that they outlive the child.
fn a_forked_child(p: &Program) {
    let listener = p.listener(100, TCP);
    // SAFETY: the child only makes calls that need no locks of other threads, and leaves at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = p.simple(cmd::LISTEN, listener, 1).is_err();
        let errno = io::Error::last_os_error().raw_os_error();
        // SAFETY: closes the child's copies.
        unsafe {
            libc::close(p.fd);
            libc::_exit(i32::from(!(refused && errno == Some(libc::EIO))))
        };
    }
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let active = p.routed(200, TCP, PORT);
    p.connect(active, b"after the fork");
    let request = p.expect(event::CONNECT_REQUEST);
    for id in [active, request.id, listener] {
        p.destroy(id);
    }
}

/// A child of vfork, which has the parent's memory, closes all descriptors before it executes a program: the parent's
/// channels go on.
fn a_vforked_child(p: &Program) {
    extern "C" fn closes(fd: *mut c_void) -> c_int {
        // SAFETY: the child's copy of the descriptor.
        unsafe { libc::close(fd as c_int) }
    }
    let listener = p.listener(100, TCP);
    let mut stack = vec![0u128; 16 << 10];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let top = stack.as_mut_ptr_range().end.cast();
    // SAFETY: the child has a stack of its own, that nobody looks at before it has ended.
    let child = unsafe { libc::clone(closes, top, flags, p.fd as *mut c_void) };
    assert!(child > 0, "{}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let active = p.routed(200, TCP, PORT);
    p.connect(active, b"after the vfork");
    let request = p.expect(event::CONNECT_REQUEST);
    for id in [active, request.id, listener] {
        p.destroy(id);
    }
}

/// A child by the system call alone, which runs no handlers of forks, has channels of its own. Called while the library has no threads
/// that could hold a lock.
fn a_cloned_child() {
    drop(Program::new());
    // SAFETY: a copy of this process, which makes its calls and ends.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    if child == 0 {
        let done = std::panic::catch_unwind(|| Program::new().create(1, TCP));
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = -1;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}

/// One test, because the library's device is the process's.
#[test]
fn commands_over_the_real_transport() {
    setup();
    a_cloned_child();
    let p = Program::new();
    connects_and_disconnects(&p);
    refusals(&p);
    a_listener_that_comes_late(&p);
    resolves_datagram_services(&p);
    waiting(&p);
    a_forked_child(&p);
    a_vforked_child(&p);
    drop(p);
    // Channels come and go; descriptors that are no channels are written to as ever.
    for _ in 0..100 {
        let p = Program::new();
        p.listener(1, TCP);
    }
    let mut file = tempfile::tempfile().unwrap();
    io::Write::write_all(&mut file, b"bytes").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5);
}
