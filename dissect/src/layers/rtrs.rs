//! RTRS: session information, requests in chunks, responses, heartbeats.

use ::rtrs::proto::{
    Direction as Data, Imm, InfoReq, InfoRsp, IoReply, ProtoError, RdmaRead, RdmaWrite, Request, RkeyRsp, SgDesc,
};
use rnbd::Errno;
use roce_bth::{Class, Reth};

use super::{other::base, rnbd as rnbd_layer};
use crate::{
    conns::Direction,
    cx::{Cx, Found},
    exchange::{ExchangeId, Key, Note, Number, Open, Scope},
    field::{Field, Layer},
    flow::Message,
    paths::Path,
    recognize,
};

const NAME: &str = "RTRS";
/// Bytes at the end of a WRITE in which a request is searched: the longest message of RNBD, and RTRS's.
const MAX_TAIL: usize = 1024;

/// Key of a request by its chunk.
fn chunk_key(cx: &Cx<'_>, chunk: u32) -> Option<Key> {
    Some(Key(Scope::Path(cx.conn.path?), Number::Chunk, chunk.into()))
}

/// Key of a request by the memory that it wants data in.
fn sink_key(cx: &Cx<'_>, rkey: u32) -> Key {
    Key(Scope::Conn(cx.conn.id), Number::RemoteKey, rkey.into())
}

/// Key of a request whose chunk is not known.
fn raw_key(cx: &Cx<'_>, raw: u32) -> Option<Key> {
    Some(Key(Scope::Path(cx.conn.path?), Number::RawChunk, raw.into()))
}

/// Takes the request of an answered chunk, if the division of immediates was not known yet, and learns it from the answer.
fn take_raw(cx: &mut Cx<'_>, chunk: u32) -> Option<Open> {
    cx.paths.get(cx.conn.path).filter(|path| path.recognized)?;
    // Chunks of 4 KiB to 128 MiB.
    let shifts = 12..28u32;
    let found = shifts.into_iter().find_map(|shift| {
        let raw = chunk.checked_shl(shift).filter(|raw| raw >> shift == chunk)?;
        Some((shift, cx.exchanges.take(raw_key(cx, raw)?)?))
    });
    let (shift, open) = found?;
    if chunk != 0
        && let Some(path) = cx.paths.get_mut(cx.conn.path)
    {
        path.shift = Some(shift);
    }
    Some(open)
}

/// Returns the exchange that a WRITE of several packets belongs to, when it begins.
pub(crate) fn begin(cx: &mut Cx<'_>, reth: &Reth) -> Option<ExchangeId> {
    match cx.direction {
        // A request, which the immediate of the last packet will say.
        Direction::ToServer => {
            let path = cx.paths.get(cx.conn.path)?;
            let is_request = path.recognized || path.chunk_at(reth.va).is_some();
            is_request.then(|| cx.exchanges.fresh())
        }
        Direction::ToClient => Some(cx.exchanges.get(sink_key(cx, reth.rkey.0))?.id),
    }
}

/// Returns the exchange that a SEND of several packets belongs to, when it begins: session information.
pub(crate) fn begin_send(cx: &Cx<'_>) -> Option<ExchangeId> {
    (cx.conn.cid == 0).then_some(cx.conn.exchange)
}

/// Dissects a message.
pub(crate) fn message(cx: &mut Cx<'_>, message: &Message<'_>) -> Found {
    match (message.imm, message.class) {
        (Some(imm), _) => immediate(cx, message, imm),
        (None, Class::Send) => match message.ieth {
            Some(key) => invalidate(cx, message, key),
            None => information(cx, message),
        },
        (None, _) => data(cx, message),
    }
}

fn immediate(cx: &mut Cx<'_>, message: &Message<'_>, imm: u32) -> Found {
    let mut layer = Layer::new(NAME, base(message));
    match Imm::decode(imm) {
        Ok(Imm::HbMsg) => layer.summary = "RTRS heartbeat".to_owned(),
        Ok(Imm::HbAck) => layer.summary = "RTRS heartbeat answer".to_owned(),
        Ok(Imm::IoReq(payload)) => return request(cx, message, layer, payload),
        Ok(Imm::IoRsp(reply)) => return response(cx, message, layer, &reply),
        Err(why) => {
            layer.summary = format!("RTRS: {why}");
            let bytes = imm.to_be_bytes();
            layer.fields.push(Field::not_understood(why, &bytes, 0));
        }
    }
    layer
        .fields
        .insert(0, Field::learned("immediate", format!("{imm:#010x}")));
    Found::layer(layer, None)
}

