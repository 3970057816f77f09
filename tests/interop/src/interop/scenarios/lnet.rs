//! 16: LNet between a node of ours and the kernel's o2iblnd, whose modules are built from a checkout of Lustre.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Ctx, Direction, Scenario};
use crate::{Error, far::Ip, guest::Kernel, lab::Proc};

/// Why they don't run without `--lustre`.
pub(super) const NO_CHECKOUT: &str = "no --lustre FOLDER, a checkout of Lustre";

/// Kernels for which it is built.
const KERNELS: [Kernel; 2] = [Kernel::V6_1, Kernel::V6_12];

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{Both, KernelToOurs, OursToKernel};
    let waits = true;
    let all: [(&str, Direction, Run, bool); 7] = [
        ("lnet-ping", Both, pings, false),
        ("lnet-lst", KernelToOurs, lst, false),
        ("lnet-selftest", OursToKernel, selftest, false),
        ("lnet-peer-credits", Both, peer_credits, false),
        ("lnet-our-node-restarts", KernelToOurs, our_node_restarts, false),
        ("lnet-guest-restarts", Both, guest_restarts, waits),
        ("lnet-link-down", Both, link_down, waits),
    ];
    let scenario = |(name, direction, run, waits): (&str, Direction, Run, bool)| {
        let mut s = Scenario::new(16, name, direction, run)
            .only_on(&KERNELS)
            .elsewhere(NO_CHECKOUT)
            .lacks(|places, kernel| places.missing_lnet(kernel));
        s.waits = waits;
        s
    };
    all.map(scenario).into()
}

type Run = fn(&mut Ctx<'_>) -> Result<String, Error>;

const SECONDS: u32 = 240;
const TIMEOUT: Duration = Duration::from_secs(SECONDS as u64);
const START: Duration = Duration::from_secs(30);

/// Both ends. `$T` in the guest is where modules and programs are.
struct Ends<'c, 'a> {
    c: &'c mut Ctx<'a>,
    ours: String,
    theirs: String,
    address: String,
}

impl<'c, 'a> Ends<'c, 'a> {
    /// Loads the kernel's LNet with these parameters of ko2iblnd.
    fn up(c: &'c mut Ctx<'a>, parameters: &str) -> Result<Self, Error> {
        let address = c.host(Ip::V4)?.to_string();
        let ends = Self {
            ours: format!("{address}@o2ib"),
            theirs: format!("{}@o2ib", c.far.addr(Ip::V4)?),
            address,
            c,
        };
        ends.load(parameters)?;
        Ok(ends)
    }

    fn load(&self, parameters: &str) -> Result<(), Error> {
        let script = format!(
            "{UNLOAD}for m in sunrpc rdma_cm; do modprobe $m || exit 1; done\nset -e\n\
             insmod $T/libcfs.ko; insmod $T/lnet.ko networks='o2ib(eth0)'; insmod $T/ko2iblnd.ko {parameters}\n\
             insmod $T/lnet_selftest.ko\n$T/lctl network up\n$T/lctl list_nids\n"
        );
        let nids = self.guest(&script)?;
        match nids.contains(&self.theirs) {
            true => Ok(()),
            false => Err(format!("no NID {}: {nids}", self.theirs).into()),
        }
    }

    /// Runs a script in the guest.
    fn guest(&self, script: &str) -> Result<String, Error> {
        let guest = self.c.guest.as_ref().ok_or("needs a guest of the lab")?;
        guest.run(&format!("{FOLDER}{script}"), SECONDS)
    }

    /// `lctl ping` of our node until it succeeds: it waits a second. Returns how many did not.
    fn lctl_ping(&self) -> Result<u32, Error> {
        let until = Instant::now() + TIMEOUT;
        let guest = self.c.guest.as_ref().ok_or("needs a guest of the lab")?;
        let mut lost = 0;
        loop {
            let (code, said) = guest.try_run(&format!("{FOLDER}$T/lctl ping {}\n", self.ours), SECONDS)?;
            if code == 0 && said.lines().any(|line| line == self.ours) {
                return Ok(lost);
            }
            if Instant::now() > until {
                return Err(format!("lctl ping: {said}").into());
            }
            lost += 1;
        }
    }

    /// Starts a command of `ferroce lnet`.
    fn lnet(&self, name: &str, args: &[&str]) -> Result<Proc, Error> {
        self.c.ferroce(name, &[&["lnet"], args].concat())
    }

    /// Starts our node.
    fn serve(&self, name: &str, more: &[&str]) -> Result<Proc, Error> {
        let mut serve = self.lnet(name, &[&["serve", &self.ours, "--json"], more].concat())?;
        serve.wait_for("lnet_listening", START)?;
        Ok(serve)
    }

    /// Starts pings of the kernel's node.
    fn start_pings(&self, name: &str, more: &[&str]) -> Result<Proc, Error> {
        self.lnet(
            name,
            &[&["ping", "-I", &self.address, "--json", &self.theirs], more].concat(),
        )
    }

    /// Pings it once. Returns the queue depth of the connection.
    fn ping(&self, name: &str, more: &[&str]) -> Result<u64, Error> {
        let said = self.start_pings(name, more)?.finish(TIMEOUT)?;
        let answer: Value = serde_json::from_str(said.trim())?;
        let nids = answer["interfaces"].as_array().ok_or("no interfaces")?;
        let has = |nid: &str, status: Value| nids.iter().any(|ni| ni["nid"] == nid && ni["status"] == status);
        match has("0@lo", Value::Null) && has(&self.theirs, "up".into()) && answer["fragments"] == 257 {
            true => answer["queue_depth"].as_u64().ok_or_else(|| said.into()),
            false => Err(said.into()),
        }
    }

    /// Unloads the kernel's LNet: the next scenario may want the device for itself.
    fn down(&self) -> Result<(), Error> {
        self.guest(UNLOAD).map(drop)
    }
}

/// Sets `$T`.
const FOLDER: &str = "T=${LINUX/linux-/lustre-}\n";

const UNLOAD: &str = "\
    if [ -e /sys/module/lnet ]; then\n\
        rmmod lnet_selftest; $T/lctl network down || exit 1; for m in ko2iblnd lnet libcfs; do rmmod $m || exit 1; done\n\
    fi\n";

/// Ends a node of ours as an operator does. Returns its counts.
fn end(mut serve: Proc) -> Result<Value, Error> {
    serve.interrupt();
    serve.finish(START)?;
    let [summary] = &serve.events("summary")[..] else {
        return Err(format!("no summary: {}", serve.text()).into());
    };
    Ok(summary.clone())
}

/// Pings and discovery by the kernel's programs, and ours.
fn pings(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "")?;
    let mut serve = ends.serve("serve", &[])?;
    ends.lctl_ping()?;
    let ours = &ends.ours;
    for command in ["lnetctl ping", "lnetctl discover", "lnetctl discover --force"] {
        let said = ends.guest(&format!("$T/{command} {ours}\n"))?;
        if !said.contains(&format!("nid: {ours}")) || said.contains("errno: -") {
            return Err(format!("{command}: {said}").into());
        }
    }
    // To a node without discovery that was discovered by force, a kernel never sends another message: it hangs.
    ends.guest(&lst_script(&ends.theirs, ours, "ping"))?;
    serve.still_runs()?;
    let connected = serve.events("lnet_up");
    let pinged = serve.events("lnet_pinged").len();
    let [connection] = &connected[..] else {
        return Err(format!("one connection is right: {}", serve.text()).into());
    };
    let discovered = serve.events("lnet_discovered").len();
    if connection["queue_depth"] != 8 || connection["fragments"] != 257 || pinged < 4 || discovered == 0 {
        return Err(serve.text().into());
    }
    end(serve)?;
    let depth = ends.ping("ping", &[])?;
    ends.down()?;
    Ok(format!(
        "passed: lctl ping, lnetctl ping and discover of our node ({pinged} pings, its interfaces {discovered} times, depth 8), and our ping of the kernel's (depth {depth})"
    ))
}

