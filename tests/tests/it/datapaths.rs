//! `--datapath raw` and `packet`: over loopback, and between hosts on a cable, with and without a VLAN.

use std::process::Command;

use ferroce_tests::{
    device::Pair,
    ferroce,
    network::Namespace,
    pattern,
    process::{Running, run},
};

const KINDS: [&str; 3] = ["udp", "raw", "packet"];

/// Two hosts on a cable: their `near` devices.
struct Hosts {
    a: Namespace,
    b: Namespace,
}

impl Hosts {
    fn new() -> Self {
        let (a, b) = (Namespace::new(&[]), Namespace::new(&[]));
        a.link_to(&b, "near", "near");
        for (host, number, link) in [(&a, 1, "02:00:00:00:00:01"), (&b, 2, "02:00:00:00:00:02")] {
            host.ip(&format!("link set near address {link}"));
            host.ip(&format!("addr add 10.8.0.{number}/24 dev near"));
            host.ip(&format!("addr add fd08::{number}/64 dev near nodad"));
            host.ip("link set near up");
        }
        Self { a, b }
    }
}

/// Writes, reads and sends between two processes; `hosts` are the addresses.
fn exchange(a: &Namespace, from: [&str; 2], b: &Namespace, at: [&str; 2]) {
    let ([addr, datapath], [server, theirs]) = (from, at);
    let mut passive = b.run(&["bench", "--server", "--json", "--addr", server, "--datapath", theirs]);
    passive.event("listening");
    for op in ["write", "read", "send"] {
        let args = [
            "bench",
            op,
            "--json",
            "--connect",
            server,
            "--addr",
            addr,
            "--datapath",
            datapath,
            "--size",
            "1000,256K",
            "-n",
            "20",
        ];
        let done = a.run(&args).end();
        assert_eq!(done.code, Some(0), "{op} by {datapath} to {theirs}: {}", done.stderr);
        let all = done.json();
        assert_eq!(all.len(), 2, "{}", done.stdout);
        for m in all {
            assert_eq!((&m["messages"], &m["icrc_errors"]), (&20.into(), &0.into()), "{m}");
        }
    }
    assert_eq!(passive.stop().code, Some(0));
}

#[test]
#[ignore = "makes network namespaces"]
fn hosts_on_a_cable_use_any_datapath() {
    let hosts = Hosts::new();
    for [ours, theirs] in [
        ["raw", "udp"],
        ["packet", "udp"],
        ["udp", "raw"],
        ["udp", "packet"],
        ["raw", "raw"],
        ["packet", "packet"],
        ["raw", "packet"],
    ] {
        exchange(&hosts.a, ["10.8.0.1", ours], &hosts.b, ["10.8.0.2", theirs]);
        exchange(&hosts.a, ["fd08::1", ours], &hosts.b, ["fd08::2", theirs]);
        // The link address of the peer is found again.
        hosts.a.ip("neigh flush dev near");
    }
}

