//! Scenarios that wait most of the time, for timeouts, heartbeats and packets that were lost, run beside the others: a second
//! process of this program, with a namespace and guests of its own.

use std::{
    fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use clap::ValueEnum as _;
use serde_json::Value;

use crate::{
    Cli, Error,
    lab::{self, Places, Proc},
    report::{Outcome, Verdict},
    scenarios::Scenario,
};

/// How long the other process may take when this one is done.
const TIMEOUT: Duration = Duration::from_secs(1800);

/// The other process.
pub(crate) struct Beside {
    process: Proc,
    json: PathBuf,
    /// Lines of its output that were printed.
    told: usize,
}

/// Sorts out what runs in the other process, if that is worth while.
pub(crate) fn split(cli: &Cli, chosen: Vec<Scenario>) -> (Vec<Scenario>, Vec<Scenario>) {
    let (waiting, here): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|s| s.waits);
    // In the other process there is nothing else.
    match here.is_empty() || !cli.only.is_empty() || cli.peer.is_some() {
        true => (here.into_iter().chain(waiting).collect(), Vec::new()),
        false => (here, waiting),
    }
}

impl Beside {
    /// Starts it; the lab's folder is prepared.
    pub(crate) fn start(cli: &Cli, places: &Places) -> Result<Self, Error> {
        let json = places.run.join("beside.json");
        let set = cli.set.to_possible_value();
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--beside").arg("--lab").arg(&places.lab);
        command.arg("--ferroce").arg(&places.ferroce).arg("--json").arg(&json);
        command.args(set.iter().flat_map(|s| ["--set", s.get_name()]));
        let kernel = cli.kernel.and_then(|k| k.to_possible_value());
        command.args(kernel.iter().flat_map(|k| ["--kernel", k.get_name()]));
        command.arg(format!("--datapath={}", places.datapath));
        if let Some(lustre) = &places.lustre {
            command.arg("--lustre").arg(lustre);
        }
        if places.keep {
            command.arg("--keep");
        }
        Ok(Self {
            process: Proc::spawn("beside", &mut command, &places.logs)?,
            json,
            told: 0,
        })
    }

    /// Prints what it has printed since.
    pub(crate) fn tell(&mut self) {
        let text = self.process.text();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for line in whole.lines().skip(self.told) {
            println!("{line}");
            self.told += 1;
        }
    }

    /// Waits for its end. What it did not come to is as if it had not been run here.
    pub(crate) fn finish(mut self, scenarios: &[Scenario]) -> Result<Vec<Outcome>, Error> {
        let until = Instant::now() + TIMEOUT;
        while self.process.running() && Instant::now() < until && lab::check_stop().is_ok() {
            self.tell();
            std::thread::sleep(Duration::from_millis(200));
        }
        // After ctrl-C it has its guests to stop.
        self.process.interrupt();
        self.process.wait_gone(Duration::from_secs(60))?;
        self.tell();
        let text = fs::read_to_string(&self.json).map_err(|e| format!("the process beside left no results: {e}"))?;
        let results: Vec<Value> = serde_json::from_str(&text)?;
        Ok(scenarios.iter().map(|s| outcome(s, &results)).collect())
    }
}

/// The outcome of a scenario in the other process's results.
fn outcome(s: &Scenario, results: &[Value]) -> Outcome {
    let not_run = |why: &str| Outcome::new(s, Verdict::NotRun, 0.0, why.to_owned());
    let Some(found) = results.iter().find(|r| r["name"] == s.name.as_str()) else {
        return not_run("the process beside has no result of it");
    };
    let verdict = Verdict::ALL.into_iter().find(|v| found["result"] == v.text());
    let seconds = found["seconds"].as_f64().unwrap_or_default();
    let detail = found["detail"].as_str().unwrap_or_default();
    match verdict {
        Some(verdict) => Outcome::new(s, verdict, seconds, detail.to_owned()),
        None => not_run("the process beside has an unknown result of it"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::json;

    use super::{Cli, outcome, split};
    use crate::{chosen, report::Verdict};

    #[test]
    fn each_scenario_runs_once() {
        let names = |args: &[&str]| {
            let cli = Cli::parse_from([&["ferroce-interop"], args].concat());
            let (here, beside) = split(&cli, chosen(&cli));
            [here, beside].map(|list| list.into_iter().map(|s| s.name).collect::<Vec<_>>())
        };
        for set in ["ci", "full"] {
            let [here, beside] = names(&["--set", set]);
            assert!(!here.is_empty() && !beside.is_empty(), "{set}");
            assert_eq!(names(&["--set", set, "--beside"]), [beside, Vec::new()], "{set}");
            let [_, beside] = names(&["--set", set, "--kernel", "6.12"]);
            assert!(!beside.is_empty(), "{set}");
            let again = names(&["--set", set, "--kernel", "6.12", "--beside"]);
            assert_eq!(again, [beside, Vec::new()], "{set}");
        }
        let [here, beside] = names(&["--only", "cm-unreachable"]);
        assert!(here.contains(&"cm-unreachable".to_owned()) && beside.is_empty());
    }

    #[test]
    fn results_of_the_other_process_are_taken_as_they_are() {
        let cli = Cli::parse_from(["ferroce-interop", "--only", "cm-unreachable"]);
        let (here, _) = split(&cli, chosen(&cli));
        let s = &here[0];
        let result = |text: &str| json!({"name": s.name, "result": text, "seconds": 2.5, "detail": "why"});
        for verdict in Verdict::ALL {
            let found = outcome(s, &[result(verdict.text())]);
            assert_eq!((found.result, found.seconds, &*found.detail), (verdict, 2.5, "why"));
        }
        assert_eq!(outcome(s, &[result("splendid")]).result, Verdict::NotRun);
        assert_eq!(outcome(s, &[]).result, Verdict::NotRun);
    }
}
