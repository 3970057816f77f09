//! State of the ICRC after the masked IP and UDP headers.
//!
//! CRC-32 is affine in its message: replacing a byte adds a value that depends only on the byte's difference and on how
//! many bytes follow. So a flow's headers are hashed once, and each packet adds its lengths and Identification by tables.

use crate::{
    flow::{Flow, IpPair, Recovery},
    gf2,
    layout::{BTH_MASKED, ICRC_LEN, IPV4_LEN, IPV6_LEN, UDP_LEN, split, start},
    solver::IdSolver,
};

/// Offset of the total length in the IPv4 header; the Identification follows.
const IPV4_TOTAL_LEN: usize = 2;
/// Offset of the payload length in the IPv6 header.
const IPV6_PAYLOAD_LEN: usize = 4;
/// Offset of the length in the UDP header.
const UDP_DATAGRAM_LEN: usize = 4;

type Table = [u32; 256];

/// Returns the products of each byte value and a factor.
const fn products(factor: u32) -> Table {
    let mut table = [0; 256];
    let mut byte = 1;
    while byte < 256 {
        let rest = byte & (byte - 1);
        table[byte] = table[rest] ^ gf2::mul((byte ^ rest) as u32, factor);
        byte += 1;
    }
    table
}

/// Returns the tables of `N` consecutive bytes, the first of which is at offset `at` of headers of `len` bytes.
const fn bytes<const N: usize>(len: usize, at: usize) -> [Table; N] {
    let mut tables = [[0; 256]; N];
    let mut i = 0;
    while i < N {
        tables[i] = products(gf2::zero_bytes(len - at - i));
        i += 1;
    }
    tables
}

/// IPv4 total length and Identification.
static IPV4_LEN_AND_ID: [Table; 4] = bytes(IPV4_LEN + UDP_LEN, IPV4_TOTAL_LEN);
/// IPv6 payload length.
static IPV6_LENGTH: [Table; 2] = bytes(IPV6_LEN + UDP_LEN, IPV6_PAYLOAD_LEN);
/// UDP length.
static UDP_LENGTH: [Table; 2] = bytes(UDP_LEN, UDP_DATAGRAM_LEN);
/// State before the BTH that has the effect of a difference in the BTH's masked byte.
static MASKED: Table = products(gf2::inverse_of_zero_bytes(BTH_MASKED as u32));

/// Part of the ICRC that all packets of a [`Flow`] share: the state after its headers with lengths and Identification 0.
#[derive(Clone, Copy, Debug)]
pub struct IcrcPrefix {
    state: u32,
    ipv4: bool,
    /// Length of the last packet without ICRC, and the state with its lengths: most packets have the length of the one before.
    last: (usize, u32),
}

impl IcrcPrefix {
    fn new(flow: &Flow) -> Self {
        let mut buf = [0xff; IPV6_LEN + UDP_LEN];
        let ip_len = match flow.ip {
            IpPair::V4 { src, dst } => {
                buf[0] = 0x45;
                buf[2..8].copy_from_slice(&[0, 0, 0, 0, 0x40, 0]);
                buf[9] = 17;
                buf[12..16].copy_from_slice(&src.octets());
                buf[16..20].copy_from_slice(&dst.octets());
                IPV4_LEN
            }
            IpPair::V6 { src, dst } => {
                buf[0] = 0x6f;
                buf[4..7].copy_from_slice(&[0, 0, 17]);
                buf[8..24].copy_from_slice(&src.octets());
                buf[24..40].copy_from_slice(&dst.octets());
                IPV6_LEN
            }
        };
        let udp = &mut buf[ip_len..];
        udp[0..2].copy_from_slice(&flow.src_port.to_be_bytes());
        udp[2..4].copy_from_slice(&flow.dst_port.to_be_bytes());
        udp[4..6].fill(0);
        let mut crc = start();
        crc.update(&buf[..ip_len + UDP_LEN]);
        let mut prefix = Self {
            state: crc.finalize(),
            ipv4: ip_len == IPV4_LEN,
            last: (0, 0),
        };
        prefix.last.1 = prefix.with_lengths(0);
        prefix
    }

