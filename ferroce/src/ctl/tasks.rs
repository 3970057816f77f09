//! Commands for a daemon only.

use rnbd_host::control::{Named, ProcessRequest, Reloaded, TaskStatus, Tasks};
use serde_json::json;

use super::{client::Client, table};
use crate::output::{self, Failure};

/// Lists the tasks.
pub(super) fn list(client: &mut Client, as_json: bool) -> Result<(), Failure> {
    let listed: Tasks = client.ask(ProcessRequest::Tasks {})?;
    if as_json {
        return output::json(&listed);
    }
    let row = |task: TaskStatus| {
        let from = if task.in_file { "file" } else { "request" };
        let why = task.why.unwrap_or_default();
        vec![task.task, task.state.name().to_owned(), from.to_owned(), why]
    };
    let rows: Vec<_> = listed.tasks.into_iter().map(row).collect();
    let heads = ["TASK", "STATE", "FROM", "ERROR"].map(str::to_owned);
    table::print(heads.into(), rows)
}

/// Reads the configuration again.
pub(super) fn reload(client: &mut Client, as_json: bool) -> Result<(), Failure> {
    client.follow()?;
    let reloaded: Reloaded = client.ask(ProcessRequest::Reload {})?;
    if as_json {
        output::json(&reloaded)?;
    } else {
        for (what, tasks) in reloaded.lists() {
            tasks
                .iter()
                .try_for_each(|task| output::line(&format!("{what}: {task}")))?;
        }
    }
    match reloaded.failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::reported(1)),
    }
}

/// Stops a task.
pub(super) fn stop(client: &mut Client, task: &str, as_json: bool) -> Result<(), Failure> {
    client.follow()?;
    client.done(ProcessRequest::Stop { task: task.to_owned() })?;
    match as_json {
        true => output::json(&json!({ "done": [format!("stopped {task}")] })),
        false => output::line(&format!("stopped {task}")),
    }
}

/// Starts a task of a daemon.
pub(crate) fn start(task: &str, options: &[String]) -> Result<(), Failure> {
    let mut client = Client::connect(None)?;
    client.done(ProcessRequest::Start {
        task: task.to_owned(),
        options: options.to_vec(),
    })?;
    output::line(&format!("the daemon has started {task}"))
}