/// Place of a request in a WRITE.
struct Place {
    /// Chunk, if it is known how the immediate is divided.
    chunk: Option<u32>,
    /// The immediate's payload without the offset.
    raw: u32,
    /// Offset of RTRS's message in the chunk.
    offset: u32,
    /// Offset of RTRS's message in the WRITE.
    at: usize,
}

/// Finds the request in a WRITE: by the chunk's address, or, if that is not known, as the message that fits at the end.
fn place(cx: &Cx<'_>, message: &Message<'_>, payload: u32) -> Result<Place, String> {
    let path = cx.paths.get(cx.conn.path).ok_or("the path is not known")?;
    if path.recognized {
        return recognized_place(path, message, payload);
    }
    let layout = path.layout.ok_or("the connection response was not seen")?;
    let (chunk, offset) = layout.unpack(payload).map_err(|e| e.to_string())?;
    let va = message.reth.map_or(0, |reth| reth.va);
    if let Some(addr) = path.chunk_addr(chunk) {
        let at = addr.checked_add(offset.into()).and_then(|end| end.checked_sub(va));
        let at = at
            .and_then(|at| usize::try_from(at).ok())
            .filter(|at| *at <= message.len());
        let at = at.ok_or_else(|| format!("the message is not at offset {offset} of chunk {chunk}"))?;
        return Ok(Place {
            chunk: Some(chunk),
            raw: payload - offset,
            offset,
            at,
        });
    }
    let lens = [RdmaWrite::LEN, RdmaRead::LEN_ONE, RdmaRead::LEN];
    let ends = lens.iter().filter_map(|len| message.len().checked_sub(*len));
    let fits = |at: &usize| {
        let len = message.len() - at;
        let bytes = message.get(*at, len);
        bytes.is_some_and(|bytes| match Request::parse(&bytes, offset, path.max_hdr_size) {
            Ok(request) => len == message_len(&request) && usize::from(request.usr_len) <= *at,
            Err(_) => false,
        })
    };
    let at = ends
        .into_iter()
        .find(fits)
        .ok_or("no request at the end of the WRITE")?;
    Ok(Place {
        chunk: Some(chunk),
        raw: payload - offset,
        offset,
        at,
    })
}

/// Finds the request in a WRITE of a session whose beginning was not seen. The kernel's and our clients write to the beginning of a chunk,
/// so that the offset follows from the lengths.
fn recognized_place(path: &Path, message: &Message<'_>, payload: u32) -> Result<Place, String> {
    let tail_len = message.len().min(MAX_TAIL);
    let tail = message
        .get(message.len() - tail_len, tail_len)
        .ok_or("the end of the WRITE was not kept")?;
    let at = recognize::rtrs_request(&tail).ok_or("no request at the end of the WRITE")?;
    let request = Request::parse(&tail[at..], u32::MAX, u32::MAX).map_err(|e| e.to_string())?;
    let at = message.len() - tail_len + at;
    let offset = match request.dest {
        Some(dest) => dest.len.get().checked_add(request.usr_len.into()),
        None => u32::try_from(at).ok(),
    };
    let raw = offset.and_then(|offset| payload.checked_sub(offset));
    let (Some(offset), Some(raw)) = (offset, raw) else {
        return Err(format!("the request's lengths contradict the immediate {payload:#x}"));
    };
    // Chunk 0 is 0 whatever the division.
    let chunk = path.shift.map(|shift| raw >> shift).or((raw == 0).then_some(0));
    Ok(Place { chunk, raw, offset, at })
}

/// Bytes of RTRS's message.
const fn message_len(request: &Request) -> usize {
    match (request.direction, request.dest) {
        (Data::Write, _) => RdmaWrite::LEN,
        (Data::Read, Some(_)) => RdmaRead::LEN_ONE,
        (Data::Read, None) => RdmaRead::LEN,
    }
}

