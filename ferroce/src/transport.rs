//! Options of the RoCE device.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use roce::reactor::{ReactorConfig, SpinMode};
use roce::{DatapathKind, DeviceConfig, JoinConfig, LocalDevice, Mtu, Placement, broker::running_broker};
use rtrs::{PathError, heartbeat::HeartbeatConfig};

use crate::{
    fault::{Demanded, FaultArgs},
    output::Failure,
    rdma::RdmaArgs,
    ring::{self, RingArgs},
    units::{memory, seconds},
};

/// Silent heartbeats that end a path, as in the kernel (`RTRS_HB_MISSED_MAX`).
const MISSED: u32 = 5;

/// Options of devices.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Transport options")]
pub(crate) struct DeviceArgs {
    #[command(flatten)]
    pub(crate) rdma: RdmaArgs,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that the interface carries]
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<Mtu>,
    /// Sockets that carry packets: `udp`, which needs no privilege; `raw`, raw IP; or `packet`, Ethernet frames, with `packet,vlan=ID` in
    /// that VLAN. `raw` and `packet` need CAP_NET_RAW, and share no address with other processes
    #[arg(long, value_name = "udp|raw|packet[,vlan=ID]", default_value = "udp")]
    pub(crate) datapath: DatapathKind,
    /// Receive buffer of each socket; the system may grant less (net.core.rmem_max) [default: 8M]
    #[arg(long, value_name = "BYTES", value_parser = memory)]
    pub(crate) socket_buffer: Option<usize>,
    /// Send one packet per system call (no UDP segmentation offload)
    #[arg(long)]
    pub(crate) no_gso: bool,
    /// Receive one packet per system call (no UDP receive offload)
    #[arg(long)]
    pub(crate) no_gro: bool,
    /// Longest busy polling before a thread sleeps: microseconds, `auto` (as long as it finds work that way), or `off`
    #[arg(long, value_name = "US|auto|off", default_value = "auto")]
    pub(crate) spin: SpinMode,
    /// Write every packet, sent or received, to this capture file. Only its owner may read it; a symbolic link is refused
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) ring: RingArgs,
    #[command(flatten)]
    pub(crate) fault: FaultArgs,
}

/// Faults and ring of a process or task, by which others find it: dropped after its devices.
#[derive(Debug)]
pub(crate) struct Instruments {
    faults: Option<Demanded>,
    ring: Option<ring::Running>,
}

impl Instruments {
    /// Reports to the ring that a path of a mapping is down, unless we have closed it.
    pub(crate) fn client_path_down(&self, why: &PathError) {
        self.path_down(!matches!(why, PathError::Closed));
    }

    /// Reports to the ring that a path of a server is down, unless either side has closed it.
    pub(crate) fn server_path_down(&self, why: &PathError) {
        use PathError::{Closed, GivenUp, PeerDisconnected};
        self.path_down(!matches!(why, Closed | GivenUp | PeerDisconnected));
    }

    fn path_down(&self, has_failed: bool) {
        if let Some(ring) = self.ring.as_ref().filter(|_| has_failed) {
            ring.path_failed();
        }
    }
}

impl DeviceArgs {
    /// Starts what lets the faults be changed and writes the ring, if there are any; `name` is what `ferroce fault` and `ferroce pcap
    /// capture` call it.
    pub(crate) fn instruments(&self, name: &str) -> Result<Instruments, Failure> {
        Ok(Instruments {
            faults: self.fault.start(name)?,
            ring: self.ring.start(name)?,
        })
    }

    /// Settings of a software device. Without instruments it has neither faults nor a ring.
    pub(crate) fn config(&self, addr: IpAddr, instruments: Option<&Instruments>) -> DeviceConfig {
        let usual = DeviceConfig::new(addr);
        DeviceConfig {
            mtu: self.mtu,
            datapath: self.datapath,
            socket_buffer: self.socket_buffer.unwrap_or(usual.socket_buffer),
            gso: !self.no_gso,
            gro: !self.no_gro,
            pcap: self.pcap.clone(),
            faults: instruments.and_then(|with| Some(with.faults.as_ref()?.faults())),
            ring: instruments.and_then(|with| Some(with.ring.as_ref()?.ring())),
            ..usual
        }
    }

    /// How a loop waits.
    pub(crate) fn reactor(&self) -> ReactorConfig {
        ReactorConfig {
            spin: self.spin,
            ..ReactorConfig::default()
        }
    }
}

#[derive(Args)]
#[command(next_help_heading = "Transport options")]
pub(crate) struct TransportArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Heartbeat interval. A path fails after five missed heartbeats [default: 1; of `serve` 5, as the kernel's server, so that clients
    /// whose machine pauses for a while (a snapshot, a migration) keep their sessions]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    heartbeat: Option<Duration>,
}

impl TransportArgs {
    /// The capture file.
    pub(crate) fn capture(&self) -> Option<&Path> {
        self.device.pcap.as_deref()
    }

    /// [`DeviceArgs::instruments`].
    pub(crate) fn instruments(&self, name: &str) -> Result<Instruments, Failure> {
        self.device.instruments(name)
    }

    /// Opens a device at each of these addresses for each of the loops; `placement` says which gets whose connections. Other processes
    /// may have the addresses too, unless `FERROCE_BROKER` is `off` or the datapath is another than `udp`.
    pub(crate) fn open(
        &self,
        addrs: &[IpAddr],
        loops: usize,
        placement: Arc<dyn Placement>,
        instruments: &Instruments,
    ) -> Result<Vec<LocalDevice>, Failure> {
        let soft = |addrs: &[IpAddr]| {
            let configs: Vec<_> = addrs
                .iter()
                .map(|addr| self.device.config(*addr, Some(instruments)))
                .collect();
            let placement = placement.clone();
            // A process on RDMA devices alone needs no broker: it may get addresses in software later, shared if others share theirs.
            let shares = self.device.datapath == DatapathKind::Udp;
            let shared = JoinConfig::from_env().filter(|how| shares && (!addrs.is_empty() || running_broker(&how.dir)));
            let opened = match shared {
                Some(how) => LocalDevice::open_shared(&configs, loops, placement, &how),
                None => LocalDevice::open_shards(&configs, loops, placement),
            };
            opened.map_err(Failure::of)
        };
        self.device.rdma.open(addrs, soft, loops)
    }

    /// How a loop waits.
    pub(crate) fn reactor(&self) -> ReactorConfig {
        self.device.reactor()
    }

    /// The heartbeats of RTRS, by default one in this time.
    pub(crate) fn heartbeat(&self, usual: Duration) -> HeartbeatConfig {
        HeartbeatConfig {
            interval: self.heartbeat.unwrap_or(usual),
            max_missed: MISSED,
        }
    }
}
