//! A reuseport group of UDP sockets on the RoCE port of one address, and the vault that keeps it.
//!
//! The kernel gives every packet to the socket whose index the BPF program returns, and indices must not change: closing a
//! socket moves the last one of the group into its place. So no socket of a group is ever closed as long as anybody uses
//! the group. All of them are put, as `SCM_RIGHTS`, into the queue of a unix socket, the *vault*. A process that has the vault
//! holds the group, at the price of one descriptor, and can take references out of it by peeking.
//!
//! So a process that has had a socket of such a group may keep it, and any of them can replace the program: its users are one trust
//! domain. Between users the broker has a program of another kind ([`Steering::Array`]), which takes the socket from an array
//! that the broker alone can write. Each member then gets a socket of its own, with a filter that it can't change, and which
//! lets packets for its place through and nothing else, however they come there.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use roce_bth::ROCE_UDP_PORT;
use roce_net::{holder, iface};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socketpair, sockopt::socket_cookie};
use socket2::{Protocol, SockFilter, SockRef, Socket, Type};

use crate::{
    bpf::{self, SocketArray},
    error::{Error, context},
    proto::{Place, SLOT_BITS, SLOTS},
    sys, wire,
};

/// Reason why there is no group.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    /// Another program has the port of this address.
    #[error("UDP port {ROCE_UDP_PORT} of {0} is taken")]
    Taken(IpAddr),
    /// The address is no interface's.
    #[error("{0} is not an address of this host (`ip addr` lists them)")]
    NotLocal(IpAddr),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] Error),
}

impl GroupError {
    /// Returns a text for users. The owner of the port is looked for in all processes, which takes long.
    pub(crate) fn explain(&self) -> String {
        match self {
            Self::Taken(addr) => format!("{self}: {}", holder::explain(*addr, ROCE_UDP_PORT)),
            _ => self.to_string(),
        }
    }
}

/// Way in which the kernel finds the socket of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Steering {
    /// By its index in the group (classic BPF): needs no right.
    Index,
    /// By an array of sockets (`SK_REUSEPORT`): needs CAP_BPF.
    Array,
}

/// Socket array and program of a group with [`Steering::Array`].
#[derive(Debug)]
struct Array {
    sockets: SocketArray,
    program: OwnedFd,
    /// Slot 0.
    broker: Socket,
    /// Drops packets without a receiver.
    nobody: Socket,
}

/// The group of one address, or of all addresses of one IP version.
#[derive(Debug)]
pub(crate) struct Group {
    addr: IpAddr,
    vault: OwnedFd,
    array: Option<Array>,
}

/// The addresses to bind for a device address: `::` stands for both IP versions.
pub(crate) fn family_addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.to_canonical() {
        IpAddr::V6(a) if a.is_unspecified() => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        other => vec![other],
    }
}

/// Index of the socket: the top bits of the destination queue pair number, bytes 5 to 7 of the BTH.
fn program() -> [libc::sock_filter; 4] {
    let op = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 4),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0x00ff_ffff),
        op(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 24 - u32::from(SLOT_BITS)),
        op(libc::BPF_RET | BPF_A, 0),
    ]
}

/// `BPF_A` of `linux/filter.h`: returns the accumulator.
const BPF_A: u32 = 0x10;

/// A socket's own filter, which sees the UDP header too: packets to queue pairs of a place, whole, and nothing else.
fn place_filter(place: Place) -> [SockFilter; 6] {
    let numbers = place.numbers();
    let op = |code: u32, k: u32| SockFilter::new(code as u16, 0, 0, k);
    [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 8 + 4),
        op(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0x00ff_ffff),
        op(
            libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K,
            24 - u32::from(numbers.bits),
        ),
        SockFilter::new(
            (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            0,
            1,
            numbers.slot.into(),
        ),
        op(libc::BPF_RET | libc::BPF_K, u32::MAX),
        op(libc::BPF_RET | libc::BPF_K, 0),
    ]
}

