//! Our client over several paths to the kernel's server, one of which is cut.

use std::{path::PathBuf, process::Command, time::Duration};

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{self, Mapping, RMMOD_SERVER, checksum_here, checksum_in_guest},
    },
    Cut, connected_anew, longest_of, script,
};
use crate::{
    Error,
    far::Ip,
    lab::{HOST_V4, HOST_V6, Proc, check_stop},
};

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut add = |name: &str, ci, ip, cut, loads: &'static [Load]| {
        let s = Scenario::new(10, name, Direction::OursToKernel, move |c| two_paths(c, ip, cut, loads));
        all.push(s.nets(2).waits().ci_if(ci));
    };
    add("paths-port-down-our-client", false, Ip::V4, Cut::Port, &Load::ALL);
    add("paths-carrier-lost-our-client", false, Ip::V4, Cut::Carrier, &Load::ALL);
    add(
        "paths-carrier-lost-our-client-v6",
        true,
        Ip::V6,
        Cut::Carrier,
        &[Load::Both],
    );
    all
}

/// The disk of the guest that is mapped.
pub(in super::super) const DISK: &str = "ram0";

/// What of it is used, from its start, MiB.
const USED: usize = 32;

/// The longest that a request may take when its path goes: 7 s until heartbeats tell, and what a busy machine adds.
pub(in super::super) const TIMEOUT: Duration = Duration::from_secs(15);

/// The kernel's server on both networks. It registers nothing while it answers: a registration that rdma_rxe repeats stops its
/// queue pair (`specs/kernel.md`).
pub(in super::super) fn server_up(c: &mut Ctx<'_>) -> Result<(), Error> {
    let load = rnbd::server_modules("N");
    script(c, &format!("rdma link add rxe1 type rxe netdev eth1\n{load}"), 120).map(drop)
}

/// Takes down what [`server_up`] made.
pub(in super::super) fn server_down(c: &mut Ctx<'_>) -> Result<(), Error> {
    script(c, &format!("{RMMOD_SERVER}; rdma link delete rxe1"), 120).map(drop)
}

/// The paths to the guest, one over each network, as `--path` takes them and events have them.
pub(super) fn paths(c: &mut Ctx<'_>, ip: Ip) -> Result<[String; 2], Error> {
    let guest = c.guest()?;
    let host = if ip == Ip::V4 { HOST_V4 } else { HOST_V6 };
    let path = |net: u8| format!("ip:{}@ip:{}", host[usize::from(net)], guest.addr(net, ip));
    Ok([path(0), path(1)])
}

/// Maps [`DISK`] over both networks, and waits until it is there.
pub(super) fn map(c: &mut Ctx<'_>, ip: Ip, more: &[&str]) -> Result<Mapping, Error> {
    let paths = paths(c, ip)?;
    mapped(Mapping::spawn_over(c, &paths, DISK, &[&["--json"], more].concat())?)
}

/// The same; its process can be [asked](Proc::ask).
pub(super) fn map_steered(c: &mut Ctx<'_>, ip: Ip, more: &[&str]) -> Result<Mapping, Error> {
    let paths = paths(c, ip)?;
    mapped(Mapping::steered_over(c, &paths, DISK, &[&["--json"], more].concat())?)
}

fn mapped(mut mapping: Mapping) -> Result<Mapping, Error> {
    mapping.wait_more("mapped", 0, Duration::from_secs(90))?;
    Ok(mapping)
}

/// What the kernel's server has answered by each of the two paths of a session since each was connected: requests.
pub(super) fn served(c: &mut Ctx<'_>, session: &str) -> Result<[u64; 2], Error> {
    let text = c.guest()?.run(&format!("S={session}\n{SERVED}served\n"), 30)?;
    served_in(&text).ok_or_else(|| format!("the server counts {text}").into())
}

/// A shell function: for each network a line with the reads and writes by the path there of the session `$S`.
pub(super) const SERVED: &str = "\
    served() { for n in 77 78; do cd /sys/class/rtrs-server/$S/paths; \
        set -- $(cat *10.$n.*/stats/rdma *fd$n:*/stats/rdma 2>/dev/null); echo served ${1:-0} ${3:-0}; done; }\n";

/// The requests of the two lines of [`SERVED`].
pub(super) fn served_in(text: &str) -> Option<[u64; 2]> {
    let sum = |line: &str| {
        line.split_whitespace()
            .map(str::parse::<u64>)
            .sum::<Result<u64, _>>()
            .ok()
    };
    let mut lines = text.lines().filter_map(|l| l.strip_prefix("served ")).map(sum);
    Some([lines.next()??, lines.next()??])
}

