//! Frames that ConnectX cards are known to send, made here: nobody in this project has such a card.
//!
//! Known of them: IPv4 Identification 0, MigReq 1 and UDP checksum 0 in every RC packet, real credit counts in
//! acknowledgements, and one congestion notification that Scapy's tests publish as captured on a ConnectX-4 Lx.

use std::net::{IpAddr, SocketAddr};

use roce_bth::{Aeth, AtomicEth, Bth, Credits, Header, ICRC_LEN, Msn, Opcode, Psn, Qpn, RKey, Reth, Syndrome};
use roce_icrc::Flow;
use roce_pcap::Writer;

use crate::error::Error;

/// Path MTU of the made connection, bytes.
pub const MADE_MTU: usize = 1024;
/// The end that asks: address, queue pair, first PSN.
const CLIENT: (IpAddr, u32, u32) = (ip(2), 0x0004_b2c1, 0x00ab_cdef);
/// The end that answers.
const SERVER: (IpAddr, u32) = (ip(1), 0x0001_17a6);
const RKEY: RKey = RKey(0x0018_0a42);
const VA: u64 = 0x7f3a_5c00_1000;

const fn ip(last: u8) -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, last))
}

/// Scapy, test/contrib/roce.uts, "RoCE CNP captured on ConnectX-4 Lx": the IP datagram.
pub const CNP: [u8; 60] = [
    0x45, 0xc2, 0x00, 0x3c, 0x71, 0x8c, 0x40, 0x00, 0x40, 0x11, 0x91, 0x61, 0x0a, 0x00, 0x11, 0x01, 0x0a, 0x00, 0x12,
    0x01, 0x00, 0x00, 0x12, 0xb7, 0x00, 0x28, 0x00, 0x00, 0x81, 0x00, 0xff, 0xff, 0x40, 0x00, 0x01, 0x18, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x82,
    0xfd, 0x00, 0x2a,
];

struct Maker<'a> {
    writer: Writer<&'a mut Vec<u8>>,
    time_ns: u64,
}

impl Maker<'_> {
    fn put(&mut self, from_client: bool, mut header: Header, payload: &[u8]) -> Result<(), Error> {
        header.bth.migreq = true;
        let (src, dst) = match from_client {
            true => (CLIENT.0, SERVER.0),
            false => (SERVER.0, CLIENT.0),
        };
        let (src, dst) = (SocketAddr::new(src, 0xc2d1), SocketAddr::new(dst, 4791));
        let bytes = sealed((src, dst), header, payload)?;
        self.time_ns += 2_000;
        let written = self.writer.write(self.time_ns, src, dst, &bytes, 0);
        written.map_err(|e| Error::Unsuitable(e.to_string()))
    }

    fn ask(&mut self, opcode: Opcode, psn: u32, ack: bool, more: Header, payload: &[u8]) -> Result<(), Error> {
        let mut bth = Bth::new(opcode, Qpn::new(SERVER.1), Psn::new(CLIENT.2).add(psn));
        bth.ack_req = ack;
        self.put(true, Header { bth, ..more }, payload)
    }

    fn answer(&mut self, opcode: Opcode, psn: u32, msn: u32, more: Header, payload: &[u8]) -> Result<(), Error> {
        let bth = Bth::new(opcode, Qpn::new(CLIENT.1), Psn::new(CLIENT.2).add(psn));
        let aeth = Some(Aeth {
            syndrome: Syndrome::Ack(if opcode == Opcode::RcAcknowledge {
                Credits::new(0x0d)
            } else {
                Credits::INVALID
            }),
            msn: Msn::new(msn),
        });
        self.put(false, Header { bth, aeth, ..more }, payload)
    }
}

/// Returns a packet with pad and ICRC, for Identification 0.
pub(crate) fn sealed(ends: (SocketAddr, SocketAddr), mut header: Header, payload: &[u8]) -> Result<Vec<u8>, Error> {
    let pad = payload.len().wrapping_neg() & 3;
    header.bth.pad = pad as u8;
    let mut bytes = vec![0; header.wire_len()];
    header.emit(&mut bytes);
    bytes.extend(payload);
    bytes.resize(bytes.len() + pad + ICRC_LEN, 0);
    let flow = Flow::try_from(ends).map_err(|e| Error::Unsuitable(e.to_string()))?;
    flow.seal(0, &mut bytes);
    Ok(bytes)
}

/// A capture of SEND, WRITE, READ and FetchAdd between two such cards.
///
/// # Errors
/// Never, unless memory is out.
pub fn connectx() -> Result<Vec<u8>, Error> {
    let mut file = Vec::new();
    let writer = Writer::new(&mut file).map_err(|e| Error::Unsuitable(e.to_string()))?;
    let mut m = Maker {
        writer,
        time_ns: 1_700_000_000_000_000_000,
    };
    let none = Header::new(Bth::new(Opcode::RcSendOnly, Qpn::new(0), Psn::new(0)));
    let reth = |dma_len| Header {
        reth: Some(Reth {
            va: VA,
            rkey: RKEY,
            dma_len,
        }),
        ..none
    };
    let data: Vec<u8> = (0..2500u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let (a, rest) = data.split_at(MADE_MTU);
    let (b, c) = rest.split_at(MADE_MTU);
    m.ask(Opcode::RcSendFirst, 0, false, none, a)?;
    m.ask(Opcode::RcSendMiddle, 1, false, none, b)?;
    m.ask(Opcode::RcSendLast, 2, true, none, c)?;
    m.answer(Opcode::RcAcknowledge, 2, 1, none, &[])?;
    m.ask(Opcode::RcWriteFirst, 3, false, reth(2500), a)?;
    m.ask(Opcode::RcWriteMiddle, 4, false, none, b)?;
    m.ask(Opcode::RcWriteLast, 5, true, none, c)?;
    m.answer(Opcode::RcAcknowledge, 5, 2, none, &[])?;
    m.ask(Opcode::RcReadRequest, 6, true, reth(2500), &[])?;
    m.answer(Opcode::RcReadResponseFirst, 6, 3, none, a)?;
    m.answer(Opcode::RcReadResponseMiddle, 7, 3, none, b)?;
    m.answer(Opcode::RcReadResponseLast, 8, 3, none, c)?;
    let eth = AtomicEth {
        va: VA,
        rkey: RKEY,
        swap_add: 5,
        compare: 0,
    };
    let atomic = Header {
        atomic_eth: Some(eth),
        ..none
    };
    m.ask(Opcode::RcFetchAdd, 9, true, atomic, &[])?;
    let first = data.first_chunk::<8>().copied().unwrap_or_default();
    let result = Header {
        atomic_ack: Some(u64::from_ne_bytes(first)),
        ..none
    };
    m.answer(Opcode::RcAtomicAcknowledge, 9, 4, result, &[])?;
    drop(m);
    Ok(file)
}

/// A capture of the one published notification.
pub fn cnp() -> Vec<u8> {
    let ethernet = [0x52, 0x54, 0, 0, 0, 1, 0x52, 0x54, 0, 0, 0, 2, 0x08, 0x00];
    let len = (ethernet.len() + CNP.len()) as u32;
    // Classic pcap, little-endian, nanoseconds, Ethernet; one frame.
    let head = [
        0xa1b2_3c4du32,
        4 << 16 | 2,
        0,
        0,
        262_144,
        1,
        1_700_000_000,
        0,
        len,
        len,
    ];
    [&head.map(u32::to_le_bytes).concat(), &ethernet[..], &CNP[..]].concat()
}
