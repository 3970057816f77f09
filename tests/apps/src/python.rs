//! rdma-core's tests in python: those that must pass are listed in `pyverbs.txt`.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use crate::{Result, cases::Case, process::Setup};

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

/// What each test came to, by its name (`tests.test_mr.MRTest.test_reg_mr`): the word after the dots.
fn outcomes(text: &str) -> HashMap<&str, &str> {
    let mut out = HashMap::new();
    let mut current = None;
    for line in text.lines() {
        // "test_x (tests.test_mr.MRTest.test_x)", a line of its documentation, and the outcome at the end of either.
        if let Some((_, rest)) = line.split_once(" (tests.") {
            current = rest.split(')').next();
        }
        if let (Some(test), Some((_, outcome))) = (current, line.rsplit_once(" ... ")) {
            out.insert(test, outcome.trim());
            current = None;
        }
    }
    out
}

/// Runs the suite; a skip of a test that must pass is a failure, since it hides a gap.
pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path) -> Result<()> {
    if !Path::new(TESTS).is_dir() {
        return Err(format!("{TESTS} is not there (Debian package {})", case.package));
    }
    unpack(dir)?;
    let seconds = case.seconds.to_string();
    let words = [
        "/usr/bin/timeout",
        "-k",
        "5",
        &seconds,
        "/usr/bin/python3",
        "tests/run_tests.py",
        "-v",
    ];
    let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    words.extend(must_pass().map(|test| format!("tests.{test}")));
    let mut command = setup.command(case, &words);
    command.current_dir(dir).stdin(Stdio::null());
    let out = command.output().map_err(|e| format!("starting python: {e}"))?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    let outcomes = outcomes(&text);
    let failed: Vec<String> = must_pass()
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
            must_pass().count(),
            failed.join("\n")
        )),
    }
}