/// Lets nothing through but what is for the place, for as long as the socket lives. One that has a filter for ever keeps it.
fn confine(socket: &Socket, place: Place) -> io::Result<()> {
    if let Err(e) = socket.attach_filter(&place_filter(place)) {
        // It is locked: it was confined before it was handed out.
        return match e.raw_os_error() {
            Some(libc::EPERM) => Ok(()),
            _ => Err(e),
        };
    }
    sys::set_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1)
}

impl Array {
    fn open(addr: IpAddr) -> Result<Self, GroupError> {
        let make = context("making an array of sockets");
        let sockets = SocketArray::new().map_err(&make)?;
        let program = bpf::load_program(&sockets).map_err(context("loading the steering program"))?;
        let (broker, nobody) = (bind(addr, true)?, bind(addr, true)?);
        set_idle(&nobody).map_err(context("attaching a filter"))?;
        // The kernel merges packets only if the socket takes them so that it finds before it has looked into them.
        if let Err(e) = sys::set_int(nobody.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1) {
            tracing::debug!("packets are not merged: {e}");
        }
        let this = Self {
            sockets,
            program,
            broker,
            nobody,
        };
        this.steer().map_err(context("attaching the steering program"))?;
        let sockets = &this.sockets;
        let done = sockets.set(0, this.broker.as_fd());
        done.and_then(|()| sockets.set(bpf::NOBODY, this.nobody.as_fd()))
            .map_err(make)?;
        Ok(this)
    }

    /// Has the group's sockets chosen by the program.
    fn steer(&self) -> io::Result<()> {
        let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_EBPF);
        sys::set_int(self.broker.as_fd(), level, name, self.program.as_raw_fd())
    }

    fn parts(&self) -> [BorrowedFd<'_>; 4] {
        let (broker, nobody) = (self.broker.as_fd(), self.nobody.as_fd());
        [self.sockets.as_fd(), self.program.as_fd(), broker, nobody]
    }

    /// Adopts the descriptors that a vault held.
    fn adopt(parts: Vec<OwnedFd>) -> Option<Self> {
        let [sockets, program, broker, nobody] = <[OwnedFd; 4]>::try_from(parts).ok()?;
        let this = Self {
            sockets: SocketArray(sockets),
            program,
            broker: broker.into(),
            nobody: nobody.into(),
        };
        // Neither is something else: the array has the socket, and the program steers its group.
        let cookie = socket_cookie(&this.broker).ok()?;
        (this.sockets.cookie(0) == Some(cookie) && this.steer().is_ok()).then_some(this)
    }
}

impl Group {
    /// Opens a group. Packets for other slots than 0 are dropped until these are [taken](Self::take). `beside`: addresses of
    /// the broker's other groups, of which some may include this one's or be included.
    ///
    /// # Errors
    /// When another program has the port, or the address is not local; with [`Steering::Array`] also when this process may
    /// not load programs.
    pub(crate) fn open(addr: IpAddr, steering: Steering, beside: &[IpAddr]) -> Result<Self, GroupError> {
        let keep = context("keeping the group's sockets");
        if steering == Steering::Array {
            // A former member may have kept a socket, which must not be in the way: the port need not be free.
            let array = Array::open(addr)?;
            let vault = seal(&array.parts()).map_err(keep)?;
            let array = Some(array);
            return Ok(Self { addr, vault, array });
        }
        check_free(addr, beside)?;
        let first = bind(addr, true)?;
        roce_net::steer_group(first.as_fd(), &mut program()).map_err(context("attaching the steering program"))?;
        let mut sockets = vec![first];
        while sockets.len() < SLOTS {
            let socket = bind(addr, true)?;
            set_idle(&socket).map_err(context("attaching a filter"))?;
            sockets.push(socket);
        }
        let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let vault = seal(&fds).map_err(keep)?;
        let array = None;
        Ok(Self { addr, vault, array })
    }

