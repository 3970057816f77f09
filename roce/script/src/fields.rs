//! Fields of packets: reading, and which packets have them.

use core::net::IpAddr;

use roce_bth::{Class, ExtHeader, Opcode};

use crate::{
    error::ScriptError,
    kind::Kind,
    value::{self, Data, Place},
    words::{Word, Words},
};

/// Fields of a packet that a line names. `None`: the usual value of a packet to send, any value of one to expect.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Fields {
    pub(crate) psn: Option<u32>,
    pub(crate) qp: Option<u32>,
    pub(crate) pkey: Option<u16>,
    pub(crate) pad: Option<u8>,
    pub(crate) version: Option<u8>,
    pub(crate) ack_req: Option<bool>,
    pub(crate) solicited: Option<bool>,
    pub(crate) migreq: Option<bool>,
    pub(crate) fecn: Option<bool>,
    pub(crate) becn: Option<bool>,
    pub(crate) msn: Option<u32>,
    pub(crate) credits: Option<u8>,
    pub(crate) timer: Option<u8>,
    pub(crate) syndrome: Option<u8>,
    pub(crate) va: Option<Place>,
    pub(crate) rkey: Option<Place>,
    pub(crate) len: Option<u32>,
    pub(crate) imm: Option<u32>,
    pub(crate) inv: Option<Place>,
    pub(crate) swap: Option<u64>,
    pub(crate) compare: Option<u64>,
    pub(crate) add: Option<u64>,
    pub(crate) value: Option<u64>,
    pub(crate) placement: Option<u8>,
    pub(crate) selectivity: Option<u8>,
    pub(crate) payload: Option<Data>,
    pub(crate) source_port: Option<u16>,
    pub(crate) from: Option<IpAddr>,
    pub(crate) to: Option<IpAddr>,
    pub(crate) corrupt: bool,
    pub(crate) no_icrc: bool,
    pub(crate) cut: usize,
}

/// Packets that have a field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    /// All with a BTH.
    Every,
    /// Packets with one of these headers.
    Header(&'static [ExtHeader]),
    /// RNR NAKs.
    Rnr,
    /// Compare and Swap.
    Compare,
    /// Fetch and Add.
    Add,
    /// Packets that carry payload.
    Payload,
    /// All to send.
    Sent,
}

/// Names of all fields.
const FIELDS: [(&str, Of); 32] = {
    use ExtHeader::{Aeth, AtomicAckEth, AtomicEth, Feth, Ieth, Imm, Reth};
    [
        ("psn", Of::Every),
        ("qp", Of::Every),
        ("pkey", Of::Every),
        ("pad", Of::Every),
        ("version", Of::Every),
        ("ackreq", Of::Every),
        ("se", Of::Every),
        ("migreq", Of::Every),
        ("fecn", Of::Every),
        ("becn", Of::Every),
        ("msn", Of::Header(&[Aeth])),
        ("credits", Of::Header(&[Aeth])),
        ("timer", Of::Rnr),
        ("syndrome", Of::Header(&[Aeth])),
        ("va", Of::Header(&[Reth, AtomicEth])),
        ("rkey", Of::Header(&[Reth, AtomicEth])),
        ("len", Of::Header(&[Reth])),
        ("imm", Of::Header(&[Imm])),
        ("inv", Of::Header(&[Ieth])),
        ("swap", Of::Compare),
        ("compare", Of::Compare),
        ("add", Of::Add),
        ("value", Of::Header(&[AtomicAckEth])),
        ("placement", Of::Header(&[Feth])),
        ("selectivity", Of::Header(&[Feth])),
        ("payload", Of::Payload),
        ("source-port", Of::Every),
        ("from", Of::Sent),
        ("to", Of::Sent),
        ("corrupt", Of::Sent),
        ("icrc", Of::Sent),
        ("cut", Of::Sent),
    ]
};

impl Of {
    fn fits(self, kind: &Kind, sent: bool) -> bool {
        let opcode = kind.opcode();
        let info = opcode.map(Opcode::info);
        match self {
            Self::Sent => sent,
            Self::Every => !matches!(kind, Kind::Raw(_)),
            Self::Rnr => *kind == Kind::Rnr,
            Self::Compare => info.is_some_and(|i| i.class == Class::Atomic && !is_add(opcode)),
            Self::Add => is_add(opcode),
            Self::Payload => match kind {
                Kind::Code(_) | Kind::Any => true,
                // Also where it does not belong, to see that it is refused.
                Kind::Raw(_) => false,
                _ => sent || info.is_some_and(|i| i.payload),
            },
            Self::Header(any) => info.is_some_and(|i| any.iter().any(|header| i.has(*header))),
        }
    }
}

fn is_add(opcode: Option<Opcode>) -> bool {
    matches!(opcode, Some(Opcode::RcFetchAdd | Opcode::XrcFetchAdd))
}

