//! What came of the cases.

use std::{fs, path::Path, time::Duration};

use serde::Serialize;

use crate::{Result, cases::Case};

/// What came of a case.
pub(crate) enum Outcome {
    /// Both sides did what they should.
    Passed(Duration),
    /// Why not, with the programs' output.
    Failed(String),
    /// Why it could not be tried.
    NotRun(String),
}

#[derive(Serialize)]
struct Row {
    name: String,
    result: &'static str,
    detail: String,
    /// What was tried again, and why; empty if nothing was.
    retried: String,
}

/// All outcomes.
#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

/// Lines of a failing program's output that are shown.
const LINES: usize = 12;

impl Report {
    /// Prints what came of a case, with what was `retried` in it, and keeps that.
    pub(crate) fn add(&mut self, case: &Case, outcome: Outcome, retried: &[String], verbose: bool) {
        let (result, detail) = match outcome {
            Outcome::Passed(time) => ("passed", format!("{:.1} s", time.as_secs_f64())),
            Outcome::Failed(text) => ("failed", text),
            Outcome::NotRun(why) => ("not run", why),
        };
        let mut lines = detail.lines();
        let retried = retried.join("; ");
        let tries = match retried.is_empty() {
            true => String::new(),
            false => format!(" (tried again: {retried})"),
        };
        println!(
            "{result:<8} {:<40} {}{tries}",
            case.name,
            lines.next().unwrap_or_default()
        );
        if result == "failed" {
            let rest: Vec<&str> = lines.collect();
            let skip = if verbose { 0 } else { rest.len().saturating_sub(LINES) };
            rest.iter().skip(skip).for_each(|line| println!("         | {line}"));
        }
        self.rows.push(Row {
            name: case.name.clone(),
            result,
            detail,
            retried,
        });
    }

    fn count(&self, result: &str) -> usize {
        self.rows.iter().filter(|r| r.result == result).count()
    }

    pub(crate) fn print_summary(&self) {
        println!(
            "\n{} passed, {} failed, {} not run",
            self.count("passed"),
            self.count("failed"),
            self.count("not run")
        );
    }

    pub(crate) fn all_well(&self) -> bool {
        self.count("failed") == 0
    }

    pub(crate) fn write_json(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.rows).map_err(|e| e.to_string())?;
        fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
    }
}
