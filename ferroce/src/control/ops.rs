//! What can be asked for, by its `do`:
//!
//! | `do` | with |
//! | --- | --- |
//! | `ls`, `stat`, `read` | `file`: a path in the [tree](rnbd_admin); perhaps `strict`: true, for names of the kernel's code alone |
//! | `write` | `file`, `text`; perhaps `strict` |
//! | `metrics` | |
//! | `mappings` | |
//! | `reload`, `tasks` | of a daemon |
//! | `start` | `task`: `map.NAME` or `serve.NAME`; `options`: the command's arguments, each in one string |
//! | `stop` | `task` |
//!
//! and, of a mapping (`session`: its session, if there are several), what [`client`] has, and of a server what [`server`] has.

mod client;
mod server;

use rnbd::Errno;
use rnbd_admin::{Host, Kind, Names, Stat};
use rnbd_host::control::Refused;
use serde_json::{Map, Value, json};

use super::{Shared, metrics, show};

/// How a request ended: what there is to tell, or why not.
pub(super) type Outcome = Result<Map<String, Value>, Refused>;

/// Complies with a request, and waits until that is done.
pub(super) fn comply(shared: &Shared, request: &Value) -> Outcome {
    let verb = text(request, "do")?;
    if let Some(outcome) = of_tree(shared, verb, request) {
        return outcome;
    }
    match verb {
        "metrics" => Ok(fields(json!({ "text": metrics::text(&shared.roster) }))),
        "mappings" => mappings(shared),
        "reload" => shared.roster.supervisor()?.reload(),
        "tasks" => Ok(shared.roster.supervisor()?.tasks()),
        "stop" => shared
            .roster
            .supervisor()?
            .stop(text(request, "task")?)
            .map(|()| Map::new()),
        "start" => start(shared, request),
        // Of whatever runs.
        "stats" | "reset_path_stats" if !shared.roster.kinds().0 => server::comply(shared, verb, request),
        _ if client::VERBS.contains(&verb) => client::comply(shared, verb, request),
        _ if server::VERBS.contains(&verb) => server::comply(shared, verb, request),
        other => Err(wrong(format!("{other:?} can't be done"))),
    }
}

/// All of them, with the names of their block devices in the tree.
fn mappings(shared: &Shared) -> Outcome {
    let clients = shared.roster.clients();
    let listings = clients.iter().filter_map(|client| client.listing().ok());
    let mut all: Vec<Value> = listings.map(|listing| show::mapping(&listing)).collect();
    let numbers = shared.registry.block_devices()?;
    for mapping in &mut all {
        let session = mapping["session"].as_str().unwrap_or_default().to_owned();
        for device in mapping["devices"].as_array_mut().into_iter().flatten() {
            let is = |(_, s, d): &&(u32, String, String)| *s == session && device["name"] == **d;
            let number = numbers.iter().find(is).map(|(number, ..)| format!("rnbd{number}"));
            device["block"] = number.into();
        }
    }
    Ok(fields(json!({ "mappings": all })))
}

fn start(shared: &Shared, request: &Value) -> Outcome {
    let supervisor = shared.roster.supervisor()?;
    let words = request["options"].as_array().into_iter().flatten();
    let words = words.map(|word| word.as_str().map(str::to_owned));
    let words = words
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| wrong("options are strings"))?;
    supervisor.start(text(request, "task")?, words).map(|()| Map::new())
}

fn of_tree(shared: &Shared, verb: &str, request: &Value) -> Option<Outcome> {
    if !["ls", "stat", "read", "write"].contains(&verb) {
        return None;
    }
    let registry = shared.registry.with_names(match request["strict"] == true {
        true => Names::Mainline,
        false => Names::All,
    });
    let of = |file: &str| match verb {
        "ls" => {
            let entries = registry.list(file)?;
            let entry = |entry: &rnbd_admin::Entry| {
                let mut shown = stat_shown(&entry.stat);
                shown.insert("name".into(), entry.name.clone().into());
                Value::from(shown)
            };
            Ok(fields(
                json!({ "entries": entries.iter().map(entry).collect::<Vec<_>>() }),
            ))
        }
        "stat" => registry.stat(file).map(|stat| stat_shown(&stat)),
        "read" => registry.read(file).map(|text| fields(json!({ "text": text }))),
        _ => registry
            .write(file, text(request, "text")?.as_bytes())
            .map(|()| Map::new()),
    };
    Some(text(request, "file").and_then(of))
}

fn stat_shown(stat: &Stat) -> Map<String, Value> {
    let (kind, target) = match &stat.kind {
        Kind::Dir => ("dir", None),
        Kind::File => ("file", None),
        Kind::Link(to) => ("link", Some(to)),
    };
    let mut shown = fields(json!({ "kind": kind, "mode": format!("{:04o}", stat.mode) }));
    if let Some(target) = target {
        shown.insert("target".into(), target.clone().into());
    }
    shown
}

/// A request that makes no sense.
fn wrong(text: impl Into<String>) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

fn text<'a>(request: &'a Value, name: &str) -> Result<&'a str, Refused> {
    let found = request[name].as_str();
    found.ok_or_else(|| wrong(format!("{name:?} is to be a string")))
}

/// A string that need not be there.
fn maybe_text<'a>(request: &'a Value, name: &str) -> Result<Option<&'a str>, Refused> {
    match &request[name] {
        Value::Null => Ok(None),
        _ => text(request, name).map(Some),
    }
}

fn number(request: &Value, name: &str) -> Result<u64, Refused> {
    let found = request[name].as_u64();
    found.ok_or_else(|| wrong(format!("{name:?} is to be a number")))
}

/// The members of an object.
pub(super) fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => Map::from_iter([("value".into(), other)]),
    }
}
