//! Socket of a program.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    time::{SystemTime, UNIX_EPOCH},
};

use rds::{Attachment, MessageInfo, Node, RdmaStatus, Received, SocketId};
use rds_local::{MAX_MESSAGE, Page, RecvHeader, RecvKind, SendHeader, SocketKey};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair,
        sockopt::{
            set_socket_passcred, set_socket_send_buffer_size, set_socket_send_buffer_size_force,
            socket_recv_buffer_size, socket_send_buffer_size,
        },
    },
};
use zerocopy::IntoBytes;

use crate::operation::{self, Memories};

/// Packets of a socket in one turn.
const BATCH: usize = 32;
/// Longest packet of a program: header, operation with all its pieces, and data.
pub(crate) const MAX_PACKET: usize = SendHeader::LEN + 64 + 16 * rds_local::MAX_LOCAL + MAX_MESSAGE;
/// Bytes that a packet takes beside its data, as the system checks its length.
const OVERHEAD: usize = 256;
/// Longest packet to a program, as the system checks its length.
pub(crate) const MAX_RECORD: usize = RecvHeader::LEN + MAX_MESSAGE + OVERHEAD;

/// Message as bytes for the program.
#[derive(Debug)]
struct Packet {
    header: RecvHeader,
    data: Vec<u8>,
    info: Option<MessageInfo>,
}

/// Message of a program that is not queued.
#[derive(Debug)]
struct Held {
    to: Option<SocketAddr>,
    data: Vec<u8>,
    attachment: Attachment,
}

impl Held {
    /// Parses a packet of a process. One that can't be sent is counted.
    fn parse((process, packet): (u32, &[u8]), memories: &Memories, counts: &mut Counts) -> Option<Self> {
        let parsed = SendHeader::parse(packet).ok().and_then(|(to, op, data)| {
            let attachment = operation::attachment(op, process, memories)?;
            let data = data.to_vec();
            Some(Self { to, data, attachment })
        });
        counts.bad_packets += u64::from(parsed.is_none());
        parsed
    }
}

/// Reports the end of an operation that was not queued.
fn report(node: &mut Node, id: SocketId, attachment: &Attachment, status: RdmaStatus) {
    if let Attachment::Operation(operation) = attachment {
        let _ = node.report(id, operation, status);
    }
}

/// Packets that a program has not read: their messages, and how many bytes were put there up to each.
#[derive(Debug, Default)]
struct InPair {
    messages: VecDeque<(u64, MessageInfo)>,
    sent: u64,
    read: u64,
}

/// State of its pair after a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// An event will call for it.
    Wait,
    /// There is more to do.
    More,
    /// The program has closed it, or broken the rules.
    Close,
}

/// Counters of all programs' sockets.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Packets that were no message, or not one that the socket could send.
    pub(crate) bad_packets: u64,
}

/// Socket of a program.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) key: SocketKey,
    /// Process that has created it.
    pub(crate) process: u32,
    pub(crate) end: OwnedFd,
    pub(crate) page: Page,
    pub(crate) page_file: OwnedFd,
    pub(crate) inode: u64,
    /// Address and number at its node.
    pub(crate) at: Option<(IpAddr, SocketId)>,
    /// A bind is under way.
    pub(crate) is_binding: bool,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) buffers: (usize, usize),
    pub(crate) monitors: bool,
    pub(crate) transport: Option<u32>,
    /// Messages that were read and could not be queued.
    held: VecDeque<Held>,
    /// Packet that did not fit.
    out: Option<Packet>,
    in_pair: InPair,
    /// Send buffer of the node's end, as the system counts.
    room: usize,
    /// There may be something to read.
    pub(crate) readable: bool,
    /// The program has read something, and perhaps counts it in its page only after that.
    pub(crate) recheck: bool,
}

