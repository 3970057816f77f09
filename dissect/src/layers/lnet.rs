//! LNet over o2iblnd: messages, and the WRITEs of bulk data.

use ::lnet::{
    proto::{
        Body, Checksum, Completion, ConnParams, HEAD_LEN, Handle, LnetHdr, MAGIC, Message as Kib, MsgType, Operation,
        PingInfo, ProtoError, RdmaDesc, STATUS_DOWN, STATUS_UP, VERSION_1, peek,
    },
    selftest::proto::{MAGIC as SELFTEST, Message},
};
use roce_bth::{Class, Reth};
use zerocopy::{FromBytes, IntoBytes};

use super::{other::base, selftest};
use crate::{
    conns::{Conn, Direction},
    credits::{Credits, takes_credit},
    cx::{Cx, Found},
    exchange::{ExchangeId, Key, Note, Number, Scope},
    field::{Base, Field, Layer},
    flow,
};

const NAME: &str = "LNet";
/// Fragments of a descriptor that are shown.
const MAX_SHOWN: usize = 16;

/// Key of a cookie that this direction's sender made.
fn cookie_key(cx: &Cx<'_>, maker: Direction, cookie: u64) -> Key {
    let (owner, _) = cx.conn.ends(maker);
    Key(Scope::Conn(cx.conn.id), Number::Cookie(owner), cookie)
}

fn memory_key(cx: &Cx<'_>, rkey: u32) -> Key {
    Key(Scope::Conn(cx.conn.id), Number::RemoteKey, rkey.into())
}

/// Key of a handle, which answers repeat over any connection of the two nodes.
fn handle_key(cx: &Cx<'_>, handle: Handle) -> Key {
    let (a, b) = (cx.conn.client, cx.conn.server);
    Key(
        Scope::Pair(a.min(b), a.max(b), handle.interface),
        Number::Handle,
        handle.object,
    )
}

/// Returns the exchange of a WRITE, by the key of its memory.
pub(crate) fn rdma(cx: &Cx<'_>, reth: &Reth) -> Option<ExchangeId> {
    Some(cx.exchanges.get(memory_key(cx, reth.rkey.0))?.id)
}

/// Dissects the data of a transfer.
fn data(cx: &Cx<'_>, message: &flow::Message<'_>, base: Base) -> Found {
    let open = message
        .reth
        .and_then(|reth| cx.exchanges.get(memory_key(cx, reth.rkey.0)));
    let len = message.len();
    let mut layer = Layer::new(NAME, base);
    layer.summary = format!("LNet data by WRITE, {len} bytes");
    if let Some(Note::Cookie(cookie)) = open.map(|open| open.note) {
        layer.summary += &format!(", cookie {cookie:#x}");
        layer.fields.push(Field::learned("cookie", format!("{cookie:#x}")));
    }
    layer.push("data", format!("{len} bytes"), message.origin(), len);
    Found::layer(layer, message.exchange.or(open.map(|open| open.id)))
}

/// Returns the exchange that a SEND of several packets belongs to, when it begins. All types have what names it in the first packet.
pub(crate) fn begin_send(cx: &mut Cx<'_>, payload: &[u8]) -> ExchangeId {
    let hdr = peek(payload).ok().and_then(|head| {
        let with_hdr = [MsgType::Immediate, MsgType::PutReq, MsgType::GetReq].map(|kind| kind as u8);
        let bytes = payload.get(HEAD_LEN..HEAD_LEN + LnetHdr::LEN)?;
        let hdr: &LnetHdr = FromBytes::ref_from_bytes(bytes).ok()?;
        with_hdr.contains(&head.kind).then_some(hdr)
    });
    let answers = hdr.and_then(|hdr| match hdr.operation() {
        Ok(Operation::Reply { dst_md } | Operation::Ack { dst_md, .. }) => cx.exchanges.get(handle_key(cx, dst_md)),
        _ => None,
    });
    match answers {
        Some(open) => open.id,
        None => cx.exchanges.fresh(),
    }
}

