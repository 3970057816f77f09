//! Results: lines, JSON and the table of the README.

use std::{collections::BTreeMap, fmt::Write as _};

use serde::{Deserialize, Serialize};

use crate::scenarios::{Direction, Scenario};

/// How a scenario ended.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) enum Verdict {
    #[serde(rename = "passed")]
    Passed,
    #[serde(rename = "failed")]
    Failed,
    #[serde(rename = "not run")]
    NotRun,
}

impl Verdict {
    pub(crate) const ALL: [Self; 3] = [Self::Passed, Self::Failed, Self::NotRun];

    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::NotRun => "not run",
        }
    }
}

/// A line of the report.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    /// Kind of scenario: an index into [`TITLES`].
    pub(crate) number: u8,
    pub(crate) direction: String,
    /// What it ran against: the guest's kernel, its shape, and what netem does to packets.
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
            direction: s.direction.text().to_owned(),
            guest: s.setting(),
            result,
            seconds,
            detail,
            optional: false,
        }
    }

    /// One that was not run, which is told at once.
    pub(crate) fn not_run(s: &Scenario, why: String) -> Self {
        let outcome = Self::new(s, Verdict::NotRun, 0.0, why);
        println!("{}", outcome.line());
        outcome
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

/// Kinds of scenarios, by number. README.md lists them, too.
const TITLES: [&str; 17] = [
    "",
    "Operations and ibv_rc_pingpong",
    "Connection manager",
    "Kernel's RNBD client, our server",
    "Our RNBD client, kernel's server",
    "Faults",
    "IPv6",
    "RNR, exhausted retries, refused accesses",
    "Programs for libibverbs and librdmacm, ours under `ferroce run`",
    "Forged packets of strangers",
    "Several paths",
    "Disks of virtual machines",
    "roce-hw on rdma_rxe",
    "RTRS with another host's RDMA device",
    "Block devices by the kernel's NBD",
    "RDS sockets",
    "LNet with the kernel's o2iblnd",
];

/// The table of all scenarios, one a line.
pub(crate) fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "# Interoperation with the Linux kernel\n\n\
         Made by `cargo xtask interop --table tests/interop/RESULTS.md`: stock Debian kernels with rdma_rxe, RTRS and RNBD in\n\
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

/// What stands around the README's table.
const MARKS: [&str; 2] = ["<!-- interop results -->\n", "<!-- end of interop results -->"];

/// The README with its table made again; an error if it has no place for one.
pub(crate) fn readme(text: &str, outcomes: &[Outcome]) -> Result<String, String> {
    let [start, end] = MARKS;
    let missing = || format!("it has no {start:?} … {end:?}");
    let (before, rest) = text.split_once(start).ok_or_else(missing)?;
    let (_, after) = rest.split_once(end).ok_or_else(missing)?;
    Ok(format!("{before}{start}{}{end}{after}", short_table(outcomes)))
}

/// Directions with a column of their own.
const COLUMNS: [&str; 3] = [
    Direction::OursToKernel.text(),
    Direction::KernelToOurs.text(),
    Direction::KernelToKernel.text(),
];
const BOTH: &str = Direction::Both.text();

/// A row for each pair of scenarios that differ in direction only.
fn short_table(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "| | scenario | ours → kernel | kernel → ours | kernel → kernel | guest |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for (number, title) in TITLES.iter().enumerate().skip(1) {
        // Numbered, so that rows keep the order of the scenarios.
        let mut rows: BTreeMap<usize, (String, &str, [&str; 3])> = BTreeMap::new();
        for (n, o) in outcomes
            .iter()
            .enumerate()
            .filter(|(_, o)| usize::from(o.number) == number)
        {
            let name = stem(&o.name);
            let at = rows
                .iter()
                .find(|(_, r)| r.0 == name && r.1 == o.guest)
                .map_or(n, |(at, _)| *at);
            let row = rows.entry(at).or_insert((name, &o.guest, ["—"; 3]));
            let result = o.result.text();
            // What both directions are in fills both; what none of ours is in, none of them.
            for (cell, direction) in row.2.iter_mut().zip(COLUMNS) {
                if o.direction == direction || o.direction == BOTH && direction != COLUMNS[2] {
                    *cell = result;
                }
            }
        }
        for (n, (name, guest, [asks, answers, kernels])) in rows.values().enumerate() {
            let title = if n == 0 {
                format!("{number}. {title}")
            } else {
                String::new()
            };
            let _ = writeln!(text, "| {title} | {name} | {asks} | {answers} | {kernels} | {guest} |");
        }
    }
    text
}

/// The name without the word that says the direction.
fn stem(name: &str) -> String {
    const WORDS: [&str; 6] = [
        "-our-server",
        "-our-client",
        "-kernel-client",
        "-ours-asks",
        "-kernel-asks",
        "-our-process",
    ];
    WORDS.iter().fold(name.to_owned(), |n, w| n.replace(w, ""))
}

#[cfg(test)]
mod tests {
    use super::{MARKS, Outcome, TITLES, Verdict, readme};

    fn outcome(name: &str, direction: &str, result: Verdict) -> Outcome {
        Outcome {
            name: name.to_owned(),
            number: 2,
            direction: direction.to_owned(),
            guest: "1 CPU".to_owned(),
            result,
            seconds: 1.0,
            detail: String::new(),
            optional: false,
        }
    }

    #[test]
    fn the_readme_gets_a_row_for_both_directions() {
        let [start, end] = MARKS;
        let before = format!("# Title\n{start}old\n{end}\nafter\n");
        let outcomes = [
            outcome("rping-our-server-v4", "kernel → ours", Verdict::Passed),
            outcome("other", "both", Verdict::NotRun),
            outcome("rping-our-client-v4", "ours → kernel", Verdict::Failed),
            outcome("two", "kernel → kernel", Verdict::Passed),
        ];
        let text = readme(&before, &outcomes).unwrap();
        assert!(text.starts_with("# Title\n") && text.ends_with("\nafter\n") && !text.contains("old"));
        assert!(
            text.contains("| 2. Connection manager | rping-v4 | failed | passed | — | 1 CPU |\n"),
            "{text}"
        );
        assert!(
            text.contains("|  | other | not run | not run | — | 1 CPU |\n"),
            "{text}"
        );
        assert!(text.contains("|  | two | — | — | passed | 1 CPU |\n"), "{text}");
        assert_eq!(readme(&text, &outcomes).unwrap(), text);
        assert!(readme("no place", &outcomes).is_err());
    }

    #[test]
    fn the_labs_readme_says_what_the_numbers_mean() {
        let text = include_str!("../../README.md");
        for (number, title) in TITLES.iter().enumerate().skip(1) {
            assert!(text.contains(&format!("\n| {number} | {title} |")), "{number}. {title}");
        }
    }
}
