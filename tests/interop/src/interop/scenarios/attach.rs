//! 14: `ferroce map --attach` in a guest: a device of our server here as a block device of its kernel's NBD, and what a hop into the
//! kernel costs by NBD and by ublk.

use std::path::Path;

use serde_json::Value;

use super::{
    Ctx, Direction, Scenario,
    rdma::{FUNCTIONS, Shown, median},
    rnbd::{Server, fsck, image},
};
use crate::{Error, far::Ip, guest::Kernel, lab::Places};

pub(super) fn list() -> Vec<Scenario> {
    let new = |name: &str, run: fn(&mut Ctx<'_>, &Shown) -> Result<String, Error>| {
        Scenario::new(14, name, Direction::Both, move |c| {
            let shown = Shown::new(&c.places.ferroce, c.places)?;
            let freed = port_freed(c);
            let result = freed.and_then(|()| run(c, &shown));
            let taken = port_taken(c);
            let result = result?;
            taken.map(|()| result)
        })
    };
    let lacks = |places: &Places, _: Kernel| {
        let missing = ["nbd-client", "nbdkit"].into_iter().find(|program| {
            let folders = ["/usr/sbin", "/sbin", "/usr/bin"];
            !folders.iter().any(|folder| Path::new(folder).join(program).exists())
        });
        let program =
            missing.map(|program| format!("{program} is not installed here, where the guest has its programs from"));
        let ublk = || "no program for ublk: cargo xtask interop builds it".to_owned();
        program.or_else(|| places.ublk.is_none().then(ublk))
    };
    vec![
        new("attach-file-system", file_system).ci(),
        new("attach-speed", speed).lacks(lacks),
    ]
}

/// Unloads rdma_rxe, whose UDP port our transport needs.
fn port_freed(c: &mut Ctx<'_>) -> Result<(), Error> {
    c.guest()?
        .run("rdma link delete rxe0; modprobe -r rdma_rxe", 60)
        .map(drop)
}

fn port_taken(c: &mut Ctx<'_>) -> Result<(), Error> {
    let script = "for d in /sys/block/nbd*/pid; do [ ! -e $d ] || { echo \"$d is left\"; exit 1; }; done\n\
                  modprobe -r nbd; modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0";
    c.guest()?.run(script, 60).map(drop)
}

/// Runs a script with `$F`, our program, and `$SERVER` in the guest.
fn run(c: &mut Ctx<'_>, shown: &Shown, script: &str, seconds: u32) -> Result<String, Error> {
    let host = c.host(Ip::V4)?;
    let guest = c.guest()?;
    let head = format!(
        "F={}; SERVER={host}; export FERROCE_BROKER=off\n{FUNCTIONS}",
        shown.path()
    );
    let result = guest.run(&format!("{head}{script}\n"), seconds);
    result.map_err(|e| format!("{e}\ndmesg:\n{}", guest.dmesg()).into())
}

/// A file system from its making to its end; what is refused, and what is left.
const WORK: &str = "\
    refused() { n=$1; shift; begin $n \"$@\"; ended $n 60; [ \"$(cat /tmp/$n.rc)\" != 0 ] || { echo \"$n is not refused\"; return 1; }; }\n\
    begin map map --json --session attach --path $SERVER --device disk --attach\n\
    told map '\"event\":\"attached\"' 60; grep -q '\"node\":\"/dev/nbd0\"' /tmp/map.out\n\
    [ $(blockdev --getsize64 /dev/nbd0) = 67108864 ]; mkfs.ext4 -q /dev/nbd0; mkdir -p /mnt/a; mount -t ext4 /dev/nbd0 /mnt/a\n\
    cp -a /usr/include/rdma /mnt/a/; sync; echo 3 > /proc/sys/vm/drop_caches; diff -r --no-dereference /usr/include/rdma /mnt/a/rdma\n\
    ip addr add 10.77.0.201/24 dev eth0\n\
    refused second map --session other --addr 10.77.0.201 --path $SERVER --device disk,ro --attach /dev/nbd0\n\
    grep -q '/dev/nbd0 is in use' /tmp/second.err || { said second; exit 1; }\n\
    kill -TERM $(cat /tmp/map.pid); for i in $(seq 100); do grep -q 'mounted at /mnt/a' /tmp/map.err && break; sleep 0.1; done\n\
    grep -q 'mounted at /mnt/a' /tmp/map.err; touch /mnt/a/still; sync; [ ! -e /tmp/map.rc ]\n\
    umount /mnt/a; ended map 60; [ \"$(cat /tmp/map.rc)\" = 0 ] || { said map; exit 1; }\n\
    grep -q '\"event\":\"detached\"' /tmp/map.out; [ ! -e /sys/block/nbd0/pid ]\n\
    begin two map --json --session two --path $SERVER --device disk --attach /dev/nbd3\n\
    told two '\"node\":\"/dev/nbd3\"' 60; mount -t ext4 /dev/nbd3 /mnt/a; diff -r --no-dereference /usr/include/rdma /mnt/a/rdma\n\
    [ -e /mnt/a/still ]; umount /mnt/a; ends two\n\
    setpriv --reuid=65534 --regid=65534 --clear-groups \"$F\" map --session weak --path $SERVER --device disk,ro --attach >/tmp/weak.out 2>/tmp/weak.err && exit 1\n\
    grep -q CAP_SYS_ADMIN /tmp/weak.err || { said weak; exit 1; }\n";

