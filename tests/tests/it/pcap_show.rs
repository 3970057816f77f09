//! `ferroce pcap show`.

use std::{fs::File, path::PathBuf, process::Command};

use ferroce_tests::{
    ferroce,
    process::{Finished, run},
    root,
};
use serde_json::Value;

fn show(options: &[&str], capture: &str) -> Finished {
    let mut args: Vec<PathBuf> = ["pcap", "show"].iter().chain(options).map(PathBuf::from).collect();
    args.push(root().join("pcap-fixtures").join(capture));
    run(&args)
}

fn lines(options: &[&str], capture: &str) -> Vec<String> {
    let done = show(options, capture);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    done.stdout.lines().map(str::to_owned).collect()
}

/// Numbers of the frames that are shown.
fn frames(options: &[&str], capture: &str) -> Vec<u64> {
    let numbers = |line: &String| line.split_whitespace().next().and_then(|word| word.parse().ok());
    lines(options, capture).iter().filter_map(numbers).collect()
}

#[test]
fn a_packet_is_a_line_with_its_innermost_layer() {
    assert_eq!(
        lines(&["--from", "19", "--to", "21"], "rnbd.pcap"),
        [
            "   19   0.344700 10.77.0.2 > 10.77.0.1:0x23 Write Only+imm 0xa93417 | RNBD session information, version 2",
            "   20   0.345308 10.77.0.1 > 10.77.0.2:0x24 Ack 0xa93417 ack msn 0x000002",
            "   21   0.346634 10.77.0.1 > 10.77.0.2:0x24 Write Only 0x6a6fa0 | RNBD session information answer, version 2",
        ]
    );
    assert_eq!(
        lines(&["--from", "3", "--to", "4"], "rping.pcap"),
        [
            "    3   0.022639 10.77.0.2 > 10.77.0.1:0x1 CM RTU 0x012a0958 to 0xe7f93761",
            "    4   0.024551 10.77.0.2 > 10.77.0.1:0x20 Send Only 0xa5e13c len 16 ack-req",
        ]
    );
    let lnet = lines(&["--to", "1"], "lnet/ping.pcap");
    assert!(
        lnet[0].ends_with("CM REQ | LNet CONNREQ, queue depth 8, 257 fragments, messages of 4096 bytes"),
        "{lnet:?}"
    );
    let all = lines(&[], "rnbd.pcap");
    assert!(all.iter().all(|line| line.chars().count() <= 120));
}

#[test]
fn fields_have_their_places() {
    let shown = lines(&["--fields", "--from", "35", "--to", "35"], "rnbd.pcap");
    for line in [
        "            5+3  destination QP: 36",
        "           40+8  sector: 0 (byte 0)",
    ] {
        assert!(shown.iter().any(|l| l == line), "{line}: {shown:#?}");
    }
}

#[test]
fn filters_hold_together() {
    assert_eq!(
        frames(&["--opcode", "ack", "--from", "20", "--to", "26"], "rnbd.pcap"),
        [20, 22, 25, 26]
    );
    assert_eq!(
        frames(&["--layer", "rnbd", "--to", "50", "--qp", "0x25"], "rnbd.pcap"),
        [35, 46]
    );
    let none = show(&["--qp", "10.77.0.1:37"], "rnbd.pcap");
    assert_eq!(
        (none.code, none.stderr.as_str()),
        (Some(3), "error: no frame matches\n")
    );
}

#[test]
fn a_request_is_followed_to_its_last_acknowledgement() {
    // From any of its frames.
    for frame in ["35", "39", "45"] {
        let shown = lines(&["--follow", frame], "rnbd.pcap");
        assert_eq!(shown.len(), 12, "{shown:#?}");
        assert!(
            shown[0]
                .starts_with("   35   0.000000 10.77.0.2 > 10.77.0.1:0x24 Write Only+imm 0x8a967f | RNBD read of 4096")
        );
        assert!(shown[10].starts_with("   45   0.002422 "), "{}", shown[10]);
        assert_eq!(shown[11], "latency 1.824 ms, 11 packets, 0 retransmissions");
    }
    // A message of a service that is not known.
    for frame in ["6", "8", "9"] {
        assert_eq!(frames(&["--follow", frame], "rping.pcap"), [6, 7, 8, 9]);
    }
    let done = show(&["--follow", "9999"], "rping.pcap");
    assert_eq!(
        (done.code, done.stderr.as_str()),
        (Some(1), "error: there is no frame 9999\n")
    );
}

