//! 1 and 6: every RC operation, and `ibv_rc_pingpong`.

use std::time::Duration;

use roce::DatapathKind;

use super::{Ctx, Direction, JUMBO, SMALL, Scenario, key_lines, stall, verdict};
use crate::{Error, facts::Want, far::Ip, guest::Kernel};

pub(super) fn list() -> Vec<Scenario> {
    let mut all = Vec::new();
    for shape in [SMALL, JUMBO] {
        for ip in Ip::BOTH {
            let number = if ip == Ip::V4 { 1 } else { 6 };
            let name = format!("ops-{}-mtu{}", ip.tag(), shape.mtu);
            let ci = (ip == Ip::V6) != (shape == JUMBO);
            let ops = Scenario::new(number, name, Direction::Both, move |c| ops(c, ip)).shape(shape);
            all.push(ops.ci_if(ci));
            let tail = format!("{}-mtu{}", ip.tag(), shape.mtu);
            let theirs = Scenario::new(
                number,
                format!("pingpong-our-server-{tail}"),
                Direction::KernelToOurs,
                move |c| pingpong_server(c, ip),
            );
            all.push(theirs.shape(shape).wants(&PINGPONG));
            let ours = Scenario::new(
                number,
                format!("pingpong-our-client-{tail}"),
                Direction::OursToKernel,
                move |c| pingpong_client(c, ip),
            );
            all.push(ours.shape(shape).wants(&PINGPONG));
        }
    }
    // The MTU of a peer is what it is.
    let peer = |s: Scenario| if s.shape == SMALL { s.peer() } else { s };
    all.into_iter().map(peer).chain(other_datapaths()).collect()
}

/// The operations by the datapaths of which the kernel sees that they are no UDP sockets: Identifications of our own, UDP
/// checksum 0.
fn other_datapaths() -> impl Iterator<Item = Scenario> {
    [
        (1, "ops-v4-raw", Ip::V4, DatapathKind::Raw),
        (6, "ops-v6-packet", Ip::V6, DatapathKind::Packet { vlan: None }),
    ]
    .into_iter()
    .map(|(number, name, ip, datapath)| {
        Scenario::new(number, name, Direction::Both, move |c| ops(c, ip))
            .datapath(datapath)
            .ci()
    })
}

const PINGPONG: [Want; 2] = [Want::Software, Want::Program("ibv_rc_pingpong")];

/// `ferroce-lab ops` against the peer's verbs-agent.
pub(super) fn ops(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let (mut agent, at) = c.far.agent("verbs-agent", ip, &c.dir)?;
    // With packets lost every operation takes longer; and all paths through the code come with small messages, too.
    let largest = if c.lossy { "65536" } else { "8388608" };
    let at = at.to_string();
    let mut args = vec!["ops", "--agent", &at, "--mtu", c.path_mtu(), "--largest", largest];
    if c.guest.is_none() {
        args.push("--as-capable");
    }
    if c.lossy {
        args.push("--lossy");
        args.extend(of_nothing(c)?);
    }
    let (mut again, mut tries, mut judged) = ("", 0, 0);
    let out = loop {
        let name = if tries == 0 { "ops" } else { "ops-again" };
        match c.ours(ip, name, &args)?.finish(Duration::from_secs(900)) {
            Err(e) if tries < MAX_EARLY && kernel_read_ended_early(c, &e)? => {
                again = "; not at the first try: the kernel ended a READ early";
            }
            Err(e) if tries == 0 && e.to_string().contains(NO_COMPLETION) && stall::kernel_stopped(c, &mut judged) => {
                again = "; not at the first try: the kernel stopped in the middle of a message";
            }
            result => break result?,
        }
        tries += 1;
    };
    agent.finish(Duration::from_secs(60))?;
    Ok(format!("{}{again}", verdict(&out)?))
}

/// Words of `ferroce-lab ops` on an operation of the agent that did not complete.
const NO_COMPLETION: &str = "the agent saw []";

