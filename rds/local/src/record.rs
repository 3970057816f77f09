//! Packets of unix sockets, with descriptors.

use std::{
    io::{self, IoSlice},
    mem::{self, MaybeUninit},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    path::Path,
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType,
    },
    process::geteuid,
};

/// Most descriptors of a packet.
pub const MAX_FDS: usize = 2;
/// Words of room for those, and for the process that has sent it.
const CONTROL: usize = 8;

/// Packet that has come.
#[derive(Debug)]
pub struct Record {
    /// Its bytes in the buffer.
    pub len: usize,
    /// The buffer was too short for it.
    pub is_cut: bool,
    /// Descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// Process that has sent it, as the system says; 0 if the socket does not ask for it (`SO_PASSCRED`), or if the process is of a PID
    /// namespace that can't be seen from here.
    pub process: u32,
}

/// Sends a packet.
///
/// # Errors
/// Errors of `sendmsg`; `EINTR` is not one.
pub fn send(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match rustix::net::sendmsg(&socket, parts, &mut control, flags | SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Receives a packet. `None`: the other side has closed its end.
///
/// # Errors
/// Errors of `recvmsg`; `EINTR` is not one.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], flags: RecvFlags) -> rustix::io::Result<Option<Record>> {
    let mut control = [0u64; CONTROL];
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: zeroes are a message without name, parts and control messages.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    let flags = flags.bits() as i32 | libc::MSG_CMSG_CLOEXEC;
    let len = loop {
        // SAFETY: the parts and control messages are locals, and the buffer. Not the C library's function, which the shim stands in
        // front of. rustix has no credentials of processes of other PID namespaces, whose number is 0.
        let got = unsafe { libc::syscall(libc::SYS_recvmsg, socket.as_fd().as_raw_fd(), &raw mut message, flags) };
        if let Ok(len) = usize::try_from(got) {
            break len;
        }
        match io::Error::last_os_error().raw_os_error().map(Errno::from_raw_os_error) {
            // The other side closed its end before it read all. What it sent before comes next.
            Some(Errno::INTR | Errno::CONNRESET) => {}
            e => return Err(e.unwrap_or(Errno::IO)),
        }
    };
    let mut record = Record {
        len,
        is_cut: message.msg_flags & libc::MSG_TRUNC != 0,
        fds: Vec::new(),
        process: 0,
    };
    // SAFETY: it was received.
    unsafe { take_control(&message, &mut record) };
    Ok((len > 0).then_some(record))
}

/// Takes what came beside the bytes.
///
/// # Safety
/// The message was received just now: its descriptors are nobody's.
unsafe fn take_control(message: &libc::msghdr, record: &mut Record) {
    // SAFETY: the caller's promise.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null or one of the message's, which the system made.
    while let Some(header) = unsafe { next.as_ref() } {
        // SAFETY: likewise.
        let (data, len) = unsafe { (libc::CMSG_DATA(header), header.cmsg_len - libc::CMSG_LEN(0) as usize) };
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for index in 0..len / size_of::<RawFd>() {
                    // SAFETY: so many numbers are there, of descriptors that are nobody's.
                    record
                        .fds
                        .push(unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(index).read_unaligned()) });
                }
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                // SAFETY: three integers are there.
                let credentials = unsafe { data.cast::<libc::ucred>().read_unaligned() };
                record.process = u32::try_from(credentials.pid).unwrap_or(0);
            }
            _ => {}
        }
        // SAFETY: the message's, and the header is one of it.
        next = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

/// Memory that packets take which `socket` has sent and the other side has not read, as the system counts it: 0 if there are none.
///
/// # Errors
/// Errors of `ioctl`.
pub fn unread(socket: impl AsFd) -> rustix::io::Result<usize> {
    // SAFETY: `SIOCOUTQ` writes an int.
    let bytes: i32 = unsafe {
        let getter = rustix::ioctl::Getter::<{ libc::TIOCOUTQ as rustix::ioctl::Opcode }, i32>::new();
        rustix::ioctl::ioctl(socket, getter)
    }?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// Makes a sealed memory file of bytes.
///
/// # Errors
/// When the system has no memory or descriptors.
pub fn memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("ferroce-rds", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = rustix::io::write(&file, rest)?;
        rest = rest.get(written..).unwrap_or_default();
    }
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL,
    )?;
    Ok(file)
}

/// Reads `len` bytes of a memory file, fewer if it has fewer.
///
/// # Errors
/// Errors of `pread`.
pub fn read_memory_file(file: impl AsFd, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pread(&file, rest, done as u64)? {
            0 => break,
            read => done += read,
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// Connects to the node of a socket file; `None` when none is running.
///
/// # Errors
/// When another user serves the file, who would get what the program sends; those of `connect`.
pub fn connect(path: &Path) -> io::Result<Option<OwnedFd>> {
    let addr = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    match rustix::net::connect(&socket, &addr) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    match peer.uid == geteuid() {
        true => Ok(Some(socket)),
        false => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} is served by user {}", path.display(), peer.uid),
        )),
    }
}
