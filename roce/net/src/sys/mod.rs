//! Every system call that the standard library and `socket2` don't wrap: the only unsafe code of the datapaths.
//!
//! Pointers handed to the kernel point either at locals or at memory borrowed for the length of the call.

mod error;
mod msg;
mod netlink;
mod room;
mod threads;

use std::{
    ffi::CStr,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use libc::{c_int, c_void, socklen_t};

pub(crate) use error::{IcmpError, QUOTED, receive_error};
pub(crate) use msg::{Origin, RecvRing, SendQueue};
pub(crate) use netlink::{Rtnetlink, drain, watch_links, watch_neighbours};
pub(crate) use room::RoomWatch;
pub(crate) use threads::shorten_slice;
pub use threads::{Thread, start_thread};

/// `linux/in6.h`; not in `libc`.
pub(crate) const IPV6_MULTICAST_ALL: c_int = 29;

/// How many forks lie between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A number that is another one in every forked child.
pub(crate) fn generation() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler is a plain function, and only adds to an atomic number.
        let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if failed != 0 {
            tracing::error!("pthread_atfork failed: forked children must not use devices");
        }
    });
    FORKS.load(Ordering::Relaxed)
}

/// The same without watching: for places where the number has been asked for before.
pub(crate) fn generation_now() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Whether the program was started with rights that its user may not have.
pub(crate) fn is_secure() -> bool {
    // SAFETY: a plain call, which only reads what the kernel gave the process at its start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// The effective user of this process.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: a plain call, which can't fail.
    unsafe { libc::geteuid() }
}

/// Turns a `-1` into the error of this thread.
fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A UDP socket of the kernel's, even in a process where somebody stands in front of the C library's `socket`: librspreload makes
/// of every socket one over RDMA, and RDMA needs this one.
///
/// # Errors
/// When the kernel has none.
pub fn udp_socket(v4: bool) -> io::Result<OwnedFd> {
    let domain = if v4 { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::syscall(libc::SYS_socket, domain, kind, libc::IPPROTO_UDP) };
    let fd = check(fd as c_int)?;
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // librspreload finds the C library's calls in the first `fcntl`, and not in those that follow here.
    // SAFETY: no memory is passed.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) })?;
    Ok(fd)
}

/// Sets a socket option whose value is an integer.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: `value` lives on the stack for the call and `len` is its size.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast::<c_void>(), len) };
    check(rc).map(drop)
}

/// Makes a socket drop every packet before it is queued: for sockets that only send.
pub(crate) fn drop_all_received(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut accept_nothing = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: 0,
    };
    attach_program(fd, libc::SO_ATTACH_FILTER, core::slice::from_mut(&mut accept_nothing))
}

/// Attaches a classic BPF program to a socket, or to its reuseport group, as the option says.
pub(crate) fn attach_program(
    fd: BorrowedFd<'_>,
    option: c_int,
    instructions: &mut [libc::sock_filter],
) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(instructions.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: instructions.as_mut_ptr(),
    };
    let len = size_of::<libc::sock_fprog>() as socklen_t;
    let value = (&raw const program).cast::<c_void>();
    // SAFETY: `program` and the instructions that it points at (`len` of them) live for the call; the kernel copies them.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, value, len) };
    check(rc).map(drop)
}

/// Packets that the kernel dropped because the socket's receive buffer was full; `None` when it does not tell.
pub(crate) fn receive_drops(fd: BorrowedFd<'_>) -> Option<u64> {
    /// `SK_MEMINFO_DROPS` of `linux/sock_diag.h`, and the number of words.
    const DROPS: usize = 8;
    let mut words = [0u32; DROPS + 1];
    let mut len = size_of_val(&words) as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `words`.
    let rc = unsafe {
        let value = words.as_mut_ptr().cast::<c_void>();
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, value, &raw mut len)
    };
    (rc == 0 && len as usize == size_of_val(&words)).then(|| u64::from(words[DROPS]))
}

/// Returns the number of the machine's processors that are online.
pub(crate) fn processors() -> i64 {
    // SAFETY: no memory is passed.
    unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }
}

