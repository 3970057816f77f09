//! RNBD: messages in the user header of RTRS's requests, and their answers.

use ::rnbd::proto::{
    AccessMode, CACHE_FUA, CACHE_WRITEBACK, ClientMsg, IoOp, MsgIo, MsgOpen, MsgOpenRsp, MsgType, Rw, SECTOR,
    parse_open_rsp, parse_sess_info_rsp,
};
use ::rtrs::proto::Request;

use crate::field::{Base, Field, Layer};

const NAME: &str = "RNBD";

/// Dissects a client's message. Returns its type, too.
pub(crate) fn request(bytes: &[u8], request: &Request, base: Base, at: usize) -> (Layer, Option<u16>) {
    let mut layer = Layer::new(NAME, base);
    let message = match ClientMsg::parse(bytes) {
        Ok(message) => message,
        Err(why) => {
            layer.summary = format!("RNBD: {why}");
            layer.fields.push(Field::not_understood(why, bytes, at));
            return (layer, None);
        }
    };
    let kind = match &message {
        ClientMsg::SessInfo(m) => {
            layer.summary = format!("RNBD session information, version {}", m.ver);
            layer.push("type", "session information (0)", at, 2);
            layer.push("version", m.ver, at + 4, 1);
            MsgType::SessInfo
        }
        ClientMsg::Open(m) => {
            open(&mut layer, m, at);
            MsgType::Open
        }
        ClientMsg::Close(m) => {
            layer.summary = format!("RNBD close of device {}", m.device_id);
            layer.push("type", "close (5)", at, 2);
            layer.push("device", m.device_id, at + 4, 4);
            MsgType::Close
        }
        ClientMsg::Io(m) => {
            io(&mut layer, m, request, bytes.len(), at);
            MsgType::Io
        }
    };
    (layer, Some(kind as u16))
}

fn open(layer: &mut Layer, m: &MsgOpen, at: usize) {
    let name = m.name().map_or("?".into(), String::from_utf8_lossy);
    let mode = match AccessMode::from_wire(m.access_mode) {
        Some(mode) => mode.to_string(),
        None => format!("mode {}", m.access_mode),
    };
    layer.summary = format!("RNBD open of {name:?}, {mode}");
    layer.push("type", "open (2)", at, 2);
    layer.push("access mode", mode, at + 4, 1);
    layer.push("device name", format!("{name:?}"), at + 6, ::rnbd::proto::NAME_MAX);
}

fn io(layer: &mut Layer, m: &MsgIo, request: &Request, len: usize, at: usize) {
    let word = m.rw.get();
    let (name, flags) = match Rw::from_wire(word) {
        Some(rw) => (operation(rw.op).to_owned(), flags(&rw)),
        None => (format!("operation {}", word & 0xff), String::new()),
    };
    let bytes = m.bi_size.get();
    let sector = m.sector.get();
    let data = match request.data_len {
        0 if bytes > 0 => ", no data",
        _ => "",
    };
    layer.summary = format!(
        "RNBD {name} of {bytes} bytes at sector {sector} of device {}{data}{flags}",
        m.device_id
    );
    layer.push("type", "I/O (4)", at, 2);
    layer.push("device", m.device_id, at + 4, 4);
    let position = match sector.checked_mul(SECTOR) {
        Some(offset) => format!("{sector} (byte {offset})"),
        None => sector.to_string(),
    };
    layer.push("sector", position, at + 8, 8);
    layer.push("operation", format!("{name}{flags} ({word:#x})"), at + 16, 4);
    layer.push("bytes", bytes, at + 20, 4);
    if len > MsgIo::LEN_V1 {
        layer.push("priority", m.prio, at + 24, 2);
    }
}

const fn operation(op: IoOp) -> &'static str {
    match op {
        IoOp::Read => "read",
        IoOp::Write => "write",
        IoOp::Flush => "flush",
        IoOp::Discard => "discard",
        IoOp::SecureErase => "secure erase",
        IoOp::WriteZeroes => "write zeroes",
        IoOp::BlockStatus => "block status",
    }
}

fn flags(rw: &Rw) -> String {
    let all = [
        (rw.sync, ", sync"),
        (rw.fua, ", FUA"),
        (rw.preflush, ", preflush"),
        (rw.no_unmap, ", no unmap"),
    ];
    all.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect()
}

/// Dissects the answer to a message of this type. `None`: it is data of a device.
pub(crate) fn response(kind: u16, bytes: &[u8], base: Base, at: usize) -> Option<Layer> {
    let mut layer = Layer::new(NAME, base);
    let errno = match MsgType::from_wire(kind)? {
        MsgType::SessInfo => match parse_sess_info_rsp(bytes) {
            Ok(rsp) => {
                layer.summary = format!("RNBD session information answer, version {}", rsp.ver);
                layer.push("type", "session information answer (1)", at, 2);
                layer.push("version", rsp.ver, at + 4, 1);
                return Some(layer);
            }
            Err(errno) => errno,
        },
        MsgType::Open => match parse_open_rsp(bytes) {
            Ok(rsp) => {
                open_response(&mut layer, &rsp, at);
                return Some(layer);
            }
            Err(errno) => errno,
        },
        _ => return None,
    };
    layer.summary = format!("RNBD answer: {errno}");
    layer.fields.push(Field::not_understood(errno, bytes, at));
    Some(layer)
}

fn open_response(layer: &mut Layer, rsp: &MsgOpenRsp, at: usize) {
    let bytes = rsp.nsectors.get().saturating_mul(SECTOR);
    layer.summary = format!("RNBD open answer, device {}, {bytes} bytes", rsp.device_id);
    let cache = [(CACHE_FUA, "FUA"), (CACHE_WRITEBACK, "write-back")];
    let cache: Vec<_> = cache
        .iter()
        .filter(|(bit, _)| rsp.cache_policy & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    layer.push("type", "open answer (3)", at, 2);
    layer.push("device", rsp.device_id, at + 4, 4);
    layer.push("sectors", format!("{} ({bytes} bytes)", rsp.nsectors), at + 8, 8);
    layer.push("largest request, sectors", rsp.max_hw_sectors, at + 16, 4);
    layer.push(
        "largest write zeroes, sectors",
        rsp.max_write_zeroes_sectors,
        at + 20,
        4,
    );
    layer.push("largest discard, sectors", rsp.max_discard_sectors, at + 24, 4);
    layer.push("discard granularity", rsp.discard_granularity, at + 28, 4);
    layer.push("discard alignment", rsp.discard_alignment, at + 32, 4);
    layer.push("physical block size", rsp.physical_block_size, at + 36, 2);
    layer.push("logical block size", rsp.logical_block_size, at + 38, 2);
    layer.push("segments", rsp.max_segments, at + 40, 2);
    layer.push("secure discard", rsp.secure_discard, at + 42, 2);
    layer.push("cache", cache.join(" "), at + 45, 1);
    if rsp.offers_block_status() {
        layer.push("extensions", "block status", at + 48, 8);
    }
}
