//! What a port and a queue pair are made with.

use core::net::IpAddr;
use std::sync::Arc;

use roce_cm::CmConfig;
use roce_mem::PdHandle;
use roce_qp::{CompletionQueue, WindowConfig};
use roce_verbs::{DeviceLimits, Mtu, QpCaps, QpType, RnrTimer};

use crate::qpn::QpnRange;

/// What a port is made with.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Our addresses. Empty: packets to any address are taken, and every path must name its local address.
    pub local: Vec<IpAddr>,
    /// The largest path MTU that the interface carries.
    pub mtu: Mtu,
    /// The connection manager's settings: our GUID, limits, times.
    pub cm: CmConfig,
    /// What the device can do.
    pub limits: DeviceLimits,
    /// Bounds of the bytes in flight towards one peer.
    pub window: WindowConfig,
    /// Where the queue pair numbers come from.
    pub qpns: QpnRange,
    /// Waiting time that connections made by the connection manager ask for in RNR NAKs.
    pub min_rnr_timer: RnrTimer,
    /// Packets that one queue pair may stage before it is the next one's turn.
    pub turn_packets: usize,
    /// UDP source ports that the datapath can send from; the queue pair numbers (or the path's own wish) choose among
    /// them. Empty: any port.
    pub src_ports: Vec<u16>,
}

impl PortConfig {
    /// A port with the given addresses and otherwise usual values. `ca_guid` identifies the device to connection
    /// managers: no two live devices may share one.
    pub fn new(local: Vec<IpAddr>, mtu: Mtu, ca_guid: u64) -> Self {
        Self {
            local,
            mtu,
            cm: CmConfig::new(ca_guid, mtu),
            limits: DeviceLimits::software(ca_guid),
            window: WindowConfig::default(),
            qpns: QpnRange::default(),
            // 0.64 ms: the receiver is a program that is late, not one that is away.
            min_rnr_timer: RnrTimer::new(12),
            turn_packets: 64,
            src_ports: Vec::new(),
        }
    }

    /// The source port to use where `wanted` would be the choice if every port could be had.
    pub(crate) fn src_port(&self, wanted: u16) -> u16 {
        match self.src_ports.len() {
            0 => wanted,
            n => self.src_ports[usize::from(wanted) % n],
        }
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
    /// Transport; only [`QpType::Rc`] so far.
    pub qp_type: QpType,
    /// Completions of sends.
    pub send_cq: Arc<CompletionQueue>,
    /// Completions of receives.
    pub recv_cq: Arc<CompletionQueue>,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub signal_all: bool,
}
