//! Help, usage errors and `doctor`.

use std::{net::UdpSocket, process::Command};

use ferroce_tests::{
    device::image,
    ferroce, fresh_address,
    process::{Running, run},
};

#[test]
fn every_command_has_help_with_examples() {
    let top = run(&["--help"]);
    assert_eq!(top.code, Some(0));
    assert!(top.stdout.contains("Exit status"), "{}", top.stdout);
    for command in ["serve", "map", "doctor", "bench"] {
        assert!(top.stdout.contains(command), "{command} is not in the overview");
        let help = run(&[command, "--help"]);
        assert_eq!(help.code, Some(0), "{command}: {}", help.stderr);
        let example = format!("\n  ferroce {command} ");
        assert!(help.stdout.contains(&example), "{command}:\n{}", help.stdout);
    }
    assert!(run(&["pcap", "check", "--help"]).stdout.contains("Examples:"));
}

#[test]
fn wrong_usage_is_status_2() {
    for args in [
        &["nonsense"][..],
        &["pcap", "check"],
        &["serve"],
        &["serve", "--addr", "127.0.0.1", "--export", "name-without-path"],
        &["serve", "--addr", "not an address", "--export", "a=/dev/null"],
        &["map", "--session", "s"],
        &[
            "map",
            "--session",
            "s",
            "--path",
            "127.0.0.2,127.0.0.1",
            "--device",
            "d",
            "--attach",
            "/dev/sda",
        ],
        &["doctor", "--peer", "not an address"],
        &["run", "--pcap", "/nowhere/wire.pcap", "--", "true"],
    ] {
        let done = run(args);
        assert_eq!(done.code, Some(2), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains("error:"), "{args:?}: {}", done.stderr);
    }
}

/// In a network namespace the kernel's NBD can't be reached, whatever else this machine has.
#[test]
fn attach_says_what_is_missing_before_anything_is_mapped() {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net"]).arg(ferroce()).args([
        "map",
        "--session",
        "s",
        "--path",
        "127.0.0.2,127.0.0.1",
        "--device",
        "d",
        "--attach",
    ]);
    let done = Running::start_command(command, "map --attach".into()).end();
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    for word in ["--attach: ", "NBD", "docs/block/disk.md"] {
        assert!(done.stderr.contains(word), "{word}: {}", done.stderr);
    }
}

#[test]
fn former_spellings_work_and_are_not_shown() {
    // Nobody has this address (RFC 5737), so that the option has been understood if it is what can't be had.
    const NOBODY: &str = "203.0.113.77";
    let dir = tempfile::tempdir().unwrap();
    let export = format!("a={}", image(dir.path(), "a", &[0; 512]).display());
    for args in [
        &["serve", "--addr", NOBODY, "--export", &export][..],
        &["serve", "--listen", NOBODY, "--export", &export],
        &["bench", "--server", "--addr", NOBODY],
        &["bench", "--listen", NOBODY],
        &["bench", "write", "--addr", NOBODY],
        &["bench", "write", "--local", NOBODY],
    ] {
        let done = run(args);
        assert_eq!(done.code, Some(1), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains(NOBODY), "{args:?}: {}", done.stderr);
    }
    for command in ["serve", "bench", "map", "run", "doctor"] {
        let help = run(&[command, "--help"]).stdout;
        assert!(help.contains("--addr <"), "{command}: {help}");
        assert!(
            !help.contains(" --listen") && !help.contains("--local"),
            "{command}: {help}"
        );
    }
}

#[test]
fn every_command_reads_path_mtus_alike() {
    for args in [
        &["serve", "--addr", "127.0.0.1", "--export", "a=/a"][..],
        &["map", "--session", "s", "--path", "127.0.0.1", "--device", "d"],
        &["bench", "write"],
        &["run"],
    ] {
        let done = run(&[
            args,
            &["--mtu", "1500"],
            &["--", "true"][..usize::from(args[0] == "run") * 2],
        ]
        .concat());
        assert_eq!(done.code, Some(2), "{args:?}: {}", done.stderr);
        assert!(
            done.stderr.contains("256, 512, 1024, 2048 or 4096"),
            "{args:?}: {}",
            done.stderr
        );
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(run(&["man".as_ref(), dir.path().as_os_str()]).code, Some(0));
    for page in ["ferroce.1", "ferroce-serve.1", "ferroce-map.1", "ferroce-pcap-check.1"] {
        let text = std::fs::read_to_string(dir.path().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"));
        assert!(text.contains(".TH"), "{page} is no manual page");
    }
}

#[test]
fn doctor_names_the_process_that_has_the_port() {
    let addr = fresh_address();
    let _holder = UdpSocket::bind((addr, 4791)).unwrap();
    let done = run(&["doctor", "--json", "--addr", &addr.to_string()]);
    assert_eq!(done.code, Some(1), "{}", done.stdout);
    let report = &done.json()[0];
    assert_eq!(report["ok"], false);
    let port = report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|c| c["id"] == "port-4791")
        .unwrap();
    assert_eq!(port["status"], "fail");
    let summary = port["summary"].as_str().unwrap();
    assert!(
        summary.contains(&format!("process {}", std::process::id())),
        "{summary}"
    );
    assert!(port["advice"].is_string());
}

#[test]
fn options_before_the_program_are_ours_and_those_after_it_its_own() {
    let unknown = run(&["run", "--frobnicate", "--", "true"]);
    assert_eq!(unknown.code, Some(2));
    assert!(
        unknown.stderr.contains("unexpected argument '--frobnicate'"),
        "{}",
        unknown.stderr
    );
    let script = ["run", "sh", "-c", "echo \"$@\"", "sh", "-v", "--frobnicate"];
    let passed = run(&script);
    assert_eq!(
        (passed.code, &*passed.stdout),
        (Some(0), "-v --frobnicate\n"),
        "{}",
        passed.stderr
    );
    let name = run(&["run", "--device-name", "a b", "true"]);
    assert!(
        name.code == Some(2) && name.stderr.contains("no name of a device"),
        "{}",
        name.stderr
    );
    let link = run(&["run", "--", "/nonexistent/rdma", "link"]);
    assert!(
        link.code == Some(127) && link.stderr.contains("`ferroce link` shows them"),
        "{}",
        link.stderr
    );
}

#[test]
fn doctor_reports_every_check() {
    let addr = fresh_address().to_string();
    let done = run(&[
        "doctor",
        "--json",
        "--addr",
        &addr,
        "--peer",
        &fresh_address().to_string(),
    ]);
    let report = &done.json()[0];
    let checks = report["checks"].as_array().unwrap();
    for id in [
        "port-4791",
        "rdma-devices",
        "socket-buffers",
        "mtu",
        "devices",
        "gso-gro",
        "route",
        "path-mtu",
        "nat",
    ] {
        assert!(checks.iter().any(|c| c["id"] == id), "no check {id}: {report}");
    }
    for check in checks.iter().filter(|c| c["status"] != "ok") {
        assert!(check["advice"].is_string(), "what to do is missing: {check}");
    }
    // A machine with rdma_rxe loaded fails that one check; nothing else may fail on loopback.
    for check in checks.iter().filter(|c| c["status"] == "fail") {
        assert_eq!(check["id"], "rdma-devices", "{check}");
    }
}
