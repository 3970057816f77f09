//! Packet in one line.

use std::{borrow::Cow, fmt};

use roce_bth::{
    Class, ExtHeader, Feth, HeaderView, MAX_HEADER_LEN, Opcode, Packet, ParseError, Placement, Qpn, Selectivity,
};
use serde::{Serialize, Serializer};

/// Management class of communication management (IBTA 16.7).
const CLASS_CM: u8 = 7;
/// Extended headers in the order in which they follow the BTH, with their lengths in bytes.
pub const EXT_HEADERS: [(ExtHeader, usize); 10] = [
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

/// Contents of a frame, displayed in one line. The text is made when it is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameSummary {
    /// First packet: opcode, queue pair, PSN, extended headers, payload length; of a MAD its kind.
    Packet(Excerpt),
    /// No packet: the reason.
    Malformed(ParseError),
    /// A part of a packet: its opcode, if that is there and known.
    Incomplete(Option<Opcode>),
}

impl fmt::Display for FrameSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packet(excerpt) => excerpt.fmt(f),
            Self::Malformed(error) => error.fmt(f),
            Self::Incomplete(Some(opcode)) => write!(f, "{opcode}, incomplete"),
            Self::Incomplete(None) => f.write_str("incomplete"),
        }
    }
}

/// Headers of a packet, its payload's length, and the kind of a MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Excerpt {
    headers: [u8; MAX_HEADER_LEN],
    payload_len: usize,
    /// Management class and attribute ID.
    mad: Option<(u8, u16)>,
}

impl Excerpt {
    pub(crate) fn new(packet: &Packet<'_>) -> Self {
        let mut headers = [0; MAX_HEADER_LEN];
        let bytes = packet.header.bytes();
        headers[..bytes.len()].copy_from_slice(bytes);
        let mad = || {
            let attribute = packet.payload.get(16..)?.first_chunk()?;
            Some((*packet.payload.get(1)?, u16::from_be_bytes(*attribute)))
        };
        Self {
            headers,
            payload_len: packet.payload.len(),
            mad: match packet.header.bth.dest_qp {
                Qpn::GSI => mad(),
                _ => None,
            },
        }
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(header) = HeaderView::of_cut(&self.headers) else {
            return Ok(());
        };
        let payload_len = self.payload_len;
        PacketSummary { header, payload_len }.fmt(f)?;
        match self.mad {
            Some((CLASS_CM, attribute)) => write!(f, " (CM {})", message_name(attribute)),
            Some((class, attribute)) => write!(f, " (MAD class {class:#04x} attribute {attribute:#06x})"),
            None => Ok(()),
        }
    }
}

impl Serialize for FrameSummary {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Displays opcode, queue pair, PSN, extended headers and payload length of a packet in one line.
#[derive(Clone, Copy, Debug)]
pub struct PacketSummary<'a> {
    /// Headers.
    pub header: HeaderView<'a>,
    /// Bytes of payload without pad.
    pub payload_len: usize,
}

impl fmt::Display for PacketSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { header, payload_len } = *self;
        let bth = &header.bth;
        let info = bth.opcode.info();
        write!(f, "{} qp {} psn {}", info.name, bth.dest_qp, bth.psn)?;
        for (kind, _) in EXT_HEADERS.into_iter().filter(|(kind, _)| info.has(*kind)) {
            if kind != ExtHeader::CnpReserved {
                write!(f, " {}", HeaderSummary(header, kind))?;
            }
        }
        if info.payload {
            write!(f, " len {payload_len}")?;
        }
        let flags = [
            (bth.ack_req, " ack-req"),
            (bth.solicited, " solicited"),
            (bth.fecn, " fecn"),
            (bth.becn && info.class != Class::Cnp, " becn"),
        ];
        flags
            .iter()
            .filter(|(set, _)| *set)
            .try_for_each(|(_, name)| f.write_str(name))
    }
}

/// Displays the values of an extended header; nothing, if the packet doesn't have it.
#[derive(Clone, Copy, Debug)]
pub struct HeaderSummary<'a>(pub HeaderView<'a>, pub ExtHeader);

impl fmt::Display for HeaderSummary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f).unwrap_or(Ok(()))
    }
}

impl HeaderSummary<'_> {
    /// Writes the header; `None`: it is not there.
    fn write(&self, f: &mut fmt::Formatter<'_>) -> Option<fmt::Result> {
        let Self(header, kind) = self;
        Some(match kind {
            ExtHeader::Deth => {
                let deth = header.deth()?;
                write!(f, "from qp {} qkey {}", deth.src_qp, deth.qkey)
            }
            ExtHeader::Xrceth => write!(f, "to srq {}", header.xrceth()?.srqn),
            ExtHeader::Feth => flush(f, &header.feth()?),
            ExtHeader::Reth => {
                let reth = header.reth()?;
                write!(f, "va {:#x} rkey {} dma-len {}", reth.va, reth.rkey, reth.dma_len)
            }
            ExtHeader::AtomicEth => {
                let a = header.atomic_eth()?;
                write!(f, "va {:#x} rkey {} ", a.va, a.rkey)
                    .and_then(|()| write!(f, "swap-add {:#x} compare {:#x}", a.swap_add, a.compare))
            }
            ExtHeader::Aeth => {
                let aeth = header.aeth()?;
                write!(f, "{} msn {}", aeth.syndrome, aeth.msn)
            }
            ExtHeader::AtomicAckEth => write!(f, "original {:#x}", header.atomic_ack()?),
            ExtHeader::Imm => write!(f, "imm {:#010x}", header.imm()?),
            ExtHeader::Ieth => write!(f, "invalidate {}", header.ieth()?),
            ExtHeader::CnpReserved => return None,
        })
    }
}

/// Writes selectivity and placement of a FLUSH (IBTA Annex A19).
fn flush(f: &mut fmt::Formatter<'_>, feth: &Feth) -> fmt::Result {
    match feth.selectivity {
        Selectivity::Range => f.write_str("range ")?,
        Selectivity::Region => f.write_str("region ")?,
        Selectivity::Reserved(n) => write!(f, "selectivity {n} ")?,
    }
    let names = [
        (Placement::GLOBAL_VISIBILITY, "visible"),
        (Placement::PERSISTENT, "persistent"),
    ];
    let set = names.into_iter().filter(|(flag, _)| feth.placement.contains(*flag));
    for (nth, (_, name)) in set.enumerate() {
        write!(f, "{}{name}", if nth == 0 { "" } else { "+" })?;
    }
    Ok(())
}

/// Returns the name of a message of communication management (IBTA 12.6).
fn message_name(attribute: u16) -> Cow<'static, str> {
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
        other => return format!("attribute {other:#06x}").into(),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce_bth::{Bth, Header, Psn, Reth, Srqn, XrcEth};

    fn shown(header: Header) -> String {
        let mut bytes = [0; MAX_HEADER_LEN];
        let (header, payload_len) = (header.view(&mut bytes), 0);
        PacketSummary { header, payload_len }.to_string()
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
