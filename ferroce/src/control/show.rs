//! Listings and counters as JSON.

use rnbd::{client::OnLoss, server::listing::DeviceListing};
use rnbd_admin::state_name;
use rnbd_host::{
    LoopStats,
    control::map::{MapListing, MappedDevice},
};
use rtrs::{
    client::{PathStatus, SessionConfig, state::PathState},
    server::{
        listing::{PathListing, SessionListing},
        state::PathState as ServedState,
    },
};
use serde_json::{Value, json};

pub(super) fn mapping(listing: &MapListing) -> Value {
    json!({
        "session": listing.session,
        "port": listing.port,
        "queue_depth": listing.info.map(|info| info.session_depth),
        "max_io_bytes": listing.info.map(|info| info.max_io_size),
        "new_rkeys": listing.info.map(|info| info.new_rkeys),
        "policy": listing.policy.name(),
        "max_reconnects": match listing.max_reconnects {
            SessionConfig::FOREVER => -1,
            attempts => i64::from(attempts),
        },
        "reconnect_delay": listing.reconnect_delay.as_secs_f64(),
        "paths": listing.paths.iter().map(path).collect::<Vec<_>>(),
        "devices": listing.devices.iter().map(device).collect::<Vec<_>>(),
    })
}

fn device(device: &MappedDevice) -> Value {
    let geometry = device.geometry;
    json!({
        "name": device.name,
        "mode": device.mode.to_string(),
        "state": state_name(device.state),
        "bytes": geometry.map(|g| g.size),
        "block_size": geometry.map(|g| g.logical_block_size),
        "read_only": geometry.map(|g| g.read_only),
        "on_loss": match device.on_loss {
            OnLoss::Error => "error".to_owned(),
            OnLoss::Queue(None) => "queue".to_owned(),
            OnLoss::Queue(Some(time)) => format!("queue={}", time.as_secs_f64()),
        },
        "completed": device.counters.completed,
        "failed": device.counters.failed,
        "reads": device.counters.reads,
        "read_bytes": device.counters.read_bytes,
        "writes": device.counters.writes,
        "written_bytes": device.counters.written_bytes,
        "repeated": device.counters.repeated,
        "lost": device.counters.lost,
        "waiting": device.waiting,
        "clients": device.clients,
    })
}

fn path(path: &PathStatus) -> Value {
    let (stats, rdma) = (&path.stats, &path.stats.rdma);
    json!({
        "id": path.id.number(),
        "path": path.addr.to_string(),
        "port": path.addr.dst.port(),
        "state": match path.state {
            PathState::Connecting => "connecting",
            PathState::ConnectingErr => "connecting_err",
            PathState::Reconnecting => "reconnecting",
            PathState::Connected => "connected",
            PathState::Closing => "closing",
            PathState::Closed => "closed",
            PathState::Dead => "dead",
        },
        "device": path.hca.as_deref(),
        "keys": path.keys.map(|keys| keys.to_string()),
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

pub(super) fn session(session: &SessionListing) -> Value {
    json!({
        "session": session.session.0,
        "name": session.name,
        "paths": session.paths.iter().map(served_path).collect::<Vec<_>>(),
    })
}

fn served_path(path: &PathListing) -> Value {
    json!({
        "path": path.path.value(),
        "client": path.client.to_string(),
        "server": path.server.to_string(),
        "state": match path.state {
            ServedState::Connecting => "connecting",
            ServedState::Connected => "connected",
            ServedState::Closing => "closing",
            ServedState::Closed => "closed",
        },
        "device": path.hca.as_deref(),
        "keys": path.keys.to_string(),
        "connections": path.connections,
        "made": path.made,
        "requests": path.requests,
        "reads": path.rdma.reads,
        "read_bytes": path.rdma.read_bytes,
        "writes": path.rdma.writes,
        "write_bytes": path.rdma.write_bytes,
    })
}

pub(super) fn open_device(device: &DeviceListing) -> Value {
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

/// Objects that the loops have, and packets.
pub(super) fn loops(stats: &LoopStats) -> Value {
    let (usage, port) = (&stats.usage, stats.device().port);
    json!({
        "pds": usage.pds,
        "mrs": usage.mrs,
        "keys": usage.keys,
        "cqs": usage.cqs,
        "qps": usage.qps,
        "cms": usage.cms,
        "packets_sent": port.tx_packets,
        "packets_received": port.rx_packets,
        "retransmits": stats.device().retransmits(),
    })
}
