//! Captures whose packets are changed and written again.

use std::{net::SocketAddr, path::Path};

use roce_bth::Opcode;
use roce_icrc::Flow;
use roce_pcap::{Capture, Writer, decode};

/// Packet of a capture.
#[derive(Clone)]
pub(crate) struct Sent {
    pub(crate) time_ns: u64,
    pub(crate) src: SocketAddr,
    pub(crate) dst: SocketAddr,
    /// Identification of the IPv4 header.
    pub(crate) id: u16,
    /// BTH to ICRC.
    pub(crate) bytes: Vec<u8>,
}

impl Sent {
    pub(crate) fn opcode(&self) -> Opcode {
        Opcode::from_byte(self.bytes[0]).unwrap()
    }

    pub(crate) fn psn(&self) -> u32 {
        u32::from_be_bytes([0, self.bytes[9], self.bytes[10], self.bytes[11]])
    }

    pub(crate) fn set_psn(&mut self, psn: u32) {
        self.bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
    }

    /// Changes the payload's length.
    pub(crate) fn set_payload(&mut self, len: usize) {
        let at = self.opcode().info().header_len;
        let pad = len.wrapping_neg() & 3;
        self.bytes[1] = self.bytes[1] & 0xcf | (pad as u8) << 4;
        self.bytes.resize(at + len, 0);
        self.bytes.resize(at + len + pad + 4, 0);
    }
}

/// Reads the packets of a capture, in which all frames are RoCE.
pub(crate) fn load(path: &Path) -> Vec<Sent> {
    let mut capture = Capture::open(path).unwrap();
    let mut packets = vec![];
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        let datagram = decode(frame.link, frame.data).unwrap();
        packets.push(Sent {
            time_ns: frame.time_ns,
            src: datagram.src,
            dst: datagram.dst,
            id: datagram.identification(),
            bytes: datagram.payload.to_vec(),
        });
    }
    packets
}

/// Returns a capture of the packets, with right ICRCs.
pub(crate) fn written(packets: &[Sent]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for packet in packets {
        let Sent {
            time_ns, src, dst, id, ..
        } = *packet;
        let mut bytes = packet.bytes.clone();
        Flow::try_from((src, dst)).unwrap().seal(id, &mut bytes);
        writer.write(time_ns, src, dst, &bytes, id).unwrap();
    }
    writer.finish().unwrap()
}
