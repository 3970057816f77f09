//! Which path a request takes: our client beside the kernel's, both on the kernel's server, with the same delays.

use std::{process::Command, time::Duration};

use serde_json::json;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{self, Mapping},
    },
    our_client::{SERVED, map, map_steered, paths, served, served_in, server_down, server_up},
    script,
};
use crate::{Error, far::Ip, lab::Proc};

pub(super) fn list() -> Vec<Scenario> {
    let both = Scenario::new(10, "paths-policies", Direction::OursToKernel, policies);
    let swap = Scenario::new(10, "paths-min-latency-swap-our-client", Direction::OursToKernel, swap);
    vec![both.nets(2).guests(2).waits(), swap.nets(2).waits()]
}

/// Which share of the requests takes the first path, whose delay is a third of the second's.
struct Policy {
    name: &'static str,
    /// What the share must be, at the least and at the most.
    share: [f64; 2],
}

impl Policy {
    /// Whether our share is right, and that of the kernel's client.
    fn alike(&self, [ours, kernels]: &[f64; 2]) -> bool {
        let [least, most] = self.share;
        (least..=most).contains(ours) && (ours - kernels).abs() <= APART
    }
}

const POLICIES: [Policy; 3] = [
    Policy {
        name: "round-robin",
        share: [0.48, 0.52],
    },
    // Eight requests under way, so that in a given time three go by the first path for each that goes by the second.
    Policy {
        name: "min-inflight",
        share: [0.65, 0.85],
    },
    Policy {
        name: "min-latency",
        share: [0.97, 1.0],
    },
];

/// How often a policy is tried: a busy machine delays a heartbeat here and there by more than the networks do, and until the next
/// one its path is the slow one.
const TRIES: usize = 3;

/// How far the share of our client may be from that of the kernel's.
const APART: f64 = 0.1;

/// Each way, on the two networks.
const DELAYS: [&str; 2] = ["delay 10ms", "delay 30ms"];

/// Load that keeps eight requests under way. Writes: for reads the kernel's client registers memory, which rdma_rxe may repeat
/// (`specs/kernel.md`).
const LOAD: [&str; 8] = [
    "--name=job",
    "--rw=randwrite",
    "--bs=4k",
    "--iodepth=8",
    "--size=16M",
    "--time_based",
    "--runtime=10",
    "--thread",
];

/// Until each path of the kernel's client has been measured: it sends a heartbeat every 5 s.
const MEASURED: Duration = Duration::from_secs(12);

fn policies(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = kernel_maps(c).and_then(|()| compare(c));
    // Also for the next scenario.
    delays(c, [None, None])?;
    let second = c.second.as_deref().ok_or("needs a second guest")?;
    let (_, text) = second.try_run(&format!("{}\nrdma link delete rxe1", rnbd::RMMOD_CLIENT), 120)?;
    server_down(c)?;
    let told = result?;
    if text.contains("rmmod: ERROR") {
        return Err(format!("the kernel's modules can't be unloaded: {text}").into());
    }
    Ok(told)
}

fn delays(c: &mut Ctx<'_>, delays: [Option<&str>; 2]) -> Result<(), Error> {
    let guest = c.guest()?;
    (0..)
        .zip(delays)
        .try_for_each(|(net, delay)| guest.netem_on(net, delay))
}

/// The kernel's client in the second guest maps another disk of the server, in a session of its own.
fn kernel_maps(c: &mut Ctx<'_>) -> Result<(), Error> {
    let ends = |net| -> Result<String, Error> {
        let ends = [c.second.as_deref(), c.guest.as_deref()].map(|g| g.map(|g| g.addr(net, Ip::V4)));
        let [Some(client), Some(server)] = ends else {
            return Err("needs two guests".into());
        };
        Ok(format!("path=ip:{client}@ip:{server}"))
    };
    let paths = [ends(0)?, ends(1)?].join(" ");
    let text = format!(
        "rdma link add rxe1 type rxe netdev eth1\n{}set -e\n\
         echo \"sessname=kernel {paths} device_path=newroot/dev/ram1\" > /sys/class/rnbd-client/ctl/map_device\n\
         for i in $(seq 100); do [ -b /dev/rnbd0 ] && exit 0; sleep 0.1; done; echo 'no device'; exit 1\n",
        rnbd::INSMOD_CLIENT
    );
    in_second(c, &text, 120)
}

fn in_second(c: &Ctx<'_>, text: &str, seconds: u32) -> Result<(), Error> {
    let second = c.second.as_deref().ok_or("needs a second guest")?;
    let result = second.run(text, seconds);
    result
        .map(drop)
        .map_err(|e| format!("{e}\ndmesg:\n{}", second.dmesg()).into())
}