/// An event counter that poll, epoll and mio can wait for.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A non-blocking event counter at zero.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes the descriptor readable.
    pub fn raise(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight bytes are read from the stack. It fails only when the counter is full: readable anyway.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast::<c_void>(), one.len()) };
    }

    /// Makes the descriptor unreadable.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: at most eight bytes are written to the stack. It fails only when the counter is zero already.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast::<c_void>(), count.len()) };
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until a descriptor is readable or the time runs out (`None`: for ever). Returns whether it is readable. A signal
/// that is handled meanwhile ends the wait early with `false`.
///
/// # Errors
/// When the system call fails.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let mut polled = [entry(fd.as_raw_fd())];
    poll(&mut polled, timeout)?;
    Ok(polled[0].revents != 0)
}

/// The same of several: which are readable, or are no descriptors any more.
pub(crate) fn wait_any_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<_> = fds.iter().map(|fd| entry(*fd)).collect();
    poll(&mut polled, timeout)?;
    Ok(polled.iter().map(|p| p.revents != 0).collect())
}

fn entry(fd: RawFd) -> libc::pollfd {
    libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }
}

fn poll(polled: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let time = timeout.map(timespec);
    let time = time.as_ref().map_or(std::ptr::null(), |t| &raw const *t);
    let count = polled.len() as libc::nfds_t;
    // SAFETY: so many entries and, if not null, one timespec on the stack; no signal mask.
    match check(unsafe { libc::ppoll(polled.as_mut_ptr(), count, time, std::ptr::null()) }) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(e) => Err(e),
    }
}

fn timespec(d: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(d.as_secs()).unwrap_or(libc::time_t::MAX),
        // Less than 10^9.
        tv_nsec: (d.subsec_nanos() as i32).into(),
    }
}

/// A monotonic clock's alarm with nanoseconds, as a descriptor.
#[derive(Debug)]
pub(crate) struct TimerFd(OwnedFd);

impl TimerFd {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: no memory is passed.
        let fd = check(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) })?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Fires once after `delay` (at once when zero), instead of whatever was set before.
    pub(crate) fn set(&self, delay: Duration) -> io::Result<()> {
        let zero = timespec(Duration::ZERO);
        let spec = libc::itimerspec {
            it_interval: zero,
            it_value: timespec(delay.max(Duration::from_nanos(1))),
        };
        // SAFETY: `spec` lives on the stack; the old value is not asked for.
        let rc = unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const spec, std::ptr::null_mut()) };
        check(rc).map(drop)
    }
}

impl AsFd for TimerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mio poll's epoll instance, as another descriptor.
pub(crate) fn epoll_of(poll: &mio::Poll) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor belongs to `poll`, which is borrowed for this call.
    unsafe { BorrowedFd::borrow_raw(poll.as_raw_fd()) }.try_clone_to_owned()
}

/// Registers a descriptor with an epoll instance, edge-triggered, for input or (`on` false) for nothing yet.
pub(crate) fn epoll_add(epoll: BorrowedFd<'_>, fd: RawFd, token: usize, on: bool) -> io::Result<()> {
    epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, token, on)
}

/// Watches a descriptor for input, edge-triggered, or stops watching it. It must be registered with the epoll instance.
pub(crate) fn epoll_watch(epoll: BorrowedFd<'_>, fd: RawFd, token: usize, on: bool) -> io::Result<()> {
    epoll_ctl(epoll, libc::EPOLL_CTL_MOD, fd, token, on)
}

fn epoll_ctl(epoll: BorrowedFd<'_>, action: c_int, fd: RawFd, token: usize, on: bool) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: if on { (libc::EPOLLIN | libc::EPOLLET) as u32 } else { 0 },
        u64: token as u64,
    };
    // SAFETY: one epoll_event on the stack; a descriptor that is not registered (any more) is an error.
    let rc = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), action, fd, &raw mut event) };
    check(rc).map(drop)
}

/// One address of a network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InterfaceAddr {
    /// Interface name.
    pub name: String,
    /// The address.
    pub ip: IpAddr,
    /// The interface's number.
    pub index: u32,
    /// It is a loopback interface.
    pub loopback: bool,
    /// It is up.
    pub up: bool,
    /// It is up and has a link.
    pub running: bool,
}

