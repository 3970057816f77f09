//! `ferroce pcap annotate`, `filter`, `split` and `anonymize`.
//!
//! A test that needs tshark is ignored by default. To run it, install the package of this name, and:
//!
//! ```sh
//! cargo test -p ferroce-tests --test it tshark -- --include-ignored
//! ```

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use ferroce_tests::{ferroce, process::run, root};

fn fixture(name: &str) -> PathBuf {
    root().join("pcap-fixtures").join(name)
}

fn report(file: &Path) -> serde_json::Value {
    run(&["pcap".into(), "check".into(), "--json".into(), file.to_owned()]).json()[0].clone()
}

#[test]
fn a_copy_is_private_and_never_the_capture_itself() {
    let dir = tempfile::tempdir().unwrap();
    let [input, copy, link] = ["in.pcap", "copy.pcapng", "link.pcap"].map(|name| dir.path().join(name));
    let original = fs::read(fixture("nak-write-rkey.pcap")).unwrap();
    fs::write(&input, &original).unwrap();
    std::os::unix::fs::symlink(&input, &link).unwrap();
    let done = run(&["pcap".into(), "annotate".into(), input.clone(), copy.clone()]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(fs::metadata(&copy).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(report(&copy)["findings"], report(&input)["findings"]);
    for command in ["annotate", "filter"] {
        for out in [&input, &link] {
            let done = run(&["pcap".into(), command.into(), input.clone(), out.clone()]);
            assert_eq!(done.code, Some(2), "{}", done.stderr);
            assert!(done.stderr.contains("name another file"), "{}", done.stderr);
        }
    }
    assert_eq!(fs::read(&input).unwrap(), original);
}

#[test]
fn a_pipe_is_read_twice_and_written() {
    let output = Command::new(ferroce())
        .args(["pcap", "filter", "-", "-", "--rule", "nak-fatal"])
        .stdin(fs::File::open(fixture("nak-write-rkey.pcap")).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.pcapng");
    fs::write(&copy, output.stdout).unwrap();
    assert_eq!(report(&copy)["frames"], 1);

    let mut cat = Command::new("cat")
        .arg(fixture("nak-write-rkey.pcap"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = Command::new(ferroce())
        .args(["pcap", "annotate", "-"])
        .arg(&copy)
        .stdin(cat.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(cat.wait().unwrap().success() && output.status.success(), "{output:?}");
    assert_eq!(
        report(&copy)["frames"],
        report(&fixture("nak-write-rkey.pcap"))["frames"]
    );
}

#[test]
fn exit_statuses_say_what_became_of_the_copy() {
    let dir = tempfile::tempdir().unwrap();
    let [cut, text, copy] = ["cut.pcap", "text", "copy.pcapng"].map(|name| dir.path().join(name));
    let mut bytes = fs::read(fixture("nak-write-rkey.pcap")).unwrap();
    bytes.pop();
    fs::write(&cut, bytes).unwrap();
    fs::write(&text, "this is no capture at all").unwrap();
    let filter = |input: &Path, more: &[&str]| {
        let mut args: Vec<PathBuf> = vec!["pcap".into(), "filter".into(), input.to_owned(), copy.clone()];
        args.extend(more.iter().map(PathBuf::from));
        run(&args)
    };
    let done = filter(&text, &[]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(!copy.exists(), "nothing is made of what can't be read");
    let done = filter(&cut, &[]);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("frames before are copied"), "{}", done.stderr);
    assert_eq!(report(&copy)["frames"], 7);
    assert_eq!(
        filter(&fixture("nak-write-rkey.pcap"), &["--rule", "stall"]).code,
        Some(3)
    );
    let done = filter(&cut, &["--rule", "nak-fatl"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("did you mean nak-fatal"), "{}", done.stderr);
    assert_eq!(filter(&cut, &["--from", "5", "--to", "4"]).code, Some(2));
}

#[test]
fn conversations_become_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("parts");
    let done = run(&["pcap".into(), "split".into(), fixture("rnbd.pcap"), out.clone()]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    assert_eq!(done.stdout.lines().count(), names.len());
    assert!(names.len() > 1 && names.iter().all(|path| report(path)["verdict"] == "good"));
    let again = run(&["pcap".into(), "split".into(), fixture("rnbd.pcap"), out]);
    assert_eq!(again.code, Some(1));
    assert!(again.stderr.contains("not empty"), "{}", again.stderr);
}

#[test]
fn an_anonymized_copy_is_judged_as_the_capture_and_repeated_with_its_seed() {
    let dir = tempfile::tempdir().unwrap();
    let [first, again, other] = ["first", "again", "other"].map(|name| dir.path().join(name));
    let input = fixture("nak-write-rkey.pcap");
    for (out, more) in [
        (&first, &["--seed", "x"][..]),
        (&again, &["--seed", "x"]),
        (&other, &[]),
    ] {
        let mut args: Vec<PathBuf> = vec!["pcap".into(), "anonymize".into(), input.clone(), out.clone()];
        args.extend(more.iter().map(PathBuf::from));
        let done = run(&args);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        assert_eq!(fs::metadata(out).unwrap().permissions().mode() & 0o777, 0o600);
        let (old, new) = (report(&input), report(out));
        for key in ["frames", "icrc_ok", "icrc_bad", "verdict"] {
            assert_eq!(old[key], new[key], "{key}");
        }
        assert!(!fs::read(out).unwrap().windows(4).any(|bytes| bytes == [10, 77, 0, 1]));
    }
    let [first, again, other] = [first, again, other].map(|path| fs::read(path).unwrap());
    assert!(first == again && first != other);
}

#[test]
#[ignore = "needs tshark"]
fn tshark_shows_the_comments() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.pcapng");
    let done = run(&[
        "pcap".into(),
        "annotate".into(),
        fixture("nak-write-rkey.pcap"),
        copy.clone(),
    ]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let shown = Command::new("tshark")
        .args([
            "-T",
            "fields",
            "-e",
            "frame.number",
            "-e",
            "frame.comment",
            "-Y",
            "frame.comment",
            "-r",
        ])
        .arg(&copy)
        .output()
        .unwrap();
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.starts_with("7\tferroce note nak-fatal: "), "{text}");
    assert_eq!(text.lines().count(), 1);
}