fn names(kind: &Kind, sent: bool) -> String {
    let fitting = FIELDS.iter().filter(|(_, of)| of.fits(kind, sent));
    let names: Vec<&str> = fitting.map(|(name, _)| *name).collect();
    format!("one of the fields {}", names.join(", "))
}

fn flag(word: Word<'_>) -> Result<bool, ScriptError> {
    match word.text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(word.error("0 or 1")),
    }
}

fn address(word: Word<'_>) -> Result<IpAddr, ScriptError> {
    word.text.parse().map_err(|_| word.error("an IP address"))
}

impl Fields {
    /// Reads the rest of a line. `sent`: of a packet that the script sends.
    pub(crate) fn parse(
        words: &mut Words<'_>,
        kind: &Kind,
        sent: bool,
        regions: &[String],
    ) -> Result<Self, ScriptError> {
        let mut fields = Self::default();
        let mut seen = Vec::new();
        for word in words.by_ref() {
            // A flag alone is set.
            let (key, value) = match word.assignment() {
                Some((key, value)) => (key, Some(value)),
                None => (word, None),
            };
            let known = FIELDS
                .iter()
                .find(|(name, of)| *name == key.text && of.fits(kind, sent));
            if known.is_none() {
                return Err(key.error(names(kind, sent)));
            }
            if seen.contains(&key.text) {
                return Err(key.error("each field once"));
            }
            seen.push(key.text);
            match value {
                Some(value) if value.text == "*" && !sent => {}
                Some(value) => fields.set(key, value, regions)?,
                None => fields.raise(key)?,
            }
        }
        Ok(fields)
    }

    /// Sets a flag that is named without a value.
    fn raise(&mut self, key: Word<'_>) -> Result<(), ScriptError> {
        match self.flag(key.text) {
            Some(flag) => *flag = Some(true),
            None => {
                return Err(key
                    .part("", key.text.chars().count())
                    .error(format!("{}=VALUE", key.text)));
            }
        }
        Ok(())
    }

    fn flag(&mut self, name: &str) -> Option<&mut Option<bool>> {
        match name {
            "ackreq" => Some(&mut self.ack_req),
            "se" => Some(&mut self.solicited),
            "migreq" => Some(&mut self.migreq),
            "fecn" => Some(&mut self.fecn),
            "becn" => Some(&mut self.becn),
            _ => None,
        }
    }

    fn set(&mut self, key: Word<'_>, value: Word<'_>, regions: &[String]) -> Result<(), ScriptError> {
        if let Some(raised) = self.flag(key.text) {
            *raised = Some(flag(value)?);
            return Ok(());
        }
        match key.text {
            "psn" => self.psn = Some(value::small(value, 24)?),
            "qp" => self.qp = Some(value::small(value, 24)?),
            "pkey" => self.pkey = Some(value::small(value, 16)? as u16),
            "pad" => self.pad = Some(value::byte(value, 2)?),
            "version" => self.version = Some(value::byte(value, 4)?),
            "msn" => self.msn = Some(value::small(value, 24)?),
            "credits" => self.credits = Some(value::byte(value, 5)?),
            "timer" => self.timer = Some(value::byte(value, 5)?),
            "syndrome" => self.syndrome = Some(value::byte(value, 8)?),
            "va" => self.va = Some(value::place(value, regions, 64)?),
            "rkey" => self.rkey = Some(value::place(value, regions, 32)?),
            "inv" => self.inv = Some(value::place(value, regions, 32)?),
            "len" => self.len = Some(value::small(value, 32)?),
            "imm" => self.imm = Some(value::small(value, 32)?),
            "swap" => self.swap = Some(value::number(value, 64)?),
            "compare" => self.compare = Some(value::number(value, 64)?),
            "add" => self.add = Some(value::number(value, 64)?),
            "value" => self.value = Some(value::number(value, 64)?),
            "placement" => self.placement = Some(value::byte(value, 4)?),
            "selectivity" => self.selectivity = Some(value::byte(value, 2)?),
            "payload" => self.payload = Some(payload(value, regions)?),
            "source-port" => self.source_port = Some(value::small(value, 16)? as u16),
            "from" => self.from = Some(address(value)?),
            "to" => self.to = Some(address(value)?),
            "cut" => self.cut = value::bytes(value)?,
            "corrupt" if value.text == "icrc" => self.corrupt = true,
            "corrupt" => return Err(value.error("icrc")),
            "icrc" if value.text == "none" => self.no_icrc = true,
            _ => return Err(value.error("none")),
        }
        Ok(())
    }
}

/// Largest payload of a packet: that of a UDP datagram over IPv4 with the longest headers would be a bit more.
const MAX_PAYLOAD: usize = 65_000;

fn payload(value: Word<'_>, regions: &[String]) -> Result<Data, ScriptError> {
    match value::data(value, regions)? {
        data if data.len > MAX_PAYLOAD => Err(value.error(format!("a payload of at most {MAX_PAYLOAD} bytes"))),
        data => Ok(data),
    }
}