/// How often a run may end by the fault of `read-late-ack-6.12`.
pub(super) const MAX_EARLY: usize = 4;

/// A fault of 6.12 and 7.3, which needs an acknowledgement that is late: see `read-late-ack`. Wrong data alone leaves the queue pair as it
/// is. Answers of ours out of their order would end so, too: without loss, and on 6.1, there is no second try.
fn kernel_read_ended_early(c: &Ctx<'_>, e: &Error) -> Result<bool, Error> {
    let said = e.to_string().contains("succeeded before all of it was there");
    Ok(said && c.lossy && c.kernel()? > Kernel::V6_1)
}

/// Whether the kernel's log says so: it warns once until it is told to forget that.
pub(super) fn read_ended_early_in_log(c: &mut Ctx<'_>) -> Result<bool, Error> {
    Ok(c.guest()?.try_run("dmesg | grep 'RIP:.*rxe_completer'", 30)?.0 == 0)
}

/// Makes the kernel warn again, in a log without the warnings of before.
pub(super) fn forget_warnings(c: &mut Ctx<'_>) -> Result<(), Error> {
    let forget = "echo 1 > /sys/kernel/debug/clear_warn_once; dmesg -C";
    c.guest()?.run(forget, 30).map(drop)
}

/// How our READs of no bytes get through to the guest although an answer may be lost: see `read-nothing-again`.
pub(super) fn of_nothing(c: &Ctx<'_>) -> Result<Option<&'static str>, Error> {
    Ok((c.kernel()? > Kernel::V6_1).then_some("--no-key-for-nothing"))
}

const COUNT: [&str; 4] = ["-s", "20000", "-n", "300"];

/// Ours with as much. That the other side has got everything is what its exit status says.
fn our_pingpong<'a>(c: &Ctx<'_>, more: &[&'a str]) -> Vec<&'a str> {
    let lossy = c.lossy.then_some("--lossy");
    ["pingpong", "--size", "20000", "--iters", "300"]
        .into_iter()
        .chain(more.iter().copied())
        .chain(lossy)
        .collect()
}

fn theirs(c: &Ctx<'_>, ip: Ip) -> Result<Vec<String>, Error> {
    let gid = c.far.gid(ip, &c.dir)?;
    let words = ["ibv_rc_pingpong", "-d", &gid.device, "-i", &gid.port, "-g", &gid.index];
    Ok(words.into_iter().chain(COUNT).map(str::to_owned).collect())
}

pub(super) fn pingpong_server(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let mut program = theirs(c, ip)?;
    program.push(c.host(ip)?.to_string());
    let mut ours = c.ours(ip, "pingpong", &our_pingpong(c, &[]))?;
    ours.wait_for("waiting", Duration::from_secs(30))?;
    let words: Vec<&str> = program.iter().map(String::as_str).collect();
    let theirs = c
        .theirs("ibv_rc_pingpong", &words, 300)?
        .finish(Duration::from_secs(320))?;
    let ours = ours.finish(Duration::from_secs(60))?;
    Ok(format!("{}; kernel: {}", verdict(&ours)?, key_lines(&theirs)))
}

pub(super) fn pingpong_client(c: &mut Ctx<'_>, ip: Ip) -> Result<String, Error> {
    let program = theirs(c, ip)?;
    let words: Vec<&str> = program.iter().map(String::as_str).collect();
    let mut theirs = c.theirs("ibv_rc_pingpong", &words, 300)?;
    // Our client tries until the server listens. ibv_rc_pingpong takes the first wildcard address that it is given,
    // which is IPv4's: only the GID says which family the RoCE packets have.
    let host = c.far.addr(Ip::V4).or_else(|_| c.far.addr(ip))?.to_string();
    let ours = c
        .ours(ip, "pingpong", &our_pingpong(c, &["--connect", &host]))?
        .finish(Duration::from_secs(320))?;
    let theirs = theirs.finish(Duration::from_secs(60))?;
    Ok(format!("{}; kernel: {}", verdict(&ours)?, key_lines(&theirs)))
}
