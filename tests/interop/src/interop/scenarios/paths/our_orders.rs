//! What our client's administrator orders, with the kernel's server on the other end.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};

use super::{
    super::{Ctx, Direction, Scenario, rnbd::Mapping},
    attempts,
    our_client::{Fio, Load, TIMEOUT, both_carry, map_steered, paths, same_in_guest, served, server_down, server_up},
    script,
};
use crate::{
    Error,
    connects::{self, Request},
    far::Ip,
    lab::Proc,
};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(10, "paths-orders-our-client", Direction::OursToKernel, orders);
    vec![s.nets(2).waits()]
}

/// Several times as long as the client waits before it connects by itself what it has lost.
const STAYS: Duration = Duration::from_secs(5);

/// The longest that a request may take that fails because there is no path.
const AT_ONCE: Duration = Duration::from_secs(20);

/// By requests to `ferroce map --control -`, under load: add, disconnect, reconnect, remove; the last path removed, and another added.
fn orders(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = in_turn(c);
    server_down(c)?;
    result
}

fn in_turn(c: &mut Ctx<'_>) -> Result<String, Error> {
    let [first, second] = paths(c, Ip::V4)?;
    let more = [
        "--policy",
        "round-robin",
        "--reconnect-delay",
        "1",
        "--stats-interval",
        "1",
    ];
    let mut mapping = map_steered(c, Ip::V4, &more)?;
    Fio::fill(c, &mapping)?;
    let mut fio = Fio::start(c, &mapping, Load::Both)?;
    both_carry(c, 20)?;
    add(c, &mut mapping, &second)?;
    let stayed = disconnect(c, &mut mapping, &second)?;
    // Also one that is connected.
    for _ in 0..2 {
        reconnect(&mut mapping, &second)?;
        both_carry(c, 20)?;
        fio.still_runs()?;
    }
    mapping.process.done(order("remove_path", &first))?;
    only(&mut mapping, &[&second])?;
    let before = served(c, "ours")?;
    std::thread::sleep(STAYS);
    let after = served(c, "ours")?;
    let longest = fio.stop()?;
    if after[0] != 0 || after[1] < before[1] + 20 || longest > TIMEOUT {
        return Err(format!("with one path removed: {before:?}, then {after:?}; a request took {longest:?}").into());
    }
    same_in_guest(c, &mapping)?;
    let failed = without_paths(c, &mut mapping, &second)?;
    let opened = ["session_lost", "session_back", "remapped"].map(|event| mapping.count(event));
    mapping.process.done(order("add_path", &first))?;
    mapping.wait_more("remapped", opened[2], Duration::from_secs(60))?;
    if opened != [1, 0, 0] || !open_in_guest(c)? {
        return Err(format!(
            "lost, back, remapped before a path was added: {opened:?}:\n{}",
            mapping.process.text()
        )
        .into());
    }
    mapping.io(
        c,
        "again",
        &["write -P 0x5a 40M 64k", "flush", "read -P 0x5a 40M 64k"],
        60,
    )?;
    same_in_guest(c, &mapping)?;
    mapping.stop()?;
    let attempts = on_the_wire(c)?;
    Ok(format!(
        "added, disconnected, reconnected (attempt {attempts} of the same path), removed under load: no error, the longest request \
         took {:.1} s; disconnected it stayed so for {stayed:?}; without a path I/O fails within {:.1} s; with one again: \
         first_conn, open, data equal: passed",
        longest.as_secs_f64(),
        failed.as_secs_f64()
    ))
}

fn order(what: &str, path: &str) -> Value {
    json!({ "do": what, "path": path })
}

/// A path is removed and added under load, and once more in vain.
fn add(c: &mut Ctx<'_>, mapping: &mut Mapping, path: &str) -> Result<(), Error> {
    mapping.process.done(order("remove_path", path))?;
    mapping.process.refused(order("reconnect", path), libc::ENOENT)?;
    mapping.process.done(order("add_path", path))?;
    both_carry(c, 20)?;
    mapping.process.refused(order("add_path", path), libc::EEXIST)
}

