//! A capture of two hosts: what both have said, the data that they have written, and who has ended connections.

use std::collections::HashMap;

use roce_bth::{Class, Service};

use crate::capture::{Item, each_packet, read_of};

pub(crate) const HOSTS: [[u8; 4]; 2] = [[10, 77, 0, 1], [10, 77, 0, 2]];
/// Attribute of a request to disconnect.
const DREQ: u8 = 0x15;

/// RDMA WRITE of a host, and its first frame.
pub(crate) struct Written {
    pub(crate) frame: u64,
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) data: Vec<u8>,
}

/// Returns the file of a capture.
fn file(name: &str) -> String {
    format!("lnet/{name}.pcap")
}

/// Returns what both hosts have said, and whether it was the first one.
pub(crate) fn items(name: &str) -> Vec<(bool, Item)> {
    let of = |host: usize| read_of(&file(name), Some(HOSTS[host])).into_iter();
    let mut items: Vec<(bool, Item)> = of(0).map(|item| (true, item)).collect();
    items.extend(of(1).map(|item| (false, item)));
    items.sort_by_key(|(_, item)| frame(item));
    items
}

/// Frame of an item.
pub(crate) const fn frame(item: &Item) -> u64 {
    match item {
        Item::Private(frame, ..) | Item::Send(frame, _) => *frame,
    }
}

/// Returns the WRITEs of a host. Repeated ones are there once.
pub(crate) fn writes(name: &str, host: [u8; 4]) -> Vec<Written> {
    let mut writes: Vec<Written> = Vec::new();
    let mut next = HashMap::new();
    each_packet(&file(name), Some(host), |frame, _, packet| {
        let bth = packet.header.bth;
        let info = bth.opcode.info();
        if !matches!(info.class, Class::Write | Class::Send) || info.service == Service::Ud {
            return;
        }
        let expected = next.entry(bth.dest_qp.value()).or_insert(bth.psn);
        if *expected != bth.psn {
            return;
        }
        *expected = bth.psn.next();
        if let Some(reth) = packet.header.reth() {
            writes.push(Written {
                frame,
                addr: reth.va,
                key: reth.rkey.0,
                data: Vec::new(),
            });
        }
        if let (Class::Write, Some(write)) = (info.class, writes.last_mut()) {
            write.data.extend_from_slice(packet.payload);
        }
    });
    writes
}

/// Returns the frames of requests to disconnect, and whether they are the first host's. Repeated ones are there as often.
pub(crate) fn ends(name: &str) -> Vec<(bool, u64)> {
    let mut ends = Vec::new();
    for (host, is_first) in HOSTS.into_iter().zip([true, false]) {
        each_packet(&file(name), Some(host), |frame, _, packet| {
            if packet.header.bth.opcode.info().service == Service::Ud && packet.payload[17] == DREQ {
                ends.push((is_first, frame));
            }
        });
    }
    ends.sort_by_key(|(_, frame)| *frame);
    ends
}
