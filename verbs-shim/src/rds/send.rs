//! Sending: a message is one packet to the node.
//!
//! What has to be refused at once is refused here. A full send buffer, time-outs and signals are those of the descriptor itself.

use std::{mem::MaybeUninit, net::SocketAddr, ptr};

use libc::{c_int, c_void, iovec, msghdr, ssize_t};
use rds_local::{Answer, MAX_MESSAGE, Op, Request, SendHeader, SocketFlags, SocketKey};
use zerocopy::IntoBytes as _;

use super::{
    address::{self, Name, Parsed},
    cmsg, control, node,
    operation::{self, Wanted},
    real,
    socket::{self, Socket},
};
use crate::ret::{self, Errno, Result};

/// Most parts of a message (`UIO_MAXIOV`).
pub(crate) const MAX_PARTS: usize = 1024;
/// Flags of `sendmsg` that RDS knows.
const KNOWN_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_ZEROCOPY;

/// A packet, in the frame that calls the C library. It has nothing to drop: the thread may be cancelled there. Memory that it has then is
/// lost.
struct Packet {
    header: MaybeUninit<[u8; SendHeader::LEN]>,
    /// The operation's bytes, or those and the data.
    block: *mut [u8],
    parts: [MaybeUninit<iovec>; MAX_PARTS],
    count: usize,
    data_len: usize,
    /// Cookie of memory that was registered for it.
    mapped: Option<u64>,
}

/// Next step.
enum Step {
    /// The packet is to be sent.
    Send,
    /// The destination is congested: this descriptor is readable when it is not.
    Wait(c_int),
}

/// The program's parts of a message.
///
/// # Safety
/// As the message of `sendmsg`.
pub(crate) unsafe fn parts_of(message: &msghdr) -> Result<&[iovec]> {
    match message.msg_iovlen {
        0 => Ok(&[]),
        1..=MAX_PARTS if message.msg_iov.is_null() => Err(Errno::FAULT),
        // SAFETY: the caller's promise.
        count @ 1..=MAX_PARTS => Ok(unsafe { std::slice::from_raw_parts(message.msg_iov, count) }),
        _ => Err(Errno(libc::EMSGSIZE)),
    }
}