fn compare(c: &mut Ctx<'_>) -> Result<String, Error> {
    delays(c, DELAYS.map(Some))?;
    let mut told = Vec::new();
    for policy in &POLICIES {
        let mut tries = Vec::new();
        while !tries.last().is_some_and(|last| policy.alike(last)) {
            if tries.len() == TRIES {
                return Err(format!("{}: ours and the kernel's client's shares: {tries:?}", policy.name).into());
            }
            tries.push(shares(c, policy.name)?);
        }
        let [ours, kernels] = tries[tries.len() - 1];
        let at = if tries.len() > 1 {
            format!(", at try {}", tries.len())
        } else {
            String::new()
        };
        told.push(format!(
            "{} {ours:.3} (the kernel's client {kernels:.3}{at})",
            policy.name
        ));
    }
    let told = told.join(", ");
    Ok(format!(
        "share of the path with a third of the other's delay: {told}: passed"
    ))
}

/// The shares of the first path, ours and the kernel's client's, one after the other.
fn shares(c: &mut Ctx<'_>, policy: &str) -> Result<[f64; 2], Error> {
    let mapping = map(c, Ip::V4, &["--policy", policy])?;
    let order = format!("echo {policy} > /sys/class/rtrs-client/kernel/mpath_policy");
    in_second(c, &order, 30)?;
    if policy == "min-latency" {
        std::thread::sleep(MEASURED);
    }
    let ours = share(c, "ours", |c| load(c, &mapping))?;
    let fio = format!(
        "fio --filename=/dev/rnbd0 --ioengine=libaio --direct=1 {} >/tmp/fio.log",
        LOAD.join(" ")
    );
    let kernels = share(c, "kernel", |c| in_second(c, &fio, 120))?;
    mapping.stop()?;
    Ok([ours, kernels])
}

/// Load on our mapping.
fn load(c: &Ctx<'_>, mapping: &Mapping) -> Result<(), Error> {
    let uri = format!("--uri={}", mapping.url);
    let args = [&LOAD[..], &["--ioengine=nbd", &uri]].concat();
    c.tool("fio", "fio", &args, 120).map(drop)
}

/// The share of the first path in what the server gets in a session while something runs.
fn share(c: &mut Ctx<'_>, session: &str, run: impl FnOnce(&mut Ctx<'_>) -> Result<(), Error>) -> Result<f64, Error> {
    let before = served(c, session)?;
    run(c)?;
    let after = served(c, session)?;
    let [first, second] = [0, 1].map(|n| after[n].saturating_sub(before[n]) as f64);
    if first + second < 200.0 {
        return Err(format!("too little in session {session}: {before:?}, then {after:?}").into());
    }
    Ok(first / (first + second))
}

/// The delay each way of the network that is slow, ms. A busy machine's own delays must not look like it.
const SLOW: u32 = 20;

/// Heartbeats after which a path has been measured right at least once: a busy machine adds delays of its own to most of them.
const BEATS: usize = 30;

/// What a path may measure too much of what it is delayed, beside what the same takes without a delay.
const TOO_MUCH: f64 = 0.2;

/// In the guest: the delays swap, and what each path has served is printed with the time since that began, s, for 8 s.
const SWAP: &str = "\
    S=ours; at() { cut -d' ' -f1 < /proc/uptime; }\n\
    change() { tc qdisc change dev eth$1 root netem limit 100000 delay $2; tc qdisc change dev ifb$1 root netem limit 100000 delay $2; }\n\
    start=$(at); change 1 ${SLOW}ms; change 0 0ms\n\
    while now=$(at); [ $(echo \"$now $start\" | awk '{ print ($1 - $2 < 8) }') = 1 ]; do \
        echo sample $(echo \"$now $start\" | awk '{ print $1 - $2 }') $(served); sleep 0.2; done\n";

/// The network that was quick gets slow, and the other way round, under load.
fn swap(c: &mut Ctx<'_>) -> Result<String, Error> {
    server_up(c)?;
    let result = swapped(c);
    // Also for the next scenario.
    delays(c, [None, None])?;
    server_down(c)?;
    result
}

