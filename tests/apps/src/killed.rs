//! One side of a program is killed with SIGKILL: the other has to learn of it, by the completion or the event that
//! hardware would give it, and to end.

use std::{
    path::Path,
    process::ExitStatus,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Result,
    cases::{Case, Ready},
    process::{Group, PAUSE, Setup, free_port, interrupted, listens},
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Server,
    Client,
}

/// When it is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The server, before the client starts.
    BeforeConnect,
    /// On the way to a connection: several times, a little later each time.
    Connecting,
    /// When it has printed this.
    Says(&'static str),
}

/// Who is killed and when.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kill {
    pub(crate) victim: Side,
    pub(crate) moment: Moment,
    /// What the other one prints, any of it. On the way to a connection there are several ways to learn of the end: this
    /// is what shows that it did when it does not end.
    pub(crate) says: &'static [&'static str],
}

/// Milliseconds after the client was started, on the way to a connection.
const DELAYS: [u64; 6] = [5, 15, 30, 60, 120, 250];
/// How long the other one may take. QP timeouts of the programs come to at most 35 s (2.1 s, 8 times, with twice that for
/// the last on a busy machine), RDMA_CM's to 10 s for each of two messages.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long the victim may take to say what it is waited for.
const PREPARE: Duration = Duration::from_secs(60);

/// How often a moment on the way to a connection is tried when the survivor does not end. The victim may have acknowledged all
/// that the survivor sent, and not have answered yet: then nothing is outstanding, and no hardware tells of its end either.
const TRIES: usize = 3;
/// What an error says of a survivor that does not end.
const STAYS: &str = "does not end";

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

/// The end of a survivor: it must have noticed, so that it does not end as if all were well.
fn judge(kill: Kill, who: Side, text: &str, status: Option<ExitStatus>) -> Result<()> {
    let told = kill.says.is_empty() || kill.says.iter().any(|w| text.contains(w));
    let connecting = kill.moment == Moment::Connecting;
    match status {
        None if connecting && told => Ok(()),
        None => Err(format!("the {who:?} {STAYS}\n{text}")),
        // Killed by a signal: it crashed.
        Some(status) if status.code().is_none() => Err(format!("the {who:?} ended with {status}\n{text}")),
        Some(_) if connecting || told => Ok(()),
        Some(status) => Err(format!(
            "the {who:?} says nothing of {:?} ({status})\n{text}",
            kill.says
        )),
    }
}

pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path, kill: Kill) -> Result<()> {
    match kill.moment {
        Moment::Connecting => DELAYS.into_iter().try_for_each(|ms| {
            let mut done = once(setup, case, dir, kill, ms);
            for _ in 1..TRIES {
                if done.as_ref().is_err_and(|e| e.contains(STAYS)) {
                    done = once(setup, case, dir, kill, ms);
                }
            }
            done.map_err(|e| format!("killed {ms} ms into connecting: {e}"))
        }),
        Moment::BeforeConnect | Moment::Says(_) => once(setup, case, dir, kill, 0),
    }
}

fn once(setup: &Setup, case: &Case, dir: &Path, kill: Kill, ms: u64) -> Result<()> {
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
        Moment::Says(text) => wait_until(text, Instant::now() + PREPARE, || victim.text().contains(text))
            .map_err(|e| format!("{e}\n{}\n--- the other\n{}", victim.text(), survivor.text()))?,
    }
    victim.kill();
    // A server whose client was killed before it knew of it has no reason to end: it takes another one.
    let may_wait = other == Side::Server && kill.moment == Moment::Connecting;
    let patience = if may_wait { PATIENCE / 3 } else { PATIENCE };
    let mut status = survivor.wait(Instant::now() + patience).map_err(|e| e.to_string())?;
    if status.is_none() && may_wait {
        status = serve_another(start(&case.client, "another")?, survivor)?;
    }
    judge(kill, other, &survivor.text(), status)
}

/// Kills another client once it has had the time to connect, after which the server has to end.
fn serve_another(mut client: Group, server: &mut Group) -> Result<Option<ExitStatus>> {
    thread::sleep(Duration::from_secs(5));
    client.kill();
    server.wait(Instant::now() + PATIENCE).map_err(|e| e.to_string())
}
