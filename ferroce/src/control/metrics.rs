//! Metrics of all that runs in this process.

use std::sync::Arc;

use rds_node::{ConnectionInfo, NodeControl, NodeStats};
use rnbd::client::state::DeviceState;
use rnbd_admin::{Host, Server};
use rnbd_host::{
    LoopStats,
    control::{MapAnswer, MapListing, MapRequest, MappedDevice, MappedPath, ServeAnswer, ServeRequest},
    serve::ServeStats,
};
use rtrs::{
    client::state::PathState,
    server::listing::{PathListing, SessionListing},
};

use super::{
    lnet,
    registry::ServiceRegistry,
    text::{Labels, Metric, Metrics},
};
use crate::event::counters;

/// Returns the metrics of all mappings, servers, RDS nodes and LNet nodes; those that end in between are missing.
pub(super) fn text(services: &ServiceRegistry) -> String {
    let mut out = Metrics::default();
    out.begin("ferroce_info", "Version of the program.", "gauge");
    out.value(&[("version", env!("CARGO_PKG_VERSION").to_owned())], 1);
    let clients = services.clients();
    let listings: Vec<MapListing> = clients.iter().filter_map(|c| c.listing().ok()).collect();
    if !listings.is_empty() {
        sessions(&mut out, &listings);
        paths(&mut out, &listings);
        devices(&mut out, &listings);
    }
    let mut loops = Vec::new();
    for client in &clients {
        if let Ok(MapAnswer::Stats(stats)) = client.ask(MapRequest::Stats {}) {
            loops.push(stats.turns);
        }
    }
    loops.extend(servers(&mut out, &services.servers()));
    loops.extend(nodes(&mut out, &services.nodes()));
    loops.extend(lnet::metrics(&mut out, &services.lnet_nodes()));
    packets(&mut out, &loops);
    out.into_text()
}

fn sessions(out: &mut Metrics, listings: &[MapListing]) {
    out.begin(
        "ferroce_session_paths",
        "Paths of a mapping's session, by whether they are up.",
        "gauge",
    );
    for listing in listings {
        let up = listing.paths.iter().filter(|p| p.state == PathState::Connected).count();
        for (state, number) in [("up", up), ("down", listing.paths.len() - up)] {
            let labels = [("session", listing.session.clone()), ("state", state.to_owned())];
            out.value(&labels, number);
        }
    }
}

const PATH_COUNTERS: &[Metric<MappedPath>] = &[
    ("reads", "Read requests sent by a path.", |p| p.stats.rdma.reads),
    ("read_bytes", "Bytes that they requested.", |p| p.stats.rdma.read_bytes),
    ("writes", "Write and other requests sent by a path.", |p| {
        p.stats.rdma.writes
    }),
    ("write_bytes", "Bytes that they sent.", |p| p.stats.rdma.write_bytes),
    ("failovers", "Requests taken over from lost paths.", |p| {
        p.stats.failovers
    }),
    ("reconnects", "Reconnects of a path.", |p| {
        p.stats.reconnects.max(0).unsigned_abs().into()
    }),
    ("failed_reconnects", "Failed attempts to reconnect.", |p| {
        p.stats.failed_reconnects.into()
    }),
    ("cpu_migrations", "Answers received on another processor.", |p| {
        p.stats.cpu_migration.to.iter().sum()
    }),
];
const PATH_GAUGES: &[Metric<MappedPath>] = &[
    ("up", "Whether a path carries requests.", |p| {
        u64::from(p.state == PathState::Connected)
    }),
    ("in_flight", "Requests in flight on a path.", |p| p.in_flight.into()),
];

fn paths(out: &mut Metrics, listings: &[MapListing]) {
    let of = |listing: &MapListing, path: &MappedPath| -> Labels {
        vec![
            ("session", listing.session.clone()),
            ("path", path.addr.to_string()),
            ("port", path.addr.dst.port().to_string()),
        ]
    };
    let all = listings.iter().flat_map(|l| l.paths.iter().map(move |p| (of(l, p), p)));
    let all: Vec<_> = all.collect();
    out.all(("path", "counter"), PATH_COUNTERS, &all);
    out.all(("path", "gauge"), PATH_GAUGES, &all);
    out.begin(
        "ferroce_path_latency_seconds",
        "Round trip of the last heartbeat.",
        "gauge",
    );
    for (labels, path) in all {
        if let Some(latency) = path.latency {
            out.value(&labels, latency.as_secs_f64());
        }
    }
}