fn file_system(c: &mut Ctx<'_>, shown: &Shown) -> Result<String, Error> {
    image(c, "disk", 64)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let worked = run(c, shown, WORK, 400);
    let ended = server.end();
    worked?;
    let summary = ended?;
    let check = fsck(c, "disk")?;
    Ok(format!(
        "ext4 made, mounted, filled and compared by /dev/nbdN, fsck clean ({check}); {} bytes written: passed",
        summary["bytes_written"]
    ))
}

/// Rounds, in which the ways take turns. A whole number of them, so that there is a median.
const ROUNDS: usize = 3;
/// Of each load in a round.
const SECONDS: u32 = 4;
/// The loads of the comparison: their names, and fio's options.
const LOADS: [(&str, &str); 6] = [
    ("4 KiB random reads, 1 at a time", "--rw=randread --bs=4k --iodepth=1"),
    ("4 KiB random reads, 32 at a time", "--rw=randread --bs=4k --iodepth=32"),
    ("4 KiB random writes, 1 at a time", "--rw=randwrite --bs=4k --iodepth=1"),
    (
        "4 KiB random writes, 32 at a time",
        "--rw=randwrite --bs=4k --iodepth=32",
    ),
    (
        "128 KiB sequential reads, 4 at a time",
        "--rw=read --bs=128k --iodepth=4",
    ),
    (
        "128 KiB sequential writes, 4 at a time",
        "--rw=write --bs=128k --iodepth=4",
    ),
];

/// Block device of the guest: how it gets there, its node, and how it goes.
struct Way {
    name: &'static str,
    /// Ways are compared with the first one that has the same.
    behind: &'static str,
    up: &'static str,
    node: &'static str,
    down: &'static str,
}

const SERVER: &str = "RNBD";
const MEMORY: &str = "memory";

const WAYS: [Way; 4] = [
    Way {
        name: "--attach",
        behind: SERVER,
        up: "begin map map --json --session speed --path $SERVER --device disk --attach /dev/nbd0\n\
             told map '\"event\":\"attached\"' 60",
        node: "/dev/nbd0",
        down: "ends map",
    },
    Way {
        name: "nbd-client",
        behind: SERVER,
        up: "modprobe nbd; begin map map --json --session speed --path $SERVER --device disk --nbd /tmp/nbd.sock\n\
             told map '\"event\":\"mapped\"' 60; nbd-client -unix /tmp/nbd.sock /dev/nbd0 -N disk >/dev/null",
        node: "/dev/nbd0",
        down: "nbd-client -d /dev/nbd0 >/dev/null; ends map",
    },
    // One thread, as a queue of ublk has.
    Way {
        name: "nbd-client",
        behind: MEMORY,
        up: "modprobe nbd; nbdkit -t 1 -P /tmp/nbdkit.pid -U /tmp/nbdkit.sock memory 64M\n\
             nbd-client -unix /tmp/nbdkit.sock /dev/nbd0 >/dev/null",
        node: "/dev/nbd0",
        down: "nbd-client -d /dev/nbd0 >/dev/null; kill $(cat /tmp/nbdkit.pid); rm /tmp/nbdkit.sock",
    },
    Way {
        name: "ublk",
        behind: MEMORY,
        up: "modprobe ublk_drv; F=/tmp/ublk; begin ublk; told ublk /dev/ublkb0 60",
        node: "/dev/ublkb0",
        down: "kill -TERM $(cat /tmp/ublk.pid); ended ublk 60; for i in $(seq 100); do [ -e /dev/ublkb0 ] || break; sleep 0.1; done\n\
               modprobe -r ublk_drv",
    },
];

