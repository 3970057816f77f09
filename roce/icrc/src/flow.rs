//! Addresses and ports of a stream of packets, and the ICRC of each.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{BTH_LEN, BTH_MASKED, ICRC_LEN, solver::IdSolver, split, start};

const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;

/// The IP addresses of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum IpPair {
    /// IPv4.
    V4 {
        /// Sender.
        src: Ipv4Addr,
        /// Receiver.
        dst: Ipv4Addr,
    },
    /// IPv6.
    V6 {
        /// Sender.
        src: Ipv6Addr,
        /// Receiver.
        dst: Ipv6Addr,
    },
}

/// One address is IPv4 and the other IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MixedFamilies;

impl core::fmt::Display for MixedFamilies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("source and destination are of different IP versions")
    }
}

impl core::error::Error for MixedFamilies {}

impl TryFrom<(IpAddr, IpAddr)> for IpPair {
    type Error = MixedFamilies;

    /// Source and destination; IPv4-mapped IPv6 addresses (as in GIDs) count as IPv4, which is what is on the wire.
    fn try_from((src, dst): (IpAddr, IpAddr)) -> Result<Self, MixedFamilies> {
        match (src.to_canonical(), dst.to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Ok(Self::V4 { src, dst }),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Ok(Self::V6 { src, dst }),
            _ => Err(MixedFamilies),
        }
    }
}

impl IpPair {
    /// The sender.
    pub const fn src(self) -> IpAddr {
        match self {
            Self::V4 { src, .. } => IpAddr::V4(src),
            Self::V6 { src, .. } => IpAddr::V6(src),
        }
    }

    /// The receiver.
    pub const fn dst(self) -> IpAddr {
        match self {
            Self::V4 { dst, .. } => IpAddr::V4(dst),
            Self::V6 { dst, .. } => IpAddr::V6(dst),
        }
    }
}

/// Result of [`Flow::recover`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Recovery {
    /// The ICRC is right with this Identification, and with no other. IPv6 has none: the hint is given back.
    Exact(u16),
    /// The ICRC is right with no Identification.
    Corrupt,
}

/// Everything outside of the UDP payload that the ICRC covers, but for the Identification.
///
/// IPv4 headers are taken to be 20 bytes long, unfragmented, with DF set: what RoCEv2 prescribes (IBTA A17.4.5.2), and what
/// a UDP socket sends with `IP_PMTUDISC_PROBE`. [`crate::check_datagram`] takes the header as it came instead.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Flow {
    /// Addresses.
    pub ip: IpPair,
    /// UDP source port.
    pub src_port: u16,
    /// UDP destination port.
    pub dst_port: u16,
}

impl TryFrom<(SocketAddr, SocketAddr)> for Flow {
    type Error = MixedFamilies;

    /// From sender and receiver.
    fn try_from((src, dst): (SocketAddr, SocketAddr)) -> Result<Self, MixedFamilies> {
        Ok(Self {
            ip: (src.ip(), dst.ip()).try_into()?,
            src_port: src.port(),
            dst_port: dst.port(),
        })
    }
}

impl Flow {
    /// The sender's address and port.
    pub const fn src(&self) -> SocketAddr {
        SocketAddr::new(self.ip.src(), self.src_port)
    }

    /// The receiver's address and port.
    pub const fn dst(&self) -> SocketAddr {
        SocketAddr::new(self.ip.dst(), self.dst_port)
    }

    /// The ICRC of a packet given without its last four bytes. `identification` is ignored for IPv6.
    pub fn compute(&self, identification: u16, packet_without_icrc: &[u8]) -> u32 {
        let (bth, rest) = packet_without_icrc.split_at(packet_without_icrc.len().min(BTH_LEN));
        let mut crc = self.head(identification, bth, packet_without_icrc.len());
        crc.update(rest);
        crc.finalize()
    }

    /// The ICRC of a packet whose payload (pad included) lies in several places. `header` holds the BTH and the extended
    /// headers; nothing is copied.
    pub fn compute_parts<I, T>(&self, identification: u16, header: &[u8], payload: I) -> u32
    where
        I: IntoIterator<Item = T>,
        I::IntoIter: Clone,
        T: AsRef<[u8]>,
    {
        let parts = payload.into_iter();
        let len = parts
            .clone()
            .fold(header.len(), |len, part| len.saturating_add(part.as_ref().len()));
        let (bth, extended) = header.split_at(header.len().min(BTH_LEN));
        let mut crc = self.head(identification, bth, len);
        crc.update(extended);
        for part in parts {
            crc.update(part.as_ref());
        }
        crc.finalize()
    }

