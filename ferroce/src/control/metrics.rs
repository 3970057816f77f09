//! Statistics in Prometheus's text format.

use std::fmt::{Display, Write};

use rnbd::client::state::DeviceState;
use rnbd_admin::{Host, Server};
use rnbd_host::{
    LoopStats,
    control::{
        map::{MapAnswer, MapListing, MapRequest},
        serve::{ServeAnswer, ServeRequest},
    },
};
use rtrs::client::state::PathState;
use serde_json::Value;

use super::registry::ServiceRegistry;
use crate::transport::stats_json;

/// The metrics of all mappings and servers, but for those that end in between.
pub(super) fn text(services: &ServiceRegistry) -> String {
    let mut out = Metrics::default();
    out.gauge("ferroce_info", "What this is.");
    out.value(&[("version", &env!("CARGO_PKG_VERSION"))], 1);
    let clients = services.clients();
    let listings: Vec<MapListing> = clients.iter().filter_map(|c| c.listing().ok()).collect();
    if !listings.is_empty() {
        sessions(&mut out, &listings);
        paths(&mut out, &listings);
        devices(&mut out, &listings);
    }
    let mut loops = Vec::new();
    for client in &clients {
        if let Ok(MapAnswer::Stats(stats)) = client.ask(MapRequest::Stats) {
            loops.push(stats.turns);
        }
    }
    for server in services.servers() {
        served(&mut out, &*server, &mut loops);
    }
    packets(&mut out, &loops);
    out.0
}

/// The text so far.
#[derive(Default)]
struct Metrics(String, String);

impl Metrics {
    fn counter(&mut self, name: &str, help: &str) {
        self.begin(name, help, "counter");
    }

    fn gauge(&mut self, name: &str, help: &str) {
        self.begin(name, help, "gauge");
    }

    fn begin(&mut self, name: &str, help: &str, kind: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        name.clone_into(&mut self.1);
    }

    /// A value of the metric that was begun last.
    fn value(&mut self, labels: &[(&str, &dyn Display)], value: impl Display) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(&value.to_string())))
            .collect();
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "{} {value}", self.1),
            false => writeln!(self.0, "{}{{{}}} {value}", self.1, labels.join(",")),
        };
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn sessions(out: &mut Metrics, listings: &[MapListing]) {
    out.gauge(
        "ferroce_session_paths",
        "Paths of a mapping's session, by whether they are up.",
    );
    for listing in listings {
        let up = listing.paths.iter().filter(|p| p.state == PathState::Connected).count();
        for (state, number) in [("up", up), ("down", listing.paths.len() - up)] {
            out.value(&[("session", &listing.session), ("state", &state)], number);
        }
    }
}

fn paths(out: &mut Metrics, listings: &[MapListing]) {
    type Get = fn(&rtrs::client::PathStatus) -> u64;
    let counters: [(&str, &str, Get); 8] = [
        ("reads", "Read requests sent by a path.", |p| p.stats.rdma.reads),
        ("read_bytes", "Bytes that they asked for.", |p| p.stats.rdma.read_bytes),
        ("writes", "Write and other requests sent by a path.", |p| {
            p.stats.rdma.writes
        }),
        ("write_bytes", "Bytes that they brought.", |p| p.stats.rdma.write_bytes),
        ("failovers", "Requests taken over from paths that were lost.", |p| {
            p.stats.failovers
        }),
        ("reconnects", "Times that a path came back.", |p| {
            p.stats.reconnects.max(0).unsigned_abs().into()
        }),
        (
            "failed_reconnects",
            "Attempts to connect a path again that failed.",
            |p| p.stats.failed_reconnects.into(),
        ),
        ("cpu_migrations", "Answers taken on another processor.", |p| {
            p.stats.cpu_migration.to.iter().sum()
        }),
    ];
    let gauges: [(&str, &str, Get); 2] = [
        ("up", "Whether a path carries requests.", |p| {
            u64::from(p.state == PathState::Connected)
        }),
        ("in_flight", "Requests in flight on a path.", |p| p.in_flight.into()),
    ];
    let each = |out: &mut Metrics, get: Get| {
        for (listing, path) in listings.iter().flat_map(|l| l.paths.iter().map(move |p| (l, p))) {
            let labels: [(&str, &dyn Display); 3] = [
                ("session", &listing.session),
                ("path", &path.addr),
                ("port", &path.addr.dst.port()),
            ];
            out.value(&labels, get(path));
        }
    };
    for (name, help, get) in counters {
        out.counter(&format!("ferroce_path_{name}_total"), help);
        each(out, get);
    }
    for (name, help, get) in gauges {
        out.gauge(&format!("ferroce_path_{name}"), help);
        each(out, get);
    }
    out.gauge("ferroce_path_latency_seconds", "Round trip of the last heartbeat.");
    for (listing, path) in listings.iter().flat_map(|l| l.paths.iter().map(move |p| (l, p))) {
        if let Some(latency) = path.latency {
            let port = path.addr.dst.port();
            let labels: [(&str, &dyn Display); 3] =
                [("session", &listing.session), ("path", &path.addr), ("port", &port)];
            out.value(&labels, latency.as_secs_f64());
        }
    }
}

