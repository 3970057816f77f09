//! 15: RDS between a node of ours and the kernel's.

use std::{fs, time::Duration};

use super::{Ctx, Direction, Scenario, verdict};
use crate::{Error, far::Ip, guest::Kernel, lab::Proc};

/// Lengths of the messages: none, around a fragment, many fragments, the longest.
const LENS: &str = "0,1,4095,4096,4097,100000,1048576";
const PORT: &str = "4000";
const SECONDS: u32 = 240;

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for ip in Ip::BOTH {
        let (tag, v4) = (ip.tag(), ip == Ip::V4);
        let mut add = |name: &str, direction, ci, tos: Option<&'static str>, run: Run| {
            let run = move |c: &mut Ctx<'_>| run(c, ip, tos);
            all.push(Scenario::new(15, format!("rds-{name}-{tag}"), direction, run).ci_if(ci && v4));
        };
        add("our-client", Direction::OursToKernel, true, None, our_client);
        add("our-server", Direction::KernelToOurs, true, None, our_server);
        add("rdma", Direction::KernelToOurs, true, None, rdma);
        add("our-client-tos", Direction::OursToKernel, false, Some("8"), our_client);
    }
    let lossy = |c: &mut Ctx<'_>| our_client(c, Ip::V4, None);
    all.push(
        Scenario::new(15, "rds-our-client-lossy", Direction::OursToKernel, lossy)
            .netem("loss 1%")
            .waits(),
    );
    all.push(Scenario::new(15, "rds-our-node-restarts", Direction::KernelToOurs, our_node_restarts).waits());
    // What it is compared with was recorded of these.
    all.push(
        Scenario::new(15, "rds-conformance", Direction::KernelToKernel, conformance)
            .only_on(&[Kernel::V6_1, Kernel::V6_12])
            .waits(),
    );
    all
}

type Run = fn(&mut Ctx<'_>, Ip, Option<&'static str>) -> Result<String, Error>;

/// Loads the kernel's RDS; the program is of the lab.
const LOAD: &str = "modprobe rds && modprobe rds_rdma || exit 1\n";

fn our_client(c: &mut Ctx<'_>, ip: Ip, tos: Option<&str>) -> Result<String, Error> {
    let far = c.far.addr(ip)?.to_string();
    let serve = format!("{LOAD}setsid $LAB/rds-echo serve {far} {PORT} >/tmp/rds-echo.log 2>&1 </dev/null &\nsleep 1");
    c.guest()?.run(&serve, SECONDS)?;
    let mut args = vec!["rds", "--connect", &far, "--port", PORT, "--lens", LENS];
    args.extend(tos.iter().flat_map(|tos| ["--tos", tos]));
    let ours = c.ours(ip, "rds", &args)?.finish(Duration::from_secs(SECONDS.into()));
    let theirs = c.guest()?.run("pkill rds-echo; cat /tmp/rds-echo.log", 60)?;
    let ours = ours.map_err(|e| format!("{e}\nkernel:\n{theirs}"))?;
    let count = theirs.lines().filter(|line| line.ends_with("bytes sent back")).count();
    Ok(format!("{}; kernel: {count} messages sent back", verdict(&ours)?))
}

fn our_server(c: &mut Ctx<'_>, ip: Ip, _: Option<&str>) -> Result<String, Error> {
    let (host, far) = (c.host(ip)?.to_string(), c.far.addr(ip)?.to_string());
    let mut ours = c.ours(ip, "rds", &["rds", "--port", PORT, "--lens", LENS])?;
    ours.wait_for("waiting", Duration::from_secs(30))?;
    let lens = LENS.replace(',', " ");
    let call = format!("{LOAD}$LAB/rds-echo call {far} {host} {PORT} {lens}\n");
    let theirs = c.guest()?.run(&call, SECONDS)?;
    let count = theirs.lines().filter(|line| line.ends_with("bytes came back")).count();
    let ours = ours.finish(Duration::from_secs(SECONDS.into()))?;
    Ok(format!("{}; kernel: {count} messages came back", verdict(&ours)?))
}

/// Each side reads and writes memory that the other offers.
fn rdma(c: &mut Ctx<'_>, ip: Ip, _: Option<&str>) -> Result<String, Error> {
    let (host, far) = (c.host(ip)?.to_string(), c.far.addr(ip)?.to_string());
    let mut ours = c.ours(ip, "rds", &["rds", "--port", PORT, "--rdma"])?;
    ours.wait_for("waiting", Duration::from_secs(30))?;
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
        let mut ours = c.ours(Ip::V4, name, &["rds", "--port", PORT, "--lens", LENS])?;
        ours.wait_for("waiting", Duration::from_secs(30))?;
        Ok(ours)
    };
    let call = format!("{LOAD}$LAB/rds-echo call {far} {host} {PORT} 1 100\n");
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
    ("loopback", include_str!("../../../expect/rds-loopback.txt")),
    ("rxe", include_str!("../../../expect/rds-rxe.txt")),
];

/// The facts of `lab/rds-conformance.c` are what `expect` has. With `FERROCE_INTEROP_RECORD=FOLDER` they are written there.
fn conformance(c: &mut Ctx<'_>) -> Result<String, Error> {
    let own = c.far.addr(Ip::V4)?.to_string();
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