/// One that is disconnected stays listed, and down, while the other carries the load. For how long that was seen.
fn disconnect(c: &mut Ctx<'_>, mapping: &mut Mapping, path: &str) -> Result<Duration, Error> {
    let closed = mapping.count("path_closed");
    mapping.process.done(order("disconnect", path))?;
    mapping.wait_more("path_closed", closed, TIMEOUT)?;
    let before = served(c, "ours")?;
    std::thread::sleep(STAYS);
    let after = served(c, "ours")?;
    let listing = mapping.process.done(json!({ "do": "list" }))?;
    let state = |name: &str| {
        let paths = listing["paths"].as_array().into_iter().flatten();
        let found = paths.into_iter().find(|p| p["path"] == name);
        found.map_or(Value::Null, |p| p["state"].clone())
    };
    if state(path) != "closed" || after[1] != 0 || after[0] < before[0] + 20 {
        return Err(format!("disconnected: {listing}; the server had served {before:?}, then {after:?}").into());
    }
    Ok(STAYS)
}

/// The server may not be done yet with the path as it was, and refuse the first attempt; there are others.
fn reconnect(mapping: &mut Mapping, path: &str) -> Result<(), Error> {
    let up = mapping.count("path_up");
    let answer = mapping.process.ask(order("reconnect", path))?;
    if answer["ok"] != true && answer["errno"] != libc::ENOTCONN {
        return Err(format!("reconnect: {answer}").into());
    }
    mapping.wait_more("path_up", up, Duration::from_secs(60))
}

/// These paths are there, and no others.
fn only(mapping: &mut Mapping, paths: &[&str]) -> Result<Value, Error> {
    let listing = mapping.process.done(json!({ "do": "list" }))?;
    let listed: Vec<_> = listing["paths"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|p| &p["path"])
        .collect();
    match listed == paths {
        true => Ok(listing),
        false => Err(format!("{paths:?} are right, listed are {listed:?}").into()),
    }
}

/// The last path is removed: the server forgets the session, and requests fail at once. The longest that one took.
fn without_paths(c: &mut Ctx<'_>, mapping: &mut Mapping, last: &str) -> Result<Duration, Error> {
    if !open_in_guest(c)? {
        return Err("the device is not open in the guest".into());
    }
    mapping.process.done(order("remove_path", last))?;
    let listing = only(mapping, &[])?;
    if listing["devices"][0]["state"] == "open" {
        return Err(format!("without a path: {listing}").into());
    }
    script(
        c,
        "for i in $(seq 100); do [ -e /sys/class/rtrs-server/ours ] || exit 0; sleep 0.1; done; exit 1\n",
        60,
    )?;
    if open_in_guest(c)? {
        return Err("without a session the device is open in the guest".into());
    }
    let mut longest = Duration::ZERO;
    for (name, command) in [("no-read", "read 0 4k"), ("no-write", "write -P 1 0 4k")] {
        let start = std::time::Instant::now();
        let mut io = std::process::Command::new("qemu-io");
        io.args(["-f", "raw", "-c", command, &mapping.url]);
        let mut io = Proc::spawn(name, &mut io, &c.dir)?;
        io.wait_gone(AT_ONCE)?;
        longest = longest.max(start.elapsed());
        if !io.text().contains("Input/output error") {
            return Err(format!("without a path: {command}: {}", io.text()).into());
        }
    }
    Ok(longest)
}

/// Whether the kernel's server has a device open for our session.
fn open_in_guest(c: &mut Ctx<'_>) -> Result<bool, Error> {
    let text = "ls -d /sys/class/rnbd-server/ctl/devices/*/sessions/ours 2>/dev/null || true\n";
    Ok(!script(c, text, 30)?.trim().is_empty())
}

/// The path over the second network that was added counted its attempts. The one over the first that was added when there was no
/// other may make the session again; returns the attempts of the other.
fn on_the_wire(c: &Ctx<'_>) -> Result<u16, Error> {
    let of_last = |pcap: &str| -> Result<(Vec<Request>, usize), Error> {
        let requests = connects::requests(Path::new(&c.path(pcap)))?;
        let last = requests.last().map(|r| r.path);
        let (of_last, before): (Vec<_>, Vec<_>) = requests.into_iter().partition(|r| Some(r.path) == last);
        Ok((of_last, before.len()))
    };
    let (added, before) = of_last("wire.pcap")?;
    if before == 0 || added.iter().any(|r| !r.first_conn || r.recon_cnt != 1) {
        return Err(format!("a path added without another: {before} requests before it, {added:?}").into());
    }
    let (connected, before) = of_last("wire-2.pcap")?;
    // With another up it may not, also when it comes back.
    if before == 0 || connected.iter().any(|r| r.first_conn) {
        return Err(format!("a path added beside another: {before} requests before it, {connected:?}").into());
    }
    attempts(&connected)
}
