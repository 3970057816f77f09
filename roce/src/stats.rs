//! Counters of devices.

use roce_net::DatapathCounters;
use roce_port::PortCounters;
use roce_port::cm::DropReason;
use roce_verbs::Mtu;

use crate::broker::{COUNTERS, Snapshot};

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceStats {
    /// Packets, drops and the transport.
    pub port: PortCounters,
    /// System calls and sockets.
    pub path: DatapathCounters,
}

impl From<(PortCounters, DatapathCounters)> for DeviceStats {
    fn from((port, path): (PortCounters, DatapathCounters)) -> Self {
        Self { port, path }
    }
}

impl DeviceStats {
    /// Adds what another device has counted.
    pub fn add(&mut self, other: &Self) {
        self.port.add(&other.port);
        self.path.add(&other.path);
    }

    /// Adds the counters of devices, shards or engines.
    pub(crate) fn sum(all: impl Iterator<Item = (PortCounters, DatapathCounters)>) -> Self {
        let mut sum = Self::default();
        all.for_each(|counters| sum.add(&counters.into()));
        sum
    }

    /// The hardware counters that rdma_rxe has, by its names and in its order (`rxe_hw_counters.c`); the device's link has gone down
    /// so many times.
    pub(crate) fn hw_counters(&self, link_downed: u64) -> [(&'static str, u64); 15] {
        let (t, path) = (&self.port.transport, &self.path);
        let lost = path.tx_too_long + path.tx_no_buffers + path.tx_unreachable + path.tx_forbidden + path.tx_errors;
        [
            ("sent_pkts", self.port.tx_packets),
            ("rcvd_pkts", self.port.rx_packets),
            ("duplicate_request", t.duplicate_request),
            ("out_of_seq_request", t.out_of_seq_request),
            ("rcvd_rnr_err", t.rcvd_rnr_err),
            ("send_rnr_err", t.send_rnr_err),
            ("rcvd_seq_err", t.rcvd_seq_err),
            ("ack_deferred", t.ack_deferred),
            ("retry_exceeded_err", t.retry_exceeded_err),
            ("retry_rnr_exceeded_err", t.retry_rnr_exceeded_err),
            ("completer_retry_err", t.completer_retry_err),
            ("send_err", t.send_err + lost),
            ("link_downed", link_downed),
            ("rdma_sends", t.rdma_sends),
            ("rdma_recvs", t.rdma_recvs),
        ]
    }

    /// Returns the counters for other processes: the hardware counters, and connect requests that were dropped because a listener's
    /// backlog was full.
    fn published(&self, link_downed: u64) -> impl Iterator<Item = (&'static str, u64)> {
        let full = [DropReason::Backlog, DropReason::BacklogPeer].map(|reason| self.port.cm.dropped(reason));
        let more = [("cm_drop_backlog", full.iter().sum())];
        self.hw_counters(link_downed).into_iter().chain(more)
    }

    /// Returns the status that other processes get, whose counters are known by their places.
    pub(crate) fn snapshot(&self, mtu: Mtu, queue_pairs: usize, link_downed: u64) -> Snapshot {
        let mut counters = [0; COUNTERS.len()];
        for (place, (_, value)) in counters.iter_mut().zip(self.published(link_downed)) {
            *place = value;
        }
        Snapshot {
            mtu: mtu.bytes() as u32,
            queue_pairs: queue_pairs as u64,
            counters,
        }
    }

    /// Packets that were sent more than once.
    pub fn retransmits(&self) -> u64 {
        self.port.tx_retransmissions
    }

    /// Packets dropped because of their ICRC.
    pub fn icrc_errors(&self) -> u64 {
        self.port.icrc_errors + self.port.icrc_implausible
    }
}

#[cfg(all(test, feature = "broker"))]
mod tests {
    use super::*;

    #[test]
    fn published_counters_have_the_places_that_the_broker_names() {
        let names: Vec<_> = DeviceStats::default().published(0).map(|(name, _)| name).collect();
        assert_eq!(names, COUNTERS);
    }
}