/// Dissects a message of the transport.
pub(crate) fn message(cx: &mut Cx<'_>, message: &flow::Message<'_>) -> Found {
    let (at, base) = (message.origin(), base(message));
    if message.class == Class::Write {
        return data(cx, message, base);
    }
    let bytes = message.head();
    let kib = match Kib::parse(bytes) {
        Ok(kib) => kib,
        Err(why) => return Found::layer(failed_layer(&why, bytes, base, at), None),
    };
    let exchange = exchange(cx, &kib.body, message.exchange);
    let mut layer = message_layer(&kib, bytes, base, at);
    credits(cx, &kib, &mut layer);
    Found::layer(layer, exchange)
}

/// Begins to count credits: with those of the answer to a connection request.
pub(crate) fn accepted(conn: &mut Conn, private_data: &[u8]) {
    if let Ok(kib) = Kib::parse(private_data)
        && let Body::ConnAck(params) = kib.body
    {
        conn.credits.get_or_insert(Credits::new(params.queue_depth));
    }
}

/// Counts a message's credits, and appends what its sender has left.
fn credits(cx: &mut Cx<'_>, kib: &Kib<'_>, layer: &mut Layer) {
    let Some(credits) = &mut cx.conn.credits else { return };
    let sender = cx.direction as usize;
    if credits.count(sender, kib) != [None; 2] {
        // The capture lacks messages, or a side is wrong, which the judge tells apart.
        cx.conn.credits = None;
    } else if takes_credit(&kib.body) {
        let text = format!("{} of {} credits left", credits.left(sender), credits.depth());
        layer.summary += &format!(", {text}");
        layer.fields.push(Field::learned("sender's credits", text));
    }
}

/// Returns the exchange of a message, and enters the numbers by which others will name it. `begun` is the exchange of its first packet.
fn exchange(cx: &mut Cx<'_>, body: &Body<'_>, begun: Option<ExchangeId>) -> Option<ExchangeId> {
    let (own, peer) = (cx.direction, cx.direction.reverse());
    match *body {
        Body::ConnReq(_) | Body::ConnAck(_) | Body::Noop => Some(begun.unwrap_or_else(|| cx.exchanges.fresh())),
        Body::Immediate { hdr, .. } => Some(operation_exchange(cx, hdr, begun)),
        Body::PutReq { hdr, cookie } => {
            let id = operation_exchange(cx, hdr, begun);
            enter(cx, cookie_key(cx, own, cookie), id);
            Some(id)
        }
        Body::GetReq { hdr, cookie, desc } => {
            let id = operation_exchange(cx, hdr, begun);
            enter(cx, cookie_key(cx, own, cookie), id);
            enter_memory(cx, desc.key, cookie, id);
            Some(id)
        }
        Body::PutAck {
            src_cookie,
            dst_cookie,
            desc,
        } => {
            let id = cx.exchanges.take(cookie_key(cx, peer, src_cookie))?.id;
            enter(cx, cookie_key(cx, own, dst_cookie), id);
            enter_memory(cx, desc.key, dst_cookie, id);
            Some(id)
        }
        // Cookies of the receiver: of its PUT_REQ, its memory, its GET_REQ.
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => {
            Some(cx.exchanges.take(cookie_key(cx, peer, done.cookie))?.id)
        }
    }
}

fn enter(cx: &mut Cx<'_>, key: Key, id: ExchangeId) {
    let open = cx.meta.open(id, Note::None);
    cx.exchanges.enter(key, open);
}

/// Enters memory that the peer will write to.
fn enter_memory(cx: &mut Cx<'_>, rkey: u32, cookie: u64, id: ExchangeId) {
    let open = cx.meta.open(id, Note::Cookie(cookie));
    cx.exchanges.enter(memory_key(cx, rkey), open);
}

/// Returns the exchange of an LNet operation: a REPLY or ACK belongs to the GET or PUT whose handle it repeats.
fn operation_exchange(cx: &mut Cx<'_>, hdr: &LnetHdr, begun: Option<ExchangeId>) -> ExchangeId {
    let (begins, handle) = match hdr.operation() {
        Ok(Operation::Get { return_md, .. }) => (true, return_md),
        Ok(Operation::Put { ack_md, .. }) => (true, ack_md),
        Ok(Operation::Reply { dst_md } | Operation::Ack { dst_md, .. }) => (false, dst_md),
        _ => (false, Handle::NONE),
    };
    let key = (handle != Handle::NONE).then(|| handle_key(cx, handle));
    if let Some(open) = key.filter(|_| !begins).and_then(|key| cx.exchanges.take(key)) {
        return open.id;
    }
    let id = begun.unwrap_or_else(|| cx.exchanges.fresh());
    if let Some(key) = key.filter(|_| begins) {
        enter(cx, key, id);
    }
    id
}

