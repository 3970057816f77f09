//! What the devices of a host of a test send and receive.

use std::net::SocketAddr;

use roce_port::fabric::Several;
use roce_port::{RxMeta, TxBatch};
use roce_verbs::Instant;

/// When a port wants to be called.
pub(crate) fn poll_timeout(ports: &mut Several) -> Option<Instant> {
    ports.all().filter_map(|port| port.poll_timeout()).min()
}

/// Runs what is due.
pub(crate) fn timers(ports: &mut Several, now: Instant) {
    for port in ports.all() {
        if port.poll_timeout().is_some_and(|at| at <= now) {
            port.handle_timeout(now);
        }
    }
}

/// A packet has come.
pub(crate) fn receive(ports: &mut Several, now: Instant, meta: &RxMeta, bytes: &[u8]) {
    let port = ports.at(meta.local);
    let port = port.unwrap_or_else(|| panic!("{} is nobody's", meta.local));
    port.handle_datagram(now, meta, bytes);
}

/// Everything that there is to send: `sent` gets it as the other side sees it.
pub(crate) fn drain(ports: &mut Several, now: Instant, batch: &mut TxBatch, mut sent: impl FnMut(&RxMeta, &[u8])) {
    for port in ports.all() {
        loop {
            let more = port.poll_transmit(now, batch);
            for train in batch.trains() {
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                sent(&meta, train.bytes);
            }
            batch.clear();
            if !more {
                break;
            }
        }
    }
}
