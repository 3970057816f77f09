//! 10: what RTRS servers do with handshakes, proper and improper ones: the kernel's and ours, case by case.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    time::Duration,
};

use super::{Ctx, Direction, Scenario, rnbd};
use crate::{
    Error,
    far::Ip,
    lab::{HOST_V4, Proc},
};

pub(super) fn list() -> Vec<Scenario> {
    let scenario = |name, ci, invalidate| {
        Scenario::new(10, name, Direction::OursToKernel, move |c| handshakes(c, invalidate))
            .nets(2)
            .ci_if(ci)
    };
    vec![
        scenario("rtrs-handshakes-inv-on", true, "Y"),
        scenario("rtrs-handshakes-inv-off", false, "N"),
    ]
}

/// What the kernel does otherwise than ours, and why ours does what it does.
struct Difference {
    case: &'static str,
    kernel: &'static str,
    ours: &'static str,
    #[expect(dead_code, reason = "for those who read the table")]
    why: &'static str,
}

const fn differs(case: &'static str, kernel: &'static str, ours: &'static str, why: &'static str) -> Difference {
    Difference {
        case,
        kernel,
        ours,
        why,
    }
}

/// All differences; `specs/kernel.md` has them, too.
const DIFFERENCES: &[Difference] = &[
    differs(
        "cid-num-1",
        "accepted",
        "refused 104",
        "without an I/O connection there is nothing that the path could be for",
    ),
    differs(
        "cid-num-4096",
        "accepted",
        "refused 104",
        "257 connections are the usual limit: those of a client with 256 CPUs",
    ),
    differs(
        "cid-1-before-0",
        "accepted",
        "refused 104",
        "connection 0 proves the client's address, before which a path costs next to nothing",
    ),
    differs(
        "connecting-path-anew-recon-cnt-higher",
        "refused 104, accepted",
        "refused 104, refused 104",
        GIVEN_UP,
    ),
    differs(
        "connected-path-anew-recon-cnt-higher",
        "refused 104, alive",
        "refused 104, closed",
        GIVEN_UP,
    ),
    differs(
        "name-not-utf-8",
        "informed",
        "closed",
        "names are shown to people and written into JSON",
    ),
    differs(
        "name-with-control-character",
        "informed",
        "closed",
        "it would act on the terminals of those who read it",
    ),
    differs("immediate-before-information", "informed", "closed", BROKEN),
    differs("immediate-of-unknown-type", "answered 22", "closed", BROKEN),
    differs("immediate-of-an-answer", "answered 22", "closed", BROKEN),
    differs("heartbeat-on-io-connection", "answered 22", "closed", BROKEN),
    differs("write-header-before-the-chunk", "answered 22", "closed", UNANSWERED),
    differs("read-header-before-the-chunk", "answered 22", "closed", UNANSWERED),
    differs("read-of-two-pieces", "answered 22", "closed", UNANSWERED),
    differs(
        "read-of-an-empty-piece",
        "answered 22, answered 22",
        "closed",
        "it asks for no data and says where to: the kernel closes the path when it is to send them",
    ),
];

const GIVEN_UP: &str = "the client has given the old path up: its next attempt finds the way free";
const BROKEN: &str = "who breaks the protocol once is not relied on for the rest";
const UNANSWERED: &str = "the kernel drops the request, which is never answered: its client would wait for ever";

/// What came of each case.
type Outcomes = BTreeMap<String, String>;

fn handshakes(c: &mut Ctx<'_>, invalidate: &str) -> Result<String, Error> {
    let kernel = kernel(c, invalidate)?;
    let ours = ours(c, invalidate)?;
    compare(&kernel, &ours)
}

/// A dozen chunks: of the numbers that fit in their bits some are none of a chunk, and a session is made quickly.
const QUEUE_DEPTH: &str = "12";

fn kernel(c: &mut Ctx<'_>, invalidate: &str) -> Result<Outcomes, Error> {
    let up = format!(
        "set -e; dmesg -C; rdma link add rxe1 type rxe netdev eth1; modprobe -q rdma_cm; modprobe -q ib_core\n\
         insmod $LINUX/rtrs/rtrs-core.ko\n\
         insmod $LINUX/rtrs/rtrs-server.ko always_invalidate={invalidate} sess_queue_depth={QUEUE_DEPTH}\n\
         insmod $LINUX/rnbd/rnbd-server.ko\n"
    );
    c.guest()?.run(&up, 120)?;
    let guest = c.guest()?;
    let to = [0, 1].map(|net| guest.addr(net, Ip::V4).to_string());
    let result = outcomes(c, "kernel", HOST_V4, [&to[0], &to[1]], &["--linux"]);
    let log = c.guest()?.try_run("dmesg", 60).map(|(_, log)| log);
    rnbd::server_down(c)?;
    c.guest()?.run("rdma link delete rxe1", 60)?;
    let log = log?;
    result.map_err(|e| format!("{e}\ndmesg:\n{log}").into())
}

