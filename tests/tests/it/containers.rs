//! Containers: on a bridge whose host masquerades what leaves it, as docker does, and several in one network namespace (a pod).

use std::{cell::Cell, path::Path};

use ferroce_tests::{
    device::image,
    eventually, ferroce,
    network::Namespace,
    perftest::{Sides, WriteBw},
    process::{Finished, Running},
};
use serde_json::Value;

/// Docker's rules for its default network (`iptables-save` of a host with docker 27), without those for published ports.
const RULES: [&str; 6] = [
    "-P FORWARD DROP",
    "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
    "-A FORWARD -i docker0 -o docker0 -j ACCEPT",
    "-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
    "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j RETURN",
];

const CONTAINERS: [&str; 2] = ["172.17.0.2", "172.17.0.3"];
/// Of the host, outside of the bridge.
const HOST: &str = "192.168.77.1";
/// Of the other host.
const OUTSIDE: &str = "192.168.77.2";
/// The same, without a broker.
const OUTSIDE_ALONE: &str = "192.168.77.3";

/// A host with two containers, and another host.
struct Docker {
    containers: [Namespace; 2],
    outside: Namespace,
    host: Namespace,
}

impl Docker {
    fn new() -> Self {
        let [host, outside, first, second] = [(); 4].map(|()| Namespace::new(&[]));
        host.ip("link add docker0 type bridge");
        host.ip("addr add 172.17.0.1/16 dev docker0");
        host.ip("link set docker0 up");
        for (container, (link, addr)) in [&first, &second]
            .into_iter()
            .zip(["veth1", "veth2"].into_iter().zip(CONTAINERS))
        {
            host.link_to(container, link, "eth0");
            host.ip(&format!("link set {link} master docker0 up"));
            container.ip(&format!("addr add {addr}/16 dev eth0"));
            container.ip("link set eth0 up");
            container.ip("route add default via 172.17.0.1");
        }
        host.link_to(&outside, "uplink", "eth0");
        for (namespace, link, addr) in [(&host, "uplink", HOST), (&outside, "eth0", OUTSIDE)] {
            namespace.ip(&format!("addr add {addr}/24 dev {link}"));
            namespace.ip(&format!("link set {link} up"));
        }
        outside.ip(&format!("addr add {OUTSIDE_ALONE}/24 dev eth0"));
        in_namespace(&host, "sysctl", "-qw net.ipv4.ip_forward=1");
        RULES.iter().for_each(|rule| in_namespace(&host, "iptables", rule));
        let containers = [first, second];
        Self {
            containers,
            outside,
            host,
        }
    }
}

