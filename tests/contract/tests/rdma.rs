//! `ferroce serve` and `ferroce map` on RDMA devices (`--rdma`), which are those of our own verbs library, under `ferroce run`.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use ferroce_tests::{
    checked::{BLOCK, Checked},
    compiled,
    device::image,
    fresh_address,
    network::{Cut, Network},
    process::{Running, TIMEOUT, run},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ferroce-rdma");
const BLOCKS: usize = 64;

/// valgrind, which ends a program with errors or leaks with status 99.
const VALGRIND: [&str; 8] = [
    "valgrind",
    "--quiet",
    "--error-exitcode=99",
    // Memory that is still reachable at the end is no leak; what is found only through inner pointers is threads'.
    "--leak-check=full",
    "--show-leak-kinds=definite,indirect",
    "--errors-for-leak-kinds=definite,indirect",
    "--num-callers=30",
    // Its scheduler lets a spinning thread have the processor for ever otherwise.
    "--fair-sched=try",
];

/// The program with these arguments, and a device at each of these addresses.
fn with_devices(addrs: &[&str], args: &[&str]) -> Vec<String> {
    with_devices_under(&[], addrs, args)
}

/// The same, run by another program.
fn with_devices_under(by: &[&str], addrs: &[&str], args: &[&str]) -> Vec<String> {
    let mut all = vec!["run"];
    all.extend(addrs.iter().flat_map(|addr| ["--addr", addr]));
    all.push("--");
    all.extend(by);
    all.push(PROGRAM);
    all.extend(args);
    all.into_iter().map(str::to_owned).collect()
}

/// A program under `ferroce run`, with a device at an address.
fn with_run(addr: &str, words: &[&str]) -> Vec<String> {
    let all = ["run", "--addr", addr, "--"].into_iter().chain(words.iter().copied());
    all.map(str::to_owned).collect()
}

fn disk(dir: &Path) -> PathBuf {
    image(dir, "disk.img", &vec![0; BLOCKS * BLOCK])
}

fn serve_args<'a>(listen: &[&'a str], export: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["serve", "--json", "--export", export];
    args.extend(listen.iter().flat_map(|addr| ["--addr", addr]));
    args.extend(more);
    args
}

fn map_args<'a>(paths: &[&'a str], nbd: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["map", "--json", "--session", "test", "--device", "disk", "--nbd", nbd];
    args.extend(paths.iter().flat_map(|path| ["--path", path]));
    args.extend(["--reconnect-delay", "0.2"]);
    if !more.contains(&"--connect-timeout") {
        args.extend(["--connect-timeout", "10"]);
    }
    args.extend(more);
    args
}

fn paths(map: &mut Running) -> Vec<Value> {
    let listing = map.ask(json!({ "do": "list" }));
    assert_eq!(listing["devices"][0]["failed"], 0);
    listing["paths"].as_array().unwrap().clone()
}

/// The devices of the paths of a session that is served.
fn served(serve: &mut Running) -> Vec<(String, Value)> {
    let listing = serve.ask(json!({ "do": "sessions" }));
    let sessions = listing["sessions"].as_array().unwrap();
    let paths = sessions.iter().flat_map(|session| session["paths"].as_array().unwrap());
    paths
        .map(|path| (path["server"].as_str().unwrap().to_owned(), path["device"].clone()))
        .collect()
}

fn ends_well(running: Running) {
    let finished = running.stop();
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
}

/// Whether a server takes keys back, and what opens its chunks then.
#[test]
fn a_device_over_rdma_at_either_end_or_both() {
    for (at_server, at_client) in [(true, false), (false, true), (true, true)] {
        for invalidate in ["on", "off"] {
            let dir = tempfile::tempdir().unwrap();
            let image = disk(dir.path());
            let export = format!("disk={}", image.display());
            let [server, client] = [(); 2].map(|()| fresh_address().to_string());
            let serve = serve_args(&[&server], &export, &["--always-invalidate", invalidate]);
            let socket = dir.path().join("nbd");
            let nbd = socket.display().to_string();
            let path = format!("{client},{server}");
            let map = map_args(&[&path], &nbd, &[]);
            let start = |addr: &str, rdma: bool, args: &[&str]| match rdma {
                true => Running::steered(&with_devices(&[addr], args)),
                false => Running::steered(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>()),
            };
            let mut serve = start(&server, at_server, &serve);
            serve.event("listening");
            let mut map = start(&client, at_client, &map);
            map.event("mapped");
            let mut checked = Checked::new(&socket, "disk", &image);
            (0..2 * BLOCKS).for_each(|_| checked.works());
            checked.returns();
            let device = |rdma| match rdma {
                true => json!("ferroce0"),
                false => Value::Null,
            };
            assert_eq!(served(&mut serve), [(server.clone(), device(at_server))]);
            let path = paths(&mut map).remove(0);
            assert_eq!(path["device"], device(at_client), "{path}");
            drop(checked);
            ends_well(map);
            ends_well(serve);
        }
    }
}