    /// Takes over a group from its vault.
    ///
    /// # Errors
    /// When that does not hold a group on the RoCE port.
    pub(crate) fn adopt(vault: OwnedFd) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not the sockets of a group");
        let stored = wire::stored(vault.as_fd())?;
        let (addr, array) = if stored.len() == PARTS {
            let array = Array::adopt(stored).ok_or_else(invalid)?;
            (bound_to(&array.broker), Some(array))
        } else {
            let first = stored.first().and_then(bound_to);
            let right = |fd: &OwnedFd| {
                let socket = SockRef::from(fd);
                let kind = (socket.r#type().ok(), socket.reuse_port().ok());
                kind == (Some(Type::DGRAM), Some(true)) && bound_to(fd) == first
            };
            let all = stored.len() == SLOTS && stored.iter().all(right);
            (first.filter(|_| all), None)
        };
        let addr = addr.ok_or_else(invalid)?;
        Ok(Self { addr, vault, array })
    }

    /// Returns how it is steered.
    pub(crate) const fn steering(&self) -> Steering {
        match self.array {
            Some(_) => Steering::Array,
            None => Steering::Index,
        }
    }

    /// Attaches the steering program again, which any member can detach (`SO_DETACH_REUSEPORT_BPF` asks nobody). Does nothing
    /// to a group of [`Steering::Index`].
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn steer_again(&self) -> io::Result<()> {
        self.array.as_ref().map_or(Ok(()), Array::steer)
    }

    /// Returns the socket of slot 0.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn broker_socket(&self) -> io::Result<OwnedFd> {
        match &self.array {
            Some(array) => Ok(array.broker.try_clone()?.into()),
            None => self.retake(0),
        }
    }

    /// Takes a member's own socket, which a former broker had handed out to it: of [`Steering::Array`].
    ///
    /// # Errors
    /// When it is no socket of the group.
    pub(crate) fn give_again(&self, place: Place, socket: OwnedFd) -> io::Result<()> {
        let Some(array) = &self.array else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let bound = bound_to(&socket);
        let socket = Socket::from(socket);
        let is_udp = matches!(socket.r#type(), Ok(Type::DGRAM)) && socket.protocol()? == Some(Protocol::UDP);
        if !is_udp || bound != Some(self.addr) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a socket of the group"));
        }
        confine(&socket, place)?;
        if array.sockets.cookie(place.slot) == Some(socket_cookie(&socket)?) {
            return Ok(());
        }
        array.sockets.set(place.slot.into(), socket.as_fd())
    }

    /// Returns the address.
    pub(crate) const fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Returns the vault.
    pub(crate) fn vault(&self) -> BorrowedFd<'_> {
        self.vault.as_fd()
    }

    /// Returns a reference to the socket of a slot, which is its index.
    fn socket(&self, slot: u8) -> io::Result<Socket> {
        let socket = wire::stored(self.vault())?.into_iter().nth(slot.into());
        Ok(socket.ok_or(io::ErrorKind::InvalidInput)?.into())
    }

    /// Returns the socket of a place for its new owner: empty, and receiving from now on. With [`Steering::Array`] it is a new one.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn take(&self, place: Place) -> io::Result<OwnedFd> {
        let Some(array) = &self.array else {
            let socket = self.socket(place.slot)?;
            drain(&socket);
            return receiving(socket);
        };
        let socket = make(self.addr, true).map_err(io::Error::other)?;
        confine(&socket, place)?;
        bind_to(&socket, self.addr).map_err(io::Error::other)?;
        array.sockets.set(place.slot.into(), socket.as_fd())?;
        Ok(socket.into())
    }

    /// Returns the socket of a slot whose owner uses it already: what it has received stays. It receives even if the owner had
    /// been taken for dead. Of [`Steering::Index`].
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn retake(&self, slot: u8) -> io::Result<OwnedFd> {
        receiving(self.socket(slot)?)
    }

    /// Has packets for a slot dropped, whose owner is gone.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn put_back(&self, slot: u8) -> io::Result<()> {
        if let Some(array) = &self.array {
            return array.sockets.clear(slot);
        }
        let socket = self.socket(slot)?;
        set_idle(&socket)?;
        drain(&socket);
        Ok(())
    }
}

