//! The socket of a front end: messages of vhost-user and the descriptors that come with them.
//!
//! The crate `vhost` has what the messages are like, but its own reader waits for the rest of a message, and answers at once: here nothing
//! waits, and some answers come later.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use vhost::vhost_user::message::{
    BackendReq, FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserMsgValidator,
};
use vm_memory::ByteValued;

const HEADER: usize = 12;
/// Flags of a message: its version, that it is an answer, and that one is wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// Error in a front end's message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it has gone")]
    Gone,
    #[error("a message that is none of vhost-user: request {request}, flags {flags:#x}, {size} bytes")]
    Header { request: u32, flags: u32, size: u32 },
    #[error("the body of {0:?} is not as it should be")]
    Body(FrontendReq),
    #[error("{0:?} with another number of descriptors than it should have")]
    Descriptors(FrontendReq),
    #[error("more descriptors than a message may have")]
    TooManyDescriptors,
}

/// A message of a front end.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: FrontendReq,
    /// The front end wants to know how it went, if that was agreed on.
    pub(crate) need_reply: bool,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// Its body, which is just this.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn body<T: ByteValued + Default + VhostUserMsgValidator>(&self) -> Result<T, WireError> {
        let (value, rest) = self.head()?;
        match rest.is_empty() {
            true => Ok(value),
            false => Err(WireError::Body(self.request)),
        }
    }

    /// Parses the beginning of its body, and returns the rest.
    ///
    /// # Errors
    /// When it is shorter, or not valid.
    pub(crate) fn head<T: ByteValued + Default + VhostUserMsgValidator>(&self) -> Result<(T, &[u8]), WireError> {
        let wrong = WireError::Body(self.request);
        let Some((head, rest)) = self.body.split_at_checked(size_of::<T>()) else {
            return Err(wrong);
        };
        let mut value = T::default();
        value.as_mut_slice().copy_from_slice(head);
        if value.is_valid() {
            Ok((value, rest))
        } else {
            Err(wrong)
        }
    }

    /// The descriptor that came with it; `None` if none did.
    ///
    /// # Errors
    /// When there are several.
    pub(crate) fn descriptor(&mut self) -> Result<Option<OwnedFd>, WireError> {
        match self.fds.len() {
            0 | 1 => Ok(self.fds.pop()),
            _ => Err(WireError::Descriptors(self.request)),
        }
    }

    /// The one descriptor that came with it.
    ///
    /// # Errors
    /// When it is not one.
    pub(crate) fn one_descriptor(&mut self) -> Result<OwnedFd, WireError> {
        self.descriptor()?.ok_or(WireError::Descriptors(self.request))
    }

    /// Regions of memory, each with its descriptor.
    ///
    /// # Errors
    /// When that is not what it has.
    pub(crate) fn regions(&mut self) -> Result<Vec<(VhostUserMemoryRegion, OwnedFd)>, WireError> {
        let wrong = WireError::Body(self.request);
        let (head, rest) = self.head::<VhostUserMemory>()?;
        let each = size_of::<VhostUserMemoryRegion>();
        let count = head.num_regions as usize;
        if rest.len() != count * each {
            return Err(wrong);
        }
        if self.fds.len() != count {
            return Err(WireError::Descriptors(self.request));
        }
        let region = |bytes: &[u8]| {
            let mut region = VhostUserMemoryRegion::default();
            region.as_mut_slice().copy_from_slice(bytes);
            VhostUserMsgValidator::is_valid(&region).then_some(region)
        };
        let regions: Option<Vec<_>> = rest.chunks_exact(each).map(region).collect();
        let regions = regions.ok_or(wrong)?;
        Ok(regions.into_iter().zip(core::mem::take(&mut self.fds)).collect())
    }
}

/// A front end's socket.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    readable: bool,
    /// Received bytes of the next message.
    head: [u8; HEADER],
    got: usize,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// An answer that did not fit.
    out: Vec<u8>,
}