fn request(cx: &mut Cx<'_>, message: &Message<'_>, mut layer: Layer, payload: u32) -> Found {
    let id = message.exchange.unwrap_or_else(|| cx.exchanges.fresh());
    let origin = message.origin();
    let place = match place(cx, message, payload) {
        Ok(place) => place,
        Err(why) => return failed(layer, "RTRS request", &why, message, Some(id)),
    };
    let Place { chunk, raw, offset, at } = place;
    let name = chunk.map_or_else(|| "not known".to_owned(), |chunk| chunk.to_string());
    let room = (message.len() - at).min(Request::MAX_LEN);
    let header_room = cx.paths.get(cx.conn.path).map_or(0, |p| p.max_hdr_size);
    let bytes = message.get(at, room).unwrap_or_default();
    let request = match Request::parse(&bytes, offset, header_room) {
        Ok(request) => request,
        Err(why) => return failed(layer, "RTRS request", &why.to_string(), message, Some(id)),
    };
    let kind = match request.direction {
        Data::Write => "write",
        Data::Read => "read",
    };
    layer.summary = format!("RTRS {kind} request, chunk {name}, {} bytes of data", request.data_len);
    layer.fields.push(Field::learned("chunk", name));
    layer.fields.push(Field::learned("offset in the chunk", offset));
    let usr_len = usize::from(request.usr_len);
    let user_at = at.checked_sub(usr_len);
    if let Some(data) = user_at.filter(|end| *end > 0 && request.direction == Data::Write) {
        layer.push("data", format!("{data} bytes"), origin, data);
    }
    request_fields(&mut layer, &request, origin + at);
    let mut note = Note::None;
    let mut layers = vec![layer];
    if let Some((user_at, user)) = user_at.and_then(|from| Some((from, message.get(from, usr_len)?))) {
        let (user_layer, kind) = rnbd_layer::request(&user, &request, base(message), origin + user_at);
        note = kind.map_or(Note::None, Note::Rnbd);
        layers.push(user_layer);
    }
    let open = cx.meta.open(id, note);
    let key = match chunk {
        Some(chunk) => chunk_key(cx, chunk),
        None => raw_key(cx, raw),
    };
    if let Some(key) = key {
        cx.exchanges.enter(key, open);
    }
    if let Some(dest) = request.dest {
        let key = sink_key(cx, dest.key.get());
        cx.exchanges.enter(key, open);
    }
    Found {
        layers,
        exchange: Some(id),
    }
}

fn request_fields(layer: &mut Layer, request: &Request, at: usize) {
    match request.direction {
        Data::Write => {
            layer.push("type", "write (2)", at, 2);
            layer.push("user header length", request.usr_len, at + 2, 2);
        }
        Data::Read => {
            layer.push("type", "read (3)", at, 2);
            layer.push("user header length", request.usr_len, at + 2, 2);
            let flags = if request.need_inval { "revoke the key" } else { "none" };
            layer.push("flags", flags, at + 4, 2);
            layer.push("descriptors", usize::from(request.dest.is_some()), at + 6, 2);
            if let Some(dest) = &request.dest {
                layer.fields.push(descriptor(dest, at + RdmaRead::LEN));
            }
        }
    }
}

fn descriptor(desc: &SgDesc, at: usize) -> Field {
    let (addr, key, len) = (desc.addr.get(), desc.key.get(), desc.len.get());
    let text = format!("{len} bytes at {addr:#x}, key {key:#x}");
    Field::new("descriptor", text, at, size_of::<SgDesc>()).with(vec![
        Field::new("address", format!("{addr:#x}"), at, 8),
        Field::new("key", format!("{key:#x}"), at + 8, 4),
        Field::new("length", len, at + 12, 4),
    ])
}

fn failed(mut layer: Layer, what: &str, why: &str, message: &Message<'_>, exchange: Option<ExchangeId>) -> Found {
    layer.summary = format!("{what}: {why}");
    let field = Field::not_understood(why, message.head(), message.origin());
    layer.fields.push(field);
    Found::layer(layer, exchange)
}