    /// Writes the ICRC into the last four bytes of `packet`; a packet of fewer bytes is left as it is.
    pub fn seal(&self, identification: u16, packet: &mut [u8]) {
        if let Some((body, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() {
            *icrc = self.compute(identification, body).to_le_bytes();
        }
    }

    /// Whether the last four bytes of `packet` are its ICRC. False when it is too short to hold a BTH and an ICRC.
    pub fn verify(&self, identification: u16, packet: &[u8]) -> bool {
        split(packet).is_some_and(|(body, icrc)| self.compute(identification, body) == icrc)
    }

    /// Finds the Identification with which the ICRC is right. One pass over the packet; when `hint` is wrong, up to a
    /// dozen multiplications follow, of which [`Flow::recover_with`] saves all but one.
    pub fn recover(&self, packet: &[u8], hint: u16) -> Recovery {
        self.recover_by(packet, hint, IdSolver::solve_uncached)
    }

    /// [`Flow::recover`] with a cache of factors, for peers that count their Identification up.
    pub fn recover_with(&self, solver: &mut IdSolver, packet: &[u8], hint: u16) -> Recovery {
        self.recover_by(packet, hint, |difference, trailing| solver.solve(difference, trailing))
    }

    /// Finds the source port with which the ICRC is right, for a known Identification (ignored for IPv6). Of corrupt packets one in 2^16
    /// has one.
    pub fn recover_source_port(&self, identification: u16, packet: &[u8]) -> Option<u16> {
        let (body, icrc) = split(packet)?;
        let difference = self.compute(identification, body) ^ icrc;
        // The rest of the UDP header and the packet.
        let trailing = u32::try_from(body.len() + UDP_LEN - 2).ok()?;
        Some(self.src_port ^ IdSolver::solve_uncached(difference, trailing)?)
    }

    fn recover_by(&self, packet: &[u8], hint: u16, solve: impl FnOnce(u32, u32) -> Option<u16>) -> Recovery {
        let Some((body, icrc)) = split(packet) else {
            return Recovery::Corrupt;
        };
        let difference = self.compute(hint, body) ^ icrc;
        if difference == 0 {
            return Recovery::Exact(hint);
        }
        if matches!(self.ip, IpPair::V6 { .. }) {
            return Recovery::Corrupt;
        }
        // Flags to destination address, UDP header, packet.
        let trailing = u32::try_from(body.len() + IPV4_LEN - 6 + UDP_LEN);
        match trailing.ok().and_then(|n| solve(difference, n)) {
            Some(delta) => Recovery::Exact(hint ^ delta),
            None => Recovery::Corrupt,
        }
    }

    /// Hashes the masked IP and UDP headers and the masked BTH. `len` is the packet's without ICRC.
    fn head(&self, identification: u16, bth: &[u8], len: usize) -> crc32fast::Hasher {
        // No datagram is longer than its 16-bit length says, so the cast loses nothing that could be sent.
        let udp_len = (len + UDP_LEN + ICRC_LEN) as u16;
        let mut buf = [0xff; IPV6_LEN + UDP_LEN + BTH_LEN];
        let ip_len = match self.ip {
            IpPair::V4 { src, dst } => {
                buf[0] = 0x45;
                buf[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_LEN as u16).to_be_bytes());
                buf[4..6].copy_from_slice(&identification.to_be_bytes());
                buf[6..8].copy_from_slice(&[0x40, 0]);
                buf[9] = 17;
                buf[12..16].copy_from_slice(&src.octets());
                buf[16..20].copy_from_slice(&dst.octets());
                IPV4_LEN
            }
            IpPair::V6 { src, dst } => {
                buf[0] = 0x6f;
                buf[4..6].copy_from_slice(&udp_len.to_be_bytes());
                buf[6] = 17;
                buf[8..24].copy_from_slice(&src.octets());
                buf[24..40].copy_from_slice(&dst.octets());
                IPV6_LEN
            }
        };
        let (udp, tail) = buf[ip_len..].split_at_mut(UDP_LEN);
        udp[0..2].copy_from_slice(&self.src_port.to_be_bytes());
        udp[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        tail[..bth.len()].copy_from_slice(bth);
        if bth.len() > BTH_MASKED {
            tail[BTH_MASKED] = 0xff;
        }
        let mut crc = start();
        crc.update(&buf[..ip_len + UDP_LEN + bth.len()]);
        crc
    }
}
