//! Counters, events, and texts.

use roce_verbs::shown;
use serde_json::{Value, json};

use super::{
    client::Client,
    model::{All, Path, ServedPath, Session},
    table::print,
};
use crate::output::{self, Failure};

/// Shows how paths are chosen.
pub(super) fn policy(client: &mut Client, session: Option<&str>, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let mapping = all.mapping(session)?;
    match json {
        true => output::json(&json!({ "session": mapping.session, "policy": mapping.policy })),
        false => output::line(&mapping.policy),
    }
}

/// Shows what has been counted.
pub(super) fn stats(client: &mut Client, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let loops = loops(client, &all)?;
    if json {
        let mut shown = all.json.clone();
        shown["loops"] = loops.into_iter().collect();
        return output::json(&shown);
    }
    if !all.mappings.is_empty() {
        let paths = all.mappings.iter().flat_map(|m| &m.paths);
        print(PATH, &paths.map(path_row).collect::<Vec<_>>())?;
    }
    if !all.sessions.is_empty() {
        let paths = all
            .sessions
            .iter()
            .flat_map(|s| s.paths.iter().map(|p| served_row(s, p)));
        print(SERVED, &paths.collect::<Vec<_>>())?;
    }
    for (of, stats) in loops {
        let counted = ["packets_sent", "packets_received", "retransmits", "qps", "mrs"];
        let counted: Vec<String> = counted.iter().map(|name| format!("{name} {}", stats[*name])).collect();
        output::line(&format!("{}: {}", shown(&of), counted.join(", ")))?;
    }
    Ok(())
}

/// Returns the counters of the loops of each mapping, or of the server.
fn loops(client: &mut Client, all: &All) -> Result<Vec<(String, Value)>, Failure> {
    let mut loops = Vec::new();
    for mapping in &all.mappings {
        let stats = client.ask(json!({ "do": "stats", "session": mapping.session }))?;
        loops.push((format!("session {}", mapping.session), stats));
    }
    // One after the other, to the first that there is not.
    let serves = client.hello.serves;
    for place in (0..).take_while(|_| serves) {
        match client.try_ask(json!({ "do": "stats", "of": "server", "server": place }))? {
            Ok(stats) if place == 0 => loops.push(("server".into(), stats)),
            Ok(stats) => loops.push((format!("server {}", place + 1), stats)),
            Err(_) if place > 0 => break,
            Err(refused) => return Err(refused.into()),
        }
    }
    for (_, stats) in &mut loops {
        if let Some(fields) = stats.as_object_mut() {
            fields.retain(|name, _| !matches!(name.as_str(), "event" | "id" | "ok"));
        }
    }
    Ok(loops)
}

const PATH: &[&str] = &[
    "PATH",
    "READS",
    "READ BYTES",
    "WRITES",
    "WRITE BYTES",
    "IN FLIGHT",
    "FAILOVERS",
    "RECONNECTS",
    "FAILED",
];
const SERVED: &[&str] = &[
    "CLIENT PATH",
    "SESSION",
    "READS",
    "READ BYTES",
    "WRITES",
    "WRITE BYTES",
    "REQUESTS",
];

fn path_row(path: &Path) -> Vec<String> {
    let numbers = [
        path.reads,
        path.read_bytes,
        path.writes,
        path.write_bytes,
        path.in_flight,
        path.failovers,
    ];
    let mut row = vec![path.path.clone()];
    row.extend(numbers.iter().map(u64::to_string));
    row.extend([path.reconnects.to_string(), path.failed_reconnects.to_string()]);
    row
}

fn served_row(session: &Session, path: &ServedPath) -> Vec<String> {
    let numbers = [
        path.reads,
        path.read_bytes,
        path.writes,
        path.write_bytes,
        path.requests,
    ];
    let mut row = vec![path.name(), session.name.clone()];
    row.extend(numbers.iter().map(u64::to_string));
    row
}

/// Tells what happens.
pub(super) fn events(mut client: Client, json: bool) -> Result<(), Failure> {
    client.ask(json!({ "do": "subscribe" }))?;
    let mut ended = false;
    while let Some(mut event) = client.event()? {
        ended = event["event"] == "summary";
        if json {
            if let Some(fields) = event.as_object_mut() {
                fields.remove("text");
            }
            output::json(&event)?;
        } else {
            let text = event["text"].as_str().unwrap_or_default();
            for line in text.lines() {
                output::line(&shown(line).to_string())?;
            }
        }
    }
    match ended {
        true => Ok(()),
        false => Err(Failure::failed("the process is gone")),
    }
}

/// Lists a directory of the tree.
pub(super) fn ls(client: &mut Client, path: &str, strict: bool, json: bool) -> Result<(), Failure> {
    let mut answer = client.ask(json!({ "do": "ls", "file": path, "strict": strict }))?;
    if json {
        return output::json(&answer["entries"].take());
    }
    for entry in answer["entries"].as_array().into_iter().flatten() {
        let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let end = match entry["kind"].as_str() {
            Some("dir") => "/".to_owned(),
            Some("link") => format!(" -> {}", text("target")),
            _ => String::new(),
        };
        let line = format!("{} {}{end}", text("mode"), text("name"));
        output::line(&shown(&line).to_string())?;
    }
    Ok(())
}

/// Prints the text of an answer.
pub(super) fn text_of(client: &mut Client, request: &Value, json: bool) -> Result<(), Failure> {
    let mut answer = client.ask(request.clone())?;
    match json {
        true => output::json(&json!({ "text": answer["text"].take() })),
        false => output::text(answer["text"].as_str().unwrap_or_default()),
    }
}
