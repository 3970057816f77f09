//! Packets to send, from the fields of a line.

use core::net::{IpAddr, SocketAddr};

use roce_bth::{
    Aeth, AtomicEth, Bth, Credits, ExtHeader, Feth, Header, ICRC_LEN, Msn, Opcode, PKey, Placement, Psn, Qpn,
    ROCE_UDP_PORT, Reth, RnrTimer, Selectivity, Syndrome,
};
use roce_icrc::Flow;

use crate::{
    fields::Fields,
    kind::Kind,
    memory::Memory,
    script::PacketSpec,
    value::{Data, Place},
};

/// Timer of RNR NAKs that name none: 0.64 ms.
const RNR_TIMER: u8 = 12;

/// Builds the UDP payload of a packet to the queue pair `qpn`, with room for the ICRC unless it has none.
pub(crate) fn build(spec: &PacketSpec, memory: &Memory, qpn: Qpn) -> Vec<u8> {
    let fields = &spec.fields;
    let mut bytes = match &spec.kind {
        Kind::Raw(bytes) => bytes.clone(),
        Kind::Code(code) => {
            // An opcode without extended headers, for its BTH.
            let mut bytes = with_payload(Opcode::RcSendOnly, fields, memory, qpn, spec);
            bytes[0] = *code;
            bytes
        }
        kind => with_payload(kind.opcode().unwrap_or(Opcode::RcSendOnly), fields, memory, qpn, spec),
    };
    bytes.truncate(bytes.len().saturating_sub(fields.cut));
    if !fields.no_icrc {
        bytes.extend([0; ICRC_LEN]);
    }
    bytes
}

/// Writes the ICRC, a wrong one if the line says so.
pub(crate) fn seal(fields: &Fields, src: SocketAddr, dst: IpAddr, identification: u16, bytes: &mut [u8]) {
    if fields.no_icrc {
        return;
    }
    if let Ok(flow) = Flow::try_from((src, SocketAddr::new(dst, ROCE_UDP_PORT))) {
        flow.seal(identification, bytes);
    }
    if let Some(last) = bytes.last_mut().filter(|_| fields.corrupt) {
        *last ^= 0x55;
    }
}

fn with_payload(opcode: Opcode, fields: &Fields, memory: &Memory, qpn: Qpn, spec: &PacketSpec) -> Vec<u8> {
    let psn = fields.psn.unwrap_or(0);
    let empty = Data { len: 0, source: None };
    let data = fields.payload.as_ref().unwrap_or(&empty);
    let payload = memory.bytes(data, Some(psn)).unwrap_or_default();
    let mut bth = Bth::new(opcode, fields.qp.map_or(qpn, Qpn::new), Psn::new(psn));
    let pad = payload.len().next_multiple_of(4) - payload.len();
    bth.pad = fields.pad.unwrap_or(pad as u8);
    bth.version = fields.version.unwrap_or(0);
    bth.pkey = fields.pkey.map_or(PKey::DEFAULT, PKey);
    bth.ack_req = fields.ack_req.unwrap_or(false);
    bth.solicited = fields.solicited.unwrap_or(false);
    bth.migreq = fields.migreq.unwrap_or(false);
    bth.fecn = fields.fecn.unwrap_or(false);
    bth.becn = fields.becn.unwrap_or(false);
    let header = extended(Header::new(bth), fields, memory, &spec.kind, payload.len());
    let mut bytes = vec![0; header.wire_len()];
    header.emit(&mut bytes);
    bytes.extend(payload);
    bytes.resize(bytes.len() + pad, 0);
    bytes
}

/// Adds the extended headers of the opcode.
fn extended(mut header: Header, fields: &Fields, memory: &Memory, kind: &Kind, payload: usize) -> Header {
    let info = header.bth.opcode.info();
    let key = |place: Option<Place>| memory.key(place.unwrap_or(Place::number(0)));
    let va = memory.address(fields.va.unwrap_or(Place::number(0)));
    if info.has(ExtHeader::Reth) {
        header.reth = Some(Reth {
            va,
            rkey: key(fields.rkey),
            dma_len: fields.len.unwrap_or(payload as u32),
        });
    }
    if info.has(ExtHeader::AtomicEth) {
        header.atomic_eth = Some(AtomicEth {
            va,
            rkey: key(fields.rkey),
            swap_add: fields.add.or(fields.swap).unwrap_or(0),
            compare: fields.compare.unwrap_or(0),
        });
    }
    if info.has(ExtHeader::Aeth) {
        header.aeth = Some(Aeth {
            syndrome: syndrome(fields, kind),
            msn: Msn::new(fields.msn.unwrap_or(0)),
        });
    }
    if info.has(ExtHeader::Feth) {
        header.feth = Some(Feth {
            placement: Placement::from_bits_retain(fields.placement.unwrap_or(1)),
            selectivity: Selectivity::from_bits(fields.selectivity.unwrap_or(0)),
            reserved: 0,
        });
    }
    header.atomic_ack = fields.value;
    header.imm = fields.imm;
    header.ieth = fields.inv.map(|place| memory.key(place));
    header
}

fn syndrome(fields: &Fields, kind: &Kind) -> Syndrome {
    match (fields.syndrome, kind) {
        (Some(byte), _) => Syndrome::from_byte(byte),
        (None, Kind::Nak(code)) => Syndrome::Nak(*code),
        (None, Kind::Rnr) => Syndrome::Rnr(RnrTimer::new(fields.timer.unwrap_or(RNR_TIMER))),
        (None, _) => Syndrome::Ack(fields.credits.map_or(Credits::INVALID, Credits::new)),
    }
}
