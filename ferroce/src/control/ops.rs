//! The requests, by their `do`:
//!
//! | `do` | with |
//! | --- | --- |
//! | `ls`, `stat`, `read` | `file`: a path in the [tree](rnbd_admin); perhaps `strict`: true, for names of the kernel's code alone |
//! | `write` | `file`, `text`; perhaps `strict` |
//! | `metrics` | |
//! | `mappings` | |
//! | `reload` | of a daemon, or of a mapping with TLS |
//! | `tasks` | of a daemon |
//! | `start` | `task`: `map.NAME` or `serve.NAME`; `options`: the command's arguments, each in one string. A peer of limited [`Authority`] starts only what the daemon's configuration allows |
//! | `stop` | `task` |
//!
//! and, of a mapping (`session`: its session, if there are several), what [`client`] has, and of a server what [`server`] has. What both
//! have is a mapping's, if there is one, unless `of` is `server`.

mod client;
mod server;

use rnbd::Errno;
use rnbd_admin::{Host, Kind, Names, Stat};
use rnbd_host::control::Refused;
use serde_json::{Map, Value, json};

use super::{Shared, metrics, peer::Authority, show};

/// The outcome of a request: the fields of its answer, or why it was refused.
pub(super) type Outcome = Result<Map<String, Value>, Refused>;

/// Executes a request, and returns when it is done.
pub(super) fn comply(shared: &Shared, request: &Value, authority: Authority) -> Outcome {
    let verb = text(request, "do")?;
    if let Some(outcome) = of_tree(shared, verb, request) {
        return outcome;
    }
    match verb {
        "metrics" => Ok(fields(json!({ "text": metrics::text(&shared.services) }))),
        "mappings" => mappings(shared),
        "reload" => shared.services.reload(),
        "tasks" => Ok(shared.services.supervisor()?.tasks()),
        "stop" => shared
            .services
            .supervisor()?
            .stop(text(request, "task")?)
            .map(|()| Map::new()),
        "start" => start(shared, request, authority),
        // Of a mapping or a server, whichever runs.
        "stats" | "reset_path_stats" if request["of"] == "server" || !shared.services.kinds().0 => {
            server::comply(shared, verb, request)
        }
        _ if client::VERBS.contains(&verb) => client::comply(shared, verb, request),
        _ if server::VERBS.contains(&verb) => server::comply(shared, verb, request),
        other => Err(wrong(format!("{other:?} can't be done"))),
    }
}

/// All of them, with the names of their block devices in the tree.
fn mappings(shared: &Shared) -> Outcome {
    let clients = shared.services.clients();
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

fn start(shared: &Shared, request: &Value, authority: Authority) -> Outcome {
    let supervisor = shared.services.supervisor()?;
    let words = request["options"].as_array().into_iter().flatten();
    let words = words.map(|word| word.as_str().map(str::to_owned));
    let words = words
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| wrong("options are strings"))?;
    let started = supervisor.start(text(request, "task")?, words, authority);
    started.map(|()| Map::new())
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

/// Refuses a malformed request.
fn wrong(text: impl Into<String>) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

fn text<'a>(request: &'a Value, name: &str) -> Result<&'a str, Refused> {
    let found = request[name].as_str();
    found.ok_or_else(|| wrong(format!("{name:?} has to be a string")))
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
    found.ok_or_else(|| wrong(format!("{name:?} has to be a number")))
}

/// The members of an object.
pub(super) fn fields(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => Map::from_iter([("value".into(), other)]),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use rnbd_admin::{Client, Registry};
    use rnbd_host::control::map::{MapAnswer, MapListing, MapRequest};
    use rtrs::client::Policy;

    use super::*;
    use crate::control::{Events, ServiceRegistry};

    /// A mapping that does whatever it is asked for.
    struct Willing;

    impl Client for Willing {
        fn ask(&self, request: MapRequest) -> Result<MapAnswer, Refused> {
            Ok(match request {
                MapRequest::List => MapAnswer::Listing(Box::new(MapListing {
                    session: "s".into(),
                    port: 1234,
                    info: None,
                    policy: Policy::default(),
                    max_reconnects: 0,
                    reconnect_delay: std::time::Duration::ZERO,
                    paths: Vec::new(),
                    devices: Vec::new(),
                })),
                MapRequest::Stats => MapAnswer::Stats(Box::default()),
                _ => MapAnswer::Done,
            })
        }
    }

    fn shared() -> Shared {
        let services = std::sync::Arc::new(ServiceRegistry::default());
        // It is there for good.
        std::mem::forget(services.add_client(Willing));
        Shared {
            registry: Registry::new(services.clone(), Names::All),
            services,
            events: Events::default(),
            sysfs: std::sync::OnceLock::new(),
            ending: AtomicBool::new(false),
        }
    }

    #[test]
    fn whatever_is_asked_for_is_done_or_refused() {
        let shared = shared();
        let odd = [
            json!(null),
            json!(true),
            json!(-1),
            json!(1e300),
            json!(u64::MAX),
            json!(""),
            json!("\u{0}"),
            json!("../.."),
            json!("127.0.0.1,127.0.0.2"),
            json!([]),
            json!(["x"]),
            json!({ "a": 1 }),
        ];
        let keys = [
            "session", "path", "paths", "which", "policy", "attempts", "delay", "on_loss", "seconds", "device", "mode",
            "sectors", "file", "text", "of",
        ];
        let further = ["ls", "stat", "read", "write", "metrics", "mappings", "nothing", ""];
        let verbs = client::VERBS.iter().chain(server::VERBS).chain(&further);
        for verb in verbs {
            for key in keys {
                for (n, value) in odd.iter().enumerate() {
                    let mut request = json!({ "do": verb, "device": "d", "file": "class", "path": "127.0.0.1" });
                    request[key] = value.clone();
                    // Another one of them odd as well.
                    request[keys[(n * 7 + key.len()) % keys.len()]] = odd[(n + 5) % odd.len()].clone();
                    if let Err(refused) = comply(&shared, &request, Authority::Full) {
                        assert!(!refused.text.is_empty(), "{request}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_of_a_server_needs_one() {
        let shared = shared();
        assert!(comply(&shared, &json!({ "do": "stats" }), Authority::Full).is_ok());
        for request in [json!({ "do": "stats", "of": "server" }), json!({ "do": "sessions" })] {
            assert_eq!(
                comply(&shared, &request, Authority::Full).unwrap_err().errno,
                Errno::ENODEV,
                "{request}"
            );
        }
        let reset = json!({ "do": "reset_path_stats", "path": "127.0.0.1" });
        assert!(comply(&shared, &reset, Authority::Full).is_ok());
        let other = comply(&shared, &json!({ "do": "list", "session": "t" }), Authority::Full);
        assert_eq!(other.unwrap_err().errno, Errno::ENOENT);
    }
}
