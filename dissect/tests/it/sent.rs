//! Changes to the packets of captures of RDS and LNet.

use std::net::IpAddr;

use roce_pcap::Finding;

use crate::{
    common::fixtures,
    packets::{self, Sent, written},
};

/// Bytes before the message of a MAD: BTH, DETH, MAD header.
const CM_AT: usize = 12 + 8 + 24;

impl Sent {
    /// Last byte of the sender's address.
    pub(crate) fn host(&self) -> u8 {
        last_byte(self.src.ip())
    }

    pub(crate) fn payload(&mut self) -> &mut [u8] {
        let (at, pad) = (self.opcode().info().header_len, usize::from(self.bytes[1] >> 4 & 3));
        let end = self.bytes.len() - 4 - pad;
        &mut self.bytes[at..end]
    }
}

pub(crate) fn last_byte(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(ip) => ip.octets()[15],
    }
}

/// Reads the packets of a capture, in which all frames are RoCE.
pub(crate) fn load(name: &str) -> Vec<Sent> {
    packets::load(&fixtures().join(format!("{name}.pcap")))
}

/// Returns the findings about RDS and LNet in a capture of the packets.
pub(crate) fn judge(packets: &[Sent]) -> Vec<Finding> {
    let report = ferroce_dissect::check_reader("test", &written(packets)[..], |_| {}).unwrap();
    of_upper(report.findings)
}

/// Keeps the findings about RDS and LNet.
pub(crate) fn of_upper(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.retain(|f| f.rule.id().starts_with("rds-") || f.rule.id().starts_with("lnet-"));
    findings
}

/// Changes the payload of a frame, and of its repetitions.
pub(crate) fn payload(packets: &mut [Sent], frame: usize, change: impl Fn(&mut [u8])) {
    let (src, psn, opcode) = {
        let packet = &packets[frame - 1];
        (packet.src, packet.psn(), packet.opcode())
    };
    let same = |p: &&mut Sent| (p.src.ip(), p.psn(), p.opcode()) == (src.ip(), psn, opcode);
    packets.iter_mut().filter(same).for_each(|p| change(p.payload()));
}

/// Changes the RDS header at the beginning of a frame, and gives it its checksum.
pub(crate) fn header(packets: &mut [Sent], frame: usize, change: impl Fn(&mut [u8])) {
    payload(packets, frame, |bytes| {
        change(bytes);
        seal(bytes);
    });
}

/// Writes the checksum of an RDS header.
pub(crate) fn seal(header: &mut [u8]) {
    header[30..32].fill(0);
    let words = header[..48].chunks(2);
    let mut sum: u32 = words.map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    header[30..32].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

/// Changes the private data of a REQ (behind RDMA_CM's header), REP or REJ.
pub(crate) fn private(packets: &mut [Sent], frame: usize, change: impl Fn(&mut [u8])) {
    let at = match packets[frame - 1].bytes[CM_AT - 8 + 1] {
        0x10 => 140 + 36,
        0x13 => 36,
        0x12 => 84,
        other => panic!("attribute {other:#x} of frame {frame}"),
    };
    change(&mut packets[frame - 1].bytes[CM_AT + at..]);
}
