//! Calls that send and receive, in front of the C library's.
//!
//! A thread may be cancelled in the C library's, so that these frames have nothing to drop.

use std::{mem, ptr};

use libc::{c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rds_local::SocketKey;

use super::{cmsg, fds, real, receive, send};

/// `MSG_EOR`, which the kernel adds to what is written to sockets of packets, and which RDS refuses.
const WRITTEN: c_int = libc::MSG_EOR;
/// `MSG_BATCH` of the kernel, which `sendmmsg` adds to all messages but the last, and which RDS refuses.
const BATCH: c_int = 0x4_0000;

/// A message of these parts.
fn message(parts: *const iovec, count: usize) -> msghdr {
    // SAFETY: zeroes are a message without name, parts and control messages.
    let mut message: msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (parts.cast_mut(), count);
    message
}

fn part(data: *const c_void, len: size_t) -> iovec {
    iovec {
        iov_base: data.cast_mut(),
        iov_len: len,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    data: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    let Some(key) = fds::key(fd) else {
        // SAFETY: the caller's.
        return unsafe { real::sendto(fd, data, len, flags, to, to_len) };
    };
    let part = part(data, len);
    let mut message = message(&raw const part, 1);
    (message.msg_name, message.msg_namelen) = (to.cast_mut().cast(), to_len);
    // SAFETY: the caller's.
    unsafe { send::message(key, fd, &message, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn send(fd: c_int, data: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    let Some(key) = fds::key(fd) else {
        // SAFETY: the caller's.
        return unsafe { real::send(fd, data, len, flags) };
    };
    let part = part(data, len);
    // SAFETY: the caller's.
    unsafe { send::message(key, fd, &message(&raw const part, 1), flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if let Some(key) = fds::key(fd)
        // SAFETY: the caller's.
        && let Some(message) = unsafe { message.as_ref() }
    {
        // SAFETY: likewise.
        return unsafe { send::message(key, fd, message, flags) };
    }
    // SAFETY: likewise.
    unsafe { real::sendmsg(fd, message, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let Some(key) = fds::key(fd) else {
        // SAFETY: the caller's.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    };
    for at in 0..count {
        // SAFETY: the caller's messages.
        let entry = unsafe { &mut *messages.add(at as usize) };
        let flags = if at + 1 < count { flags | BATCH } else { flags };
        // SAFETY: likewise.
        match unsafe { send::message(key, fd, &entry.msg_hdr, flags) } {
            ..0 if at == 0 => return -1,
            ..0 => return at as c_int,
            sent => entry.msg_len = sent as c_uint,
        }
    }
    count as c_int
}

/// Writes to an RDS socket.
///
/// # Safety
/// As for `write`.
pub(crate) unsafe fn write(key: SocketKey, fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    let part = part(data, len);
    // SAFETY: the caller's.
    unsafe { send::message(key, fd, &message(&raw const part, 1), WRITTEN) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    let (Some(key), Ok(parts_count)) = (fds::key(fd), usize::try_from(count)) else {
        // SAFETY: the caller's.
        return unsafe { real::writev(fd, parts, count) };
    };
    // SAFETY: likewise.
    unsafe { send::message(key, fd, &message(parts, parts_count), WRITTEN) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::recvfrom(fd, data, len, flags, from, from_len) },
        // SAFETY: likewise.
        Some(key) => unsafe { receive_from(key, fd, part(data, len), flags, from, from_len) },
    }
}

/// Receives a message and its sender.
///
/// # Safety
/// As for `recvfrom`.
unsafe fn receive_from(
    key: SocketKey,
    fd: c_int,
    part: iovec,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let mut message = message(&raw const part, 1);
    if !from.is_null() && !from_len.is_null() {
        // SAFETY: the caller's.
        (message.msg_name, message.msg_namelen) = (from.cast(), unsafe { from_len.read() });
    }
    // SAFETY: likewise.
    let got = unsafe { receive::message(key, fd, &mut message, flags) };
    if got >= 0 && !message.msg_name.is_null() {
        // SAFETY: likewise.
        unsafe { from_len.write(message.msg_namelen) };
    }
    got
}

/// Receives a message without its sender.
///
/// # Safety
/// As for `recv`.
unsafe fn receive(key: SocketKey, fd: c_int, part: iovec, flags: c_int) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { receive_from(key, fd, part, flags, ptr::null_mut(), ptr::null_mut()) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recv(fd: c_int, data: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    match fds::key(fd) {
        // SAFETY: the caller's.
        None => unsafe { real::recv(fd, data, len, flags) },
        // SAFETY: likewise.
        Some(key) => unsafe { receive(key, fd, part(data, len), flags) },
    }
}

/// Reads from an RDS socket. The kernel reads nothing into no room.
///
/// # Safety
/// As for `read`.
unsafe fn read_parts(key: SocketKey, fd: c_int, parts: *const iovec, count: usize) -> ssize_t {
    let mut message = message(parts, count);
    // SAFETY: the caller's.
    let room = match unsafe { send::parts_of(&message) } {
        Ok(parts) => parts.iter().any(|part| part.iov_len > 0),
        Err(e) => {
            e.set();
            return -1;
        }
    };
    match room {
        // SAFETY: likewise.
        true => unsafe { receive::message(key, fd, &mut message, 0) },
        false => 0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t {
    let Some(key) = fds::key(fd) else {
        // SAFETY: the caller's.
        return unsafe { real::read(fd, data, len) };
    };
    let part = part(data, len);
    // SAFETY: likewise.
    unsafe { read_parts(key, fd, &raw const part, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    let (Some(key), Ok(parts_count)) = (fds::key(fd), usize::try_from(count)) else {
        // SAFETY: the caller's.
        return unsafe { real::readv(fd, parts, count) };
    };
    // SAFETY: likewise.
    unsafe { read_parts(key, fd, parts, parts_count) }
}

// The fortified ones end the program when there is less room than bytes are asked for, which the C library does.

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __read_chk(fd: c_int, data: *mut c_void, len: size_t, room: size_t) -> ssize_t {
    let Some(key) = fds::key(fd).filter(|_| len <= room) else {
        // SAFETY: the caller's.
        return unsafe { real::__read_chk(fd, data, len, room) };
    };
    let part = part(data, len);
    // SAFETY: likewise.
    unsafe { read_parts(key, fd, &raw const part, 1) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    match fds::key(fd).filter(|_| len <= room) {
        // SAFETY: the caller's.
        None => unsafe { real::__recv_chk(fd, data, len, room, flags) },
        // SAFETY: likewise.
        Some(key) => unsafe { receive(key, fd, part(data, len), flags) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    match fds::key(fd).filter(|_| len <= room) {
        // SAFETY: the caller's.
        None => unsafe { real::__recvfrom_chk(fd, data, len, room, flags, from, from_len) },
        // SAFETY: likewise.
        Some(key) => unsafe { receive_from(key, fd, part(data, len), flags, from, from_len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if let Some(key) = fds::key(fd)
        // SAFETY: the caller's.
        && let Some(message) = unsafe { message.as_mut() }
    {
        // SAFETY: likewise.
        return unsafe { receive::message(key, fd, message, flags) };
    }
    // SAFETY: likewise.
    let got = unsafe { real::recvmsg(fd, message, flags) };
    if got >= 0 {
        // SAFETY: it was received.
        unsafe { cmsg::each_descriptor(&*message, fds::forget) };
    }
    got
}

/// A later time on the clock that counts.
fn now() -> timespec {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills a local.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now
}

/// Nanoseconds of a time.
fn nanoseconds(time: &timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    time: *mut timespec,
) -> c_int {
    let Some(key) = fds::key(fd) else {
        // SAFETY: the caller's.
        let got = unsafe { real::recvmmsg(fd, messages, count, flags, time) };
        for at in 0..usize::try_from(got).unwrap_or(0) {
            // SAFETY: they were received.
            unsafe { cmsg::each_descriptor(&(*messages.add(at)).msg_hdr, fds::forget) };
        }
        return got;
    };
    // SAFETY: the caller's.
    let end = unsafe { time.as_ref() }.map(|time| nanoseconds(&now()).saturating_add(nanoseconds(time)));
    let mut flags = flags;
    for at in 0..count {
        // SAFETY: the caller's messages.
        let entry = unsafe { &mut *messages.add(at as usize) };
        // SAFETY: likewise.
        match unsafe { receive::message(key, fd, &mut entry.msg_hdr, flags & !libc::MSG_WAITFORONE) } {
            ..0 if at == 0 => return -1,
            ..0 => return at as c_int,
            got => entry.msg_len = got as c_uint,
        }
        if flags & libc::MSG_WAITFORONE != 0 {
            flags |= libc::MSG_DONTWAIT;
        }
        // As the kernel does, the time is looked at after each message.
        if end.is_some_and(|end| nanoseconds(&now()) >= end) {
            return at as c_int + 1;
        }
    }
    count as c_int
}
