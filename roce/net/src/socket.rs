//! UDP sockets of a datapath: how they are made and set up.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
};

use nix::sys::socket::{
    setsockopt,
    sockopt::{RcvBufForce, SndBufForce},
};
use roce_bth::ROCE_UDP_PORT;
use socket2::{SockFilter, SockRef, Socket, Type};

use crate::{datapath::DEFAULT_HOP_LIMIT, holder, iface, sys};

/// Below this a burst of a few messages overflows the receive buffer.
const SMALL_BUFFER: usize = 1 << 20;
const SEND_BUFFER: usize = 4 << 20;

/// Configuration of a UDP datapath.
#[derive(Clone, Debug)]
pub struct UdpConfig {
    /// The address to use; unspecified: all of that family, and `::` means IPv4 too.
    pub addr: IpAddr,
    /// The UDP port to receive on: 4791.
    pub port: u16,
    /// Receive buffer to ask the system for, bytes.
    pub receive_buffer: usize,
    /// Send several packets with one call.
    pub gso: bool,
    /// Receive several packets with one call.
    pub gro: bool,
    /// Sockets to send from, each with its own source port. 0: everything comes from the receiving socket.
    pub send_sockets: usize,
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            addr: Ipv4Addr::UNSPECIFIED.into(),
            port: ROCE_UDP_PORT,
            receive_buffer: 8 << 20,
            gso: true,
            gro: true,
            send_sockets: 4,
        }
    }
}

/// Reason why a datapath could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another socket receives on the port.
    #[error("UDP port {port} of {addr} is taken: {holder}")]
    PortTaken {
        /// Our address.
        addr: IpAddr,
        /// The port.
        port: u16,
        /// Its owner, and what to do.
        holder: String,
    },
    /// No interface has the address.
    #[error("{0} is not an address of this host (`ip addr` lists them)")]
    NotLocal(IpAddr),
    /// The process lacks a privilege.
    #[error("the {datapath} datapath needs CAP_NET_RAW: {}", Self::WITHOUT_NET_RAW)]
    NeedsNetRaw {
        /// Name of the datapath.
        datapath: &'static str,
    },
    /// The datapath can't be used at the address.
    #[error("the {datapath} datapath does not work at address {addr}: {reason}")]
    Unsuitable {
        /// Name of the datapath.
        datapath: &'static str,
        /// Our address.
        addr: IpAddr,
        /// Reason, and what to do.
        reason: String,
    },
    /// A system call failed.
    #[error("{context}: {source}")]
    Io {
        /// Operation that failed.
        context: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

impl OpenError {
    /// Remedies for [`NeedsNetRaw`](Self::NeedsNetRaw).
    pub const WITHOUT_NET_RAW: &str = "run it as root, give it the capability (`setpriv --ambient-caps +net_raw`, \
                                       AmbientCapabilities=CAP_NET_RAW of systemd), or use the udp datapath, which needs none";
}

pub(crate) fn context(context: &'static str) -> impl Fn(io::Error) -> OpenError {
    move |source| OpenError::Io { context, source }
}

/// Sockets of one IP version.
pub(crate) struct Family {
    /// Bound to the RoCE port.
    pub(crate) main: Socket,
    /// Sockets to send from, with the port of each.
    pub(crate) senders: Vec<(u16, Socket)>,
    /// Address of all of them.
    pub(crate) addr: IpAddr,
}

/// Returns the addresses to bind for a device address. `::` stands for both IP versions.
pub(crate) fn family_addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.to_canonical() {
        IpAddr::V6(a) if a.is_unspecified() => vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
        other => vec![other],
    }
}

impl Family {
    /// Sets up a bound socket as the receiving one. There are none to send from yet.
    pub(crate) fn of(main: Socket, addr: IpAddr) -> Result<Self, OpenError> {
        configure_receiver(&main, addr).map_err(context("setting up the receiving socket"))?;
        Ok(Self {
            main,
            senders: vec![],
            addr,
        })
    }

    /// Returns the address if it is a specific one.
    pub(crate) fn bound(&self) -> Option<IpAddr> {
        (!self.addr.is_unspecified()).then_some(self.addr)
    }
}

/// Takes over a bound socket. Returns its address, too.
pub(crate) fn adopt(fd: &OwnedFd) -> io::Result<(Socket, SocketAddr)> {
    let socket = Socket::from(fd.try_clone()?);
    let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
    let at = socket
        .local_addr()?
        .as_socket()
        .ok_or_else(|| invalid("not an IP socket"))?;
    if socket.r#type()? != Type::DGRAM || at.port() == 0 {
        return Err(invalid("not a bound UDP socket"));
    }
    set_up(&socket, at.ip())?;
    Ok((socket, at))
}

