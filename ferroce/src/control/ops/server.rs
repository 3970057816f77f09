//! Requests to a server:
//!
//! | `do` | with |
//! | --- | --- |
//! | `sessions`, `devices`, `stats` | |
//! | `close_session` | `session`: its number in the list |
//! | `close_path`, `reset_path_stats` | `session` and `path`: their numbers |
//! | `force_close` | `session` and `device`: their numbers |

use rnbd::Errno;
use rnbd_admin::Server;
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
    let server = shared.roster.server()?;
    match server.ask(read(&*server, verb, request)?)? {
        ServeAnswer::Done => Ok(Map::new()),
        ServeAnswer::Stats(stats) => Ok(fields(show::loops(&stats.turns))),
        ServeAnswer::Sessions(all) => {
            let all: Vec<_> = all.iter().map(show::session).collect();
            Ok(fields(json!({ "sessions": all })))
        }
        ServeAnswer::Devices(all) => {
            let all: Vec<_> = all.iter().map(show::open_device).collect();
            Ok(fields(json!({ "devices": all })))
        }
    }
}

fn read(server: &dyn Server, verb: &str, request: &Value) -> Result<ServeRequest, Refused> {
    let session = || number(request, "session").map(SessionKey);
    let path = || path(server, session()?, request);
    Ok(match verb {
        "sessions" => ServeRequest::Sessions,
        "devices" => ServeRequest::Devices,
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
