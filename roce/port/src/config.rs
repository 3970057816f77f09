//! Configuration of a port, and the attributes of a new queue pair.

use core::{net::IpAddr, num::NonZeroU64};
use std::sync::Arc;

use crate::cm::CmConfig;
use roce_icrc::IpPair;
use roce_qp::{CompletionQueue, FreePaces, ReorderBudget, SharedReceiveQueue, WindowConfig, XrcDomain};
use roce_verbs::mem::PdHandle;
use roce_verbs::{AddressVector, DeviceLimits, Mtu, PathMtus, QpCaps, QpType, RnrTimer, provider::VerbsError};

use crate::{
    path::TxPath,
    qpn::{QpnParts, QpnRange},
};

/// Configuration of a [`Port`](crate::Port).
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Local addresses. Empty: packets to any address are accepted, and every path must name its local address.
    pub local: Vec<IpAddr>,
    /// Largest path MTU of each interface.
    pub mtus: PathMtus,
    /// Connection manager: node GUID, limits and timeouts.
    pub cm: CmConfig,
    /// Limits and capabilities that the device reports.
    pub limits: DeviceLimits,
    /// Bounds of the bytes in flight towards one peer.
    pub window: WindowConfig,
    /// Rate limit of UC and UD, which have no flow control, bytes per second to one address. `None`: no limit.
    pub unreliable_rate: Option<NonZeroU64>,
    /// Queue pair numbers that this port assigns.
    pub qpns: QpnRange,
    /// Which of them it draws from, if they are a whole slot's. It reports when that is more than one part
    /// ([`PortChange::Spread`](crate::PortChange::Spread)).
    pub qpn_parts: Option<QpnParts>,
    /// Timer in the RNR NAKs of connections set up by the connection manager.
    pub min_rnr_timer: RnrTimer,
    /// Buffers packets beyond a gap also for peers without selective ACKs.
    pub reorder: bool,
    /// Largest number of packets that a queue pair stages in one turn.
    pub turn_packets: usize,
    /// UDP source ports that the datapath can send from. Empty: all RoCE ports.
    ///
    /// A connected queue pair uses a random one, a datagram one chosen by the queue pair numbers. A path may request
    /// another with `udp_sport`.
    pub src_ports: Vec<u16>,
    /// UDP source port of management datagrams; `None`: one of `src_ports`.
    pub mad_port: Option<u16>,
    /// Memory limit for packets beyond a gap. By default all ports of the process share one.
    pub reorder_budget: Arc<ReorderBudget>,
}

impl PortConfig {
    /// Creates a configuration with these addresses and default values.
    ///
    /// `ca_guid` identifies the device to connection managers: no two devices may have the same at one time.
    pub fn new(local: Vec<IpAddr>, mtu: Mtu, ca_guid: u64) -> Self {
        Self {
            local,
            mtus: mtu.into(),
            cm: CmConfig::new(ca_guid, mtu),
            limits: DeviceLimits::software(ca_guid),
            window: WindowConfig::default(),
            unreliable_rate: FreePaces::USUAL,
            qpns: QpnRange::default(),
            qpn_parts: None,
            // 0.64 ms: a receiver without a receive work request is usually a program that is briefly behind.
            min_rnr_timer: RnrTimer::new(12),
            reorder: true,
            turn_packets: 64,
            src_ports: Vec::new(),
            mad_port: None,
            reorder_budget: ReorderBudget::of_process(),
        }
    }

    /// Maps `preferred` to a UDP source port that the datapath can send from.
    pub(crate) fn src_port(&self, preferred: u16) -> u16 {
        match self.src_ports.len() {
            0 => preferred,
            n => self.src_ports[usize::from(preferred) % n],
        }
    }

    /// Returns a path in normal form: IPv4-mapped addresses as IPv4, defaults for local address and hop limit.
    ///
    /// An unspecified local address is filled in if the port has only one of the remote address's IP version.
    pub(crate) fn path(&self, av: &AddressVector) -> Result<AddressVector, VerbsError> {
        let mut av = *av;
        av.local = av.local.to_canonical();
        av.remote = av.remote.to_canonical();
        if av.hop_limit == 0 {
            // Many programs leave it at 0, for which the kernel uses the route's. A socket can't send with 0.
            av.hop_limit = AddressVector::new(av.local, av.remote).hop_limit;
        }
        if av.local.is_unspecified() {
            let mut fitting = self.local.iter().filter(|a| a.is_ipv4() == av.remote.is_ipv4());
            match (fitting.next(), fitting.next()) {
                (Some(only), None) => av.local = *only,
                _ => {
                    return Err(VerbsError::Address(format!(
                        "no local address for the path to {}: name one, because this port does not have exactly one of \
                         that IP version",
                        av.remote
                    )));
                }
            }
        }
        if av.remote.is_unspecified() {
            return Err(VerbsError::Address(format!(
                "remote address {} is unspecified: name the peer's address",
                av.remote
            )));
        }
        if av.local.is_ipv4() != av.remote.is_ipv4() {
            let (local, remote) = (av.local, av.remote);
            return Err(VerbsError::Address(format!(
                "no path from {local} to {remote}: the IP versions differ"
            )));
        }
        if !self.is_local(av.local) {
            return Err(VerbsError::Address(format!(
                "{} is not an address of this port",
                av.local
            )));
        }
        Ok(av)
    }

    /// Returns the UDP source port that a path requests, if any.
    pub(crate) fn requested_port(&self, av: &AddressVector) -> Option<u16> {
        (av.udp_sport != 0).then(|| self.src_port(av.udp_sport))
    }

    /// Returns flow, traffic class and TTL of a path's packets. `None` if the IP versions differ.
    pub(crate) fn tx_path(&self, av: &AddressVector, src_port: u16) -> Option<TxPath> {
        let ip = IpPair::try_from((av.local, av.remote)).ok()?;
        Some(TxPath::new(ip, src_port, av.traffic_class, av.hop_limit))
    }

    /// Returns whether a path stays on this host. There GSO always numbers IPv4 Identifications as packets were sealed.
    pub(crate) fn is_on_host(&self, av: &AddressVector) -> bool {
        av.remote.is_loopback() || av.remote == av.local || self.local.contains(&av.remote)
    }

    /// Returns whether this is an address of the port.
    pub(crate) fn is_local(&self, addr: IpAddr) -> bool {
        self.local.is_empty() || self.local.contains(&addr)
    }
}

/// Attributes of a new queue pair (`ibv_qp_init_attr`).
#[derive(Clone, Debug)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Transport service.
    pub qp_type: QpType,
    /// Completion queue of sends.
    pub send_cq: Arc<CompletionQueue>,
    /// Completion queue of receives.
    pub recv_cq: Arc<CompletionQueue>,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send work request generates a completion (`sq_sig_all`).
    pub signal_all: bool,
    /// Shared receive queue, instead of a receive queue of its own.
    pub srq: Option<Arc<SharedReceiveQueue>>,
    /// XRC domain with the shared receive queues that messages name. Required for an XRC target, an error otherwise.
    pub xrcd: Option<Arc<XrcDomain>>,
}
