//! RDS: messages and their fragments, acknowledgements, congestion maps.

use ::rds::proto::{BITMAP_LEN, BitmapFragment, Extension, Flags, Header, Kind, MAX_MESSAGE, RdmaDirection};
use roce_bth::{Class, Reth};

use super::other::base;
use crate::{
    conns::Direction,
    cx::{Cx, Found},
    exchange::{ExchangeId, Key, Note, Number, Scope},
    field::{Field, Layer},
    flow::Message,
    rds_part::RdsPart,
};

const NAME: &str = "RDS";
/// Congested ports that a summary names.
const MAX_PORTS: usize = 16;

/// Key of a message by its sequence number. A message that is sent again over a later connection has the same.
fn sequence_key(cx: &Cx<'_>, direction: Direction, sequence: u64) -> Key {
    let (from, to) = cx.conn.ends(direction);
    Key(Scope::Pair(from, to, cx.conn.rds_tos), Number::Sequence, sequence)
}

/// Key of memory of the receiver.
fn memory_key(cx: &Cx<'_>, rkey: u32) -> Key {
    Key(Scope::Conn(cx.conn.id), Number::RemoteKey, rkey.into())
}

/// Returns the exchange of an RDMA operation: that of the message that will follow, which names the key.
pub(crate) fn rdma(cx: &mut Cx<'_>, reth: &Reth) -> ExchangeId {
    let key = memory_key(cx, reth.rkey.0);
    if let Some(open) = cx.exchanges.get(key) {
        return open.id;
    }
    let id = cx.exchanges.fresh();
    let open = cx.meta.open(id, Note::None);
    cx.exchanges.enter(key, open);
    id
}

/// Returns the exchange that a SEND of several packets belongs to, when it begins.
pub(crate) fn begin_send(cx: &mut Cx<'_>, payload: &[u8]) -> Option<ExchangeId> {
    let (header, _) = Header::peek(payload).ok()?;
    match continued(cx, header) {
        Some(part) => part.exchange,
        None => exchange(cx, header),
    }
}

/// Dissects a message of the transport.
pub(crate) fn message(cx: &mut Cx<'_>, message: &Message<'_>) -> Found {
    if message.class == Class::Write {
        let exchange = message.exchange.or_else(|| Some(rdma(cx, &message.reth?)));
        let mut layer = Layer::new(NAME, base(message));
        layer.summary = format!("RDS data by WRITE, {} bytes", message.len());
        layer.push(
            "data",
            format!("{} bytes", message.len()),
            message.origin(),
            message.len(),
        );
        return Found::layer(layer, exchange);
    }
    let mut layer = Layer::new(NAME, base(message));
    let (bytes, at) = (message.head(), message.origin());
    let (header, data) = match Header::peek(bytes) {
        Ok(found) => found,
        Err(why) => {
            layer.summary = why.to_string();
            layer.fields.push(Field::not_understood(why, bytes, at));
            return Found::layer(layer, None);
        }
    };
    fields(&mut layer, header, at);
    let part = next_part(cx, header, message.exchange);
    let (index, count) = (part.fragments - 1, header.fragments());
    layer.summary = summary(header, index, count);
    let data_at = at + Header::LEN;
    match (header.kind(), BitmapFragment::parse(index, data)) {
        (Kind::Bitmap, Ok(map)) if header.len.get() as usize == BITMAP_LEN => {
            let ports = ports(&map);
            layer.summary += &format!(", ports {ports}");
            layer.push("congested ports", ports, data_at, data.len());
        }
        _ => check_data(&mut layer, header, index, data, data_at),
    }
    if let Err(why) = Header::parse(bytes) {
        layer.summary += &format!(", {why}");
    }
    Found::layer(layer, part.exchange)
}

/// Returns the message of which a header's fragment is the next.
fn continued<'a>(cx: &'a mut Cx<'_>, header: &Header) -> Option<&'a mut RdsPart> {
    let part = cx.conn.rds[cx.direction as usize].as_mut()?;
    let next = part.fragments < part.first.fragments() && header.continues(&part.first, part.fragments).is_ok();
    next.then_some(part)
}

/// Returns the message that a header's fragment belongs to, with this fragment counted. `begun` is the exchange of the fragment's first
/// packet.
fn next_part(cx: &mut Cx<'_>, header: &Header, begun: Option<ExchangeId>) -> RdsPart {
    if let Some(part) = continued(cx, header) {
        part.fragments += 1;
        return *part;
    }
    let part = RdsPart {
        first: *header,
        fragments: 1,
        exchange: begun.or_else(|| exchange(cx, header)),
    };
    // An acknowledgement may be sent between two fragments of a message.
    if header.kind() != Kind::Ack {
        cx.conn.rds[cx.direction as usize] = Some(part);
    }
    part
}

