//! Listings, counters and details of devices, sessions and paths.

use rnbd_host::control::{
    ClientPath, ClientSession, LoopTotals, MapListing, MapRequest, MappedDevice, MappedPath, Named, OpenDevice,
    Request, ServeRequest, on_loss_text,
};
use serde_json::{Value, json};

use super::{
    args::What,
    client::Client,
    state::{All, client_path_name},
    table,
};
use crate::output::{self, Failure, bytes};

/// Commands that show a column: `list`, `stats`, `show`.
type Views = u8;
const LIST: Views = 1;
const STATS: Views = 2;
const SHOW: Views = 4;

/// A column of `list` and `stats`, and a line of `show`: a fact of a `T`, which belongs to a `P`.
struct Column<P, T>(&'static str, Views, fn(&P, &T) -> String);

const DEVICE: &[Column<MapListing, MappedDevice>] = &[
    Column("device", LIST | SHOW, |_, d| d.name.clone()),
    Column("block", LIST | SHOW, |_, d| d.block.clone().unwrap_or_default()),
    Column("session", LIST | SHOW, |m, _| m.session.clone()),
    Column("state", LIST | SHOW, |_, d| d.state.name().to_owned()),
    Column("mode", LIST | SHOW, |_, d| d.mode.to_string()),
    Column("size", LIST | SHOW, |_, d| size(d.bytes)),
    Column("block size", SHOW, |_, d| number(d.block_size)),
    Column("on loss", SHOW, |_, d| on_loss_text(d.on_loss)),
    Column("clients", LIST | SHOW, |_, d| d.clients.to_string()),
    Column("waiting", LIST | SHOW, |_, d| d.waiting.to_string()),
    Column("requests", SHOW, |_, d| d.counters.completed.to_string()),
    Column("failed", SHOW, |_, d| d.counters.failed.to_string()),
    Column("reads", SHOW, |_, d| d.counters.reads.to_string()),
    Column("read", LIST | SHOW, |_, d| bytes(d.counters.read_bytes)),
    Column("writes", SHOW, |_, d| d.counters.writes.to_string()),
    Column("written", LIST | SHOW, |_, d| bytes(d.counters.written_bytes)),
    Column("sent again", SHOW, |_, d| d.counters.repeated.to_string()),
    Column("writes lost", SHOW, |_, d| d.counters.lost.to_string()),
];

const SESSION: &[Column<All, MapListing>] = &[
    Column("session", LIST | SHOW, |_, m| m.session.clone()),
    Column("port", SHOW, |_, m| m.port.to_string()),
    Column("policy", LIST | SHOW, |_, m| m.policy.to_string()),
    Column("paths", LIST, |_, m| up(m.paths.iter().map(|p| p.state.name()))),
    Column("paths", SHOW, |_, m| {
        joined(m.paths.iter().map(|p| named(&p.addr, p.state)))
    }),
    Column("devices", LIST, |_, m| m.devices.len().to_string()),
    Column("devices", SHOW, |_, m| joined(m.devices.iter().map(|d| d.name.clone()))),
    Column("depth", LIST | SHOW, |_, m| number(m.queue_depth)),
    Column("max io", LIST | SHOW, |_, m| size(m.max_io_bytes.map(u64::from))),
    Column("reconnects", LIST | SHOW, |_, m| attempts(m)),
    Column("delay", LIST | SHOW, |_, m| {
        format!("{} s", m.reconnect_delay.as_secs_f64())
    }),
];

const PATH: &[Column<MapListing, MappedPath>] = &[
    Column("path", LIST | STATS | SHOW, |_, p| p.addr.to_string()),
    Column("port", SHOW, |_, p| p.addr.dst.port().to_string()),
    Column("session", LIST | SHOW, |m, _| m.session.clone()),
    Column("state", LIST | SHOW, |_, p| p.state.name().to_owned()),
    Column("device", SHOW, |_, p| device(p.device.as_ref())),
    Column("keys of reads", SHOW, |_, p| {
        p.keys.clone().unwrap_or_else(|| "-".into())
    }),
    Column("latency", LIST | SHOW, |_, p| latency(p)),
    Column("reads", STATS | SHOW, |_, p| p.stats.rdma.reads.to_string()),
    Column("read bytes", STATS, |_, p| p.stats.rdma.read_bytes.to_string()),
    Column("writes", STATS | SHOW, |_, p| p.stats.rdma.writes.to_string()),
    Column("write bytes", STATS, |_, p| p.stats.rdma.write_bytes.to_string()),
    Column("in flight", LIST | STATS | SHOW, |_, p| p.in_flight.to_string()),
    Column("read", LIST | SHOW, |_, p| bytes(p.stats.rdma.read_bytes)),
    Column("written", LIST | SHOW, |_, p| bytes(p.stats.rdma.write_bytes)),
    Column("failovers", LIST | STATS | SHOW, |_, p| p.stats.failovers.to_string()),
    Column("reconnects", LIST | STATS | SHOW, |_, p| p.stats.reconnects.to_string()),
    Column("failed", STATS | SHOW, |_, p| p.stats.failed_reconnects.to_string()),
];

const OPEN_DEVICE: &[Column<All, OpenDevice>] = &[
    Column("open device", LIST | SHOW, |_, d| d.name.clone()),
    Column("session", LIST | SHOW, |_, d| d.session_name.clone()),
    Column("client", LIST | SHOW, |_, d| d.client.to_string()),
    Column("number", SHOW, |_, d| d.device.to_string()),
    Column("mode", LIST | SHOW, |_, d| d.mode.to_string()),
    Column("size", LIST | SHOW, |_, d| bytes(d.bytes)),
    Column("image", LIST | SHOW, |_, d| d.image.clone()),
];

const CLIENT_SESSION: &[Column<All, ClientSession>] = &[
    Column("client session", LIST | SHOW, |_, s| s.name.clone()),
    Column("number", SHOW, |_, s| s.session.0.to_string()),
    Column("paths", LIST, |_, s| up(s.paths.iter().map(|p| p.state.name()))),
    Column("paths", SHOW, |_, s| {
        joined(s.paths.iter().map(|p| named(&client_path_name(p), p.state)))
    }),
    Column("devices", LIST, |all, s| all.open_of(s).len().to_string()),
    Column("devices", SHOW, |all, s| {
        joined(all.open_of(s).iter().map(|d| d.name.clone()))
    }),
];

const CLIENT_PATH: &[Column<ClientSession, ClientPath>] = &[
    Column("client path", LIST | STATS | SHOW, |_, p| client_path_name(p)),
    Column("session", LIST | STATS | SHOW, |s, _| s.name.clone()),
    Column("number", SHOW, |_, p| p.path.value().to_string()),
    Column("state", LIST | SHOW, |_, p| p.state.name().to_owned()),
    Column("device", SHOW, |_, p| device(p.device.as_ref())),
    Column("keys of chunks", SHOW, |_, p| p.keys.clone()),
    Column("connections", LIST | SHOW, |_, p| {
        format!("{} of {}", p.established, p.connections)
    }),
    Column("reads", STATS | SHOW, |_, p| p.rdma.reads.to_string()),
    Column("read bytes", STATS, |_, p| p.rdma.read_bytes.to_string()),
    Column("writes", STATS | SHOW, |_, p| p.rdma.writes.to_string()),
    Column("write bytes", STATS, |_, p| p.rdma.write_bytes.to_string()),
    Column("requests", LIST | STATS | SHOW, |_, p| p.requests.to_string()),
    Column("read", LIST | SHOW, |_, p| bytes(p.rdma.read_bytes)),
    Column("written", LIST | SHOW, |_, p| bytes(p.rdma.write_bytes)),
];

fn size(size: Option<u64>) -> String {
    size.map_or_else(|| "-".into(), bytes)
}

fn number(number: Option<u32>) -> String {
    number.map_or_else(|| "-".into(), |n| n.to_string())
}

fn attempts(mapping: &MapListing) -> String {
    match mapping.max_reconnects {
        -1 => "no limit".into(),
        n => n.to_string(),
    }
}

fn latency(path: &MappedPath) -> String {
    path.latency
        .map_or_else(|| "-".into(), |latency| format!("{} us", latency.as_micros()))
}

/// Name of an RDMA device of the host.
fn device(name: Option<&String>) -> String {
    name.map_or_else(|| "in software".into(), Clone::clone)
}

fn named(path: &impl std::fmt::Display, state: impl Named) -> String {
    format!("{path} ({})", state.name())
}

fn joined(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<Vec<_>>().join(", ")
}

fn up(states: impl Iterator<Item = &'static str>) -> String {
    let states: Vec<_> = states.collect();
    let up = states.iter().filter(|state| **state == "connected").count();
    format!("{up} of {} up", states.len())
}

/// Prints tables and details, with an empty line between them.
#[derive(Default)]
struct Printer {
    printed: bool,
}

impl Printer {
    fn next(&mut self) -> Result<(), Failure> {
        match std::mem::replace(&mut self.printed, true) {
            true => output::line(""),
            false => Ok(()),
        }
    }

    /// Prints objects as a table, if they are wanted.
    fn table<P, T>(
        &mut self,
        wanted: bool,
        (columns, view): (&[Column<P, T>], Views),
        objects: &[(&P, &T)],
    ) -> Result<(), Failure> {
        if !wanted {
            return Ok(());
        }
        self.next()?;
        let columns: Vec<_> = columns.iter().filter(|column| column.1 & view != 0).collect();
        let heads: Vec<_> = columns.iter().map(|column| column.0.to_uppercase()).collect();
        let row = |(parent, object): &(&P, &T)| columns.iter().map(|column| (column.2)(parent, object)).collect();
        table::print(heads, objects.iter().map(row).collect())
    }
}

/// Lists all devices, sessions and paths, or those of one kind.
pub(super) fn list(client: &mut Client, what: Option<What>, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    if json {
        return match what {
            None => output::json(&all),
            Some(what) => output::json(&listed(&all, what)),
        };
    }
    let [devices, sessions, paths] =
        [What::Devices, What::Sessions, What::Paths].map(|one| what.is_none_or(|what| what == one));
    let (maps, serves) = (client.greeting.maps, client.greeting.serves);
    let mut printer = Printer::default();
    printer.table(maps && devices, (DEVICE, LIST), &all.all_mapped())?;
    printer.table(maps && sessions, (SESSION, LIST), &all.with(&all.mappings))?;
    printer.table(maps && paths, (PATH, LIST), &all.all_paths())?;
    printer.table(serves && devices, (OPEN_DEVICE, LIST), &all.with(&all.open))?;
    printer.table(serves && sessions, (CLIENT_SESSION, LIST), &all.with(&all.sessions))?;
    printer.table(serves && paths, (CLIENT_PATH, LIST), &all.all_client_paths())?;
    match printer.printed {
        true => Ok(()),
        false => output::line("nothing is mapped or served by this process yet"),
    }
}

/// Returns the listings of one kind.
fn listed(all: &All, what: What) -> Value {
    let mappings = all.mappings.iter().map(|mapping| match what {
        What::Devices => json!({ "session": mapping.session, "devices": mapping.devices }),
        What::Paths => json!({ "session": mapping.session, "paths": mapping.paths }),
        What::Sessions => {
            let mut shown = json!(mapping);
            if let Some(fields) = shown.as_object_mut() {
                fields.retain(|name, _| name != "devices" && name != "paths");
            }
            shown
        }
    });
    let mappings: Vec<Value> = mappings.collect();
    match what {
        What::Devices => json!({ "mappings": mappings, "devices": all.open }),
        What::Sessions | What::Paths => json!({ "mappings": mappings, "sessions": all.sessions }),
    }
}

/// Shows counters.
pub(super) fn stats(client: &mut Client, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let loops = loops(client, &all)?;
    if json {
        let loops: serde_json::Map<_, _> = loops.into_iter().map(|(of, totals)| (of, json!(totals))).collect();
        let mut shown = json!(all);
        shown["loops"] = loops.into();
        return output::json(&shown);
    }
    let mut printer = Printer::default();
    printer.table(!all.mappings.is_empty(), (PATH, STATS), &all.all_paths())?;
    printer.table(!all.sessions.is_empty(), (CLIENT_PATH, STATS), &all.all_client_paths())?;
    printer.next()?;
    let facts = loops.iter().map(|(of, totals)| {
        let counters = totals.0.iter().map(|(name, number)| format!("{name} {number}"));
        (of.as_str(), joined(counters))
    });
    table::facts(&facts.collect::<Vec<_>>())
}

/// Returns the totals of the loops of each mapping and of each server.
fn loops(client: &mut Client, all: &All) -> Result<Vec<(String, LoopTotals)>, Failure> {
    let mut loops = Vec::new();
    for mapping in &all.mappings {
        let request = Request::to_mapping(&mapping.session, MapRequest::Stats {});
        loops.push((format!("session {}", mapping.session), client.ask(request)?));
    }
    // Up to the first place without a server.
    let serves = client.greeting.serves;
    for place in (0..).take_while(|_| serves) {
        match client.try_ask(Request::to_server(place, ServeRequest::Stats {}))? {
            Ok(totals) if place == 0 => loops.push(("server".into(), totals)),
            Ok(totals) => loops.push((format!("server {}", place + 1), totals)),
            Err(_) if place > 0 => break,
            Err(refused) => return Err(refused.into()),
        }
    }
    Ok(loops)
}

/// Kind of objects that a name stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    Any,
    Session,
    Path,
}

