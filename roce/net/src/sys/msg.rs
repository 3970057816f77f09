//! `sendmmsg` with UDP_SEGMENT, `recvmmsg` with UDP_GRO, and their control messages.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::{c_int, cmsghdr, iovec, mmsghdr, msghdr};
use memmap2::{MmapMut, MmapRaw};
use roce_port::{RxMeta, Train};
use socket2::{SockAddr, SockAddrStorage};

use super::raw::link_address;
use crate::datapath::DEFAULT_HOP_LIMIT;

/// Room for every control message that is sent or received at a time (PKTINFO, TOS, TTL, UDP_SEGMENT or UDP_GRO).
const CONTROL_LEN: usize = 128;

/// Targets of the pointers in a message header, but for the data.
#[repr(C)]
struct Slot {
    /// Headers of our own, if the kernel makes none, and payload: the second is of a [`Framed`] packet alone.
    vectors: [iovec; 2],
    name: SockAddrStorage,
    control: Control,
}

/// Bytes for control messages, aligned as `cmsghdr` must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// Message headers for one system call, each with a slot of its own, and room for data.
///
/// All of it is one mapping, to which pointers stay valid as long as it lives. Data is large, and glibc keeps as much more in each arena
/// once that much has been freed (mallopt(3), `M_MMAP_THRESHOLD`).
struct Messages {
    map: MmapRaw,
    count: usize,
}

impl Messages {
    /// Maps `count` headers and slots, and `room` bytes for data.
    fn new(count: usize, room: usize) -> io::Result<Self> {
        let len = count * (size_of::<mmsghdr>() + size_of::<Slot>()) + room;
        let map = MmapMut::map_anon(len)?.into();
        let this = Self { map, count };
        for i in 0..count {
            let slot = this.slot(i);
            // SAFETY: header and slot are this message's alone, aligned, and zero, which is a value for all of their fields.
            unsafe {
                let header = &mut (*this.header(i)).msg_hdr;
                header.msg_name = (&raw mut (*slot).name).cast();
                header.msg_iov = (&raw mut (*slot).vectors).cast();
                header.msg_iovlen = 1;
                header.msg_control = (&raw mut (*slot).control).cast();
            }
        }
        Ok(this)
    }

    fn header(&self, i: usize) -> *mut mmsghdr {
        assert!(i < self.count);
        // SAFETY: the mapping begins with the headers.
        unsafe { self.map.as_mut_ptr().cast::<mmsghdr>().add(i) }
    }

    fn slot(&self, i: usize) -> *mut Slot {
        assert!(i < self.count);
        // SAFETY: the slots follow the headers.
        unsafe { self.header(0).add(self.count).cast::<Slot>().add(i) }
    }

    /// Returns the room for data.
    fn data(&self) -> *mut u8 {
        // SAFETY: it follows the slots.
        unsafe { self.slot(0).add(self.count).cast() }
    }
}

/// Scratch space for sending several trains with one system call.
pub(crate) struct SendQueue(Messages);

impl SendQueue {
    /// # Errors
    /// Without memory.
    pub(crate) fn new(capacity: usize) -> io::Result<Self> {
        Messages::new(capacity, 0).map(Self)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.0.count
    }