fn response(cx: &mut Cx<'_>, message: &Message<'_>, mut layer: Layer, reply: &IoReply) -> Found {
    let open = chunk_key(cx, reply.msg_id)
        .and_then(|key| cx.exchanges.take(key))
        .or_else(|| take_raw(cx, reply.msg_id));
    let result = match reply.errno {
        0 => "OK".to_owned(),
        errno => format!("error {}", Errno::from_wire(errno.into())),
    };
    layer.summary = format!("RTRS response, chunk {}, {result}", reply.msg_id);
    layer.fields.push(Field::learned("chunk", reply.msg_id));
    layer.fields.push(Field::learned("result", &result));
    layer.fields.push(Field::learned("key revoked", reply.invalidated));
    if let Some(open) = &open {
        let text = open.describe(cx.meta.time_ns);
        layer.summary += &format!(", request in {text}");
        layer.fields.push(Field::learned("request", text));
    }
    if message.len() > 0 {
        let at = message.origin();
        match RkeyRsp::parse(message.head()) {
            Ok(rsp) => {
                layer.push("type", "new key (4)", at, 2);
                layer.push("chunk", rsp.buf_id, at + 2, 2);
                layer.push("new key", format!("{:#x}", rsp.rkey), at + 4, 4);
            }
            Err(why) => layer.fields.push(Field::not_understood(why, message.head(), at)),
        }
    }
    Found::layer(layer, open.map(|open| open.id))
}

fn invalidate(cx: &Cx<'_>, message: &Message<'_>, rkey: u32) -> Found {
    let mut layer = Layer::new(NAME, base(message));
    layer.summary = format!("RTRS revokes the client's key {rkey:#x}");
    layer.fields.push(Field::learned("key", format!("{rkey:#x}")));
    let open = cx.exchanges.get(sink_key(cx, rkey));
    Found::layer(layer, open.map(|open| open.id))
}

/// Session information, over the path's first connection.
fn information(cx: &mut Cx<'_>, message: &Message<'_>) -> Found {
    let mut layer = Layer::new(NAME, base(message));
    let (bytes, at) = (message.head(), message.origin());
    let asked = match InfoReq::parse(bytes) {
        Ok(req) => {
            let name = req.name().map_or_else(|e| e.to_string(), str::to_owned);
            layer.summary = format!("RTRS information request, session name {name:?}");
            layer.push("type", "information request (0)", at, 2);
            layer.push("session name", format!("{name:?}"), at + 2, ::rtrs::proto::NAME_MAX);
            return Found::layer(layer, Some(cx.conn.exchange));
        }
        Err(error) => error,
    };
    match InfoRsp::parse(bytes) {
        Ok(rsp) => {
            let n = rsp.descriptors().len();
            let memory: u64 = rsp.descriptors().iter().map(|d| u64::from(d.len.get())).sum();
            layer.summary = format!("RTRS information response, {n} pieces of memory, {memory} bytes");
            layer.push("type", "information response (1)", at, 2);
            layer.push("descriptors", n, at + 2, 2);
            let pieces = (at + InfoRsp::len_for(0)..).step_by(size_of::<SgDesc>());
            let fields = rsp.descriptors().iter().zip(pieces).map(|(d, at)| descriptor(d, at));
            layer.fields.extend(fields);
            if let Some(path) = cx.paths.get_mut(cx.conn.path) {
                path.memory = rsp.descriptors().to_vec();
            }
            Found::layer(layer, Some(cx.conn.exchange))
        }
        Err(ProtoError::Type { .. }) => failed(layer, "RTRS message", &asked.to_string(), message, None),
        Err(why) => failed(layer, "RTRS information response", &why.to_string(), message, None),
    }
}

/// Data of a read request, which the server writes.
fn data(cx: &Cx<'_>, message: &Message<'_>) -> Found {
    let open = message
        .reth
        .and_then(|reth| cx.exchanges.get(sink_key(cx, reth.rkey.0)));
    let mut layer = Layer::new(NAME, base(message));
    layer.summary = format!("RTRS data, {} bytes", message.len());
    layer.push(
        "data",
        format!("{} bytes", message.len()),
        message.origin(),
        message.len(),
    );
    let mut layers = vec![layer];
    if let Some(Note::Rnbd(kind)) = open.map(|open| open.note) {
        layers.extend(rnbd_layer::response(
            kind,
            message.head(),
            base(message),
            message.origin(),
        ));
    }
    Found {
        layers,
        exchange: open.map(|open| open.id),
    }
}
