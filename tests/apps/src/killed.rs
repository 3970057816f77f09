//! One side of a program is killed with SIGKILL: the other has to learn of it, by the completion or the event that
//! hardware would give it, and to end.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::{Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use ferroce_loopback::tcp::{free_port, listens};

use crate::{
    Result,
    cases::{Case, Kill, Moment, Ready, Side},
    process::{Group, PAUSE, Setup, interrupted},
};

/// Milliseconds after the client was started, on the way to a connection; or after the victim has said what it was waited for.
const DELAYS: [u64; 6] = [5, 15, 30, 60, 120, 250];
/// How long the other one may take. QP timeouts of the programs come to at most 35 s (2.1 s, 8 times, with twice that for
/// the last on a busy machine), RDMA_CM's to 10 s for each of two messages.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Said of a survivor that has not ended.
const STAYS: &str = "does not end";
/// The capture of each side, by its process.
const CAPTURE: &str = "%p.pcap";
/// How long the victim may take to say what it is waited for.
const PREPARE: Duration = Duration::from_secs(60);

/// Line buffering, so that what programs say can be seen.
fn unbuffered(words: Vec<String>) -> Vec<String> {
    let stdbuf = ["stdbuf", "-oL"].map(str::to_owned);
    stdbuf.into_iter().chain(words).collect()
}