/// Binds a socket to the RoCE port.
pub(crate) fn bind_receiver(socket: &Socket, config: &UdpConfig, addr: IpAddr) -> Result<(), OpenError> {
    let bound = socket.bind(&iface::scoped(addr, config.port).into());
    bound.map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => OpenError::PortTaken {
            addr,
            port: config.port,
            holder: holder::explain(addr, config.port),
        },
        io::ErrorKind::AddrNotAvailable => OpenError::NotLocal(addr),
        _ => context("binding a UDP socket")(e),
    })
}

/// Sets the receive buffers of sockets, past the system's limit with CAP_NET_ADMIN. Warns if the system grants too little.
pub(crate) fn grow_receive_buffers<'a>(
    sockets: impl Iterator<Item = &'a Socket> + Clone,
    wanted: usize,
) -> Result<(), OpenError> {
    // The kernel doubles the number, to make room for its own overhead.
    let bytes = wanted.min(i32::MAX as usize / 2);
    for socket in sockets.clone() {
        if setsockopt(socket, RcvBufForce, &bytes).is_err() {
            let set = socket.set_recv_buffer_size(bytes);
            set.map_err(context("setting the receive buffer"))?;
        }
    }
    let granted = receive_buffer(sockets);
    if granted < wanted.min(SMALL_BUFFER) {
        tracing::warn!(
            "the receive buffer is only {granted} bytes of {wanted} asked for: packets will be lost under load; as root: \
             `sysctl -w net.core.rmem_max={wanted}`",
        );
    }
    Ok(())
}

/// Returns the size of the smallest receive buffer, as the kernel counts: twice the bytes that were asked for.
pub(crate) fn receive_buffer<'a>(sockets: impl Iterator<Item = &'a Socket>) -> usize {
    let sizes = sockets.filter_map(|socket| socket.recv_buffer_size().ok());
    sizes.min().unwrap_or(0)
}

/// Has the kernel drop whatever arrives at a socket, before it is queued.
pub(crate) fn accept_nothing(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).attach_filter(&[SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)])
}

/// Creates a socket with the options that receiving and sending sockets need.
pub(crate) fn new_socket(addr: IpAddr) -> Result<Socket, OpenError> {
    let socket = Socket::from(sys::udp_socket(addr.is_ipv4()).map_err(context("making a UDP socket"))?);
    if addr.is_ipv6() {
        sys::set_int(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)
            .map_err(context("setting up a UDP socket"))?;
    }
    set_up(&socket, addr).map_err(context("setting up a UDP socket"))?;
    Ok(socket)
}

/// Sets the send buffer of a socket, past the system's limit with CAP_NET_ADMIN.
pub(crate) fn grow_send_buffer(socket: &Socket) -> Result<(), OpenError> {
    if setsockopt(socket, SndBufForce, &SEND_BUFFER).is_err() {
        let set = socket.set_send_buffer_size(SEND_BUFFER);
        set.map_err(context("setting the send buffer"))?;
    }
    Ok(())
}

/// Sets the options of receiving and sending sockets that can be set at any time.
pub(crate) fn set_up(socket: &Socket, addr: IpAddr) -> io::Result<()> {
    let set = |level, name, value| sys::set_int(socket.as_fd(), level, name, value);
    let hops = i32::from(DEFAULT_HOP_LIMIT);
    // Groups that only other sockets have joined are not received.
    match addr {
        IpAddr::V4(_) => {
            set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
            set(libc::IPPROTO_IP, libc::IP_TTL, hops)?;
            set(libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, hops)?;
            set(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
        }
        IpAddr::V6(_) => {
            set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, hops)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, hops)?;
            set(libc::IPPROTO_IPV6, sys::IPV6_MULTICAST_ALL, 0)?;
        }
    }
    socket.set_nonblocking(true)
}

/// Sets the options of a receiving socket.
pub(crate) fn configure_receiver(socket: &Socket, addr: IpAddr) -> io::Result<()> {
    let set = |level, name| sys::set_int(socket.as_fd(), level, name, 1);
    match addr {
        IpAddr::V4(_) => {
            set(libc::IPPROTO_IP, libc::IP_RECVTOS)?;
            set(libc::IPPROTO_IP, libc::IP_RECVTTL)?;
            if addr.is_unspecified() {
                set(libc::IPPROTO_IP, libc::IP_PKTINFO)?;
            }
        }
        IpAddr::V6(_) => {
            set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS)?;
            set(libc::IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT)?;
            // rdma_rxe sends UDP checksum 0, which the kernel would drop.
            set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX)?;
            if addr.is_unspecified() {
                set(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)?;
            }
        }
    }
    Ok(())
}