fn ours(c: &mut Ctx<'_>, invalidate: &str) -> Result<Outcomes, Error> {
    rnbd::image(c, "disk", 16)?;
    let export = format!("disk={}", c.path("disk.img"));
    let invalidate = if invalidate == "Y" { "on" } else { "off" };
    let mut args = vec!["serve", "--addr", "127.0.0.1", "--export", &export, "--json"];
    args.extend(["--queue-depth", QUEUE_DEPTH, "--always-invalidate", invalidate]);
    let mut server = c.ferroce("serve", &args)?;
    server.wait_for("\"listening\"", Duration::from_secs(30))?;
    let result = outcomes(c, "ours", ["127.0.0.2", "127.0.0.3"], ["127.0.0.1"; 2], &[]);
    server.interrupt();
    server.finish(Duration::from_secs(30))?;
    result
}

/// Plays all cases against a server that can be reached at `to` from `from`.
fn outcomes(c: &Ctx<'_>, server: &str, from: [&str; 2], to: [&str; 2], more: &[&str]) -> Result<Outcomes, Error> {
    let mut command = Command::new(&c.places.peer);
    command.args(["--addr", from[0], "handshakes", "--to", to[0]]);
    command
        .args(["--second-addr", from[1], "--second-to", to[1]])
        .args(more);
    let text = Proc::spawn(&format!("handshakes-{server}"), &mut command, &c.dir)?.finish(Duration::from_secs(600))?;
    let cases = text.lines().filter_map(|l| l.strip_prefix("case ")?.split_once(": "));
    Ok(cases.map(|(name, seen)| (name.to_owned(), seen.to_owned())).collect())
}

/// Cases that the kernel is not asked: it does not survive them.
const NOT_ASKED: [&str; 2] = ["name-empty", "name-without-end"];

/// Both must have done the same, but for what is known.
fn compare(kernel: &Outcomes, ours: &Outcomes) -> Result<String, Error> {
    let names = |of: &Outcomes| -> BTreeSet<String> { of.keys().cloned().collect() };
    let unasked: Vec<String> = names(ours).difference(&names(kernel)).cloned().collect();
    if unasked != NOT_ASKED || !names(kernel).is_subset(&names(ours)) {
        return Err(format!("not the same cases: the kernel was not asked {unasked:?}").into());
    }
    let known = |case: &str| DIFFERENCES.iter().find(|d| d.case == case);
    let mut wrong = String::new();
    for (case, theirs) in kernel {
        let mine = &ours[case];
        let right = match known(case) {
            Some(d) => (d.kernel, d.ours) == (theirs, mine),
            None => theirs == mine,
        };
        if !right {
            wrong += &format!("\n{case}: the kernel: {theirs}; ours: {mine}");
        }
    }
    if !wrong.is_empty() {
        return Err(format!("what is not known to differ does:{wrong}").into());
    }
    let (all, differ) = (kernel.len(), DIFFERENCES.len());
    Ok(format!("{all} cases, {differ} of them differ as known: passed"))
}

#[cfg(test)]
mod tests {
    use super::{DIFFERENCES, NOT_ASKED, Outcomes, compare};

    /// What both servers do when nothing but the known differs.
    fn usual() -> [Outcomes; 2] {
        let mut both = [Outcomes::new(), Outcomes::new()];
        for d in DIFFERENCES {
            both[0].insert(d.case.to_owned(), d.kernel.to_owned());
            both[1].insert(d.case.to_owned(), d.ours.to_owned());
        }
        for side in &mut both {
            side.insert("proper".to_owned(), "informed".to_owned());
        }
        both[1].extend(NOT_ASKED.map(|case| (case.to_owned(), "closed".to_owned())));
        both
    }

    #[test]
    fn what_is_known_may_differ() {
        let [kernel, ours] = usual();
        compare(&kernel, &ours).unwrap();
    }

    #[test]
    fn anything_else_may_not() {
        let [kernel, mut ours] = usual();
        ours.insert("proper".to_owned(), "closed".to_owned());
        assert!(compare(&kernel, &ours).is_err());
    }

    #[test]
    fn a_known_difference_that_is_gone_is_told() {
        for d in DIFFERENCES {
            let [kernel, mut ours] = usual();
            ours.insert(d.case.to_owned(), d.kernel.to_owned());
            assert!(compare(&kernel, &ours).is_err(), "{}", d.case);
        }
    }

    #[test]
    fn a_case_that_only_one_of_them_was_asked_is_told() {
        let [mut kernel, ours] = usual();
        kernel.remove("proper");
        assert!(compare(&kernel, &ours).is_err());
    }
}