    /// Sends the first [`Self::capacity`] trains, in order, until one fails. Returns how many were taken.
    ///
    /// # Errors
    /// When the first of them failed.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, trains: &[Train<'_>], from: &Origin<'_>) -> io::Result<usize> {
        let count = trains.len().min(self.capacity());
        for (i, train) in trains[..count].iter().enumerate() {
            self.fill(i, train, from.pktinfo(train));
        }
        // SAFETY: the first `count` headers point at slots of `self` and at bytes of `trains`, all of which live until the call
        // returns. The kernel only reads the data.
        let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), self.0.header(0), count as _, 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    fn fill(&mut self, i: usize, train: &Train<'_>, pktinfo: Option<u32>) {
        // SAFETY: both are this message's alone, and `self` is borrowed mutably.
        let (header, slot) = unsafe { (&mut (*self.0.header(i)).msg_hdr, &mut *self.0.slot(i)) };
        let name = SockAddr::from(train.remote);
        header.msg_namelen = name.len();
        header.msg_controllen = write_control(&mut slot.control, train, pktinfo) as _;
        slot.name = name.as_storage();
        header.msg_iovlen = 1;
        slot.vectors[0] = vector(train.bytes);
    }

    /// Sends the first [`Self::capacity`] packets, in order, until one fails. Returns how many were taken.
    ///
    /// # Errors
    /// When the first of them failed.
    pub(crate) fn send_framed(
        &mut self,
        fd: BorrowedFd<'_>,
        packets: &[Framed<'_>],
        from: &Origin<'_>,
    ) -> io::Result<usize> {
        let count = packets.len().min(self.capacity());
        for (i, packet) in packets[..count].iter().enumerate() {
            self.fill(i, &packet.train, from.pktinfo(&packet.train));
            // SAFETY: both are this message's alone, and `self` is borrowed mutably.
            let (header, slot) = unsafe { (&mut (*self.0.header(i)).msg_hdr, &mut *self.0.slot(i)) };
            let name = match packet.way {
                Way::Ip => without_port(packet.train.remote),
                Way::Link(index) => link_address(index, packet.ether_type()),
            };
            header.msg_namelen = name.len();
            slot.name = name.as_storage();
            header.msg_iovlen = 2;
            slot.vectors = [vector(packet.head()), vector(packet.train.bytes)];
            if let Way::Link(_) = packet.way {
                header.msg_controllen = 0;
            }
        }
        // SAFETY: the first `count` headers point at slots of `self` and at bytes of `packets`, all of which live until the call
        // returns. The kernel only reads the data.
        let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), self.0.header(0), count as _, 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

/// Returns where bytes are that the kernel reads.
fn vector(bytes: &[u8]) -> iovec {
    iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// Returns the address of a peer for a raw IP socket, where the port stands for the protocol.
fn without_port(remote: SocketAddr) -> SockAddr {
    SocketAddr::new(remote.ip(), 0).into()
}

/// Longest headers in front of a packet: Ethernet with a VLAN tag, IPv6 and UDP, bytes.
pub(crate) const MAX_HEAD: usize = 18 + 40 + 8;

/// Destination of a packet with headers of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// By the routing table, from a raw IP socket.
    Ip,
    /// By the interface with this number, as a frame.
    Link(u32),
}

/// A packet with headers that the kernel does not make.
pub(crate) struct Framed<'a> {
    /// The packet, as a train of one.
    pub(crate) train: Train<'a>,
    pub(crate) way: Way,
    /// IPv4 Identification that its ICRC was made with.
    pub(crate) identification: u16,
    head: [u8; MAX_HEAD],
    head_len: usize,
}

impl<'a> Framed<'a> {
    /// Takes a packet; `write` writes its headers and returns their length.
    pub(crate) fn new(
        train: Train<'a>,
        way: Way,
        identification: u16,
        write: impl FnOnce(&mut [u8; MAX_HEAD]) -> usize,
    ) -> Self {
        let mut head = [0; MAX_HEAD];
        let head_len = write(&mut head).min(MAX_HEAD);
        Self {
            train,
            way,
            identification,
            head,
            head_len,
        }
    }

    /// Returns the headers.
    pub(crate) fn head(&self) -> &[u8] {
        &self.head[..self.head_len]
    }

    /// Returns the EtherType of a frame, of its VLAN tag if it has one.
    fn ether_type(&self) -> u16 {
        u16::from_be_bytes([self.head[12], self.head[13]])
    }
}

/// Appends control messages to a buffer.
struct ControlWriter<'a> {
    control: &'a mut Control,
    len: usize,
}

