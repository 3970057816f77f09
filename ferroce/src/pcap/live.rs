//! Packet sockets: the RoCEv2 frames of an interface as they come.

use std::{
    io::{self, ErrorKind, IoSliceMut},
    os::fd::{AsFd, AsRawFd},
};

use nix::{
    errno::Errno,
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{ControlMessageOwned, LinkAddr, MsgFlags, bind, recvmsg, setsockopt, sockopt::ReceiveTimestampns},
        time::TimeSpec,
    },
};
use roce_bth::ROCE_UDP_PORT;
use roce_pcap::Direction;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

/// Longest frame that is taken whole, bytes: merged ones (BIG TCP) are shorter.
const MAX_FRAME: usize = 256 << 10;
/// Receive buffer, bytes; the kernel doubles it, and root may have it.
const BUFFER: usize = 8 << 20;

/// Network interface whose frames can be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct NetInterface {
    pub(super) name: String,
    /// Link type of its frames: <https://www.tcpdump.org/linktypes.html>.
    pub(super) link: u16,
    is_loopback: bool,
    address: LinkAddr,
}

impl NetInterface {
    /// Returns the interfaces that are up, in the order of their names.
    pub(super) fn all() -> io::Result<Vec<Self>> {
        let mut all: Vec<Self> = getifaddrs()?
            .filter(|found| found.flags.contains(InterfaceFlags::IFF_UP))
            .filter_map(|found| {
                let address = *found.address?.as_link_addr()?;
                Some(Self {
                    link: link_type(address.hatype())?,
                    name: found.interface_name,
                    is_loopback: found.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                    address,
                })
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }
}

/// Link type of frames of a kind of device (`ARPHRD_…`).
const fn link_type(kind: u16) -> Option<u16> {
    const ETHERNET: u16 = 1;
    const RAW_IP: u16 = 101;
    match kind {
        libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => Some(ETHERNET),
        libc::ARPHRD_NONE | libc::ARPHRD_PPP => Some(RAW_IP),
        _ => None,
    }
}

/// Socket that receives the RoCEv2 frames of an interface.
pub(super) struct PacketSocket {
    socket: Socket,
    is_loopback: bool,
    buffer: Vec<u8>,
}

/// Frame as it came.
pub(super) struct Received<'a> {
    pub(super) data: &'a [u8],
    pub(super) original_len: u32,
    /// Nanoseconds since 1970.
    pub(super) time_ns: u64,
    pub(super) direction: Option<Direction>,
}

impl PacketSocket {
    /// Opens a socket.
    pub(super) fn open(interface: &NetInterface) -> io::Result<Self> {
        let protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(protocol)))?;
        socket.attach_filter(&filter())?;
        // Refused beyond the system's limit, which will do then.
        let _ = socket.set_recv_buffer_size(BUFFER);
        setsockopt(&socket, ReceiveTimestampns, &true)?;
        bind(socket.as_raw_fd(), &interface.address)?;
        let mut this = Self {
            socket,
            is_loopback: interface.is_loopback,
            buffer: vec![0; MAX_FRAME],
        };
        this.drain()?;
        Ok(this)
    }

    /// Drops what came before the socket had its interface.
    fn drain(&mut self) -> io::Result<()> {
        self.socket.set_nonblocking(true)?;
        loop {
            match self.receive() {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        self.socket.set_nonblocking(false)
    }

    /// Waits for frames, or until nobody reads a pipe any more. Returns whether there are frames.
    pub(super) fn wait(&self, pipe: &impl AsFd) -> io::Result<bool> {
        let mut waited = [
            PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
            PollFd::new(pipe.as_fd(), PollFlags::empty()),
        ];
        loop {
            match poll(&mut waited, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                other => other?,
            };
            let closed = PollFlags::POLLERR | PollFlags::POLLNVAL;
            if waited[1].revents().is_some_and(|events| events.intersects(closed)) {
                return Ok(false);
            }
            if waited[0].any().unwrap_or(true) {
                return Ok(true);
            }
        }
    }

    /// Waits for the next frame. `None`: the one that came is not for the capture.
    pub(super) fn receive(&mut self) -> io::Result<Option<Received<'_>>> {
        let mut control = nix::cmsg_space!(TimeSpec);
        let (len, from, time) = {
            let mut parts = [IoSliceMut::new(&mut self.buffer)];
            let message = match recvmsg::<LinkAddr>(
                self.socket.as_raw_fd(),
                &mut parts,
                Some(&mut control),
                MsgFlags::MSG_TRUNC,
            ) {
                Err(Errno::EINTR) => return Ok(None),
                other => other?,
            };
            let time = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::ScmTimestampns(time) => Some(time),
                _ => None,
            });
            (message.bytes, message.address, time)
        };
        let is_sent = from.is_some_and(|from| from.pkttype() == libc::PACKET_OUTGOING);
        // Over loopback each frame is seen twice.
        if is_sent && self.is_loopback {
            return Ok(None);
        }
        let time_ns = time.map_or(0, |time| {
            let secs = u64::try_from(time.tv_sec()).unwrap_or(0);
            secs * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap_or(0)
        });
        Ok(Some(Received {
            data: &self.buffer[..len.min(self.buffer.len())],
            original_len: u32::try_from(len).unwrap_or(u32::MAX),
            time_ns,
            direction: Some(if is_sent {
                Direction::Outbound
            } else {
                Direction::Inbound
            }),
        }))
    }
}

/// `udp dst port 4791` for IPv4 and IPv6, from the network header on, so that link headers and tags do not matter.
fn filter() -> Vec<SockFilter> {
    // Offsets of the kernel's: metadata, and the network header.
    const PROTOCOL: u32 = (libc::SKF_AD_OFF + libc::SKF_AD_PROTOCOL) as u32;
    const NETWORK: u32 = libc::SKF_NET_OFF as u32;
    const UDP: u32 = 17;
    const ACCEPT: u32 = u32::MAX;
    let (load, jump) = (libc::BPF_LD | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_K);
    let op = |code: u32, jt: u8, jf: u8, k: u32| SockFilter::new(code as u16, jt, jf, k);
    vec![
        op(load | libc::BPF_W, 0, 0, PROTOCOL),
        op(jump | libc::BPF_JEQ, 0, 10, libc::ETH_P_IP as u32),
        op(load | libc::BPF_B, 0, 0, NETWORK + 9),
        op(jump | libc::BPF_JEQ, 0, 13, UDP),
        op(load | libc::BPF_H, 0, 0, NETWORK + 6),
        op(jump | libc::BPF_JSET, 11, 0, 0x1fff),
        op(load | libc::BPF_B, 0, 0, NETWORK),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, 0x0f),
        op(libc::BPF_ALU | libc::BPF_LSH | libc::BPF_K, 0, 0, 2),
        op(libc::BPF_MISC | libc::BPF_TAX, 0, 0, 0),
        op(libc::BPF_LD | libc::BPF_IND | libc::BPF_H, 0, 0, NETWORK + 2),
        // On to the comparison of ports.
        op(jump | libc::BPF_JA, 0, 0, 4),
        op(jump | libc::BPF_JEQ, 0, 4, libc::ETH_P_IPV6 as u32),
        op(load | libc::BPF_B, 0, 0, NETWORK + 6),
        op(jump | libc::BPF_JEQ, 0, 2, UDP),
        op(load | libc::BPF_H, 0, 0, NETWORK + 40 + 2),
        op(jump | libc::BPF_JEQ, 1, 0, ROCE_UDP_PORT.into()),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, ACCEPT),
    ]
}
