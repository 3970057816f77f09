//! Results of suites.

use std::{fmt, path::Path, process::Command};

use crate::{Result, cargo, process};

/// Result of a suite.
#[derive(Clone, Default, Debug)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Numbers of tests (a whole suite counts as 1) that could not be run, with the reason.
    pub(crate) not_run: Vec<(u64, String)>,
    /// Option that left the suite out.
    left_out: Option<&'static str>,
    pub(crate) failures: Vec<String>,
    /// Tests that ran again, and why.
    pub(crate) retried: Vec<String>,
}

impl Tally {
    pub(crate) fn one_passed() -> Self {
        Self {
            passed: 1,
            ..Self::default()
        }
    }

    pub(crate) fn not_run(why: String) -> Self {
        Self {
            not_run: vec![(1, why)],
            ..Self::default()
        }
    }

    pub(crate) fn left_out(why: &'static str) -> Self {
        Self {
            left_out: Some(why),
            ..Self::default()
        }
    }

    /// Counts one test.
    pub(crate) fn expect(&mut self, done: Result<()>) {
        match done {
            Ok(()) => self.passed += 1,
            Err(text) => self.fail(text),
        }
    }

    /// Counts a failure.
    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Runs a program that writes a list of outcomes to `file` in cargo's folder (`--json`), and counts them. Fails if
    /// the program does, even without a failed outcome.
    pub(crate) fn of_program(name: &str, command: &mut Command, file: &str) -> Result<Self> {
        let json = cargo::target_dir()?.join(file);
        let _ = std::fs::remove_file(&json);
        let status = process::Guard::spawn(name, command.arg("--json").arg(&json))?.wait()?;
        let mut tally = Self::from_json(&json).map_err(|e| format!("{name} ended with {status}: {e}"))?;
        if !status.success() && tally.failed == 0 && tally.not_run.is_empty() {
            tally.fail(format!("{name} ended with {status}"));
        }
        Ok(tally)
    }

    /// Counts a list of outcomes: objects with `name`, `result`, `detail` and perhaps `optional` and `retried`.
    fn from_json(file: &Path) -> Result<Self> {
        let named = |e: &dyn fmt::Display| format!("{}: {e}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| named(&e))?;
        let outcomes: serde_json::Value = serde_json::from_str(&text).map_err(|e| named(&e))?;
        let outcomes = outcomes.as_array().ok_or_else(|| named(&"no list"))?;
        let mut tally = Self::default();
        for o in outcomes.iter().filter(|o| o["optional"] != true) {
            let text = |key: &str| o[key].as_str().unwrap_or_default();
            let first_line = || text("detail").lines().next().unwrap_or("?");
            match text("result") {
                "passed" => tally.passed += 1,
                "failed" => tally.fail(format!("{}: {}", text("name"), beginning(text("detail")))),
                "not run" => tally.not_run.push((1, format!("{}: {}", text("name"), first_line()))),
                _ => return Err(named(&format!("{o} has no result"))),
            }
            if !text("retried").is_empty() {
                tally.retried.push(format!("{}: {}", text("name"), text("retried")));
            }
        }
        if tally.passed + tally.failed + tally.not_run_count() == 0 {
            return Err(named(&"nothing was to run"));
        }
        Ok(tally)
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.not_run.extend(other.not_run);
        self.failures.extend(other.failures);
        self.retried.extend(other.retried);
    }

    pub(crate) fn not_run_count(&self) -> u64 {
        self.not_run.iter().map(|(n, _)| n).sum()
    }

    /// Returns a row of [`HEAD`]'s table, and lines about it.
    pub(crate) fn row(&self, suite: &str, seconds: f64) -> String {
        let mut row = match self.left_out {
            Some(why) => format!("{suite:<14}left out ({why})\n"),
            None => format!(
                "{suite:<14}{:>8}{:>8}{:>9}{seconds:>9.0}\n",
                self.passed,
                self.failed,
                self.not_run_count()
            ),
        };
        let failures = self.failures.iter().map(|f| ("FAILED", f));
        let not_run = self.not_run.iter().map(|(_, why)| ("NOT RUN", why));
        let retried = self.retried.iter().map(|r| ("TRIED AGAIN", r));
        for (what, text) in failures.chain(not_run).chain(retried) {
            row += &format!("  {what} {text}\n");
        }
        row
    }
}

/// Returns the beginning of a reason on one line.
fn beginning(detail: &str) -> String {
    const LONGEST: usize = 600;
    let lines: Vec<_> = detail.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let line = lines.join(" / ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} …", &line[..end]),
        None => line,
    }
}

/// Head of the table of suites.
pub(crate) const HEAD: &str = "suite           passed  failed  not run  seconds";

#[cfg(test)]
mod tests {
    use super::{HEAD, Tally};

    fn from(text: &str) -> crate::Result<Tally> {
        let file = std::env::temp_dir().join(format!("ferroce-xtask-{}-tally.json", std::process::id()));
        std::fs::write(&file, text).unwrap();
        let tally = Tally::from_json(&file);
        std::fs::remove_file(&file).unwrap();
        tally
    }

    #[test]
    fn outcomes_are_counted_and_what_is_none_is_an_error() {
        let tally = from(
            r#"[{"name": "a", "result": "passed", "detail": "", "retried": "refused once"},
                {"name": "b", "result": "failed", "detail": "why\n  its log\n\n"},
                {"name": "c", "result": "not run", "detail": "no fio\nmore"},
                {"name": "d", "result": "not run", "detail": "elsewhere", "optional": true}]"#,
        )
        .unwrap();
        assert_eq!((tally.passed, tally.failed, tally.not_run_count()), (1, 1, 1));
        let row = tally.row("apps", 12.4);
        let lines: Vec<_> = row.lines().collect();
        assert_eq!(lines[0].len(), HEAD.len());
        assert_eq!(
            lines[1..],
            [
                "  FAILED b: why / its log",
                "  NOT RUN c: no fio",
                "  TRIED AGAIN a: refused once"
            ]
        );
        for none in [
            "",
            "{}",
            "[]",
            r#"[{"name": "a", "result": "well"}]"#,
            r#"[{"name": "a", "result": "not run", "optional": true}]"#,
        ] {
            assert!(from(none).is_err(), "{none}");
        }
    }
}
