//! rdma-core's tests in python: those that must pass are listed in `pyverbs.txt`.

use std::{
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

/// Runs one test; a skip is a failure: it hides a gap.
fn one(setup: &Setup, case: &Case, dir: &Path, test: &str) -> Result<()> {
    let words: Vec<String> = [
        "/usr/bin/timeout",
        "-k",
        "5",
        "120",
        "/usr/bin/python3",
        "-m",
        "unittest",
        "-v",
    ]
    .into_iter()
    .chain([test])
    .map(str::to_owned)
    .collect();
    let mut command = setup.command(case, &words);
    command.current_dir(dir).env("PYTHONPATH", dir).stdin(Stdio::null());
    let out = command.output().map_err(|e| format!("starting python: {e}"))?;
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    match out.status.success() && text.contains("\nOK\n") && !text.contains("skipped") {
        true => Ok(()),
        false => Err(text),
    }
}

/// Runs the suite.
pub(crate) fn run(setup: &Setup, case: &Case, dir: &Path) -> Result<()> {
    if !Path::new(TESTS).is_dir() {
        return Err(format!("{TESTS} is not there (Debian package {})", case.package));
    }
    unpack(dir)?;
    let mut failed = Vec::new();
    let mut count = 0;
    for test in must_pass() {
        count += 1;
        if let Err(text) = one(setup, case, dir, test) {
            let last = text
                .lines()
                .rev()
                .find(|l| l.contains("Error") || l.contains("skipped"));
            failed.push(format!("{test}: {}", last.unwrap_or("failed")));
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} of {count} tests failed\n{}",
            failed.len(),
            failed.join("\n")
        )),
    }
}
