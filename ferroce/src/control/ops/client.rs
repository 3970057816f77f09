//! Requests to a mapping:
//!
//! | `do` | with |
//! | --- | --- |
//! | `add_path`, `remove_path`, `disconnect`, `reconnect` | `path`: `SRC,DST` |
//! | `reset_path_stats` | `path`; perhaps `which`: `rdma`, `reconnects` or `cpu_migration` |
//! | `policy` | `policy`: as `--policy` |
//! | `reconnects` | `attempts`: a number, -1 without end; `delay`: seconds; or one of both |
//! | `on_loss` | `on_loss`: `error` or `queue`; perhaps `seconds` |
//! | `map` | `device`; perhaps `mode`: as `--access-mode`; `paths` for a session that there is not |
//! | `resize` | `device`, `sectors` |
//! | `remap` | `device` |
//! | `unmap` | `device`; perhaps `force`: true |
//! | `list`, `stats` | |

use std::time::Duration;

use rnbd::{client::OnLoss, proto::AccessMode};
use rnbd_admin::{Client, MapOrder};
use rnbd_host::control::{
    Refused,
    map::{MapAnswer, MapRequest},
};
use rtrs::{
    addr::PathAddr,
    client::{PathCounters, SessionConfig},
    proto::DEFAULT_PORT,
};
use serde_json::{Map, Value};

use super::{Outcome, fields, maybe_text, number, text, wrong};
use crate::{
    control::{Shared, show},
    names::path_of_addresses,
};

pub(super) const VERBS: &[&str] = &[
    "add_path",
    "remove_path",
    "disconnect",
    "reconnect",
    "reset_path_stats",
    "policy",
    "reconnects",
    "on_loss",
    "map",
    "resize",
    "remap",
    "unmap",
    "list",
    "stats",
];

pub(super) fn comply(shared: &Shared, verb: &str, request: &Value) -> Outcome {
    let session = maybe_text(request, "session")?;
    if let ("map", Some(session)) = (verb, session) {
        return shared.registry.map(&order(session, request)?).map(|()| Map::new());
    }
    let client = shared.services.client(session)?;
    match client.ask(read(&*client, verb, request)?)? {
        MapAnswer::Done => Ok(Map::new()),
        MapAnswer::Listing(listing) => Ok(fields(show::mapping(&listing))),
        MapAnswer::Stats(stats) => Ok(fields(show::loops(&stats.turns))),
    }
}

fn order(session: &str, request: &Value) -> Result<MapOrder, Refused> {
    let paths = match &request["paths"] {
        Value::Null => Vec::new(),
        Value::Array(paths) => paths
            .iter()
            .map(|path| read_path(path.as_str().unwrap_or_default()))
            .collect::<Result<_, _>>()?,
        _ => return Err(wrong("\"paths\" has to be an array")),
    };
    Ok(MapOrder {
        session: session.into(),
        paths,
        device: text(request, "device")?.into(),
        mode: mode(request)?,
    })
}

fn read_path(text: &str) -> Result<PathAddr, Refused> {
    path_of_addresses(text, DEFAULT_PORT).map_err(|e| wrong(e.to_string()))
}

fn path(request: &Value) -> Result<PathAddr, Refused> {
    read_path(text(request, "path")?)
}

fn mode(request: &Value) -> Result<AccessMode, Refused> {
    match maybe_text(request, "mode")? {
        None => Ok(AccessMode::ReadWrite),
        Some(mode) => mode.parse().map_err(|e: String| wrong(e)),
    }
}

fn counters(request: &Value) -> Result<PathCounters, Refused> {
    Ok(match maybe_text(request, "which")? {
        None => PathCounters::All,
        Some("rdma") => PathCounters::Rdma,
        Some("reconnects") => PathCounters::Reconnects,
        Some("cpu_migration") => PathCounters::CpuMigration,
        Some(which) => return Err(wrong(format!("{which:?} can't be reset"))),
    })
}

fn seconds(request: &Value, name: &str) -> Result<Duration, Refused> {
    let seconds = request[name].as_f64().and_then(|s| Duration::try_from_secs_f64(s).ok());
    seconds.ok_or_else(|| wrong(format!("{name:?} has to be a number of seconds")))
}

/// Returns the request to change reconnects. Settings that are left out stay as they are.
fn reconnects(client: &dyn Client, request: &Value) -> Result<MapRequest, Refused> {
    let now = client.listing()?;
    let attempts = match &request["attempts"] {
        Value::Null => now.max_reconnects,
        attempts => match attempts.as_i64() {
            Some(-1) => SessionConfig::FOREVER,
            attempts => attempts
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| wrong("\"attempts\" has to be a number"))?,
        },
    };
    let delay = match &request["delay"] {
        Value::Null => now.reconnect_delay,
        _ => seconds(request, "delay")?,
    };
    Ok(MapRequest::SetReconnects { attempts, delay })
}

fn read(client: &dyn Client, verb: &str, request: &Value) -> Result<MapRequest, Refused> {
    let device = || text(request, "device").map(str::to_owned);
    Ok(match verb {
        "add_path" => MapRequest::AddPath(path(request)?),
        "remove_path" => MapRequest::RemovePath(path(request)?),
        "disconnect" => MapRequest::Disconnect(path(request)?),
        "reconnect" => MapRequest::Reconnect(path(request)?),
        "reset_path_stats" => MapRequest::ResetPathStats(path(request)?, counters(request)?),
        "policy" => MapRequest::SetPolicy(text(request, "policy")?.parse().map_err(|e| wrong(format!("{e}")))?),
        "reconnects" => reconnects(client, request)?,
        "on_loss" => MapRequest::SetOnLoss(match (text(request, "on_loss")?, &request["seconds"]) {
            ("error", _) => OnLoss::Error,
            ("queue", Value::Null) => OnLoss::Queue(None),
            ("queue", _) => OnLoss::Queue(Some(seconds(request, "seconds")?)),
            (other, _) => return Err(wrong(format!("{other:?} is neither error nor queue"))),
        }),
        "map" => MapRequest::Map(rnbd_host::map::MapDevice {
            name: device()?,
            mode: mode(request)?,
        }),
        "resize" => MapRequest::Resize {
            device: device()?,
            sectors: number(request, "sectors")?,
        },
        "remap" => MapRequest::Remap(device()?),
        "unmap" => MapRequest::Unmap {
            device: device()?,
            force: request["force"] == true,
        },
        "list" => MapRequest::List,
        "stats" => MapRequest::Stats,
        other => return Err(wrong(format!("{other:?} can't be done"))),
    })
}