#[test]
fn retransmissions_are_counted() {
    let shown = lines(&["--rule", "no-answer"], "retry-exceeded-client.pcap");
    let frame = shown[0].split_whitespace().next().unwrap().to_owned();
    let json = show(&["--json", "--follow", &frame], "retry-exceeded-client.pcap").json();
    let total = json.last().unwrap();
    assert_eq!(total["latency_ns"], Value::Null);
    assert_eq!(
        total["packets"].as_u64().unwrap(),
        total["retransmissions"].as_u64().unwrap() + 1,
        "{total}"
    );
}

#[test]
fn findings_are_below_their_frames_with_what_is_around() {
    let shown = lines(&["--rule", "no-answer", "--context", "1"], "retry-exceeded-client.pcap");
    assert_eq!(shown.len(), 3, "{shown:#?}");
    assert!(shown[0].starts_with("    1   0.000000 10.77.0.2 > 10.77.0.1:0x12 Send Only 0xfffff0 "));
    assert!(shown[1].starts_with("      ^ warning no-answer: "), "{}", shown[1]);
    assert!(
        shown[2].starts_with("    2 ") && shown[2].contains("repeated: "),
        "{}",
        shown[2]
    );
}

#[test]
fn each_packet_is_an_object() {
    let json = show(&["--json"], "rnbd.pcap").json();
    let checked = run(&[
        "pcap".into(),
        "check".into(),
        "--json".into(),
        root().join("pcap-fixtures/rnbd.pcap"),
    ])
    .json();
    assert_eq!(json.len() as u64, checked[0]["roce_packets"].as_u64().unwrap());
    let read = &json[34];
    assert_eq!(
        (&read["frame"], &read["exchange"], &read["dest_qp"]),
        (&35.into(), &5.into(), &36.into())
    );
    let layers: Vec<_> = read["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|layer| layer["name"].as_str().unwrap())
        .collect();
    assert_eq!(layers, ["BTH", "RTRS", "RNBD"]);
    let sector = read["layers"][2]["fields"]
        .as_array()
        .unwrap()
        .iter()
        .find(|field| field["name"] == "sector");
    assert_eq!(sector.unwrap()["offset"], 40);
}

#[test]
fn standard_input_is_shown_as_files_are() {
    for name in ["rnbd.pcap", "rping.pcap", "rds.pcap"] {
        let output = Command::new(ferroce())
            .args(["pcap", "show", "-"])
            .stdin(File::open(root().join("pcap-fixtures").join(name)).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let piped = String::from_utf8(output.stdout).unwrap();
        let packets = |text: &str| {
            text.lines()
                .filter(|l| !l.contains('^') && !l.starts_with("at the end"))
                .count()
        };
        assert_eq!(packets(&piped), packets(&show(&[], name).stdout), "{name}");
    }
}

#[test]
fn a_stall_is_shown_with_the_frames_around_it() {
    let capture = "made-read-span.pcap";
    assert_eq!(frames(&["--bad"], capture), [8, 9, 10]);
    assert_eq!(frames(&["--bad", "--context", "2"], capture), [6, 7, 8, 9, 10]);
    assert_eq!(frames(&["--rule", "ack-ghost"], capture), [9]);
    let shown = lines(&["--bad", "--opcode", "acknowledge"], capture);
    assert_eq!(
        shown,
        [
            "    9   0.000160 192.0.2.2 > 192.0.2.1:0x21 Ack 0xfffff0 ack msn 0x000002",
            "      ^ error ack-ghost: an acknowledgement of PSN 0xfffff0, which was never sent: the first request has 0xfffffe; \
             at fault: 192.0.2.2",
        ]
    );
}
