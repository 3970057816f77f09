//! What our server's operator orders, with the kernel's client on the other end.

use std::time::Duration;

use serde_json::{Value, json};

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Orders, Server, image},
    },
    connected_anew,
    kernel_client::{BY_TURNS, CLIENT_UP, TIMEOUT, client_down, head},
    longest, script,
};
use crate::{Error, far::Ip, lab::HOST_V4};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(
        10,
        "paths-closed-by-our-server-kernel-client",
        Direction::KernelToOurs,
        orders,
    );
    vec![s.nets(2).waits()]
}

/// fio runs until it is told to end.
const START: &str = "map_by path=$P0 path=$P1; up 2 100; load 4M 1800 100; carried $P0; carried $P1; paths\n";

/// The path is lost, and its requests go by the other. It comes back by itself, 31 s later.
const BACK: &str = "\
    up 1 100; pidof fio >/dev/null; start=$(at); paths; neighbours; up 2 900; echo back after $(($(at)-start)) s\n\
    echo 1 > $S/$P1/stats/rdma; carried $P1; pidof fio >/dev/null; unload\n";

/// The server no longer knows the device, which the client does not know: I/O fails, and there is nothing to remap (EALREADY). The
/// client of 6.1 tells that a write has failed only if the request is acknowledged before it is answered (`specs/kernel.md`).
const CLOSED: &str = "\
    for dir in if of; do case $dir in if) to=/dev/null; from=/dev/rnbd0; flag=iflag=direct;; \
            of) from=/dev/zero; to=/dev/rnbd0; flag=oflag=direct;; esac\n\
        if timeout 20 dd if=$from of=$to bs=4k count=1 $flag 2>/tmp/err; then echo \"closed, but dd to $to went well\"; exit 1; fi\n\
        cat /tmp/err; grep -q 'Input/output error' /tmp/err; done\n\
    state open; refused 'already in progress' 1 $B/remap_device; paths; up 2 1\n";

/// When all paths have gone and come back the device is opened again.
const REMAPPED: &str = "\
    order() { for i in $(seq 100); do echo 1 2>/tmp/err > $S/$1/$2 && return; sleep 0.3; done; cat /tmp/err; return 1; }\n\
    order $P1 disconnect; order $P0 disconnect; state closed; order $P0 reconnect; order $P1 reconnect; up 2 100; state open\n\
    refused 'already in progress' 1 $B/remap_device\n\
    fio --name=job --filename=/dev/rnbd0 --size=4M --bs=4k --rw=randwrite --direct=1 --ioengine=libaio --iodepth=8 \
        --verify=crc32c --verify_fatal=1 >/tmp/fio.log\n\
    sum 64; echo normal > $B/unmap_device\n";

/// A path is closed under load, and comes back; a device is closed.
fn orders(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let mut server = Server::start_as(c, Orders::new("0.0.0.0", &["disk"], "on").steered())?;
    let result = in_turn(c, &mut server);
    client_down(c)?;
    let Told { report, back, out } = result?;
    let opened = server.count("session_opened");
    let summary = server.summary()?;
    // A session until all paths were disconnected, and one from then on. What came for the closed device was refused.
    let none = ["protocol_errors", "access_errors", "no_resources"];
    let refused = &summary["malformed_messages"];
    if opened != 2 || *refused != 2 || none.iter().any(|name| summary[*name] != 0) {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    same_on_image(c, &out, 4 << 20)?;
    let longest = longest(&report)?;
    if longest > TIMEOUT {
        return Err(format!("a request took {longest:?}").into());
    }
    let attempts = connected_anew(c)?;
    Ok(format!(
        "a path closed by the server under load: no error, the longest request took {:.1} s, {back} (attempt {attempts} of the same \
         path at the end); a device closed: I/O fails, remap_device is EALREADY; connected anew it is open again, all blocks \
         right: passed",
        longest.as_secs_f64()
    ))
}

/// What was printed.
struct Told {
    /// fio's.
    report: String,
    /// When the path was back.
    back: String,
    /// At the end.
    out: String,
}

fn in_turn(c: &mut Ctx<'_>, server: &mut Server) -> Result<Told, Error> {
    let head = head(c, Ip::V4)?;
    script(
        c,
        &format!("{}{head}{CLIENT_UP}{START}{BY_TURNS}", rnbd::INSMOD_CLIENT),
        120,
    )?;
    close_path(server)?;
    let report = script(c, &format!("{head}{BACK}"), 240)?;
    let back = report.lines().find(|l| l.starts_with("back after"));
    let back = back.unwrap_or_default().to_owned();
    let device = devices(server)?;
    let [device] = &device[..] else {
        return Err(format!("one device is right: {device:?}").into());
    };
    let close = json!({ "do": "force_close", "session": device["session"], "device": device["device"] });
    server.process.done(close.clone())?;
    server.process.refused(close, libc::ENOENT)?;
    if !devices(server)?.is_empty() {
        return Err("the device is listed after it was closed".into());
    }
    script(c, &format!("{head}{CLOSED}"), 120)?;
    let out = script(c, &format!("{head}{REMAPPED}"), 240)?;
    Ok(Told { report, back, out })
}

/// Closes the path over the second network.
fn close_path(server: &mut Server) -> Result<(), Error> {
    let sessions = server.process.done(json!({ "do": "sessions" }))?;
    let session = &sessions["sessions"][0];
    let mut paths = session["paths"].as_array().into_iter().flatten();
    let path = paths.find(|p| p["server"] == HOST_V4[1]);
    let path = path.ok_or_else(|| format!("no path at {}: {sessions}", HOST_V4[1]))?;
    let close = json!({ "do": "close_path", "session": session["session"], "path": path["path"] });
    server.process.done(close)?;
    let log = server.process.log.clone();
    let is_down = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"path_down\""));
    server.process.wait_until(Duration::from_secs(30), is_down)?;
    let down = server.process.events("path_down");
    match down.iter().all(|event| event["why"] == "closed") {
        true => Ok(()),
        false => Err(format!("one path is closed: {down:?}").into()),
    }
}

fn devices(server: &mut Server) -> Result<Vec<Value>, Error> {
    let answer = server.process.done(json!({ "do": "devices" }))?;
    Ok(answer["devices"].as_array().cloned().unwrap_or_default())
}