/// Waits until each path has served so many more requests.
pub(super) fn both_carry(c: &mut Ctx<'_>, count: u64) -> Result<(), Error> {
    let before = served(c, "ours")?;
    let mut last = before;
    for _ in 0..60 {
        check_stop()?;
        std::thread::sleep(Duration::from_millis(500));
        last = served(c, "ours")?;
        if last.iter().zip(before).all(|(last, before)| *last >= before + count) {
            return Ok(());
        }
    }
    Err(format!("not both paths carry load: {before:?}, then {last:?}").into())
}

/// What fio does until it is told to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Load {
    /// Writes, and reads back what it wrote.
    Both,
    Reads,
    Writes,
}

impl Load {
    const ALL: [Self; 3] = [Self::Both, Self::Reads, Self::Writes];

    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Both => &[
                "--rw=randwrite",
                "--verify_backlog=32",
                "--rate=400k,400k",
                "--bsrange=4k-128k",
            ],
            // It ends when it has read all, after 40 s.
            Self::Reads => &["--rw=randread", "--rate=100k", "--bsrange=4k-64k"],
            Self::Writes => &["--rw=randwrite", "--do_verify=0", "--rate=400k", "--bsrange=4k-128k"],
        }
    }

    const fn ways(self) -> &'static [&'static str] {
        match self {
            Self::Both => &["read", "write"],
            Self::Reads => &["read"],
            Self::Writes => &["write"],
        }
    }
}

/// fio on a mapping: blocks of many sizes, each 4 KiB of them with their place and a checksum, by eight jobs, each with two
/// requests under way in a part of its own. At its rate a job would wait for one request that is stuck before it goes on.
pub(in super::super) struct Fio {
    process: Proc,
    report: PathBuf,
    load: Load,
}

impl Fio {
    /// Fills what of the disk is used, so that all of it can be verified.
    pub(in super::super) fn fill(c: &Ctx<'_>, mapping: &Mapping) -> Result<(), Error> {
        Self::whole(c, mapping, "fill", &["--rw=write", "--do_verify=0"])?.finish(Duration::from_secs(300))?;
        Ok(())
    }

    /// Reads that, and verifies it.
    pub(in super::super) fn verify(c: &Ctx<'_>, mapping: &Mapping) -> Result<(), Error> {
        Self::whole(c, mapping, "verify", &["--rw=read"])?.finish(Duration::from_secs(300))?;
        Ok(())
    }

    fn whole(c: &Ctx<'_>, mapping: &Mapping, name: &str, options: &[&str]) -> Result<Proc, Error> {
        let size = format!("--size={USED}M");
        let options = [options, &["--iodepth=8", "--bs=64k", &size]].concat();
        Self::spawn(c, mapping, name, &options)
    }

    /// Begins, at a rate that a busy guest and the capture can bear.
    pub(in super::super) fn start(c: &Ctx<'_>, mapping: &Mapping, load: Load) -> Result<Self, Error> {
        Self::start_with(c, mapping, load, &[])
    }

    /// The same, with further options. Of an option that is there twice fio takes the last.
    pub(in super::super) fn start_with(
        c: &Ctx<'_>,
        mapping: &Mapping,
        load: Load,
        more: &[&str],
    ) -> Result<Self, Error> {
        let name = format!("fio-{load:?}").to_lowercase();
        let report = c.dir.join(format!("{name}.json"));
        let output = format!("--output={}", report.display());
        let part = USED / 8;
        let [size, apart] = ["size", "offset_increment"].map(|option| format!("--{option}={part}M"));
        let mut options = vec!["--numjobs=8", "--iodepth=2", &size, &apart];
        options.extend(["--time_based", "--runtime=3600"]);
        options.extend(["--output-format=json", &output]);
        options.extend(load.options());
        options.extend(more);
        let process = Self::spawn(c, mapping, &name, &options)?;
        Ok(Self { process, report, load })
    }

    fn spawn(c: &Ctx<'_>, mapping: &Mapping, name: &str, options: &[&str]) -> Result<Proc, Error> {
        let uri = format!("--uri={}", mapping.url);
        let mut fio = Command::new("fio");
        fio.args(["--thread", "--name=job", "--ioengine=nbd", &uri]);
        fio.args([
            "--verify=crc32c",
            "--verify_interval=4096",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ]);
        Proc::spawn(name, fio.args(options), &c.dir)
    }

    /// An error if it has ended: it does at the first error.
    pub(in super::super) fn still_runs(&mut self) -> Result<(), Error> {
        let running = self.process.still_runs();
        running.map_err(|e| format!("{e}:\n{}", self.process.text()).into())
    }

