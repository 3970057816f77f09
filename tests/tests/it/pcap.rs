//! `ferroce pcap check`.

use std::{fs, path::PathBuf, process::Command};

use ferroce_tests::{ferroce, process::run, root};

fn fixtures() -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(root().join("pcap-fixtures"))
        .unwrap()
        .map(|e| e.unwrap().path())
        // In the first rdma_rxe's FLUSHes have a wrong ICRC, in the second both peers are wrong, of the others one direction is there.
        .filter(|p| p.extension().is_some_and(|e| e == "pcap"))
        .filter(|p| {
            !["annex-a19", "made-read-span", "retry-exceeded-client", "scapy-cnp"]
                .iter()
                .any(|name| p.file_stem().is_some_and(|s| s == *name))
        })
        .collect();
    files.sort();
    assert!(files.len() > 10, "fixtures are missing");
    files
}

fn fixture(name: &str) -> PathBuf {
    root().join("pcap-fixtures").join(name)
}

#[test]
fn kernel_captures_are_good() {
    let mut args = vec![PathBuf::from("pcap"), "check".into(), "--json".into()];
    args.extend(fixtures());
    let done = run(&args);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let reports = done.json();
    assert_eq!(reports.len(), args.len() - 3, "one object per file");
    for (report, file) in reports.iter().zip(&args[3..]) {
        assert_eq!(report["file"], file.to_str().unwrap());
        assert!(report["roce_frames"].as_u64().unwrap() > 0, "{report}");
        assert_eq!(report["roce_frames"], report["icrc_ok"], "{report}");
        assert_eq!((&report["icrc_bad"], &report["verdict"]), (&0.into(), &"good".into()));
        assert!(report["frames"].as_u64() >= report["roce_frames"].as_u64());
        assert!(report["findings"].is_array());
    }
}

#[test]
fn every_frame_is_shown_with_its_headers_and_verdict() {
    let done = run(&["pcap".into(), "check".into(), "--frames".into(), fixture("rping.pcap")]);
    assert_eq!(done.code, Some(0));
    let frames = done.stdout.lines().filter(|l| l.ends_with("[icrc ok]")).count();
    let summary = done.stdout.lines().last().unwrap();
    assert!(summary.contains(&format!("{frames} RoCEv2")), "{summary}");
    assert!(
        done.stdout.contains("CM REQ") && done.stdout.contains("RDMA Write"),
        "{}",
        done.stdout
    );
}

#[test]
fn standard_input_is_a_capture_too() {
    let input = fs::File::open(fixture("rping.pcap")).unwrap();
    let output = Command::new(ferroce())
        .args(["pcap", "check", "--json", "-"])
        .stdin(input)
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["file"], &report["verdict"]), (&"-".into(), &"good".into()));
}

#[test]
fn a_spoiled_frame_is_found_and_the_status_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.pcap");
    let mut bytes = fs::read(fixture("atomic-fa.pcap")).unwrap();
    // The last byte of the file is the last frame's ICRC.
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&bad, bytes).unwrap();
    let done = run(&["pcap".into(), "check".into(), "--json".into(), bad.clone()]);
    assert_eq!(done.code, Some(1));
    let report = &done.json()[0];
    assert_eq!(report["icrc_bad"], 1);
    assert_eq!(report["findings"][0]["frame"], report["frames"], "the last frame");
    assert_eq!(report["findings"][0]["rule"], "frame-icrc");
    let text = run(&["pcap".into(), "check".into(), bad]);
    assert_eq!(text.code, Some(1));
    assert!(text.stdout.contains("1 bad"), "{}", text.stdout);
}

#[test]
fn a_capture_that_could_not_be_checked_is_not_good() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cut.pcap");
    // The header alone, and one frame cut by `tcpdump -s 64`.
    let whole = fs::read(fixture("atomic-fa.pcap")).unwrap();
    let mut cut = whole[..24 + 16 + 64].to_vec();
    cut[24 + 8..24 + 12].copy_from_slice(&64u32.to_le_bytes());
    for (bytes, words) in [(&whole[..24], "no RoCEv2 frame"), (&cut, "not checkable")] {
        fs::write(&file, bytes).unwrap();
        let done = run(&["pcap".into(), "check".into(), file.clone()]);
        assert_eq!(done.code, Some(3), "{}", done.stdout);
        let last = done.stdout.lines().last().unwrap();
        assert!(last.contains(": not checked") && last.contains(words), "{last}");
    }
}

#[test]
fn what_cannot_be_read_is_status_2_and_the_rest_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.pcap");
    fs::write(&text, "this is no capture at all").unwrap();
    let missing = dir.path().join("missing.pcap");
    let args = [
        "pcap".into(),
        "check".into(),
        "--json".into(),
        text,
        missing.clone(),
        fixture("atomic-cs.pcap"),
    ];
    let done = run(&args);
    assert_eq!(done.code, Some(2));
    let reports = done.json();
    assert_eq!(reports.len(), 3);
    assert!(
        reports[0]["error"].is_string() && reports[1]["error"].is_string(),
        "{reports:?}"
    );
    assert_eq!(reports[2]["icrc_bad"], 0);
    assert!(done.stderr.contains(missing.to_str().unwrap()), "{}", done.stderr);
}
