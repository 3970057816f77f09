//! Every system call that the standard library and `socket2` don't wrap: the only unsafe code of the datapaths.
//!
//! Pointers handed to the kernel point either at locals or at memory borrowed for the length of the call.

mod msg;
mod netlink;
mod raw;
mod room;
mod threads;

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use libc::{c_int, c_long, c_void, socklen_t};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        eventfd::EfdFlags,
        socket::SockaddrStorage,
        time::TimeSpec,
    },
    unistd::{SysconfVar, sysconf},
};

pub(crate) use msg::{Framed, MAX_HEAD, Origin, RecvRing, SendQueue, Way};
pub(crate) use netlink::{Rtnetlink, attribute, drain, number, watch_links, watch_neighbours};
pub(crate) use raw::{attach_filter, bind_link, packet_socket, raw_socket};
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
pub fn generation() -> u32 {
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

/// Whether the program was started with rights that its user may not have.
pub(crate) fn is_secure() -> bool {
    // SAFETY: a plain call, which only reads what the kernel gave the process at its start.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
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

/// Returns the number of the machine's processors that are online, if it can be told.
pub(crate) fn processors() -> Option<c_long> {
    sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten()
}

/// An event counter that poll, epoll and mio can wait for.
#[derive(Debug)]
pub struct EventFd(nix::sys::eventfd::EventFd);

impl EventFd {
    /// Creates a non-blocking event counter at zero.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self(nix::sys::eventfd::EventFd::from_flags(flags)?))
    }

    /// Makes the descriptor readable.
    pub fn raise(&self) {
        // It fails only when the counter is full: readable anyway.
        let _ = self.0.write(1);
    }

    /// Makes the descriptor unreadable.
    pub fn clear(&self) {
        // It fails only when the counter is zero already.
        let _ = self.0.read();
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
    Ok(wait_any_readable(&[fd.as_raw_fd()], timeout)?[0])
}

/// Waits as [`wait_readable`] does for several. Returns which are readable, or are no descriptors any more.
///
/// # Errors
/// When the system call fails.
pub fn wait_any_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let entry = |fd: &RawFd| {
        // SAFETY: only its number is used, by this one system call, which reports a descriptor that another thread has closed meanwhile;
        // nothing is read, written or closed through it.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        PollFd::new(fd, PollFlags::POLLIN)
    };
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(entry).collect();
    match ppoll(&mut polled, timeout.map(TimeSpec::from), None) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(polled.iter().map(|p| p.any() != Some(false)).collect())
}

/// Registers a descriptor with an epoll instance (`add`), or changes its registration: edge-triggered, for input or (`on` false) for
/// nothing. A closed descriptor is an error.
pub(crate) fn epoll_watch(epoll: &Epoll, add: bool, fd: RawFd, token: u64, on: bool) -> io::Result<()> {
    let flags = if on {
        EpollFlags::EPOLLIN | EpollFlags::EPOLLET
    } else {
        EpollFlags::empty()
    };
    let mut event = EpollEvent::new(flags, token);
    // SAFETY: only its number is used, by this one system call, which reports a descriptor that another thread has closed meanwhile;
    // nothing is read, written or closed through it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(match add {
        true => epoll.add(fd, event),
        false => epoll.modify(fd, &mut event),
    }?)
}

/// Returns the IP address of a socket address.
pub(crate) fn ip_of(addr: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = addr.as_sockaddr_in().map(|v4| v4.ip().into());
    v4.or_else(|| addr.as_sockaddr_in6().map(|v6| v6.ip().into()))
}

/// The MTU of the interface with this name, bytes. By an ioctl, which waits for no lock of the kernel's, as rtnetlink does.
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