type Facts = Vec<(&'static str, String)>;

/// Details of an object: its facts, which JSON has with those of its type.
fn details<P, T: serde::Serialize>(columns: &[Column<P, T>], (parent, object): (&P, &T)) -> (Value, Facts) {
    let shown = columns.iter().filter(|column| column.1 & SHOW != 0);
    (
        json!(object),
        shown.map(|column| (column.0, (column.2)(parent, object))).collect(),
    )
}

/// Shows details of the objects of this name.
pub(super) fn show(client: &mut Client, of: Of, name: &str, json: bool) -> Result<(), Failure> {
    let all = All::of(client)?;
    let mut found: Vec<(Value, Facts)> = Vec::new();
    if of == Of::Any {
        for (mapping, device) in all.mapped(name) {
            let (mut value, facts) = details(DEVICE, (mapping, device));
            value["session"] = json!(mapping.session);
            found.push((value, facts));
        }
        let open = all.open.iter().filter(|d| d.name == name);
        found.extend(open.map(|d| details(OPEN_DEVICE, (&all, d))));
    }
    if of != Of::Path {
        let mappings = all.mappings.iter().filter(|m| m.session == name);
        found.extend(mappings.map(|m| details(SESSION, (&all, m))));
        let sessions = all.sessions.iter().filter(|s| s.name == name);
        found.extend(sessions.map(|s| details(CLIENT_SESSION, (&all, s))));
    }
    if of != Of::Session {
        found.extend(all.paths(None, name).into_iter().map(|path| details(PATH, path)));
        let paths = all.client_paths(None, name).into_iter();
        found.extend(paths.map(|path| details(CLIENT_PATH, path)));
    }
    if found.is_empty() {
        let names: Vec<_> = all.session_names().into_iter().collect();
        let text = format!("there is no {name:?} (sessions: {})", names.join(", "));
        return Err(Failure::failed(text));
    }
    let mut printer = Printer::default();
    for (value, facts) in found {
        match json {
            true => output::json(&value)?,
            false => {
                printer.next()?;
                table::facts(&facts)?;
            }
        }
    }
    Ok(())
}
