//! A packet in one line.

use std::fmt::Write;

use roce_bth::{Class, Feth, HeaderView, Packet, Placement, Qpn, Selectivity, Syndrome};

/// Management class of communication management (IBTA 16.7).
const CLASS_CM: u8 = 7;

/// Opcode, queue pair, PSN, extended headers and payload length in one line.
pub(crate) fn line(packet: &Packet<'_>) -> String {
    let mut out = String::with_capacity(96);
    // Writing to a String cannot fail.
    let _ = write_line(&mut out, packet);
    out
}

fn write_line(out: &mut String, packet: &Packet<'_>) -> std::fmt::Result {
    let Packet { header, payload } = *packet;
    let bth = &header.bth;
    let info = bth.opcode.info();
    write!(out, "{} qp {} psn {}", info.name, bth.dest_qp, bth.psn)?;
    extended(out, header)?;
    if info.payload {
        write!(out, " len {}", payload.len())?;
    }
    for (flag, name) in [
        (bth.ack_req, "ack-req"),
        (bth.solicited, "solicited"),
        (bth.fecn, "fecn"),
        (bth.becn && info.class != Class::Cnp, "becn"),
    ] {
        if flag {
            write!(out, " {name}")?;
        }
    }
    if bth.dest_qp == Qpn::GSI
        && let Some(text) = management(payload)
    {
        write!(out, " ({text})")?;
    }
    Ok(())
}

fn extended(out: &mut String, header: HeaderView<'_>) -> std::fmt::Result {
    if let Some(deth) = header.deth() {
        write!(out, " from qp {} qkey {}", deth.src_qp, deth.qkey)?;
    }
    if let Some(xrc) = header.xrceth() {
        write!(out, " to srq {}", xrc.srqn)?;
    }
    if let Some(feth) = header.feth() {
        write!(out, " {}", flush(&feth))?;
    }
    if let Some(reth) = header.reth() {
        write!(out, " va {:#x} rkey {} dma-len {}", reth.va, reth.rkey, reth.dma_len)?;
    }
    if let Some(atomic) = header.atomic_eth() {
        let (va, rkey, swap_add, compare) = (atomic.va, atomic.rkey, atomic.swap_add, atomic.compare);
        write!(
            out,
            " va {va:#x} rkey {rkey} swap-add {swap_add:#x} compare {compare:#x}"
        )?;
    }
    if let Some(aeth) = header.aeth() {
        match aeth.syndrome {
            Syndrome::Ack(credits) => match credits.count() {
                Some(count) => write!(out, " ack, {count} credits")?,
                None => write!(out, " ack")?,
            },
            Syndrome::Rnr(timer) => write!(out, " rnr-nak, wait {:?}", timer.duration())?,
            Syndrome::Nak(code) => write!(out, " nak {code:?}")?,
            Syndrome::Reserved(byte) => write!(out, " reserved syndrome {byte:#04x}")?,
        }
        write!(out, " msn {}", aeth.msn)?;
    }
    if let Some(original) = header.atomic_ack() {
        write!(out, " original {original:#x}")?;
    }
    if let Some(imm) = header.imm() {
        write!(out, " imm {imm:#010x}")?;
    }
    if let Some(rkey) = header.ieth() {
        write!(out, " invalidate {rkey}")?;
    }
    Ok(())
}

/// Describes the placement and selectivity of a FLUSH (IBTA Annex A19).
fn flush(feth: &Feth) -> String {
    let names = [
        (Placement::GLOBAL_VISIBILITY, "visible"),
        (Placement::PERSISTENT, "persistent"),
    ];
    let wanted: Vec<_> = names
        .into_iter()
        .filter(|(p, _)| feth.placement.contains(*p))
        .map(|(_, name)| name)
        .collect();
    let what = match feth.selectivity {
        Selectivity::Range => "range".to_owned(),
        Selectivity::Region => "region".to_owned(),
        Selectivity::Reserved(n) => format!("selectivity {n}"),
    };
    format!("{what} {}", wanted.join("+"))
}

/// The name of a communication management MAD (IBTA 12.6).
fn management(mad: &[u8]) -> Option<String> {
    let (&class, attribute) = (mad.get(1)?, mad.get(16..18)?);
    let attribute = u16::from_be_bytes([attribute[0], attribute[1]]);
    if class != CLASS_CM {
        return Some(format!("MAD class {class:#04x} attribute {attribute:#06x}"));
    }
    let name = match attribute {
        0x0001 => "ClassPortInfo",
        0x0010 => "REQ",
        0x0011 => "MRA",
        0x0012 => "REJ",
        0x0013 => "REP",
        0x0014 => "RTU",
        0x0015 => "DREQ",
        0x0016 => "DREP",
        0x0017 => "SIDR_REQ",
        0x0018 => "SIDR_REP",
        0x0019 => "LAP",
        0x001a => "APR",
        other => return Some(format!("CM attribute {other:#06x}")),
    };
    Some(format!("CM {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce_bth::{Bth, Header, MAX_HEADER_LEN, Opcode, Psn, Reth, Srqn, XrcEth};

    fn shown(header: Header) -> String {
        line(&Packet {
            header: header.view(&mut [0; MAX_HEADER_LEN]),
            payload: &[],
        })
    }

    #[test]
    fn newer_headers_are_shown() {
        let bth = |opcode| Header::new(Bth::new(opcode, Qpn::new(7), Psn::new(1)));
        let mut xrc = bth(Opcode::XrcSendOnly);
        xrc.xrceth = Some(XrcEth {
            reserved: 0,
            srqn: Srqn::new(0x12),
        });
        assert_eq!(shown(xrc).matches(" srq 0x000012").count(), 1, "{}", shown(xrc));
        let mut flush = bth(Opcode::RcFlush);
        flush.feth = Some(Feth {
            placement: Placement::GLOBAL_VISIBILITY.union(Placement::PERSISTENT),
            selectivity: Selectivity::Region,
            reserved: 0,
        });
        flush.reth = Some(Reth::default());
        let text = shown(flush);
        assert!(text.contains(" region visible+persistent va "), "{text}");
    }
}
