//! Packets of unix sockets, with descriptors.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
    process::geteuid,
};

/// Most descriptors of a packet.
pub const MAX_FDS: usize = 2;

/// Packet that has come.
#[derive(Debug)]
pub struct Record {
    /// Its bytes in the buffer.
    pub len: usize,
    /// The buffer was too short for it.
    pub is_cut: bool,
    /// Descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
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
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let got = loop {
        match rustix::net::recvmsg(&socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            // The other side closed its end before it read all. What it sent before comes next.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            got => break got?,
        }
    };
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(list) => Some(list),
        _ => None,
    });
    let fds: Vec<OwnedFd> = rights.flatten().collect();
    Ok((got.bytes > 0).then_some(Record {
        len: got.bytes,
        is_cut: got.flags.contains(ReturnFlags::TRUNC),
        fds,
    }))
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
