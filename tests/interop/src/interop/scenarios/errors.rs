//! 7: receivers that are late, peers that are gone, accesses that are refused.

use std::{fs, net::SocketAddr, time::Duration};

use super::{Ctx, Direction, JUMBO, Scenario, verdict};
use crate::{
    Error,
    far::{AGENT_PORT, Ip},
    guest::Kernel,
    lab::Proc,
};

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToKernel, KernelToOurs, OursToKernel};
    vec![
        Scenario::new(7, "errors-ours-asks", OursToKernel, |c| errors(c, Ip::V4, true, &[])).peer(),
        Scenario::new(7, "errors-kernel-asks", KernelToOurs, |c| errors(c, Ip::V4, false, &[])).peer(),
        Scenario::new(7, "errors-ours-asks-v6", OursToKernel, |c| {
            errors(c, Ip::V6, true, &SHORT)
        })
        .peer()
        .ci(),
        Scenario::new(7, "errors-kernel-asks-v6", KernelToOurs, |c| {
            errors(c, Ip::V6, false, &SHORT)
        })
        .peer()
        .ci(),
        Scenario::new(7, "errors-ours-asks-mtu9000", OursToKernel, |c| {
            errors(c, Ip::V4, true, &[])
        })
        .shape(JUMBO),
        Scenario::new(7, "errors-kernel-asks-mtu9000", KernelToOurs, |c| {
            errors(c, Ip::V4, false, &[])
        })
        .shape(JUMBO),
        Scenario::new(7, "errors-two-kernels", KernelToKernel, two_kernels).guests(2),
        Scenario::new(7, "read-nothing-again", OursToKernel, |c| packets(c, "again")),
        Scenario::new(7, "read-late-ack", KernelToOurs, |c| packets(c, "late-ack")),
        Scenario::new(7, "write-ack-jump", KernelToOurs, ack_jump),
        Scenario::new(7, "vanish-our-process-killed", KernelToOurs, |c| {
            our_process_killed(c, Ip::V4)
        })
        .peer()
        .ci(),
        Scenario::new(7, "vanish-our-process-killed-v6", KernelToOurs, |c| {
            our_process_killed(c, Ip::V6)
        })
        .peer(),
        Scenario::new(7, "vanish-guest-killed", OursToKernel, |c| guest_killed(c, Ip::V4))
            .waits()
            .ci(),
    ]
}

/// Parts of the names of cases that are enough to see that addresses don't matter: refused accesses, late receives, retries
/// that are used up, with one packet and with many.
const SHORT: [&str; 6] = [
    "bad-rkey",
    "send-too-long",
    "rnr-send-late-many",
    "rnr-exhausted-3",
    "peer-destroyed",
    "retries-exhausted-3",
];

/// A file with what two kernels reported, of the guest's series. What another host has is compared with 6.1.
fn expectations(c: &Ctx<'_>) -> Result<String, Error> {
    let text = match c.kernel() {
        Ok(Kernel::V6_12 | Kernel::V7_3) => include_str!("../../../expect/errors-6.12.json"),
        _ => include_str!("../../../expect/errors.json"),
    };
    let file = c.path("expected.json");
    fs::write(&file, text)?;
    Ok(file)
}

/// Our own agent and where it listens.
pub(super) fn our_agent(c: &Ctx<'_>, ip: Ip, name: &str) -> Result<(Proc, SocketAddr), Error> {
    let mut agent = c.ours(ip, name, &["agent", "--port", &AGENT_PORT.to_string()])?;
    agent.wait_for("agent ready", Duration::from_secs(30))?;
    Ok((agent, SocketAddr::new(c.host(ip)?, AGENT_PORT)))
}

/// Our agent and the kernel's; all cases, or those whose names contain one of `only`.
fn errors(c: &mut Ctx<'_>, ip: Ip, ours_asks: bool, only: &[&str]) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c, ip, "our-agent")?;
    let (mut theirs, there) = c.far.agent("verbs-agent", ip, &c.dir)?;
    let (requester, responder) = if ours_asks { (here, there) } else { (there, here) };
    let expect = expectations(c)?;
    let mut how = vec![
        "--expect",
        &expect,
        "--ours",
        if ours_asks { "requester" } else { "responder" },
    ];
    how.extend(only.iter().flat_map(|name| ["--only", name]));
    let out = driver(c, requester, responder, &how)?;
    ours.finish(Duration::from_secs(30))?;
    theirs.finish(Duration::from_secs(30))?;
    verdict(&out)
}

