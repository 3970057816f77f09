//! Packets between two hosts, whatever they are: the dissector shows fields that are inside their packets, and does not panic.

use std::net::SocketAddr;

use ferroce_dissect::{Base, Dissector, Field, Meta};
use roce_bth::{ICRC_LEN, Packet};

/// Runs the packets of an input. Before each stand two bytes: length, little-endian, and direction in the highest bit.
pub fn run(data: &[u8]) {
    let hosts: [SocketAddr; 2] = [([10, 77, 0, 1], 4791).into(), ([10, 77, 0, 2], 4791).into()];
    let mut dissector = Dissector::new();
    let (mut rest, mut frame) = (data, 0);
    while let Some(([low, high], behind)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([*low, *high & 0x7f]));
        let (bytes, after) = behind.split_at(len.min(behind.len()));
        rest = after;
        frame += 1;
        let from = usize::from(high >> 7);
        let meta = Meta {
            frame,
            time_ns: frame * 1000,
            src: hosts[from],
            dst: hosts[1 - from],
        };
        let Ok(packet) = Packet::parse(bytes) else { continue };
        let dissection = dissector.packet(&meta, &packet);
        let len = bytes.len() - ICRC_LEN;
        for layer in dissection.layers.iter().filter(|layer| layer.base == Base::Packet) {
            layer.fields.iter().for_each(|field| inside(field, len));
        }
        assert!(!dissection.summary().is_empty());
        serde_json::to_string(&dissection).expect("JSON");
    }
}

fn inside(field: &Field, len: usize) {
    assert!(
        field.offset <= len && field.len <= len - field.offset,
        "{field:?} in a packet of {len} bytes"
    );
    field.children.iter().for_each(|child| inside(child, len));
}
