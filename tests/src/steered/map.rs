//! Requests to `ferroce map`:
//!
//! | `do` | with |
//! | --- | --- |
//! | `add_path`, `remove_path`, `disconnect`, `reconnect` | `path`: `SRC,DST` |
//! | `reset_path_stats` | `path`; perhaps `which`: `rdma`, `reconnects` or `cpu_migration` |
//! | `policy` | `policy`: as `--policy` |
//! | `reconnects` | `attempts`: a number, -1 without end; `delay`: seconds |
//! | `on_loss` | `on_loss`: `error` or `queue`; perhaps `seconds` |
//! | `map` | `device`; perhaps `mode`: as `--access-mode` |
//! | `resize` | `device`, `sectors` |
//! | `remap` | `device` |
//! | `unmap` | `device`; perhaps `force`: true |
//! | `list`, `stats` | |

use std::time::Duration;

use rnbd::{client::OnLoss, proto::AccessMode};
use rnbd_host::{
    control::{
        Refused,
        map::{MapAnswer, MapControl, MapListing, MapRequest, MappedDevice},
    },
    map::MapDevice,
};
use rtrs::{
    addr::PathAddr,
    client::{PathCounters, PathStatus, SessionConfig},
};
use serde_json::{Value, json};

use crate::{Outcome, fields, loops_shown, nothing, number, text, wrong};

pub(crate) fn comply(control: &MapControl, request: &Value) -> Outcome {
    match control.ask(read(request)?)? {
        MapAnswer::Done => Ok(nothing()),
        MapAnswer::Listing(listing) => Ok(fields(shown(&listing))),
        MapAnswer::Stats(stats) => Ok(fields(loops_shown(&stats.turns))),
    }
}

fn path(request: &Value) -> Result<PathAddr, Refused> {
    text(request, "path")?.parse().map_err(|e| wrong(format!("{e}")))
}

fn counters(request: &Value) -> Result<PathCounters, Refused> {
    Ok(match &request["which"] {
        Value::Null => PathCounters::All,
        which => match which.as_str() {
            Some("rdma") => PathCounters::Rdma,
            Some("reconnects") => PathCounters::Reconnects,
            Some("cpu_migration") => PathCounters::CpuMigration,
            _ => return Err(wrong(format!("{which} can't be reset"))),
        },
    })
}

fn seconds(request: &Value, name: &str) -> Result<Duration, Refused> {
    let seconds = request[name].as_f64().and_then(|s| Duration::try_from_secs_f64(s).ok());
    seconds.ok_or_else(|| wrong(format!("{name:?} is to be seconds")))
}

fn read(request: &Value) -> Result<MapRequest, Refused> {
    Ok(match text(request, "do")? {
        "add_path" => MapRequest::AddPath(path(request)?),
        "remove_path" => MapRequest::RemovePath(path(request)?),
        "disconnect" => MapRequest::Disconnect(path(request)?),
        "reconnect" => MapRequest::Reconnect(path(request)?),
        "reset_path_stats" => MapRequest::ResetPathStats(path(request)?, counters(request)?),
        "policy" => MapRequest::SetPolicy(text(request, "policy")?.parse().map_err(|e| wrong(format!("{e}")))?),
        "reconnects" => MapRequest::SetReconnects {
            attempts: match request["attempts"].as_i64() {
                Some(-1) => SessionConfig::FOREVER,
                attempts => attempts
                    .and_then(|n| u32::try_from(n).ok())
                    .ok_or_else(|| wrong("\"attempts\" is to be a number"))?,
            },
            delay: seconds(request, "delay")?,
        },
        "on_loss" => MapRequest::SetOnLoss(match (text(request, "on_loss")?, &request["seconds"]) {
            ("error", _) => OnLoss::Error,
            ("queue", Value::Null) => OnLoss::Queue(None),
            ("queue", _) => OnLoss::Queue(Some(seconds(request, "seconds")?)),
            (other, _) => return Err(wrong(format!("{other:?} is neither error nor queue"))),
        }),
        "map" => MapRequest::Map(MapDevice {
            name: text(request, "device")?.into(),
            mode: match &request["mode"] {
                Value::Null => AccessMode::ReadWrite,
                _ => text(request, "mode")?.parse().map_err(|e: String| wrong(e))?,
            },
        }),
        "resize" => MapRequest::Resize {
            device: text(request, "device")?.into(),
            sectors: number(request, "sectors")?,
        },
        "remap" => MapRequest::Remap(text(request, "device")?.into()),
        "unmap" => MapRequest::Unmap {
            device: text(request, "device")?.into(),
            force: request["force"] == true,
        },
        "list" => MapRequest::List,
        "stats" => MapRequest::Stats,
        other => return Err(wrong(format!("{other:?} can't be done"))),
    })
}

fn shown(listing: &MapListing) -> Value {
    json!({
        "session": listing.session,
        "queue_depth": listing.info.map(|info| info.session_depth),
        "max_io_bytes": listing.info.map(|info| info.max_io_size),
        "new_rkeys": listing.info.map(|info| info.new_rkeys),
        "policy": listing.policy.name(),
        "max_reconnects": match listing.max_reconnects {
            SessionConfig::FOREVER => -1,
            attempts => i64::from(attempts),
        },
        "reconnect_delay": listing.reconnect_delay.as_secs_f64(),
        "paths": listing.paths.iter().map(path_shown).collect::<Vec<_>>(),
        "devices": listing.devices.iter().map(device_shown).collect::<Vec<_>>(),
    })
}

fn device_shown(device: &MappedDevice) -> Value {
    json!({
        "name": device.name,
        "mode": device.mode.to_string(),
        "state": device.state.map(|state| format!("{state:?}")),
        "bytes": device.geometry.map(|geometry| geometry.size),
        "completed": device.counters.completed,
        "failed": device.counters.failed,
        "read_bytes": device.counters.read_bytes,
        "written_bytes": device.counters.written_bytes,
        "repeated": device.counters.repeated,
        "waiting": device.waiting,
        "clients": device.clients,
    })
}

fn path_shown(path: &PathStatus) -> Value {
    let (stats, rdma) = (&path.stats, &path.stats.rdma);
    json!({
        "id": path.id.number(),
        "path": path.addr.to_string(),
        "state": format!("{:?}", path.state),
        "latency_us": path.latency.map(|latency| latency.as_micros() as u64),
        "in_flight": path.in_flight,
        "reads": rdma.reads,
        "read_bytes": rdma.read_bytes,
        "writes": rdma.writes,
        "write_bytes": rdma.write_bytes,
        "failovers": stats.failovers,
        "reconnects": stats.reconnects,
        "failed_reconnects": stats.failed_reconnects,
        "cpu_migration_from": stats.cpu_migration.from,
        "cpu_migration_to": stats.cpu_migration.to,
    })
}
