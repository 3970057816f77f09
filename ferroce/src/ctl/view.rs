//! Listings and events.

use serde_json::Value;

use super::{
    What,
    client::Client,
    model::{All, Device, Mapping, OpenDevice, Path, ServedPath, Session},
    table::{facts, print},
};
use crate::output::{self, Failure};

/// Lists what there is of these.
pub(super) fn list(client: &mut Client, what: Option<What>, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let wants = |one: What| what.is_none_or(|what| what == one);
    if json {
        return output::json(&listed(&all, what));
    }
    let mut sections: Vec<(&[&str], Vec<Vec<String>>)> = Vec::new();
    if client.hello.maps {
        if wants(What::Devices) {
            sections.push((DEVICE, mapped_rows(&all)));
        }
        if wants(What::Sessions) {
            sections.push((SESSION, all.mappings.iter().map(session_row).collect()));
        }
        if wants(What::Paths) {
            let rows = all.mappings.iter().flat_map(|m| m.paths.iter().map(|p| path_row(m, p)));
            sections.push((PATH, rows.collect()));
        }
    }
    if client.hello.serves {
        if wants(What::Devices) {
            sections.push((OPEN, all.open.iter().map(open_row).collect()));
        }
        if wants(What::Sessions) {
            sections.push((CLIENT, all.sessions.iter().map(|s| client_row(&all, s)).collect()));
        }
        if wants(What::Paths) {
            let rows = all
                .sessions
                .iter()
                .flat_map(|s| s.paths.iter().map(|p| served_row(s, p)));
            sections.push((SERVED, rows.collect()));
        }
    }
    if sections.is_empty() {
        return output::line("nothing runs there yet");
    }
    for (n, (heads, rows)) in sections.into_iter().enumerate() {
        if n > 0 {
            output::line("")?;
        }
        print(heads, &rows)?;
    }
    Ok(())
}

/// Returns the listings that are wanted.
fn listed(all: &All, what: Option<What>) -> Value {
    let mut json = all.json.clone();
    let Some(what) = what else { return json };
    let (of_mapping, of_server) = match what {
        What::Devices => ("devices", "devices"),
        What::Sessions => ("", "sessions"),
        What::Paths => ("paths", "sessions"),
    };
    for mapping in json["mappings"].as_array_mut().into_iter().flatten() {
        let Some(fields) = mapping.as_object_mut() else {
            continue;
        };
        match what {
            What::Sessions => fields.retain(|name, _| name != "devices" && name != "paths"),
            What::Devices | What::Paths => fields.retain(|name, _| name == "session" || name == of_mapping),
        }
    }
    if let Some(fields) = json.as_object_mut() {
        fields.retain(|name, value| (name == "mappings" && !value.is_null()) || name == of_server);
    }
    json
}

const DEVICE: &[&str] = &[
    "DEVICE", "BLOCK", "SESSION", "STATE", "MODE", "SIZE", "CLIENTS", "WAITING", "READ", "WRITTEN",
];
const SESSION: &[&str] = &[
    "SESSION",
    "POLICY",
    "PATHS",
    "DEVICES",
    "DEPTH",
    "MAX IO",
    "RECONNECTS",
    "DELAY",
];
const PATH: &[&str] = &[
    "PATH",
    "SESSION",
    "STATE",
    "LATENCY",
    "IN FLIGHT",
    "READ",
    "WRITTEN",
    "FAILOVERS",
    "RECONNECTS",
];
const OPEN: &[&str] = &["OPEN DEVICE", "SESSION", "CLIENT", "MODE", "SIZE", "IMAGE"];
const CLIENT: &[&str] = &["CLIENT SESSION", "PATHS", "DEVICES"];
const SERVED: &[&str] = &[
    "CLIENT PATH",
    "SESSION",
    "STATE",
    "CONNECTIONS",
    "REQUESTS",
    "READ",
    "WRITTEN",
];

fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".into(), output::bytes)
}

fn mapped_rows(all: &All) -> Vec<Vec<String>> {
    let devices = all.mappings.iter().flat_map(|m| m.devices.iter().map(move |d| (m, d)));
    let row = |(mapping, device): (&Mapping, &Device)| {
        vec![
            device.name.clone(),
            device.block.clone().unwrap_or_default(),
            mapping.session.clone(),
            device.state.clone(),
            device.mode.clone(),
            size(device.bytes),
            device.clients.to_string(),
            device.waiting.to_string(),
            output::bytes(device.read_bytes),
            output::bytes(device.written_bytes),
        ]
    };
    devices.map(row).collect()
}

fn up<'a>(states: impl Iterator<Item = &'a String>) -> String {
    let (mut up, mut all) = (0, 0);
    for state in states {
        up += u32::from(state == "connected");
        all += 1;
    }
    format!("{up} of {all} up")
}

