//! Rings of packets: `--pcap-ring`, `--pcap-on`, SIGUSR2 and `ferroce pcap capture`.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use ferroce_tests::{
    checked::Checked,
    device::Pair,
    eventually, ferroce, fresh_address,
    perftest::{Sides, WriteBw},
    process::{Finished, Running, run},
};
use nix::{
    sys::signal::{self, Signal},
    unistd::Pid,
};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// The path that a capture was written to.
fn written(done: &Finished) -> PathBuf {
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    done.stdout.trim_end().into()
}

/// Returns whether a process has a socket open.
fn has_socket(pid: u32) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = open.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets
        .into_iter()
        .any(|target| target.to_string_lossy().starts_with("socket:"))
}

/// Checks that a file is good. Returns the judge's report.
fn good(file: &Path) -> Value {
    let report = judged(file);
    assert_eq!(report["verdict"], "good", "{report}");
    report
}

/// Checks that a file is its owner's alone, and has packets, with which nothing is wrong: it may be that only those of one direction were in
/// the ring. Returns the judge's report.
fn judged(file: &Path) -> Value {
    let mode = fs::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    let done = run(&["pcap", "check", "--json", file.to_str().unwrap()]);
    let report = done.json().remove(0);
    assert!(report["roce_frames"].as_u64() > Some(0), "{report}");
    assert_eq!(
        (&report["icrc_ok"], &report["complete"]),
        (&report["roce_frames"], &true.into())
    );
    assert_ne!(report["verdict"], "bad", "{report}");
    report
}

/// The file that a process has written of itself, once it has.
fn on_its_own(process: &Running, cause: &str) -> PathBuf {
    let find = || {
        let stderr = process.stderr();
        let line = stderr
            .lines()
            .find(|line| line.contains(" packets to ") && line.ends_with(cause))?;
        let (_, rest) = line.split_once(" packets to ")?;
        Some(PathBuf::from(rest.rsplit_once(": ")?.0))
    };
    eventually("the ring is written", || find().is_some());
    find().unwrap()
}

