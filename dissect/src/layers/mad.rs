//! Management datagrams: the common header, and messages of the connection manager.

use std::{fmt::Write, net::IpAddr};

use roce_port::cm::{
    cma::ServiceId,
    mad::{Attribute, CLASS, FieldSpec, HEADER_LEN, MAD_LEN, Mad, Message, Subject},
};

use super::lap;
use crate::{
    field::{Base, Field, Layer, hex},
    service,
};

/// Attribute ID of ClassPortInfo.
const CLASS_PORT_INFO: u16 = 1;
/// Fields of the message that another layer shows.
const PRIVATE_DATA: &str = "private_data";

/// MAD of a packet.
pub(crate) struct Parsed {
    pub(crate) layer: Layer,
    /// Message of the connection manager, if the manager's parser takes it.
    pub(crate) mad: Option<Box<Mad>>,
    /// Place of its private data in the MAD.
    pub(crate) private_at: usize,
}

/// Dissects a MAD. `at` is its offset in the packet.
pub(crate) fn layer(bytes: &[u8], at: usize) -> Parsed {
    let mut layer = Layer::new("MAD", Base::Packet);
    let parsed = |layer, mad| Parsed {
        layer,
        mad,
        private_at: 0,
    };
    let Some(whole) = bytes.first_chunk::<MAD_LEN>().filter(|_| bytes.len() == MAD_LEN) else {
        let why = format!("a MAD has {MAD_LEN} bytes, not {}", bytes.len());
        layer.summary = format!("MAD: {why}");
        layer.fields.push(Field::not_understood(why, bytes, at));
        return parsed(layer, None);
    };
    let attribute = u16::from_be_bytes([whole[16], whole[17]]);
    header(&mut layer, whole, at);
    if whole[1] != CLASS {
        layer.summary = format!("MAD class {:#04x} attribute {attribute:#06x}", whole[1]);
        layer
            .fields
            .push(Field::bytes("data", &whole[HEADER_LEN..], at + HEADER_LEN));
        return parsed(layer, None);
    }
    if let Some((name, fields)) = lap::fields(attribute) {
        layer.name = "CM";
        layer.summary = format!("CM {name} {}", ids(whole, fields));
        all(&mut layer, fields, whole, at);
        let private_at = private_at(fields);
        return Parsed {
            private_at,
            ..parsed(layer, None)
        };
    }
    if attribute == CLASS_PORT_INFO {
        layer.summary = "CM ClassPortInfo".to_owned();
        layer
            .fields
            .push(Field::bytes("data", &whole[HEADER_LEN..], at + HEADER_LEN));
        return parsed(layer, None);
    }
    match Mad::parse(whole) {
        Ok(mad) => {
            let fields = Message::fields(mad.message.attribute());
            layer.name = "CM";
            layer.summary = summary(&mad.message);
            all(&mut layer, fields, whole, at);
            Parsed {
                layer,
                mad: Some(Box::new(mad)),
                private_at: private_at(fields),
            }
        }
        Err(why) => {
            layer.summary = format!("CM attribute {attribute:#06x}: {why:?}");
            let field = Field::not_understood(format!("{why:?}"), &whole[HEADER_LEN..], at + HEADER_LEN);
            layer.fields.push(field);
            parsed(layer, None)
        }
    }
}

fn header(layer: &mut Layer, mad: &[u8; MAD_LEN], at: usize) {
    let word = |from: usize| u16::from_be_bytes([mad[from], mad[from + 1]]);
    let number = |from: usize, len: usize| mad[from..from + len].iter().fold(0u64, |n, b| n << 8 | u64::from(*b));
    layer.push("base version", mad[0], at, 1);
    layer.push("management class", format!("{:#04x}", mad[1]), at + 1, 1);
    layer.push("class version", mad[2], at + 2, 1);
    layer.push("method", format!("{:#04x}", mad[3]), at + 3, 1);
    layer.push("status", format!("{:#06x}", word(4)), at + 4, 2);
    layer.push("transaction ID", format!("{:#x}", number(8, 8)), at + 8, 8);
    layer.push("attribute ID", format!("{:#06x}", word(16)), at + 16, 2);
    layer.push("attribute modifier", format!("{:#x}", number(20, 4)), at + 20, 4);
}

