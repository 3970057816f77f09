//! The kernel's client over several paths to our server.

use std::time::Duration;

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Server, image},
    },
    Cut, longest, script,
};
use crate::{Error, far::Ip, lab::HOST_V4};

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut add = |name: &str, ci, cut: Cut| {
        let s = Scenario::new(10, name, Direction::KernelToOurs, move |c| two_paths(c, cut));
        all.push(s.nets(2).waits().ci_if(ci));
    };
    add("paths-port-down-kernel-client", false, Cut::Port);
    add("paths-carrier-lost-kernel-client", true, Cut::Carrier);
    all
}

/// Shell functions. `paths` prints a line for each path: its addresses, its state, and its counts of reads, their bytes,
/// writes, their bytes, requests in flight and failovers. `both N` waits for N/10 s until both are connected.
const FUNCTIONS: &str = "\
    set -e; S=/sys/class/rtrs-client/s1/paths\n\
    paths() { for p in $S/*; do echo \"path ${p##*/} $(cat $p/state) $(cat $p/stats/rdma)\"; done; }\n\
    connected() { cat $S/*/state | grep -c '^connected$' || true; }\n\
    both() { for i in $(seq $1); do [ $(connected) = 2 ] && return; sleep 0.1; done; \
        echo 'not both are connected'; paths; return 1; }\n";

/// Maps with two paths. fio writes blocks, each with a checksum, and reads them back all the while.
const START: &str = "\
    rdma link add rxe1 type rxe netdev eth1\n\
    echo \"sessname=s1 $PATHS device_path=disk\" > /sys/class/rnbd-client/ctl/map_device\n\
    for i in $(seq 100); do [ -b /dev/rnbd0 ] && break; sleep 0.1; done; both 100\n\
    fio --name=job --filename=/dev/rnbd0 --size=16M --bs=4k --rw=randwrite --direct=1 --ioengine=libaio --iodepth=8 \
        --rate_iops=300 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based --runtime=$RUNTIME \
        --output=/tmp/fio.json --output-format=json >/tmp/fio.log 2>&1 &\n\
    for i in $(seq 300); do set -- $(cat $S/*/stats/rdma | cut -d' ' -f3); [ $1 -gt 100 ] && [ $2 -gt 100 ] && break; \
        sleep 0.1; done; paths; [ $1 -gt 100 ] && [ $2 -gt 100 ]\n";

/// The path that was cut is known to be gone, and fio goes on by the other.
const GONE: &str = "paths; [ $(connected) = 1 ]; pidof fio >/dev/null\n";

/// Waits for fio's end, and prints its report.
const REPORT: &str =
    "for i in $(seq 1800); do pidof fio >/dev/null || break; sleep 0.1; done; cat /tmp/fio.log /tmp/fio.json\n";

/// The path comes back by itself, and both carry load again.
const BACK: &str = "\
    paths; at() { cut -d. -f1 /proc/uptime; }; start=$(at); both 2400; echo connected $(($(at)-start)) s later\n\
    for p in $S/*; do echo 1 > $p/stats/rdma; done\n\
    fio --name=read --filename=/dev/rnbd0 --size=4M --bs=4k --rw=read --direct=1 --ioengine=libaio --iodepth=8 >/dev/null\n\
    paths; [ $(cat $S/*/stats/rdma | cut -d' ' -f1 | grep -c '^[1-9]') = 2 ]\n\
    echo sum $(dd if=/dev/rnbd0 bs=64k iflag=direct status=none | md5sum)\n\
    echo normal > /sys/block/rnbd0/rnbd/unmap_device\n";

/// The kernel's client has two paths to our server, which listens at both addresses.
fn two_paths(c: &mut Ctx<'_>, cut: Cut) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let result = cut_in_io(c, cut);
    rnbd::client_down(c)?;
    c.guest()?.run("rdma link delete rxe1", 60)?;
    let (report, back) = result?;
    let opened = server.count("session_opened");
    server.stop()?;
    if opened != 1 {
        return Err(format!("{opened} sessions were opened, not one").into());
    }
    same_on_image(c, &back, 16 << 20)?;
    let paths: Vec<Path> = back.lines().filter_map(Path::of).collect();
    let failovers: u64 = paths.iter().map(|p| p.failovers).sum();
    if failovers == 0 {
        return Err(format!("no request went over to the other path:\n{back}").into());
    }
    let again = back.lines().find(|l| l.starts_with("connected ")).unwrap_or_default();
    Ok(format!(
        "no error, all blocks right, the longest request took {:.1} s; {failovers} failovers; {again}, both carry load: passed",
        longest(&report)?.as_secs_f64()
    ))
}

/// fio's report, and what was printed after that.
fn cut_in_io(c: &mut Ctx<'_>, cut: Cut) -> Result<(String, String), Error> {
    let guest = c.guest()?;
    let path = |net| format!("path=ip:{}@ip:{}", guest.addr(net, Ip::V4), HOST_V4[usize::from(net)]);
    let paths = [path(0), path(1)].join(" ");
    let runtime = cut.seconds() + 15;
    let start = format!(
        "PATHS='{paths}' RUNTIME={runtime}\n{}{FUNCTIONS}{START}",
        rnbd::INSMOD_CLIENT
    );
    script(c, &start, 120)?;
    cut.set(c, false)?;
    std::thread::sleep(Duration::from_secs(cut.seconds()));
    let gone = script(c, &format!("{FUNCTIONS}{GONE}"), 60);
    // Also for the next scenario.
    cut.set(c, true)?;
    gone?;
    let report = script(c, REPORT, 240)?;
    Ok((report, script(c, &format!("{FUNCTIONS}{BACK}"), 400)?))
}

/// A line of the shell function `paths`.
struct Path {
    failovers: u64,
}

impl Path {
    fn of(line: &str) -> Option<Self> {
        let counts = line.strip_prefix("path ")?;
        let failovers = counts.split_whitespace().nth(7)?.parse().ok()?;
        Some(Self { failovers })
    }
}

#[cfg(test)]
mod tests {
    use super::Path;

    #[test]
    fn failovers_are_the_last_count_of_a_path() {
        let line = "path ip:10.77.0.1@ip:10.77.0.254 connected 1 2 3 4 5 6";
        assert_eq!(Path::of(line).map(|p| p.failovers), Some(6));
        assert!(Path::of("connected 31 s later").is_none());
    }
}
