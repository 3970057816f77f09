//! What a port and a queue pair are made with.

use core::{net::IpAddr, num::NonZeroU64};
use std::sync::Arc;

use roce_bth::ROCE_UDP_PORT;
use roce_cm::CmConfig;
use roce_icrc::{Flow, IpPair};
use roce_mem::PdHandle;
use roce_qp::{CompletionQueue, FreePaces, ReorderBudget, SharedReceiveQueue, WindowConfig, XrcDomain};
use roce_verbs::{AddressVector, DeviceLimits, Mtu, PathMtus, QpCaps, QpType, RnrTimer, provider::VerbsError};

use crate::{batch::TxPath, qpn::QpnRange};

/// What a port is made with.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Our addresses. Empty: packets to any address are taken, and every path must name its local address.
    pub local: Vec<IpAddr>,
    /// The largest path MTU that the interfaces carry.
    pub mtus: PathMtus,
    /// The connection manager's settings: our GUID, limits, times.
    pub cm: CmConfig,
    /// What the device can do.
    pub limits: DeviceLimits,
    /// Bounds of the bytes in flight towards one peer.
    pub window: WindowConfig,
    /// Bytes per second of the services that nobody acknowledges (UC, UD), towards one address; `None`: no limit.
    pub unreliable_rate: Option<NonZeroU64>,
    /// Where the queue pair numbers come from.
    pub qpns: QpnRange,
    /// Waiting time that connections made by the connection manager ask for in RNR NAKs.
    pub min_rnr_timer: RnrTimer,
    /// Keep packets beyond a gap also of peers that do not know of it.
    pub keeps_packets: bool,
    /// Packets that one queue pair may stage before it is the next one's turn.
    pub turn_packets: usize,
    /// UDP source ports that the datapath can send from. Each connected queue pair draws one of them at random; datagrams go by
    /// the queue pair numbers, and both by the path's own wish. Empty: any of RoCE's ports.
    pub src_ports: Vec<u16>,
    /// Memory for packets beyond a gap: the process's, unless somebody wants to see what one port takes.
    pub reorder_budget: Arc<ReorderBudget>,
}

impl PortConfig {
    /// A port with the given addresses and otherwise usual values. `ca_guid` identifies the device to connection
    /// managers: no two live devices may share one.
    pub fn new(local: Vec<IpAddr>, mtu: Mtu, ca_guid: u64) -> Self {
        Self {
            local,
            mtus: mtu.into(),
            cm: CmConfig::new(ca_guid, mtu),
            limits: DeviceLimits::software(ca_guid),
            window: WindowConfig::default(),
            unreliable_rate: FreePaces::USUAL,
            qpns: QpnRange::default(),
            // 0.64 ms: the receiver is a program that is late, not one that is away.
            min_rnr_timer: RnrTimer::new(12),
            keeps_packets: true,
            turn_packets: 64,
            src_ports: Vec::new(),
            reorder_budget: ReorderBudget::of_process(),
        }
    }

    /// Returns the source port to use where `wanted` would be the choice if every port could be had.
    pub(crate) fn src_port(&self, wanted: u16) -> u16 {
        match self.src_ports.len() {
            0 => wanted,
            n => self.src_ports[usize::from(wanted) % n],
        }
    }

    /// A path as the port uses it: plain IPv4 instead of mapped addresses, the local address filled in if it is clear.
    pub(crate) fn path(&self, av: &AddressVector) -> Result<AddressVector, VerbsError> {
        let mut av = *av;
        av.local = av.local.to_canonical();
        av.remote = av.remote.to_canonical();
        if av.hop_limit == 0 {
            // Many programs leave it at 0; the kernel takes the route's then. No socket sends with it.
            av.hop_limit = AddressVector::new(av.local, av.remote).hop_limit;
        }
        if av.local.is_unspecified() {
            let mut fitting = self.local.iter().filter(|a| a.is_ipv4() == av.remote.is_ipv4());
            match (fitting.next(), fitting.next()) {
                (Some(only), None) => av.local = *only,
                _ => return Err(VerbsError::Address("the path does not name its local address".into())),
            }
        }
        if av.remote.is_unspecified() {
            return Err(VerbsError::Address(format!("{} is not a peer's address", av.remote)));
        }
        if av.local.is_ipv4() != av.remote.is_ipv4() {
            let (local, remote) = (av.local, av.remote);
            return Err(VerbsError::Address(format!("no path from {local} to {remote}")));
        }
        if !self.is_local(av.local) {
            return Err(VerbsError::Address(format!(
                "{} is not an address of this port",
                av.local
            )));
        }
        Ok(av)
    }

    /// Returns the UDP source port that a path asks for, if it does.
    pub(crate) fn wished_port(&self, av: &AddressVector) -> Option<u16> {
        (av.udp_sport != 0).then(|| self.src_port(av.udp_sport))
    }

    /// Returns how packets leave on a path.
    pub(crate) fn tx_path(&self, av: &AddressVector, src_port: u16) -> Option<TxPath> {
        let ip = IpPair::try_from((av.local, av.remote)).ok()?;
        Some(TxPath {
            flow: Flow {
                ip,
                src_port,
                dst_port: ROCE_UDP_PORT,
            },
            tos: av.traffic_class,
            ttl: av.hop_limit,
        })
    }

    /// Whether a path stays on this host, where segmentation numbers the Identifications as they were sealed.
    pub(crate) fn stays_here(&self, av: &AddressVector) -> bool {
        av.remote.is_loopback() || av.remote == av.local || self.local.contains(&av.remote)
    }

    /// Whether packets may come to and leave from this address.
    pub(crate) fn is_local(&self, addr: IpAddr) -> bool {
        self.local.is_empty() || self.local.contains(&addr)
    }
}

/// What a queue pair is made with.
#[derive(Clone, Debug)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Transport service.
    pub qp_type: QpType,
    /// Completions of sends.
    pub send_cq: Arc<CompletionQueue>,
    /// Completions of receives.
    pub recv_cq: Arc<CompletionQueue>,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
    /// Where its receives come from, instead of a queue of its own.
    pub srq: Option<Arc<SharedReceiveQueue>>,
    /// Where an XRC target finds the shared receive queues that its messages name; nobody else has one.
    pub xrcd: Option<Arc<XrcDomain>>,
}
