//! Options and statistics of the RoCE device.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use roce::reactor::{ReactorConfig, SpinMode};
use roce::{DeviceConfig, DeviceStats, JoinConfig, LocalDevice, Mtu, Placement, broker::running_broker};
use rtrs::heartbeat::HeartbeatConfig;
use serde_json::{Map, Value};

use crate::{
    fault::{Demanded, FaultArgs},
    output::Failure,
    rdma::RdmaArgs,
    units::{memory, seconds},
};

/// Silent heartbeats that end a path, as in the kernel (`RTRS_HB_MISSED_MAX`).
const MISSED: u32 = 5;

#[derive(Args)]
#[command(next_help_heading = "Transport options")]
pub(crate) struct TransportArgs {
    #[command(flatten)]
    rdma: RdmaArgs,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that the interface carries]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<Mtu>,
    /// Receive buffer of each socket; the system may grant less (net.core.rmem_max) [default: 8M]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    socket_buffer: Option<usize>,
    /// Send one packet per system call (no UDP segmentation offload)
    #[arg(long)]
    no_gso: bool,
    /// Receive one packet per system call (no UDP receive offload)
    #[arg(long)]
    no_gro: bool,
    /// Heartbeat interval. A path fails after five missed heartbeats [default: 1; for `serve` 5, as the kernel's server, so that clients
    /// whose machine is paused for a while (a snapshot, a migration) keep their sessions]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    heartbeat: Option<Duration>,
    /// Longest busy polling before a loop sleeps: microseconds, `auto` (as long as it finds work that way), or `off`
    #[arg(long, value_name = "US|auto|off", default_value = "auto")]
    spin: SpinMode,
    /// Write every packet sent and received, at all addresses, to this capture file. Only its owner may read it; a symbolic link is refused
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    #[command(flatten)]
    fault: FaultArgs,
}

impl TransportArgs {
    fn config(&self, addr: IpAddr, faults: Option<&Demanded>) -> DeviceConfig {
        let usual = DeviceConfig::new(addr);
        DeviceConfig {
            mtu: self.mtu,
            socket_buffer: self.socket_buffer.unwrap_or(usual.socket_buffer),
            gso: !self.no_gso,
            gro: !self.no_gro,
            pcap: self.pcap.clone(),
            faults: faults.map(Demanded::faults),
            ..usual
        }
    }

    /// The capture file.
    pub(crate) fn capture(&self) -> Option<&Path> {
        self.pcap.as_deref()
    }

    /// Faults on demand, which `ferroce fault` knows by this name.
    pub(crate) fn faults(&self, name: &str) -> Result<Option<Demanded>, Failure> {
        self.fault.start(name)
    }

    /// Opens a device at each of these addresses for each of the loops; `placement` says which gets whose connections. Other processes
    /// may have the addresses too, unless `FERROCE_BROKER` is `off`.
    pub(crate) fn open(
        &self,
        addrs: &[IpAddr],
        loops: usize,
        placement: Arc<dyn Placement>,
        faults: Option<&Demanded>,
    ) -> Result<Vec<LocalDevice>, Failure> {
        let soft = |addrs: &[IpAddr]| {
            let configs: Vec<_> = addrs.iter().map(|addr| self.config(*addr, faults)).collect();
            let placement = placement.clone();
            // A process on RDMA devices alone needs no broker: it may get addresses in software later, shared if others share theirs.
            let shared = JoinConfig::from_env().filter(|how| !addrs.is_empty() || running_broker(&how.dir));
            let opened = match shared {
                Some(how) => LocalDevice::open_shared(&configs, loops, placement, &how),
                None => LocalDevice::open_shards(&configs, loops, placement),
            };
            opened.map_err(|e| Failure::failed(e.to_string()))
        };
        self.rdma.open(addrs, soft, loops)
    }

    /// How the loop waits.
    pub(crate) fn reactor(&self) -> ReactorConfig {
        ReactorConfig {
            spin: self.spin,
            ..ReactorConfig::default()
        }
    }

    /// The heartbeats of RTRS, by default one in this time.
    pub(crate) fn heartbeat(&self, usual: Duration) -> HeartbeatConfig {
        HeartbeatConfig {
            interval: self.heartbeat.unwrap_or(usual),
            max_missed: MISSED,
        }
    }
}

/// The numbers of a device that everybody wants.
pub(crate) fn packets_json(stats: &DeviceStats) -> Map<String, Value> {
    let mut json = Map::new();
    json.insert("packets_sent".into(), stats.port.tx_packets.into());
    json.insert("packets_received".into(), stats.port.rx_packets.into());
    json.insert("retransmits".into(), stats.retransmits().into());
    json.insert("icrc_errors".into(), stats.icrc_errors().into());
    json
}

/// The devices' part of a report: the numbers that everybody wants, and all others under `counters`.
pub(crate) fn stats_json(stats: &DeviceStats) -> Map<String, Value> {
    let mut json = packets_json(stats);
    let mut counters = Map::new();
    counters.extend(stats.port.named().map(|(name, n)| (name.to_owned(), n.into())));
    counters.extend(stats.port.cm.named().map(|(name, n)| (name, n.into())));
    for (name, n) in transport_counters(stats).into_iter().chain(path_counters(stats)) {
        counters.insert(name.to_owned(), n.into());
    }
    json.insert("counters".into(), counters.into());
    json
}

const fn transport_counters(stats: &DeviceStats) -> [(&'static str, u64); 18] {
    let qp = &stats.port.transport;
    [
        ("duplicate_request", qp.duplicate_request),
        ("out_of_seq_request", qp.out_of_seq_request),
        ("rcvd_rnr_err", qp.rcvd_rnr_err),
        ("send_rnr_err", qp.send_rnr_err),
        ("rcvd_seq_err", qp.rcvd_seq_err),
        ("ack_deferred", qp.ack_deferred),
        ("retry_exceeded_err", qp.retry_exceeded_err),
        ("retry_rnr_exceeded_err", qp.retry_rnr_exceeded_err),
        ("completer_retry_err", qp.completer_retry_err),
        ("send_err", qp.send_err),
        ("timeouts", qp.timeouts),
        ("tail_probes", qp.tail_probes),
        ("naks_sent", qp.naks_sent),
        ("naks_received", qp.naks_received),
        ("dropped_state", qp.dropped_state),
        ("dropped_responses", qp.dropped_responses),
        ("dropped_requests", qp.dropped_requests),
        ("cq_overflow", qp.cq_overflow),
    ]
}

const fn path_counters(stats: &DeviceStats) -> [(&'static str, u64); 9] {
    let path = &stats.path;
    [
        ("socket_tx_calls", path.tx_calls),
        ("socket_tx_bursts", path.tx_bursts),
        ("socket_tx_blocked", path.tx_blocked),
        ("socket_tx_unreachable", path.tx_unreachable),
        ("socket_tx_forbidden", path.tx_forbidden),
        (
            "socket_tx_errors",
            path.tx_errors + path.tx_too_long + path.tx_no_buffers,
        ),
        ("socket_rx_calls", path.rx_calls),
        ("socket_rx_datagrams", path.rx_datagrams),
        ("socket_rx_buffer_drops", path.rx_buffer_drops),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_the_promised_keys() {
        let json = stats_json(&DeviceStats::default());
        for key in ["packets_sent", "packets_received", "retransmits", "icrc_errors"] {
            assert!(json[key].is_u64(), "{key}");
        }
        assert!(json["counters"]["rx_packets"].is_u64() && json["counters"]["duplicate_request"].is_u64());
    }
}