    /// Returns the state after the headers of a packet of `len` bytes without ICRC, with Identification 0.
    fn with_lengths(&self, len: usize) -> u32 {
        // No datagram is longer than its 16-bit length says, so the cast loses nothing that could be sent.
        let udp_len = (len + UDP_LEN + ICRC_LEN) as u16;
        let [high, low] = udp_len.to_be_bytes().map(usize::from);
        let ip = if self.ipv4 {
            let [length_high, length_low] = udp_len.wrapping_add(IPV4_LEN as u16).to_be_bytes().map(usize::from);
            IPV4_LEN_AND_ID[0][length_high] ^ IPV4_LEN_AND_ID[1][length_low]
        } else {
            IPV6_LENGTH[0][high] ^ IPV6_LENGTH[1][low]
        };
        self.state ^ ip ^ UDP_LENGTH[0][high] ^ UDP_LENGTH[1][low]
    }

    /// Returns the state after the headers of a packet of `len` bytes without ICRC.
    #[inline]
    fn state(&mut self, identification: u16, len: usize) -> u32 {
        if self.last.0 != len {
            self.last = (len, self.with_lengths(len));
        }
        let [high, low] = identification.to_be_bytes().map(usize::from);
        match self.ipv4 {
            true => self.last.1 ^ IPV4_LEN_AND_ID[2][high] ^ IPV4_LEN_AND_ID[3][low],
            false => self.last.1,
        }
    }

    /// Computes the ICRC of a packet given without its last four bytes.
    fn compute(&mut self, identification: u16, packet_without_icrc: &[u8]) -> u32 {
        let mut state = self.state(identification, packet_without_icrc.len());
        if let Some(&byte) = packet_without_icrc.get(BTH_MASKED) {
            state ^= MASKED[usize::from(!byte)];
        }
        let mut crc = crc32fast::Hasher::new_with_initial(state);
        crc.update(packet_without_icrc);
        crc.finalize()
    }

    /// [`Flow::seal`].
    pub fn seal(&mut self, identification: u16, packet: &mut [u8]) {
        if let Some((body, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() {
            *icrc = self.compute(identification, body).to_le_bytes();
        }
    }

    /// [`Flow::verify`].
    pub fn verify(&mut self, identification: u16, packet: &[u8]) -> bool {
        split(packet).is_some_and(|(body, icrc)| self.compute(identification, body) == icrc)
    }

    /// [`Flow::recover_with`].
    #[inline]
    pub fn recover_with(&mut self, solver: &mut IdSolver, packet: &[u8], hint: u16) -> Recovery {
        let Some((body, icrc)) = split(packet) else {
            return Recovery::Corrupt;
        };
        let difference = self.compute(hint, body) ^ icrc;
        if difference == 0 {
            return Recovery::Exact(hint);
        }
        if !self.ipv4 {
            return Recovery::Corrupt;
        }
        // Flags to destination address, UDP header, packet.
        let trailing = u32::try_from(body.len() + IPV4_LEN - 6 + UDP_LEN);
        match trailing.ok().and_then(|n| solver.solve(difference, n)) {
            Some(delta) => Recovery::Exact(hint ^ delta),
            None => Recovery::Corrupt,
        }
    }
}

impl Flow {
    /// Computes the part of the ICRC that all packets of the flow share.
    pub fn prefix(&self) -> IcrcPrefix {
        IcrcPrefix::new(self)
    }

    /// Computes the ICRC of a packet given without its last four bytes. Ignores `identification` for IPv6.
    pub fn compute(&self, identification: u16, packet_without_icrc: &[u8]) -> u32 {
        self.prefix().compute(identification, packet_without_icrc)
    }

    /// Writes the ICRC into the last four bytes of `packet`. Leaves a packet of fewer bytes unchanged.
    pub fn seal(&self, identification: u16, packet: &mut [u8]) {
        self.prefix().seal(identification, packet);
    }

    /// Returns whether the last four bytes of `packet` are its ICRC. False when it is too short to hold a BTH and an ICRC.
    pub fn verify(&self, identification: u16, packet: &[u8]) -> bool {
        self.prefix().verify(identification, packet)
    }

    /// Finds the Identification with which the ICRC is right. One pass over the packet; when `hint` is wrong, up to a
    /// dozen multiplications follow, of which [`Flow::recover_with`] saves all but one.
    pub fn recover(&self, packet: &[u8], hint: u16) -> Recovery {
        self.prefix().recover_with(&mut IdSolver::new(), packet, hint)
    }

    /// [`Flow::recover`] with a cache of factors, for peers that count their Identification up.
    pub fn recover_with(&self, solver: &mut IdSolver, packet: &[u8], hint: u16) -> Recovery {
        self.prefix().recover_with(solver, packet, hint)
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
}
