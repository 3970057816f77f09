//! Requests to a server:
//!
//! | `do` | with |
//! | --- | --- |
//! | `sessions`, `devices` | of all servers: each has `server`, the place of its own |
//! | `stats` | |
//! | `close_session` | `session`: its number in the list |
//! | `close_path`, `reset_path_stats` | `session` and `path`: their numbers |
//! | `force_close` | `session` and `device`: their numbers |
//!
//! But for the first two: `server`, if there are several.

use rnbd::Errno;
use rnbd_admin::{Host, Server};
use rnbd_host::control::{
    Refused,
    serve::{ServeAnswer, ServeRequest},
};
use rtrs::{admission::PathKey, server::request::SessionKey};
use serde_json::{Map, Value, json};

use super::{Outcome, fields, number, wrong};
use crate::control::{Shared, show};

pub(super) const VERBS: &[&str] = &[
    "sessions",
    "devices",
    "stats",
    "close_session",
    "close_path",
    "reset_path_stats",
    "force_close",
];

pub(super) fn comply(shared: &Shared, verb: &str, request: &Value) -> Outcome {
    match verb {
        "sessions" | "devices" => of_all(shared, verb),
        _ => {
            let server = shared.services.server(place(request)?)?;
            match server.ask(read(&*server, verb, request)?)? {
                ServeAnswer::Stats(stats) => Ok(fields(show::loops(&stats.turns))),
                _ => Ok(Map::new()),
            }
        }
    }
}

/// Which of several servers, in the order of the lists.
fn place(request: &Value) -> Result<Option<usize>, Refused> {
    match &request["server"] {
        Value::Null => Ok(None),
        _ => Ok(usize::try_from(number(request, "server")?).ok()),
    }
}

/// Returns the listings of all servers, each with the server's place.
fn of_all(shared: &Shared, what: &str) -> Outcome {
    // That there is one.
    shared.services.server(Some(0))?;
    let mut all = Vec::new();
    for (place, server) in shared.services.servers().into_iter().enumerate() {
        let mut shown: Vec<Value> = match what {
            "sessions" => server.sessions()?.iter().map(show::session).collect(),
            _ => server.devices()?.iter().map(show::open_device).collect(),
        };
        shown.iter_mut().for_each(|one| one["server"] = place.into());
        all.append(&mut shown);
    }
    Ok(fields(json!({ what: all })))
}

fn read(server: &dyn Server, verb: &str, request: &Value) -> Result<ServeRequest, Refused> {
    let session = || number(request, "session").map(SessionKey);
    let path = || path(server, session()?, request);
    Ok(match verb {
        "stats" => ServeRequest::Stats,
        "close_session" => ServeRequest::CloseSession(session()?),
        "close_path" => ServeRequest::ClosePath(session()?, path()?),
        "reset_path_stats" => ServeRequest::ResetPathStats(session()?, path()?),
        "force_close" => {
            let device = u32::try_from(number(request, "device")?);
            ServeRequest::ForceClose(session()?, device.map_err(|_| wrong("no such number"))?)
        }
        other => return Err(wrong(format!("{other:?} can't be done"))),
    })
}

/// A path is named by its number, which only the server gives.
fn path(server: &dyn Server, session: SessionKey, request: &Value) -> Result<PathKey, Refused> {
    let wanted = PathKey::of(number(request, "path")?);
    let all = server.sessions()?;
    let mut paths = all.iter().filter(|s| s.session == session).flat_map(|s| &s.paths);
    match paths.any(|p| p.path == wanted) {
        true => Ok(wanted),
        false => Err(Errno::ENOENT.into()),
    }
}