impl ControlWriter<'_> {
    fn put<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        // SAFETY: pure arithmetic.
        let (len, space) = unsafe {
            (
                libc::CMSG_LEN(size_of::<T>() as _) as usize,
                libc::CMSG_SPACE(size_of::<T>() as _) as usize,
            )
        };
        assert!(self.len + space <= CONTROL_LEN, "control messages of our own making");
        // SAFETY: `len + space` is inside the buffer; offsets are multiples of the alignment of cmsghdr, and the value is
        // written unaligned where CMSG_DATA says.
        unsafe {
            let head = self.control.0.as_mut_ptr().add(self.len).cast::<cmsghdr>();
            (*head).cmsg_len = len as _;
            (*head).cmsg_level = level;
            (*head).cmsg_type = kind;
            libc::CMSG_DATA(head).cast::<T>().write_unaligned(value);
        }
        self.len += space;
    }
}

/// Source of packets that are sent.
pub(crate) struct Origin<'a> {
    /// The socket is bound to all addresses: each packet names its own.
    pub(crate) any: bool,
    /// Interfaces of local addresses, for destinations that say nothing about the interface (link-local addresses and
    /// IPv6 groups).
    pub(crate) scopes: &'a HashMap<IpAddr, u32>,
}

impl Origin<'_> {
    /// Whether a destination only means something together with an interface.
    pub(crate) fn needs_scope(remote: IpAddr) -> bool {
        match remote {
            IpAddr::V4(_) => false,
            IpAddr::V6(a) => a.is_multicast() || a.is_unicast_link_local(),
        }
    }

    /// The interface to name in a control message, 0 for whichever the routing table gives; `None`: no message.
    fn pktinfo(&self, train: &Train<'_>) -> Option<u32> {
        let scope = match Self::needs_scope(train.remote.ip()) {
            true => self.scopes.get(&train.local).copied(),
            false => None,
        };
        scope.or(self.any.then_some(0))
    }
}

fn write_control(control: &mut Control, train: &Train<'_>, pktinfo: Option<u32>) -> usize {
    let mut writer = ControlWriter { control, len: 0 };
    if train.bytes.len() > train.segment_len {
        // At most 65,507 bytes are sent at a time: the cast loses nothing.
        writer.put(libc::SOL_UDP, libc::UDP_SEGMENT, train.segment_len as u16);
    }
    let (level, tos, hops) = match train.local {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    match (train.local, pktinfo) {
        (IpAddr::V4(local), Some(index)) => {
            let info = libc::in_pktinfo {
                ipi_ifindex: index as c_int,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            writer.put(level, libc::IP_PKTINFO, info);
        }
        (IpAddr::V6(local), Some(index)) => {
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: local.octets(),
                },
                ipi6_ifindex: index as _,
            };
            writer.put(level, libc::IPV6_PKTINFO, info);
        }
        (_, None) => {}
    }
    if train.tos != 0 {
        writer.put(level, tos, c_int::from(train.tos));
    }
    if train.ttl != DEFAULT_HOP_LIMIT {
        writer.put(level, hops, c_int::from(train.ttl));
    }
    writer.len
}

/// Buffers for receiving several messages with one system call.
pub(crate) struct RecvRing {
    messages: Messages,
    slot_len: usize,
    stride: usize,
    /// Headers that the kernel has written to since they were set.
    used: usize,
}

impl RecvRing {
    /// Allocates `slots` buffers of `slot_len` bytes.
    ///
    /// # Errors
    /// Without memory.
    pub(crate) fn new(slots: usize, slot_len: usize) -> io::Result<Self> {
        // The extra line keeps the buffers' beginnings from falling into the same cache sets.
        let stride = slot_len + 64;
        let ring = Self {
            messages: Messages::new(slots, slots * stride)?,
            slot_len,
            stride,
            used: slots,
        };
        for i in 0..slots {
            // SAFETY: the slot is this message's alone.
            let slot = unsafe { &mut *ring.messages.slot(i) };
            slot.vectors[0] = iovec {
                iov_base: ring.buffer(i).cast(),
                iov_len: slot_len,
            };
        }
        Ok(ring)
    }