/// The frames of a file as `pcap show` has them.
fn shown(file: &Path) -> Vec<String> {
    let done = run(&["pcap", "show", file.to_str().unwrap()]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    done.stdout.lines().map(str::to_owned).collect()
}

#[test]
fn servers_and_mappings_are_captured_while_they_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("map.pcap");
    let ring = format!("1M,{}", file.display());
    let pair = Pair::start(
        &vec![0; MIB],
        "",
        &["--pcap-ring", "256K", "--threads", "2"],
        &["--session", "captured", "--pcap-ring", &ring],
    );
    let mut disk = Checked::new(&pair.socket, "", &pair.image);
    (0..10).for_each(|_| disk.works());

    // By its name, into the file that it was given.
    let done = run(&["pcap", "capture", "--of", "captured"]);
    assert_eq!(written(&done), file);
    assert!(
        done.stderr
            .starts_with(&format!("process {} captured: ", pair.map.id())),
        "{}",
        done.stderr
    );
    let report = good(&file);
    assert!(
        shown(&file)
            .iter()
            .any(|line| line.contains("RNBD read of 16384 bytes")),
        "the beginning of the session is in a ring that is large enough"
    );

    // By a pipe, to the judge.
    let mut capture_server = Command::new(ferroce())
        .args(["pcap", "capture", "-o", "-", "--of", &pair.serve.id().to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut check = Command::new(ferroce());
    check
        .args(["pcap", "check", "--json", "-"])
        .stdin(capture_server.stdout.take().unwrap());
    let judged = check.output().unwrap();
    assert!(
        judged.status.success() && capture_server.wait().unwrap().success(),
        "{judged:?}"
    );
    let judged: Value = serde_json::from_slice(&judged.stdout).unwrap();
    assert!(
        judged["frames"].as_u64() < report["frames"].as_u64(),
        "a smaller ring has fewer packets: {judged}"
    );

    // Who gives up waiting has changed no file, and is told at once of one that can't be.
    let kept = dir.path().join("kept.pcap");
    fs::write(&kept, "kept").unwrap();
    for (out, after) in [(&kept, Some("kept")), (&dir.path().join("new.pcap"), None)] {
        let mut waiting = Command::new(ferroce())
            .args(["pcap", "capture", "--of", "captured", "--on", "bad", "-o"])
            .arg(out)
            .spawn()
            .unwrap();
        eventually("it asks the process", || has_socket(waiting.id()));
        signal::kill(Pid::from_raw(waiting.id() as i32), Signal::SIGINT).unwrap();
        assert!(!waiting.wait().unwrap().success());
        assert_eq!(fs::read_to_string(out).ok().as_deref(), after);
    }
    let nowhere = dir.path().join("none/new.pcap");
    let done = run(&[
        "pcap",
        "capture",
        "--of",
        "captured",
        "--on",
        "bad",
        "-o",
        nowhere.to_str().unwrap(),
    ]);
    assert!(
        done.code == Some(1) && done.stderr.contains("none/new.pcap"),
        "{}",
        done.stderr
    );

    // By a signal, into the next file.
    pair.map.signal(Signal::SIGUSR2);
    let second = on_its_own(&pair.map, "on a signal");
    assert_eq!(second, dir.path().join("map-2.pcap"));
    good(&second);
    disk.works();
    assert_eq!((pair.map.stop().code, pair.serve.stop().code), (Some(0), Some(0)));
}

#[test]
fn a_path_that_fails_leaves_the_packets_before() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.pcap");
    let ring = format!("1M,{}", file.display());
    let pair = Pair::start(&vec![0; MIB], "", &[], &["--pcap-ring", &ring, "--pcap-on", "bad"]);
    let mut disk = Checked::new(&pair.socket, "", &pair.image);
    (0..3).for_each(|_| disk.works());
    assert!(!file.exists(), "nothing is wrong");
    // Of a server that is killed the broker would say that it is gone.
    pair.serve.signal(Signal::SIGSTOP);
    assert_eq!(on_its_own(&pair.map, "failed"), file);
    good(&file);
    let lines = shown(&file);
    let to_server = format!("{} > {}:", pair.client, pair.server);
    let repeated = lines
        .iter()
        .position(|line| line.contains(&to_server) && line.contains("repeated: "));
    let repeated = repeated.unwrap_or_else(|| panic!("nothing is repeated: {lines:#?}"));
    assert!(
        lines[repeated..].iter().all(|line| line.contains(&to_server)),
        "the server is stopped: {lines:#?}"
    );
    assert!(lines.iter().any(|line| line.contains("RNBD read of 16384 bytes")));
}

#[test]
fn a_program_whose_peer_is_killed_leaves_a_file_when_it_exits() {
    let dir = tempfile::tempdir().unwrap();
    let sides = Sides {
        server: fresh_address(),
        client: Some(fresh_address()),
    };
    let ring = format!("1M,{}", dir.path().join("%p.pcap").display());
    let start = |args: &[String]| {
        let mut args = args.to_vec();
        let options = ["--pcap-ring", &ring, "--pcap-on", "bad"].map(str::to_owned);
        args.splice(1..1, options);
        Running::start(&args)
    };
    let mut test = WriteBw::endless(&start, sides);
    test.works();
    let pid = test.client.id();
    let waiting = dir.path().join("waited.pcap");
    let waits = [
        "pcap",
        "capture",
        "--of",
        &pid.to_string(),
        "--on",
        "bad",
        "-o",
        waiting.to_str().unwrap(),
    ];
    let waits = Running::start(&waits);
    let of_name = run(&["pcap", "capture", "--of", "ib_write_bw"]);
    assert_eq!(
        of_name.stdout.lines().count(),
        2,
        "each process writes a file: {}",
        of_name.stderr
    );
    of_name.stdout.lines().for_each(|file| drop(judged(Path::new(file))));
    let several = run(&["pcap", "capture", "--of", "ib_write_bw", "-o", "-"]);
    assert_eq!((several.code, &*several.stdout), (Some(2), ""));
    assert!(
        several.stderr.contains(&format!("process {pid} ib_write_bw")),
        "{}",
        several.stderr
    );

    test.server.signal(Signal::SIGKILL);
    let client = test.client.end();
    assert_ne!(client.code, Some(0));
    let file = dir.path().join(format!("{pid}-2.pcap"));
    let cause = format!("packets to {}: a queue pair failed", file.display());
    assert!(client.stderr.contains(&cause), "{}", client.stderr);
    let waited = waits.end();
    assert_eq!(waited.code, Some(0), "{}", waited.stderr);
    for file in [&file, &waiting] {
        judged(file);
        let lines = shown(file);
        let mut requests = lines.iter().filter(|line| line.contains(" Write "));
        assert!(requests.next_back().unwrap().contains("repeated: "), "{lines:?}");
    }
}

#[test]
fn what_is_missing_is_explained() {
    let alone = Running::start(&["bench", "--json", "--server", "--addr", &fresh_address().to_string()]);
    for (of, text) in [
        (alone.id().to_string(), "--pcap-ring SIZE"),
        ("nobody".into(), "no ring of packets is kept by nobody"),
        ("/nonexistent".into(), "/nonexistent: No such file"),
        ("/etc/passwd".into(), "neither a control socket"),
        ("/tmp/".into(), "no broker runs there"),
    ] {
        let done = run(&["pcap", "capture", "--of", &of]);
        assert_eq!((done.code, &*done.stdout), (Some(1), ""), "{of}");
        assert!(done.stderr.contains(text), "{of}: {}", done.stderr);
    }
    for wrong in [
        &["--pcap-ring", "1K"][..],
        &["--pcap-ring", "1M,"],
        &["--pcap-ring", "1M,/nonexistent/x.pcap"],
        &["--pcap-on", "bad"],
        &["--pcap-ring", "1M", "--pcap-on", "good"],
        &["--pcap-ring", "1M", "--pcap", "x.pcap"],
    ] {
        let done = run(&[&["bench", "write", "-n", "1"], wrong].concat());
        assert_eq!(done.code, Some(2), "{wrong:?}: {}", done.stderr);
        assert!(done.stderr.contains("--pcap"), "{wrong:?}: {}", done.stderr);
    }
}