/// Returns the layer of bytes that are no message of version 2.
pub(crate) fn failed_layer(why: &ProtoError, bytes: &[u8], base: Base, at: usize) -> Layer {
    let mut layer = Layer::new(NAME, base);
    layer.summary = match peek(bytes) {
        Ok(head) if head.version == VERSION_1 => {
            let name = MsgType::from_wire(head.kind).map_or("message", MsgType::name);
            format!("LNet {name} of version 1 (0x11)")
        }
        _ => format!("LNet: {why}"),
    };
    layer.fields.push(Field::not_understood(why, bytes, at));
    layer
}

/// Returns the layer of a message. `bytes` are its own, `at` their offset from the base.
pub(crate) fn message_layer(kib: &Kib<'_>, bytes: &[u8], base: Base, at: usize) -> Layer {
    let mut layer = Layer::new(NAME, base);
    let kind = kib.body.kind();
    let mut summary = format!("LNet {}", kind.name());
    layer.push("magic", format!("{MAGIC:#x}, {:?} endian", kib.order), at, 4);
    layer.push("version", "0x12", at + 4, 2);
    layer.push("type", format!("{} ({:#x})", kind.name(), kind as u8), at + 6, 1);
    layer.push("credits", kib.credits, at + 7, 1);
    let len = kib.to_bytes().len();
    layer.push("length", len, at + 8, 4);
    let judged = kib.judge_checksum();
    layer.push(
        "checksum",
        format!("{:#010x} ({})", kib.checksum, verdict(judged)),
        at + 12,
        4,
    );
    layer.push("source", kib.src, at + 16, 8);
    layer.push("source incarnation", format!("{:#x}", kib.src_stamp), at + 24, 8);
    layer.push("destination", kib.dst, at + 32, 8);
    layer.push("destination incarnation", format!("{:#x}", kib.dst_stamp), at + 40, 8);
    body(&mut layer, &mut summary, &kib.body, at + HEAD_LEN);
    if kib.credits > 0 {
        let plural = if kib.credits == 1 { "" } else { "s" };
        summary += &format!(", returns {} credit{plural}", kib.credits);
    }
    if matches!(judged, Checksum::Wrong | Checksum::ZeroPayload) {
        summary += &format!(", checksum {}", verdict(judged));
    }
    if !kib.trailing.is_empty() {
        let from = at + len - kib.trailing.len();
        layer
            .fields
            .push(Field::not_understood("bytes behind the body", kib.trailing, from));
    }
    // Padding of the connection manager is zeros.
    if let Some(behind) = bytes.get(len..).filter(|rest| rest.iter().any(|b| *b != 0)) {
        layer
            .fields
            .push(Field::not_understood("bytes behind the message", behind, at + len));
    }
    layer.summary = summary;
    layer
}

const fn verdict(checksum: Checksum) -> &'static str {
    match checksum {
        Checksum::None => "none",
        Checksum::Signed => "right, of signed bytes",
        Checksum::Unsigned => "right, of unsigned bytes",
        Checksum::ZeroPayload => "made over zeros instead of the payload",
        Checksum::Wrong => "wrong",
    }
}

