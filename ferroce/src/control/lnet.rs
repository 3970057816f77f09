//! LNet nodes of this process: their listing, and metrics.

use std::{collections::BTreeMap, sync::Arc};

use lnet_host::{ConnectionInfo, LnetNode, NodeStats, Rejects};
use rnbd_host::{
    LoopStats,
    control::{LnetConnection, LnetNode as Listing},
};

use super::text::{Labels, Metric, Metrics};

/// Lists the nodes; those that end in between are missing.
pub(super) fn listings(nodes: &[Arc<LnetNode>]) -> Vec<Listing> {
    let listing = |node: &Arc<LnetNode>| {
        let stats = node.stats().ok()?;
        let connections = stats.connections.iter().map(connection);
        let by_reason = |rejects: &Rejects| rejects.iter().map(|(why, count)| (why.to_owned(), count)).collect();
        Some(Listing {
            nid: node.nid().to_string(),
            connections: connections.collect(),
            counters: counters(&stats).map(|(name, value)| (name.to_owned(), value)).collect(),
            rejects_sent: by_reason(&stats.counters.rejects_sent),
            rejects_received: by_reason(&stats.counters.rejects_received),
        })
    };
    nodes.iter().filter_map(listing).collect()
}

fn connection(info: &ConnectionInfo) -> LnetConnection {
    let credits = info.credits;
    LnetConnection {
        peer: info.peer.to_string(),
        established: info.is_established,
        queue_depth: info.negotiated.depth,
        fragments: info.negotiated.frags,
        credits: credits.available,
        peer_credits: credits.theirs,
        outstanding: credits.outstanding,
        queued: info.queued,
        in_flight: info.in_flight,
        transfers: info.asked + info.promised,
    }
}

/// Counters by name, those of lnet_selftest included.
pub(crate) fn counters(stats: &NodeStats) -> impl Iterator<Item = (&'static str, u64)> + use<> {
    let rpc = stats.selftest.map(|rpc| {
        [
            ("rpc_errors", rpc.errors.into()),
            ("rpc_sent", rpc.sent.into()),
            ("rpc_received", rpc.received.into()),
            ("rpc_dropped", rpc.dropped.into()),
            ("rpc_expired", rpc.expired.into()),
            ("rpc_bulk_get_bytes", rpc.bulk_get),
            ("rpc_bulk_put_bytes", rpc.bulk_put),
        ]
    });
    stats.counters.named().into_iter().chain(rpc.into_iter().flatten())
}

/// Numbers of all established connections to a peer.
#[derive(Default)]
struct Peer {
    connections: u64,
    credits: u64,
    queued: u64,
    in_flight: u64,
}

const PEER_GAUGES: &[Metric<Peer>] = &[
    ("connections", "Established LNet connections to a peer.", |p| {
        p.connections
    }),
    ("credits", "Messages that may be sent to it now.", |p| p.credits),
    ("queued", "Messages to it that wait for credits.", |p| p.queued),
    ("in_flight", "Messages on their way to it.", |p| p.in_flight),
];
const NODE_GAUGES: &[Metric<NodeStats>] = &[
    ("connections", "LNet connections, established or not.", |s| {
        s.connections.len() as u64
    }),
    ("peers", "Peers with an established LNet connection.", |s| {
        peers(s).len() as u64
    }),
];

/// Established connections by peer. Others are not shown by peer: anybody can begin one in the name of any.
fn peers(stats: &NodeStats) -> BTreeMap<String, Peer> {
    let mut peers: BTreeMap<String, Peer> = BTreeMap::new();
    for info in stats.connections.iter().filter(|info| info.is_established) {
        let peer = peers.entry(info.peer.to_string()).or_default();
        peer.connections += 1;
        peer.credits += u64::from(info.credits.available);
        peer.queued += info.queued as u64;
        peer.in_flight += info.in_flight as u64;
    }
    peers
}

/// Writes the metrics of all nodes, and returns the statistics of their loops.
pub(super) fn metrics(out: &mut Metrics, nodes: &[Arc<LnetNode>]) -> Vec<LoopStats> {
    let stats = nodes.iter().filter_map(|node| Some((node.nid(), node.stats().ok()?)));
    let all: Vec<_> = stats.collect();
    let of = |nid: &lnet_host::Nid| -> Labels { vec![("nid", nid.to_string())] };
    let labelled: Vec<_> = all.iter().map(|(nid, stats)| (of(nid), stats)).collect();
    if all.is_empty() {
        return Vec::new();
    }
    out.all(("lnet", "gauge"), NODE_GAUGES, &labelled);
    let peers: Vec<_> = all.iter().map(|(nid, stats)| (of(nid), peers(stats))).collect();
    let by_peer = peers.iter().flat_map(|(labels, peers)| {
        let labels = |name: &String| [&labels[..], &[("peer", name.clone())]].concat();
        peers.iter().map(move |(name, peer)| (labels(name), peer))
    });
    out.all(("lnet_peer", "gauge"), PEER_GAUGES, &by_peer.collect::<Vec<_>>());
    let named: BTreeMap<&str, Vec<(&Labels, u64)>> =
        labelled.iter().fold(BTreeMap::new(), |mut all, (labels, stats)| {
            counters(stats).for_each(|(name, value)| all.entry(name).or_default().push((labels, value)));
            all
        });
    for (name, values) in named.iter().filter(|(name, _)| !name.starts_with("rejects_")) {
        let help = "Counter of an LNet node, which `ferroce stat` has, too.";
        out.begin(&format!("ferroce_lnet_{name}_total"), help, "counter");
        values.iter().for_each(|(labels, value)| out.value(labels, value));
    }
    let rejects = |stats: &NodeStats| [stats.counters.rejects_sent, stats.counters.rejects_received];
    for (way, (name, help)) in [
        ("sent", "Connect requests of peers that were refused."),
        ("received", "Connect requests that peers have refused."),
    ]
    .into_iter()
    .enumerate()
    {
        out.begin(&format!("ferroce_lnet_rejects_{name}_total"), help, "counter");
        for (labels, stats) in &labelled {
            for (why, count) in rejects(stats)[way].iter() {
                out.value(&[&labels[..], &[("reason", why.to_owned())]].concat(), count);
            }
        }
    }
    all.into_iter().map(|(_, stats)| stats.turns).collect()
}
