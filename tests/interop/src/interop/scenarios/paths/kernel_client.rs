//! The kernel's client over several paths to our server, one of which is cut.

use std::{net::IpAddr, time::Duration};

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Orders, Server, image},
    },
    Cut, connected_anew, longest, script,
};
use crate::{
    Error,
    far::Ip,
    lab::{HOST_V4, HOST_V6},
};

/// The longest that a request may take when a path goes: our server tells the client after some 5 s, and what a busy machine adds. By
/// the client's own heartbeats it would be 31 s.
pub(super) const TIMEOUT: Duration = Duration::from_secs(15);

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut add = |name: &str, ci, case: Case| {
        let s = Scenario::new(10, name, Direction::KernelToOurs, move |c| two_paths(c, case));
        all.push(s.nets(2).waits().ci_if(ci));
    };
    let carrier = Case {
        ip: Ip::V4,
        threads: 1,
        cut: Cut::Carrier,
    };
    let port = Case {
        cut: Cut::Port,
        ..carrier
    };
    add("paths-port-down-kernel-client", false, port);
    add("paths-carrier-lost-kernel-client", true, carrier);
    let v6 = Case { ip: Ip::V6, ..carrier };
    add("paths-carrier-lost-kernel-client-v6", false, v6);
    let loops = Case { threads: 2, ..carrier };
    add("paths-carrier-lost-kernel-client-threads2", false, loops);
    all
}

#[derive(Clone, Copy)]
struct Case {
    ip: Ip,
    /// Loops of our server.
    threads: u8,
    cut: Cut,
}

/// Shell functions. `paths` prints a line for each path: its addresses, its state, and its counts of reads, their bytes,
/// writes, their bytes, requests in flight and failovers. `up N T` waits for T/10 s until N are connected. `load SIZE SECONDS IOPS`
/// starts fio, which writes blocks, each with a checksum, and reads them back all the while; `carried PATH` waits until it has
/// written by the path; `unload` ends it and prints its report. `refused TEXT VALUE FILE` holds if writing to the file fails so.
/// `neighbours` makes the other ends' hardware addresses known: one is not resolved for up to 30 s when we answer before
/// `rdma_resolve_ip` has put the request on its list, as may happen here (by reading, and seen here).
const FUNCTIONS: &str = "\
    set -e; C=/sys/class/rtrs-client/s1; S=$C/paths; B=/sys/block/rnbd0/rnbd\n\
    paths() { for p in $S/*; do [ -e $p ] || break; echo \"path ${p##*/} $(cat $p/state) $(cat $p/stats/rdma)\"; done; }\n\
    connected() { cat $S/*/state | grep -c '^connected$' || true; }\n\
    up() { for i in $(seq 0 $2); do [ $(connected) = $1 ] && return; sleep 0.1; done; \
        echo \"not $1 are connected\"; paths; return 1; }\n\
    map_by() { echo \"sessname=s1 $* device_path=$DISK\" > /sys/class/rnbd-client/ctl/map_device; \
        for i in $(seq 100); do [ -b /dev/rnbd0 ] && return; sleep 0.1; done; echo 'no device'; return 1; }\n\
    load() { fio --name=job --filename=/dev/rnbd0 --size=$1 --bs=4k --rw=randwrite --direct=1 --ioengine=libaio --iodepth=8 \
        --rate_iops=${3:-300} --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based --runtime=$2 \
        --output=/tmp/fio.json --output-format=json >/tmp/fio.log 2>&1 & }\n\
    carried() { for i in $(seq 300); do [ $(cut -d' ' -f3 < $S/$1/stats/rdma) -gt 20 ] && return; sleep 0.1; done; \
        echo \"nothing goes by $1\"; paths; return 1; }\n\
    unload() { kill -INT $(pidof fio); report; }\n\
    report() { for i in $(seq 1800); do pidof fio >/dev/null || break; sleep 0.1; done; cat /tmp/fio.log /tmp/fio.json; }\n\
    refused() { if echo \"$2\" 2>/tmp/err > $3; then echo \"$3 took $2\"; return 1; fi; cat /tmp/err; grep -q \"$1\" /tmp/err; }\n\
    state() { for i in $(seq 100); do [ $(cat $B/state) = $1 ] && return; sleep 0.1; done; \
        echo \"not $1\"; cat $B/state; return 1; }\n\
    sum() { echo sum $(dd if=/dev/rnbd0 bs=64k iflag=direct count=$1 status=none | md5sum); }\n\
    at() { cut -d. -f1 /proc/uptime; }\n\
    neighbour() { for i in $(seq 50); do (echo > /dev/udp/$2/9) 2>/dev/null || true; \
        ip neigh show $2 dev $1 | grep -q lladdr && return; sleep 0.1; done; echo \"no neighbour $2\"; return 1; }\n\
    neighbours() { neighbour eth0 ${P0##*@ip:}; neighbour eth1 ${P1##*@ip:}; }\n";

/// What scripts begin with: the paths `P0` and `P1` to our addresses on the two networks, as `map_device` wants them and the
/// sysfs tree names them, the device, and [`FUNCTIONS`].
pub(super) fn head(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let host = if ip == Ip::V4 { HOST_V4 } else { HOST_V6 };
    let [first, second] = host.map(str::parse);
    head_to(c, ip, [first?, second?])
}

