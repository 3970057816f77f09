//! Receiving: a packet of the node is a message, or a notification.

use std::{
    mem::{self, MaybeUninit},
    os::fd::{FromRawFd as _, OwnedFd},
    ptr,
};

use libc::{c_int, c_void, iovec, msghdr, ssize_t, timeval};
use rds_local::{RecvHeader, RecvKind, SocketFlags, SocketKey};
use zerocopy::IntoBytes as _;

use super::{
    address::Named,
    cmsg::{self, Room, SOL_RDS},
    node, real,
    send::{MAX_PARTS, is_nonblocking, parts_of},
    socket::{self, Socket},
};
use crate::ret::{self, Errno, Result};

/// Bytes of a control message with an operation's status.
const STATUS_SPACE: usize = 32;
/// Words of room for the descriptors of a packet.
const CONTROL: usize = 8;

/// Room for a packet, in the frame that calls the C library. It has nothing to drop: the thread may be cancelled there.
struct Packet {
    head: [u8; RecvHeader::LEN],
    parts: [MaybeUninit<iovec>; MAX_PARTS],
    count: usize,
    /// Bytes of the program's parts.
    room: usize,
    /// Stands for the program's parts where there are too many.
    bounce: *mut [u8],
}

/// Result of a packet.
enum Outcome {
    /// The call's result.
    Done(usize),
    /// Nothing for the program: receive again.
    Again,
    /// The same, after what was peeked at is gone.
    Discard,
}

impl Packet {
    fn new() -> Self {
        Self {
            head: [0; RecvHeader::LEN],
            parts: [const { MaybeUninit::uninit() }; MAX_PARTS],
            count: 0,
            room: 0,
            bounce: ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0),
        }
    }

    fn add(&mut self, base: *mut c_void, len: usize) {
        if let Some(part) = self.parts.get_mut(self.count).filter(|_| len > 0) {
            part.write(iovec {
                iov_base: base,
                iov_len: len,
            });
            self.count += 1;
        }
    }

    /// Makes room for the header in front of the program's parts.
    ///
    /// # Safety
    /// As the message of `recvmsg`.
    unsafe fn prepare(&mut self, message: &msghdr) -> Result<()> {
        // SAFETY: the caller's promise.
        let parts = unsafe { parts_of(message) }?;
        if !message.msg_name.is_null() && message.msg_namelen.cast_signed() < 0 {
            return Err(Errno::INVAL);
        }
        self.room = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.iov_len));
        self.count = 0;
        let head = self.head.as_mut_ptr();
        self.add(head.cast(), RecvHeader::LEN);
        if parts.len() < MAX_PARTS {
            parts.iter().for_each(|part| self.add(part.iov_base, part.iov_len));
        } else {
            let bytes = vec![0u8; self.room.min(rds_local::MAX_MESSAGE)];
            self.bounce = Box::into_raw(bytes.into_boxed_slice());
            self.add(self.bounce.cast(), self.bounce.len());
        }
        Ok(())
    }

    /// Frees the bounce buffer.
    fn free(&mut self) {
        if !self.bounce.is_null() {
            // SAFETY: from a box, and used no more.
            drop(unsafe { Box::from_raw(self.bounce) });
            self.bounce = ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0);
        }
    }

    /// Puts data into the bounce buffer that came in a file.
    ///
    /// # Safety
    /// `wire` was received into this packet.
    unsafe fn take_file(&mut self, wire: &msghdr) -> Result<()> {
        let mut files = Vec::new();
        // SAFETY: it was received, and its descriptors are nobody else's.
        unsafe { cmsg::each_descriptor(wire, |fd| files.push(OwnedFd::from_raw_fd(fd))) };
        let Ok((header, _)) = RecvHeader::parse(&self.head) else {
            return Ok(());
        };
        if let Some(file) = files.first().filter(|_| header.is_in_file()) {
            let bytes = rds_local::read_memory_file(file, header.data_len())?;
            self.free();
            self.bounce = Box::into_raw(bytes.into_boxed_slice());
        }
        Ok(())
    }

    /// Gives the program what is in the bounce buffer.
    ///
    /// # Safety
    /// As the message of `recvmsg`.
    unsafe fn finish(&mut self, message: &msghdr, len: usize) -> Result<()> {
        if self.bounce.is_null() {
            return Ok(());
        }
        // SAFETY: from a box, and used no more.
        let bytes = unsafe { Box::from_raw(self.bounce) };
        self.bounce = ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0);
        let mut rest = &bytes[..len.min(bytes.len())];
        // SAFETY: the caller's promise.
        for part in unsafe { parts_of(message) }? {
            let (here, later) = rest.split_at(part.iov_len.min(rest.len()));
            // SAFETY: likewise.
            unsafe { ptr::copy_nonoverlapping(here.as_ptr(), part.iov_base.cast(), here.len()) };
            rest = later;
        }
        Ok(())
    }
}

