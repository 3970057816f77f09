//! What the guest's administrator orders of the kernel's client, with our server on the other end.

use super::{
    super::{
        Ctx, Direction, Scenario,
        faults::same_on_image,
        rnbd::{self, Server, image},
    },
    kernel_client::{CLIENT_UP, client_down, head},
    longest, script,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        Scenario::new(10, name, Direction::KernelToOurs, run).nets(2)
    };
    vec![
        new("paths-orders-kernel-client", orders),
        new("paths-disconnected-kernel-client", disconnected).waits(),
    ]
}

/// A path is added under load, and once more in vain.
const ADD: &str = "\
    map_by path=$P0; up 1 100; load 1M 300 200; carried $P0\n\
    echo $P1 > $C/add_path; up 2 0; carried $P1; paths\n\
    refused 'File exists' $P1 $C/add_path; up 2 1; [ $(ls $S | wc -l) = 2 ]\n";

/// One that is disconnected stays listed and is connected when that is ordered; also one that is connected.
const DISCONNECT: &str = "\
    echo 1 > $S/$P1/disconnect; up 1 1; [ -e $S/$P1 ];\n\
    echo 1 > $S/$P0/stats/rdma; carried $P0; paths\n\
    echo 1 > $S/$P1/reconnect; up 2 1; echo 1 > $S/$P1/stats/rdma; carried $P1; echo reconnected\n\
    echo 1 > $S/$P1/reconnect; up 2 1; echo 1 > $S/$P1/stats/rdma; carried $P1; echo reconnected; paths\n\
    refused 'Invalid argument' 2 $S/$P1/reconnect; refused 'Invalid argument' 2 $S/$P1/disconnect\n";

/// Without its own address the path can't be connected: ENOTCONN. With it, but nobody who answers, the order waits (an address
/// is not known to be unreachable before 30 s have passed), and another one ends with EBUSY, after the second that the client
/// waits before each attempt. It succeeds when there is somebody.
const NOBODY: &str = "\
    own=${P1%@*}; own=${own#ip:}/24; echo 1 > $S/$P1/disconnect; ip addr del $own dev eth1\n\
    refused 'not connected' 1 $S/$P1/reconnect; up 1 1; ip addr add $own dev eth1\n\
    tc qdisc add dev eth1 root netem loss 100%; ip neigh flush dev eth1\n\
    echo 1 > $S/$P1/reconnect & first=$!\n\
    sleep 2; refused 'Device or resource busy' 1 $S/$P1/reconnect; up 1 1\n\
    tc qdisc del dev eth1 root; neighbours; wait $first; up 2 1; paths\n\
    echo 1 > $S/$P1/stats/rdma; carried $P1\n";

/// A path is removed under load.
const REMOVE: &str = "\
    echo 1 > $S/$P0/remove_path; [ \"$(ls $S)\" = $P1 ]; up 1 1\n\
    echo 1 > $S/$P1/stats/rdma; carried $P1; paths; unload\n";

/// Without any path the device is closed, and I/O fails at once; with a path it is open again, with all its data.
const LAST: &str = "\
    before=$(sum 16); echo before: $before\n\
    echo 1 > $S/$P1/remove_path; [ -z \"$(ls $S)\" ]; state closed; start=$(at)\n\
    for dir in if of; do case $dir in if) to=/dev/null; from=/dev/rnbd0;; of) from=/dev/zero; to=/dev/rnbd0;; esac\n\
        flag=$([ $dir = if ] && echo iflag=direct || echo oflag=direct)\n\
        if timeout 20 dd if=$from of=$to bs=4k count=1 $flag 2>/tmp/err; then echo 'without a path that went well'; exit 1; fi\n\
        cat /tmp/err; grep -q 'Input/output error' /tmp/err; done\n\
    echo closed, I/O fails within $(($(at)-start)) s\n\
    echo $P0 > $C/add_path; up 1 0; state open\n\
    [ \"$(sum 16)\" = \"$before\" ]\n\
    dd if=/dev/urandom of=/tmp/a bs=64k count=4 status=none; dd if=/tmp/a of=/dev/rnbd0 bs=64k oflag=direct status=none\n\
    cmp -n 262144 /tmp/a /dev/rnbd0; sum 16; echo normal > $B/unmap_device\n";

/// By the guest's sysfs, under load: add, disconnect, reconnect, remove; the last path removed, and another added.
fn orders(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let result = in_turn(c);
    client_down(c)?;
    let (report, out) = result?;
    let opened = server.count("session_opened");
    let summary = server.summary()?;
    // One until its last path went, and one with the path that was added then. The same path twice was refused.
    if opened != 2 || summary["connections_refused"] != 1 || summary["failed_requests"] != 0 {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    same_on_image(c, &out, 1 << 20)?;
    let fails = out.lines().find(|l| l.starts_with("closed, ")).unwrap_or_default();
    Ok(format!(
        "added, disconnected, reconnected, removed under load: no error, the longest request took {:.1} s; without a path: \
         {fails}; with one again: open, data equal: passed",
        longest(&report)?.as_secs_f64()
    ))
}

/// fio's report, and what was printed after that.
fn in_turn(c: &mut Ctx<'_>) -> Result<(String, String), Error> {
    let head = head(c, Ip::V4)?;
    let add = format!("{}{head}{CLIENT_UP}{ADD}{DISCONNECT}", rnbd::INSMOD_CLIENT);
    script(c, &add, 120)?;
    script(c, &format!("{head}{NOBODY}"), 120)?;
    let report = script(c, &format!("{head}{REMOVE}"), 120)?;
    Ok((report, script(c, &format!("{head}{LAST}"), 120)?))
}

/// Longer than the 30 s after which a client connects again what it has lost.
const STAYS: &str = "\
    map_by path=$P0 path=$P1; up 2 100; echo 1 > $S/$P1/disconnect; up 1 1; sleep 36; up 1 0; [ -e $S/$P1 ]\n\
    dd if=/dev/rnbd0 of=/dev/null bs=64k count=16 iflag=direct status=none\n\
    echo reconnects $(cat $S/$P1/stats/reconnects); [ \"$(cat $S/$P1/stats/reconnects)\" = '0 0' ]\n\
    echo 1 > $S/$P1/reconnect; up 2 0; echo normal > $B/unmap_device\n";

/// A path that is disconnected by order does not come back by itself.
fn disconnected(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start_at(c, "0.0.0.0", &["disk"], "on")?;
    let head = head(c, Ip::V4)?;
    let result = script(c, &format!("{}{head}{CLIENT_UP}{STAYS}", rnbd::INSMOD_CLIENT), 240);
    client_down(c)?;
    result?;
    let (opened, summary) = (server.count("session_opened"), server.summary()?);
    // Three times two connections: two paths, one of them twice.
    if opened != 1 || summary["counters"]["cm_sent_rep"] != 6 {
        return Err(format!("{opened} sessions were opened; the server counted {summary}").into());
    }
    Ok("gone for 36 s, back by order: passed".to_owned())
}