/// Returns the bits of a field.
fn bits(mad: &[u8; MAD_LEN], field: &FieldSpec) -> u128 {
    let end = field.first_bit() + field.width;
    let last = end.div_ceil(8);
    let bytes = mad.get(field.byte..last).unwrap_or_default();
    let value = bytes.iter().fold(0u128, |n, b| n << 8 | u128::from(*b));
    let value = value >> (last * 8 - end);
    match field.width {
        128.. => value,
        width => value & ((1 << width) - 1),
    }
}

fn find(fields: &[FieldSpec], name: &str) -> Option<FieldSpec> {
    fields.iter().find(|f| f.name == name).copied()
}

fn private_at(fields: &[FieldSpec]) -> usize {
    find(fields, PRIVATE_DATA).map_or(MAD_LEN, |f| f.byte)
}

/// Returns both communication IDs in words.
fn ids(mad: &[u8; MAD_LEN], fields: &[FieldSpec]) -> String {
    let id = |name| find(fields, name).map_or(0, |f| bits(mad, &f));
    format!("{:#010x} to {:#010x}", id("local_comm_id"), id("remote_comm_id"))
}

/// Appends all fields but the private data.
fn all(layer: &mut Layer, fields: &[FieldSpec], mad: &[u8; MAD_LEN], at: usize) {
    for field in fields.iter().filter(|f| f.name != PRIVATE_DATA) {
        let len = (field.bit + field.width).div_ceil(8);
        let bytes = mad.get(field.byte..field.byte + len).unwrap_or_default();
        let value = match field.width {
            129.. => hex(bytes),
            _ => value(field.name, bits(mad, field)),
        };
        layer.push(field.name, value, at + field.byte, len);
    }
}

/// Returns a value in the form that its field's name asks for.
fn value(name: &str, value: u128) -> String {
    match name {
        "service_id" => service::describe(ServiceId(value as u64)),
        "reason" => reason(value as u16),
        "status" => sidr_status(value as u8).to_owned(),
        "ap_status" => format!("{value}{}", if value == 0 { " (accepted)" } else { "" }),
        "subject" => format!("{value} ({})", subject(value as u8)),
        "path_mtu" => match value {
            1..=5 => format!("{value} ({} bytes)", 128 << value),
            _ => value.to_string(),
        },
        _ if name.ends_with("_gid") => IpAddr::from((value).to_be_bytes()).to_canonical().to_string(),
        _ if name.ends_with("comm_id") || name.ends_with("guid") || name.ends_with("qkey") => format!("{value:#x}"),
        "pkey" | "request_id" | "vendor_id" => format!("{value:#x}"),
        _ if name.ends_with("lid") => format!("{value:#06x}"),
        _ => value.to_string(),
    }
}

fn subject(number: u8) -> &'static str {
    match number {
        0 => "REQ",
        1 => "REP",
        _ => "other",
    }
}