/// Both hosts tag frames, or one does and the other has an interface in the VLAN.
#[test]
#[ignore = "makes network namespaces"]
fn frames_of_a_vlan_are_tagged() {
    let hosts = Hosts::new();
    let tagged = "packet,vlan=5";
    exchange(&hosts.a, ["10.8.0.1", tagged], &hosts.b, ["10.8.0.2", tagged]);
    exchange(&hosts.a, ["fd08::1", tagged], &hosts.b, ["fd08::2", tagged]);
    // Outside of it, and in another, there is nobody.
    let mut passive = hosts.b.run(&[
        "bench",
        "--server",
        "--json",
        "--addr",
        "10.8.0.2",
        "--datapath",
        tagged,
    ]);
    passive.event("listening");
    hosts.a.ip("addr add 10.8.0.3/24 dev near");
    let others = [["10.8.0.1", "packet,vlan=6"], ["10.8.0.3", "packet"]].map(|[addr, datapath]| {
        let args = [
            "bench",
            "write",
            "--connect",
            "10.8.0.2",
            "--addr",
            addr,
            "--datapath",
            datapath,
            "-n",
            "1",
        ];
        hosts.a.run(&args)
    });
    for done in others.map(Running::end) {
        assert_eq!(done.code, Some(1), "{}", done.stdout);
        assert!(done.stderr.contains("no answer"), "{}", done.stderr);
    }
    assert_eq!(passive.stop().code, Some(0));

    let vlan = "link add link near name near.5 type vlan id 5";
    let can = hosts.b.command("ip").args(vlan.split(' ')).output().unwrap();
    if !can.status.success() {
        eprintln!(
            "not run, this kernel has no VLAN interfaces: {}",
            String::from_utf8_lossy(&can.stderr)
        );
        return;
    }
    hosts.b.ip("link set near.5 up");
    hosts.b.ip("addr add 10.8.5.2/24 dev near.5");
    // Nobody answers ARP in the VLAN on the first host, nor outside of it on the second.
    hosts.b.ip("neigh add 10.8.5.1 lladdr 02:00:00:00:00:01 dev near.5");
    hosts.a.ip("addr add 10.8.5.1/24 dev near");
    hosts.a.ip("neigh add 10.8.5.2 lladdr 02:00:00:00:00:02 dev near");
    for theirs in KINDS {
        exchange(&hosts.a, ["10.8.5.1", tagged], &hosts.b, ["10.8.5.2", theirs]);
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn a_device_over_raw_and_packet_sockets() {
    for datapath in &KINDS[1..] {
        let mut want = pattern(1, 8 << 20);
        let option = ["--datapath", datapath];
        let pair = Pair::start(&want, "", &[&option[..], &["--threads", "2"]].concat(), &option);
        let mut client = pair.client();
        assert!(client.read(0, want.len()).unwrap() == want);
        let data = pattern(2, 1 << 20);
        client.write(4096, &data).unwrap();
        want[4096..4096 + data.len()].copy_from_slice(&data);
        client.flush().unwrap();
        assert!(client.read(0, want.len()).unwrap() == want);
        assert!(std::fs::read(&pair.image).unwrap() == want);
    }
}

#[test]
#[ignore = "needs CAP_NET_RAW"]
fn the_ceiling_over_raw_and_packet_sockets_has_sound_packets() {
    for datapath in &KINDS[1..] {
        let addr = ferroce_loopback::addresses(2).to_string();
        let done = run(&[
            "bench",
            "ceiling",
            "--json",
            "--addr",
            &addr,
            "--seconds",
            "0.2",
            "--datapath",
            datapath,
        ]);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let m = &done.json()[0];
        assert_eq!(m["icrc_errors"], 0, "{m}");
        assert!(m["packets"].as_u64() > Some(0), "{m}");
    }
}

#[test]
#[ignore = "needs root, to give up CAP_NET_RAW"]
fn without_the_capability_the_error_names_it() {
    for datapath in ["raw", "packet", "packet,vlan=7"] {
        let addr = ferroce_loopback::addresses(2).to_string();
        let mut command = Command::new("setpriv");
        command
            .args(["--inh-caps", "-all", "--bounding-set", "-net_raw"])
            .arg(ferroce());
        command.args(["bench", "write", "--addr", &addr, "-n", "1", "--datapath", datapath]);
        let done = Running::start_command(command, format!("bench --datapath {datapath}")).end();
        assert_eq!(done.code, Some(1), "{}", done.stdout);
        let kind = datapath.split(',').next().unwrap();
        let said = format!("the {kind} datapath needs CAP_NET_RAW: ");
        assert!(done.stderr.contains(&said), "{}", done.stderr);
    }
}

#[test]
fn a_datapath_that_is_none_is_refused() {
    let done = run(&["bench", "write", "--datapath", "packet,vlan=0"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("packet,vlan=ID"), "{}", done.stderr);
}
