//! Names, addresses and limits of a run.

use std::time::Duration;

use lnet::{Config, proto::Nid, selftest::proto::destinations_to_bytes};

use crate::input::Input;

pub(super) const NODE: [u8; 4] = [192, 0, 2, 1];
/// The node's incarnation.
pub(super) const STAMP: u64 = 0x6_4000;
pub(super) const PEERS: usize = 4;
pub(super) const CREDITS: u16 = 4;
pub(super) const MAX_QUEUED: usize = 24;
pub(super) const MAX_PEERS: usize = 3;
/// Connections of a peer.
pub(super) const MAX_CONNECTIONS: usize = 2;
/// Portals of the node's programs.
pub(super) const PORTAL: u32 = 9;
/// Connections of the connection manager in a run.
pub(super) const MAX_LINKS: usize = 32;

pub(super) fn config() -> Config {
    Config {
        peer_credits: CREDITS,
        high_water: 2,
        max_queued: MAX_QUEUED,
        max_peers: MAX_PEERS,
        max_connections: MAX_CONNECTIONS,
        timeout: Duration::from_secs(20),
        keepalive: Some(Duration::from_secs(30)),
        ..Config::default()
    }
}

pub(super) fn peer(index: usize) -> Nid {
    Nid::o2ib([10, 0, 0, index as u8 + 1].into())
}

pub(super) fn node() -> (Nid, u64) {
    (Nid::o2ib(NODE.into()), STAMP)
}

/// Length by its class: some fit into a message, some don't.
pub(super) fn length(input: &mut Input<'_>) -> u32 {
    match input.byte() {
        small @ 0..128 => small.into(),
        large @ 128..192 => 3976 - 32 + u32::from(large & 63),
        large => (u32::from(large) & 63) << 8,
    }
}

/// Data of a transfer: nodes for a test of lnet_selftest to test.
pub(super) fn nodes(len: usize) -> Vec<u8> {
    let all: Vec<Nid> = (0..PEERS).map(peer).collect();
    destinations_to_bytes(&all).into_iter().cycle().take(len).collect()
}
