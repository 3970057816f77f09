//! Faults on demand: the option `--fault` of `run`, `serve`, `map` and `bench`, and `ferroce fault`.

use clap::{Args, Subcommand};
use roce::{
    FaultControl, FaultRequest, Faults, ProcessName, RuleStatus,
    fault::{Rule, rules},
};
use serde::Serialize;

use crate::output::{self, Failure};

/// Rules of one `--fault`.
#[derive(Clone, Debug)]
struct Rules(Vec<Rule>);

fn parse(text: &str) -> Result<Rules, String> {
    rules(text).map(Rules).map_err(|e| e.to_string())
}

#[derive(Args, Clone, Debug)]
pub(crate) struct FaultArgs {
    /// Inject faults, for tests: lose, delay or damage packets, or make verbs fail, such as `loss=1%,dir=tx,seed=7`. Repeat it for several
    /// rules, of which the first that applies decides. `none`: no faults until `ferroce fault set`. See docs/verbs/faults.md
    #[arg(long = "fault", value_name = "RULE", value_parser = parse)]
    faults: Vec<Rules>,
}

/// Faults of a server or mapping, and what lets them be changed.
#[derive(Debug)]
pub(crate) struct Demanded {
    faults: Faults,
    _control: FaultControl,
}

impl Demanded {
    pub(crate) fn faults(&self) -> Faults {
        self.faults.clone()
    }
}

impl FaultArgs {
    /// Returns the rules as the library reads them. `None`: the option is not given.
    pub(crate) fn text(&self) -> Option<String> {
        let all: Vec<String> = self
            .faults
            .iter()
            .flat_map(|rules| &rules.0)
            .map(Rule::to_string)
            .collect();
        match (self.faults.is_empty(), all.is_empty()) {
            (true, _) => None,
            (false, true) => Some("none".into()),
            (false, false) => Some(all.join(";")),
        }
    }

    /// Starts what the option asks for; `name` is what `ferroce fault` calls it. `None`: the option is not given.
    pub(crate) fn start(&self, name: &str) -> Result<Option<Demanded>, Failure> {
        if self.faults.is_empty() {
            return Ok(None);
        }
        let all = self.faults.iter().flat_map(|rules| rules.0.clone()).collect();
        let faults = Faults::new(all).map_err(|e| Failure::usage(e.to_string()))?;
        let control = FaultControl::start(name, &faults);
        let control = control.map_err(|e| Failure::failed(format!("faults can't be changed while it runs: {e}")))?;
        Ok(Some(Demanded {
            faults,
            _control: control,
        }))
    }
}

#[derive(Args)]
#[command(after_help = "\
Processes that were started with --fault (`ferroce run`, `serve`, `map`, `bench`, and tasks of a daemon with the key `fault`) take rules; \
start them with `--fault none` to have none at first. A user changes its own processes in this network namespace, root all of them.

Examples:
  ferroce run --fault none -- ib_write_bw &
  ferroce fault set loss=1%,dir=tx,seed=7 post_send=ENOMEM,nth=100
  ferroce fault show
  ferroce fault clear --pid 1234

With --json: an array of objects with `pid`, `name` and `rules`, each with `rule` and `counts`.")]
pub(crate) struct FaultCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Show rules and what they have done
    Show {
        #[command(flatten)]
        which: Which,
        /// Print one JSON array
        #[arg(long)]
        json: bool,
    },
    /// Replace all rules; counts start again
    Set {
        #[command(flatten)]
        which: Which,
        /// Rules such as `loss=1%,dir=tx`
        #[arg(required = true, value_name = "RULE", value_parser = parse)]
        rules: Vec<Rules>,
    },
    /// Remove all rules
    Clear {
        #[command(flatten)]
        which: Which,
    },
}