/// The kernel's lst tests our node: it is the console and the client.
fn lst(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "")?;
    let serve = ends.serve("serve", &[])?;
    let tests = ["ping", "brw read check=full size=1M", "brw write check=full size=1M"];
    for test in tests {
        let said = ends.guest(&lst_script(&ends.theirs, &ends.ours, test))?;
        if !said.contains("Total 0 error nodes in kernel") || !said.contains("Total 0 error nodes in ours") {
            return Err(format!("{test}: {said}").into());
        }
    }
    let summary = end(serve)?;
    ends.down()?;
    let [received, sent] = ["received_bytes", "sent_bytes"].map(|name| summary[name].as_u64().unwrap_or(0) >> 20);
    let expected = u64::from(LOOPS * UNITS);
    match received.min(sent) >= expected {
        true => Ok(format!(
            "passed: ping, {received} MiB written and {sent} MiB read, all checked"
        )),
        false => Err(format!("{expected} MiB each way are right: {summary}").into()),
    }
}

/// Requests of each unit of a test of lst, and its units.
const LOOPS: u32 = 4;
const UNITS: u32 = 4;

fn lst_script(client: &str, server: &str, test: &str) -> String {
    format!(
        "set -e; export LST_SESSION=$$; lst() {{ $T/lst \"$@\"; }}\n\
         lst new_session --timeout 60 interop\nlst add_group kernel {client}\nlst add_group ours {server}\nlst add_batch b\n\
         lst add_test --batch b --loop {LOOPS} --concurrency {UNITS} --from kernel --to ours {test}\nlst run b\n\
         n=0; until lst query b | grep 'is stopped'; do [ $((n += 1)) -lt 100 ] || {{ lst query b; exit 1; }}; sleep 1; done\n\
         lst show_error kernel\nlst show_error ours\nlst end_session\n"
    )
}

