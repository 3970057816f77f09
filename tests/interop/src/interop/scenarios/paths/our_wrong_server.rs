//! A session of our client gets a path to another server of the kernel's than its own.

use std::time::Duration;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{self, Mapping, RMMOD_SERVER},
    },
    our_client::{DISK, paths, server_down, server_up},
    script,
};
use crate::{Error, far::Ip, lab::HOST_V4};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(
        10,
        "paths-wrong-server-our-client",
        Direction::OursToKernel,
        wrong_server,
    );
    // On the second network nothing passes the first guest's card, where captures are made.
    vec![s.guests(2)]
}

/// A shell function: a disk's bytes that are not this one, past the caches.
const OTHERS: &str = "others() { dd if=/dev/$1 bs=1M count=$3 iflag=direct status=none | tr -d \"$2\" | wc -c; }\n";

/// The second guest's disks are empty.
const EMPTY: &str = "\
    set -e; for disk in ram0 ram1; do dd if=/dev/zero of=/dev/$disk bs=1M count=64 oflag=direct status=none; done\n\
    rdma link add rxe1 type rxe netdev eth1\n";

/// They still are, and its server has no session.
const UNTOUCHED: &str = "\
    set -e; ls /sys/class/rtrs-server/; [ -z \"$(ls /sys/class/rtrs-server/)\" ]\n\
    for disk in ram0 ram1; do [ $(others $disk '\\0' 64) = 0 ]; done\n";

/// What was written to the mapping is on the right disk.
const WRITTEN: &str = "set -e; [ $(others ram0 '\\132' 8) = 0 ]\n";

/// The second path leads to a server that does not know the session. It is refused, and nothing is written there: by default
/// the mapping ends, with `--connect-any` it goes on over the first path.
fn wrong_server(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let second = c.second.as_deref().ok_or("needs a second guest")?;
    let load = rnbd::server_modules("N");
    second.run(&format!("{EMPTY}{load}"), 120)?;
    let wrong = format!("ip:{}@ip:{}", HOST_V4[1], second.addr(1, Ip::V4));
    let result = both_ways(c, &wrong);
    let second = c.second.as_deref().ok_or("needs a second guest")?;
    let untouched = second.run(&format!("{OTHERS}{UNTOUCHED}"), 120);
    second.try_run(&format!("{RMMOD_SERVER}; rdma link delete rxe1"), 120)?;
    server_down(c)?;
    untouched?;
    result
}

fn both_ways(c: &mut Ctx<'_>, wrong: &str) -> Result<String, Error> {
    let paths = [paths(c, Ip::V4)?[0].clone(), wrong.to_owned()];
    let mut mapping = Mapping::spawn_over(c, &paths, DISK, &["--json"])?;
    mapping.process.wait_gone(Duration::from_secs(90))?;
    let said = mapping.process.text();
    let error = mapping
        .events("error")
        .pop()
        .ok_or_else(|| format!("map did not fail: {said}"))?;
    let message = error["message"].as_str().unwrap_or_default().to_owned();
    if mapping.count("mapped") > 0 || !message.contains("ENXIO") {
        return Err(format!("map said: {said}").into());
    }
    // The first server has nothing left of it.
    script(
        c,
        "for i in $(seq 100); do [ -z \"$(ls /sys/class/rtrs-server/)\" ] && exit 0; sleep 0.1; done; exit 1\n",
        60,
    )?;

    let mut mapping = Mapping::spawn_over(c, &paths, DISK, &["--json", "--connect-any"])?;
    mapping.wait_more("mapped", 0, Duration::from_secs(90))?;
    let refused = mapping.count("reconnect_failed");
    mapping.io(c, "io", &["write -P 0x5a 0 8M", "flush", "read -P 0x5a 0 8M"], 120)?;
    mapping.wait_more("reconnect_failed", refused + 2, Duration::from_secs(60))?;
    let why = mapping.events("reconnect_failed");
    if why
        .iter()
        .any(|e| e["path"] != *wrong || !e["why"].as_str().unwrap_or_default().contains("ENXIO"))
    {
        return Err(format!("attempts failed with {why:?}").into());
    }
    script(c, &format!("{OTHERS}{WRITTEN}"), 60)?;
    mapping.stop()?;
    Ok(format!(
        "refused ({message}); with --connect-any it goes on by the first path, while each attempt at the other is refused; nothing written to the wrong server: passed"
    ))
}
