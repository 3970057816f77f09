//! Base transport header and extended headers.

use roce_bth::{Class, ExtHeader, Feth, HeaderView, NakCode, Packet, Placement, Qpn, Selectivity, Syndrome};

use crate::field::{Base, Field, Layer};

/// Bytes of the BTH.
const BTH_LEN: usize = roce_bth::BTH_LEN;
/// Extended headers in the order in which they follow the BTH, with their lengths.
const ORDER: [(ExtHeader, usize); 10] = [
    (ExtHeader::Deth, 8),
    (ExtHeader::Xrceth, 4),
    (ExtHeader::Feth, 4),
    (ExtHeader::Reth, 16),
    (ExtHeader::AtomicEth, 28),
    (ExtHeader::Aeth, 4),
    (ExtHeader::AtomicAckEth, 8),
    (ExtHeader::Imm, 4),
    (ExtHeader::Ieth, 4),
    (ExtHeader::CnpReserved, 16),
];

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
    let mut summary = format!("{} qp {} psn {}", info.name, bth.dest_qp.value(), bth.psn.value());
    let mut at = BTH_LEN;
    for (kind, len) in ORDER.into_iter().filter(|(kind, _)| info.has(*kind)) {
        if let Some((field, text)) = extended(header, kind, at) {
            layer.fields.push(field);
            summary += &text;
        }
        at += len;
    }
    if info.payload {
        let len = packet.payload.len();
        layer.push("payload", format!("{len} bytes"), header.bytes().len(), len);
        summary += &format!(" len {len}");
    }
    let flags = [
        (bth.ack_req, "ack-req"),
        (bth.solicited, "solicited"),
        (bth.fecn, "fecn"),
        (bth.becn && info.class != Class::Cnp, "becn"),
    ];
    for (_, name) in flags.iter().filter(|(set, _)| *set) {
        summary += &format!(" {name}");
    }
    layer.summary = summary;
    layer
}

fn qp(qpn: Qpn) -> String {
    match qpn {
        Qpn::GSI => "1 (general services)".to_owned(),
        Qpn::MULTICAST => "0xffffff (multicast)".to_owned(),
        other => other.value().to_string(),
    }
}

/// Returns an extended header and its part of the summary.
fn extended(header: HeaderView<'_>, kind: ExtHeader, at: usize) -> Option<(Field, String)> {
    let field = |name, text: &str, len, children| Field::new(name, text.trim_start(), at, len).with(children);
    Some(match kind {
        ExtHeader::Deth => {
            let deth = header.deth()?;
            let text = format!(" from qp {} qkey {}", deth.src_qp.value(), deth.qkey);
            let children = vec![
                Field::new("Q_Key", deth.qkey, at, 4),
                Field::new("source QP", qp(deth.src_qp), at + 5, 3),
            ];
            (field("DETH", &text, 8, children), text)
        }
        ExtHeader::Xrceth => {
            let text = format!(" to srq {}", header.xrceth()?.srqn.value());
            (field("XRCETH", &text, 4, vec![]), text)
        }
        ExtHeader::Feth => {
            let text = format!(" {}", flush(&header.feth()?));
            (field("FETH", &text, 4, vec![]), text)
        }
        ExtHeader::Reth => {
            let reth = header.reth()?;
            let text = format!(" va {:#x} rkey {} dma-len {}", reth.va, reth.rkey, reth.dma_len);
            let children = vec![
                Field::new("virtual address", format!("{:#x}", reth.va), at, 8),
                Field::new("remote key", reth.rkey, at + 8, 4),
                Field::new("DMA length", reth.dma_len, at + 12, 4),
            ];
            (field("RETH", &text, 16, children), text)
        }
        ExtHeader::AtomicEth => {
            let a = header.atomic_eth()?;
            let text = format!(
                " va {:#x} rkey {} swap-add {:#x} compare {:#x}",
                a.va, a.rkey, a.swap_add, a.compare
            );
            let children = vec![
                Field::new("virtual address", format!("{:#x}", a.va), at, 8),
                Field::new("remote key", a.rkey, at + 8, 4),
                Field::new("swap or add", format!("{:#x}", a.swap_add), at + 12, 8),
                Field::new("compare", format!("{:#x}", a.compare), at + 20, 8),
            ];
            (field("AtomicETH", &text, 28, children), text)
        }
        ExtHeader::Aeth => {
            let aeth = header.aeth()?;
            let what = syndrome(aeth.syndrome);
            let text = format!(" {what} msn {}", aeth.msn.value());
            let children = vec![
                Field::new("syndrome", what, at, 1),
                Field::new("MSN", aeth.msn.value(), at + 1, 3),
            ];
            (field("AETH", &text, 4, children), text)
        }
        ExtHeader::AtomicAckEth => {
            let text = format!(" original {:#x}", header.atomic_ack()?);
            (field("AtomicAckETH", &text, 8, vec![]), text)
        }
        ExtHeader::Imm => {
            let text = format!(" imm {:#010x}", header.imm()?);
            (field("immediate data", &text, 4, vec![]), text)
        }
        ExtHeader::Ieth => {
            let text = format!(" invalidate {}", header.ieth()?);
            (field("IETH", &text, 4, vec![]), text)
        }
        ExtHeader::CnpReserved => return None,
    })
}

/// Returns the meaning of an acknowledgement.
fn syndrome(syndrome: Syndrome) -> String {
    match syndrome {
        Syndrome::Ack(credits) => match credits.count() {
            Some(count) => format!("ack, {count} credits"),
            None => "ack".to_owned(),
        },
        Syndrome::Rnr(timer) => format!("rnr-nak, wait {:?}", timer.duration()),
        Syndrome::Nak(code) => format!("nak, {}", nak(code)),
        Syndrome::Reserved(byte) => format!("reserved syndrome {byte:#04x}"),
    }
}

const fn nak(code: NakCode) -> &'static str {
    match code {
        NakCode::PsnSequenceError => "PSN sequence error",
        NakCode::InvalidRequest => "invalid request",
        NakCode::RemoteAccessError => "remote access error",
        NakCode::RemoteOperationalError => "remote operational error",
        NakCode::InvalidRdRequest => "invalid RD request",
    }
}

/// Returns range and guarantees of a FLUSH.
fn flush(feth: &Feth) -> String {
    let range = match feth.selectivity {
        Selectivity::Range => "range".to_owned(),
        Selectivity::Region => "region".to_owned(),
        Selectivity::Reserved(n) => format!("selectivity {n}"),
    };
    let names = [
        (Placement::GLOBAL_VISIBILITY, "visible"),
        (Placement::PERSISTENT, "persistent"),
    ];
    let set = names.iter().filter(|(flag, _)| feth.placement.contains(*flag));
    let set: Vec<_> = set.map(|(_, name)| *name).collect();
    format!("{range} {}", set.join("+"))
}
