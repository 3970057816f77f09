//! Findings about RDS and LNet in captures of kernels, and of odd peers that kernels talked to.

use roce_pcap::{Report, Rule};

use crate::{
    common::fixtures,
    packets::{Sent, written},
    sent::{last_byte, load, of_upper},
};

/// Rule, first frame, host at fault, count.
type Expected = (Rule, u64, Option<u8>, u64);

/// Captures and what is found in them (host 1 is a kernel in all of them, 2 the odd peer in the captures "odd-…").
#[rustfmt::skip]
const FOUND: &[(&str, &[Expected])] = &[
    // Kernels.
    ("lnet/cksum", &[(Rule::LnetChecksum, 6, Some(2), 2)]),
    ("rds/reconnect-module-reload", &[(Rule::RdsRestart, 121, None, 1)]),
    ("rds/restart-peer", &[(Rule::RdsRestart, 101, None, 1)]),
    // Odd peers, and what kernels do to them.
    ("rds/odd-bitmaps", &[(Rule::RdsMap, 48, Some(2), 2), (Rule::RdsMapNumbers, 72, Some(2), 1)]),
    ("rds/odd-breaks", &[(Rule::RdsChecksum, 16, Some(2), 1), (Rule::RdsFragment, 63, Some(2), 1), (Rule::RdsLength, 114, Some(2), 4)]),
    ("rds/odd-frames", &[(Rule::RdsSolicited, 20, Some(2), 1), (Rule::RdsSequence, 32, Some(2), 1), (Rule::RdsAckBack, 34, Some(1), 2)]),
    ("rds/odd-rejects", &[(Rule::RdsReject, 25, Some(2), 2), (Rule::RdsRestart, 41, None, 4)]),
    ("rds/odd-replies", &[(Rule::RdsVersion, 2, Some(2), 6), (Rule::RdsRestart, 35, None, 8), (Rule::RdsPrivate, 121, Some(2), 2)]),
    ("rds/odd-versions", &[(Rule::RdsVersion, 56, Some(2), 5), (Rule::RdsPrivate, 132, Some(2), 2), (Rule::RdsPrivate, 274, Some(2), 1)]),
    ("lnet/odd-acks", &[(Rule::LnetParameters, 16, Some(2), 3), (Rule::LnetStamp, 38, Some(2), 1), (Rule::LnetNid, 43, Some(2), 1), (Rule::LnetFormat, 60, Some(2), 1)]),
    ("lnet/odd-messages", &[(Rule::LnetBytes, 22, Some(1), 3), (Rule::LnetStamp, 59, Some(2), 2), (Rule::LnetNid, 73, Some(2), 1), (Rule::LnetFormat, 87, Some(2), 9), (Rule::LnetChecksum, 133, Some(2), 1)]),
    ("lnet/odd-rejects", &[(Rule::LnetParameters, 63, Some(2), 2)]),
    ("lnet/odd-requests", &[(Rule::LnetParameters, 45, Some(2), 2), (Rule::LnetFormat, 91, Some(2), 6), (Rule::LnetChecksum, 121, Some(2), 1)]),
];

/// Returns rule, first frame, host at fault and count of each finding.
fn found(report: Report) -> Vec<Expected> {
    let findings = of_upper(report.findings).into_iter();
    findings
        .map(|f| (f.rule, f.frame, f.at_fault.map(last_byte), f.count))
        .collect()
}

#[test]
fn kernels_and_odd_peers_break_the_rules_that_are_known() {
    let mut wrong = vec![];
    for folder in ["", "rds", "lnet"] {
        let mut names: Vec<_> = std::fs::read_dir(fixtures().join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "pcap" || e == "pcapng"))
            .collect();
        names.sort();
        assert!(names.len() > 15, "{folder}");
        for path in names {
            let name = format!("{folder}/{}", path.file_stem().unwrap().to_string_lossy());
            let mut found = found(ferroce_dissect::check_file(&path).unwrap());
            let expected = FOUND
                .iter()
                .find(|(known, _)| *known == name)
                .map_or(&[][..], |(_, e)| e);
            found.sort_by_key(|(_, frame, _, _)| *frame);
            let mut sorted = expected.to_vec();
            sorted.sort_by_key(|(_, frame, _, _)| *frame);
            if found != sorted {
                wrong.push(format!("{name}: {found:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn conversations_say_what_was_not_checked() {
    let check = |packets: &[Sent]| {
        ferroce_dissect::check_reader("x", &written(packets)[..], |_| {})
            .unwrap()
            .conversations
    };
    let packets = load("lnet/brw-read-4k");
    assert_eq!(check(&packets)[0].not_checked, Vec::<String>::new());
    let middle = check(&packets[10..]);
    assert_eq!(
        middle[0].not_checked,
        [
            "how the connection began",
            "LNet: messages before the capture, or missing in it",
            "LNet: credits",
            "LNet: cookies and sinks of both sides"
        ]
    );
    let packets = load("rds/ping");
    let middle = check(&packets[33..]);
    assert!(
        middle[0].not_checked[1].starts_with("RDS: messages before"),
        "{:?}",
        middle[0].not_checked
    );
}

/// Anonymized captures have a pattern in place of the payload, with private data or without.
#[test]
fn anonymized_captures_are_not_judged() {
    for name in ["rds/congestion", "rds/loss", "lnet/brw-read-4k", "lnet/discover"] {
        for keep_private in [false, true] {
            let settings = roce_pcap::Settings {
                keep_private,
                ..roce_pcap::Settings::default()
            };
            let file = written(&load(name));
            let mut copy = roce_pcap::PcapNgWriter::new(Vec::new()).unwrap();
            let mut capture = roce_pcap::Capture::new(&file[..]).unwrap();
            roce_pcap::anonymize(&settings, &mut capture, &mut copy).unwrap();
            let copy = copy.finish().unwrap();
            let report = ferroce_dissect::check_reader("copy", &copy[..], |_| {}).unwrap();
            // The private data that is kept names the addresses of the original.
            let kept = |rule| keep_private && rule == Rule::RdsPrivate;
            let rules: Vec<_> = found(report).into_iter().filter(|f| !kept(f.0)).collect();
            assert_eq!(rules, [], "{name} {keep_private}");
        }
    }
}
