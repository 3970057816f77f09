//! Comparison of the host's packets with those that a script expects.

use core::fmt::{Debug, Display};

use roce_bth::{Header, Opcode, Packet, Qpn, Syndrome};

use crate::{
    fields::Fields,
    kind::Kind,
    memory::Memory,
    names::{NAKS, name_of},
    script::PacketSpec,
};

/// Differences between a packet and the one that is expected, in words.
#[derive(Debug, Default)]
struct Differences(Vec<String>);

impl Differences {
    /// Compares a field that the line names.
    fn number<T: PartialEq + Display>(&mut self, name: &str, found: Option<T>, expected: Option<T>) {
        match (found, expected) {
            (Some(found), Some(expected)) if found != expected => {
                self.0.push(format!("{name} is {found}, not {expected}"));
            }
            (None, Some(_)) => self.0.push(format!("there is no {name}")),
            _ => {}
        }
    }

    /// Compares a field that is shown in hexadecimal.
    fn hex(&mut self, name: &str, found: Option<u64>, expected: Option<u64>) {
        let shown = |value: Option<u64>| value.map(|v| format!("{v:#x}"));
        self.number(name, shown(found), shown(expected));
    }
}

/// Compares a packet of the host with a line. `qpn`: the script's queue pair. Returns the differences, in words.
pub(crate) fn compare(spec: &PacketSpec, packet: &Packet<'_>, memory: &Memory, qpn: Qpn, src_port: u16) -> Vec<String> {
    let header = Header::from(packet.header);
    let fields = &spec.fields;
    let mut all = Differences::default();
    kind(&mut all, &spec.kind, &header);
    if !all.0.is_empty() {
        // The fields of another kind of packet mean something else.
        return all.0;
    }
    bth(&mut all, fields, &header, qpn);
    all.number("source-port", Some(src_port), fields.source_port);
    extended(&mut all, fields, &header, memory);
    payload(&mut all, fields, packet.payload, memory);
    all.0
}

fn kind(all: &mut Differences, kind: &Kind, header: &Header) {
    let opcode = header.bth.opcode;
    if let Some(expected) = kind.opcode()
        && expected != opcode
    {
        all.0.push(format!("it is {opcode}, not {expected}"));
        return;
    }
    let Some(syndrome) = header.aeth.map(|aeth| aeth.syndrome) else {
        return;
    };
    let fits = match (kind, syndrome) {
        (Kind::Ack, syndrome) => matches!(syndrome, Syndrome::Ack(_)),
        (Kind::Rnr, syndrome) => matches!(syndrome, Syndrome::Rnr(_)),
        (Kind::Nak(code), syndrome) => syndrome == Syndrome::Nak(*code),
        _ => true,
    };
    if !fits {
        all.0.push(format!("it is {}", describe(syndrome)));
    }
}

fn describe(syndrome: Syndrome) -> String {
    match syndrome {
        Syndrome::Ack(_) => "an acknowledgement".to_owned(),
        Syndrome::Rnr(_) => "an RNR NAK".to_owned(),
        Syndrome::Nak(code) => format!("NAK {}", name_of(&NAKS, code)),
        Syndrome::Reserved(byte) => format!("an acknowledgement with the reserved syndrome {byte:#x}"),
    }
}

fn bth(all: &mut Differences, fields: &Fields, header: &Header, qpn: Qpn) {
    let bth = &header.bth;
    let flag = |on: bool| Some(u8::from(on));
    all.hex(
        "qp",
        Some(bth.dest_qp.value().into()),
        Some(fields.qp.unwrap_or(qpn.value()).into()),
    );
    all.number("psn", Some(bth.psn.value()), fields.psn);
    all.number("pad", Some(bth.pad), fields.pad);
    all.number("version", Some(bth.version), fields.version);
    all.hex("pkey", Some(bth.pkey.0.into()), fields.pkey.map(u64::from));
    all.number("ackreq", flag(bth.ack_req), fields.ack_req.map(u8::from));
    all.number("se", flag(bth.solicited), fields.solicited.map(u8::from));
    all.number("migreq", flag(bth.migreq), fields.migreq.map(u8::from));
    all.number("fecn", flag(bth.fecn), fields.fecn.map(u8::from));
    all.number("becn", flag(bth.becn), fields.becn.map(u8::from));
}

fn extended(all: &mut Differences, fields: &Fields, header: &Header, memory: &Memory) {
    let syndrome = header.aeth.map(|aeth| aeth.syndrome);
    all.number("msn", header.aeth.map(|aeth| aeth.msn.value()), fields.msn);
    all.hex(
        "syndrome",
        syndrome.map(|s| s.to_byte().into()),
        fields.syndrome.map(u64::from),
    );
    let credits = match syndrome {
        Some(Syndrome::Ack(credits)) => Some(credits.code()),
        _ => None,
    };
    all.number("credits", credits, fields.credits);
    let timer = match syndrome {
        Some(Syndrome::Rnr(timer)) => Some(timer.code()),
        _ => None,
    };
    all.number("timer", timer, fields.timer);
    let (reth, atomic) = (header.reth, header.atomic_eth);
    let va = reth.map(|reth| reth.va).or(atomic.map(|eth| eth.va));
    all.hex("va", va, fields.va.map(|place| memory.address(place)));
    let rkey = reth.map(|reth| reth.rkey).or(atomic.map(|eth| eth.rkey));
    all.hex(
        "rkey",
        rkey.map(|key| key.0.into()),
        fields.rkey.map(|place| memory.key(place).0.into()),
    );
    all.number("len", reth.map(|reth| reth.dma_len), fields.len);
    let is_add = matches!(header.bth.opcode, Opcode::RcFetchAdd | Opcode::XrcFetchAdd);
    all.number("add", atomic.filter(|_| is_add).map(|eth| eth.swap_add), fields.add);
    all.number("swap", atomic.filter(|_| !is_add).map(|eth| eth.swap_add), fields.swap);
    all.number("compare", atomic.map(|eth| eth.compare), fields.compare);
    all.number("value", header.atomic_ack, fields.value);
    all.number("imm", header.imm, fields.imm);
    all.hex(
        "inv",
        header.ieth.map(|key| key.0.into()),
        fields.inv.map(|place| memory.key(place).0.into()),
    );
    all.number(
        "placement",
        header.feth.map(|feth| feth.placement.bits()),
        fields.placement,
    );
    all.number(
        "selectivity",
        header.feth.map(|feth| feth.selectivity.bits()),
        fields.selectivity,
    );
}

fn payload(all: &mut Differences, fields: &Fields, found: &[u8], memory: &Memory) {
    let Some(data) = &fields.payload else { return };
    all.number("the payload's length", Some(found.len()), Some(data.len));
    if let Some(bytes) = memory.bytes(data, None).filter(|bytes| bytes.len() == found.len()) {
        all.0.extend(differs("the payload", found, &bytes));
    }
}

/// Returns where bytes differ, in words.
pub(crate) fn differs(what: &str, found: &[u8], expected: &[u8]) -> Option<String> {
    let at = found.iter().zip(expected).position(|(a, b)| a != b)?;
    Some(format!(
        "{what} differs from byte {at} on: {:#04x}, not {:#04x}",
        found[at], expected[at]
    ))
}
