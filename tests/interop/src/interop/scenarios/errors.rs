//! 7: receivers that are late, peers that are gone, accesses that are refused.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use super::{Ctx, Direction, JUMBO, Scenario, verdict};
use crate::{
    Error,
    far::{AGENT_PORT, Ip},
    lab::Proc,
};

pub(super) fn list() -> Vec<Scenario> {
    use Direction::{KernelToKernel, KernelToOurs, OursToKernel};
    vec![
        Scenario::new(7, "errors-ours-asks", OursToKernel, |c| errors(c, true))
            .peer()
            .ci(),
        Scenario::new(7, "errors-kernel-asks", KernelToOurs, |c| errors(c, false))
            .peer()
            .ci(),
        Scenario::new(7, "errors-ours-asks-mtu9000", OursToKernel, |c| errors(c, true)).shape(JUMBO),
        Scenario::new(7, "errors-kernel-asks-mtu9000", KernelToOurs, |c| errors(c, false)).shape(JUMBO),
        Scenario::new(7, "errors-two-kernels", KernelToKernel, two_kernels).guests(2),
        Scenario::new(7, "vanish-our-process-killed", KernelToOurs, our_process_killed)
            .peer()
            .ci(),
        Scenario::new(7, "vanish-guest-killed", OursToKernel, guest_killed).ci(),
    ]
}

/// What two kernels reported.
fn expectations() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/expect/errors.json"))
}

/// Our own agent and where it listens.
fn our_agent(c: &Ctx<'_>) -> Result<(Proc, SocketAddr), Error> {
    let mut agent = c.ours(Ip::V4, "our-agent", &["agent", "--port", &AGENT_PORT.to_string()])?;
    agent.wait_for("agent ready", Duration::from_secs(30))?;
    Ok((agent, SocketAddr::new(c.host(Ip::V4)?, AGENT_PORT)))
}

fn errors(c: &mut Ctx<'_>, ours_asks: bool) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c)?;
    let (mut theirs, there) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let (requester, responder) = if ours_asks { (here, there) } else { (there, here) };
    let out = driver(
        c,
        requester,
        responder,
        &[
            "--expect",
            &expectations().display().to_string(),
            "--ours",
            if ours_asks { "requester" } else { "responder" },
        ],
    )?;
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
    let expect = expectations().display().to_string();
    let record = std::env::var("FERROCE_INTEROP_RECORD").ok();
    let how = record.as_ref().map_or(["--expect", &expect], |file| ["--record", file]);
    let out = driver(c, requester, responder, &how)?;
    a.finish(Duration::from_secs(30))?;
    b.finish(Duration::from_secs(30))?;
    verdict(&out)
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

fn our_process_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (mut ours, here) = our_agent(c)?;
    let (_theirs, there) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let mut vanish = vanish(c, there, here)?;
    ours.kill();
    verdict(&vanish.finish(Duration::from_secs(120))?)
}

fn guest_killed(c: &mut Ctx<'_>) -> Result<String, Error> {
    let (_ours, here) = our_agent(c)?;
    let (_theirs, there) = c.far.agent("verbs-agent", Ip::V4, &c.dir)?;
    let mut vanish = vanish(c, here, there)?;
    c.guest()?.kill();
    let out = vanish.finish(Duration::from_secs(120));
    c.guest()?.reboot()?;
    verdict(&out?)
}
