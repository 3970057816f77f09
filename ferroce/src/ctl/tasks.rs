//! Commands for a daemon only.

use serde::Deserialize;
use serde_json::json;

use super::{client::Client, client::read, table};
use crate::output::{self, Failure};

#[derive(Deserialize)]
struct Listed {
    tasks: Vec<Task>,
}

#[derive(Deserialize)]
struct Task {
    task: String,
    state: String,
    why: Option<String>,
    in_file: bool,
}

/// Lists the tasks.
pub(super) fn list(client: &mut Client, as_json: bool) -> Result<(), Failure> {
    let answer = client.ask(json!({ "do": "tasks" }))?;
    if as_json {
        return output::json(&json!({ "tasks": answer["tasks"] }));
    }
    let listed: Listed = read(answer)?;
    let row = |task: Task| {
        let from = if task.in_file { "file" } else { "order" };
        vec![task.task, task.state, from.to_owned(), task.why.unwrap_or_default()]
    };
    let rows: Vec<_> = listed.tasks.into_iter().map(row).collect();
    table::print(&["TASK", "STATE", "FROM", "WHY"], &rows)
}

/// Has the configuration read again.
pub(super) fn reload(client: &mut Client, as_json: bool) -> Result<(), Failure> {
    client.follow()?;
    let mut answer = client.ask(json!({ "do": "reload" }))?;
    let failed = answer["failed"].as_array().is_some_and(|failed| !failed.is_empty());
    if let Some(fields) = answer.as_object_mut() {
        fields.retain(|name, _| !matches!(name.as_str(), "event" | "id" | "ok"));
    }
    if as_json {
        output::json(&answer)?;
    } else {
        for what in ["begun", "changed", "restarted", "ended", "unchanged", "failed"] {
            for task in answer[what].as_array().into_iter().flatten() {
                output::line(&format!("{what}: {}", task.as_str().unwrap_or_default()))?;
            }
        }
    }
    match failed {
        true => Err(Failure::reported(1)),
        false => Ok(()),
    }
}

/// Ends a task.
pub(super) fn stop(client: &mut Client, task: &str, as_json: bool) -> Result<(), Failure> {
    client.follow()?;
    client.ask(json!({ "do": "stop", "task": task }))?;
    match as_json {
        true => output::json(&json!({ "done": [format!("stopped {task}")] })),
        false => output::line(&format!("stopped {task}")),
    }
}

/// Hands a task to a daemon.
pub(crate) fn start(task: &str, options: &[String]) -> Result<(), Failure> {
    let mut client = Client::connect(None)?;
    client.ask(json!({ "do": "start", "task": task, "options": options }))?;
    output::line(&format!("the daemon has {task}"))
}