/// Runs a program whose arguments have no spaces in them.
fn in_namespace(namespace: &Namespace, program: &str, args: &str) {
    let out = namespace.command(program).args(args.split(' ')).output();
    let out = out.unwrap_or_else(|e| panic!("{program}, which this test needs: {e}"));
    assert!(
        out.status.success(),
        "{program} {args}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
}

/// `ferroce` in a namespace, without a broker.
fn alone(namespace: &Namespace, args: &[&str]) -> Running {
    let mut command = namespace.command("env");
    command.arg("FERROCE_BROKER=off").arg(ferroce()).args(args);
    Running::start_command(command, format!("ferroce {args:?}"))
}

fn serve_args<'a>(addr: &'a str, export: &'a str) -> Vec<&'a str> {
    vec!["serve", "--json", "--addr", addr, "--export", export]
}

/// Maps a device of a server with which there will be no session.
fn map_fails(namespace: &Namespace, to: &str, dir: &Path, more: &[&str]) -> Finished {
    let socket = dir.join("nbd").display().to_string();
    let mut args = vec![
        "map",
        "--session",
        "test",
        "--device",
        "disk",
        "--nbd",
        &socket,
        "--path",
        to,
    ];
    args.extend(more);
    let done = namespace.run(&args).end();
    assert_eq!(done.code, Some(1), "{}{}", done.stdout, done.stderr);
    done
}

#[test]
#[ignore = "needs iptables, perftest and rping, and the right to make network namespaces"]
fn programs_in_containers_on_one_bridge_use_each_other() {
    let docker = Docker::new();
    for (server, client) in [(0, 1), (1, 0)] {
        // The server is started first.
        let next = Cell::new(server);
        let start = |args: &[String]| docker.containers[next.replace(client)].run(args);
        let addr = |at: usize| CONTAINERS[at].parse().unwrap();
        let sides = Sides {
            server: addr(server),
            client: None,
        };
        WriteBw::once(&start, sides);
    }
}

#[test]
#[ignore = "needs iptables, perftest and rping, and the right to make network namespaces"]
fn a_request_with_translated_addresses_is_reported_wherever_it_is_dropped() {
    let docker = Docker::new();
    let dir = tempfile::tempdir().unwrap();
    let export = format!("disk={}", image(dir.path(), "disk", &[0; 4096]).display());
    let proof = format!("translated from {} to {HOST}", CONTAINERS[0]);
    let ask = |to: &str| map_fails(&docker.containers[0], to, dir.path(), &["--connect-timeout", "2"]);

    // Through the broker, whose log says it, and which forwards the proof to the server.
    let mut serve = docker.outside.run(&serve_args(OUTSIDE, &export));
    serve.event("listening");
    let failed = ask(OUTSIDE);
    assert!(failed.stderr.contains("NAT"), "{}", failed.stderr);
    eventually("the server says it", || serve.stderr().contains(&proof));
    let doctor = docker.outside.run(&["doctor", "--json"]).end().json().remove(0);
    let checks = doctor["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["id"] == "translated").unwrap();
    assert!(found["summary"].as_str().unwrap().contains(&proof), "{found}");
    let stat = docker.outside.run(&["stat", "--json"]).end().json().remove(0);
    assert_eq!(stat["translated"]["text"], proof);
    assert!(stat["counters"]["icrc_translated"].as_u64().unwrap() > 0, "{stat}");
    serve.stop();

    // Without a broker, with a capture.
    let pcap = dir.path().join("trace.pcap").display().to_string();
    let mut args = serve_args(OUTSIDE_ALONE, &export);
    args.extend(["--pcap", &pcap]);
    let mut serve = alone(&docker.outside, &args);
    serve.event("listening");
    ask(OUTSIDE_ALONE);
    eventually("the server says it", || serve.stderr().contains(&proof));
    serve.stop();
    let checked = docker.host.run(&["pcap", "check", "--json", &pcap]).end();
    let report: Value = checked.json().remove(0);
    let findings = report["findings"].as_array().unwrap();
    let found = findings.iter().find(|finding| finding["rule"] == "frame-translated");
    let text = found
        .and_then(|finding| finding["text"].as_str())
        .unwrap_or_else(|| panic!("{report}"));
    assert!(text.contains(&proof), "{text}");
}

#[test]
#[ignore = "needs iptables, perftest and rping, and the right to make network namespaces"]
fn a_host_where_nobody_listens_ends_the_wait_at_once() {
    let docker = Docker::new();
    let dir = tempfile::tempdir().unwrap();
    let [here, nobody] = &docker.containers;
    // Much longer than a test may take.
    let failed = map_fails(here, CONTAINERS[1], dir.path(), &["--connect-timeout", "3600"]);
    assert!(
        failed.stderr.contains("UDP port 4791 is unreachable"),
        "{}",
        failed.stderr
    );
    let bench = here.run(&["bench", "write", "--connect", CONTAINERS[1]]).end();
    assert!(
        bench.stderr.contains("UDP port 4791 is unreachable"),
        "{}",
        bench.stderr
    );
    let doctor = here
        .run(&["doctor", "--json", "--peer", CONTAINERS[1]])
        .end()
        .json()
        .remove(0);
    let checks = doctor["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["id"] == "peer").unwrap();
    assert!(
        found["summary"].as_str().unwrap().contains("port unreachable"),
        "{found}"
    );
    let rping = here
        .run(&["run", "--", "rping", "-c", "-C", "1", "-a", CONTAINERS[1]])
        .end();
    let said = rping.stdout + &rping.stderr;
    assert!(said.contains("RDMA_CM_EVENT_UNREACHABLE, error -111"), "{said}");

    // A firewall that says so.
    in_namespace(
        nobody,
        "iptables",
        "-A INPUT -p udp --dport 4791 -j REJECT --reject-with icmp-admin-prohibited",
    );
    let failed = map_fails(here, CONTAINERS[1], dir.path(), &["--connect-timeout", "3600"]);
    assert!(failed.stderr.contains("a firewall forbids it"), "{}", failed.stderr);
}

/// `ferroce` in a container of its own in a network namespace: with other processes, and other files for its broker.
fn in_pod(pod: &Namespace, dir: &Path, broker_dir: Option<&Path>, args: &[&str]) -> Running {
    let mut command = pod.command("unshare");
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "env"]);
    if let Some(broker_dir) = broker_dir {
        command.arg(format!("FERROCE_BROKER_DIR={}", broker_dir.display()));
    }
    command.arg(ferroce()).args(args).env("XDG_RUNTIME_DIR", dir);
    Running::start_command(command, format!("ferroce {args:?}"))
}

#[test]
#[ignore = "needs iptables, perftest and rping, and the right to make network namespaces"]
fn containers_of_a_pod_are_told_how_to_share_an_address() {
    let pod = Namespace::new(&["addr add 192.0.2.1/24 dev lo", "addr add 192.0.2.2/24 dev lo"]);
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [first, second, shared] = dirs.each_ref().map(tempfile::TempDir::path);
    let export = format!("disk={}", image(first, "disk", &[0; 4096]).display());
    let start =
        |dir: &Path, broker_dir: Option<&Path>, addr: &str| in_pod(&pod, dir, broker_dir, &serve_args(addr, &export));
    let mut serve = start(first, None, "192.0.2.1:1234");
    serve.event("listening");
    let refused = start(second, None, "192.0.2.1:1235").end();
    assert_eq!(refused.code, Some(1), "{}", refused.stdout);
    let broker = first.display().to_string();
    for word in ["a ferroce broker of user 0", &broker, "FERROCE_BROKER_DIR", "pod"] {
        assert!(refused.stderr.contains(word), "`{word}` is not in: {}", refused.stderr);
    }
    // What it says helps.
    let mut one = start(first, Some(shared), "192.0.2.2:1234");
    one.event("listening");
    let mut other = start(second, Some(shared), "192.0.2.2:1235");
    other.event("listening");
}
