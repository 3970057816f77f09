//! `ferroce pcap plot`.

use std::fs;

use ferroce_tests::{process::run, root};

fn fixture(name: &str) -> String {
    root().join("pcap-fixtures").join(name).display().to_string()
}

#[test]
fn pictures_go_to_a_file_or_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.svg");
    let (file, out) = (fixture("rnr-send.pcap"), out.to_str().unwrap());
    let done = run(&["pcap", "plot", &file, "-o", out]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{}", done.stderr);
    let written = fs::read_to_string(out).unwrap();
    assert!(written.starts_with("<svg ") && written.ends_with("</svg>\n"));
    let piped = run(&["pcap", "plot", &file]);
    assert_eq!((piped.code, piped.stdout), (Some(0), written), "{}", piped.stderr);
}

#[test]
fn the_capture_is_not_overwritten_and_errors_name_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let capture = dir.path().join("trace.pcap");
    let bytes = fs::read(fixture("rnr-send.pcap")).unwrap();
    fs::write(&capture, &bytes).unwrap();
    let capture = capture.to_str().unwrap();
    let done = run(&["pcap", "plot", capture, "-o", capture]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert_eq!(fs::read(capture).unwrap(), bytes);
    let done = run(&["pcap", "plot", capture, "--conversation", "9"]);
    assert_eq!(done.code, Some(1));
    assert!(done.stderr.contains("ferroce pcap flows"), "{}", done.stderr);
    assert_eq!(run(&["pcap", "plot", "/nonexistent"]).code, Some(2));
}