/// Checks that no other program has the port of an address. A group of another broker of this user would let us in, behind its own
/// sockets.
fn check_free(addr: IpAddr, beside: &[IpAddr]) -> Result<(), GroupError> {
    let overlaps = |other: &IpAddr| {
        let includes = other.is_unspecified() || addr.is_unspecified();
        *other == addr || (includes && other.is_ipv4() == addr.is_ipv4())
    };
    if !beside.iter().any(overlaps) {
        return bind(addr, false).map(drop);
    }
    // Our own sockets are in the way of such an attempt.
    let bound = holder::bound_addresses(ROCE_UDP_PORT).map_err(context("reading who has the UDP port"))?;
    match bound
        .into_iter()
        .find(|other| overlaps(other) && !beside.contains(other))
    {
        None => Ok(()),
        Some(other) => Err(GroupError::Taken(other)),
    }
}

/// Descriptors in the vault of a group of [`Steering::Array`].
const PARTS: usize = 4;

fn seal(fds: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let (ours, vault) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    wire::store(ours.as_fd(), fds)?;
    Ok(vault)
}

/// Lets a socket drop everything before it is queued.
fn set_idle(socket: &Socket) -> io::Result<()> {
    socket.attach_filter(&[SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)])
}

/// Lets a socket receive.
fn receiving(socket: Socket) -> io::Result<OwnedFd> {
    match socket.detach_filter() {
        Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
        _ => Ok(socket.into()),
    }
}

/// Returns the address of a socket that is bound to the port of RoCE.
pub(crate) fn bound_to(socket: &impl AsFd) -> Option<IpAddr> {
    let at = SockRef::from(socket).local_addr().ok()?.as_socket()?;
    (at.port() == ROCE_UDP_PORT).then(|| at.ip())
}

/// Throws away what is queued. It is bounded: a sender could be faster.
fn drain(socket: &Socket) {
    let mut buffer = [0];
    for _ in 0..1 << 16 {
        if let Err(e) = rustix::net::recv(socket, &mut buffer, RecvFlags::DONTWAIT)
            && e != rustix::io::Errno::INTR
        {
            break;
        }
    }
}

fn bind(addr: IpAddr, shared: bool) -> Result<Socket, GroupError> {
    let socket = make(addr, shared)?;
    bind_to(&socket, addr)?;
    Ok(socket)
}

fn make(addr: IpAddr, shared: bool) -> Result<Socket, GroupError> {
    let make = context("making a UDP socket");
    let socket = Socket::from(roce_net::udp_socket(addr.is_ipv4()).map_err(&make)?);
    // Multicast comes by sockets of its own; by default these would get whatever any process of the host has joined.
    let done = match addr {
        IpAddr::V4(_) => socket.set_multicast_all_v4(false),
        IpAddr::V6(_) => socket
            .set_only_v6(true)
            .and_then(|()| socket.set_multicast_all_v6(false)),
    };
    done.and_then(|()| socket.set_reuse_port(shared))
        .and_then(|()| socket.set_nonblocking(true))
        .map_err(&make)?;
    Ok(socket)
}

fn bind_to(socket: &Socket, addr: IpAddr) -> Result<(), GroupError> {
    let at = iface::scoped(addr, ROCE_UDP_PORT);
    socket.bind(&at.into()).map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => GroupError::Taken(addr),
        io::ErrorKind::AddrNotAvailable => GroupError::NotLocal(addr),
        _ => context("binding a UDP socket")(e).into(),
    })
}

#[cfg(test)]
mod tests {
    use std::{net::UdpSocket, time::Duration};

    use super::*;

    const fn place(slot: u8) -> Place {
        Place { slot, generation: 0 }
    }

    /// A packet to a queue pair of a slot, of generation 0.
    fn packet(slot: u8, mark: u8) -> Vec<u8> {
        let mut bytes = vec![0; 24];
        bytes[5] = slot << 1;
        bytes[23] = mark;
        bytes
    }

    fn receive(socket: &UdpSocket) -> Option<u8> {
        let mut bytes = [0; 64];
        let n = socket.recv(&mut bytes).ok()?;
        Some(bytes[n - 1])
    }