/// Returns the reason of a REJ in words (IBA table 109).
pub(crate) fn reason(number: u16) -> String {
    let words = match number {
        1 => "no queue pair available",
        2 => "no end-to-end context available",
        3 => "no resources available",
        4 => "timeout",
        5 => "unsupported request",
        6 => "invalid communication ID",
        7 => "invalid communication instance",
        8 => "invalid service ID: nothing listens there",
        9 => "invalid transport service type",
        10 => "stale connection",
        11 => "reliable datagram channel does not exist",
        12 => "primary remote GID rejected",
        13 => "primary remote LID rejected",
        14 => "invalid primary service level",
        15 => "invalid primary traffic class",
        16 => "invalid primary hop limit",
        17 => "invalid primary packet rate",
        18 => "alternate remote GID rejected",
        19 => "alternate remote LID rejected",
        20 => "invalid alternate service level",
        21 => "invalid alternate traffic class",
        22 => "invalid alternate hop limit",
        23 => "invalid alternate packet rate",
        24 => "port and CM redirection",
        25 => "port redirection",
        26 => "invalid path MTU",
        27 => "insufficient responder resources",
        28 => "consumer reject",
        29 => "RNR retry count rejected",
        30 => "duplicate local communication ID",
        31 => "invalid class version",
        32 => "invalid primary flow label",
        33 => "invalid alternate flow label",
        _ => return format!("reason {number}"),
    };
    format!("{words} ({number})")
}

/// Returns the status of a SIDR_REP in words (IBA table 120).
fn sidr_status(number: u8) -> &'static str {
    match number {
        0 => "0 (queue pair is valid)",
        1 => "1 (service ID not supported)",
        2 => "2 (rejected by the service)",
        3 => "3 (no queue pair available)",
        4 => "4 (redirected)",
        5 => "5 (unsupported version)",
        _ => "reserved",
    }
}

/// Returns a message in one line.
fn summary(message: &Message) -> String {
    let mut out = format!("CM {}", message.attribute().name().to_uppercase());
    // Writing to a String cannot fail.
    let _ = match message {
        Message::Req(m) => write!(
            out,
            " {:#010x} service {} qp {} psn {}",
            m.local_comm_id,
            service::describe(ServiceId(m.service_id)),
            m.local_qpn,
            m.starting_psn
        ),
        Message::Rep(m) => write!(
            out,
            " {:#010x} to {:#010x} qp {} psn {}",
            m.local_comm_id, m.remote_comm_id, m.local_qpn, m.starting_psn
        ),
        Message::Rej(m) => write!(
            out,
            " {:#010x} to {:#010x} of {}: {}",
            m.local_comm_id,
            m.remote_comm_id,
            subject_name(m.subject),
            reason(m.reason)
        ),
        Message::Mra(m) => write!(
            out,
            " {:#010x} to {:#010x} of {}, timeout code {}",
            m.local_comm_id,
            m.remote_comm_id,
            subject_name(m.subject),
            m.service_timeout
        ),
        Message::Rtu(m) => write!(out, " {:#010x} to {:#010x}", m.local_comm_id, m.remote_comm_id),
        Message::Dreq(m) => write!(
            out,
            " {:#010x} to {:#010x} qp {}",
            m.local_comm_id, m.remote_comm_id, m.remote_qpn
        ),
        Message::Drep(m) => write!(out, " {:#010x} to {:#010x}", m.local_comm_id, m.remote_comm_id),
        Message::SidrReq(m) => write!(
            out,
            " {:#x} service {}",
            m.request_id,
            service::describe(ServiceId(m.service_id))
        ),
        Message::SidrRep(m) => write!(
            out,
            " {:#x} qp {} status {}",
            m.request_id,
            m.qpn,
            sidr_status(m.status)
        ),
    };
    out
}

const fn subject_name(subject: Subject) -> &'static str {
    match subject {
        Subject::Req => "REQ",
        Subject::Rep => "REP",
        Subject::Other | Subject::Reserved => "no particular message",
    }
}

