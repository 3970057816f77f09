//! rdma-core's tests in python: those that must pass are listed in `pyverbs.txt`.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::{
    Result,
    cases::{Case, Plan},
    memcheck,
    process::Setup,
};

/// Where Debian's package has them, compressed.
const TESTS: &str = "/usr/share/doc/rdma-core/tests";
/// Tests that must pass, one per line; `#` begins a comment, `-` a test that is left out, with the reason.
const MUST_PASS: &str = include_str!("../pyverbs.txt");

/// The tests that must pass.
fn must_pass() -> impl Iterator<Item = &'static str> {
    let lines = MUST_PASS.lines().map(str::trim);
    lines.filter(|l| !l.is_empty() && !l.starts_with(['#', '-']))
}

/// Unpacks the tests.
fn unpack(dir: &Path) -> Result<()> {
    let to = dir.join("tests");
    let fail = |e: std::io::Error| format!("unpacking {TESTS}: {e}");
    fs::create_dir_all(&to).map_err(fail)?;
    for entry in fs::read_dir(TESTS).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else {
            continue;
        };
        match name.strip_suffix(".gz") {
            None => drop(fs::copy(&path, to.join(name)).map_err(fail)?),
            Some(plain) => {
                let out = Command::new("zcat").arg(&path).output().map_err(fail)?;
                fs::write(to.join(plain), out.stdout).map_err(fail)?;
            }
        }
    }
    Ok(())
}

/// Words that begin an outcome.
const OUTCOMES: [&str; 4] = ["ok", "skipped", "FAIL", "ERROR"];

/// What each test came to, by its name (`test_mr.MRTest.test_reg_mr`): the word after the dots.
fn outcomes(text: &str) -> HashMap<&str, &str> {
    let mut out = HashMap::new();
    let mut current = None;
    for line in text.lines() {
        // "test_x (tests.test_mr.MRTest.test_x)", a line of its documentation, and the outcome at the end of either, or on a
        // line of its own below what the test prints.
        if let Some((_, rest)) = line.split_once(" (tests.") {
            current = rest.split(')').next();
        }
        let outcome = line.rsplit_once(" ... ").map_or(line, |(_, outcome)| outcome).trim();
        if OUTCOMES.iter().any(|word| outcome.starts_with(word))
            && let Some(test) = current.take()
        {
            out.insert(test, outcome);
        }
    }
    out
}

/// Runs the suite; a skip of a test that must pass is a failure, since it hides a gap.
pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path, only: &[&str]) -> Result<()> {
    let wanted = |test: &&str| only.is_empty() || only.iter().any(|text| test.contains(text));
    if !Path::new(TESTS).is_dir() {
        return Err(format!("{TESTS} is not there (Debian package {})", case.package));
    }
    unpack(dir)?;
    let seconds = case.seconds.to_string();
    let python = ["/usr/bin/python3", "tests/run_tests.py", "-v"].map(str::to_owned);
    let tests = must_pass().filter(wanted).map(|test| format!("tests.{test}"));
    let python: Vec<String> = python.into_iter().chain(tests).collect();
    let mut words = ["/usr/bin/timeout", "-k", "5", &seconds].map(str::to_owned).to_vec();
    words.extend(match case.memcheck {
        true => memcheck::under(dir, &python),
        false => python,
    });
    let mut command = setup.command(case, &words, dir)?;
    command.stdin(Stdio::null());
    let out = command.output().map_err(|e| format!("starting python: {e}"))?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    let outcomes = outcomes(&text);
    let failed: Vec<String> = must_pass()
        .filter(wanted)
        .filter_map(|test| match outcomes.get(test) {
            Some(&"ok") => None,
            other => Some(format!("{test}: {}", other.unwrap_or(&"did not run"))),
        })
        .collect();
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} of {} tests did not pass\n{text}\n{}",
            failed.len(),
            must_pass().filter(wanted).count(),
            failed.join("\n")
        )),
    }
}

/// Returns the case of rdma-core's own tests.
pub(crate) fn case() -> Case {
    Case {
        plan: Plan::Python(&[]),
        ..Case::alone("pyverbs", "python3-pyverbs", "/usr/bin/python3").within(1800)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The whole suite on kernel rxe.
    const RXE: &str = include_str!("../rxe-pyverbs.txt");

    /// Tests with their outcomes on rxe.
    fn rxe() -> impl Iterator<Item = (&'static str, &'static str)> {
        RXE.lines()
            .filter(|l| !l.starts_with('#'))
            .filter_map(|l| l.split_once(' '))
    }

    /// Patterns of what is left out; each line has a reason.
    fn left_out() -> Vec<&'static str> {
        let mut out = Vec::new();
        for line in MUST_PASS.lines().filter_map(|l| l.strip_prefix("- ")) {
            let (patterns, reason) = line.split_once(": ").expect(line);
            assert!(!reason.trim().is_empty(), "{line}");
            out.extend(patterns.split(", "));
        }
        out
    }

    /// Whether a text is of a pattern, in which `*` is any text.
    fn fits(pattern: &str, text: &str) -> bool {
        match pattern.split_once('*') {
            None => pattern == text,
            Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
                let ends = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
                ends.into_iter().any(|at| fits(rest, &text[at..]))
            }),
        }
    }

    #[test]
    fn what_passes_on_rxe_must_pass_here() {
        let must: HashSet<&str> = must_pass().collect();
        let passed: Vec<&str> = rxe()
            .filter(|(_, outcome)| *outcome == "ok")
            .map(|(test, _)| test)
            .collect();
        assert!(passed.len() > 80, "{} tests", passed.len());
        let missing: Vec<&&str> = passed.iter().filter(|test| !must.contains(**test)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn every_test_must_pass_or_is_left_out_for_a_reason() {
        let must: HashSet<&str> = must_pass().collect();
        let out = left_out();
        for (test, _) in rxe() {
            let reason = out.iter().any(|pattern| fits(pattern, test));
            assert!(must.contains(test) || reason, "{test} is on neither list");
        }
        let known: HashSet<&str> = rxe().map(|(test, _)| test).collect();
        for test in &must {
            assert!(known.contains(test), "{test}: no such test");
        }
    }

    #[test]
    fn outcomes_are_found_wherever_they_stand() {
        let text = "test_a (tests.test_x.X.test_a) ... ok\n\
                    test_b (tests.test_x.X.test_b)\nSays something ... skipped 'why ... not'\n\
                    test_c (tests.test_x.X.test_c) ... it prints = 2\nok\n\
                    test_d (tests.test_x.X.test_d) ... ERROR\n";
        let found = outcomes(text);
        assert_eq!(found.get("test_x.X.test_a"), Some(&"ok"));
        assert_eq!(found.get("test_x.X.test_c"), Some(&"ok"));
        assert_eq!(found.get("test_x.X.test_d"), Some(&"ERROR"));
        assert!(found.get("test_x.X.test_b").is_none_or(|outcome| *outcome != "ok"));
    }
}
