//! `ferroce daemon --check`: prints the commands of a configuration file, and checks that they could start on this host.

use std::collections::BTreeMap;

use serde_json::json;

use super::{
    args::DaemonArgs,
    config::Config,
    task::{Job, TaskName},
};
use crate::output::{self, Failure};

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_=+./:,@%[]".contains(&b);
    match word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn command(names: &[&str], words: &[String]) -> String {
    let words = words.iter().map(|word| quoted(word));
    let words: Vec<_> = names.iter().map(|name| (*name).to_owned()).chain(words).collect();
    format!("ferroce {}", words.join(" "))
}

/// Server addresses and socket files of tasks; no two tasks may have the same.
#[derive(Default)]
struct Used(BTreeMap<String, TaskName>);

impl Used {
    fn add(&mut self, what: String, task: &TaskName) -> Result<(), Failure> {
        match self.0.get(&what) {
            Some(other) => Err(Failure::failed(format!("{what} is used by {other}, too"))),
            None => {
                self.0.insert(what, task.clone());
                Ok(())
            }
        }
    }
}

fn check_task(name: &TaskName, job: &Job, used: &mut Used) -> Result<(), Failure> {
    match job {
        Job::Serve(args) => {
            args.check()?;
            args.endpoints().try_for_each(|endpoint| used.add(endpoint, name))
        }
        Job::Map(args) => {
            args.check()?;
            let mut files = args.socket_files()?.into_iter();
            files.try_for_each(|file| used.add(file.display().to_string(), name))
        }
        Job::Rds(args) => {
            used.add(format!("the folder {} of an RDS node", args.dir().display()), name)?;
            let mut addrs = args.addrs().iter();
            addrs.try_for_each(|addr| used.add(format!("RDS at {addr}"), name))
        }
        Job::Lnet(args) => {
            args.check()?;
            used.add(format!("LNet at {}", args.nid().address()), name)
        }
    }
}

/// Prints the commands of a file.
///
/// # Errors
/// Names each task that could not start on this host, and why.
pub(super) fn check(args: &DaemonArgs, config: &Config) -> Result<(), Failure> {
    let mut used = Used::default();
    let mut failed = Vec::new();
    for (name, task) in &config.tasks {
        let checked = task.job(&name.kind).and_then(|job| check_task(name, &job, &mut used));
        if let Err(e) = checked {
            failed.push(format!("{name}: {}", e.text().unwrap_or_default()));
        }
    }
    if args.report.is_json() {
        let tasks = config
            .tasks
            .iter()
            .map(|(name, task)| json!({ "task": name.to_string(), "kind": name.kind.name(), "options": task.words }));
        output::json(&json!({
            "event": "checked",
            "daemon": config.daemon,
            "tasks": tasks.collect::<Vec<_>>(),
            "failed": failed,
        }))?;
    } else {
        if !config.daemon.is_empty() {
            output::line(&format!("daemon: {}", command(&["daemon"], &config.daemon)))?;
        }
        for (name, task) in &config.tasks {
            output::line(&format!("{name}: {}", command(name.kind.subcommands(), &task.words)))?;
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::failed(failed.join("\n"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_pasted_into_a_shell() {
        let words = ["--export=disk=/images/a.img,ro", "--device=it's \"a\" $disk"].map(str::to_owned);
        let text = command(&["serve"], &words);
        assert_eq!(
            text,
            r#"ferroce serve --export=disk=/images/a.img,ro '--device=it'\''s "a" $disk'"#
        );
    }
}
