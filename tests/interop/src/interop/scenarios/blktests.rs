//! What blktests does with RNBD (tests rnbd/001 and 002): a device is mapped and unmapped, once, and a hundred times. Its own
//! scripts map a loop device of their host by that host's address, so that the kernel is both ends; here one of them is ours.

use std::{
    fs,
    time::{Duration, Instant},
};

use super::{
    Ctx, Direction, Scenario,
    rnbd::{self, Mapping, Server, image, with_client},
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let again = Scenario::new(
        3,
        "rnbd-kernel-client-100-times",
        Direction::KernelToOurs,
        hundred_times,
    );
    let ours = Scenario::new(
        4,
        "rnbd-our-client-100-times",
        Direction::OursToKernel,
        ours_hundred_times,
    );
    vec![again, ours]
}

const TIMES: usize = 100;

/// As 001: half a second between the two. As 002: each at once after the other. Unlike those, each map and each unmap must
/// succeed, the device must be there in between, and gone afterwards. At the end the kernel's log has no warning.
const STEPS: &str = "\
    dmesg -C; echo \"sessname=blktest path=ip:$HOST device_path=disk\" > /sys/class/rnbd-client/ctl/map_device; sleep 0.5\n\
    grep -qx blktest /sys/block/rnbd0/rnbd/session; unmap rnbd0\n\
    for i in $(seq $TIMES); do\n\
        echo \"sessname=blktest path=ip:$HOST device_path=disk\" > /sys/class/rnbd-client/ctl/map_device\n\
        set -- /sys/block/rnbd*; [ $# = 1 ]; grep -qx blktest $1/rnbd/session; unmap ${1##*/}\n\
    done\n\
    [ ! -e /sys/class/rtrs-client/blktest ]; [ -z \"$(ls -d /sys/block/rnbd* 2>/dev/null)\" ]\n\
    if dmesg | grep -E 'WARNING|BUG|Oops|corruption'; then exit 1; fi\n";

fn hundred_times(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    with_client(c, Ip::V4, &format!("TIMES={TIMES}\n{STEPS}"), 300)?;
    let (opened, closed) = (server.count("session_opened"), server.count("session_closed"));
    let descriptors = fs::read_dir(format!("/proc/{}/fd", server.process.id()))?;
    let files = descriptors.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    let open = files.filter(|file| file.ends_with("disk.img")).count();
    let summary = server.summary()?;
    let refused = summary["connections_refused"].as_u64();
    // A mapping that comes before the last one's session has ended takes that one: the guest's script has seen each device.
    let shared = (TIMES + 1).checked_sub(opened).filter(|shared| *shared <= TIMES / 10);
    let (Some(shared), true) = (shared, (closed, open, refused) == (opened, 0, Some(0))) else {
        return Err(format!(
            "{opened} sessions were opened, {closed} closed, the image is open {open} times; the server counted {summary}"
        )
        .into());
    };
    let sessions = match shared {
        0 => String::new(),
        n => format!(", {n} of them on the session of the one before"),
    };
    Ok(format!("mapped and unmapped once, and {TIMES} times{sessions}: passed"))
}

/// The server has no session, and the kernel's log no warning.
const CLEAN: &str = "\
    for i in $(seq 100); do [ -z \"$(ls /sys/class/rtrs-server/)\" ] && break; sleep 0.1; done\n\
    ls /sys/class/rtrs-server/; [ -z \"$(ls /sys/class/rtrs-server/)\" ]\n\
    if dmesg | grep -E 'WARNING|BUG|Oops|corruption|rtrs.*(ERR|err|fail)|rnbd.*(ERR|err|fail)'; then exit 1; fi\n";

/// Our client and the kernel's server: half a second between the two, as in 001, then each at once after the other, as in 002.
fn ours_hundred_times(c: &mut Ctx<'_>) -> Result<String, Error> {
    rnbd::server_up(c, true)?;
    c.guest()?.run("dmesg -C", 30)?;
    let begun = Instant::now();
    let result = (0..=TIMES).try_for_each(|n| {
        let mapping = Mapping::start(c, Ip::V4, "ram0", Duration::ZERO)?;
        if n == 0 {
            std::thread::sleep(Duration::from_millis(500));
        }
        mapping.stop()
    });
    let took = begun.elapsed().as_secs_f64();
    let clean = c.guest()?.run(CLEAN, 60);
    rnbd::server_down(c)?;
    result?;
    clean?;
    Ok(format!(
        "mapped and unmapped once, and {TIMES} times, in {took:.0} s: passed"
    ))
}
