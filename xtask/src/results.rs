//! Recorded results of suites: docs/results.json, and the pages that quote it.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use serde::{Deserialize, Serialize};

use crate::{Result, cargo, pages, process, tally::Tally};

/// The only place that has counts, dates and commits of results.
const FILE: &str = "docs/results.json";

/// Result of a suite.
#[derive(Serialize, Deserialize)]
struct Recorded {
    /// `ci` or `full`.
    set: String,
    passed: u64,
    failed: u64,
    not_run: u64,
    /// Year, month and day.
    date: String,
    commit: String,
}

/// Results by the suite's name.
type Results = BTreeMap<String, Recorded>;

impl Recorded {
    /// Text between a page's markers `<!-- result SUITE -->` and `<!-- end of result SUITE -->`.
    fn text(&self) -> String {
        let (all, not_run) = (self.passed + self.failed, self.not_run);
        let not_run = match not_run {
            0 => String::new(),
            n => format!(", {n} not run"),
        };
        let set = match self.set.as_str() {
            "full" => String::new(),
            set => format!(", set `{set}`"),
        };
        format!(
            "{} of {all} passed{not_run} ({}, {}{set})",
            self.passed, self.date, self.commit
        )
    }
}

fn read() -> Result<Results> {
    let text = fs::read_to_string(FILE).map_err(|e| format!("{FILE}: {e}"))?;
    serde_json::from_str(&text).map_err(|e| format!("{FILE}: {e}"))
}

/// The page with current results; an error if it quotes a suite that has none, or lacks a marker's end.
fn quoted(page: &str, results: &Results) -> Result<String> {
    let mut text = page.to_owned();
    let suites: Vec<_> = page
        .split("<!-- result ")
        .skip(1)
        .filter_map(|rest| rest.split(' ').next())
        .collect();
    for suite in suites {
        let result = results
            .get(suite)
            .ok_or_else(|| format!("{FILE} has no result of {suite}"))?;
        text = pages::between(&text, &format!("result {suite}"), &result.text())?;
    }
    Ok(text)
}

/// Pages that quote other results than docs/results.json has.
pub(crate) fn stale() -> Result<Vec<String>> {
    let results = read()?;
    let mut findings = Vec::new();
    for (file, text) in pages::all()? {
        match quoted(&text, &results) {
            Ok(current) if current == text => {}
            Ok(_) => findings.push(format!(
                "{}: results differ from {FILE}: `cargo xtask results` writes them",
                file.display()
            )),
            Err(e) => findings.push(format!("{}: {e}", file.display())),
        }
    }
    findings.sort();
    Ok(findings)
}

/// Writes the results of docs/results.json into the pages that quote them.
pub(crate) fn run() -> Result<()> {
    let results = read()?;
    for (file, text) in pages::all()? {
        let current = quoted(&text, &results).map_err(|e| format!("{}: {e}", file.display()))?;
        if current != text {
            fs::write(&file, current).map_err(|e| format!("{}: {e}", file.display()))?;
            println!("{}", file.display());
        }
    }
    Ok(())
}

/// Records suites that ran, as of today and the commit of the tree, and updates the pages.
pub(crate) fn record<'a>(set: &str, suites: impl Iterator<Item = (&'a str, &'a Tally)>) -> Result<()> {
    let line = |program: &str, args: &[&str]| {
        let output = process::capture(
            program,
            Command::new(program).args(args).current_dir(cargo::workspace_root()),
        )?;
        Ok::<_, String>(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let (date, commit) = (
        line("date", &["-u", "+%Y-%m-%d"])?,
        line("git", &["rev-parse", "--short=7", "HEAD"])?,
    );
    let mut results = match Path::new(FILE).exists() {
        true => read()?,
        false => Results::new(),
    };
    for (suite, tally) in suites {
        let recorded = Recorded {
            set: set.to_owned(),
            passed: tally.passed,
            failed: tally.failed,
            not_run: tally.not_run_count(),
            date: date.clone(),
            commit: commit.clone(),
        };
        results.insert(suite.to_owned(), recorded);
    }
    let text = serde_json::to_string_pretty(&results).map_err(|e| e.to_string())?;
    fs::write(FILE, text + "\n").map_err(|e| format!("{FILE}: {e}"))?;
    run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_quote_results() {
        let recorded = |set: &str, failed, not_run| Recorded {
            set: set.into(),
            passed: 7,
            failed,
            not_run,
            date: "2026-11-30".into(),
            commit: "abc".into(),
        };
        let results = Results::from([
            ("apps".into(), recorded("full", 1, 2)),
            ("sim".into(), recorded("ci", 0, 0)),
        ]);
        let page = "| x | <!-- result apps --><!-- end of result apps --> |\n<!-- result sim -->\nold\n<!-- end of result sim -->\n";
        let expected = "| x | <!-- result apps -->7 of 8 passed, 2 not run (2026-11-30, abc)<!-- end of result apps --> |\n\
                        <!-- result sim -->\n7 of 7 passed (2026-11-30, abc, set `ci`)\n<!-- end of result sim -->\n";
        assert_eq!(quoted(page, &results).as_deref(), Ok(expected));
        assert_eq!(quoted(expected, &results).as_deref(), Ok(expected));
        assert!(quoted("<!-- result none --><!-- end of result none -->", &results).is_err());
        assert!(quoted("<!-- result apps -->", &results).is_err());
    }
}
