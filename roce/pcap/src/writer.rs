//! Writing captures of packets that were never in a frame.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, UdpHeader};

use crate::create::create_private;

const HOPS: u8 = 64;
/// Bytes of a record before its frame: time stamp and lengths.
const RECORD_HEADER: usize = 16;
/// Magic number of the classic format with nanosecond time stamps.
const MAGIC: u32 = 0xa1b2_3c4d;
/// Version 2.4 of the format: major number in the low half.
const VERSION: u32 = 2 | 4 << 16;
/// Largest frame for Wireshark, bytes; no IP packet reaches it.
const SNAPLEN: u32 = 262_144;
/// Link type of Ethernet frames.
const ETHERNET: u32 = 1;

/// Writes a classic pcap file with nanosecond time stamps, little-endian on every machine, of Ethernet frames made
/// around UDP payloads: DF set, UDP checksum 0 (as rdma_rxe sends them), MAC addresses made from the IP addresses. Each
/// record is one write.
pub struct Writer<W: Write> {
    writer: W,
    record: Vec<u8>,
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.into())
}

impl Writer<BufWriter<File>> {
    /// Makes a file that only its owner may read. Call [`Writer::flush`] at the end to learn of errors.
    ///
    /// # Errors
    /// As [`create_private`].
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::new(BufWriter::new(create_private(path)?))
    }
}

impl<W: Write> Writer<W> {
    /// Writes the file header.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn new(mut writer: W) -> io::Result<Self> {
        // The time zone and the accuracy of time stamps are always 0.
        let header = [MAGIC, VERSION, 0, 0, SNAPLEN, ETHERNET].map(u32::to_le_bytes);
        writer.write_all(header.as_flattened())?;
        Ok(Self::append(writer))
    }

    /// Goes on with a file that has a header of [`Writer::new`].
    pub fn append(writer: W) -> Self {
        Self { writer, record: vec![] }
    }

    /// Appends a datagram: `time_ns` in nanoseconds since 1970 (or the start of a simulation), the UDP payload from BTH
    /// to ICRC, and the IPv4 Identification (ignored for IPv6).
    ///
    /// # Errors
    /// `InvalidInput` for addresses of two IP versions, a payload longer than a datagram, or a time past 2106; else the
    /// underlying writer's.
    pub fn write(
        &mut self,
        time_ns: u64,
        src: SocketAddr,
        dst: SocketAddr,
        payload: &[u8],
        identification: u16,
    ) -> io::Result<()> {
        self.record.clear();
        self.record.resize(RECORD_HEADER, 0);
        self.build(src, dst, payload, identification)?;
        let (secs, nanos) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
        let secs = u32::try_from(secs).map_err(|_| invalid("a time past 2106"))?;
        let len = (self.record.len() - RECORD_HEADER) as u32;
        // Captured and original length.
        let fields = [secs, nanos as u32, len, len];
        for (place, field) in self.record.chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        self.writer.write_all(&self.record)
    }

    /// Flushes the underlying writer.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Flushes and gives the underlying writer back.
    ///
    /// # Errors
    /// The underlying writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.writer.flush()?;
        Ok(self.writer)
    }

    fn build(&mut self, src: SocketAddr, dst: SocketAddr, payload: &[u8], identification: u16) -> io::Result<()> {
        let udp = UdpHeader::without_ipv4_checksum(src.port(), dst.port(), payload.len())
            .map_err(|e| invalid(format!("a payload of {} bytes: {e}", payload.len())))?;
        let ether = |ether_type| Ethernet2Header {
            source: mac(src.ip()),
            destination: mac(dst.ip()),
            ether_type,
        };
        let out = &mut self.record;
        match (src.ip().to_canonical(), dst.ip().to_canonical()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let mut ip = Ipv4Header::new(udp.length, HOPS, IpNumber::UDP, from.octets(), to.octets())
                    .map_err(|e| invalid(format!("a payload of {} bytes: {e}", payload.len())))?;
                ip.identification = identification;
                ip.dont_fragment = true;
                ip.header_checksum = ip.calc_header_checksum();
                ether(EtherType::IPV4).write(out)?;
                ip.write_raw(out)?;
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let ip = Ipv6Header {
                    traffic_class: 0,
                    flow_label: Ipv6FlowLabel::ZERO,
                    payload_length: udp.length,
                    next_header: IpNumber::UDP,
                    hop_limit: HOPS,
                    source: from.octets(),
                    destination: to.octets(),
                };
                ether(EtherType::IPV6).write(out)?;
                ip.write(out)?;
            }
            _ => return Err(invalid("source and destination are of different IP versions")),
        }
        udp.write(out)?;
        out.extend_from_slice(payload);
        Ok(())
    }
}

/// A locally administered MAC address that shows the IP address's last four bytes; a group's own (RFC 1112, RFC 2464).
fn mac(ip: IpAddr) -> [u8; 6] {
    let tail = match ip.to_canonical() {
        IpAddr::V4(a) if a.is_multicast() => {
            let [_, b, c, d] = a.octets();
            return [0x01, 0, 0x5e, b & 0x7f, c, d];
        }
        IpAddr::V6(a) if a.is_multicast() => {
            let o = a.octets();
            return [0x33, 0x33, o[12], o[13], o[14], o[15]];
        }
        IpAddr::V4(a) => a.octets(),
        IpAddr::V6(a) => {
            let o = a.octets();
            [o[12], o[13], o[14], o[15]]
        }
    };
    [0x02, 0, tail[0], tail[1], tail[2], tail[3]]
}
