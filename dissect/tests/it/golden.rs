//! Lines of whole captures. `UPDATE_GOLDEN=1` writes the files again.

use std::{fmt::Write, fs, path::Path};

use crate::common::dissect;

/// Captures, and how many of their frames are in the file.
const CAPTURES: [(&str, usize); 9] = [
    ("rnbd.pcap", 70),
    ("rnbd-inv-off.pcap", 30),
    ("rds/ping.pcap", usize::MAX),
    ("rds/rdma-write-7.3-7.3.pcap", usize::MAX),
    ("rds/odd-rejects.pcap", 40),
    ("lnet/discover.pcap", usize::MAX),
    ("lnet/brw-read-4k.pcap", usize::MAX),
    ("lnet/restart-killed.pcap", usize::MAX),
    ("udaddy.pcap", 12),
];

#[test]
fn lines_are_as_they_were() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, frames) in CAPTURES {
        let mut text = String::new();
        for dissection in dissect(name).iter().take(frames) {
            let exchange = dissection.exchange.map(|id| id.to_string()).unwrap_or_default();
            writeln!(text, "{:>4} {exchange:>4} {}", dissection.frame, dissection.summary()).unwrap();
        }
        let file = folder.join(name.replace('/', "-").replace(".pcap", ".txt"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&file, &text).unwrap();
        }
        let expected = fs::read_to_string(&file).unwrap();
        for (found, expected) in text.lines().zip(expected.lines()) {
            assert_eq!(found, expected, "{name}");
        }
        assert_eq!(text.lines().count(), expected.lines().count(), "{name}");
    }
}
