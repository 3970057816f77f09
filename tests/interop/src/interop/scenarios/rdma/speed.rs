//! How fast RTRS over roce-hw is, beside the kernel's own between the same guests.

use serde_json::Value;

use super::{
    super::{
        Ctx, Direction, Scenario,
        rnbd::{FUNCTIONS as KERNELS, INSMOD_CLIENT, RMMOD_CLIENT, server_down, server_up},
    },
    Other, Ours,
};
use crate::{Error, far::Ip};

pub(super) fn list() -> Vec<Scenario> {
    let s = Scenario::new(12, "rdma-speed-beside-kernel", Direction::KernelToKernel, speed);
    vec![s.guests(Other::Kernel.guests())]
}

/// Rounds, in which the two take turns. A whole number of them, so that there is a median.
const ROUNDS: usize = 5;
/// Of each turn.
const SECONDS: u32 = 3;
const DEPTH: u32 = 16;
/// Bytes of a request, and whether it writes.
const LOADS: [(u32, bool); 4] = [(4096, false), (4096, true), (65_536, false), (65_536, true)];

/// The kernel's server on a RAM disk and ours, without a disk, are in one guest, the clients of both in the other.
fn speed(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ours = Ours::new(c)?;
    let at = c.guest()?.addr(0, Ip::V4);
    server_up(c, true)?;
    let program = ours.0.path();
    let begin = format!(
        "ulimit -l unlimited; ({program} bench rtrs --server --addr {at} --rdma rxe0 --json >/tmp/bench.out 2>/tmp/bench.err </dev/null & \
             echo $! >/tmp/bench.pid)\n\
         for i in $(seq 300); do grep -q listening /tmp/bench.out && exit; sleep 0.1; done; cat /tmp/bench.*; exit 1"
    );
    let result = c.guest()?.run(&begin, 60).and_then(|_| {
        let map = format!("HOST={at}\n{INSMOD_CLIENT}{KERNELS}map s1 newroot/dev/ram0\n");
        Ours::guest(c)?.run(&map, 120)?;
        LOADS
            .into_iter()
            .map(|load| turns(c, &ours, load))
            .collect::<Result<Vec<_>, _>>()
    });
    Ours::guest(c)?.try_run(RMMOD_CLIENT, 120)?;
    c.guest()?.try_run("kill $(cat /tmp/bench.pid)", 30)?;
    server_down(c)?;
    Ok(format!("{}: passed", result?.join("; ")))
}

/// Both, by turns. What came of it in words.
fn turns(c: &Ctx<'_>, ours: &Ours, (size, writes): (u32, bool)) -> Result<String, Error> {
    let (mut our, mut their) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        our.push(ours_once(c, ours, size, writes)?);
        their.push(theirs_once(c, ours, size, writes)?);
    }
    let (our, their) = (median(our), median(their));
    Ok(format!(
        "{} of {} KiB: {our:.0} a second, the kernel {their:.0}, ratio {:.2}",
        if writes { "writes" } else { "reads" },
        size >> 10,
        our / their
    ))
}

fn ours_once(c: &Ctx<'_>, ours: &Ours, size: u32, writes: bool) -> Result<f64, Error> {
    let at = c.guest.as_ref().ok_or("needs a guest of the lab")?.addr(0, Ip::V4);
    let write = if writes { "--write" } else { "" };
    let script = format!(
        "$F bench rtrs --connect {at} --addr {} --rdma rxe0 --size {size} --depth {DEPTH} --seconds {SECONDS} --json {write}",
        Ours::addr(c, 0)?
    );
    let said = ours.run(c, &script, 60)?;
    number(&said, |report| report["iops"].as_f64())
}

fn theirs_once(c: &Ctx<'_>, ours: &Ours, size: u32, writes: bool) -> Result<f64, Error> {
    let (way, key) = if writes {
        ("randwrite", "write")
    } else {
        ("randread", "read")
    };
    let script = format!(
        "fio --name=job --filename=/dev/rnbd0 --size=48M --bs={size} --rw={way} --direct=1 --ioengine=libaio --iodepth={DEPTH} \
             --time_based --runtime={SECONDS} --output-format=json | tr -d '\\n'; echo"
    );
    let said = ours.run(c, &script, 60)?;
    number(&said, |report| report["jobs"][0][key]["iops"].as_f64())
}

/// A number of the report in what a program said.
fn number(said: &str, of: impl Fn(&Value) -> Option<f64>) -> Result<f64, Error> {
    let reports = said
        .lines()
        .filter_map(|l| serde_json::from_str(&l[l.find('{')?..]).ok());
    let found = reports.filter_map(|report: Value| of(&report)).find(|n| *n > 0.0);
    found.ok_or_else(|| format!("no number in: {said}").into())
}

pub(in super::super) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_reports() {
        let of = |report: &Value| report["iops"].as_f64();
        assert_eq!(number("fio: a hint {\"iops\": 12.5}\n", of).unwrap(), 12.5);
        assert!(number("{\"iops\": 0}\nnothing\n", of).is_err());
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }
}