/// Destination of a message in its name; `None`: where the socket is connected.
///
/// # Safety
/// As the message of `sendmsg`.
unsafe fn destination(message: &msghdr) -> Result<Option<SocketAddr>> {
    let len = usize::try_from(message.msg_namelen.cast_signed()).map_err(|_| Errno::INVAL)?;
    if message.msg_name.is_null() || len == 0 {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let name = unsafe { Name::of_message(message.msg_name, len.min(size_of::<libc::sockaddr_storage>())) };
    if name.len() < address::V4_LEN {
        return Err(Errno::INVAL);
    }
    match name.parse() {
        Parsed::V4(ip, _) if address::is_no_host(ip) => Err(Errno::INVAL),
        Parsed::V6(ip, ..) if address::is_no_host_v6(ip) => Err(Errno::INVAL),
        Parsed::V6(ip, _, 0) if address::is_link_local(ip) => Err(Errno::INVAL),
        other => other.addr().map(Some).ok_or(Errno::INVAL),
    }
}

/// Whether a call on a descriptor with these flags is not to wait.
pub(crate) fn is_nonblocking(fd: c_int, flags: c_int) -> bool {
    // SAFETY: asks for flags.
    flags & libc::MSG_DONTWAIT != 0
        || unsafe { real::fcntl(fd, libc::F_GETFL, ptr::null_mut()) } & libc::O_NONBLOCK != 0
}

/// Refuses what the socket can't send.
fn check(socket: &Socket, to: Option<SocketAddr>, len: usize) -> Result<SocketAddr> {
    let page = &socket.page;
    let not_connected = || Errno(libc::ENOTCONN);
    let bound = page.bound().ok_or_else(not_connected)?;
    let target = to.or_else(|| page.peer()).ok_or_else(not_connected)?;
    if to.is_some() && target.is_ipv4() != bound.is_ipv4() {
        return Err(Errno::NOTSUP);
    }
    if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (target, bound)
        && to.scope_id() != own.scope_id()
        && to.scope_id() != 0
        && own.scope_id() != 0
    {
        return Err(Errno::INVAL);
    }
    if len > MAX_MESSAGE || len > page.buffers().0 {
        return Err(Errno(libc::EMSGSIZE));
    }
    Ok(target)
}

impl Packet {
    fn new() -> Self {
        Self {
            header: MaybeUninit::uninit(),
            block: ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0),
            parts: [const { MaybeUninit::uninit() }; MAX_PARTS],
            count: 0,
            data_len: 0,
            mapped: None,
        }
    }

    fn add(&mut self, base: *const c_void, len: usize) {
        if let Some(part) = self.parts.get_mut(self.count).filter(|_| len > 0) {
            part.write(iovec {
                iov_base: base.cast_mut(),
                iov_len: len,
            });
            self.count += 1;
        }
    }

    /// Makes the packet, if it may be sent now.
    ///
    /// # Safety
    /// As the arguments of `sendmsg`.
    unsafe fn prepare(&mut self, key: SocketKey, fd: c_int, message: &msghdr, flags: c_int) -> Result<Step> {
        let socket = socket::with_key(key, fd)?;
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Errno::NOTSUP);
        }
        // SAFETY: the caller's promise.
        let (to, parts, control) = unsafe { (destination(message)?, parts_of(message)?, control_of(message)?) };
        let len = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.iov_len));
        let target = check(&socket, to, len)?;
        let sent = cmsg::read(control).ok_or(Errno::INVAL)?;
        if flags & libc::MSG_ZEROCOPY != 0 {
            return Err(operation::zero_copy(&sent));
        }
        let wanted = operation::read(&sent)?;
        if socket.page.some_port_is_congested()
            && let Some(waits) = wait_for_port(&socket, target, fd, flags)?
        {
            return Ok(Step::Wait(waits));
        }
        let op = match wanted {
            Wanted::Op(mut op) => operation::check(&mut op, &socket).map(|()| op)?,
            Wanted::Map(args) => {
                let cookie = operation::map(&socket, &args)?;
                self.mapped = Some(cookie);
                Op::Dest(cookie)
            }
        };
        if !socket.page.flag(SocketFlags::Sent) {
            socket.page.set_flag(SocketFlags::Sent, true);
        }
        let mut block = op.to_bytes();
        let header = SendHeader::new(to, &op, block.len(), len);
        self.header.write(header.as_bytes().try_into().map_err(|_| Errno::IO)?);
        self.data_len = len;
        let whole = parts.len() + 2 <= MAX_PARTS;
        if !whole {
            for part in parts {
                // SAFETY: the caller's promise.
                block.extend(unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) });
            }
        }
        self.count = 0;
        self.add(self.header.as_ptr().cast(), SendHeader::LEN);
        if !block.is_empty() {
            self.block = Box::into_raw(block.into_boxed_slice());
            self.add(self.block.cast(), self.block.len());
        }
        for part in parts.iter().filter(|_| whole) {
            self.add(part.iov_base, part.iov_len);
        }
        Ok(Step::Send)
    }

    /// Frees what the packet has.
    fn free(&mut self) {
        if !self.block.is_null() {
            // SAFETY: from a box, and used no more.
            drop(unsafe { Box::from_raw(self.block) });
            self.block = ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0);
        }
    }
}

/// The program's control messages.
///
/// # Safety
/// As the message of `sendmsg`.
unsafe fn control_of(message: &msghdr) -> Result<&[u8]> {
    match message.msg_controllen {
        0 => Ok(&[]),
        _ if message.msg_control.is_null() => Ok(&[]),
        len if len > c_int::MAX as usize => Err(Errno(libc::ENOBUFS)),
        // SAFETY: the caller's promise.
        len => Ok(unsafe { std::slice::from_raw_parts(message.msg_control.cast(), len) }),
    }
}