impl Program {
    /// Makes a socket, with so many bytes for what its program has not read. Returns the program's end, too.
    pub(crate) fn new(key: SocketKey, process: u32, pair: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (end, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        key.name_end(end.as_fd())?;
        set_socket_passcred(&end, true)?;
        // Without the right to that it is as much as all may have.
        if set_socket_send_buffer_size_force(&end, pair).is_err() {
            set_socket_send_buffer_size(&end, pair)?;
        }
        let room = socket_send_buffer_size(&end)?;
        let (page, page_file) = Page::create()?;
        // The kernel doubles them.
        let buffers = (
            socket_send_buffer_size(&theirs)? / 2,
            socket_recv_buffer_size(&theirs)? / 2,
        );
        page.set_buffers(buffers.0, buffers.1);
        let inode = rustix::fs::fstat(&theirs)?.st_ino;
        let this = Self {
            key,
            process,
            end,
            page,
            page_file,
            inode,
            at: None,
            is_binding: false,
            peer: None,
            buffers,
            monitors: false,
            transport: None,
            held: VecDeque::new(),
            out: None,
            in_pair: InPair::default(),
            room,
            readable: false,
            recheck: false,
        };
        Ok((this, theirs))
    }

    /// Bytes of its buffers.
    pub(crate) fn reserved(&self) -> usize {
        self.buffers.0 + self.buffers.1
    }

    /// Address that it is bound to.
    pub(crate) fn bound(&self, node: &Node) -> Option<SocketAddr> {
        node.names(self.at?.1).ok()?.0
    }

    /// Returns whether the program has closed it, as the system knows at once.
    pub(crate) fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.end, PollFlags::empty())];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Address of a peer as the program sees it: one of a link has the interface of the socket's own.
    fn on_link(&self, mut peer: SocketAddr) -> SocketAddr {
        if let (SocketAddr::V6(peer), Some(SocketAddr::V6(own))) = (&mut peer, self.page.bound())
            && peer.ip().is_unicast_link_local()
        {
            peer.set_scope_id(own.scope_id());
        }
        peer
    }

    /// Messages in the pair.
    pub(crate) fn unread(&self) -> impl Iterator<Item = MessageInfo> + use<'_> {
        let messages = self.in_pair.messages.iter().map(|(_, info)| *info);
        messages.chain(self.out.as_ref().and_then(|packet| packet.info))
    }

    /// Reads messages of the program as long as they can be queued. `node`: `None` while it is not bound.
    pub(crate) fn send(
        &mut self,
        node: Option<&mut Node>,
        memories: &Memories,
        scratch: &mut [u8],
        counts: &mut Counts,
    ) -> Next {
        let Some((node, (_, id))) = node.zip(self.at) else {
            return self.drain(scratch, counts);
        };
        for _ in 0..BATCH {
            if let Some(Held { to, data, attachment }) = self.held.front() {
                match node.queue_with(id, *to, data, attachment.clone()) {
                    Ok(()) => {}
                    Err(rds::Error::WouldBlock) => return Next::Wait,
                    Err(_) => {
                        counts.bad_packets += 1;
                        report(node, id, attachment, RdmaStatus::OtherError);
                    }
                }
                self.held.pop_front();
                continue;
            }
            if !self.readable || !node.is_writable(id) {
                return Next::Wait;
            }
            let packet = match self.read(scratch) {
                Ok(packet) => packet,
                Err(next) => return next,
            };
            self.held.extend(Held::parse(packet, memories, counts));
        }
        Next::More
    }

    /// Drops messages to an address that were not queued so far.
    pub(crate) fn cancel(
        &mut self,
        (node, id): (&mut Node, SocketId),
        to: SocketAddr,
        memories: &Memories,
        scratch: &mut [u8],
        counts: &mut Counts,
    ) {
        // As many as its buffer holds.
        while self.readable {
            let Ok(packet) = self.read(scratch) else { break };
            self.held.extend(Held::parse(packet, memories, counts));
        }
        let peer = self.peer;
        self.held.retain(|held| {
            let stays = held.to.or(peer) != Some(to);
            if !stays {
                report(node, id, &held.attachment, RdmaStatus::Canceled);
            }
            stays
        });
    }

    /// Drops what comes before a bind: libraries refuse it themselves.
    fn drain(&mut self, scratch: &mut [u8], counts: &mut Counts) -> Next {
        for _ in 0..BATCH {
            if !self.readable {
                return Next::Wait;
            }
            match self.read(scratch) {
                Ok(_) => counts.bad_packets += 1,
                Err(next) => return next,
            }
        }
        Next::More
    }

    /// Reads a packet, and which process has sent it.
    fn read<'a>(&mut self, scratch: &'a mut [u8]) -> Result<(u32, &'a [u8]), Next> {
        match rds_local::receive(&self.end, scratch, RecvFlags::DONTWAIT) {
            // A cut one does not parse.
            Ok(Some(record)) => Ok((record.process, scratch.get(..record.len).unwrap_or_default())),
            Ok(None) => Err(Next::Close),
            Err(Errno::AGAIN) => {
                self.readable = false;
                Err(Next::Wait)
            }
            Err(_) => Err(Next::Close),
        }
    }

    /// Tells the node what the program has read. Returns whether there is something that it has not.
    pub(crate) fn note_read(&mut self, node: &mut Node) -> bool {
        let (Some((_, id)), pair) = (self.at, &mut self.in_pair) else {
            return false;
        };
        if pair.messages.is_empty() {
            return false;
        }
        let is_empty = rds_local::unread(&self.end) == Ok(0);
        let read = match is_empty {
            true => pair.sent,
            // Any number, but not more than there is, nor less than before.
            false => self.page.received().clamp(pair.read, pair.sent),
        };
        let new = read - pair.read;
        pair.read = read;
        let is_read = |end: u64| is_empty || new > 0 && end <= read;
        while pair.messages.front().is_some_and(|(end, _)| is_read(*end)) {
            pair.messages.pop_front();
        }
        if new > 0 {
            let _ = node.read(id, new as usize);
        }
        !pair.messages.is_empty()
    }

    /// Hands messages to the program as long as its pair has room.
    pub(crate) fn receive(&mut self, node: &mut Node) -> Next {
        let Some((_, id)) = self.at else { return Next::Wait };
        for _ in 0..BATCH {
            // From here on the system reports that there is room.
            let is_full = rds_local::unread(&self.end).is_ok_and(|bytes| bytes * 4 > self.room);
            if is_full {
                return Next::Wait;
            }
            let packet = match self.out.take() {
                Some(packet) => packet,
                None => match self.next_packet(node, id) {
                    Some(packet) => packet,
                    None => return Next::Wait,
                },
            };
            match self.push(&packet) {
                Ok(()) => {
                    self.in_pair.sent += packet.data.len() as u64;
                    let sent = self.in_pair.sent;
                    self.in_pair.messages.extend(packet.info.map(|info| (sent, info)));
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.out = Some(packet);
                    return Next::Wait;
                }
                Err(_) => return Next::Close,
            }
        }
        Next::More
    }

    fn next_packet(&self, node: &mut Node, id: SocketId) -> Option<Packet> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX);
        let (bound, _) = node.names(id).ok()?;
        let packet = match node.take(id) {
            Ok(Received::Message(message)) => {
                let kind = RecvKind::Message(message.cookie.map(|cookie| cookie.0));
                let header = RecvHeader::new(kind, Some(self.on_link(message.from)), time, message.data.len());
                let info = bound.map(|to| MessageInfo {
                    sequence: message.sequence,
                    len: message.data.len(),
                    from: message.from,
                    to,
                    tos: self.page.tos(),
                });
                Packet {
                    header,
                    data: message.data,
                    info,
                }
            }
            Ok(Received::Uncongested(ports)) => Packet {
                header: RecvHeader::new(RecvKind::Congestion(ports), None, time, 0),
                data: Vec::new(),
                info: None,
            },
            Ok(Received::Rdma(notice)) => {
                let kind = RecvKind::Notification {
                    token: notice.token,
                    status: notice.status as i32,
                };
                Packet {
                    header: RecvHeader::new(kind, None, time, 0),
                    data: Vec::new(),
                    info: None,
                }
            }
            Err(_) => return None,
        };
        Some(packet)
    }

    fn push(&self, packet: &Packet) -> rustix::io::Result<()> {
        let flags = SendFlags::DONTWAIT;
        let len = RecvHeader::LEN + packet.data.len() + OVERHEAD;
        if len > self.room {
            let file = rds_local::memory_file(&packet.data).map_err(|_| Errno::NOMEM)?;
            let header = packet.header.in_file();
            return rds_local::send(&self.end, &[IoSlice::new(header.as_bytes())], &[file.as_fd()], flags);
        }
        let header = IoSlice::new(packet.header.as_bytes());
        rds_local::send(&self.end, &[header, IoSlice::new(&packet.data)], &[], flags)
    }

    /// Makes the program's descriptor readable once, if it is not.
    pub(crate) fn wake(&self) {
        if self.out.is_none() && rds_local::unread(&self.end) == Ok(0) {
            let header = RecvHeader::new(RecvKind::Wake, None, 0, 0);
            let _ = rds_local::send(&self.end, &[IoSlice::new(header.as_bytes())], &[], SendFlags::DONTWAIT);
        }
    }
}
