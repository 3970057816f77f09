//! Result of a dissection: layers of fields.

use std::fmt::Display;

use serde::Serialize;

use crate::{exchange::ExchangeId, service::Service};

/// Name of the fields whose bytes no layer understands.
pub const NOT_UNDERSTOOD: &str = "not understood";
/// Bytes that a value shows at most.
const MAX_HEX: usize = 32;

/// Bytes that a layer's offsets count from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    /// The packet: the UDP payload, from the BTH on.
    Packet,
    /// The message, put together from the payloads of several packets. This packet has its end.
    Message,
}

/// Field of a layer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Field {
    /// Name, in the words of the protocol.
    pub name: &'static str,
    /// Value, with its meaning where it has one.
    pub value: String,
    /// Offset of the first byte. See [`Layer::base`].
    pub offset: usize,
    /// Bytes; 0 for what was learned from other packets.
    pub len: usize,
    /// Parts of the field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<Field>,
}

impl Field {
    pub(crate) fn new(name: &'static str, value: impl Display, offset: usize, len: usize) -> Self {
        Self {
            name,
            value: value.to_string(),
            offset,
            len,
            children: Vec::new(),
        }
    }

    pub(crate) fn with(mut self, children: Vec<Self>) -> Self {
        self.children = children;
        self
    }

    /// Creates a field of what other packets showed.
    pub(crate) fn learned(name: &'static str, value: impl Display) -> Self {
        Self::new(name, value, 0, 0)
    }

    /// Creates a field of bytes that are shown as such.
    pub(crate) fn bytes(name: &'static str, bytes: &[u8], offset: usize) -> Self {
        Self::new(name, hex(bytes), offset, bytes.len())
    }

    /// Creates a field of bytes that are not understood, with the reason.
    pub(crate) fn not_understood(why: impl Display, bytes: &[u8], offset: usize) -> Self {
        Self::new(NOT_UNDERSTOOD, format!("{why}: {}", hex(bytes)), offset, bytes.len())
    }

    fn collect<'a>(&'a self, found: &mut Vec<&'a Self>) {
        if self.name == NOT_UNDERSTOOD {
            found.push(self);
        }
        for child in &self.children {
            child.collect(found);
        }
    }
}

/// Returns bytes in hexadecimal, without the zeros at their end.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let used = bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    let shown = used.min(MAX_HEX);
    let mut text: String = bytes[..shown].iter().map(|b| format!("{b:02x}")).collect();
    if used > shown {
        text += &format!("… ({} bytes)", bytes.len());
    } else if used < bytes.len() {
        let space = if text.is_empty() { "" } else { " and " };
        text += &format!("{space}{} zero bytes", bytes.len() - used);
    }
    text
}

/// Layer of a packet or message: a protocol's part of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Layer {
    /// Name of the protocol.
    pub name: &'static str,
    /// The layer in a few words.
    pub summary: String,
    /// Bytes that the fields' offsets count from.
    pub base: Base,
    /// Fields, in the order of their bytes.
    pub fields: Vec<Field>,
}

impl Layer {
    pub(crate) fn new(name: &'static str, base: Base) -> Self {
        Self {
            name,
            summary: String::new(),
            base,
            fields: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, name: &'static str, value: impl Display, offset: usize, len: usize) {
        self.fields.push(Field::new(name, value, offset, len));
    }
}

/// Packet as layers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Dissection {
    /// Number of the frame, as the caller gave it.
    pub frame: u64,
    /// Time of the frame, as the caller gave it.
    pub time_ns: u64,
    /// Number of the connection, from 1, if its connection request was seen or its service recognized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<u64>,
    /// Service of the connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Service>,
    /// Request that the packet belongs to, from its first packet to its completion's acknowledgement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange: Option<ExchangeId>,
    /// The packet was seen before: a retransmission.
    pub repeated: bool,
    /// Layers, the outermost first.
    pub layers: Vec<Layer>,
}

impl Dissection {
    /// One line: the summaries of all layers.
    pub fn summary(&self) -> String {
        let parts = self.layers.iter().map(|l| l.summary.as_str()).filter(|s| !s.is_empty());
        let repeated = self.repeated.then_some("repeated");
        parts.chain(repeated).collect::<Vec<_>>().join(" | ")
    }

    /// The layer of a protocol, if the packet has it.
    pub fn layer(&self, name: &str) -> Option<&Layer> {
        self.layers.iter().find(|layer| layer.name == name)
    }

    /// Fields whose bytes are not understood.
    pub fn not_understood(&self) -> Vec<&Field> {
        let mut found = Vec::new();
        for field in self.layers.iter().flat_map(|layer| &layer.fields) {
            field.collect(&mut found);
        }
        found
    }
}