/// Requests in a second of each load on a block device of the guest.
fn loads(c: &mut Ctx<'_>, shown: &Shown, node: &str) -> Result<Vec<f64>, Error> {
    let each = LOADS.map(|(_, options)| format!("--name=load --stonewall {options}"));
    let script = format!(
        "fio --filename={node} --size=32M --direct=1 --ioengine=libaio --time_based --runtime={SECONDS} --output-format=json {} 2>/dev/null",
        each.join(" ")
    );
    let text = run(c, shown, &script, 240)?;
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json).map_err(|e| format!("fio left no report: {e}: {text}"))?;
    let rate = |job: &Value| {
        let ways = ["read", "write"].map(|way| job[way]["iops"].as_f64().unwrap_or_default());
        let sum: f64 = ways.iter().sum();
        (job["error"] == 0 && sum > 0.0).then_some(sum)
    };
    let jobs = report["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let rates: Option<Vec<f64>> = jobs.iter().map(rate).collect();
    rates
        .filter(|rates| rates.len() == LOADS.len())
        .ok_or_else(|| format!("fio: {text}").into())
}

/// The loads by one way.
fn round(c: &mut Ctx<'_>, shown: &Shown, way: &Way) -> Result<Vec<f64>, Error> {
    run(c, shown, way.up, 120)?;
    let rates = loads(c, shown, way.node);
    let down = run(c, shown, way.down, 60);
    let rates = rates?;
    down.map(|_| rates)
}

/// Median of each load, for each way that this kernel has.
fn medians(c: &mut Ctx<'_>, shown: &Shown) -> Result<Vec<(&'static Way, Vec<f64>)>, Error> {
    let has_ublk = run(c, shown, "modprobe -n ublk_drv", 60).is_ok();
    let ways = WAYS.iter().filter(|way| way.name != "ublk" || has_ublk);
    let mut measured: Vec<_> = ways.map(|way| (way, Vec::new())).collect();
    for _ in 0..ROUNDS {
        for (way, rounds) in &mut measured {
            rounds.push(round(c, shown, way)?);
        }
    }
    let median_of = |rounds: &[Vec<f64>], load: usize| median(rounds.iter().map(|rates| rates[load]).collect());
    let medians = measured.into_iter().map(|(way, rounds)| {
        let each = (0..LOADS.len()).map(|load| median_of(&rounds, load));
        (way, each.collect())
    });
    Ok(medians.collect())
}

/// `--attach` compared with `nbd-client` on the socket of the same program, and a hop into the kernel by NBD with one by ublk.
fn speed(c: &mut Ctx<'_>, shown: &Shown) -> Result<String, Error> {
    let ublk = c.places.ublk.as_deref().ok_or("no program for ublk")?;
    let ublk = Shown::new(ublk, c.places)?;
    c.guest()?.run(&format!("ln -sf {} /tmp/ublk", ublk.path()), 60)?;
    image(c, "disk", 64)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let medians = medians(c, shown);
    let ended = server.end();
    let medians = medians?;
    ended?;
    let texts = LOADS.iter().enumerate().map(|(load, (name, _))| {
        let of = |(way, rates): &(&Way, Vec<f64>)| {
            let first = medians.iter().find(|(first, _)| first.behind == way.behind);
            let ratio = rates[load] / first.map_or(f64::NAN, |(_, rates)| rates[load]);
            format!("{} by {} {:.0}/s ({ratio:.2})", way.behind, way.name, rates[load])
        };
        format!("{name}: {}", medians.iter().map(of).collect::<Vec<_>>().join(", "))
    });
    Ok(format!("{}: passed", texts.collect::<Vec<_>>().join("; ")))
}