/// A session with requests of both kinds, whose path is lost once and comes back; both ends are under valgrind.
#[test]
#[ignore = "takes a minute, and the contract's cases run under valgrind too"]
fn a_session_under_valgrind() {
    let dir = tempfile::tempdir().unwrap();
    let image = disk(dir.path());
    let export = format!("disk={}", image.display());
    let [server, client] = [(); 2].map(|()| fresh_address().to_string());
    let serve = serve_args(&[&server], &export, &["--queue-depth", "16"]);
    let mut serving = Running::steered(&with_devices_under(&VALGRIND, &[&server], &serve));
    serving.event("listening");
    let socket = dir.path().join("nbd");
    let nbd = socket.display().to_string();
    let path = format!("{client},{server}");
    let map = map_args(&[&path], &nbd, &["--on-loss", "queue", "--connect-timeout", "20"]);
    let mut map = Running::steered(&with_devices_under(&VALGRIND, &[&client], &map));
    map.event("mapped");
    let mut checked = Checked::new(&socket, "disk", &image);
    (0..BLOCKS / 8).for_each(|_| checked.works());
    let id = paths(&mut map)[0]["path"].as_str().unwrap().to_owned();
    map.done(json!({ "do": "disconnect", "session": "test", "path": id }));
    map.done(json!({ "do": "reconnect", "session": "test", "path": id }));
    (0..BLOCKS / 8).for_each(|_| checked.works());
    checked.returns();
    drop(checked);
    ends_well(map);
    ends_well(serving);
}

#[test]
fn a_server_on_rdma_that_is_killed_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let image = disk(dir.path());
    let export = format!("disk={}", image.display());
    let [server, client] = [(); 2].map(|()| fresh_address().to_string());
    let serve = with_devices(&[&server], &serve_args(&[&server], &export, &[]));
    let socket = dir.path().join("nbd");
    let nbd = socket.display().to_string();
    let path = format!("{client},{server}");
    let map = with_devices(&[&client], &map_args(&[&path], &nbd, &["--on-loss", "queue"]));
    let mut serving = Running::steered(&serve);
    serving.event("listening");
    let mut map = Running::steered(&map);
    map.event("mapped");
    let mut checked = Checked::new(&socket, "disk", &image);
    (0..BLOCKS).for_each(|_| checked.works());
    for _ in 0..3 {
        serving.signal(Signal::SIGKILL);
        serving.wait();
        serving = Running::steered(&serve);
        serving.event("listening");
        (0..BLOCKS).for_each(|_| checked.works());
        checked.returns();
    }
    drop(checked);
    ends_well(map);
    ends_well(serving);
}