/// Returns the exchange of a new message.
fn exchange(cx: &mut Cx<'_>, header: &Header) -> Option<ExchangeId> {
    let direction = cx.direction;
    match header.kind() {
        Kind::Bitmap => return Some(cx.exchanges.fresh()),
        Kind::Ack => {
            // Of the message that is acknowledged.
            let acked = sequence_key(cx, direction.reverse(), header.ack.get());
            return Some(cx.exchanges.get(acked)?.id);
        }
        Kind::Ping | Kind::Pong | Kind::Data => {}
    }
    let key = sequence_key(cx, direction, header.sequence.get());
    let again = header.flags().contains(Flags::RETRANSMITTED);
    if let Some(open) = cx.exchanges.get(key).filter(|_| again) {
        return Some(open.id);
    }
    // The RDMA operation before the message has begun the exchange.
    let rdma = header.extensions().find_map(|extension| match extension {
        Extension::Rdma { rkey } => Some(memory_key(cx, rkey)),
        _ => None,
    });
    let begun = rdma.and_then(|key| cx.exchanges.take(key)).map(|open| open.id);
    let id = begun.unwrap_or_else(|| cx.exchanges.fresh());
    let open = cx.meta.open(id, Note::None);
    cx.exchanges.enter(key, open);
    Some(id)
}

fn summary(header: &Header, index: u32, count: u32) -> String {
    let (sport, dport) = (header.sport, header.dport);
    let (sequence, len) = (header.sequence, header.len);
    let mut text = match header.kind() {
        Kind::Bitmap => format!("RDS congestion map {} of {count}", index + 1),
        Kind::Ack => "RDS acknowledgement".to_owned(),
        Kind::Ping => format!("RDS ping seq {sequence} from port {sport}"),
        Kind::Pong => format!("RDS pong seq {sequence} to port {dport}"),
        Kind::Data => format!("RDS message seq {sequence} port {sport} to {dport}, {len} bytes"),
    };
    if count > 1 && header.kind() != Kind::Bitmap {
        text += &format!(", fragment {} of {count}", index + 1);
    }
    text += &format!(", ack {}", header.ack);
    let names = flags(header.flags());
    if !names.is_empty() && header.kind() != Kind::Bitmap {
        text += &format!(", {names}");
    }
    for extension in header.extensions() {
        text += &format!(", {}", describe(&extension));
    }
    text
}

fn flags(flags: Flags) -> String {
    let named: Vec<_> = flags.iter_names().map(|(name, _)| name.to_owned()).collect();
    let unknown = flags.bits() & !Flags::all().bits();
    let unknown = (unknown != 0).then(|| format!("{unknown:#x}"));
    named.into_iter().chain(unknown).collect::<Vec<_>>().join("|")
}

fn describe(extension: &Extension) -> String {
    match extension {
        Extension::Version(version) => format!("header version {version}"),
        Extension::Rdma { rkey } => format!("after RDMA with key {rkey:#x}"),
        Extension::RdmaDest(cookie) => format!("offers memory {cookie}"),
        Extension::RdmaBytes { bytes, direction } => {
            let name = match direction {
                RdmaDirection::Write => "written".to_owned(),
                RdmaDirection::Read => "read".to_owned(),
                RdmaDirection::Other(n) => format!("in direction {n}"),
            };
            format!("{bytes} bytes {name}")
        }
        Extension::Paths(n) => format!("{n} paths"),
        Extension::Generation(n) => format!("generation {n}"),
        Extension::SportIndex(n) => format!("source port index {n}"),
        Extension::Unknown(n) => format!("extension {n}"),
    }
}

fn fields(layer: &mut Layer, header: &Header, at: usize) {
    layer.push("sequence", header.sequence, at, 8);
    layer.push("acknowledged sequence", header.ack, at + 8, 8);
    layer.push("length", header.len, at + 16, 4);
    layer.push("source port", header.sport, at + 20, 2);
    layer.push("destination port", header.dport, at + 22, 2);
    let bits = header.flags().bits();
    layer.push("flags", format!("{bits:#04x} {}", flags(header.flags())), at + 24, 1);
    layer.push("credits", header.credit, at + 25, 1);
    let verdict = match (header.checksum(), header.checksum_ok()) {
        (0, _) => "none",
        (_, true) => "right",
        (_, false) => "wrong",
    };
    layer.push(
        "checksum",
        format!("{:#06x} ({verdict})", header.checksum()),
        at + 30,
        2,
    );
    let mut next = at + 32;
    let mut extensions = Vec::new();
    let mut list = header.extensions();
    for extension in list.by_ref() {
        let len = extension.wire_len();
        extensions.push(Field::new("extension", describe(&extension), next, len));
        next += len;
    }
    if list.rest().iter().any(|b| *b != 0) {
        extensions.push(Field::not_understood("no extension", list.rest(), next));
    }
    if !extensions.is_empty() {
        let count = format!("{}", extensions.len());
        let field = Field::new("extension headers", count, at + 32, ::rds::proto::EXT_LEN);
        layer.fields.push(field.with(extensions));
    }
}

/// Appends the data of a fragment, if it has the length that the header demands.
fn check_data(layer: &mut Layer, header: &Header, index: u32, data: &[u8], at: usize) {
    let expected = header.fragment_len(index);
    if data.len() != expected || header.len.get() > MAX_MESSAGE {
        let why = format!("{} bytes of data where {expected} belong", data.len());
        layer.summary += &format!(", {why}");
        layer.fields.push(Field::not_understood(why, data, at));
    } else if !data.is_empty() {
        layer.fields.push(Field::bytes("data", data, at));
    }
}

fn ports(map: &BitmapFragment<'_>) -> String {
    let mut ports = map.ports();
    let named: Vec<String> = ports.by_ref().take(MAX_PORTS).map(|port| port.to_string()).collect();
    match (named.is_empty(), ports.count()) {
        (true, _) => "none".to_owned(),
        (false, 0) => named.join(" "),
        (false, more) => format!("{} and {more} more", named.join(" ")),
    }
}
