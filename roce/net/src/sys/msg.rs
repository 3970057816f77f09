//! `sendmmsg` with UDP_SEGMENT, `recvmmsg` with UDP_GRO, and their control messages.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
};

use libc::{c_int, c_void, cmsghdr, iovec, mmsghdr, msghdr, sockaddr_in, sockaddr_in6, sockaddr_storage};
use memmap2::{MmapMut, MmapRaw};

use crate::datapath::{Burst, DEFAULT_HOP_LIMIT};

/// Room for every control message that is sent or received at a time (PKTINFO, TOS, TTL, UDP_SEGMENT or UDP_GRO).
const CONTROL_LEN: usize = 128;

/// Bytes for control messages, aligned as `cmsghdr` must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// A message header with everything zero.
fn empty_header() -> mmsghdr {
    // SAFETY: integers and pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

pub(super) fn empty_name() -> sockaddr_storage {
    // SAFETY: plain data, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

/// Scratch space for sending several bursts with one system call.
pub(crate) struct SendQueue {
    headers: Box<[mmsghdr]>,
    vectors: Box<[iovec]>,
    names: Box<[sockaddr_storage]>,
    controls: Box<[Control]>,
}

// SAFETY: the pointers inside are rewritten before every system call and only used during it.
unsafe impl Send for SendQueue {}

impl SendQueue {
    pub(crate) fn new(capacity: usize) -> Self {
        let none = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Self {
            headers: vec![empty_header(); capacity].into_boxed_slice(),
            vectors: vec![none; capacity].into_boxed_slice(),
            names: vec![empty_name(); capacity].into_boxed_slice(),
            controls: vec![Control([0; CONTROL_LEN]); capacity].into_boxed_slice(),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.headers.len()
    }

    /// Sends the first [`Self::capacity`] bursts, in order, until one fails. Returns how many were taken.
    ///
    /// # Errors
    /// When the first of them failed.
    pub(crate) fn send(&mut self, fd: BorrowedFd<'_>, bursts: &[Burst<'_>], from: &Origin<'_>) -> io::Result<usize> {
        let count = bursts.len().min(self.headers.len());
        for (i, burst) in bursts[..count].iter().enumerate() {
            self.fill(i, burst, from.pktinfo(burst));
        }
        // SAFETY: the first `count` headers point at vectors, names and controls of `self` and at bytes of `bursts`, all
        // of which live until the call returns. The kernel only reads the data.
        let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), self.headers.as_mut_ptr(), count as _, 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    fn fill(&mut self, i: usize, burst: &Burst<'_>, pktinfo: Option<u32>) {
        self.vectors[i] = iovec {
            iov_base: burst.bytes.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: burst.bytes.len(),
        };
        let name_len = write_name(&mut self.names[i], burst.remote);
        let control_len = write_control(&mut self.controls[i], burst, pktinfo);
        let header = &mut self.headers[i].msg_hdr;
        header.msg_name = (&raw mut self.names[i]).cast::<c_void>();
        header.msg_namelen = name_len as _;
        header.msg_iov = &raw mut self.vectors[i];
        header.msg_iovlen = 1;
        header.msg_controllen = control_len as _;
        header.msg_control = match control_len {
            0 => std::ptr::null_mut(),
            _ => self.controls[i].0.as_mut_ptr().cast::<c_void>(),
        };
    }
}

fn write_name(name: &mut sockaddr_storage, addr: SocketAddr) -> usize {
    match addr {
        SocketAddr::V4(a) => {
            // SAFETY: plain data; zero is a value.
            let mut v4: sockaddr_in = unsafe { std::mem::zeroed() };
            v4.sin_family = libc::AF_INET as _;
            v4.sin_port = a.port().to_be();
            v4.sin_addr.s_addr = u32::from(*a.ip()).to_be();
            // SAFETY: a sockaddr_storage is large enough and aligned for every socket address.
            unsafe { (&raw mut *name).cast::<sockaddr_in>().write(v4) };
            size_of::<sockaddr_in>()
        }
        SocketAddr::V6(a) => {
            // SAFETY: plain data; zero is a value.
            let mut v6: sockaddr_in6 = unsafe { std::mem::zeroed() };
            v6.sin6_family = libc::AF_INET6 as _;
            v6.sin6_port = a.port().to_be();
            v6.sin6_addr.s6_addr = a.ip().octets();
            v6.sin6_scope_id = a.scope_id();
            // SAFETY: as above.
            unsafe { (&raw mut *name).cast::<sockaddr_in6>().write(v6) };
            size_of::<sockaddr_in6>()
        }
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
    fn pktinfo(&self, burst: &Burst<'_>) -> Option<u32> {
        let scope = match Self::needs_scope(burst.remote.ip()) {
            true => self.scopes.get(&burst.local).copied(),
            false => None,
        };
        scope.or(self.any.then_some(0))
    }
}

fn write_control(control: &mut Control, burst: &Burst<'_>, pktinfo: Option<u32>) -> usize {
    let mut writer = ControlWriter { control, len: 0 };
    if burst.bytes.len() > burst.segment_len {
        // At most 65,507 bytes are sent at a time: the cast loses nothing.
        writer.put(libc::SOL_UDP, libc::UDP_SEGMENT, burst.segment_len as u16);
    }
    let hops = c_int::from(burst.hop_limit);
    let tos = c_int::from(burst.traffic_class);
    match burst.local {
        IpAddr::V4(local) => {
            if let Some(index) = pktinfo {
                let info = libc::in_pktinfo {
                    ipi_ifindex: index as c_int,
                    ipi_spec_dst: libc::in_addr {
                        s_addr: u32::from(local).to_be(),
                    },
                    ipi_addr: libc::in_addr { s_addr: 0 },
                };
                writer.put(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            if tos != 0 {
                writer.put(libc::IPPROTO_IP, libc::IP_TOS, tos);
            }
            if burst.hop_limit != DEFAULT_HOP_LIMIT {
                writer.put(libc::IPPROTO_IP, libc::IP_TTL, hops);
            }
        }
        IpAddr::V6(local) => {
            if let Some(index) = pktinfo {
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr {
                        s6_addr: local.octets(),
                    },
                    ipi6_ifindex: index as _,
                };
                writer.put(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
            if tos != 0 {
                writer.put(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, tos);
            }
            if burst.hop_limit != DEFAULT_HOP_LIMIT {
                writer.put(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hops);
            }
        }
    }
    writer.len
}

/// Metadata of one received message.
pub(crate) struct Slot<'a> {
    /// Sender; `None` when it is of no family that we know.
    pub(crate) remote: Option<SocketAddr>,
    /// The address that it was sent to, if the kernel told.
    pub(crate) local: Option<IpAddr>,
    /// Bytes of each packet of a GRO buffer.
    pub(crate) segment_len: Option<usize>,
    pub(crate) traffic_class: u8,
    /// 0 when the kernel did not tell.
    pub(crate) hop_limit: u8,
    /// The kernel cut it off: it was larger than the buffer.
    pub(crate) truncated: bool,
    pub(crate) bytes: &'a [u8],
}

/// A fixed array on the heap that raw pointers may refer to for as long as it lives: unlike a box's, its contents are
/// nobody's alone.
struct Pinned<T>(NonNull<[T]>);

impl<T: Clone> Pinned<T> {
    fn new(value: T, count: usize) -> Self {
        let boxed = vec![value; count].into_boxed_slice();
        // A box is never null.
        Self(NonNull::from(Box::leak(boxed)))
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns a pointer to element `i`.
    fn at(&self, i: usize) -> *mut T {
        assert!(i < self.len());
        // SAFETY: inside of the array.
        unsafe { self.0.as_ptr().cast::<T>().add(i) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: made from a box in `new`, given back once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Buffers for receiving several messages with one system call.
pub(crate) struct RecvRing {
    headers: Pinned<mmsghdr>,
    vectors: Pinned<iovec>,
    names: Pinned<sockaddr_storage>,
    controls: Pinned<Control>,
    /// Mapped: it is large, and glibc keeps as much more in each arena once that much has been freed (mallopt(3), `M_MMAP_THRESHOLD`).
    slab: MmapRaw,
    slot_len: usize,
    stride: usize,
    /// Headers that the kernel has written to since they were set.
    used: usize,
}

// SAFETY: everything that the pointers refer to belongs to the ring.
unsafe impl Send for RecvRing {}

impl RecvRing {
    /// Allocates `slots` buffers of `slot_len` bytes.
    ///
    /// # Errors
    /// Without memory.
    pub(crate) fn new(slots: usize, slot_len: usize) -> io::Result<Self> {
        // The extra line keeps the buffers' beginnings from falling into the same cache sets.
        let stride = slot_len + 64;
        let none = iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: slot_len,
        };
        let ring = Self {
            headers: Pinned::new(empty_header(), slots),
            vectors: Pinned::new(none, slots),
            names: Pinned::new(empty_name(), slots),
            controls: Pinned::new(Control([0; CONTROL_LEN]), slots),
            slab: MmapMut::map_anon(slots * stride)?.into(),
            slot_len,
            stride,
            used: slots,
        };
        for i in 0..slots {
            // SAFETY: all are elements of arrays of their own, to which there is no reference; the slab has `slots` strides.
            unsafe {
                (*ring.vectors.at(i)).iov_base = ring.slab.as_mut_ptr().add(i * stride).cast::<c_void>();
                let header = &mut (*ring.headers.at(i)).msg_hdr;
                header.msg_name = ring.names.at(i).cast::<c_void>();
                header.msg_iov = ring.vectors.at(i);
                header.msg_iovlen = 1;
                header.msg_control = ring.controls.at(i).cast::<c_void>();
            }
        }
        Ok(ring)
    }

    pub(crate) fn slots(&self) -> usize {
        self.headers.len()
    }

    /// Receives at most `max` messages without waiting and returns how many.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there.
    pub(crate) fn receive(&mut self, fd: BorrowedFd<'_>, max: usize) -> io::Result<usize> {
        // Only what the last call has changed is set again: an empty receive should cost a system call, no more.
        for i in 0..self.used {
            // SAFETY: no other reference to the element exists.
            let header = unsafe { &mut (*self.headers.at(i)).msg_hdr };
            header.msg_namelen = size_of::<sockaddr_storage>() as _;
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
                self.headers.at(0),
                count as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        self.used = got;
        Ok(got)
    }

    /// Message `i` of the last [`Self::receive`], which returned more than `i`.
    pub(crate) fn slot(&self, i: usize) -> Slot<'_> {
        // SAFETY: the kernel is done with them, and nothing writes to them while `self` is borrowed.
        let (header, name) = unsafe { (&*self.headers.at(i), &*self.names.at(i)) };
        let len = (header.msg_len as usize).min(self.slot_len);
        assert!(i < self.slots());
        // SAFETY: as above; `len` bytes lie inside of slot `i`, and that inside of the slab.
        let bytes = unsafe { std::slice::from_raw_parts(self.slab.as_ptr().add(i * self.stride), len) };
        let mut slot = Slot {
            remote: read_name(name, header.msg_hdr.msg_namelen as usize),
            local: None,
            segment_len: None,
            traffic_class: 0,
            hop_limit: 0,
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            bytes,
        };
        read_control(&header.msg_hdr, &mut slot);
        slot
    }
}

pub(super) fn read_name(name: &sockaddr_storage, len: usize) -> Option<SocketAddr> {
    match c_int::from(name.ss_family) {
        libc::AF_INET if len >= size_of::<sockaddr_in>() => {
            // SAFETY: the storage is larger and aligned, and holds this family.
            let v4 = unsafe { (&raw const *name).cast::<sockaddr_in>().read() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Some(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
            // SAFETY: as above.
            let v6 = unsafe { (&raw const *name).cast::<sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddr::new(ip.into(), u16::from_be(v6.sin6_port)))
        }
        _ => None,
    }
}

fn read_control(header: &msghdr, slot: &mut Slot<'_>) {
    // SAFETY: the kernel has written well-formed control messages and set their total length, or cut the last one off,
    // which CMSG_NXTHDR sees. Values are read unaligned, each as long as its kind is.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let data = libc::CMSG_DATA(at);
            match ((*at).cmsg_level, (*at).cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    slot.segment_len = usize::try_from(data.cast::<c_int>().read_unaligned()).ok();
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    slot.local = Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into());
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    slot.local = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
                }
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    slot.hop_limit = data.cast::<c_int>().read_unaligned() as u8;
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => slot.traffic_class = data.read(),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    slot.traffic_class = data.cast::<c_int>().read_unaligned() as u8;
                }
                _ => {}
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
}