    /// Ends it. The longest that a request took; an error unless all went well.
    pub(in super::super) fn stop(mut self) -> Result<Duration, Error> {
        self.still_runs()?;
        self.process.interrupt();
        self.process.wait_gone(Duration::from_secs(120))?;
        let report = std::fs::read_to_string(&self.report)?;
        longest_of(&report, self.load.ways()).map_err(|e| format!("{e}\n{}", self.process.text()).into())
    }
}

/// One of the paths is cut and comes back, once under each load.
fn two_paths(c: &mut Ctx<'_>, ip: Ip, cut: Cut, loads: &[Load]) -> Result<String, Error> {
    server_up(c)?;
    let result = cut_in_io(c, ip, cut, loads);
    // Also for the next scenario.
    cut.set(c, true)?;
    server_down(c)?;
    result
}

fn cut_in_io(c: &mut Ctx<'_>, ip: Ip, cut: Cut, loads: &[Load]) -> Result<String, Error> {
    let mut mapping = map(c, ip, &["--policy", "round-robin"])?;
    Fio::fill(c, &mapping)?;
    let mut told = Vec::new();
    for &load in loads {
        let longest = cut_once(c, &mut mapping, cut, load)?;
        told.push(format!("{load:?} {:.1} s", longest.as_secs_f64()));
        if longest > TIMEOUT {
            return Err(format!("the longest requests took {told:?}").into());
        }
    }
    let failovers = failovers(&mapping, &paths(c, ip)?)?;
    same_in_guest(c, &mapping)?;
    if mapping.count("session_lost") + mapping.count("remapped") > 0 {
        return Err(format!("the session was lost:\n{}", mapping.process.text()).into());
    }
    mapping.stop()?;
    let attempts = connected_anew(c)?;
    Ok(format!(
        "no error, all blocks right, the longest request by load: {}; {failovers} failovers; the path came back by itself \
         (attempt {attempts} of the same path), both carry load: passed",
        told.join(", ").to_lowercase()
    ))
}

/// The path over the second network goes under load, its requests go by the other, and it comes back by itself. Returns the
/// longest that a request took.
fn cut_once(c: &mut Ctx<'_>, mapping: &mut Mapping, cut: Cut, load: Load) -> Result<Duration, Error> {
    let mut fio = Fio::start(c, mapping, load)?;
    both_carry(c, 20)?;
    let before = ["path_down", "failover", "path_up"].map(|event| mapping.count(event));
    cut.set(c, false)?;
    mapping.wait_more("path_down", before[0], TIMEOUT * 2)?;
    mapping.wait_more("failover", before[1], TIMEOUT)?;
    // It goes on by the other.
    std::thread::sleep(Duration::from_secs(1));
    fio.still_runs()?;
    cut.set(c, true)?;
    // The kernel's server refuses the path until it knows that it is lost (`specs/kernel.md`).
    mapping.wait_more("path_up", before[2], Duration::from_secs(120))?;
    both_carry(c, 20)?;
    fio.stop()
}

/// Requests that went over to the path that stayed; none went the other way.
fn failovers(mapping: &Mapping, paths: &[String; 2]) -> Result<u64, Error> {
    let mut sum = [0; 2];
    for event in mapping.events("failover") {
        let by = event["path"].as_str().unwrap_or_default();
        let net = paths
            .iter()
            .position(|p| p == by)
            .ok_or_else(|| format!("{event}: by none of {paths:?}"))?;
        sum[net] += event["requests"].as_u64().unwrap_or_default();
    }
    match sum {
        [n, 0] if n > 0 => Ok(n),
        _ => Err(format!("requests went over to the paths {paths:?}: {sum:?}").into()),
    }
}

/// All that is used of the disk is right, and the same here and there.
pub(in super::super) fn same_in_guest(c: &Ctx<'_>, mapping: &Mapping) -> Result<(), Error> {
    Fio::verify(c, mapping)?;
    let copy = c.path("copy.img");
    let (from, to, count) = (
        format!("if={}", mapping.url),
        format!("of={copy}"),
        format!("count={USED}"),
    );
    c.tool(
        "copy",
        "qemu-img",
        &["dd", "-O", "raw", "bs=1M", &from, &to, &count],
        300,
    )?;
    let (here, there) = (checksum_here(c, &copy)?, checksum_in_guest(c, DISK, USED << 20)?);
    std::fs::remove_file(&copy)?;
    if here == there {
        return Ok(());
    }
    Err(format!("what was read back has MD5 {here}, the kernel's {DISK} has {there}").into())
}

#[cfg(test)]
mod tests {
    use super::served_in;

    #[test]
    fn requests_are_counted_by_network() {
        assert_eq!(served_in("served 3 4\nserved 0 9\n"), Some([7, 9]));
        assert_eq!(served_in("served 3 4\n"), None);
    }
}
