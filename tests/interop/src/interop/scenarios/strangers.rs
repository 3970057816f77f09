//! 9: forged packets, from neighbours that exist and as the kernel's own, while the kernel's client uses our server.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use super::{
    Ctx, Direction, Scenario,
    rnbd::{FUNCTIONS, INSMOD_CLIENT, Server, client_down, image, with_client},
    verdict,
};
use crate::{
    Error,
    far::Ip,
    lab::{Proc, run_quiet},
};

/// Neighbours of the flood.
const CROWD: u8 = 100;
/// The first of them has this as the last byte of its address.
const FIRST: u8 = 100;
/// Their interface in the namespace of the lab, a port of the bridge.
const PORT: &str = "strangers";
/// What they send together, packets a second.
const RATE: &str = "1000";

pub(super) fn list() -> Vec<Scenario> {
    use Direction::KernelToOurs;
    let mut all = Vec::new();
    let mut add = |name, ci, run: fn(&mut Ctx<'_>) -> Result<String, Error>| {
        all.push(Scenario::new(9, name, KernelToOurs, run).ci_if(ci));
    };
    add("strangers-flood-rnbd-kernel-client", true, flood);
    add("strangers-forged-mads-rnbd-kernel-client", false, forged_mads);
    all
}

/// Hosts beside the guest on the bridge that send forged packets: a network namespace of its own, with their addresses.
struct Strangers {
    process: Proc,
}

impl Strangers {
    fn start(c: &Ctx<'_>, args: &[&str]) -> Result<Self, Error> {
        // The process makes its namespace, and waits there for its end of the wire.
        let script = format!(
            "ip link set lo up; echo ready; for i in $(seq 1000); do [ -e /proc/sys/net/ipv4/conf/stranger ] && break; sleep 0.02; done\n\
             for i in $(seq {FIRST} $(({FIRST} + {CROWD} - 1))); do ip addr add 10.77.0.$i/24 dev stranger || exit 1; done\n\
             ip link set stranger up || exit 1; echo there; exec \"$@\""
        );
        let mut command = Command::new("unshare");
        command
            .args(["-n", "bash", "-c", &script, "strangers"])
            .arg(&c.places.hostile)
            .args(args);
        let mut process = Proc::spawn("strangers", &mut command, &c.dir)?;
        process.wait_for("ready", Duration::from_secs(20))?;
        let pid = process.id().to_string();
        run_quiet(
            "ip",
            &[
                "link", "add", PORT, "type", "veth", "peer", "name", "stranger", "netns", &pid,
            ],
        )?;
        run_quiet("ip", &["link", "set", PORT, "master", "br0", "up"])?;
        process.wait_for("there", Duration::from_secs(20))?;
        Ok(Self { process })
    }