/// Asks whether a destination is congested: then a call that does not wait is refused, and another gets a descriptor to wait for.
fn wait_for_port(socket: &Socket, target: SocketAddr, fd: c_int, flags: c_int) -> Result<Option<c_int>> {
    let ask = |wait| Request::Congestion {
        socket: socket.key,
        to: Some(target),
        wait,
    };
    match control::ask(&ask(false), &[]) {
        Ok(_) => Ok(None),
        Err(Errno(libc::ENOBUFS)) if !is_nonblocking(fd, flags) => control::ask_later(&ask(true)).map(Some),
        Err(e) => Err(e),
    }
}

/// Sends a message.
///
/// # Safety
/// As the C library's `sendmsg`, on an RDS socket with this key.
pub(crate) unsafe fn message(key: SocketKey, fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    let mut packet = Packet::new();
    loop {
        // SAFETY: the caller's promise.
        match ret::run(|| unsafe { packet.prepare(key, fd, message, flags) }) {
            Ok(Step::Send) => break,
            Ok(Step::Wait(descriptor)) => {
                let mut answer = [0u8; Answer::LEN];
                // SAFETY: room for the answer.
                let got = unsafe { real::recv(descriptor, answer.as_mut_ptr().cast(), answer.len(), 0) };
                if let Err(e) = ret::run(|| finish_wait(descriptor, got, &answer)) {
                    e.set();
                    return -1;
                }
            }
            Err(e) => {
                e.set();
                return -1;
            }
        }
    }
    // SAFETY: zeroes are a message without name, parts and control messages.
    let mut wire: msghdr = unsafe { std::mem::zeroed() };
    (wire.msg_iov, wire.msg_iovlen) = (packet.parts.as_mut_ptr().cast(), packet.count);
    let passed = flags & libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the packet's parts are ours and the program's.
    let mut sent = unsafe { real::sendmsg(fd, &raw const wire, passed) };
    if sent < 0 && Errno::last() == Errno(libc::EMSGSIZE) && grow(fd, &packet) {
        // SAFETY: likewise.
        sent = unsafe { real::sendmsg(fd, &raw const wire, passed) };
    }
    let failed = (sent < 0).then(Errno::last);
    let done = ret::run(|| {
        packet.free();
        if let (Some(_), Some(cookie)) = (failed, packet.mapped)
            && let Ok(socket) = socket::with_key(key, fd)
        {
            operation::unmap(&socket, cookie);
        }
        match failed {
            None => Ok(()),
            Some(Errno(libc::EAGAIN)) if !is_nonblocking(fd, flags) => Err(Errno(libc::ETIMEDOUT)),
            Some(Errno(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN)) => Err(node::gone()),
            Some(e) => Err(e),
        }
    });
    match done {
        Ok(()) => packet.data_len as ssize_t,
        Err(e) => {
            e.set();
            -1
        }
    }
}

/// Makes the descriptor's own send buffer as long as a packet needs: the operation comes beside the data.
fn grow(fd: c_int, packet: &Packet) -> bool {
    let len = c_int::try_from(packet.data_len + packet.block.len()).unwrap_or(c_int::MAX / 2);
    let value = (&raw const len).cast();
    // SAFETY: a local of this length.
    unsafe { real::setsockopt(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, value, size_of_val(&len) as u32) == 0 }
}

/// Ends the wait for a port.
fn finish_wait(descriptor: c_int, got: ssize_t, answer: &[u8]) -> Result<()> {
    let failed = Errno::last();
    // SAFETY: ours, from `control::ask_later`.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(descriptor) });
    match usize::try_from(got) {
        Err(_) => Err(failed),
        Ok(0) => Err(node::gone()),
        Ok(got) => control::result(answer.get(..got).unwrap_or_default()).map(drop),
    }
}