fn devices(out: &mut Metrics, listings: &[MapListing]) {
    type Get = fn(&rnbd_host::control::map::MappedDevice) -> u64;
    let counters: [(&str, &str, Get); 8] = [
        ("requests", "Requests answered.", |d| d.counters.completed),
        ("failed", "Of these, with an error.", |d| d.counters.failed),
        ("reads", "Reads done.", |d| d.counters.reads),
        ("read_bytes", "Bytes read.", |d| d.counters.read_bytes),
        ("writes", "Writes done.", |d| d.counters.writes),
        ("written_bytes", "Bytes written.", |d| d.counters.written_bytes),
        ("repeated", "Requests that had to be sent again.", |d| {
            d.counters.repeated
        }),
        (
            "writes_lost",
            "Acknowledged writes that the server may have lost.",
            |d| d.counters.lost,
        ),
    ];
    let gauges: [(&str, &str, Get); 4] = [
        ("up", "Whether the server has the device open.", |d| {
            u64::from(d.state == Some(DeviceState::Mapped))
        }),
        ("size_bytes", "Size.", |d| d.geometry.map_or(0, |g| g.size)),
        ("waiting", "Requests that wait for a path or for the server.", |d| {
            d.waiting as u64
        }),
        ("nbd_clients", "NBD clients that have chosen it.", |d| d.clients as u64),
    ];
    let each = |out: &mut Metrics, get: Get| {
        for (listing, device) in listings.iter().flat_map(|l| l.devices.iter().map(move |d| (l, d))) {
            out.value(&[("session", &listing.session), ("device", &device.name)], get(device));
        }
    };
    for (name, help, get) in counters {
        out.counter(&format!("ferroce_device_{name}_total"), help);
        each(out, get);
    }
    for (name, help, get) in gauges {
        out.gauge(&format!("ferroce_device_{name}"), help);
        each(out, get);
    }
}

fn served(out: &mut Metrics, server: &dyn Server, loops: &mut Vec<LoopStats>) {
    let stats = match server.ask(ServeRequest::Stats) {
        Ok(ServeAnswer::Stats(stats)) => stats,
        _ => return,
    };
    let c = &stats.rnbd;
    let counters = [
        ("opens", "Devices opened.", c.opens),
        ("opens_refused", "Open requests refused.", c.refused),
        (
            "opens_refused_limit",
            "Of these, for the number of open devices.",
            c.refused_limit,
        ),
        ("requests", "Block requests answered.", c.requests),
        ("failed", "Of these, with an error.", c.failed),
        ("read_bytes", "Bytes read.", c.read_bytes),
        ("written_bytes", "Bytes written.", c.written_bytes),
        ("malformed", "Messages that were malformed or unexpected.", c.malformed),
    ];
    for (name, help, value) in counters {
        out.counter(&format!("ferroce_server_{name}_total"), help);
        out.value(&[], value);
    }
    out.gauge("ferroce_server_open_devices", "Devices open now.");
    out.value(&[], c.open);
    out.gauge("ferroce_server_sessions", "Sessions open now.");
    out.value(&[], stats.sessions.iter().sum::<usize>());
    out.counter(
        "ferroce_server_rtrs_total",
        "What has happened to sessions and connections.",
    );
    for (name, value) in &stats.rtrs {
        out.value(&[("event", name)], value);
    }
    served_paths(out, server);
    loops.push(stats.turns);
}

fn served_paths(out: &mut Metrics, server: &dyn Server) {
    type Get = fn(&rtrs::server::listing::PathListing) -> u64;
    let counters: [(&str, &str, Get); 4] = [
        ("reads", "Read requests that came by a path.", |p| p.rdma.reads),
        ("read_bytes", "Bytes that they asked for.", |p| p.rdma.read_bytes),
        ("writes", "Write and other requests that came by a path.", |p| {
            p.rdma.writes
        }),
        ("write_bytes", "Bytes that they brought.", |p| p.rdma.write_bytes),
    ];
    let sessions = server.sessions().unwrap_or_default();
    for (name, help, get) in counters {
        out.counter(&format!("ferroce_server_path_{name}_total"), help);
        for session in &sessions {
            for path in &session.paths {
                let labels: [(&str, &dyn Display); 4] = [
                    ("session", &session.name),
                    ("path", &path.path.value()),
                    ("client", &path.client.ip().to_canonical()),
                    ("server", &path.server.to_canonical()),
                ];
                out.value(&labels, get(path));
            }
        }
    }
}

/// The counters of our addresses, under the names that `--json` has.
fn packets(out: &mut Metrics, loops: &[LoopStats]) {
    let mut all = LoopStats::default();
    loops.iter().for_each(|stats| all.add(stats));
    let shown: Vec<_> = all
        .devices
        .iter()
        .map(|(addr, stats)| (addr, stats_json(stats)))
        .collect();
    let Some((_, first)) = shown.first() else { return };
    let Some(Value::Object(names)) = first.get("counters") else {
        return;
    };
    for name in names.keys() {
        let metric: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        out.counter(
            &format!("ferroce_roce_{metric}_total"),
            "A counter of the RoCE port at an address of ours.",
        );
        for (addr, counters) in &shown {
            out.value(&[("address", addr)], &counters["counters"][name]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_can_have_any_name_in_them() {
        let mut out = Metrics::default();
        out.gauge("a", "B.");
        out.value(&[("name", &"x\"y\\z\n")], 1);
        out.value(&[], 0.5);
        assert_eq!(
            out.0,
            "# HELP a B.\n# TYPE a gauge\na{name=\"x\\\"y\\\\z\\n\"} 1\na 0.5\n"
        );
    }
}
