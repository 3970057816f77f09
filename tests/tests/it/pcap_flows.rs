//! `ferroce pcap flows`.

use std::{fs, path::PathBuf, process::Command};

use ferroce_tests::{ferroce, process::run, root};

fn fixture(name: &str) -> String {
    let path: PathBuf = root().join("pcap-fixtures").join(name);
    path.display().to_string()
}

#[test]
fn each_direction_has_a_row() {
    let file = fixture("write-bw.pcap");
    let done = run(&["pcap", "flows", &file]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let lines: Vec<_> = done.stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{}", done.stdout);
    assert!(lines[0].contains("GOODPUT") && lines[0].ends_with("UDP PORTS"));
    // Columns are aligned.
    let at = lines[0].find("PACKETS").unwrap();
    assert!(
        lines[1][at..].starts_with("50 ") && lines[2][at..].starts_with("5 "),
        "{}",
        done.stdout
    );
    assert_eq!(lines[3], format!("{file}: 55 frames, 55 RoCEv2 packets, 2 flows"));
}

#[test]
fn json_has_an_object_for_each_file() {
    let files = [
        fixture("rnr-send.pcap"),
        "/nonexistent".into(),
        fixture("loss-write-twice-client.pcap"),
    ];
    let done = run(&["pcap", "flows", "--json", &files[0], &files[1], &files[2]]);
    assert_eq!(done.code, Some(2));
    let [rnr, missing, loss] = done.json().try_into().unwrap();
    assert_eq!(
        (&rnr["file"], &rnr["complete"]),
        (&files[0].as_str().into(), &true.into())
    );
    assert_eq!(rnr["flows"][0]["rnr_naks"], 8);
    assert!(missing["error"].is_string() && missing["file"] == "/nonexistent");
    assert_eq!(
        (&loss["flows"][0]["retransmissions"], &loss["flows"][0]["sequence_naks"]),
        (&4.into(), &1.into())
    );
    assert!(done.stderr.contains("/nonexistent"), "{}", done.stderr);
}

#[test]
fn csv_has_a_row_for_each_flow_or_packet() {
    let file = fixture("read-bw.pcap");
    let rows = |args: &[&str], expected: usize| {
        let done = run(&[&["pcap", "flows", "--csv"], args, &[&file]].concat());
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let lines: Vec<Vec<String>> = done
            .stdout
            .lines()
            .map(|line| line.split(',').map(str::to_owned).collect())
            .collect();
        assert_eq!(lines.len(), expected + 1);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{}", done.stdout);
        lines
    };
    let flows = rows(&[], 2);
    let column = |name: &str| flows[0].iter().position(|n| n == name).unwrap();
    assert_eq!(flows[1][column("read_latency_count")], "5");
    assert_eq!(flows[2][column("first_bytes")], "50000");
    let packets = rows(&["--per-frame"], 55);
    let latencies = packets[1..].iter().filter(|row| !row.last().unwrap().is_empty());
    assert_eq!(latencies.count(), 5, "each READ's last response has its latency");
    let done = run(&["pcap", "flows", "--json", "--per-frame", &file]);
    let objects = done.json();
    assert_eq!(objects.len(), 56);
    assert_eq!(
        (&objects[0]["kind"], &objects[54]["kind"]),
        (&"request".into(), &"read_response".into())
    );
    assert!(objects[55]["flows"].is_array());
    assert_eq!(run(&["pcap", "flows", "--per-frame", &file]).code, Some(2));
}

#[test]
fn a_file_that_breaks_off_is_measured_up_to_there() {
    let dir = tempfile::tempdir().unwrap();
    let cut = dir.path().join("cut,.pcap");
    let bytes = fs::read(fixture("write-bw.pcap")).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 3]).unwrap();
    let done = run(&["pcap", "flows", "--csv", cut.to_str().unwrap()]);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("breaks off"), "{}", done.stderr);
    assert_eq!(done.stdout.lines().count(), 3, "{}", done.stdout);
    assert!(done.stdout.lines().nth(1).unwrap().starts_with('"'));
}

#[test]
fn standard_input_is_measured_to_its_end() {
    let input = fs::File::open(fixture("udaddy.pcap")).unwrap();
    let output = Command::new(ferroce())
        .args(["pcap", "flows", "-"])
        .stdin(input)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().last().unwrap().starts_with("-: "), "{text}");
    assert_eq!(text.matches(" UD ").count(), 2, "{text}");
}
