//! The files for Wireshark: the plugin, and the extcap program.
//!
//! Tests that need tshark or CAP_NET_RAW are ignored by default. To run them as root, install the package tshark, and:
//!
//! ```sh
//! cargo test -p ferroce-tests --test it wireshark -- --include-ignored
//! ```

use std::{
    fs::{self, File},
    net::UdpSocket,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use ferroce_tests::{
    ferroce,
    process::{Finished, run},
    root,
};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use roce_pcap::Capture;

fn dist() -> PathBuf {
    root().join("ferroce/dist/wireshark")
}

fn fixture(name: &str) -> PathBuf {
    root().join("pcap-fixtures").join(name)
}

/// Fields of all frames as tshark shows them with the plugin, a line each, separated by tabs.
fn dissected(file: &Path, fields: &[&str], filter: &str) -> Vec<String> {
    let script = format!("lua_script:{}", dist().join("ferroce.lua").display());
    let mut tshark = Command::new("tshark");
    tshark.args(["-X", &script, "-T", "fields", "-Y", filter]);
    for field in fields {
        tshark.args(["-e", field]);
    }
    let out = tshark.arg("-r").arg(file).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !errors.contains("Lua"), "{errors}");
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs tshark"]
fn tshark_finds_the_same_icrcs_right_and_wrong() {
    let names = fs::read_dir(fixture("")).unwrap().map(|e| e.unwrap().path());
    let files: Vec<_> = names
        .filter(|path| path.extension().is_some_and(|e| e == "pcap"))
        .collect();
    assert!(files.len() > 50);
    for path in files {
        let report = &run(&["pcap".into(), "check".into(), "--json".into(), path.clone()]).json()[0];
        let found = dissected(&path, &["ferroce.icrc.status"], "ferroce.icrc.status");
        let count = |status: &str| found.iter().filter(|found| *found == status).count();
        assert_eq!(report["icrc_ok"], count("ok"), "{}", path.display());
        assert_eq!(report["icrc_bad"], count("bad"), "{}", path.display());
        assert_eq!(report["roce_frames"], found.len(), "{}", path.display());
    }
}

#[test]
#[ignore = "needs tshark"]
fn tshark_shows_requests_of_rtrs_and_rnbd() {
    let file = fixture("rnbd.pcap");
    let fields = [
        "ferroce.rtrs.type",
        "ferroce.rtrs.permit",
        "ferroce.rnbd.type",
        "ferroce.rnbd.op",
        "ferroce.rnbd.lba",
    ];
    let all = dissected(&file, &fields, "ferroce.rtrs.type || ferroce.rnbd.type");
    let expected = [
        "connection request\t\t\t\t",
        "connection response\t\t\t\t",
        "connection request\t\t\t\t",
        "connection response\t\t\t\t",
        "session information request\t\t\t\t",
        "session information response\t\t\t\t",
        "read request\t0\tsession info\t\t",
        "\t\tsession info response\t\t",
        "response,new key\t0,0\t\t\t",
        "read request\t0\topen\t\t",
        "\t\topen response\t\t",
        "response,new key\t0,0\t\t\t",
        "read request\t1\tI/O\tread\t0",
    ];
    assert_eq!(all[..expected.len()], expected);
    let of = |kind: &str| all.iter().filter(|line| line.starts_with(kind)).count();
    assert!(of("write request") > 0);
    assert_eq!(of("read request") + of("write request"), of("response"));
    assert!(dissected(&file, &["frame.number"], "ferroce.rtrs.errno > 0").is_empty());
}

#[test]
#[ignore = "needs tshark"]
fn tshark_shows_messages_of_rds() {
    let all = dissected(
        &fixture("rds.pcap"),
        &["ferroce.rds.type", "ferroce.rds.dport"],
        "ferroce.rds.type",
    );
    let of = |kind: &str| all.iter().filter(|line| line.starts_with(kind)).count();
    assert_eq!(of("data") + of("acknowledgement") + of("congestion map"), all.len());
    assert!(
        of("data") > 10 && of("acknowledgement") > 0 && of("congestion map") > 0,
        "{all:?}"
    );
    assert!(dissected(&fixture("rnbd.pcap"), &["frame.number"], "ferroce.rds.type").is_empty());
}

#[test]
fn the_extcap_program_lists_interfaces_and_what_they_take() {
    let extcap = |args: &[&str]| -> Finished {
        let mut all = vec!["pcap", "extcap"];
        all.extend(args);
        run(&all)
    };
    let listed = extcap(&["--extcap-interfaces", "--extcap-version=4.0"]);
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    assert!(listed.stdout.starts_with("extcap {version="), "{}", listed.stdout);
    assert!(
        listed.stdout.contains("interface {value=ferroce-lo}{display="),
        "{}",
        listed.stdout
    );
    let dlts = extcap(&["--extcap-interface", "ferroce-lo", "--extcap-dlts"]);
    assert!(
        dlts.stdout.starts_with("dlt {number=1}{name=EN10MB}"),
        "{}",
        dlts.stdout
    );
    let config = extcap(&["--extcap-interface", "ferroce-lo", "--extcap-config"]);
    assert!(config.stdout.contains("{call=--no-judge}"), "{}", config.stdout);
    let missing = extcap(&["--extcap-interface", "ferroce-none0", "--extcap-dlts"]);
    assert_eq!(missing.code, Some(1));
    assert!(
        missing.stderr.contains("none0: no interface that is up"),
        "{}",
        missing.stderr
    );
    assert_eq!(extcap(&[]).code, Some(2));
    assert_eq!(extcap(&["--extcap-interface", "ferroce-lo", "--capture"]).code, Some(2));
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn frames_are_judged_while_they_are_captured() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let mut extcap = Command::new(dist().join("extcap/ferroce"))
        .env("FERROCE", ferroce())
        .args(["--capture", "--extcap-interface", "ferroce-lo", "--fifo"])
        .arg(&fifo)
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    // The header comes when the socket is open; each frame sent from then on is captured.
    let mut capture = Capture::new(File::open(&fifo).unwrap()).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut packet = vec![4, 0, 0xff, 0xff, 0, 0, 0, 17, 0x80, 0, 0, 1];
    packet.resize(12 + 16 + 4, 0);
    let mine = |frame: &[u8]| frame.len() == 14 + 28 + 32 && frame[34..36] == port.to_be_bytes();
    // To another port first: that is not captured.
    socket.send_to(&packet, "127.0.0.1:4792").unwrap();
    for _ in 0..2 {
        socket.send_to(&packet, "127.0.0.1:4791").unwrap();
        loop {
            let frame = capture.next_frame().unwrap().unwrap();
            assert_eq!(frame.data[36..38], 4791u16.to_be_bytes());
            if mine(frame.data) {
                let [comment] = frame.comments() else {
                    panic!("{:?}", frame.comments())
                };
                assert!(comment.starts_with("ferroce error frame-icrc: "), "{comment}");
                assert!(frame.time_ns > 1_700_000_000_000_000_000);
                break;
            }
        }
    }
    // Wireshark closes the pipe; the program ends.
    drop(capture);
    assert!(extcap.wait().unwrap().success());
}

#[test]
fn the_extcap_program_ends_by_a_signal_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let mut extcap = Command::new(ferroce())
        .args([
            "pcap",
            "extcap",
            "--capture",
            "--extcap-interface",
            "ferroce-lo",
            "--fifo",
        ])
        .arg(&fifo)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Without the right to capture it has ended by itself.
    let _ = kill(Pid::from_raw(extcap.id() as i32), Signal::SIGTERM);
    assert!(!extcap.wait().unwrap().success());
}