/// Returns the communication IDs of sender and receiver.
pub(crate) const fn comm_ids(message: &Message) -> (u32, u32) {
    match message {
        Message::Req(m) => (m.local_comm_id, 0),
        Message::Mra(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rej(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rep(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Rtu(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Dreq(m) => (m.local_comm_id, m.remote_comm_id),
        Message::Drep(m) => (m.local_comm_id, m.remote_comm_id),
        Message::SidrReq(_) | Message::SidrRep(_) => (0, 0),
    }
}

/// Returns whether private data may begin with RDMA_CM's header.
pub(crate) const fn has_cma(attribute: Attribute) -> bool {
    matches!(attribute, Attribute::Req | Attribute::SidrReq)
}

#[cfg(test)]
mod tests {
    use roce_bth::Qpn;
    use roce_port::cm::mad::{Dreq, Rej};

    use super::*;
    use crate::field::NOT_UNDERSTOOD;

    fn dreq() -> [u8; MAD_LEN] {
        let dreq = Dreq {
            local_comm_id: 0x1122_3344,
            remote_comm_id: 0x5566_7788,
            remote_qpn: Qpn::new(17),
            ..Dreq::default()
        };
        Mad::new(9, dreq).emit()
    }

    fn with_attribute(attribute: u16) -> [u8; MAD_LEN] {
        let mut mad = dreq();
        mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        mad
    }

    #[test]
    fn fields_have_their_bytes_and_values() {
        let parsed = layer(&dreq(), 20);
        assert_eq!(parsed.layer.summary, "CM DREQ 0x11223344 to 0x55667788 qp 0x000011");
        assert_eq!(parsed.private_at, HEADER_LEN + 12);
        let field = |name| parsed.layer.fields.iter().find(|f| f.name == name).unwrap();
        let id = field("remote_comm_id");
        assert_eq!((id.value.as_str(), id.offset, id.len), ("0x55667788", 20 + 24 + 4, 4));
        let qpn = field("remote_qpn");
        assert_eq!((qpn.value.as_str(), qpn.offset, qpn.len), ("17", 20 + 24 + 8, 3));
        assert_eq!(field("transaction ID").value, "0x9");
    }

    #[test]
    fn alternate_paths_are_named() {
        let mut lap = with_attribute(lap::LAP);
        // Alternate GID of the sender: an IPv4 address.
        lap[HEADER_LEN + 24..HEADER_LEN + 40].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7]);
        let parsed = layer(&lap, 20);
        assert_eq!(parsed.layer.summary, "CM LAP 0x11223344 to 0x55667788");
        let gid = parsed
            .layer
            .fields
            .iter()
            .find(|f| f.name == "alternate_local_gid")
            .unwrap();
        assert_eq!((gid.value.as_str(), gid.len), ("10.0.0.7", 16));
        let apr = layer(&with_attribute(lap::APR), 20);
        assert!(apr.layer.summary.starts_with("CM APR") && apr.mad.is_none());
        let last = apr.layer.fields.last().unwrap();
        assert!(last.offset + last.len <= 20 + MAD_LEN);
    }

    #[test]
    fn reasons_are_words() {
        for (number, words) in [
            (8, "invalid service ID: nothing listens there (8)"),
            (10, "stale connection (10)"),
            (28, "consumer reject (28)"),
            (99, "reason 99"),
        ] {
            let rej = Rej {
                reason: number,
                ..Rej::default()
            };
            let parsed = layer(&Mad::new(1, rej).emit(), 20);
            assert!(parsed.layer.summary.ends_with(words), "{}", parsed.layer.summary);
        }
    }

    #[test]
    fn other_mads_are_shown_and_wrong_ones_are_not_understood() {
        let mut subnet = dreq();
        subnet[1] = 0x81;
        assert_eq!(layer(&subnet, 20).layer.summary, "MAD class 0x81 attribute 0x0015");
        assert_eq!(layer(&with_attribute(1), 20).layer.summary, "CM ClassPortInfo");
        let unknown = |parsed: &Parsed| parsed.layer.fields.iter().any(|f| f.name == NOT_UNDERSTOOD);
        assert!(unknown(&layer(&with_attribute(0x77), 20)));
        assert!(unknown(&layer(&dreq()[..200], 20)));
        assert!(unknown(&layer(&[], 20)));
        assert!(!unknown(&layer(&dreq(), 20)));
    }
}
