//! 7: the programs of `tests/apps` about the interface, over rdma_rxe, in a guest and without us: what they ask for is what the
//! kernel does, but for the differences in `contract/differences.tsv`, which `specs/kernel.md` explains.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{Ctx, Direction, Scenario};
use crate::{Error, far::Ip};

/// A check that rdma_rxe fails.
struct Difference {
    /// Program and check.
    check: (&'static str, &'static str),
    /// Beginning of its message.
    says: &'static str,
    /// Why.
    because: &'static str,
}

/// Checks that are not run over rdma_rxe.
const LEFT_OUT: &[(&str, &str)] = &[
    // Where a queue pair goes that has a bound window, rdma_rxe waits for 50 s, and then frees what the window goes on to
    // name: the guest might not survive the next use of it.
    ("posting", "windows_end_with_their_queue_pair"),
    // libibverbs follows any pointer: what comes of these depends on what lies there.
    ("strangers", "objects_that_were_changed_are_refused"),
    ("strangers", "nothing_of_ours_is_refused"),
    ("strangers", "what_was_destroyed_is_refused"),
    ("strangers", "contexts_that_were_closed_are_refused"),
];

/// Reads a table of differences, one a line.
fn read(table: &'static str) -> Vec<Difference> {
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    let difference = |line: &'static str| {
        let [program, check, says, because] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("not four columns: {line}");
        };
        Difference {
            check: (program, check),
            says,
            because,
        }
    };
    lines.map(difference).collect()
}

fn differences() -> Vec<Difference> {
    read(include_str!("contract/differences.tsv"))
}

const COMMON: &str = include_str!("../../../../apps/c/common.h");

/// The programs, each of which tries its checks one by one with `--each`, but for those that are named behind it.
const PROGRAMS: [(&str, &str); 6] = [
    ("edges", include_str!("../../../../apps/c/edges.c")),
    ("channels", include_str!("../../../../apps/c/channels.c")),
    ("contract", include_str!("../../../../apps/c/contract.c")),
    ("posting", include_str!("../../../../apps/c/posting.c")),
    ("limits", include_str!("../../../../apps/c/limits.c")),
    ("strangers", include_str!("../../../../apps/c/strangers.c")),
];

pub(super) fn list() -> Vec<Scenario> {
    vec![Scenario::new(7, "kernel-contract", Direction::KernelToKernel, contract)]
}

fn contract(c: &mut Ctx<'_>) -> Result<String, Error> {
    let addr = c.far.addr(Ip::V4)?;
    let mut script =
        format!("mkdir -p /tmp/contract; cd /tmp/contract\ncat > common.h <<'END_OF_SOURCE'\n{COMMON}END_OF_SOURCE\n");
    for (name, source) in PROGRAMS {
        write!(
            script,
            "cat > {name}.c <<'END_OF_SOURCE'\n{source}END_OF_SOURCE\n\
             gcc -Wall -Werror -O1 -o {name} {name}.c -lrdmacm -libverbs || exit 1\n"
        )?;
    }
    for (name, _) in PROGRAMS {
        let address = if name == "channels" {
            addr.to_string()
        } else {
            String::new()
        };
        let but: Vec<&str> = LEFT_OUT.iter().filter(|l| l.0 == name).map(|l| l.1).collect();
        writeln!(
            script,
            "echo 'program {name}'; ./{name} {address} --each {} || exit 1",
            but.join(" ")
        )?;
    }
    let said = c.guest()?.run(&script, 3600)?;
    let known = differences();
    let wrong = compare(&said, &expected(), &known);
    if wrong.is_empty() {
        let same = expected().len() - known.len();
        return Ok(format!("passed: {same} as ours, {} otherwise as known", known.len()));
    }
    Err(wrong.join("\n").into())
}

/// The checks of all programs that are tried.
fn expected() -> Vec<(&'static str, &'static str)> {
    let mut checks = all_checks();
    checks.retain(|c| !LEFT_OUT.contains(c));
    checks
}