    fn check(addr: &str) {
        let addr: IpAddr = addr.parse().unwrap();
        let group = Group::open(addr, Steering::Index, &[]).unwrap();
        assert!(
            matches!(Group::open(addr, Steering::Index, &[]), Err(GroupError::Taken(_))),
            "there is one already"
        );
        let take = |group: &Group, slot| blocking(group.take(place(slot)).unwrap());
        let (five, last) = (take(&group, 5), take(&group, 127));
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        let send = |slot, mark| sender.send_to(&packet(slot, mark), (addr, ROCE_UDP_PORT)).unwrap();
        // To nobody, then to two.
        send(6, 1);
        send(5, 2);
        send(127, 3);
        assert_eq!((receive(&five), receive(&last)), (Some(2), Some(3)));
        // The process that opened the group and the one that had a slot are gone: every socket keeps its place.
        let kept = group.vault().try_clone_to_owned().unwrap();
        drop((group, five));
        send(127, 4);
        assert_eq!(receive(&last), Some(4));
        let group = Group::adopt(kept).unwrap();
        assert_eq!(group.addr(), addr);
        send(5, 5);
        group.put_back(5).unwrap();
        send(5, 6);
        let five = take(&group, 5);
        send(5, 7);
        assert_eq!(receive(&five), Some(7), "nothing for the former owner of the slot");
    }

    #[test]
    fn packets_follow_the_slot_and_the_group_outlives_its_opener() {
        check("127.44.0.1");
    }

    #[test]
    fn the_same_over_ipv6() {
        let _only = ferroce_loopback::only_one();
        check("::1");
    }

    /// Sends a packet to a slot and waits until what was sent before has arrived, or was dropped.
    fn send_and_settle(sender: &UdpSocket, group: &Group, slot: u8, mark: u8) {
        const WITNESS: u8 = 100;
        let witness = blocking(group.take(place(WITNESS)).unwrap());
        let to = (group.addr(), ROCE_UDP_PORT);
        sender.send_to(&packet(slot, mark), to).unwrap();
        sender.send_to(&packet(WITNESS, mark), to).unwrap();
        assert_eq!(receive(&witness), Some(mark));
    }

    fn blocking(socket: OwnedFd) -> UdpSocket {
        let socket = UdpSocket::from(socket);
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }

    fn waiting(socket: &UdpSocket) -> Vec<u8> {
        socket.set_nonblocking(true).unwrap();
        std::iter::from_fn(|| receive(socket)).collect()
    }

    #[test]
    fn an_owner_that_comes_back_keeps_what_its_socket_received_and_a_new_one_gets_nothing_of_it() {
        let addr: IpAddr = [127, 44, 0, 3].into();
        let group = Group::open(addr, Steering::Index, &[]).unwrap();
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        let send = |slot, mark| send_and_settle(&sender, &group, slot, mark);
        let owner = blocking(group.take(place(5)).unwrap());
        send(5, 1);
        // It tells another broker that it is there.
        let again = blocking(group.retake(5).unwrap());
        send(5, 2);
        assert_eq!(waiting(&owner), [1, 2]);
        send(5, 3);
        assert_eq!(waiting(&again), [3], "it is the same socket");
        // It is taken for dead: what waits and what comes is dropped, until it is back.
        send(5, 4);
        group.put_back(5).unwrap();
        send(5, 5);
        drop(group.retake(5).unwrap());
        send(5, 6);
        assert_eq!(waiting(&owner), [6]);
        // Another slot is as idle as before.
        send(6, 7);
        let other = blocking(group.retake(6).unwrap());
        send(6, 8);
        assert_eq!(waiting(&other), [8]);
        // A new owner begins with nothing.
        send(5, 9);
        let new = blocking(group.take(place(5)).unwrap());
        send(5, 10);
        assert_eq!(waiting(&new), [10]);
        let beyond = group.retake(SLOTS as u8).unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_is_no_group_is_refused() {
        let (_, empty) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        assert!(Group::adopt(empty).is_err());
        let vault = seal(&[bind("127.44.0.2".parse().unwrap(), true).unwrap().as_fd()]).unwrap();
        assert!(Group::adopt(vault).is_err(), "one socket is too few");
        assert!(matches!(
            Group::open("192.0.2.1".parse().unwrap(), Steering::Index, &[]),
            Err(GroupError::NotLocal(_))
        ));
    }
}
