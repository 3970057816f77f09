//! Base transport header and extended headers.

use roce_bth::{ExtHeader, HeaderView, Packet, Qpn};
use roce_pcap::{EXT_HEADERS, HeaderSummary, PacketSummary};

use crate::field::{Base, Field, Layer};

/// Bytes of the BTH.
const BTH_LEN: usize = roce_bth::BTH_LEN;

/// Returns the layer of a packet's headers.
pub(crate) fn layer(packet: &Packet<'_>) -> Layer {
    let header = packet.header;
    let (bth, info) = (header.bth, header.bth.opcode.info());
    let mut layer = Layer::new("BTH", Base::Packet);
    layer.push("opcode", format!("{} ({:#04x})", info.name, bth.opcode as u8), 0, 1);
    layer.push("solicited event", bth.solicited, 1, 1);
    layer.push("migration request", bth.migreq, 1, 1);
    layer.push("pad bytes", bth.pad, 1, 1);
    layer.push("partition key", bth.pkey, 2, 2);
    layer.push("FECN", bth.fecn, 4, 1);
    layer.push("BECN", bth.becn, 4, 1);
    layer.push("destination QP", qp(bth.dest_qp), 5, 3);
    layer.push("acknowledge request", bth.ack_req, 8, 1);
    layer.push("PSN", bth.psn.value(), 9, 3);
    let mut at = BTH_LEN;
    for (kind, len) in EXT_HEADERS.into_iter().filter(|(kind, _)| info.has(*kind)) {
        layer.fields.extend(extended(header, kind, at, len));
        at += len;
    }
    if info.payload {
        let len = packet.payload.len();
        layer.push("payload", format!("{len} bytes"), header.bytes().len(), len);
    }
    let payload_len = packet.payload.len();
    layer.summary = PacketSummary { header, payload_len }.to_string();
    layer
}

fn qp(qpn: Qpn) -> String {
    match qpn {
        Qpn::GSI => "1 (general services)".to_owned(),
        Qpn::MULTICAST => "0xffffff (multicast)".to_owned(),
        other => other.value().to_string(),
    }
}

/// Returns an extended header of `len` bytes at `at`.
fn extended(header: HeaderView<'_>, kind: ExtHeader, at: usize, len: usize) -> Option<Field> {
    let (name, children) = match kind {
        ExtHeader::Deth => {
            let deth = header.deth()?;
            let children = vec![
                Field::new("Q_Key", deth.qkey, at, 4),
                Field::new("source QP", qp(deth.src_qp), at + 5, 3),
            ];
            ("DETH", children)
        }
        ExtHeader::Xrceth => ("XRCETH", vec![]),
        ExtHeader::Feth => ("FETH", vec![]),
        ExtHeader::Reth => {
            let reth = header.reth()?;
            let children = vec![
                Field::new("virtual address", format!("{:#x}", reth.va), at, 8),
                Field::new("remote key", reth.rkey, at + 8, 4),
                Field::new("DMA length", reth.dma_len, at + 12, 4),
            ];
            ("RETH", children)
        }
        ExtHeader::AtomicEth => {
            let a = header.atomic_eth()?;
            let children = vec![
                Field::new("virtual address", format!("{:#x}", a.va), at, 8),
                Field::new("remote key", a.rkey, at + 8, 4),
                Field::new("swap or add", format!("{:#x}", a.swap_add), at + 12, 8),
                Field::new("compare", format!("{:#x}", a.compare), at + 20, 8),
            ];
            ("AtomicETH", children)
        }
        ExtHeader::Aeth => {
            let aeth = header.aeth()?;
            let children = vec![
                Field::new("syndrome", aeth.syndrome, at, 1),
                Field::new("MSN", aeth.msn.value(), at + 1, 3),
            ];
            ("AETH", children)
        }
        ExtHeader::AtomicAckEth => ("AtomicAckETH", vec![]),
        ExtHeader::Imm => ("immediate data", vec![]),
        ExtHeader::Ieth => ("IETH", vec![]),
        ExtHeader::CnpReserved => return None,
    };
    Some(Field::new(name, HeaderSummary(header, kind), at, len).with(children))
}
