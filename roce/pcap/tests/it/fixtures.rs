//! The kernel's captures against the manifest, and byte for byte through the header crate.

use std::{
    fs,
    path::{Path, PathBuf},
};

use roce_bth::{BTH_LEN, Header, ICRC_LEN, MAX_HEADER_LEN, Opcode, Packet, Position};
use roce_pcap::{Capture, Datagram, Finding, Rule, check_file_with, decode};
use toml::Table;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures")
}

fn manifest() -> Vec<Table> {
    let manifest: Table = fs::read_to_string(dir().join("manifest.toml"))
        .unwrap()
        .parse()
        .unwrap();
    let captures = manifest["capture"].as_array().unwrap();
    captures.iter().map(|c| c.as_table().unwrap().clone()).collect()
}

#[test]
fn the_manifest_lists_every_capture() {
    let mut listed: Vec<String> = manifest()
        .iter()
        .map(|c| c["file"].as_str().unwrap().to_owned())
        .collect();
    let mut there: Vec<String> = fs::read_dir(dir())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains(".pcap"))
        .collect();
    listed.sort();
    there.sort();
    assert_eq!(listed, there);
}

/// Folders of captures that have a manifest of their own, with counts only.
const FOLDERS: [&str; 2] = ["rds", "lnet"];

#[test]
fn the_manifests_of_the_folders_are_right() {
    let folders = fs::read_dir(dir()).unwrap().map(|e| e.unwrap().path());
    assert_eq!(folders.filter(|path| path.is_dir()).count(), FOLDERS.len());
    for folder in FOLDERS.map(|name| dir().join(name)) {
        let manifest: Table = fs::read_to_string(folder.join("manifest.toml"))
            .unwrap()
            .parse()
            .unwrap();
        let captures = manifest["capture"].as_array().unwrap();
        let there = fs::read_dir(&folder).unwrap();
        let there = there.filter(|e| e.as_ref().unwrap().file_name().to_str().unwrap().contains(".pcap"));
        assert_eq!(there.count(), captures.len(), "{}", folder.display());
        for entry in captures {
            let file = entry["file"].as_str().unwrap();
            let report = check_file_with(folder.join(file), |frame| {
                assert!(!frame.is_bad(), "{file} frame {}: {:?}", frame.index, frame.findings);
            })
            .unwrap();
            let counted = ["frames", "roce_frames", "icrc_ok", "icrc_bad"].map(|key| entry[key].as_integer().unwrap());
            let found = [report.frames, report.roce_frames, report.icrc_ok, report.icrc_bad];
            assert_eq!(found.map(|n| n as i64), counted, "{file}");
            assert!(report.complete, "{file}");
        }
    }
}

#[test]
fn every_capture_is_what_the_manifest_says() {
    for entry in manifest() {
        let file = entry["file"].as_str().unwrap();
        let mtu = entry["path_mtu"].as_integer().unwrap() as usize;
        let mut flow_frames = 0;
        // rdma_rxe's FLUSH has a wrong ICRC; what is wrong must be that and as often as the manifest says.
        let right = |findings: &[Finding]| findings.iter().all(|f| f.rule == Rule::FrameIcrc);
        let report = check_file_with(dir().join(file), |frame| {
            flow_frames += 1;
            let as_known = !frame.is_bad() || right(&frame.findings);
            assert!(as_known, "{file} frame {}: {:?}", frame.index, frame.findings);
            let (len, opcode) = (
                frame.payload_len.unwrap(),
                frame.opcode_code.and_then(Opcode::from_byte).unwrap(),
            );
            assert!(len <= mtu, "{file} frame {} is longer than the path MTU", frame.index);
            if matches!(opcode.info().position, Position::First | Position::Middle) {
                assert_eq!(len, mtu, "{file} frame {}", frame.index);
            }
        })
        .unwrap();
        let count = |key: &str| entry[key].as_integer().unwrap() as u64;
        assert_eq!(report.frames, count("frames"), "{file}");
        assert_eq!(report.roce_frames, count("roce_frames"), "{file}");
        assert_eq!(report.icrc_ok, count("icrc_ok"), "{file}");
        assert_eq!(report.icrc_bad, count("icrc_bad"), "{file}");
        assert_eq!(report.roce_packets, report.roce_frames, "{file}");
        assert_eq!(report.bad_frames, report.icrc_bad, "{file}: {:?}", report.findings);
        assert!(report.complete && report.unread_frames == 0, "{file}");
        let flows = entry["flows"].as_array().unwrap();
        let listed: i64 = flows.iter().map(|f| f["frames"].as_integer().unwrap()).sum();
        assert_eq!(listed, flow_frames, "{file}");
    }
}

/// Calls `each` with every RoCEv2 datagram of every fixture.
fn datagrams(mut each: impl FnMut(&str, &Datagram<'_>)) {
    for entry in manifest() {
        let file = entry["file"].as_str().unwrap();
        let mut capture = Capture::open(dir().join(file)).unwrap();
        let mut roce = 0;
        while let Some(frame) = capture.next_frame() {
            let frame = frame.unwrap();
            assert!(!frame.is_cut());
            let datagram = decode(frame.link, frame.data).unwrap();
            if datagram.dst.port() == 4791 {
                roce += 1;
                each(&format!("{file} frame {}", frame.index), &datagram);
            }
        }
        assert_eq!(roce, entry["roce_frames"].as_integer().unwrap(), "{file}");
    }
}

#[test]
fn every_frame_parses_and_re_emits_byte_for_byte() {
    datagrams(|at, datagram| {
        let bytes = datagram.payload;
        let packet = Packet::parse(bytes).unwrap_or_else(|e| panic!("{at}: {e}"));
        let mut out = vec![0; MAX_HEADER_LEN];
        let len = Header::from(packet.header).emit(&mut out);
        out.truncate(len);
        out.extend(packet.payload);
        // rxe pads with zeros.
        out.resize(out.len() + usize::from(packet.header.bth.pad), 0);
        assert_eq!(out, bytes[..bytes.len() - ICRC_LEN], "{at}");
        assert!(out.len() >= BTH_LEN);
    });
}

#[test]
fn pcapng_and_pcap_of_the_same_traffic_are_the_same() {
    let read = |name: &str| {
        let mut capture = Capture::open(dir().join(name)).unwrap();
        let mut frames = vec![];
        while let Some(frame) = capture.next_frame() {
            let frame = frame.unwrap();
            frames.push((
                frame.index,
                frame.time_ns,
                frame.link,
                frame.original_len,
                frame.data.to_vec(),
            ));
        }
        frames
    };
    let frames = read("cm-reject.pcap");
    assert_eq!(frames.len(), 2);
    assert_eq!(frames, read("cm-reject.pcapng"));
}

#[test]
fn summaries_say_what_happens() {
    let mut lines = vec![];
    check_file_with(dir().join("rping.pcap"), |frame| lines.push(frame.summary.to_string())).unwrap();
    let text = lines.join("\n");
    for expected in [
        "(CM REQ)",
        "(CM REP)",
        "(CM RTU)",
        "(CM DREQ)",
        "RC RDMA Read Request",
        "rkey 0x",
        "ack",
    ] {
        assert!(text.contains(expected), "no {expected} in\n{text}");
    }
    assert!(lines.iter().all(|l| l.contains("psn 0x")), "{text}");
}
