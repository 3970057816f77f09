//! `ferroce lnet`: a node that serves, and pings of it and of what is none.

use std::fs;

use ferroce_tests::{
    fresh_address,
    process::{Finished, Running, run},
};
use lnet_host::{Buffer, Get, LnetNode, NodeOptions, Put};
use nix::sys::signal::Signal;

fn nid() -> String {
    format!("{}@o2ib", fresh_address())
}

/// Pings NIDs from an address of its own.
fn ping(args: &[&str], nids: &[&str]) -> Finished {
    let own = fresh_address().to_string();
    run(&[&["lnet", "ping", "-I", &own, "-W", "2"], args, nids].concat())
}

#[test]
fn a_node_that_serves_is_pinged() {
    let served = nid();
    let mut serving = Running::start(&["lnet", "serve", "--json", "--peer-credits", "4", &served]);
    assert_eq!(serving.event("lnet_listening")["nid"], served);
    let second = run(&["lnet", "serve", &served]);
    assert!(
        second.code == Some(1) && second.stderr.contains("another program has RoCE there"),
        "{second:?}"
    );

    let pinged = ping(&["--json", "-c", "2", "-i", "0.01"], &[&served]);
    assert_eq!((pinged.code, pinged.stderr.as_str()), (Some(0), ""));
    let answers = pinged.json();
    assert_eq!(answers.len(), 2);
    // It has asked for 8, and asked again.
    let first = &answers[0];
    assert_eq!((&first["nid"], &first["number"]), (&served.clone().into(), &1.into()));
    assert_eq!(
        (&first["version"], &first["queue_depth"], &first["fragments"]),
        (&2.into(), &4.into(), &257.into())
    );
    let interfaces = first["interfaces"].as_array().unwrap();
    assert_eq!(
        (&interfaces[0]["nid"], &interfaces[0]["status"]),
        (&"0@lo".into(), &().into())
    );
    assert_eq!(
        (&interfaces[1]["nid"], &interfaces[1]["status"]),
        (&served.clone().into(), &"up".into())
    );
    assert!(
        serving.event("lnet_refused")["why"]
            .as_str()
            .unwrap()
            .contains("8 messages")
    );
    let connected = serving.event("lnet_up");
    assert_eq!(connected["queue_depth"], 4);
    assert_eq!(serving.event("lnet_pinged")["peer"], connected["peer"]);
    assert_eq!(serving.event("lnet_down")["peer"], connected["peer"]);

    let stat = run(&["stat", "--json", "--pid", &serving.id().to_string()]).json();
    let node = &stat[0]["lnet"][0];
    assert_eq!(
        (&node["nid"], &node["counters"]["pings"]),
        (&served.clone().into(), &2.into())
    );
    assert_eq!(
        (&node["rejects_sent"]["MSG_QUEUE_SIZE"], &node["rejects_sent"]["FATAL"]),
        (&1.into(), &0.into())
    );

    let lines = ping(&[], &[&served]).stdout;
    let lines: Vec<&str> = lines.lines().collect();
    assert!(
        lines[0].starts_with(&format!("{served}    1: ")) && lines[0].ends_with(" usec"),
        "{lines:?}"
    );
    let details = [
        "  o2iblnd version 2, queue depth 4, 257 fragments",
        "  features 0x1e: NI_STATUS, RTE_DISABLED, MULTI_RAIL, DISCOVERY",
        "  0@lo",
    ];
    assert_eq!(lines[1..4], details);
    assert_eq!(lines[4..], [format!("  {served} up")]);

    serving.signal(Signal::SIGINT);
    let ended = serving.end();
    let summary = ended.json().pop().unwrap();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(
        (&summary["event"], &summary["received"], &summary["dropped"]),
        (&"summary".into(), &3.into(), &0.into())
    );
}

#[test]
fn a_ping_says_why_there_is_no_answer() {
    let (served, rds, absent) = (nid(), fresh_address().to_string(), nid());
    let mut serving = Running::start(&["lnet", "serve", "--json", &served]);
    serving.event("lnet_listening");
    // RoCE, and nobody on port 987.
    let home = tempfile::tempdir().unwrap();
    let mut other = Running::start(&[
        "rds",
        "node",
        "--json",
        "--stay",
        "--addr",
        &rds,
        "--dir",
        &home.path().display().to_string(),
    ]);
    other.event("rds_opened");
    let wrong_net = format!("{served}7");
    let pinged = ping(&["--json"], &[&absent, &rds, &served]);
    assert_eq!((pinged.code, pinged.stderr.as_str()), (Some(1), ""));
    let outcomes = pinged.json();
    assert_eq!(
        (&outcomes[0]["cause"], &outcomes[1]["cause"]),
        (&"no_roce".into(), &"no_listener".into())
    );
    assert!(outcomes[2]["usec"].is_u64(), "{outcomes:?}");
    let pinged = ping(&[], &[&wrong_net]);
    assert_eq!(pinged.code, Some(1));
    assert!(
        pinged.stdout.contains("ERROR") && pinged.stdout.contains("lctl list_nids"),
        "{}",
        pinged.stdout
    );
    let own = run(&["lnet", "ping", "-I", "192.0.2.1", "192.0.2.1"]);
    assert!(own.code == Some(2) && own.stderr.contains("own address"), "{own:?}");
    assert_eq!(run(&["lnet", "ping", "192.0.2.1@tcp"]).code, Some(2));
    for mut running in [serving, other] {
        running.signal(Signal::SIGTERM);
        running.wait();
        assert_eq!(running.end().code, Some(0));
    }
}