/// Collects what `read` makes of each address of each interface: IP addresses and, as one more address, the link's.
fn collect_addresses<T>(read: impl Fn(&libc::ifaddrs) -> Option<T>) -> io::Result<Vec<T>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: on success `list` owns a linked list, freed below.
    check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut out = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: `at` is a node of the list, which lives until freeifaddrs.
        let node = unsafe { &*at };
        at = node.ifa_next;
        out.extend(read(node));
    }
    // SAFETY: made by getifaddrs, freed once.
    unsafe { libc::freeifaddrs(list) };
    Ok(out)
}

/// All IPv4 and IPv6 addresses of this network namespace.
///
/// # Errors
/// When the kernel can't tell.
pub fn interface_addresses() -> io::Result<Vec<InterfaceAddr>> {
    collect_addresses(|node| {
        // SAFETY: the address is null or a sockaddr of the family that it names.
        let ip = unsafe { ip_of(node.ifa_addr) }?;
        // SAFETY: the name is a C string of the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        Some(InterfaceAddr {
            name: name.to_string_lossy().into_owned(),
            ip,
            // SAFETY: a C string, as above.
            index: unsafe { libc::if_nametoindex(node.ifa_name) },
            loopback: has_flag(node, libc::IFF_LOOPBACK),
            up: has_flag(node, libc::IFF_UP),
            running: is_running(node.ifa_flags),
        })
    })
}

fn has_flag(node: &libc::ifaddrs, flag: c_int) -> bool {
    node.ifa_flags & flag as u32 != 0
}

/// Whether an interface is up and has a carrier, as rdma_rxe's port. IFF_RUNNING follows the carrier up to a second later.
fn is_running(flags: u32) -> bool {
    let both = (libc::IFF_UP | libc::IFF_LOWER_UP) as u32;
    flags & both == both
}

/// One network interface.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Number.
    pub index: u32,
    /// Hardware address; zeros on a loopback interface.
    pub mac: [u8; 6],
    /// It is a loopback interface.
    pub loopback: bool,
    /// It is up.
    pub up: bool,
    /// It is up and has a link.
    pub running: bool,
}

/// All interfaces of this network namespace, in the order of their numbers.
///
/// # Errors
/// When the kernel can't tell.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut out = collect_addresses(|node| {
        // SAFETY: the address is null, or a socket address of the family that it names.
        let (index, mac) = unsafe { link_of(node.ifa_addr) }?;
        // SAFETY: the name is a C string of the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        Some(Interface {
            name: name.to_string_lossy().into_owned(),
            index,
            mac,
            loopback: has_flag(node, libc::IFF_LOOPBACK),
            up: has_flag(node, libc::IFF_UP),
            running: is_running(node.ifa_flags),
        })
    })?;
    out.sort_by_key(|i| i.index);
    Ok(out)
}

/// # Safety
/// `addr` is null or points at a socket address as long as its family says.
unsafe fn link_of(addr: *const libc::sockaddr) -> Option<(u32, [u8; 6])> {
    // SAFETY: a sockaddr_ll when the family says so.
    unsafe {
        if addr.is_null() || c_int::from((*addr).sa_family) != libc::AF_PACKET {
            return None;
        }
        let link = addr.cast::<libc::sockaddr_ll>().read_unaligned();
        let mac = std::array::from_fn(|i| link.sll_addr[i]);
        Some((u32::try_from(link.sll_ifindex).ok()?, mac))
    }
}

/// # Safety
/// `addr` is null or points at a socket address as long as its family says.
unsafe fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: every socket address begins with its family, and is a sockaddr_in or sockaddr_in6 when that says so.
    unsafe {
        match c_int::from((*addr).sa_family) {
            libc::AF_INET => {
                let v4 = addr.cast::<libc::sockaddr_in>().read_unaligned();
                Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
            }
            libc::AF_INET6 => {
                let v6 = addr.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
            }
            _ => None,
        }
    }
}

/// The MTU of the interface with this name, bytes.
pub(crate) fn interface_mtu(socket: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    // SAFETY: an ifreq is plain data; all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.as_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    // SAFETY: SIOCGIFMTU reads the name, which ends with a zero, and writes ifru_mtu.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) })?;
    // SAFETY: the kernel has set this member.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}