    /// Ends them; what they have sent.
    fn stop(mut self) -> Result<String, Error> {
        self.process.still_runs()?;
        self.process.interrupt();
        let text = self.process.finish(Duration::from_secs(20))?;
        sent(&text)
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.process.kill();
        // It goes with the namespace of its other end, a moment after that; a scenario that follows must not meet it.
        let until = Instant::now() + Duration::from_secs(5);
        while run_quiet("ip", &["link", "show", PORT]).is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// How many packets the attacker says that it sent.
fn sent(text: &str) -> Result<String, Error> {
    let report = text
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok())
        .next_back();
    match report.and_then(|r| r["packets"].as_u64()) {
        Some(n) if n > 0 => Ok(format!("{n} forged packets")),
        _ => Err(format!("no forged packets: {text}").into()),
    }
}

/// The kernel's client maps a device of a server that is being flooded from a hundred other hosts, writes, and reads back.
fn flood(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let host = c.host(Ip::V4)?.to_string();
    let (first, crowd) = (format!("10.77.0.{FIRST}+{CROWD}"), "3600");
    // The requests of a UDP socket's sender have Identification 0.
    let strangers = Strangers::start(
        c,
        &[
            "--in-namespace",
            "--identification",
            "0",
            "flood",
            "--to",
            &host,
            "--from",
            &first,
            "--rate",
            RATE,
            "--seconds",
            crowd,
        ],
    )?;
    // Whatever can be full is full.
    std::thread::sleep(Duration::from_secs(3));
    let script = "\
        T=$(date +%s%N); map s1 disk; echo \"mapped after $((($(date +%s%N) - T) / 1000000)) ms\"\n\
        head -c 4000000 /dev/urandom > /tmp/a; dd if=/tmp/a of=/dev/rnbd0 bs=64k conv=fsync status=none\n\
        echo 3 > /proc/sys/vm/drop_caches; cmp -n 4000000 /tmp/a /dev/rnbd0\n\
        [ \"$(cat /sys/class/rtrs-client/s1/paths/*/stats/reconnects)\" = '0 0' ]\n\
        unmap rnbd0; echo 'mapped under a flood, what was written was read: passed'\n";
    let out = with_client(c, Ip::V4, script, 120)?;
    let sent = strangers.stop()?;
    let opened = server.count("session_opened");
    server.stop()?;
    if opened != 1 {
        return Err(format!("{opened} sessions were opened").into());
    }
    let took = out.lines().find(|l| l.starts_with("mapped after")).unwrap_or_default();
    Ok(format!("{}; {took}; {sent}", verdict(&out)?))
}

/// The kernel's client works on its device for 20 s, and needs no second connection for that.
const ROUNDS: &str = "\
    head -c 2000000 /dev/urandom > /tmp/a; T=$(($(date +%s) + 20)); N=0\n\
    while [ $(date +%s) -lt $T ]; do\n\
        dd if=/tmp/a of=/dev/rnbd0 bs=64k conv=fsync status=none; echo 3 > /proc/sys/vm/drop_caches\n\
        cmp -n 2000000 /tmp/a /dev/rnbd0; N=$((N + 1)); done; echo \"$N rounds\"\n\
    [ \"$(cat /sys/class/rtrs-client/s1/paths/*/stats/reconnects)\" = '0 0' ]\n\
    unmap rnbd0; echo 'nothing but our own packets ends a session: passed'\n";

/// A session of the kernel's client goes on while somebody sends management datagrams in its name to us, and in ours to it.
fn forged_mads(c: &mut Ctx<'_>) -> Result<String, Error> {
    image(c, "disk", 16)?;
    let server = Server::start(c, Ip::V4, &["disk"], "on")?;
    let host = c.host(Ip::V4)?.to_string();
    let between = format!("{host},{}", c.far.addr(Ip::V4)?);
    let mut work = || -> Result<(String, String), Error> {
        let map = format!("HOST={host}\n{INSMOD_CLIENT}{FUNCTIONS}map s1 disk\n");
        c.guest()?.run(&map, 120)?;
        let mut command = Command::new(&c.places.hostile);
        command.args([
            "--in-namespace",
            "--spoof",
            "--identification",
            "counter",
            "mads",
            "--between",
        ]);
        command.args([&between, "--rate", "200", "--seconds", "3600"]);
        let mut forger = Proc::spawn("forger", &mut command, &c.dir)?;
        let out = c.guest()?.run(&format!("{FUNCTIONS}{ROUNDS}"), 180)?;
        forger.still_runs()?;
        forger.interrupt();
        Ok((out, sent(&forger.finish(Duration::from_secs(20))?)?))
    };
    let result = work();
    client_down(c)?;
    let (out, sent) = result?;
    let opened = server.count("session_opened");
    server.stop()?;
    if opened != 1 {
        return Err(format!("{opened} sessions were opened").into());
    }
    let rounds = out.lines().find(|l| l.ends_with(" rounds")).unwrap_or_default();
    Ok(format!("{}; {rounds} of 2 MB; {sent}", verdict(&out)?))
}
