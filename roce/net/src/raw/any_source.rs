//! Packets from any address, for tests of hosts.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use roce_port::Train;
use socket2::{Domain, Protocol, Socket, Type};

use super::{frame, sockets};
use crate::{datapath::DEFAULT_HOP_LIMIT, socket::OpenError, sys::MAX_HEAD};

/// Raw IP socket that sends single packets with any source address, source port and IPv4 Identification. It receives nothing.
#[derive(Debug)]
pub struct AnySource(Socket);

impl AnySource {
    /// Opens a socket for packets of an IP version.
    ///
    /// # Errors
    /// Without CAP_NET_RAW.
    pub fn open(is_v6: bool) -> Result<Self, OpenError> {
        let domain = if is_v6 { Domain::IPV6 } else { Domain::IPV4 };
        // The kernel takes headers with this protocol, of either IP version.
        let opened = Socket::new(domain, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)));
        sockets::opened("raw", opened).map(Self)
    }

    /// Sends a packet. The UDP checksum is 0.
    ///
    /// # Errors
    /// `InvalidInput` for addresses of two IP versions; when there is no route to the destination, or the packet is longer than the
    /// interface takes.
    pub fn send(&self, src: SocketAddr, dst: SocketAddr, identification: u16, bytes: &[u8]) -> io::Result<()> {
        if src.is_ipv4() != dst.is_ipv4() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let packet = Train {
            local: src.ip(),
            remote: dst,
            src_port: src.port(),
            tos: 0,
            ttl: DEFAULT_HOP_LIMIT,
            segment_len: bytes.len(),
            bytes,
        };
        let mut head = [0; MAX_HEAD];
        let len = frame::write_ip(&mut head, &packet, identification);
        // The port of a raw socket's destination is a protocol, or 0.
        let to: (IpAddr, u16) = (dst.ip(), 0);
        self.0
            .send_to(&[&head[..len], bytes].concat(), &SocketAddr::from(to).into())
            .map(drop)
    }
}