const DEVICE_COUNTERS: &[Metric<MappedDevice>] = &[
    ("requests", "Requests answered.", |d| d.counters.completed),
    ("failed", "Requests answered with an error.", |d| d.counters.failed),
    ("reads", "Reads done.", |d| d.counters.reads),
    ("read_bytes", "Bytes read.", |d| d.counters.read_bytes),
    ("writes", "Writes done.", |d| d.counters.writes),
    ("written_bytes", "Bytes written.", |d| d.counters.written_bytes),
    ("repeated", "Requests sent again.", |d| d.counters.repeated),
    (
        "writes_lost",
        "Acknowledged writes that the server may have lost.",
        |d| d.counters.lost,
    ),
];
const DEVICE_GAUGES: &[Metric<MappedDevice>] = &[
    ("up", "Whether the server has the device open.", |d| {
        u64::from(d.state == DeviceState::Mapped)
    }),
    ("size_bytes", "Size.", |d| d.bytes.unwrap_or(0)),
    ("waiting", "Requests that wait for a path or for the server.", |d| {
        d.waiting as u64
    }),
    ("nbd_clients", "NBD clients that have chosen it.", |d| d.clients as u64),
];

fn devices(out: &mut Metrics, listings: &[MapListing]) {
    let of = |listing: &MapListing, device: &MappedDevice| -> Labels {
        vec![("session", listing.session.clone()), ("device", device.name.clone())]
    };
    let all = listings
        .iter()
        .flat_map(|l| l.devices.iter().map(move |d| (of(l, d), d)));
    let all: Vec<_> = all.collect();
    out.all(("device", "counter"), DEVICE_COUNTERS, &all);
    out.all(("device", "gauge"), DEVICE_GAUGES, &all);
}

const SERVER_COUNTERS: &[Metric<ServeStats>] = &[
    ("opens", "Devices opened.", |s| s.rnbd.opens),
    ("opens_refused", "Open requests refused.", |s| s.rnbd.refused),
    (
        "opens_refused_limit",
        "Open requests refused for the number of open devices.",
        |s| s.rnbd.refused_limit,
    ),
    ("requests", "Block requests answered.", |s| s.rnbd.requests),
    ("failed", "Block requests answered with an error.", |s| s.rnbd.failed),
    ("read_bytes", "Bytes read.", |s| s.rnbd.read_bytes),
    ("written_bytes", "Bytes written.", |s| s.rnbd.written_bytes),
    ("malformed", "Malformed or unexpected messages.", |s| s.rnbd.malformed),
];
const SERVER_GAUGES: &[Metric<ServeStats>] = &[
    ("open_devices", "Open devices.", |s| s.rnbd.open),
    ("sessions", "Open sessions.", |s| {
        s.sessions.iter().sum::<usize>() as u64
    }),
];
const SERVER_PATH_COUNTERS: &[Metric<PathListing>] = &[
    ("reads", "Read requests received by a path.", |p| p.rdma.reads),
    ("read_bytes", "Bytes that they requested.", |p| p.rdma.read_bytes),
    ("writes", "Write and other requests received by a path.", |p| {
        p.rdma.writes
    }),
    ("write_bytes", "Bytes that they sent.", |p| p.rdma.write_bytes),
];

/// Writes the metrics of all servers, and returns the statistics of their loops. Several servers have a label each.
fn servers(out: &mut Metrics, servers: &[Arc<dyn Server>]) -> Vec<LoopStats> {
    let labels = |place: usize| match servers.len() {
        1 => Labels::new(),
        _ => vec![("place", place.to_string())],
    };
    let mut all = Vec::new();
    let mut sessions = Vec::new();
    for (place, server) in servers.iter().enumerate() {
        if let Ok(ServeAnswer::Stats(stats)) = server.ask(ServeRequest::Stats {}) {
            all.push((labels(place), stats));
            sessions.extend(
                server
                    .sessions()
                    .unwrap_or_default()
                    .into_iter()
                    .map(|s| (labels(place), s)),
            );
        }
    }
    if all.is_empty() {
        return Vec::new();
    }
    let stats: Vec<_> = all.iter().map(|(labels, stats)| (labels.clone(), &**stats)).collect();
    out.all(("server", "counter"), SERVER_COUNTERS, &stats);
    out.all(("server", "gauge"), SERVER_GAUGES, &stats);
    out.begin(
        "ferroce_server_rtrs_total",
        "Events of sessions and connections.",
        "counter",
    );
    for (labels, stats) in stats {
        for (name, value) in &stats.rtrs {
            out.value(&[&labels[..], &[("event", (*name).to_owned())]].concat(), value);
        }
    }
    let of = |labels: &Labels, session: &SessionListing, path: &PathListing| -> Labels {
        let own = [
            ("session", session.name.clone()),
            ("path", path.path.value().to_string()),
            ("client", path.client.ip().to_canonical().to_string()),
            ("server", path.server.to_canonical().to_string()),
        ];
        [&labels[..], &own].concat()
    };
    let paths = sessions.iter();
    let paths = paths.flat_map(|(labels, s)| s.paths.iter().map(move |p| (of(labels, s, p), p)));
    out.all(
        ("server_path", "counter"),
        SERVER_PATH_COUNTERS,
        &paths.collect::<Vec<_>>(),
    );
    all.into_iter().map(|(_, stats)| stats.turns).collect()
}