fn wait_until(what: &str, deadline: Instant, mut done: impl FnMut() -> bool) -> Result<()> {
    while !done() {
        if interrupted() {
            return Err("interrupted".into());
        }
        if Instant::now() >= deadline {
            return Err(format!("{what} does not happen"));
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// What became of a survivor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Survivor {
    /// It knows.
    Knows,
    /// Nothing of its own was outstanding, so that no hardware would have told it.
    NothingOutstanding,
}

/// The end of a survivor: it must have noticed, so that it does not end as if all were well. `outstanding` looks at what it has
/// sent.
fn judge(
    kill: Kill,
    who: Side,
    text: &str,
    status: Option<ExitStatus>,
    outstanding: impl FnOnce() -> Result<()>,
) -> Result<Survivor> {
    let told = kill.says.is_empty() || kill.says.iter().any(|w| text.contains(w));
    let connecting = kill.moment == Moment::Connecting;
    match status {
        None if connecting && told => Ok(Survivor::Knows),
        None => outstanding()
            .map(|()| Survivor::NothingOutstanding)
            .map_err(|e| format!("the {who:?} {STAYS}: {e}\n{text}")),
        // Killed by a signal: it crashed.
        Some(status) if status.code().is_none() => Err(format!("the {who:?} ended with {status}\n{text}")),
        Some(_) if connecting || told => Ok(Survivor::Knows),
        Some(status) => Err(format!(
            "the {who:?} says nothing of {:?} ({status})\n{text}",
            kill.says
        )),
    }
}

/// Whether all that one queue pair sent to another was acknowledged, by the lines of `ferroce pcap check`. An error says what
/// was not, or that there are others.
fn all_acknowledged(lines: &str) -> Result<()> {
    // By the queue pair that they go to: the last request, the last acknowledgement.
    let mut requests: BTreeMap<u32, u32> = BTreeMap::new();
    let mut acks: BTreeMap<u32, u32> = BTreeMap::new();
    let later = |map: &mut BTreeMap<u32, u32>, qp: u32, psn: u32| {
        let last = map.entry(qp).or_insert(psn);
        if ahead(psn, *last) {
            *last = psn;
        }
    };
    for line in lines.lines().filter(|line| line.contains(" RC ")) {
        let number = |name: &str| {
            let word = line.split_once(name)?.1.split_whitespace().next()?;
            u32::from_str_radix(word.strip_prefix("0x")?, 16).ok()
        };
        let (Some(qp), Some(psn)) = (number(" qp "), number(" psn ")) else {
            continue;
        };
        if !line.contains(" RC Acknowledge ") {
            later(&mut requests, qp, psn);
        } else if line.contains(" ack") {
            later(&mut acks, qp, psn);
        }
    }
    let pair: BTreeSet<u32> = requests.keys().chain(acks.keys()).copied().collect();
    if pair.is_empty() {
        return Ok(());
    }
    let [a, b] = pair.iter().copied().collect::<Vec<_>>()[..] else {
        return Err(format!("the capture has the queue pairs {pair:x?}, not two"));
    };
    for (to, from) in [(a, b), (b, a)] {
        match (requests.get(&to), acks.get(&from)) {
            (None, _) => {}
            (Some(sent), Some(acknowledged)) if !ahead(*sent, *acknowledged) => {}
            (Some(sent), acknowledged) => {
                return Err(format!("PSN {sent:#x} to {to:#x} is outstanding, of {acknowledged:x?}"));
            }
        }
    }
    Ok(())
}

/// Whether a PSN comes after another.
const fn ahead(psn: u32, of: u32) -> bool {
    let distance = psn.wrapping_sub(of) & 0xff_ffff;
    distance != 0 && distance < 0x80_0000
}

/// Whether nothing of a survivor is outstanding, by what it captured.
fn nothing_outstanding(setup: &Setup, capture: &Path) -> Result<()> {
    let mut command = Command::new(setup.ferroce());
    command.args(["pcap", "check", "--frames"]).arg(capture);
    let out = command.output().map_err(|e| format!("looking at its capture: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    match out.status.code() {
        // 3: packets that the capture lacks can't be judged.
        Some(0 | 3) => all_acknowledged(&text),
        _ => Err(format!("its capture: {}\n{text}", String::from_utf8_lossy(&out.stderr))),
    }
}

pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path, kill: Kill) -> Result<()> {
    // Whether nothing is outstanding can be seen on the wire.
    let captured = || case.clone().with("FERROCE_PCAP", CAPTURE);
    match kill.moment {
        Moment::BeforeConnect => once(setup, case, dir, kill, 0).map(drop),
        Moment::Connecting => connecting(setup, &captured(), dir, kill),
        // No capture at first: some programs send gigabytes.
        Moment::Says(_) => match once(setup, case, dir, kill, 0) {
            Err(e) if e.contains(STAYS) => {
                working(setup, &captured(), dir, kill).map_err(|again| format!("{e}\n{again}"))
            }
            other => other.map(drop),
        },
    }
}

/// Kills the victim while it works, until that is at a moment at which the survivor can know. Of two that send by turns the
/// one whose turn it is not has nothing outstanding.
fn working(setup: &Setup, case: &Case, dir: &Path, kill: Kill) -> Result<()> {
    for ms in DELAYS {
        let end = once(setup, case, dir, kill, ms).map_err(|e| format!("killed {ms} ms later: {e}"))?;
        if end == Survivor::Knows {
            return Ok(());
        }
    }
    Err("at none of the moments did the survivor have anything outstanding".into())
}

fn connecting(setup: &Setup, case: &Case, dir: &Path, kill: Kill) -> Result<()> {
    let mut known = false;
    for ms in DELAYS {
        let end = once(setup, case, dir, kill, ms).map_err(|e| format!("killed {ms} ms into connecting: {e}"))?;
        known |= end == Survivor::Knows;
    }
    match known {
        true => Ok(()),
        false => Err("none of the moments was one at which the survivor can know".into()),
    }
}

fn once(setup: &Setup, case: &Case, dir: &Path, kill: Kill, ms: u64) -> Result<Survivor> {
    let server = case.server.as_ref().ok_or("no server")?;
    let port = free_port().map_err(|e| format!("finding a port: {e}"))?;
    let start = |what: &[String], name: &str| {
        let words = unbuffered(setup.fill(case, what, port, dir)?);
        setup.start(case, &words, dir, name)
    };
    let mut server_group = start(&server.command, "server")?;
    match server.ready {
        Ready::Listens => wait_until("listening", Instant::now() + PREPARE, || listens("self", port))?,
        // Not to be seen from outside.
        Ready::Retry | Ready::AtOnce => thread::sleep(Duration::from_secs(2)),
    }
    if kill.moment == Moment::BeforeConnect {
        server_group.kill();
    }
    let mut client = start(&case.client, "client")?;
    let (victim, survivor, other) = match kill.victim {
        Side::Server => (&mut server_group, &mut client, Side::Client),
        Side::Client => (&mut client, &mut server_group, Side::Server),
    };
    match kill.moment {
        Moment::BeforeConnect => {}
        Moment::Connecting => thread::sleep(Duration::from_millis(ms)),
        Moment::Says(text) => {
            wait_until(text, Instant::now() + PREPARE, || victim.text().contains(text))
                .map_err(|e| format!("{e}\n{}\n--- the other\n{}", victim.text(), survivor.text()))?;
            thread::sleep(Duration::from_millis(ms));
        }
    }
    victim.kill();
    // A server whose client was killed before it knew of it has no reason to end: it takes another one.
    let may_wait = other == Side::Server && kill.moment == Moment::Connecting;
    let timeout = if may_wait { TIMEOUT / 3 } else { TIMEOUT };
    let mut status = survivor.wait(Instant::now() + timeout).map_err(|e| e.to_string())?;
    if status.is_none() && may_wait {
        status = serve_another(start(&case.client, "another")?, survivor)?;
    }
    let capture = dir.join(CAPTURE.replace("%p", &survivor.id().to_string()));
    judge(kill, other, &survivor.text(), status, || {
        nothing_outstanding(setup, &capture)
    })
}

/// Kills another client once it has had the time to connect, after which the server has to end.
fn serve_another(mut client: Group, server: &mut Group) -> Result<Option<ExitStatus>> {
    thread::sleep(Duration::from_secs(5));
    client.kill();
    server.wait(Instant::now() + TIMEOUT).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: &str =
        " 1 1.0 127.0.0.1:5 > 127.0.0.1:4791 RC Send Only qp 0x000012 psn 0x000000 len 9 ack-req [icrc ok]\n";
    const EARLIER: &str =
        " 2 1.1 127.0.0.1:6 > 127.0.0.1:4791 RC Acknowledge qp 0x000034 psn 0xffffff ack msn 0x1 [icrc ok]\n";
    const TOLD: &str = " 3 1.2 127.0.0.1:6 > 127.0.0.1:4791 RC Acknowledge qp 0x000034 psn 0x000000 ack, 4 credits msn 0x2 [icrc ok]\n";
    const REFUSED: &str = " 3 1.2 127.0.0.1:6 > 127.0.0.1:4791 RC Acknowledge qp 0x000034 psn 0x000000 rnr-nak, wait 1ms msn 0x2 [icrc ok]\n";
    const BACK: &str =
        " 4 1.3 127.0.0.1:6 > 127.0.0.1:4791 RC Send Only qp 0x000034 psn 0x000007 len 9 ack-req [icrc ok]\n";

    #[test]
    fn what_is_outstanding_is_found() {
        assert_eq!(all_acknowledged(&[SENT, EARLIER, TOLD].concat()), Ok(()));
        assert_eq!(all_acknowledged("no packets of queue pairs"), Ok(()));
        for outstanding in [
            &[SENT, EARLIER][..],
            &[SENT, EARLIER, REFUSED],
            &[SENT, TOLD, BACK],
            &[SENT],
        ] {
            assert!(all_acknowledged(&outstanding.concat()).is_err(), "{outstanding:?}");
        }
    }
}
