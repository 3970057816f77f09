//! Raw IP and packet sockets of a datapath.

use std::{
    io,
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr},
    os::fd::AsFd,
};

use roce_port::RxMeta;
use socket2::Socket;

use super::{
    filter::{self, Accepted, Layer},
    frame,
};
use crate::{
    iface,
    socket::{OpenError, accept_nothing, context, grow_send_buffer, set_up},
    sys::{self, RecvRing},
};

/// Turns the error of a socket that needs a privilege into the datapath's.
pub(super) fn opened(datapath: &'static str, socket: io::Result<impl Into<Socket>>) -> Result<Socket, OpenError> {
    socket.map(Into::into).map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => OpenError::NeedsNetRaw { datapath },
        _ => context("opening a raw socket")(e),
    })
}

/// Opens a raw IP socket to send from. Its IPv4 headers are ours.
pub(crate) fn ip_sender(datapath: &'static str, addr: IpAddr) -> Result<Socket, OpenError> {
    let socket = opened(datapath, sys::raw_socket(addr.is_ipv4()))?;
    let failed = context("setting up a raw socket");
    accept_nothing(&socket).map_err(&failed)?;
    if addr.is_ipv4() {
        sys::set_int(socket.as_fd(), libc::IPPROTO_IP, libc::IP_HDRINCL, 1).map_err(&failed)?;
    }
    set_up(&socket, addr).map_err(&failed)?;
    socket.bind(&iface::scoped(addr, 0).into()).map_err(&failed)?;
    grow_send_buffer(&socket)?;
    Ok(socket)
}

/// Opens a packet socket to send from.
pub(crate) fn link_sender(datapath: &'static str) -> Result<Socket, OpenError> {
    let socket = opened(datapath, sys::packet_socket())?;
    grow_send_buffer(&socket)?;
    Ok(socket)
}

/// Kind of a socket that packets arrive at.
#[derive(Clone, Debug)]
enum Kind {
    Ip,
    /// Frames of an interface. They have not passed the IP layer.
    Link {
        loopback: bool,
        /// Addresses of this host, which no packet from outside comes from.
        ours: Vec<IpAddr>,
    },
}

/// A socket that packets arrive at.
pub(crate) struct Receiver {
    pub(crate) socket: Socket,
    layer: Layer,
    kind: Kind,
}

impl Receiver {
    /// Opens a raw IP socket.
    pub(crate) fn ip(datapath: &'static str, v4: bool, accepted: &Accepted) -> Result<Self, OpenError> {
        let this = Self {
            socket: opened(datapath, sys::raw_socket(v4))?,
            layer: if v4 { Layer::Ipv4 } else { Layer::Ipv6 },
            kind: Kind::Ip,
        };
        this.accept(accepted)?;
        // It received from its first moment on, without a filter.
        let mut scratch = [MaybeUninit::uninit(); 1];
        while this.socket.recv(&mut scratch).is_ok() {}
        if !v4 {
            for name in [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT, libc::IPV6_RECVPKTINFO] {
                sys::set_int(this.socket.as_fd(), libc::IPPROTO_IPV6, name, 1)
                    .map_err(context("setting up a raw socket"))?;
            }
        }
        Ok(this)
    }

    /// Opens a packet socket on an interface. `vlan`: of its frames; 0: none.
    pub(crate) fn link(
        datapath: &'static str,
        interface: u32,
        loopback: bool,
        layer: Layer,
        accepted: &Accepted,
    ) -> Result<Self, OpenError> {
        let failed = context("listening on an interface");
        let all = iface::interfaces().map_err(&failed)?;
        let this = Self {
            socket: opened(datapath, sys::packet_socket())?,
            layer,
            kind: Kind::Link {
                loopback,
                ours: all.into_iter().flat_map(|interface| interface.addresses).collect(),
            },
        };
        this.accept(accepted)?;
        sys::bind_link(this.socket.as_fd(), interface).map_err(&failed)?;
        Ok(this)
    }

    /// Replaces the filter.
    pub(crate) fn accept(&self, accepted: &Accepted) -> Result<(), OpenError> {
        filter::attach(self.socket.as_fd(), self.layer, accepted)
    }

    /// Returns the datagram of a message of the ring. `None`: it is malformed, or comes from an address that it can't come from.
    pub(crate) fn read<'r>(&self, ring: &'r RecvRing, i: usize) -> Option<(RxMeta, &'r [u8])> {
        match (&self.kind, self.layer) {
            (Kind::Ip, Layer::Ipv4) => frame::read_ipv4(ring.bytes(i)?),
            (Kind::Ip, _) => {
                let (meta, bytes) = ring.slot(i, None)?;
                frame::read_udp(bytes, meta)
            }
            (Kind::Link { loopback, ours }, _) => {
                let (meta, bytes) = frame::read_frame(ring.bytes(i)?)?;
                let possible = *loopback || comes_from_outside(meta.remote.ip(), ours);
                possible.then_some((meta, bytes))
            }
        }
    }
}

/// Returns whether a packet from outside may have this source. The IP layer makes the same check for other sockets.
fn comes_from_outside(source: IpAddr, ours: &[IpAddr]) -> bool {
    let broadcast = source == IpAddr::V4(Ipv4Addr::BROADCAST);
    !(source.is_loopback() || source.is_unspecified() || source.is_multicast() || broadcast || ours.contains(&source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_do_not_come_from_outside() {
        let ours = ["192.0.2.1", "2001:db8::1"].map(|a| a.parse().unwrap());
        let of = |source: &str| comes_from_outside(source.parse().unwrap(), &ours);
        assert!(of("192.0.2.2") && of("2001:db8::2") && of("fe80::1"));
        for source in [
            "192.0.2.1",
            "2001:db8::1",
            "127.0.0.1",
            "127.1.2.3",
            "::1",
            "0.0.0.0",
            "::",
            "239.1.2.3",
            "ff02::1",
            "255.255.255.255",
        ] {
            assert!(!of(source), "{source}");
        }
    }
}