#[derive(Args)]
struct Which {
    /// Only this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Only processes of this name: the program under `run`, the session of a mapping, the first address of a server
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

impl Which {
    /// Returns the selected processes, at least one.
    fn targets(&self) -> Result<Vec<ProcessName>, Failure> {
        let all = FaultRequest::processes().map_err(|e| Failure::failed(format!("/proc/net/unix: {e}")))?;
        let is_meant = |target: &ProcessName| {
            self.pid.is_none_or(|pid| pid == target.pid) && self.name.as_ref().is_none_or(|name| *name == target.name)
        };
        let found: Vec<_> = all.into_iter().filter(is_meant).collect();
        match found.is_empty() {
            false => Ok(found),
            true => Err(Failure::failed(
                "there is no such process in this network namespace: those that were started with --fault take rules (`--fault none`: no \
                 rules yet)",
            )),
        }
    }

    /// Asks all of them; those of other users only if nobody else is there.
    fn ask(&self, request: &FaultRequest) -> Result<Vec<(ProcessName, Vec<RuleStatus>)>, Failure> {
        let (mut done, mut failed) = (Vec::new(), None);
        for target in self.targets()? {
            match request.ask(&target) {
                Ok(rules) => done.push((target, rules)),
                // It has ended meanwhile, or is another user's.
                Err(e) => failed = Some(format!("process {} ({}): {e}", target.pid, target.name)),
            }
        }
        match (done.is_empty(), failed) {
            (true, Some(text)) => Err(Failure::failed(text)),
            _ => Ok(done),
        }
    }
}

#[derive(Serialize)]
struct RuleJson {
    rule: String,
    counts: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct TargetJson {
    pid: u32,
    name: String,
    rules: Vec<RuleJson>,
}

fn as_json((target, rules): (ProcessName, Vec<RuleStatus>)) -> TargetJson {
    let rule = |status: RuleStatus| RuleJson {
        rule: status.rule,
        counts: status.counts.into_iter().map(|(name, n)| (name, n.into())).collect(),
    };
    TargetJson {
        pid: target.pid,
        name: target.name,
        rules: rules.into_iter().map(rule).collect(),
    }
}

fn head(target: &ProcessName) -> String {
    format!("process {} {}", target.pid, target.name)
}

fn show(target: &ProcessName, rules: &[RuleStatus]) -> Result<(), Failure> {
    output::line(&head(target))?;
    if rules.is_empty() {
        return output::line("  none");
    }
    for status in rules {
        output::line(&format!("  {}", roce_verbs::shown(&status.rule)))?;
        let counts: Vec<String> = status
            .counts
            .iter()
            .filter(|(_, n)| *n > 0)
            .map(|(name, n)| format!("{} {n}", roce_verbs::shown(name)))
            .collect();
        output::line(&format!(
            "    {}",
            if counts.is_empty() {
                "nothing yet".into()
            } else {
                counts.join(" ")
            }
        ))?;
    }
    Ok(())
}

/// Shows or changes faults of running processes.
pub(crate) fn run(command: &FaultCommand) -> Result<(), Failure> {
    match &command.what {
        What::Show { which, json: true } => {
            let all = which.ask(&FaultRequest::Show)?;
            output::json(&all.into_iter().map(as_json).collect::<Vec<_>>())
        }
        What::Show { which, json: false } => {
            let all = which.ask(&FaultRequest::Show)?;
            all.iter().try_for_each(|(target, rules)| show(target, rules))
        }
        What::Set { which, rules } => {
            let all: Vec<String> = rules.iter().flat_map(|rules| &rules.0).map(Rule::to_string).collect();
            change(which, &FaultRequest::Set(all.join(";")))
        }
        What::Clear { which } => change(which, &FaultRequest::Clear),
    }
}

/// Changes rules and prints whose.
fn change(which: &Which, request: &FaultRequest) -> Result<(), Failure> {
    let all = which.ask(request)?;
    all.iter().try_for_each(|(target, _)| output::line(&head(target)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(faults: &[&str]) -> FaultArgs {
        FaultArgs {
            faults: faults.iter().map(|text| parse(text).unwrap()).collect(),
        }
    }

    #[test]
    fn rules_are_passed_on_as_they_are_written() {
        assert_eq!(args(&[]).text(), None);
        assert_eq!(args(&["none"]).text().as_deref(), Some("none"));
        let text = args(&["loss=1%", "none", "dup=1%;post_send=ENOMEM"]).text();
        assert_eq!(text.as_deref(), Some("loss=1%;dup=1%;post_send=ENOMEM"));
    }
}