    fn buffer(&self, i: usize) -> *mut u8 {
        assert!(i < self.slots());
        // SAFETY: there is room for a stride for each message.
        unsafe { self.messages.data().add(i * self.stride) }
    }

    pub(crate) fn slots(&self) -> usize {
        self.messages.count
    }

    /// Receives at most `max` messages without waiting and returns how many.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>, max: usize) -> io::Result<usize> {
        // Only what the last call has changed is set again: an empty receive should cost a system call, no more.
        for i in 0..self.used {
            // SAFETY: no other reference to the element exists.
            let header = unsafe { &mut (*self.messages.header(i)).msg_hdr };
            header.msg_namelen = size_of::<SockAddrStorage>() as _;
            header.msg_controllen = CONTROL_LEN as _;
            header.msg_flags = 0;
        }
        self.used = 0;
        let count = max.min(self.slots());
        // SAFETY: the first `count` headers point at distinct places of the ring, each with its true length, and `self`
        // is borrowed mutably, so that nobody reads them meanwhile.
        let got = unsafe {
            libc::recvmmsg(
                fd.as_raw_fd(),
                self.messages.header(0),
                count as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        self.used = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        Ok(self.used)
    }

    /// Returns the bytes of message `i` of the last [`Self::receive`], which returned more than `i`. `None`: it is longer than the buffer.
    pub(crate) fn bytes(&self, i: usize) -> Option<&[u8]> {
        // SAFETY: the kernel is done with it, and nothing writes to it while `self` is borrowed.
        let header = unsafe { &*self.messages.header(i) };
        let len = (header.msg_len as usize).min(self.slot_len);
        // SAFETY: as above; `len` bytes lie inside of the buffer.
        let bytes = unsafe { std::slice::from_raw_parts(self.buffer(i), len) };
        (header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0).then_some(bytes)
    }

    /// Returns message `i` of the last [`Self::receive`], which returned more than `i`. `bound`: the address that its socket is bound to.
    /// `None`: it is longer than the buffer, of an unknown family, or the kernel did not tell its destination.
    pub(crate) fn slot(&self, i: usize, bound: Option<IpAddr>) -> Option<(RxMeta, &[u8])> {
        let bytes = self.bytes(i)?;
        // SAFETY: the kernel is done with it, and nothing writes to it while `self` is borrowed.
        let header = unsafe { &*self.messages.header(i) };
        if header.msg_hdr.msg_namelen == 0 {
            return None;
        }
        // SAFETY: the kernel has written a socket address of this length.
        let name = unsafe {
            let storage = (&raw const (*self.messages.slot(i)).name).read();
            SockAddr::new(storage, header.msg_hdr.msg_namelen)
        };
        let remote = name.as_socket()?;
        // Without the scope of a link-local address: peers are known by their addresses alone.
        let remote = SocketAddr::new(remote.ip(), remote.port());
        let unspecified = Ipv4Addr::UNSPECIFIED.into();
        let mut meta = RxMeta::new(bound.unwrap_or(unspecified), remote);
        let told = read_control(&header.msg_hdr, &mut meta);
        meta.local = bound.or(told)?;
        Some((meta, bytes))
    }
}

/// Reads control messages. Returns the destination address, if the kernel told.
fn read_control(header: &msghdr, meta: &mut RxMeta) -> Option<IpAddr> {
    let mut local = None;
    // SAFETY: the kernel has written well-formed control messages and set their total length, or cut the last one off,
    // which CMSG_NXTHDR sees. Values are read unaligned, each as long as its kind is.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let data = libc::CMSG_DATA(at);
            match ((*at).cmsg_level, (*at).cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    meta.segment_len = usize::try_from(data.cast::<c_int>().read_unaligned()).unwrap_or(0);
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    local = Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    local = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
                }
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    meta.hop_limit = data.cast::<c_int>().read_unaligned() as u8;
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => meta.tos = data.read(),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    meta.tos = data.cast::<c_int>().read_unaligned() as u8;
                }
                _ => {}
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    local
}
