//! Records of a unix socket, with descriptors.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};
use serde::{Serialize, de::DeserializeOwned};

use crate::proto::MAX_GROUPS;

/// The most descriptors that the kernel takes with one message (`SCM_MAX_FD`).
const MAX_STORED: usize = 253;
/// The record that a vault holds.
const STORED: &[u8] = b"ferroce vault 1";
/// The longest record. A socket's default send buffer (208 KiB) holds it.
pub(crate) const MAX_RECORD: usize = 96 << 10;
/// The most descriptors of a record: socket and vault of each group that a broker has open.
pub(crate) const MAX_FDS: usize = 2 * MAX_GROUPS;

/// A received record.
pub(crate) struct Record<T> {
    pub(crate) message: T,
    pub(crate) payload: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
    /// Descriptors are missing: this process can have no more.
    pub(crate) lacks_fds: bool,
}

/// Reason why a receive gave no record.
#[derive(Debug)]
pub(crate) enum RecvError {
    /// None is there now.
    Empty,
    /// The other side is gone.
    Closed,
    /// It is not what the protocol has.
    Malformed(String),
}

/// One record as bytes.
pub(crate) fn encode<T: Serialize>(message: &T, payload: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let len = u32::try_from(bytes.len() - 4).map_err(|_| io::ErrorKind::InvalidInput)?;
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(payload);
    if bytes.len() > MAX_RECORD {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a record too long"));
    }
    Ok(bytes)
}

/// The message of a record, and what follows it.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, Vec<u8>), String> {
    let (len, rest) = bytes.split_first_chunk::<4>().ok_or("a record without a length")?;
    let json = rest
        .get(..u32::from_le_bytes(*len) as usize)
        .ok_or("a record shorter than it says")?;
    let message = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    Ok((message, rest[json.len()..].to_vec()))
}

/// Sends a record that is encoded already.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_STORED))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let mut flags = SendFlags::NOSIGNAL;
    flags.set(SendFlags::DONTWAIT, !wait);
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives bytes, and `max` descriptors at most with them.
fn receive_raw(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: RecvFlags,
    max: usize,
) -> rustix::io::Result<(usize, ReturnFlags, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_STORED))];
    let mut control = RecvAncillaryBuffer::new(&mut space[..rustix::cmsg_space!(ScmRights(max))]);
    let mut parts = [IoSliceMut::new(buffer)];
    let got = rustix::net::recvmsg(socket, &mut parts, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(list) => Some(list),
        _ => None,
    });
    Ok((got.bytes, got.flags, rights.flatten().collect()))
}

/// Records that wait until a socket has room for them, in order.
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
}

impl Outbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the number of bytes that wait.
    pub(crate) fn bytes(&self) -> usize {
        self.waiting.iter().map(|(bytes, _)| bytes.len()).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    pub(crate) fn push(&mut self, record: Vec<u8>, fds: Vec<OwnedFd>) {
        self.waiting.push_back((record, fds));
    }

    /// Sends records as long as there is room. A peer that has closed its end is no error: receiving reports it, after what the
    /// peer has sent.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while let Some((bytes, fds)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match send(socket, bytes, &fds, false).map_err(|e| (e.kind(), e)) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err((io::ErrorKind::WouldBlock, _)) => return Ok(()),
                Err((io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset, _)) => self.clear(),
                Err((_, e)) => return Err(e),
            }
        }
        Ok(())
    }

    /// Sends a record that may get lost, unless others wait. Returns whether it was sent.
    pub(crate) fn try_send<T: Serialize>(&self, socket: BorrowedFd<'_>, message: &T, payload: &[u8]) -> bool {
        self.is_empty() && encode(message, payload).is_ok_and(|bytes| send(socket, &bytes, &[], false).is_ok())
    }
}

