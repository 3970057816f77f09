//! Runs a case by its plan.

use std::{path::Path, time::Instant};

use crate::{
    Result, capture,
    cases::{Case, Plan},
    killed, memcheck, migration,
    process::{Setup, interrupted},
    python,
    report::Outcome,
};

/// Variable with the name of the capture that each process writes.
const CAPTURES: &str = "FERROCE_PCAP";

pub(crate) fn run(setup: &Setup, case: &Case) -> Outcome {
    if let Err(why) = setup.prepare(case) {
        return Outcome::NotRun(why);
    }
    let dir = match setup.directory(&case.name) {
        Ok(dir) => dir,
        Err(text) => return Outcome::Failed(text),
    };
    // There is one `::1` on this host, and other tests run next to this one.
    let _only = (case.net.v6 && !case.net.ethernet).then(ferroce_loopback::only_one);
    let started = Instant::now();
    let done = match case.memcheck {
        true => checked(setup, case, &dir),
        false => once(setup, case, &dir),
    };
    setup.sweep();
    match done {
        Ok(()) => Outcome::Passed(started.elapsed()),
        Err(text) => Outcome::Failed(text),
    }
}

fn once(setup: &Setup, case: &Case, dir: &Path) -> Result<()> {
    match case.plan {
        // Under valgrind programs are too slow for timers to be as they should.
        Plan::Programs if case.memcheck => setup.attempt(case, dir).map(drop),
        Plan::Programs => judged(setup, case, dir),
        Plan::Captured => {
            setup.attempt(case, dir)?;
            capture::check_order(dir)
        }
        Plan::Python(only) => python::run(setup, case, dir, only),
        Plan::Kill(kill) => killed::run(setup, case, dir, kill),
        Plan::Migrate(how) => migration::run(setup, case, dir, how),
    }
}

/// Runs a case that writes captures, and judges those.
fn judged(setup: &Setup, case: &Case, dir: &Path) -> Result<()> {
    let captures = case.env.iter().any(|(name, _)| *name == CAPTURES);
    let case = if captures {
        case.clone()
    } else {
        case.clone().with(CAPTURES, "%p.pcap")
    };
    setup.attempt(&case, dir)?;
    capture::check_rules(dir, case.breaks)
}

/// Runs a case under valgrind, again if valgrind itself fails.
fn checked(setup: &Setup, case: &Case, dir: &Path) -> Result<()> {
    let mut done = once(setup, case, dir);
    for _ in 1..memcheck::TRIES {
        let why = memcheck::try_again(dir, &done).filter(|_| !interrupted());
        let Some(why) = why else { break };
        setup.note_retry(format!("under valgrind: {why}"));
        done = once(setup, case, dir);
    }
    memcheck::judge(dir, done)
}
