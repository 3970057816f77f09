//! UDP sockets that hold the ports of a raw datapath. Packets pass them by: each has a filter that accepts nothing.
//!
//! Without a socket on the RoCE port the kernel would answer every packet with an ICMP error, and another process could have the
//! port. Those on source ports keep others from sending from them, and get the ICMP errors about packets that left from there.

use std::{net::IpAddr, os::fd::AsFd, sync::Arc};

use socket2::Socket;

use crate::{
    datapath::Undeliverable,
    senders,
    socket::{OpenError, UdpConfig, accept_nothing, context},
    steer, undeliverable,
};

/// Sockets on the RoCE port, by IP version, which the shards of an address have in common.
pub(crate) type Mains = Arc<Vec<(IpAddr, Socket)>>;

/// Binds the RoCE port.
///
/// # Errors
/// When the port is taken or the address is not ours.
pub(crate) fn bind(config: &UdpConfig) -> Result<Mains, OpenError> {
    let opened = steer::open_receivers(config, None)?.into_iter();
    let mains: Vec<_> = opened
        .flat_map(|shard| shard.families)
        .map(|f| (f.addr, f.main))
        .collect();
    for (_, socket) in &mains {
        accept_nothing(socket).map_err(context("attaching a filter to a UDP socket"))?;
    }
    Ok(Arc::new(mains))
}

/// Ports of a shard.
pub(crate) struct Reservation {
    pub(crate) mains: Mains,
    /// Source ports, with a socket for each IP version.
    senders: Vec<(u16, Vec<Socket>)>,
    /// Source port of management datagrams alone.
    mads: Option<(u16, Vec<Socket>)>,
}

impl Reservation {
    /// Binds so many source ports, and one for management datagrams.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn new(mains: Mains, senders: usize) -> Result<Self, OpenError> {
        let addrs: Vec<IpAddr> = mains.iter().map(|(addr, _)| *addr).collect();
        let bind = || senders::bind(&addrs);
        Ok(Self {
            senders: (0..senders).map(|_| bind()).collect::<Result<_, _>>()?,
            mads: (senders > 0).then(bind).transpose()?,
            mains,
        })
    }

    /// Returns the source ports of packets.
    pub(crate) fn src_ports(&self) -> Vec<u16> {
        self.senders.iter().map(|(port, _)| *port).collect()
    }

    /// Returns the source port of management datagrams.
    pub(crate) fn mad_port(&self) -> Option<u16> {
        self.mads.as_ref().map(|(port, _)| *port)
    }

    /// Returns whether packets may leave from a source port.
    pub(crate) fn has(&self, port: u16) -> bool {
        self.mad_port() == Some(port) || self.senders.iter().any(|(ours, _)| *ours == port)
    }

    /// Returns the sockets that hear of ICMP errors.
    pub(crate) fn mad_sockets(&self) -> impl Iterator<Item = &Socket> {
        self.mads.iter().flat_map(|(_, sockets)| sockets)
    }

    /// Begins or ends to keep ICMP errors about management datagrams.
    pub(crate) fn hear_undeliverable(&self, on: bool) {
        for (socket, (addr, _)) in self.mad_sockets().zip(self.mains.iter()) {
            if let Err(e) = undeliverable::hear(socket, addr.is_ipv4(), on) {
                tracing::debug!("IP_RECVERR is refused: {e}");
            }
        }
    }

    /// Hands over the ICMP errors that came since.
    pub(crate) fn undeliverable(&self, handle: &mut dyn FnMut(&Undeliverable<'_>)) {
        for socket in self.mad_sockets() {
            undeliverable::take(socket.as_fd(), handle);
        }
    }
}