fn body(layer: &mut Layer, summary: &mut String, body: &Body<'_>, at: usize) {
    let after_hdr = at + LnetHdr::LEN;
    if let Some(hdr) = body.hdr() {
        header(layer, summary, hdr, at);
    }
    match body {
        Body::Noop => {}
        Body::ConnReq(params) | Body::ConnAck(params) => {
            let field = conn_params(params, at);
            *summary += &format!(", {}", field.value);
            layer.fields.push(field);
        }
        Body::Immediate { payload: data, .. } => payload(layer, summary, data, after_hdr),
        Body::PutReq { cookie, .. } => {
            *summary += &format!(", cookie {cookie:#x}");
            layer.push("cookie", format!("{cookie:#x}"), after_hdr, 8);
        }
        Body::GetReq { cookie, desc, .. } => {
            *summary += &format!(", cookie {cookie:#x}, sink of {} bytes", desc.nob());
            layer.push("cookie", format!("{cookie:#x}"), after_hdr, 8);
            layer.fields.push(descriptor(desc, after_hdr + 8));
        }
        Body::PutAck {
            src_cookie,
            dst_cookie,
            desc,
        } => {
            let nob = desc.nob();
            *summary += &format!(", cookies {src_cookie:#x} and {dst_cookie:#x}, sink of {nob} bytes");
            layer.push("source cookie", format!("{src_cookie:#x}"), at, 8);
            layer.push("destination cookie", format!("{dst_cookie:#x}"), at + 8, 8);
            layer.fields.push(descriptor(desc, at + 16));
        }
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => {
            let Completion { cookie, status } = done;
            let what = match status {
                0.. => format!("{status} bytes"),
                _ => format!("error {}", status.unsigned_abs()),
            };
            *summary += &format!(", cookie {cookie:#x}, {what}");
            layer.push("cookie", format!("{cookie:#x}"), at, 8);
            layer.push("status", what, at + 8, 4);
        }
    }
}

fn descriptor(desc: &RdmaDesc<'_>, at: usize) -> Field {
    let len = RdmaDesc::len_for(desc.frags.len());
    let text = format!(
        "{} bytes in {} fragments, key {:#x}",
        desc.nob(),
        desc.frags.len(),
        desc.key
    );
    let mut children = vec![
        Field::new("key", format!("{:#x}", desc.key), at, 4),
        Field::new("fragments", desc.frags.len(), at + 4, 4),
    ];
    let places = (at + 8..).step_by(12);
    children.extend(desc.frags.iter().zip(places).take(MAX_SHOWN).map(|(fragment, at)| {
        let text = format!("{} bytes at {:#x}", fragment.nob, fragment.addr);
        Field::new("fragment", text, at, 12)
    }));
    Field::new("descriptor", text, at, len).with(children)
}

fn header(layer: &mut Layer, summary: &mut String, hdr: &LnetHdr, at: usize) {
    let mut fields = vec![
        Field::new("destination", hdr.dst(), at, 8),
        Field::new("source", hdr.src(), at + 8, 8),
        Field::new("destination process", hdr.dst_pid, at + 16, 4),
        Field::new("source process", hdr.src_pid, at + 20, 4),
    ];
    let payload = hdr.payload_length.get();
    let text = match hdr.operation() {
        Ok(operation) => {
            fields.push(Field::new("type", operation.name(), at + 24, 4));
            fields.push(Field::new("payload length", payload, at + 28, 4));
            operation_fields(&mut fields, &operation, at + 32);
            describe(&operation, payload)
        }
        Err(why) => {
            let why = why.to_string();
            fields.push(Field::not_understood(&why, &hdr.as_bytes()[24..], at + 24));
            why
        }
    };
    *summary += &format!(" {text}");
    if let Err(why) = hdr.check()
        && hdr.operation().is_ok()
    {
        *summary += &format!(" ({why})");
    }
    layer
        .fields
        .push(Field::new("LNet header", text, at, LnetHdr::LEN).with(fields));
}

fn describe(operation: &Operation, payload: u32) -> String {
    match operation {
        Operation::Put {
            portal,
            match_bits,
            ack_md,
            ..
        } => {
            let ack = if *ack_md == Handle::NONE { "" } else { ", ACK wanted" };
            format!("PUT {payload} bytes portal {portal} match {match_bits:#x}{ack}")
        }
        Operation::Get {
            portal,
            match_bits,
            sink_length,
            ..
        } => format!("GET {sink_length} bytes portal {portal} match {match_bits:#x}"),
        Operation::Ack {
            match_bits, mlength, ..
        } => format!("ACK {mlength} bytes match {match_bits:#x}"),
        Operation::Reply { .. } => format!("REPLY {payload} bytes"),
        Operation::Hello { incarnation, kind } => format!("HELLO type {kind} incarnation {incarnation:#x}"),
    }
}