fn swapped(c: &mut Ctx<'_>) -> Result<String, Error> {
    let slow = format!("delay {SLOW}ms");
    delays(c, [Some(&slow), Some("delay 0ms")])?;
    let mut mapping = map_steered(c, Ip::V4, &["--policy", "min-latency"])?;
    // Two heartbeats.
    std::thread::sleep(Duration::from_secs(3));
    let latencies = latencies(c, &mut mapping)?;
    let mut fio = Command::new("fio");
    fio.args(LOAD)
        .args(["--runtime=60", "--rate_iops=500", "--ioengine=nbd"])
        .arg(format!("--uri={}", mapping.url));
    let mut fio = Proc::spawn("fio", &mut fio, &c.dir)?;
    let before = share(c, "ours", |_| {
        std::thread::sleep(Duration::from_secs(5));
        Ok(())
    })?;
    let out = script(c, &format!("SLOW={SLOW}\n{SERVED}{SWAP}"), 60)?;
    fio.still_runs()?;
    fio.interrupt();
    fio.wait_gone(Duration::from_secs(60))?;
    mapping.stop()?;
    let samples: Vec<Sample> = out.lines().filter_map(Sample::of).collect();
    let (after, first) = follows(&samples).ok_or_else(|| format!("it did not go over: {out}"))?;
    let quick_before = 1.0 - before;
    // A heartbeat comes every second, and one that is under way may have been measured just before.
    if quick_before < 0.99 || after > 2.5 {
        return Err(
            format!("before {quick_before:.3} on the quick path; after {after:.1} s {first:.3}:\n{out}").into(),
        );
    }
    let [slow, quick] = latencies.map(|l| l.as_secs_f64() * 1e3);
    Ok(format!(
        "measured {slow:.1} ms by the path that is delayed by {SLOW} ms each way, {quick:.1} ms by the other; {quick_before:.3} of the \
         requests on the quick path; {after:.1} s after the delays swapped, and from then on, {first:.3} on the other: passed"
    ))
}

/// The least latency that each path has measured, of which only the first is delayed.
fn latencies(c: &mut Ctx<'_>, mapping: &mut Mapping) -> Result<[Duration; 2], Error> {
    let names = paths(c, Ip::V4)?;
    let mut measured = [Vec::new(), Vec::new()];
    for _ in 0..BEATS {
        let listing = mapping.process.done(json!({ "do": "list" }))?;
        for (name, measured) in names.iter().zip(&mut measured) {
            let mut listed = listing["paths"].as_array().into_iter().flatten();
            let path = listed.find(|p| p["path"] == name.as_str());
            let latency = path.and_then(|p| p["latency_us"].as_u64());
            measured.push(latency.ok_or_else(|| format!("{name} has measured nothing: {listing}"))?);
        }
        let least = measured
            .each_ref()
            .map(|all| all.iter().min().copied().unwrap_or_default());
        let least = least.map(Duration::from_micros);
        if is_right(least) {
            return Ok(least);
        }
        // One comes every second.
        std::thread::sleep(Duration::from_millis(1050));
    }
    Err(format!("delayed by {SLOW} ms each way, and not: {measured:?} us").into())
}

/// Whether these are right, with a delay and without.
fn is_right([slow, quick]: [Duration; 2]) -> bool {
    let delay = Duration::from_millis(u64::from(2 * SLOW));
    slow >= delay && slow <= delay.mul_f64(1.0 + TOO_MUCH) + quick
}

/// What the paths had served some time after the swap.
struct Sample {
    after: f64,
    served: [u64; 2],
}

impl Sample {
    fn of(line: &str) -> Option<Self> {
        let line = line.strip_prefix("sample ")?;
        let (after, lines) = line.split_once(' ')?;
        let served = served_in(&lines.replace(" served", "\nserved"))?;
        let after = after.parse().ok()?;
        Some(Self { after, served })
    }
}

/// From when on after the swap more than 99 % went by the first path, s, and what share that was.
fn follows(samples: &[Sample]) -> Option<(f64, f64)> {
    let last = samples.last()?;
    samples.iter().find_map(|s| {
        let [first, second] = [0, 1].map(|n| (last.served[n] - s.served[n]) as f64);
        let share = first / (first + second);
        (first > 100.0 && share > 0.99).then_some((s.after, share))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Sample, follows, is_right};

    #[test]
    fn a_latency_is_the_delay_and_what_there_is_without() {
        let right = |slow, quick| is_right([slow, quick].map(Duration::from_millis));
        assert!(right(40, 0) && right(48, 0) && right(53, 5));
        assert!(!right(39, 5) && !right(20, 0) && !right(54, 5));
    }

    #[test]
    fn the_time_is_found_from_which_on_the_first_path_is_taken() {
        let line = |after, first, second| format!("sample {after} served 5 {first} served 0 {second}");
        let lines = [
            line(0.1, 10, 100),
            line(0.5, 10, 200),
            line(1.1, 110, 300),
            line(1.4, 300, 301),
            line(2.0, 900, 301),
        ];
        let samples: Vec<_> = lines.iter().filter_map(|l| Sample::of(l)).collect();
        assert_eq!(samples.len(), 5);
        let (after, share) = follows(&samples).unwrap();
        assert_eq!(after, 1.1);
        assert!(share > 0.99 && share < 1.0);
        assert!(follows(&samples[..3]).is_none());
    }
}