#[test]
#[ignore = "needs the right to make network namespaces"]
fn a_session_with_a_path_over_rdma_and_one_in_software_goes_on_by_either() {
    let network = Network::new(2);
    let dir = tempfile::tempdir().unwrap();
    let image = disk(dir.path());
    let export = format!("disk={}", image.display());
    let [[client, server], [soft_client, soft_server]] = [0, 1].map(Network::ends);
    let serve = serve_args(&[&server, &soft_server], &export, &[]);
    let mut serve = network.b.steered(&with_devices(&[&server], &serve));
    serve.event("listening");
    let socket = dir.path().join("nbd");
    let nbd = socket.display().to_string();
    let ways = [format!("{client},{server}"), format!("{soft_client},{soft_server}")];
    let map = map_args(&[&ways[0], &ways[1]], &nbd, &[]);
    let mut map = network.a.steered(&with_devices(&[&client], &map));
    map.event("mapped");
    let devices: Vec<Value> = paths(&mut map).iter().map(|path| path["device"].clone()).collect();
    assert_eq!(devices, [json!("ferroce0"), Value::Null]);
    let mut checked = Checked::new(&socket, "disk", &image);
    for (round, how) in [Cut::Silently, Cut::Carrier, Cut::FromA, Cut::FromB]
        .into_iter()
        .enumerate()
    {
        for cable in [round % 2, 1 - round % 2] {
            (0..BLOCKS / 4).for_each(|_| checked.works());
            network.cut(cable, how);
            map.event("path_down");
            (0..BLOCKS / 4).for_each(|_| checked.works());
            network.mend(cable);
            let end = Instant::now() + TIMEOUT;
            while paths(&mut map).iter().any(|path| path["state"] != "connected") {
                assert!(Instant::now() < end, "cable {cable}, {how:?}: it does not come back");
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
    checked.returns();
    drop(checked);
    ends_well(map);
    ends_well(serve);
}

/// Returns the measurements of `ferroce bench`.
fn measured(finished: &ferroce_tests::process::Finished) -> Vec<Value> {
    assert_eq!(finished.code, Some(0), "{}{}", finished.stdout, finished.stderr);
    finished.json()
}

#[test]
fn the_operations_of_bench_run_on_a_device_beside_software() {
    let addr = fresh_address().to_string();
    // Nobody else takes the next ones.
    let beside = ferroce_loopback::addresses(4).to_string();
    for (operation, names) in [
        ("write", &["write"][..]),
        ("read", &["read"]),
        ("send", &["send"]),
        ("latency", &["write_lat", "send_lat"]),
    ] {
        let bench = [
            "bench", operation, "--rdma", "ferroce0", "--beside", &beside, "-n", "300", "--size", "20000", "--json",
        ];
        let all = measured(&Running::start(&with_devices(&[&addr], &bench)).end());
        for name in names {
            let of = |device: Option<&str>| {
                let is = |m: &&Value| m["op"] == *name && m["device"].as_str() == device;
                all.iter()
                    .find(is)
                    .unwrap_or_else(|| panic!("no {name} of {device:?} in {all:?}"))
            };
            let (on_device, soft) = (of(Some("ferroce0")), of(None));
            for m in [on_device, soft] {
                assert_eq!((&m["messages"], &m["bytes"]), (&json!(300), &json!(20_000)));
            }
            assert!(
                on_device["ratio_to_software"].as_f64().is_some_and(|ratio| ratio > 0.0),
                "{on_device}"
            );
        }
    }
}

#[test]
fn the_two_sides_of_bench_may_be_on_a_device_and_in_software() {
    for on_device in [[true, false], [false, true]] {
        let [server, client] = [(); 2].map(|()| fresh_address().to_string());
        let side = |is: bool, addr: &str, args: &[&str]| match is {
            true => with_devices(&[addr], args),
            false => args.iter().map(|arg| (*arg).to_owned()).collect(),
        };
        let mut listening = Running::start(&side(
            on_device[0],
            &server,
            &["bench", "--server", "--addr", &server, "--json"],
        ));
        listening.event("listening");
        for operation in ["write", "read", "send", "latency"] {
            let args = [
                "bench",
                operation,
                "--connect",
                &server,
                "--addr",
                &client,
                "-n",
                "200",
                "--json",
                "--qps",
                "2",
            ];
            let args = if operation == "latency" { &args[..9] } else { &args };
            for m in measured(&Running::start(&side(on_device[1], &client, args)).end()) {
                assert_eq!(m["messages"], 200, "{m}");
                assert_eq!(m["device"].as_str(), on_device[1].then_some("ferroce0"), "{m}");
            }
        }
        ends_well(listening);
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let [ours, other] = [(); 2].map(|()| fresh_address().to_string());
    let dir = tempfile::tempdir().unwrap();
    let export = format!("disk={}", disk(dir.path()).display());
    let fails = |rdma: &[&str], code: i32, parts: &[&str]| {
        let args = with_devices(&[&ours], &serve_args(&[&other], &export, rdma));
        let finished = Running::start(&args).end();
        assert_eq!(finished.code, Some(code), "{}", finished.stderr);
        for part in parts {
            assert!(finished.stderr.contains(part), "{part:?}: {}", finished.stderr);
        }
    };
    fails(&["--rdma", "mlx5_7"], 1, &["mlx5_7", "this host has ferroce0"]);
    fails(&["--rdma", "ferroce0"], 1, &["ferroce0", &ours, &other]);
    fails(&["--rdma", "ferroce0:x"], 2, &["ferroce0:x", "port"]);
    fails(&["--rdma", "auto", "--rdma", "ferroce0"], 2, &["auto", "alone"]);
    let args = with_devices(&[&ours], &serve_args(&[&ours], &export, &["--threads", "2"]));
    let finished = Running::start(&args).end();
    assert_eq!(finished.code, Some(2), "{}", finished.stderr);
    assert!(finished.stderr.contains("--threads 2") && finished.stderr.contains("--rdma soft"));
}

/// Messages go from an address on a device to one in software, and back. The device has no part in the memory of other processes.
#[test]
fn rds_of_programs_over_rdma() {
    let dir = tempfile::tempdir().unwrap();
    let program = |name: &str| {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let program = compiled(&folder, &format!("tests/interop/lab/{name}.c"));
        program.display().to_string()
    };
    let (peer, rdma) = (program("rds-peer"), program("rds-rdma"));
    let [on_device, soft] = [(); 2].map(|()| fresh_address().to_string());
    let args = ["rds", "node", "--json", "--stay", "--addr", &on_device];
    let mut node = Running::start(&with_devices(&[&on_device], &args));
    let opened = node.event("rds_opened");
    assert_eq!(
        (&opened["address"], &opened["device"]),
        (&json!(on_device), &json!("ferroce0"))
    );
    let command = |words: &[&str]| with_run(&soft, words);
    for (caller, answerer) in [(&on_device, &soft), (&soft, &on_device)] {
        let mut serving = Running::start(&command(&[&peer, "serve", answerer, "4000"]));
        while serving.new_line().is_none() {
            assert!(!serving.has_ended(), "{}", serving.stderr());
            thread::sleep(Duration::from_millis(10));
        }
        let called = run(&command(&[
            &peer, "call", caller, answerer, "4000", "0", "0", "4097", "100000",
        ]));
        let back = called.stdout.lines().filter(|line| line.ends_with("came back"));
        assert_eq!((called.code, back.count()), (Some(0), 3), "{called:?}");
        serving.signal(Signal::SIGKILL);
        serving.wait();
    }
    let opened = node.event("rds_opened");
    assert_eq!((&opened["address"], &opened["device"]), (&json!(soft), &Value::Null));
    let offered = run(&command(&[&rdma, &on_device, &soft, "4000"]));
    assert!(
        offered.code == Some(1) && offered.stdout.contains("Operation not supported"),
        "{offered:?}"
    );
    ends_well(node);
}

#[test]
fn lnet_over_rdma_at_either_end_or_both() {
    for (at_server, at_client) in [(true, false), (false, true), (true, true)] {
        let [server, client] = [(); 2].map(|()| fresh_address().to_string());
        let nid = format!("{server}@o2ib");
        let side = |addr: &str, rdma: bool, args: &[&str]| match rdma {
            true => with_devices(&[addr], args),
            false => args.iter().map(|arg| (*arg).to_owned()).collect(),
        };
        let mut serving = Running::start(&side(&server, at_server, &["lnet", "serve", "--json", &nid]));
        serving.event("lnet_listening");
        let pinged = Running::start(&side(
            &client,
            at_client,
            &["lnet", "ping", "-I", &client, "--json", &nid],
        ))
        .end();
        assert_eq!((pinged.code, pinged.json().len()), (Some(0), 1), "{pinged:?}");
        for test in ["read", "write"] {
            let words = [
                "lnet", "selftest", "-I", &client, "--test", test, "-d", "0.2", "--check", "full", "--json", &nid,
            ];
            let tested = Running::start(&side(&client, at_client, &words)).end();
            assert_eq!(tested.code, Some(0), "{tested:?}");
        }
        ends_well(serving);
    }
}