/// Receives a message.
///
/// # Safety
/// As the C library's `recvmsg`, on an RDS socket with this key.
pub(crate) unsafe fn message(key: SocketKey, fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    let mut packet = Packet::new();
    // SAFETY: the caller's promise.
    if let Err(e) = ret::run(|| unsafe { packet.prepare(message) }) {
        e.set();
        return -1;
    }
    if flags & libc::MSG_OOB != 0 {
        nothing(message);
        return 0;
    }
    let done = loop {
        // SAFETY: the caller's promise.
        match ret::run(|| unsafe { from_aside(&mut packet, key, fd, message, flags) }) {
            Ok(None) => {}
            Ok(Some(len)) => break Ok(len),
            Err(e) => break Err(e),
        }
        let mut control = [0u64; CONTROL];
        // SAFETY: zeroes are a message without name, parts and control messages.
        let mut wire: msghdr = unsafe { mem::zeroed() };
        (wire.msg_iov, wire.msg_iovlen) = (packet.parts.as_mut_ptr().cast(), packet.count);
        (wire.msg_control, wire.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        let passed = flags & (libc::MSG_DONTWAIT | libc::MSG_PEEK) | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the packet's parts are ours and the program's.
        let got = unsafe { real::recvmsg(fd, &raw mut wire, passed) };
        let failed = (got < 0).then(Errno::last);
        let outcome = ret::run(|| match failed {
            // SAFETY: the caller's promise; the packet was received.
            None => unsafe {
                packet
                    .take_file(&wire)
                    .and_then(|()| took(&mut packet, key, fd, message, got as usize, flags))
            },
            Some(Errno(libc::EAGAIN)) if !is_nonblocking(fd, flags) => Err(Errno(libc::ETIMEDOUT)),
            Some(Errno(libc::ECONNRESET)) => Err(node::gone()),
            Some(e) => Err(e),
        });
        match outcome {
            Ok(Outcome::Done(len)) => break Ok(len),
            Ok(Outcome::Again) => {}
            Ok(Outcome::Discard) => ret::value((), || discard(key, fd)),
            Err(e) => break Err(e),
        }
    };
    ret::value((), || packet.free());
    match done {
        Ok(len) => len as ssize_t,
        Err(e) => {
            e.set();
            -1
        }
    }
}

/// The message has nothing.
fn nothing(message: &mut msghdr) {
    (message.msg_namelen, message.msg_controllen, message.msg_flags) = (0, 0, 0);
}

/// Gives the program what was set aside, if there is something.
///
/// # Safety
/// As for [`message`].
unsafe fn from_aside(
    packet: &mut Packet,
    key: SocketKey,
    fd: c_int,
    message: &mut msghdr,
    flags: c_int,
) -> Result<Option<usize>> {
    let socket = socket::with_key(key, fd)?;
    let Some(bytes) = socket.aside(flags & libc::MSG_PEEK != 0) else {
        return Ok(None);
    };
    let (head, data) = bytes.split_first_chunk().ok_or(Errno::IO)?;
    packet.head = *head;
    packet.free();
    packet.bounce = Box::into_raw(data.into());
    // SAFETY: the caller's promise.
    match unsafe { took(packet, key, fd, message, bytes.len(), flags)? } {
        Outcome::Done(len) => Ok(Some(len)),
        Outcome::Again | Outcome::Discard => Ok(None),
    }
}

/// Gives the program what has come.
///
/// # Safety
/// As for [`message`].
unsafe fn took(
    packet: &mut Packet,
    key: SocketKey,
    fd: c_int,
    message: &mut msghdr,
    got: usize,
    flags: c_int,
) -> Result<Outcome> {
    match got {
        0 => return Err(node::gone()),
        1..RecvHeader::LEN => return Err(Errno(libc::EPROTO)),
        _ => {}
    }
    let (header, kind) = RecvHeader::parse(&packet.head).map_err(|e| Errno(libc::EPROTO).because(e))?;
    let peeks = flags & libc::MSG_PEEK != 0;
    let socket = socket::with_key(key, fd)?;
    // SAFETY: the caller's promise.
    let mut room = unsafe { Room::of(message) };
    let control_len = room.left();
    let mut flags_out = flags & libc::MSG_CMSG_CLOEXEC;
    let mut result = 0;
    let mut name_len = 0;
    match kind {
        RecvKind::Wake if peeks => return Ok(Outcome::Discard),
        RecvKind::Wake => return Ok(Outcome::Again),
        RecvKind::Congestion(ports) => {
            // The kernel's is gone when it was peeked at.
            if peeks {
                discard(key, fd);
            }
            room.put(SOL_RDS, cmsg::CONG_UPDATE, &ports.to_ne_bytes());
        }
        RecvKind::Notification { token, status } => {
            // Gone when it was peeked at, as the kernel's.
            if peeks {
                discard(key, fd);
            }
            put_status(&mut room, token, status);
            while room.left() >= STATUS_SPACE
                && let Some((token, status)) = next_status(key, fd)
            {
                put_status(&mut room, token, status);
            }
        }
        RecvKind::Message(cookie) => {
            let whole = header.data_len();
            let here = whole.min(packet.room);
            // SAFETY: the caller's promise.
            unsafe { packet.finish(message, here)? };
            result = here;
            if here < whole {
                flags_out |= libc::MSG_TRUNC;
                if flags & libc::MSG_TRUNC != 0 {
                    result = whole;
                }
            }
            if !peeks {
                socket.page.add_received(whole);
            }
            put_all(&socket, &header, cookie, &mut room);
            if let Some(from) = header.from().filter(|_| !message.msg_name.is_null()) {
                let named = Named::new(from);
                let bytes = named.bytes();
                let fits = bytes.len().min(message.msg_namelen as usize);
                // SAFETY: the caller's promise.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), message.msg_name.cast(), fits) };
                name_len = bytes.len() as u32;
            }
        }
    }
    if room.is_cut {
        flags_out |= libc::MSG_CTRUNC;
    }
    if !message.msg_name.is_null() {
        message.msg_namelen = name_len;
    }
    message.msg_controllen = control_len - room.left();
    message.msg_flags = flags_out;
    Ok(Outcome::Done(result))
}

/// Adds an operation's status (`struct rds_rdma_notify`).
fn put_status(room: &mut Room, token: u64, status: i32) {
    let [low, high] = [token.to_ne_bytes(), u64::from(status.cast_unsigned()).to_ne_bytes()];
    room.put(SOL_RDS, cmsg::RDMA_STATUS, &[low, high].concat());
}

/// Takes the notification that is next, if one is.
fn next_status(key: SocketKey, fd: c_int) -> Option<(u64, i32)> {
    let mut head = [0u8; RecvHeader::LEN];
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: room for the header.
    let got = unsafe { real::recv(fd, head.as_mut_ptr().cast(), head.len(), flags) };
    let (_, RecvKind::Notification { .. }) = RecvHeader::parse(head.get(..usize::try_from(got).ok()?)?).ok()? else {
        return None;
    };
    // Another thread may be faster.
    let bytes = take(fd)?;
    match RecvHeader::parse(&bytes) {
        Ok((_, RecvKind::Notification { token, status })) => Some((token, status)),
        _ => {
            socket::with_key(key, fd).ok()?.set_aside(bytes);
            None
        }
    }
}

/// Takes the next packet, if there is one.
fn take(fd: c_int) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; RecvHeader::LEN + rds_local::MAX_MESSAGE];
    // SAFETY: room for any packet.
    let got = unsafe { real::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
    bytes.truncate(usize::try_from(got).ok()?);
    Some(bytes)
}

/// Adds the control messages of a message.
fn put_all(socket: &Socket, header: &RecvHeader, cookie: Option<u64>, room: &mut Room) {
    if let Some(cookie) = cookie {
        room.put(SOL_RDS, cmsg::RDMA_DEST, &cookie.to_ne_bytes());
    }
    if socket.page.flag(SocketFlags::Timestamp) {
        let nanoseconds = header.time();
        let time = timeval {
            tv_sec: nanoseconds.div_euclid(1_000_000_000),
            tv_usec: nanoseconds.rem_euclid(1_000_000_000) / 1000,
        };
        let words = [time.tv_sec, time.tv_usec];
        room.put(libc::SOL_SOCKET, libc::SO_TIMESTAMP, words.as_bytes());
    }
}

/// Removes the packet that was peeked at and is not for the program. A message that has come into its place meanwhile, as another thread
/// was faster, is set aside.
fn discard(key: SocketKey, fd: c_int) {
    let Ok(socket) = socket::with_key(key, fd) else { return };
    let Some(bytes) = take(fd) else { return };
    if matches!(RecvHeader::parse(&bytes), Ok((_, RecvKind::Message(_)))) {
        socket.set_aside(bytes);
    }
}
