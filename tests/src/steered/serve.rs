//! Requests to `ferroce serve`:
//!
//! | `do` | with |
//! | --- | --- |
//! | `sessions`, `devices`, `stats` | |
//! | `close_session` | `session`: its number in the list |
//! | `close_path`, `reset_path_stats` | `session` and `path`: their numbers |
//! | `force_close` | `session` and `device`: their numbers |

use rnbd::server::listing::DeviceListing;
use rnbd_host::control::{
    Refused,
    serve::{ServeAnswer, ServeControl, ServeRequest},
};
use rtrs::{
    admission::PathKey,
    server::{
        listing::{PathListing, SessionListing},
        request::SessionKey,
    },
};
use serde_json::{Value, json};

use crate::{Outcome, fields, loops_shown, nothing, number, text, wrong};

pub(crate) fn comply(control: &ServeControl, request: &Value) -> Outcome {
    match control.ask(read(control, request)?)? {
        ServeAnswer::Done => Ok(nothing()),
        ServeAnswer::Stats(stats) => Ok(fields(loops_shown(&stats.turns))),
        ServeAnswer::Sessions(all) => {
            let all: Vec<_> = all.iter().map(session_shown).collect();
            Ok(fields(json!({ "sessions": all })))
        }
        ServeAnswer::Devices(all) => {
            let all: Vec<_> = all.iter().map(device_shown).collect();
            Ok(fields(json!({ "devices": all })))
        }
    }
}

fn read(control: &ServeControl, request: &Value) -> Result<ServeRequest, Refused> {
    let session = || number(request, "session").map(SessionKey);
    Ok(match text(request, "do")? {
        "sessions" => ServeRequest::Sessions,
        "devices" => ServeRequest::Devices,
        "stats" => ServeRequest::Stats,
        "close_session" => ServeRequest::CloseSession(session()?),
        "close_path" => ServeRequest::ClosePath(session()?, path(control, session()?, request)?),
        "reset_path_stats" => ServeRequest::ResetPathStats(session()?, path(control, session()?, request)?),
        "force_close" => {
            let device = u32::try_from(number(request, "device")?);
            ServeRequest::ForceClose(session()?, device.map_err(|_| wrong("no such number"))?)
        }
        other => return Err(wrong(format!("{other:?} can't be done"))),
    })
}

/// A path is named by its number, which only the server gives.
fn path(control: &ServeControl, session: SessionKey, request: &Value) -> Result<PathKey, Refused> {
    let wanted = number(request, "path")?;
    let all = control.sessions()?;
    let mut paths = all.iter().filter(|s| s.session == session).flat_map(|s| &s.paths);
    let found = paths.find(|p| p.path.value() == wanted).map(|p| p.path);
    found.ok_or_else(|| rnbd::Errno::ENOENT.into())
}

fn session_shown(session: &SessionListing) -> Value {
    json!({
        "session": session.session.0,
        "name": session.name,
        "paths": session.paths.iter().map(path_shown).collect::<Vec<_>>(),
    })
}

fn path_shown(path: &PathListing) -> Value {
    json!({
        "path": path.path.value(),
        "client": path.client.to_string(),
        "server": path.server.to_string(),
        "state": format!("{:?}", path.state),
        "connections": path.connections,
        "made": path.made,
        "requests": path.requests,
        "reads": path.rdma.reads,
        "read_bytes": path.rdma.read_bytes,
        "writes": path.rdma.writes,
        "write_bytes": path.rdma.write_bytes,
    })
}

fn device_shown(device: &DeviceListing) -> Value {
    json!({
        "session": device.session.0,
        "session_name": device.session_name,
        "client": device.peer.to_string(),
        "device": device.id,
        "name": device.name,
        "mode": device.mode.to_string(),
        "read_only": device.read_only,
        "image": device.label,
        "bytes": device.size,
    })
}