#[test]
fn nodes_are_tested_with_data_each_way() {
    let (served, absent) = (nid(), nid());
    let mut serving = Running::start(&["lnet", "serve", "--json", &served]);
    serving.event("lnet_listening");
    let test = |args: &[&str], nids: &[&str]| {
        let own = fresh_address().to_string();
        run(&[&["lnet", "selftest", "-I", &own, "--json", "-W", "2"], args, nids].concat())
    };
    for (kind, data) in [("ping", 0), ("read", 65536), ("write", 65536)] {
        let tested = test(
            &["--test", kind, "-s", "64k", "--check", "full", "-n", "20"],
            &[&served],
        );
        assert_eq!((tested.code, tested.stderr.as_str()), (Some(0), ""), "{tested:?}");
        let events = tested.json();
        assert!(events.iter().any(|event| event["event"] == "begun"), "{events:?}");
        let summary = events.last().unwrap();
        // Eight units with as many requests each.
        let expected = ("summary", 24, 0, 24 * data);
        let number = |key: &str| summary[key].as_u64().unwrap();
        let found = (
            summary["event"].as_str().unwrap(),
            number("done"),
            number("failed"),
            number("bytes"),
        );
        assert_eq!(found, expected, "{kind}");
    }
    let tested = test(&["--test", "ping", "-n", "1"], &[&served, &absent]);
    assert_eq!(tested.code, Some(1));
    let events = tested.json();
    assert!(
        events
            .iter()
            .any(|event| event["event"] == "lost" && event["nid"] == absent),
        "{events:?}"
    );
    assert_eq!(events.last().unwrap()["done"], 1);
    let too_long = test(&["-s", "2M"], &[&served]);
    assert!(
        too_long.code == Some(2) && too_long.stderr.contains("1 MiB"),
        "{too_long:?}"
    );
    serving.signal(Signal::SIGTERM);
    serving.wait();
    assert_eq!(serving.end().code, Some(0));
}

#[test]
fn peers_write_sinks_and_read_sources() {
    let (served, dir) = (nid(), tempfile::tempdir().unwrap());
    // More than one message has.
    let content: Vec<u8> = (0..5000u32).map(|n| (n % 251) as u8).collect();
    let file = dir.path().join("data");
    fs::write(&file, &content).unwrap();
    let source = format!("51:{}", file.display());
    let refused = run(&["lnet", "serve", "--source", &source, &served]);
    assert!(
        refused.code == Some(2) && refused.stderr.contains("--no-selftest"),
        "{refused:?}"
    );
    let args = [
        "--json",
        "--no-selftest",
        "--sink",
        "60:4k",
        "--source",
        &source,
        &served,
    ];
    let mut serving = Running::start(&[&["lnet", "serve"], &args[..]].concat());
    serving.event("lnet_listening");

    let node = LnetNode::open(NodeOptions::new(nid().parse().unwrap())).unwrap();
    let peer = served.parse().unwrap();
    let put = Put {
        peer,
        portal: 60,
        match_bits: 9,
        hdr_data: 7,
        offset: 4000,
        source: Buffer::allocate(100).unwrap(),
        ack: true,
    };
    assert_eq!(node.put(&put).unwrap().wait().unwrap(), 96, "the memory ends there");
    let event = serving.event("lnet_put");
    let found = ["portal", "match_bits", "hdr_data", "offset", "bytes"].map(|key| event[key].as_u64().unwrap());
    assert_eq!(found, [60, 9, 7, 4000, 96]);
    for (offset, room, len) in [(0, 5000, 5000), (4990, 272, 10)] {
        let sink = Buffer::allocate(room).unwrap();
        let get = Get {
            peer,
            portal: 51,
            match_bits: u64::MAX,
            offset,
            sink: sink.clone(),
        };
        assert_eq!(node.get(&get).unwrap().wait().unwrap(), len);
        let from = offset as usize;
        assert_eq!(sink.to_vec()[..len as usize], content[from..from + len as usize]);
        assert_eq!(serving.event("lnet_got")["bytes"], len);
    }
    let own = fresh_address().to_string();
    let tested = run(&["lnet", "selftest", "-I", &own, "-W", "0.2", "-n", "1", &served]);
    assert_eq!(tested.code, Some(1), "{tested:?}");
    drop(node);
    serving.signal(Signal::SIGTERM);
    serving.wait();
    let events = serving.end().json();
    let portals: Vec<_> = events.iter().filter(|event| event["event"] == "lnet_portal").collect();
    let counts = |index: usize| {
        let portal = portals[index];
        let number = |key: &str| portal[key].as_u64().unwrap();
        let kind = portal["kind"].as_str().unwrap().to_owned();
        (
            kind,
            number("portal"),
            number("done"),
            number("bytes"),
            number("failed"),
        )
    };
    let expected = [("sink".to_owned(), 60, 1, 96, 0), ("source".to_owned(), 51, 2, 5010, 0)];
    assert_eq!([counts(0), counts(1)], expected);
    let summary = events.last().unwrap();
    let moved =
        ["requests", "failed_requests", "bytes_written", "bytes_read"].map(|key| summary[key].as_u64().unwrap());
    assert_eq!(moved, [3, 0, 96, 5010]);
}