/// Our console and client test the kernel's node.
fn selftest(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "")?;
    let mut details = Vec::new();
    for test in ["ping", "read", "write"] {
        let args = ["selftest", "--json", "--test", test, "-n", "32", "--check", "full"];
        let mut run = ends.lnet(test, &[&args[..], &["-I", &ends.address, &ends.theirs]].concat())?;
        run.finish(TIMEOUT)?;
        let summary = run.events("summary").pop().unwrap_or_default();
        if summary["done"] != 32 || summary["failed"] != 0 {
            return Err(format!("{test}: {}", run.text()).into());
        }
        details.push(format!("{test} {} bytes", summary["bytes"]));
    }
    ends.down()?;
    Ok(format!("passed: 32 requests each, checked: {}", details.join(", ")))
}

/// Depths of 8 and 42 meet: the smaller one counts, whichever side asks.
fn peer_credits(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "peer_credits=8")?;
    let mut seen = Vec::new();
    for (theirs, ours) in [("8", "42"), ("42", "8"), ("42", "42")] {
        if theirs != "8" {
            ends.load(&format!("peer_credits={theirs}"))?;
        }
        let expected: u64 = theirs.parse::<u64>()?.min(ours.parse()?);
        let asked = ends.ping(&format!("ping-{theirs}-{ours}"), &["--peer-credits", ours])?;
        let serve = ends.serve(&format!("serve-{theirs}-{ours}"), &["--peer-credits", ours])?;
        ends.lctl_ping()?;
        ends.guest(&lst_script(&ends.theirs, &ends.ours, "brw write check=full size=64K"))?;
        let depths: Vec<Value> = serve
            .events("lnet_up")
            .into_iter()
            .map(|e| e["queue_depth"].clone())
            .collect();
        if asked != expected || depths.is_empty() || depths.iter().any(|depth| *depth != expected) {
            return Err(format!("kernel {theirs}, ours {ours}: {asked} and {depths:?}, not {expected}").into());
        }
        end(serve)?;
        seen.push(format!("kernel {theirs}, ours {ours}: {expected}"));
    }
    ends.down()?;
    Ok(format!("passed: {}", seen.join("; ")))
}

/// Our node is killed, and started again: the kernel pings it, and it the kernel.
fn our_node_restarts(c: &mut Ctx<'_>) -> Result<String, Error> {
    const LIVES: u32 = 4;
    let ends = Ends::up(c, "")?;
    let mut lost = 0;
    for life in 0..LIVES {
        let mut serve = ends.serve(&format!("serve-{life}"), &[])?;
        // The kernel may send the first one to the node that there was.
        lost += ends.lctl_ping()?;
        serve.kill();
    }
    ends.ping("ping", &[])?;
    ends.down()?;
    Ok(format!(
        "passed: the kernel reaches our node in each of {LIVES} lives; {lost} pings to the one before were lost"
    ))
}

/// Pings that succeeded, of those so far.
fn succeeded(pings: &Proc) -> (usize, usize) {
    let text = pings.text();
    let all: Vec<Value> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    (all.iter().filter(|ping| ping["usec"].is_u64()).count(), all.len())
}

/// Waits until a ping succeeds that was sent from now on.
fn wait_success(pings: &mut Proc) -> Result<(), Error> {
    let (before, _) = succeeded(pings);
    let until = Instant::now() + TIMEOUT;
    // One may be under way that was sent before.
    while succeeded(pings).0 < before + 2 {
        pings.still_runs()?;
        if Instant::now() > until {
            return Err(format!("no ping succeeds any more: {}", pings.text()).into());
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Pings that go on for as long as a scenario may take, once a second.
const FOREVER: [&str; 4] = ["--count", "10000", "--timeout", "2"];

/// The guest boots again: our node, which has a connection to the one that there was, reaches it, and is reached.
fn guest_restarts(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "")?;
    let mut pings = ends.start_pings("pings", &FOREVER)?;
    wait_success(&mut pings)?;
    ends.c.guest()?.reboot()?;
    ends.load("")?;
    ends.lctl_ping()?;
    wait_success(&mut pings)?;
    ends.lctl_ping()?;
    let (good, all) = succeeded(&pings);
    pings.interrupt();
    pings.wait_gone(START)?;
    ends.down()?;
    Ok(format!(
        "passed: both reach the other after the guest has booted again; {} pings of {all} were lost",
        all - good
    ))
}

/// The guest's port goes for longer than the kernel waits, and comes back.
fn link_down(c: &mut Ctx<'_>) -> Result<String, Error> {
    let ends = Ends::up(c, "timeout=5")?;
    let mut pings = ends.start_pings("pings", &FOREVER)?;
    wait_success(&mut pings)?;
    ends.lctl_ping()?;
    ends.c.guest()?.set_port(false)?;
    let (before, _) = succeeded(&pings);
    thread::sleep(Duration::from_secs(20));
    let away = succeeded(&pings).0;
    ends.c.guest()?.set_port(true)?;
    if away > before + 1 {
        return Err(format!("{} pings succeeded without a network", away - before).into());
    }
    wait_success(&mut pings)?;
    ends.lctl_ping()?;
    let (good, all) = succeeded(&pings);
    pings.interrupt();
    pings.wait_gone(START)?;
    ends.down()?;
    Ok(format!(
        "passed: both reach the other again; {} pings of {all} were lost in 20 s",
        all - good
    ))
}