fn attempts(mapping: &Mapping) -> String {
    match mapping.max_reconnects {
        -1 => "no limit".into(),
        n => n.to_string(),
    }
}

fn number(number: Option<u32>) -> String {
    number.map_or_else(|| "-".into(), |n| n.to_string())
}

fn session_row(mapping: &Mapping) -> Vec<String> {
    vec![
        mapping.session.clone(),
        mapping.policy.clone(),
        up(mapping.paths.iter().map(|p| &p.state)),
        mapping.devices.len().to_string(),
        number(mapping.queue_depth),
        size(mapping.max_io_bytes),
        attempts(mapping),
        format!("{} s", mapping.reconnect_delay),
    ]
}

fn latency(path: &Path) -> String {
    path.latency_us.map_or_else(|| "-".into(), |us| format!("{us} us"))
}

fn path_row(mapping: &Mapping, path: &Path) -> Vec<String> {
    vec![
        path.path.clone(),
        mapping.session.clone(),
        path.state.clone(),
        latency(path),
        path.in_flight.to_string(),
        output::bytes(path.read_bytes),
        output::bytes(path.write_bytes),
        path.failovers.to_string(),
        path.reconnects.to_string(),
    ]
}

fn open_row(device: &OpenDevice) -> Vec<String> {
    vec![
        device.name.clone(),
        device.session_name.clone(),
        device.client.clone(),
        device.mode.clone(),
        output::bytes(device.bytes),
        device.image.clone(),
    ]
}

fn client_row(all: &All, session: &Session) -> Vec<String> {
    let open = all
        .open
        .iter()
        .filter(|d| (d.server, d.session) == (session.server, session.session))
        .count();
    vec![
        session.name.clone(),
        up(session.paths.iter().map(|p| &p.state)),
        open.to_string(),
    ]
}

fn served_row(session: &Session, path: &ServedPath) -> Vec<String> {
    vec![
        path.name(),
        session.name.clone(),
        path.state.clone(),
        format!("{} of {}", path.made, path.connections),
        path.requests.to_string(),
        output::bytes(path.read_bytes),
        output::bytes(path.write_bytes),
    ]
}

/// Among what a name is looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    Any,
    Session,
    Path,
}

/// Shows all that is known of what has this name.
pub(super) fn show(client: &mut Client, of: Of, name: &str, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let mut found: Vec<(Value, Facts)> = Vec::new();
    if of == Of::Any {
        found.extend(
            all.mapped(name)
                .into_iter()
                .map(|(m, d)| (in_json(&all, m, d), device_facts(m, d))),
        );
        let open = all.open.iter().filter(|d| d.name == name);
        found.extend(open.map(|d| {
            (
                json_of(&all.json["devices"], "device", d.device, Some(d.session)),
                open_facts(d),
            )
        }));
    }
    if of != Of::Path {
        let mappings = all.mappings.iter().filter(|m| m.session == name);
        found.extend(mappings.map(|m| (named(&all.json["mappings"], "session", &m.session), session_facts(m))));
        let sessions = all.sessions.iter().filter(|s| s.name == name);
        found.extend(sessions.map(|s| {
            (
                json_of(&all.json["sessions"], "session", s.session, None),
                client_facts(&all, s),
            )
        }));
    }
    if of != Of::Session {
        for (mapping, path) in all.paths(None, name) {
            let of_mapping = named(&all.json["mappings"], "session", &mapping.session);
            let mut shown = of_mapping["paths"].as_array().cloned().unwrap_or_default();
            shown.retain(|p| p["path"] == path.path && p["port"] == path.port);
            found.push((shown.pop().unwrap_or_default(), path_facts(mapping, path)));
        }
        for (session, path) in all.served_paths(None, name) {
            let of_session = json_of(&all.json["sessions"], "session", session.session, None);
            found.push((
                json_of(&of_session["paths"], "path", path.path, None),
                served_facts(session, path),
            ));
        }
    }
    if found.is_empty() {
        let names: Vec<_> = all.session_names().into_iter().collect();
        let text = format!("there is no {name:?} (sessions: {})", names.join(", "));
        return Err(Failure::failed(text));
    }
    for (n, (value, rows)) in found.into_iter().enumerate() {
        if json {
            output::json(&value)?;
            continue;
        }
        if n > 0 {
            output::line("")?;
        }
        facts(&rows)?;
    }
    Ok(())
}