fn operation_fields(fields: &mut Vec<Field>, operation: &Operation, at: usize) {
    let mut push = |name, value: String, offset, len| fields.push(Field::new(name, value, at + offset, len));
    match *operation {
        Operation::Ack {
            dst_md,
            match_bits,
            mlength,
        } => {
            push("handle", dst_md.to_string(), 0, 16);
            push("match bits", format!("{match_bits:#x}"), 16, 8);
            push("accepted length", mlength.to_string(), 24, 4);
        }
        Operation::Put {
            ack_md,
            match_bits,
            hdr_data,
            portal,
            offset,
        } => {
            push("handle for the ACK", ack_md.to_string(), 0, 16);
            push("match bits", format!("{match_bits:#x}"), 16, 8);
            push("header data", format!("{hdr_data:#x}"), 24, 8);
            push("portal", portal.to_string(), 32, 4);
            push("offset", offset.to_string(), 36, 4);
        }
        Operation::Get {
            return_md,
            match_bits,
            portal,
            src_offset,
            sink_length,
        } => {
            push("handle for the REPLY", return_md.to_string(), 0, 16);
            push("match bits", format!("{match_bits:#x}"), 16, 8);
            push("portal", portal.to_string(), 24, 4);
            push("offset", src_offset.to_string(), 28, 4);
            push("sink length", sink_length.to_string(), 32, 4);
        }
        Operation::Reply { dst_md } => push("handle", dst_md.to_string(), 0, 16),
        Operation::Hello { incarnation, kind } => {
            push("incarnation", format!("{incarnation:#x}"), 0, 8);
            push("connection type", kind.to_string(), 8, 4);
        }
    }
}

/// Returns whether data begins as a message of lnet_selftest, in either byte order.
fn has_selftest_magic(data: &[u8]) -> bool {
    data.starts_with(&SELFTEST.to_le_bytes()) || data.starts_with(&SELFTEST.to_be_bytes())
}

/// Appends the data of a message: ping information, or a message of lnet_selftest, or bytes.
fn payload(layer: &mut Layer, summary: &mut String, data: &[u8], at: usize) {
    if data.is_empty() {
        return;
    }
    if PingInfo::is(data)
        && let Ok(info) = PingInfo::parse(data)
    {
        let field = ping(&info, data, at);
        *summary += &format!(", ping information: {}", field.value);
        layer.fields.push(field);
        return;
    }
    match Message::parse(data) {
        Ok(message) => {
            let field = selftest::field(&message, data, at);
            *summary += &format!(", selftest {}", field.value);
            layer.fields.push(field);
        }
        Err(_) if !has_selftest_magic(data) => layer.fields.push(Field::bytes("payload", data, at)),
        Err(why) => {
            *summary += &format!(", {why}");
            layer.fields.push(Field::not_understood(why, data, at));
        }
    }
}

fn ping(info: &PingInfo<'_>, data: &[u8], at: usize) -> Field {
    let names: Vec<_> = info.features.iter_names().map(|(name, _)| name).collect();
    let mut fields = vec![
        Field::new(
            "features",
            format!("{:#x} {}", info.features.bits(), names.join(" ")),
            at + 4,
            4,
        ),
        Field::new("process", info.pid, at + 8, 4),
        Field::new("interfaces", info.count, at + 12, 4),
    ];
    let mut nids = Vec::new();
    for (index, (ni, at)) in info.interfaces().zip((at + 16..).step_by(16)).enumerate() {
        let status = match ni.status {
            sequence if index == 0 => format!("sequence {sequence}"),
            STATUS_UP => "up".to_owned(),
            STATUS_DOWN => "down".to_owned(),
            other => format!("status {other:#x}"),
        };
        fields.push(Field::new("interface", format!("{} {status}", ni.nid), at, 16));
        nids.push(ni.nid.to_string());
    }
    if !info.rest().is_empty() {
        let from = at + data.len() - info.rest().len();
        fields.push(Field::bytes("large addresses", info.rest(), from));
    }
    Field::new("ping information", nids.join(" "), at, data.len()).with(fields)
}

/// Returns the field of connection parameters.
pub(crate) fn conn_params(params: &ConnParams, at: usize) -> Field {
    let text = format!(
        "queue depth {}, {} fragments, messages of {} bytes",
        params.queue_depth, params.max_frags, params.max_msg_size
    );
    Field::new("connection parameters", text, at, 8).with(vec![
        Field::new("queue depth", params.queue_depth, at, 2),
        Field::new("fragments", params.max_frags, at + 2, 2),
        Field::new("message size", params.max_msg_size, at + 4, 4),
    ])
}