fn driver(c: &Ctx<'_>, requester: SocketAddr, responder: SocketAddr, how: &[&str]) -> Result<String, Error> {
    let (requester, responder) = (requester.to_string(), responder.to_string());
    let mut args = vec![
        "errors",
        "--requester",
        &requester,
        "--responder",
        &responder,
        "--mtu",
        c.path_mtu(),
    ];
    args.extend(how);
    if c.guest.is_none() {
        // Another device may do as it likes where the specification lets it.
        args.push("--strict-only");
    }
    let peer = c.places.peer.display().to_string();
    c.tool("errors", &peer, &args, 900)
}

/// The expectations still are what two kernels report. With `FERROCE_INTEROP_RECORD=FILE` they are written there.
fn two_kernels(c: &mut Ctx<'_>) -> Result<String, Error> {
    let second = c.second.as_deref().ok_or("needs two guests")?.far.clone();
    let (mut a, requester) = second.agent("agent-2", Ip::V4, &c.dir)?;
    let (mut b, responder) = c.far.agent("agent-1", Ip::V4, &c.dir)?;
    let expect = expectations(c)?;
    let record = std::env::var("FERROCE_INTEROP_RECORD").ok();
    let how = record.as_ref().map_or(["--expect", &expect], |file| ["--record", file]);
    let out = driver(c, requester, responder, &how)?;
    a.finish(Duration::from_secs(30))?;
    b.finish(Duration::from_secs(30))?;
    verdict(&out)
}

/// A command of `ferroce-lab` whose end of the connection is nothing but packets.
fn packets(c: &mut Ctx<'_>, command: &str) -> Result<String, Error> {
    let (mut agent, at) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let at = at.to_string();
    let device = match c.kernel()? {
        Kernel::V6_1 => "rxe-6.1",
        Kernel::V6_12 | Kernel::V7_3 => "rxe-6.12",
    };
    let out = c
        .ours(Ip::V4, command, &[command, "--agent", &at, "--device", device])?
        .finish(Duration::from_secs(240))?;
    agent.finish(Duration::from_secs(30))?;
    verdict(&out)
}

/// Packets leave the kernel so slowly that it is seen in the middle of sending a message again.
fn ack_jump(c: &mut Ctx<'_>) -> Result<String, Error> {
    // netem would count packets as sent that wait in it.
    let slow = "modprobe sch_tbf; tc qdisc replace dev eth0 root tbf rate 4mbit burst 3000 limit 1000000";
    c.guest()?.run(slow, 20)?;
    packets(c, "jump")
}

fn vanish(c: &Ctx<'_>, requester: SocketAddr, responder: SocketAddr) -> Result<Proc, Error> {
    let (requester, responder) = (requester.to_string(), responder.to_string());
    let args = [
        "vanish",
        "--requester",
        &requester,
        "--responder",
        &responder,
        "--mtu",
        c.path_mtu(),
    ];
    let mut command = std::process::Command::new(&c.places.peer);
    let mut vanish = Proc::spawn("vanish", command.args(args), &c.dir)?;
    vanish.wait_for("running", Duration::from_secs(60))?;
    Ok(vanish)
}

/// The agents, one of which was started again, do a few operations over a new connection.
fn exchange(c: &Ctx<'_>, requester: SocketAddr, responder: SocketAddr) -> Result<String, Error> {
    let (requester, responder) = (requester.to_string(), responder.to_string());
    let ends = ["--requester", &requester, "--responder", &responder];
    let args = [&["exchange"][..], &ends, &["--mtu", c.path_mtu()]].concat();
    let peer = c.places.peer.display().to_string();
    verdict(&c.tool("exchange", &peer, &args, 120)?)
}

fn our_process_killed(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c, ip, "our-agent")?;
    let (mut theirs, there) = c.far.agent("verbs-agent", ip, &c.dir)?;
    let mut vanish = vanish(c, there, here)?;
    ours.kill();
    let ended = verdict(&vanish.finish(Duration::from_secs(120))?)?;
    let (mut ours, here) = our_agent(c, ip, "our-agent-again")?;
    let again = exchange(c, there, here)?;
    ours.finish(Duration::from_secs(30))?;
    theirs.finish(Duration::from_secs(30))?;
    Ok(format!("{ended}; {again}"))
}

fn guest_killed(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c, ip, "our-agent")?;
    let (theirs, there) = c.far.agent("verbs-agent", ip, &c.dir)?;
    let mut vanish = vanish(c, here, there)?;
    c.guest()?.kill();
    let out = vanish.finish(Duration::from_secs(120));
    drop(theirs);
    c.guest()?.reboot()?;
    let ended = verdict(&out?)?;
    let (mut theirs, there) = c.far.agent("verbs-agent-again", ip, &c.dir)?;
    let again = exchange(c, here, there)?;
    ours.finish(Duration::from_secs(30))?;
    theirs.finish(Duration::from_secs(30))?;
    Ok(format!("{ended}; {again}"))
}