type Facts = Vec<(&'static str, String)>;

fn named(list: &Value, key: &str, name: &str) -> Value {
    let found = list.as_array().into_iter().flatten().find(|v| v[key] == name);
    found.cloned().unwrap_or_default()
}

fn json_of(list: &Value, key: &str, number: u64, session: Option<u64>) -> Value {
    let is = |v: &&Value| v[key] == number && session.is_none_or(|s| v["session"] == s);
    list.as_array()
        .into_iter()
        .flatten()
        .find(is)
        .cloned()
        .unwrap_or_default()
}

fn in_json(all: &All, mapping: &Mapping, device: &Device) -> Value {
    let of_mapping = named(&all.json["mappings"], "session", &mapping.session);
    let mut shown = named(&of_mapping["devices"], "name", &device.name);
    shown["session"] = mapping.session.clone().into();
    shown
}

fn device_facts(mapping: &Mapping, device: &Device) -> Facts {
    vec![
        ("device", device.name.clone()),
        ("block", device.block.clone().unwrap_or_default()),
        ("session", mapping.session.clone()),
        ("state", device.state.clone()),
        ("access mode", device.mode.clone()),
        ("size", size(device.bytes)),
        ("block size", number(device.block_size)),
        ("on loss", device.on_loss.clone()),
        ("NBD clients", device.clients.to_string()),
        ("requests", format!("{} ({} failed)", device.completed, device.failed)),
        (
            "reads",
            format!("{} ({})", device.reads, output::bytes(device.read_bytes)),
        ),
        (
            "writes",
            format!("{} ({})", device.writes, output::bytes(device.written_bytes)),
        ),
        ("sent again", device.repeated.to_string()),
        ("writes lost", device.lost.to_string()),
        ("waiting", device.waiting.to_string()),
    ]
}

fn open_facts(device: &OpenDevice) -> Facts {
    vec![
        ("open device", device.name.clone()),
        ("session", device.session_name.clone()),
        ("client", device.client.clone()),
        ("number", device.device.to_string()),
        ("access mode", device.mode.clone()),
        ("size", output::bytes(device.bytes)),
        ("image", device.image.clone()),
    ]
}

fn session_facts(mapping: &Mapping) -> Facts {
    let devices: Vec<_> = mapping.devices.iter().map(|d| d.name.as_str()).collect();
    let mut rows = vec![
        ("session", mapping.session.clone()),
        ("port", mapping.port.to_string()),
        ("policy", mapping.policy.clone()),
        ("queue depth", number(mapping.queue_depth)),
        ("max I/O", size(mapping.max_io_bytes)),
        ("reconnect attempts", attempts(mapping)),
        ("reconnect delay", format!("{} s", mapping.reconnect_delay)),
        ("devices", devices.join(", ")),
    ];
    rows.extend(
        mapping
            .paths
            .iter()
            .map(|p| ("path", format!("{} ({})", p.path, p.state))),
    );
    rows
}

fn client_facts(all: &All, session: &Session) -> Facts {
    let open = all
        .open
        .iter()
        .filter(|d| (d.server, d.session) == (session.server, session.session));
    let devices: Vec<_> = open.map(|d| d.name.as_str()).collect();
    let mut rows = vec![
        ("client session", session.name.clone()),
        ("number", session.session.to_string()),
        ("devices", devices.join(", ")),
    ];
    rows.extend(
        session
            .paths
            .iter()
            .map(|p| ("path", format!("{} ({})", p.name(), p.state))),
    );
    rows
}

/// An RDMA device of the host, or none.
fn device(name: Option<&String>) -> String {
    name.map_or_else(|| "in software".into(), Clone::clone)
}

fn path_facts(mapping: &Mapping, path: &Path) -> Facts {
    vec![
        ("path", path.path.clone()),
        ("port", path.port.to_string()),
        ("session", mapping.session.clone()),
        ("state", path.state.clone()),
        ("device", device(path.device.as_ref())),
        ("keys of reads", path.keys.clone().unwrap_or_else(|| "-".into())),
        ("latency", latency(path)),
        ("in flight", path.in_flight.to_string()),
        ("reads", format!("{} ({})", path.reads, output::bytes(path.read_bytes))),
        (
            "writes",
            format!("{} ({})", path.writes, output::bytes(path.write_bytes)),
        ),
        ("failovers", path.failovers.to_string()),
        ("reconnects", path.reconnects.to_string()),
        ("failed reconnects", path.failed_reconnects.to_string()),
    ]
}

fn served_facts(session: &Session, path: &ServedPath) -> Facts {
    vec![
        ("client path", path.name()),
        ("session", session.name.clone()),
        ("number", path.path.to_string()),
        ("state", path.state.clone()),
        ("device", device(path.device.as_ref())),
        ("keys of chunks", path.keys.clone()),
        ("connections", format!("{} of {}", path.made, path.connections)),
        ("requests", path.requests.to_string()),
        ("reads", format!("{} ({})", path.reads, output::bytes(path.read_bytes))),
        (
            "writes",
            format!("{} ({})", path.writes, output::bytes(path.write_bytes)),
        ),
    ]
}