/// The same for paths to these addresses of a server, one on each network.
pub(in super::super) fn head_to(c: &mut Ctx<'_>, ip: Ip, to: [IpAddr; 2]) -> Result<String, Error> {
    let guest = c.guest()?;
    let path = |net: u8| format!("ip:{}@ip:{}", guest.addr(net, ip), to[usize::from(net)]);
    Ok(format!("P0='{}'; P1='{}'; DISK=disk\n{FUNCTIONS}", path(0), path(1)))
}

/// Makes the second device. Its script begins with [`head`].
pub(in super::super) const CLIENT_UP: &str = "rdma link add rxe1 type rxe netdev eth1; neighbours\n";

/// Takes down what [`CLIENT_UP`] and [`rnbd::INSMOD_CLIENT`] made.
pub(in super::super) fn client_down(c: &mut Ctx<'_>) -> Result<(), Error> {
    rnbd::client_down(c)?;
    c.guest()?.run("rdma link delete rxe1", 60).map(drop)
}

/// By default the path with the fewest requests under way gets the next one. Reads that went over to another path may stay
/// counted where they were, so that one that was lost often gets nothing any more (by reading `complete_rdma_req`, and seen
/// here).
pub(in super::super) const BY_TURNS: &str = "echo round-robin > $C/mpath_policy\n";

/// Maps with two paths; both carry load, until fio is told to end.
pub(in super::super) const START: &str =
    "map_by path=$P0 path=$P1; up 2 100; load 16M 1800; carried $P0; carried $P1; paths\n";

/// The path that was cut is known to be gone, and fio goes on by the other.
const GONE: &str = "paths; [ $(connected) = 1 ]; pidof fio >/dev/null\n";

/// The path comes back by itself, and both carry load again, if by turns.
pub(in super::super) const BACK: &str = "\
    paths; start=$(at); up 2 2400; echo connected $(($(at)-start)) s later\n\
    for p in $P0 $P1; do echo reconnects $(cat $S/$p/stats/reconnects); done\n\
    set -- $(cut -d' ' -f1 $S/$P0/stats/reconnects $S/$P1/stats/reconnects); [ \"$*\" = '0 1' ]\n\
    for p in $S/*; do echo 1 > $p/stats/rdma; done\n\
    fio --name=read --filename=/dev/rnbd0 --size=4M --bs=4k --rw=read --direct=1 --ioengine=libaio --iodepth=8 >/dev/null\n\
    paths; [ $(cat $S/*/stats/rdma | cut -d' ' -f1 | grep -c '^[1-9]') = 2 ]\n\
    sum 256; echo normal > $B/unmap_device\n";

/// The kernel's client has two paths to our server, which listens at both addresses.
fn two_paths(c: &mut Ctx<'_>, case: Case) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let any = if case.ip == Ip::V4 { "0.0.0.0" } else { "::" };
    let server = Server::start_as(c, Orders::new(any, &["disk"], "on").threads(case.threads))?;
    let result = cut_in_io(c, case);
    client_down(c)?;
    let (report, back) = result?;
    let opened = server.count("session_opened");
    server.stop()?;
    if opened != 1 {
        return Err(format!("{opened} sessions were opened, not one").into());
    }
    same_on_image(c, &back, 16 << 20)?;
    let failovers = failovers(&back);
    if failovers == 0 {
        return Err(format!("no request went over to the other path:\n{back}").into());
    }
    let longest = longest(&report)?;
    if longest > TIMEOUT {
        return Err(format!("a request took {:.1} s", longest.as_secs_f64()).into());
    }
    let attempts = connected_anew(c)?;
    let again = back.lines().find(|l| l.starts_with("connected ")).unwrap_or_default();
    Ok(format!(
        "no error, all blocks right, the longest request took {:.1} s; {failovers} failovers; {again} (attempt {attempts} \
         of the same path), both carry load: passed",
        longest.as_secs_f64()
    ))
}

/// fio's report, and what was printed after that.
fn cut_in_io(c: &mut Ctx<'_>, case: Case) -> Result<(String, String), Error> {
    let (head, cut) = (head(c, case.ip)?, case.cut);
    let start = format!("{}{head}{CLIENT_UP}{START}", rnbd::INSMOD_CLIENT);
    script(c, &start, 120)?;
    cut.set(c, false)?;
    std::thread::sleep(Duration::from_secs(cut.seconds()));
    let gone = script(c, &format!("{head}{GONE}"), 60);
    // Also for the next scenario.
    cut.set(c, true)?;
    gone?;
    let report = script(c, &format!("{head}unload\n"), 240)?;
    Ok((report, script(c, &format!("{head}{BY_TURNS}{BACK}"), 400)?))
}

/// Requests that went over to another path, of the lines of the shell function `paths`.
fn failovers(text: &str) -> u64 {
    let last = |line: &str| {
        line.strip_prefix("path ")?
            .split_whitespace()
            .nth(7)?
            .parse::<u64>()
            .ok()
    };
    text.lines().filter_map(last).sum()
}

#[cfg(test)]
mod tests {
    use super::failovers;

    #[test]
    fn failovers_are_the_last_count_of_a_path() {
        let line = "path ip:10.77.0.1@ip:10.77.0.254 connected 1 2 3 4 5 6";
        assert_eq!(failovers(&format!("{line}\nconnected 31 s later\n{line}")), 12);
    }
}
