//! Captures of `pcap-fixtures`, dissected.

use std::path::{Path, PathBuf};

use ferroce_dissect::{Dissection, Dissector, Meta};
use roce_bth::Packet;
use roce_pcap::{Capture, decode};

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures")
}

/// RoCE packet of a capture.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) meta: Meta,
    pub(crate) payload: Vec<u8>,
}

/// Reads the RoCE packets of a capture.
pub(crate) fn frames(name: &str) -> Vec<Frame> {
    let path = fixtures().join(name);
    let mut capture = Capture::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut frames = Vec::new();
    while let Some(frame) = capture.next_frame() {
        let frame = frame.unwrap();
        let datagram = decode(frame.link, frame.data).unwrap();
        if datagram.dst.port() == 4791 {
            frames.push(Frame {
                meta: Meta {
                    frame: frame.index,
                    time_ns: frame.time_ns,
                    src: datagram.src,
                    dst: datagram.dst,
                },
                payload: datagram.payload.to_vec(),
            });
        }
    }
    frames
}

/// Dissects a capture.
pub(crate) fn dissect(name: &str) -> Vec<Dissection> {
    dissect_packets(&frames(name))
}

/// Dissects packets, one after another.
pub(crate) fn dissect_packets(packets: &[Frame]) -> Vec<Dissection> {
    let mut dissector = Dissector::new();
    let all = packets
        .iter()
        .map(|f| dissector.packet(&f.meta, &Packet::parse(&f.payload).unwrap()));
    all.collect()
}

/// Summaries of the layers of one protocol, once for each message.
pub(crate) fn summaries(all: &[Dissection], layer: &str) -> Vec<String> {
    let layers = all.iter().filter_map(|d| d.layer(layer));
    layers.map(|l| l.summary.clone()).collect()
}

/// Counts the summaries that contain a text.
pub(crate) fn count(summaries: &[String], text: &str) -> usize {
    summaries.iter().filter(|s| s.contains(text)).count()
}
