//! Messages of a capture: private data of the connection manager, and SENDs put together from their packets.

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
};

use roce_bth::{Class, Packet, Psn, Service};
use roce_pcap::Capture;

/// Attribute of a connection manager's message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cm {
    Req,
    Rej,
    Rep,
}

/// Item of a capture.
#[derive(Debug)]
pub(crate) enum Item {
    /// Frame, message, destination port of a REQ, and private data (without RDMA_CM's header).
    Private(u64, Cm, u16, Vec<u8>),
    /// Frame of the last packet, and bytes.
    Send(u64, Vec<u8>),
}

/// Returns the folder of captures.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures")
}

/// Reads a capture. A SEND that was repeated is there once.
pub(crate) fn read(name: &str) -> Vec<Item> {
    read_of(name, None)
}

/// Calls `each` with the frame's number, the receiver's address, and the packet, of what a sender has sent or of all.
pub(crate) fn each_packet(name: &str, sender: Option<[u8; 4]>, mut each: impl FnMut(u64, &[u8], &Packet<'_>)) {
    let plain = folder().join(name);
    let path = match plain.exists() {
        true => plain,
        false => folder().join(format!("{name}.gz")),
    };
    let file = File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut capture = Capture::new(file).unwrap();
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        let (head, to) = match frame.data[12..14] {
            [0x08, 0x00] => (42, &frame.data[30..34]),
            _ => (62, &frame.data[38..54]),
        };
        let from = &frame.data[26..30];
        if sender.is_none_or(|sender| head == 42 && from == sender) {
            each(frame.index, to, &Packet::parse(&frame.data[head..]).unwrap());
        }
    }
}

/// Reads what a sender has sent, or all.
pub(crate) fn read_of(name: &str, sender: Option<[u8; 4]>) -> Vec<Item> {
    let mut items = Vec::new();
    let mut parts: HashMap<(Vec<u8>, u32), (Psn, Vec<u8>)> = HashMap::new();
    let mut done: HashMap<(Vec<u8>, u32), Psn> = HashMap::new();
    each_packet(name, sender, |index, to, packet| {
        let bth = packet.header.bth;
        let info = bth.opcode.info();
        if info.service == Service::Ud {
            let mad = packet.payload;
            let port = u16::from_be_bytes([mad[24 + 14], mad[24 + 15]]);
            let item = |cm, at: usize, len| Item::Private(index, cm, port, mad[24 + at..24 + at + len].to_vec());
            items.extend(match mad[17] {
                0x10 => Some(item(Cm::Req, 140 + 36, 56)),
                0x12 => Some(item(Cm::Rej, 84, 148)),
                0x13 => Some(item(Cm::Rep, 36, 196)),
                _ => None,
            });
            return;
        }
        let key = (to.to_vec(), bth.dest_qp.value());
        let psn = bth.psn;
        if info.class != Class::Send || done.get(&key).is_some_and(|last| !psn.is_after(*last)) {
            return;
        }
        if info.position.starts() {
            parts.insert(key.clone(), (psn, Vec::new()));
        }
        let Some((next, bytes)) = parts.get_mut(&key).filter(|(next, _)| *next == psn) else {
            return;
        };
        *next = psn.next();
        bytes.extend_from_slice(packet.payload);
        if info.position.ends() {
            let (_, bytes) = parts.remove(&key).unwrap();
            done.insert(key, psn);
            items.push(Item::Send(index, bytes));
        }
    });
    items
}
