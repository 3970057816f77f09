//! 15: RDS between a node of ours and the kernel's.

mod programs;

use std::{fs, time::Duration};

use super::{Ctx, Direction, Scenario, verdict};
use crate::{Error, far::Ip, guest::Kernel, lab::Proc};

/// Lengths of the messages: none, around a fragment, many fragments, the longest.
const LENS: &str = "0,1,4095,4096,4097,100000,1048576";
const PORT: &str = "4000";
const SECONDS: u32 = 240;
const TIMEOUT: Duration = Duration::from_secs(SECONDS as u64);

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for ip in Ip::BOTH {
        let mut add = |name: &str, direction, ci, run: Run| {
            let name = format!("rds-{name}-{}", ip.tag());
            all.push(Scenario::new(15, name, direction, move |c: &mut Ctx<'_>| run(c, ip)).ci_if(ci && ip == Ip::V4));
        };
        add("messages", Direction::Both, true, messages);
        add("rdma", Direction::KernelToOurs, true, rdma);
        add("programs", Direction::Both, false, programs::everything);
        add("programs-rdma", Direction::Both, false, programs::rdma);
    }
    let lossy = [("rds-loss1", "loss 1%"), ("rds-loss5", "loss 5%")];
    all.extend(lossy.map(|(name, netem)| {
        Scenario::new(15, name, Direction::Both, programs::streams)
            .netem(netem)
            .waits()
    }));
    let waiting: [(&str, RunV4); 3] = [
        ("rds-unplugged", programs::unplugged),
        ("rds-our-node-restarts", our_node_restarts),
        ("rds-guest-restarts", programs::guest_restarts),
    ];
    all.extend(waiting.map(|(name, run)| Scenario::new(15, name, Direction::Both, run).waits()));
    all.push(
        Scenario::new(
            15,
            "rds-200-connects-at-once",
            Direction::Both,
            programs::connects_at_once,
        )
        .netem("delay 10ms")
        .waits(),
    );
    // Its packets are not judged: our end breaks the rules.
    let odd = Scenario::new(15, "rds-versions-and-rejects", Direction::Both, odd_peer);
    all.push(odd.nets(0).waits());
    // What it is compared with was recorded of these.
    all.push(
        Scenario::new(15, "rds-conformance", Direction::KernelToKernel, conformance)
            .only_on(&[Kernel::V6_1, Kernel::V6_12])
            .waits(),
    );
    all
}

type Run = fn(&mut Ctx<'_>, Ip) -> Result<String, Error>;
type RunV4 = fn(&mut Ctx<'_>) -> Result<String, Error>;

/// Loads the kernel's RDS; the programs are of the lab.
const LOAD: &str = "modprobe rds && modprobe rds_rdma || exit 1\n";

/// Our node sends to the kernel's, over a connection of each type of service, and sends back what it sends.
fn messages(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let (host, far) = (c.host(ip)?.to_string(), c.far.addr(ip)?.to_string());
    c.guest()?.run(LOAD, 60)?;
    let mut serves = c.theirs("serve", &["rds-peer", "serve", &far, PORT], SECONDS)?;
    serves.wait_for("waiting", START)?;
    let args = [
        "rds",
        "--connect",
        &far,
        "--port",
        PORT,
        "--tos",
        "8",
        "--serve",
        "--lens",
        LENS,
    ];
    let mut ours = c.ours(ip, "rds", &args)?;
    ours.wait_for("waiting", START)?;
    let call: Vec<&str> = ["rds-peer", "call", &far, &host, PORT, "0"]
        .into_iter()
        .chain(LENS.split(','))
        .collect();
    let calls = c.theirs("call", &call, SECONDS)?.finish(TIMEOUT);
    let ours = ours
        .finish(TIMEOUT)
        .map_err(|e| format!("{e}\nkernel:\n{}", serves.text()))?;
    let count = |text: &str, end: &str| text.lines().filter(|line| line.ends_with(end)).count();
    let (sent_back, came_back) = (count(&serves.text(), "sent back"), count(&calls?, "came back"));
    Ok(format!(
        "{}; kernel: {sent_back} messages sent back, {came_back} came back",
        verdict(&ours)?
    ))
}

/// Time in which a program begins.
const START: Duration = Duration::from_secs(30);

/// The kernel answers other versions, and asks again after some rejects. Our end is no node: `src/peer/rds_odd.rs`.
fn odd_peer(c: &mut Ctx<'_>) -> Result<String, Error> {
    const REJECTED: std::ops::Range<u32> = 101..108;
    let (host, far) = (c.host(Ip::V4)?.to_string(), c.far.addr(Ip::V4)?.to_string());
    c.guest()?.run(LOAD, 60)?;
    let mut ours = c.ours(Ip::V4, "odd", &["rds-odd", "--to", &far])?;
    ours.wait_for("waiting", TIMEOUT)?;
    let call = |tos: u32| {
        let words = ["rds-peer", "call", &far, &host, PORT, &tos.to_string(), "1"];
        c.theirs(&format!("call-{tos}"), &words, SECONDS)
    };
    // They wait for an answer that never comes.
    let _calls = REJECTED.map(call).collect::<Result<Vec<Proc>, Error>>()?;
    verdict(&ours.finish(TIMEOUT)?)
}

/// Each side reads and writes memory that the other offers.
fn rdma(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let (host, far) = (c.host(ip)?.to_string(), c.far.addr(ip)?.to_string());
    let mut ours = c.ours(ip, "rds", &["rds", "--port", PORT, "--rdma"])?;
    ours.wait_for("waiting", START)?;
    let call = format!("{LOAD}$LAB/rds-rdma {far} {host} {PORT}\n");
    let theirs = c.guest()?.run(&call, SECONDS);
    let ours = ours.finish(Duration::from_secs(60));
    match (ours, theirs) {
        (Ok(ours), Ok(theirs)) => Ok(format!(
            "{}; kernel: {}",
            verdict(&ours)?,
            theirs.trim().replace('\n', ", ")
        )),
        (Err(ours), Ok(theirs)) => Err(format!("{ours}\nkernel:\n{theirs}").into()),
        (Ok(_), Err(theirs)) => Err(theirs),
        (Err(ours), Err(theirs)) => Err(format!("{ours}\nkernel:\n{theirs}").into()),
    }
}

/// Our node is killed, and started again, between messages of the kernel's socket, which stays.
fn our_node_restarts(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (host, far) = (c.host(Ip::V4)?.to_string(), c.far.addr(Ip::V4)?.to_string());
    let serve = |c: &Ctx<'_>, name: &str| -> Result<Proc, Error> {
        let mut ours = c.ours(Ip::V4, name, &["rds", "--port", PORT, "--serve", "--lens", LENS])?;
        ours.wait_for("waiting", START)?;
        Ok(ours)
    };
    let call = format!("{LOAD}$LAB/rds-peer call {far} {host} {PORT} 0 1 100\n");
    let mut messages = 0;
    for round in 0..4 {
        let mut ours = serve(c, &format!("rds-{round}"))?;
        let theirs = c.guest()?.run(&call, SECONDS)?;
        messages += theirs.lines().filter(|line| line.ends_with("bytes came back")).count();
        ours.kill();
    }
    match messages {
        8 => Ok("passed: 8 messages there and back over 4 lives of our node".into()),
        _ => Err(format!("{messages} messages of 8 came back").into()),
    }
}

/// What the kernels print, by the address that the program uses, and what 6.12 prints otherwise.
const FACTS: [(&str, &str); 2] = [
    ("loopback", include_str!("../../../../expect/rds-loopback.txt")),
    ("rxe", include_str!("../../../../expect/rds-rxe.txt")),
];

/// The facts of `lab/rds-conformance.c` are what `expect` has. With `FERROCE_INTEROP_RECORD=FOLDER` they are written there.
fn conformance(c: &mut Ctx<'_>) -> Result<String, Error> {
    let own = c.far.addr(Ip::V4)?.to_string();
    // Connections that there were show in some of them.
    if c.guest()?.try_run("grep -q '^rds ' /proc/modules", 20)?.0 == 0 {
        c.guest()?.reboot()?;
    }
    let record = std::env::var("FERROCE_INTEROP_RECORD").ok();
    let mut differences = Vec::new();
    let mut count = 0;
    for ((name, expected), [own, absent]) in FACTS
        .into_iter()
        .zip([["127.0.0.1", "127.0.0.9"], [&own, "10.77.0.250"]])
    {
        let said = c
            .guest()?
            .run(&format!("{LOAD}$LAB/rds-conformance {own} {absent}\n"), SECONDS)?;
        fs::write(c.dir.join(format!("{name}.txt")), &said)?;
        if let Some(folder) = &record {
            fs::write(format!("{folder}/rds-{name}.txt"), &said)?;
        }
        count += said.lines().count();
        differences.extend(
            compare(&said, expected)
                .into_iter()
                .map(|line| format!("{name}: {line}")),
        );
    }
    match differences.is_empty() {
        true => Ok(format!("passed: {count} facts as recorded")),
        false => Err(differences.join("\n").into()),
    }
}

/// Lines that are on one side only.
fn compare(said: &str, expected: &str) -> Vec<String> {
    let only = |of: &str, than: &str, sign: char| -> Vec<String> {
        let other: Vec<&str> = than.lines().collect();
        of.lines()
            .filter(|line| !other.contains(line))
            .map(|line| format!("{sign} {line}"))
            .collect()
    };
    [only(expected, said, '-'), only(said, expected, '+')].concat()
}