impl Wire {
    /// # Errors
    /// When the socket can't be told not to wait.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            readable: true,
            head: [0; HEADER],
            got: 0,
            body: Vec::new(),
            fds: Vec::new(),
            out: Vec::new(),
        })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The socket may have something, or room.
    pub(crate) fn ready(&mut self) {
        self.readable = true;
    }

    /// The next message, when all of it has come.
    ///
    /// # Errors
    /// When the front end is gone, or does not speak vhost-user.
    pub(crate) fn read(&mut self) -> Result<Option<Message>, WireError> {
        if !self.flush()? {
            return Ok(None);
        }
        while self.readable {
            let need = match self.got.checked_sub(HEADER) {
                None => 0,
                Some(_) => self.size()?,
            };
            if self.got >= HEADER && self.got == HEADER + need {
                return self.take().map(Some);
            }
            let received = match self.got {
                got if got < HEADER => receive(&self.stream, &mut self.head[got..], &mut self.fds),
                got => {
                    self.body.resize(need, 0);
                    receive(&self.stream, &mut self.body[got - HEADER..], &mut self.fds)
                }
            };
            match received {
                Ok(0) => return Err(WireError::Gone),
                Ok(n) => self.got += n,
                Err(WireError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(WireError::Io(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }

    fn words(&self) -> [u32; 3] {
        core::array::from_fn(|i| u32::from_ne_bytes([0, 1, 2, 3].map(|n| self.head[4 * i + n])))
    }

    /// Bytes of the body, of a header that has come.
    fn size(&self) -> Result<usize, WireError> {
        let [request, flags, size] = self.words();
        let known = FrontendReq::try_from(request).is_ok();
        let fit = size as usize <= MAX_MSG_SIZE && flags & !NEED_REPLY == VERSION;
        match known && fit {
            true => Ok(size as usize),
            false => Err(WireError::Header { request, flags, size }),
        }
    }

    fn take(&mut self) -> Result<Message, WireError> {
        let [request, flags, size] = self.words();
        self.got = 0;
        let wrong = |_| WireError::Header { request, flags, size };
        Ok(Message {
            request: FrontendReq::try_from(request).map_err(wrong)?,
            need_reply: flags & NEED_REPLY != 0,
            body: core::mem::take(&mut self.body),
            fds: core::mem::take(&mut self.fds),
        })
    }

    /// Answers a message; a descriptor may go with it.
    ///
    /// # Errors
    /// When the front end is gone.
    pub(crate) fn answer(
        &mut self,
        request: FrontendReq,
        body: &[&[u8]],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), WireError> {
        let size: usize = body.iter().map(|part| part.len()).sum();
        let mut bytes = header(request.into(), VERSION | REPLY, size as u32).to_vec();
        body.iter().for_each(|part| bytes.extend_from_slice(part));
        let sent = match send(&self.stream, &bytes, fd) {
            Ok(sent) => sent,
            // A descriptor goes with the first byte, or not at all.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && fd.is_none() => 0,
            Err(e) => return Err(e.into()),
        };
        self.out.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Sends what is left of an answer; `false`: there is still something.
    fn flush(&mut self) -> Result<bool, WireError> {
        while !self.out.is_empty() {
            match send(&self.stream, &self.out, None) {
                Ok(sent) => drop(self.out.drain(..sent)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }

    /// Whether the socket may have something that can be read now.
    pub(crate) fn is_readable(&self) -> bool {
        self.readable && self.out.is_empty()
    }
}

fn header(request: u32, flags: u32, size: u32) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    for (to, word) in out.chunks_exact_mut(4).zip([request, flags, size]) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    out
}

/// Tells a front end by its other channel that the configuration space is another one. Nobody waits for an answer.
///
/// # Errors
/// When it has no room, or is gone.
pub(crate) fn tell_config_change(channel: &UnixStream) -> io::Result<()> {
    let message = header(BackendReq::CONFIG_CHANGE_MSG.into(), VERSION, 0);
    match send(channel, &message, None)? {
        HEADER => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Sends a message as a front end does.
///
/// # Errors
/// Those of `sendmsg`.
pub(super) fn send_request(
    stream: &UnixStream,
    request: u32,
    body: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = header(request, VERSION, body.len() as u32).to_vec();
    bytes.extend_from_slice(body);
    send(stream, &bytes, fd).map(drop)
}

/// Receives, and never more than what is asked for: descriptors belong to the bytes that they came with.
fn receive(stream: &UnixStream, room: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, WireError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(room)], &mut control, flags);
    let received = received.map_err(io::Error::from)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let cut = received.flags.contains(rustix::net::ReturnFlags::CTRUNC);
    match cut || fds.len() > MAX_ATTACHED_FD_ENTRIES {
        true => Err(WireError::TooManyDescriptors),
        false => Ok(received.bytes),
    }
}

fn send(stream: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(
        stream,
        &[io::IoSlice::new(bytes)],
        &mut control,
        flags,
    )?)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use vhost::vhost_user::message::VhostUserU64;

    use super::*;

    fn pair() -> (UnixStream, Wire) {
        let (front, back) = UnixStream::pair().unwrap();
        (front, Wire::new(back).unwrap())
    }

    #[test]
    fn a_message_comes_in_pieces_and_with_its_descriptors() {
        let (mut front, mut wire) = pair();
        let mut bytes = header(FrontendReq::SET_FEATURES.into(), VERSION | NEED_REPLY, 8).to_vec();
        bytes.extend_from_slice(&7u64.to_ne_bytes());
        for byte in &bytes[..bytes.len() - 1] {
            front.write_all(&[*byte]).unwrap();
            wire.ready();
            assert!(wire.read().unwrap().is_none());
        }
        front.write_all(&bytes[bytes.len() - 1..]).unwrap();
        // The next message has a descriptor, which is not this one's.
        let kick = header(FrontendReq::SET_VRING_KICK.into(), VERSION, 0);
        send(&front, &kick, Some(front.as_fd())).unwrap();
        wire.ready();
        let mut message = wire.read().unwrap().unwrap();
        assert_eq!((message.request, message.need_reply), (FrontendReq::SET_FEATURES, true));
        assert_eq!(message.body::<VhostUserU64>().unwrap().value, 7);
        assert!(message.descriptor().unwrap().is_none());
        let mut message = wire.read().unwrap().unwrap();
        assert!(message.one_descriptor().is_ok() && message.body::<VhostUserU64>().is_err());
        assert!(wire.read().unwrap().is_none());
        drop(front);
        wire.ready();
        assert!(matches!(wire.read(), Err(WireError::Gone)));
    }

    #[test]
    fn what_is_no_message_is_told() {
        for (request, flags, size) in [(0, 1, 0), (1000, 1, 0), (1, 0, 0), (1, 5, 0), (1, 17, 0), (1, 1, 4097)] {
            let (mut front, mut wire) = pair();
            front.write_all(&header(request, flags, size)).unwrap();
            assert!(
                matches!(wire.read(), Err(WireError::Header { .. })),
                "{request} {flags} {size}"
            );
        }
    }

    #[test]
    fn regions_have_a_descriptor_each() {
        let message = |count: u32, regions: usize, fds: usize| {
            let mut body = [count.to_ne_bytes(), [0; 4]].concat();
            for _ in 0..regions {
                body.extend_from_slice(VhostUserMemoryRegion::new(0, 4096, 0, 0).as_slice());
            }
            let fd = || UnixStream::pair().unwrap().0.into();
            Message {
                request: FrontendReq::SET_MEM_TABLE,
                need_reply: false,
                body,
                fds: (0..fds).map(|_| fd()).collect(),
            }
        };
        assert_eq!(message(2, 2, 2).regions().unwrap().len(), 2);
        for (count, regions, fds) in [(2, 1, 2), (1, 1, 0), (1, 1, 2), (33, 33, 33), (0, 0, 0)] {
            assert!(
                message(count, regions, fds).regions().is_err(),
                "{count} {regions} {fds}"
            );
        }
    }

    #[test]
    fn answers_that_do_not_fit_come_later() {
        let (front, mut wire) = pair();
        let body = [1; 4000];
        let mut sent = 0;
        while wire.out.is_empty() {
            wire.answer(FrontendReq::GET_CONFIG, &[&body], None).unwrap();
            sent += HEADER + body.len();
        }
        assert!(wire.read().unwrap().is_none(), "it reads nothing meanwhile");
        front.set_nonblocking(true).unwrap();
        let (mut got, mut room) = (0, vec![0; 1 << 20]);
        while let Ok(n) = rustix::io::read(&front, &mut room) {
            got += n;
            assert!(wire.flush().is_ok());
        }
        assert_eq!(got, sent);
    }
}
