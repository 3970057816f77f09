//! `ferroce bench` as a program sees it: one JSON object per measurement, clear errors.

use ferroce_tests::{
    fresh_address,
    process::{Finished, Running, run},
};
use serde_json::Value;

/// An address whose next ones nobody else takes: within one process up to four in a row are used.
fn local() -> String {
    ferroce_loopback::addresses(4).to_string()
}

fn measurements(done: &Finished) -> Vec<Value> {
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    done.json()
}

fn check(m: &Value, op: &str, bytes: u64) {
    assert_eq!((&m["op"], &m["bytes"]), (&op.into(), &bytes.into()), "{m}");
    for key in ["depth", "qps", "mtu", "messages", "packets", "retransmits"] {
        assert!(m[key].is_u64(), "{key}: {m}");
    }
    for key in ["gbytes_per_s", "msgs_per_s", "seconds"] {
        assert!(m[key].as_f64().unwrap() > 0.0, "{key}: {m}");
    }
    let latency = &m["latency_us"];
    assert!(latency["p50"].as_f64().unwrap() > 0.0, "{m}");
    assert!(latency["p99"].as_f64() >= latency["p50"].as_f64(), "{m}");
    assert_eq!(m["icrc_errors"], 0, "{m}");
}

#[test]
fn every_operation_within_one_process() {
    for op in ["write", "read", "send"] {
        let done = run(&[
            "bench",
            op,
            "--addr",
            &local(),
            "--size",
            "64K,1000",
            "-n",
            "40",
            "--qps",
            "2",
            "--depth",
            "4",
            "--json",
        ]);
        let all = measurements(&done);
        assert_eq!(all.len(), 2);
        check(&all[0], op, 65_536);
        check(&all[1], op, 1000);
        let shape = (&all[0]["qps"], &all[0]["depth"], &all[0]["messages"]);
        assert_eq!(shape, (&2.into(), &4.into(), &40.into()));
    }
}

#[test]
fn lost_packets_are_sent_again() {
    let fault = ["--fault", "loss,nth=30,dir=tx"];
    let args = [
        "bench",
        "write",
        "--addr",
        &local(),
        "--size",
        "64K",
        "-n",
        "40",
        "--json",
    ];
    let all = measurements(&run(&[&args[..], &fault].concat()));
    check(&all[0], "write", 65_536);
    assert!(all[0]["retransmits"].as_u64().unwrap() > 0, "{}", all[0]);
}

#[test]
fn write_names_its_ratio_to_the_ceiling() {
    let done = run(&["bench", "write", "--addr", &local(), "--seconds", "0.4", "--json"]);
    let all = measurements(&done);
    check(&all[0], "write", 1 << 20);
    assert!(all[0]["ceiling_gbytes_per_s"].as_f64().unwrap() > 0.0);
    assert!(all[0]["ratio_to_ceiling"].as_f64().unwrap() > 0.0);
    let done = run(&["bench", "ceiling", "--addr", &local(), "--seconds", "0.1", "--json"]);
    let all = measurements(&done);
    assert_eq!((&all[0]["op"], &all[0]["icrc_errors"]), (&"ceiling".into(), &0.into()));
    assert!(all[0]["packets"].as_u64().unwrap() > 0);
}

#[test]
fn latency_stands_beside_bare_udp() {
    let done = run(&["bench", "latency", "--addr", &local(), "-n", "50", "--json"]);
    let all = measurements(&done);
    let ops: Vec<_> = all.iter().map(|m| m["op"].as_str().unwrap()).collect();
    assert_eq!(ops, ["udp_lat", "write_lat", "send_lat"]);
    for m in &all {
        check(m, m["op"].as_str().unwrap(), 64);
    }
}

#[test]
fn between_two_processes() {
    let (passive, active) = (fresh_address().to_string(), fresh_address().to_string());
    let mut server = Running::start(&["bench", "--server", "--addr", &passive, "--json"]);
    let event = server.event("listening");
    assert!(event["address"].as_str().unwrap().starts_with(&passive), "{event}");
    for op in ["write", "read", "send", "latency"] {
        let done = run(&[
            "bench",
            op,
            "--connect",
            &passive,
            "--addr",
            &active,
            "-n",
            "30",
            "--json",
        ]);
        let all = measurements(&done);
        if op == "latency" {
            assert_eq!(all.len(), 2);
        } else {
            check(&all[0], op, 1 << 20);
            assert!(all[0].get("ratio_to_ceiling").is_none());
        }
    }
    assert_eq!(server.stop().code, Some(0));
}

#[test]
fn errors_say_what_to_do() {
    let (nobody, active) = (fresh_address().to_string(), fresh_address().to_string());
    let done = run(&["bench", "write", "--connect", &nobody, "--addr", &active, "-n", "1"]);
    assert_eq!(done.code, Some(1));
    assert!(
        done.stderr.contains("UDP port 4791 is unreachable") && done.stderr.contains("--server"),
        "{}",
        done.stderr
    );
    for args in [
        &["bench"][..],
        &["bench", "write", "--mtu", "1000"],
        &["bench", "write", "--connect", "no where"],
        &["bench", "ceiling", "--connect", "127.0.0.1"],
    ] {
        assert_eq!(run(args).code, Some(2), "{args:?}");
    }
}
