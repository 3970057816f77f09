//! Results: lines, JSON and the table of the README.

use std::fmt::Write as _;

use serde::Serialize;

use crate::scenarios::Scenario;

/// How a scenario ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
pub(crate) enum Verdict {
    #[serde(rename = "passed")]
    Passed,
    #[serde(rename = "failed")]
    Failed,
    #[serde(rename = "not run")]
    NotRun,
}

impl Verdict {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::NotRun => "not run",
        }
    }
}

/// A line of the report.
#[derive(Clone, Serialize, Debug)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    /// Item of the list in the issue.
    pub(crate) number: u8,
    pub(crate) direction: &'static str,
    pub(crate) guest: String,
    pub(crate) result: Verdict,
    pub(crate) seconds: f64,
    /// What was seen, or why it failed or did not run.
    pub(crate) detail: String,
    /// It does not count that it was not run: it needs something that is not part of the lab.
    pub(crate) optional: bool,
}

impl Outcome {
    pub(crate) fn new(s: &Scenario, result: Verdict, seconds: f64, detail: String) -> Self {
        Self {
            name: s.name.clone(),
            number: s.number,
            direction: s.direction.text(),
            guest: s.setting(),
            result,
            seconds,
            detail,
            optional: false,
        }
    }

    pub(crate) fn line(&self) -> String {
        let (result, seconds) = (self.result.text(), self.seconds);
        let mut text = format!("{:<38} {result:<8} {seconds:6.1} s  ", self.name);
        // Of a long story the terminal gets the start; all of it is in the JSON file and the logs.
        for (n, line) in self.detail.lines().take(25).enumerate() {
            let line: String = line.chars().take(240).collect();
            let _ = write!(text, "{}{line}", if n == 0 { "" } else { "\n    " });
        }
        text
    }
}

const TITLES: [&str; 8] = [
    "",
    "Operations and ibv_rc_pingpong",
    "Connection manager",
    "Kernel's RNBD client, our server",
    "Our RNBD client, kernel's server",
    "Faults",
    "IPv6",
    "RNR, exhausted retries, refused accesses",
];

/// The table for the README.
pub(crate) fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "# Interoperation with the Linux kernel\n\n\
         Made by `cargo xtask interop --table tests/interop/RESULTS.md`: a stock Debian kernel with rdma_rxe, RTRS and RNBD in\n\
         virtual machines, our programs on the host side of the bridge. Read \"kernel → ours\" as: the kernel asks, we answer.\n",
    );
    for (number, title) in TITLES.iter().enumerate().skip(1) {
        let mut rows = outcomes.iter().filter(|o| usize::from(o.number) == number).peekable();
        if rows.peek().is_none() {
            continue;
        }
        let _ = write!(
            text,
            "\n## {number}. {title}\n\n| scenario | direction | guest | result |\n| --- | --- | --- | --- |\n"
        );
        for o in rows {
            let why = match o.result {
                Verdict::NotRun => format!(" ({})", o.detail.lines().next().unwrap_or_default()),
                _ => String::new(),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {}{why} |",
                o.name,
                o.direction,
                o.guest,
                o.result.text()
            );
        }
    }
    text
}