const NODE_GAUGES: &[Metric<NodeStats>] = &[
    ("sockets", "RDS sockets of programs.", |s| s.sockets as u64),
    (
        "unread_bytes",
        "Bytes of messages that RDS sockets have not read.",
        |s| s.unread as u64,
    ),
];
const CONNECTION_GAUGES: &[Metric<ConnectionInfo>] = &[
    ("up", "Whether an RDS connection is up.", |c| u64::from(c.is_up)),
    ("waiting", "Messages that wait to be sent.", |c| c.waiting as u64),
    ("unacknowledged", "Messages that the peer has not acknowledged.", |c| {
        c.unacked as u64
    }),
];

/// Writes the metrics of all RDS nodes, and returns the statistics of their loops. Several nodes have a label each.
fn nodes(out: &mut Metrics, nodes: &[Arc<NodeControl>]) -> Vec<LoopStats> {
    let all: Vec<_> = nodes.iter().filter_map(|node| node.stats()).collect();
    if all.is_empty() {
        return Vec::new();
    }
    let labels = |place: usize| match all.len() {
        1 => Labels::new(),
        _ => vec![("place", place.to_string())],
    };
    let stats: Vec<_> = all
        .iter()
        .enumerate()
        .map(|(place, stats)| (labels(place), stats))
        .collect();
    out.all(("rds", "gauge"), NODE_GAUGES, &stats);
    let of = |labels: &Labels, c: &ConnectionInfo| -> Labels {
        let own = [
            ("local", c.key.local.to_string()),
            ("remote", c.key.remote.to_string()),
            ("tos", c.key.tos.to_string()),
        ];
        [&labels[..], &own].concat()
    };
    let connections = stats.iter();
    let connections = connections.flat_map(|(labels, s)| s.connections.iter().map(move |c| (of(labels, c), c)));
    let connections: Vec<_> = connections.collect();
    out.all(("rds_connection", "gauge"), CONNECTION_GAUGES, &connections);
    let names = all[0].named().map(|(name, _)| name);
    for (index, name) in names.enumerate() {
        let help = "Counter of RDS, which `ferroce rds info -c` has, too.";
        out.begin(&format!("ferroce_rds_{name}_total"), help, "counter");
        for (labels, stats) in &stats {
            if let Some((_, value)) = stats.named().nth(index) {
                out.value(labels, value);
            }
        }
    }
    all.into_iter().map(|stats| stats.turns).collect()
}

/// Writes the counters of our addresses, under the names of `--json`.
fn packets(out: &mut Metrics, loops: &[LoopStats]) {
    let mut all = LoopStats::default();
    loops.iter().for_each(|stats| all.add(stats));
    let shown: Vec<_> = all
        .devices
        .iter()
        .map(|(addr, stats)| (addr, counters(stats)))
        .collect();
    let Some((_, first)) = shown.first() else { return };
    for name in first.keys() {
        let metric: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        out.begin(
            &format!("ferroce_roce_{metric}_total"),
            "Counter of the RoCE port of an address of this process.",
            "counter",
        );
        for (addr, counters) in &shown {
            out.value(&[("address", addr.to_string())], counters[name]);
        }
    }
}

#[cfg(test)]
mod tests {
    use rnbd_admin::Parameters;
    use rnbd_host::control::Refused;

    use super::*;

    /// A server without sessions.
    struct Idle;

    impl Server for Idle {
        fn ask(&self, request: ServeRequest) -> Result<ServeAnswer, Refused> {
            Ok(match request {
                ServeRequest::Stats {} => ServeAnswer::Stats(Box::default()),
                ServeRequest::Sessions => ServeAnswer::Sessions(Vec::new()),
                _ => ServeAnswer::Done,
            })
        }

        fn parameters(&self) -> Parameters {
            unimplemented!("not a metric")
        }
    }

    #[test]
    fn each_metric_of_several_servers_is_described_once() {
        let services = Arc::new(ServiceRegistry::default());
        let _servers = [services.add_server(Idle), services.add_server(Idle)];
        let text = text(&services);
        let name = "ferroce_server_opens_total";
        assert_eq!(text.matches(&format!("# TYPE {name} ")).count(), 1, "{text}");
        for place in 0..2 {
            assert!(text.contains(&format!("{name}{{place=\"{place}\"}} 0\n")), "{text}");
        }
    }
}
