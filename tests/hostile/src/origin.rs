//! Senders of forged packets: a UDP socket of our own at an address, which needs no privilege, or a raw socket that
//! writes any sender.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    os::fd::AsRawFd,
    sync::Arc,
};

use roce_bth::ROCE_UDP_PORT;
use roce_icrc::Flow;
use socket2::{Domain, Protocol, Socket, Type};

use crate::aim::Aim;

const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const TTL: u8 = 64;

#[derive(Debug)]
enum How {
    /// The kernel writes the header: DF, Identification 0.
    Socket(UdpSocket),
    /// We write it.
    Raw(Arc<Socket>),
}

/// A sender.
#[derive(Debug)]
pub struct Origin {
    aim: Aim,
    addr: SocketAddr,
    how: How,
}

impl Origin {
    /// A socket at an address of this host, at any port.
    ///
    /// # Errors
    /// When the address is not ours, or not allowed.
    pub fn bind(aim: Aim, addr: IpAddr) -> io::Result<Self> {
        aim.check(addr)?;
        let socket = UdpSocket::bind((addr, 0))?;
        if addr.is_ipv4() {
            probe_mtu(&socket)?;
        }
        Ok(Self {
            aim,
            addr: socket.local_addr()?,
            how: How::Socket(socket),
        })
    }

    /// Sockets at `count` IPv4 addresses in a row.
    ///
    /// # Errors
    /// Of the first that can't be had.
    pub fn crowd(aim: Aim, first: Ipv4Addr, count: u32) -> io::Result<Vec<Self>> {
        (0..count)
            .map(|n| {
                let addr = Ipv4Addr::from_bits(first.to_bits().wrapping_add(n)).into();
                Self::bind(aim, addr).map_err(|e| io::Error::new(e.kind(), format!("{addr}: {e}")))
            })
            .collect()
    }

    /// A raw socket, which needs CAP_NET_RAW, that sends as `count` IPv4 addresses in a row, whosever they are.
    ///
    /// # Errors
    /// When the address is not allowed, or the system refuses.
    pub fn spoof(aim: Aim, first: Ipv4Addr, count: u32, port: u16) -> io::Result<Vec<Self>> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)))?;
        socket.set_header_included_v4(true)?;
        let socket = Arc::new(socket);
        (0..count)
            .map(|n| {
                let addr = Ipv4Addr::from_bits(first.to_bits().wrapping_add(n));
                aim.check(addr.into())?;
                Ok(Self {
                    aim,
                    addr: (addr, port).into(),
                    how: How::Raw(socket.clone()),
                })
            })
            .collect()
    }

    /// The sender's address.
    pub const fn ip(&self) -> IpAddr {
        self.addr.ip()
    }

    /// Returns the addresses and ports that the ICRC of packets to an address covers.
    ///
    /// # Errors
    /// When that is of another IP version.
    pub fn flow(&self, to: IpAddr) -> io::Result<Flow> {
        let to = SocketAddr::new(to, ROCE_UDP_PORT);
        Flow::try_from((self.addr, to)).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))
    }

    /// Sends a packet. A raw socket writes the Identification.
    ///
    /// # Errors
    /// When the address is not allowed, or the system refuses.
    pub fn send(&self, to: IpAddr, identification: u16, packet: &[u8]) -> io::Result<()> {
        self.aim.check(to)?;
        match &self.how {
            How::Socket(socket) => socket.send_to(packet, (to, ROCE_UDP_PORT)).map(drop),
            How::Raw(socket) => {
                let (SocketAddr::V4(from), IpAddr::V4(to)) = (self.addr, to) else {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "false senders are IPv4 only",
                    ));
                };
                let to = SocketAddrV4::new(to, ROCE_UDP_PORT);
                let datagram = datagram(from, to, identification, packet)?;
                // The port of a raw socket's destination is not used.
                socket
                    .send_to(&datagram, &SocketAddrV4::new(*to.ip(), 0).into())
                    .map(drop)
            }
        }
    }
}

/// An IPv4 datagram with DF set. The kernel makes the header's checksum; that of UDP may be left out.
fn datagram(from: SocketAddrV4, to: SocketAddrV4, identification: u16, packet: &[u8]) -> io::Result<Vec<u8>> {
    let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "too long");
    let udp_len = u16::try_from(UDP_LEN + packet.len()).map_err(too_long)?;
    let len = u16::try_from(IPV4_LEN + UDP_LEN + packet.len()).map_err(too_long)?;
    let mut out = Vec::with_capacity(usize::from(len));
    out.extend([0x45, 0]);
    out.extend(len.to_be_bytes());
    out.extend(identification.to_be_bytes());
    out.extend([0x40, 0, TTL, 17, 0, 0]);
    out.extend(from.ip().octets());
    out.extend(to.ip().octets());
    out.extend(from.port().to_be_bytes());
    out.extend(to.port().to_be_bytes());
    out.extend(udp_len.to_be_bytes());
    out.extend([0, 0]);
    out.extend(packet);
    Ok(out)
}

/// Has the kernel set DF whatever it knows of the path, as RoCE wants it.
fn probe_mtu(socket: &UdpSocket) -> io::Result<()> {
    let value: libc::c_int = libc::IP_PMTUDISC_PROBE;
    // SAFETY: the descriptor is open, and the pointer is to a value of the length that is given with it.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