/// Receives a record. `buffer` is scratch space of [`MAX_RECORD`] bytes.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    wait: bool,
) -> Result<Record<T>, RecvError> {
    let mut flags = RecvFlags::empty();
    flags.set(RecvFlags::DONTWAIT, !wait);
    let (len, flags, fds) = loop {
        match receive_raw(socket, buffer, flags, MAX_FDS) {
            Ok((0, ..)) => return Err(RecvError::Closed),
            Ok(got) => break got,
            // It left unread what we had sent. Reported once: what it had sent itself comes next, and then its end.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Err(RecvError::Empty),
            Err(_) => return Err(RecvError::Closed),
        }
    };
    if flags.contains(ReturnFlags::TRUNC) {
        return Err(RecvError::Malformed("a record too long".into()));
    }
    let bytes = buffer.get(..len).unwrap_or_default();
    let (message, payload) = decode(bytes).map_err(RecvError::Malformed)?;
    Ok(Record {
        message,
        payload,
        fds,
        lacks_fds: flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Puts descriptors into a socket's queue, where they stay open as long as it does.
pub(crate) fn store(socket: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket, STORED, fds, true)
}

/// Returns new references to the descriptors that [`store`] has put there. They stay where they are.
pub(crate) fn stored(socket: BorrowedFd<'_>) -> io::Result<Vec<OwnedFd>> {
    let mut buffer = [0; STORED.len() + 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let (len, flags, fds) = receive_raw(socket, &mut buffer, flags, MAX_STORED)?;
    match buffer.get(..len) == Some(STORED) && !flags.contains(ReturnFlags::CTRUNC) {
        true => Ok(fds),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a vault, or no descriptors left",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn records_arrive_with_payload_and_descriptors() {
        let (a, b) = pair();
        let bytes = encode(&("hello", 7), b"payload").unwrap();
        send(a.as_fd(), &bytes, &[a.as_fd(), b.as_fd()], true).unwrap();
        let mut buffer = vec![0; MAX_RECORD];
        let record: Record<(String, u8)> = receive(b.as_fd(), &mut buffer, true).unwrap();
        assert_eq!(record.message, ("hello".into(), 7));
        assert_eq!((record.payload.as_slice(), record.fds.len()), (&b"payload"[..], 2));
        assert!(matches!(
            receive::<u8>(b.as_fd(), &mut buffer, false),
            Err(RecvError::Empty)
        ));
        drop((a, record));
        assert!(matches!(
            receive::<u8>(b.as_fd(), &mut buffer, false),
            Err(RecvError::Closed)
        ));
    }

    #[test]
    fn descriptors_that_do_not_fit_are_missed() {
        let (a, b) = pair();
        let many = vec![a.as_fd(); MAX_FDS + 8];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS + 8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let bytes = encode(&7, &[]).unwrap();
        rustix::net::sendmsg(&a, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
        let record: Record<u8> = receive(b.as_fd(), &mut vec![0; MAX_RECORD], true).unwrap();
        assert!(record.lacks_fds && record.message == 7);
    }

    #[test]
    fn the_last_words_of_who_did_not_listen_are_heard() {
        let (a, b) = pair();
        send(b.as_fd(), &encode(&"not read", &[]).unwrap(), &[], true).unwrap();
        send(a.as_fd(), &encode(&"farewell", &[]).unwrap(), &[], true).unwrap();
        drop(a);
        let mut buffer = vec![0; MAX_RECORD];
        let record: Record<String> = receive(b.as_fd(), &mut buffer, false).unwrap();
        assert_eq!(record.message, "farewell");
        assert!(matches!(
            receive::<u8>(b.as_fd(), &mut buffer, false),
            Err(RecvError::Closed)
        ));
    }

    #[test]
    fn garbage_is_an_error() {
        let (a, b) = pair();
        let mut buffer = vec![0; MAX_RECORD];
        let bad: [&[u8]; 4] = [
            b"x",
            &[255, 255, 255, 255, 1],
            &[4, 0, 0, 0, b'n', b'u'],
            &[2, 0, 0, 0, b'{', b'{'],
        ];
        for bytes in bad {
            send(a.as_fd(), bytes, &[], true).unwrap();
            let got = receive::<Vec<u8>>(b.as_fd(), &mut buffer, false);
            assert!(matches!(got, Err(RecvError::Malformed(_))));
        }
        assert!(encode(&0, &vec![0; MAX_RECORD]).is_err());
    }

    #[test]
    fn a_vault_gives_its_descriptors_again_and_again() {
        let (a, b) = pair();
        let (x, y) = pair();
        assert!(stored(b.as_fd()).is_err(), "nothing is stored yet");
        store(a.as_fd(), &[x.as_fd(), y.as_fd()]).unwrap();
        drop((a, x, y));
        for _ in 0..3 {
            let fds = stored(b.as_fd()).unwrap();
            assert_eq!(fds.len(), 2);
            send(fds[0].as_fd(), b"still open", &[], false).unwrap();
        }
    }
}