fn all_checks() -> Vec<(&'static str, &'static str)> {
    let of = |(program, source): (&'static str, &'static str)| {
        let names = source
            .lines()
            .filter_map(|l| l.trim().strip_prefix("CHECK(")?.strip_suffix("),"));
        names.map(move |name| (program, name))
    };
    PROGRAMS.into_iter().flat_map(of).collect()
}

/// What is otherwise than expected: a check that fails, one that holds although it is known not to, fails in another way, or
/// was not tried.
fn compare(said: &str, checks: &[(&str, &str)], known: &[Difference]) -> Vec<String> {
    let mut results = BTreeMap::new();
    let mut program = "";
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("program ") {
            program = name;
        } else if let Some(name) = line.strip_prefix("ok ") {
            results.insert((program, name), None);
        } else if let Some((name, why)) = line.strip_prefix("failed ").and_then(|l| l.split_once(": ")) {
            results.insert((program, name), Some(why));
        }
    }
    let mut wrong = Vec::new();
    for check in checks {
        let difference = known.iter().find(|d| d.check == *check);
        let name = format!("{} {}", check.0, check.1);
        match (results.get(check), difference) {
            (None, _) => wrong.push(format!("{name}: not tried")),
            (Some(Some(why)), None) => wrong.push(format!("{name}: rdma_rxe is otherwise: {why}")),
            (Some(None), Some(d)) => wrong.push(format!("{name}: holds, although {}", d.because)),
            (Some(Some(why)), Some(d)) if !why.starts_with(d.says) => {
                wrong.push(format!("{name}: {why}, not {} ({})", d.says, d.because));
            }
            (Some(_), _) => (),
        }
    }
    for d in known.iter().filter(|d| !checks.contains(&d.check)) {
        wrong.push(format!("{} {}: no such check", d.check.0, d.check.1));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECKS: [(&str, &str); 3] = [("one", "first"), ("one", "second"), ("two", "first")];
    fn told(said: &str) -> Vec<String> {
        compare(said, &CHECKS, &read("one\tsecond\ta == b\tof a reason"))
    }

    #[test]
    fn what_is_as_expected_is_not_told() {
        let said = "program one\nok first\nfailed second: a == b: Success\nprogram two\nok first\n";
        assert!(told(said).is_empty());
    }

    #[test]
    fn whatever_is_otherwise_is_told() {
        let new = told("program one\nfailed first: x\nfailed second: a == b\nprogram two\nok first\n");
        assert_eq!(new, ["one first: rdma_rxe is otherwise: x"]);
        let gone = told("program one\nok first\nok second\nprogram two\nok first\n");
        assert_eq!(gone, ["one second: holds, although of a reason"]);
        let other = told("program one\nok first\nfailed second: signal 11\nprogram two\nok first\n");
        assert_eq!(other, ["one second: signal 11, not a == b (of a reason)"]);
        let missing = told("program one\nok first\nfailed second: a == b\nprogram two\n");
        assert_eq!(missing, ["two first: not tried"]);
    }

    #[test]
    fn every_difference_is_in_the_specification() {
        let specs = include_str!("../../../../../specs/kernel.md");
        for d in differences() {
            let test = format!("`tests/apps/c/{}.c::{}`", d.check.0, d.check.1);
            let told = |l: &str| l.contains("`kernel-contract`") && l.contains(&test);
            assert!(specs.lines().any(told), "{test}");
        }
    }

    #[test]
    fn every_difference_is_of_a_check() {
        let checks = expected();
        assert!(PROGRAMS.iter().all(|(name, _)| checks.iter().any(|c| c.0 == *name)));
        for d in differences() {
            assert!(checks.contains(&d.check), "{:?}", d.check);
        }
        for check in LEFT_OUT {
            assert!(all_checks().contains(check), "{check:?}");
        }
    }
}
