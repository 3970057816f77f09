//! Captures that gzip or zstd compressed.

use std::{
    fs,
    io::{self, Read, Write},
    path::Path,
};

use flate2::{Compression, write::GzEncoder};
use proptest::{collection::vec, prelude::*};
use roce_pcap::{Capture, Error, Report, Rule, Verdict, check_file, check_reader};

fn fixture(name: &str) -> Vec<u8> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures");
    fs::read(fixtures.join(name)).unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Each way to compress, and a file in two parts.
fn compressed(bytes: &[u8]) -> [(&'static str, Vec<u8>); 5] {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    [
        ("gzip", gzip(bytes)),
        ("gzip, two members", [gzip(first), gzip(second)].concat()),
        ("zstd", zstd(bytes)),
        ("zstd, two frames", [zstd(first), zstd(second)].concat()),
        ("zstd, a skippable frame", [&skippable[..], &zstd(bytes)].concat()),
    ]
}

fn checked(file: impl Read) -> Result<Report, Error> {
    check_reader("x", file, |_| {})
}

#[test]
fn a_compressed_capture_is_read_like_the_capture() {
    for name in ["cm-reject.pcap", "cm-reject.pcapng", "write-lat.pcap"] {
        let plain = fixture(name);
        let expected = checked(&plain[..]).unwrap();
        assert!(expected.icrc_ok > 0);
        for (how, file) in compressed(&plain) {
            assert_eq!(checked(&file[..]).unwrap(), expected, "{name}: {how}");
        }
    }
    // The name says nothing.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.pcap");
    fs::write(&path, zstd(&fixture("cm-reject.pcap"))).unwrap();
    assert_eq!(check_file(&path).unwrap().verdict, Verdict::Good);
}

#[test]
fn a_compressed_file_cut_anywhere_is_cut_off() {
    for (how, file) in compressed(&fixture("cm-reject.pcap")) {
        let (begin, end) = (4, file.len());
        for cut in begin..end {
            match checked(&file[..cut]) {
                Err(Error::CutOff { after: 0 }) => {}
                // Behind the skippable frame.
                Err(Error::NotACapture(_)) if how.contains("skippable") => assert_eq!(cut, 11),
                Ok(report) if !report.complete => {
                    let last = report.findings.last().unwrap();
                    assert_eq!(
                        (last.rule, report.verdict),
                        (Rule::FileBroken, Verdict::Bad),
                        "{how} cut at {cut}"
                    );
                    assert!(
                        last.text.contains("ends in the middle"),
                        "{how} cut at {cut}: {}",
                        last.text
                    );
                }
                // Between two members, which may be between two frames.
                Ok(_) if how.contains("two") => {}
                other => panic!("{how} cut at {cut}: {other:?}"),
            }
        }
    }
}

#[test]
fn what_is_no_capture_says_why() {
    let text = |file: &[u8]| checked(file).unwrap_err().to_string();
    for compress in [gzip, zstd] {
        assert!(text(&compress(b"")).contains("empty"));
        assert!(text(&compress(b"hello, world")).ends_with("neither a pcap nor a pcapng file, decompressed"));
        // Once is enough.
        assert!(text(&compress(&compress(&fixture("cm-reject.pcap")))).contains("neither"));
    }
    assert!(text(&[0xfd, b'7', b'z', b'X', b'Z', 0]).contains("xz"));
    assert!(text(b"BZh91AY").contains("bzip2"));
    assert!(text(&[4, 0x22, 0x4d, 0x18]).contains("lz4"));
}

#[test]
fn damage_is_told_from_a_file_that_cannot_be_read() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("on fire"))
        }
    }
    let plain = fixture("write-lat.pcap");
    for (how, file) in compressed(&plain) {
        let mut damaged = file.clone();
        let end = damaged.len();
        // The checksum.
        damaged[end - if how.contains("gzip") { 8 } else { 4 }] ^= 1;
        let report = checked(&damaged[..]).unwrap();
        let text = &report.findings.last().unwrap().text;
        assert!(
            text.contains("corrupt behind") && text.contains("compressed data"),
            "{how}: {text}"
        );
        let e = match checked(file[..end - 20].chain(Failing)) {
            Err(e) => e.to_string(),
            Ok(report) => report.findings.last().unwrap().text.clone(),
        };
        assert!(e.contains("read error") && e.contains("on fire"), "{how}: {e}");
    }
}

#[test]
fn a_window_that_takes_too_much_memory_is_refused() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    encoder.write_all(&fixture("cm-reject.pcap")).unwrap();
    let file = encoder.finish().unwrap();
    let e = checked(&file[..]).unwrap_err().to_string();
    assert!(e.contains("128 MiB"), "{e}");
}

#[test]
fn frames_come_before_the_file_is_complete() {
    let plain = fixture("write-lat.pcap");
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&plain[..plain.len() / 2]).unwrap();
    // What a program that writes for a reader does from time to time.
    encoder.flush().unwrap();
    let so_far = encoder.get_ref().clone();
    let mut capture = Capture::new(&so_far[..]).unwrap();
    let mut frames = 0;
    while let Some(Ok(_)) = capture.next_frame() {
        frames += 1;
    }
    assert!(frames > 0);
}

proptest! {
    #[test]
    fn mutated_files_never_panic(
        which in 0usize..5,
        name in prop_oneof![Just("cm-reject.pcap"), Just("cm-reject.pcapng")],
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        keep in any::<bool>(),
    ) {
        let (_, mut file) = compressed(&fixture(name))[which].clone();
        for (at, to) in changes {
            let at = at.index(file.len());
            file[at] = to;
        }
        if !keep {
            file.truncate(cut.index(file.len()) + 1);
        }
        if let Ok(report) = checked(&file[..]) {
            prop_assert_eq!(report.icrc_ok + report.icrc_bad + report.icrc_unchecked, report.roce_frames);
        }
    }

    #[test]
    fn arbitrary_compressed_bytes_never_panic(
        magic in prop_oneof![Just(vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3]), Just(vec![0x28, 0xb5, 0x2f, 0xfd])],
        bytes in vec(any::<u8>(), 0..200),
    ) {
        let _ = checked(&[magic, bytes].concat()[..]);
    }
}
