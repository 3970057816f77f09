//! Configuration of devices.

use std::{net::IpAddr, num::NonZeroU64, path::PathBuf, sync::Arc};

use roce_fault::Faults;
use roce_net::{DatapathKind, OpenSockets, SpinMode, UdpConfig};
use roce_port::{PortChange, QpnParts, QpnSlot, RxMeta, Steering};
use roce_qp::{FreePaces, WindowConfig};
use roce_verbs::{Mtu, provider::VerbsError};

use crate::broker::Snapshot;
#[cfg(feature = "pcap")]
use crate::ring::Ring;

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Our address. Unspecified: all addresses of this IP version, and `::` means IPv4 too.
    pub addr: IpAddr,
    /// Path MTU to offer at most; `None`: the largest that the interface carries.
    pub mtu: Option<Mtu>,
    /// Sockets that carry packets. With others than UDP sockets the process has its address alone, and needs CAP_NET_RAW.
    pub datapath: DatapathKind,
    /// Receive buffer to ask the system for, bytes.
    pub socket_buffer: usize,
    /// Send several packets with one call (UDP_SEGMENT).
    pub gso: bool,
    /// Receive several packets with one call (UDP_GRO).
    pub gro: bool,
    /// Run a background thread. Without one nothing moves but while the program posts, polls and waits: peers that
    /// read or write memory meanwhile are not answered.
    pub background: bool,
    /// How long a thread that waits for completions ([`Channel`](crate::Channel)) looks for packets before it sleeps. If it is a number, the
    /// background thread does so too.
    pub spin: SpinMode,
    /// Bounds of the bytes in flight towards one peer; `None`: chosen by the receive buffer.
    pub window: Option<WindowConfig>,
    /// Bytes per second towards one address of unacknowledged services (UC, UD); `None`: no limit.
    pub unreliable_rate: Option<NonZeroU64>,
    /// Write all packets sent and received to this file.
    pub pcap: Option<PathBuf>,
    /// Add to that file if it exists, instead of starting it again.
    pub pcap_append: bool,
    /// Keep the last packets in memory, instead of a file of all.
    #[cfg(feature = "pcap")]
    pub ring: Option<Ring>,
    /// Identifies the device to connection managers; `None`: random. No two live devices may share one, unless they
    /// have distinct slots.
    pub guid: Option<u64>,
    /// Receive on these sockets instead of opening some. `addr` says what the device is called, and must be theirs.
    pub sockets: Option<OpenSockets>,
    /// Engines of a [`Device`](crate::Device): each has a socket, a lock and a thread of its own, and a part of the reliable connected queue pairs. Those
    /// whose completion queues are polled without a channel stay together, queue by queue, because the threads that poll advance them;
    /// others are spread. 1 to [`MAX_SHARDS`](Self::MAX_SHARDS).
    pub shards: usize,
    /// Our part of the queue pair numbers and communication IDs, when several processes share the address.
    pub qpn_slot: Option<QpnSlot>,
    /// Which of them are drawn from, if the slot is a whole one.
    pub qpn_parts: Option<QpnParts>,
    /// Told of the services that this device listens for, when several processes share the address.
    pub services: Option<Arc<dyn Services>>,
    /// Faults on demand, which may change at any time; `None`: there are none, and none can be demanded.
    pub faults: Option<Faults>,
}

/// Registry of services that several processes at one address listen for.
pub trait Services: Send + Sync + core::fmt::Debug {
    /// This process is going to take connect requests for a service ID on one address or (`None`) all. Called with no
    /// lock of the device held.
    ///
    /// # Errors
    /// When another has it ([`VerbsError::Address`]).
    fn claim(&self, service_id: u64, addr: Option<IpAddr>) -> Result<(), VerbsError>;
    /// It no longer does. Called with no lock of the device held.
    fn release(&self, service_id: u64, addr: Option<IpAddr>);
    /// Keeps a port for this process before it listens; port 0 in the service ID stands for any that is free. Returns the
    /// service ID with the port: with 0 when nobody keeps ports. `reuse`: it may be shared with others who allow that.
    /// Called with no lock of the device held.
    ///
    /// # Errors
    /// When another has it ([`VerbsError::Address`]).
    fn reserve(&self, service_id: u64, _addr: Option<IpAddr>, _reuse: bool) -> Result<u64, VerbsError> {
        Ok(service_id)
    }
    /// It is not kept any more. Called with no lock of the device held.
    fn unreserve(&self, _service_id: u64, _addr: Option<IpAddr>) {}
    /// A packet for another of the processes, which came merged behind one for this one. Called under the lock of the
    /// device, so it must not wait.
    fn hand_over(&self, _meta: &RxMeta, _bytes: &[u8]) {}
    /// The port has changed for the others. Called under the lock of the device, so it must not wait.
    fn port_change(&self, _change: PortChange) {}
    /// Publishes status and counters of the device to the others. Called under the lock of the device, so it must not wait; for the last
    /// time when the device closes.
    fn publish(&self, _status: &Snapshot) {}
}

impl Default for DeviceConfig {
    fn default() -> Self {
        let udp = UdpConfig::default();
        Self {
            addr: udp.addr,
            mtu: None,
            datapath: DatapathKind::default(),
            socket_buffer: udp.receive_buffer,
            gso: true,
            gro: true,
            background: true,
            spin: SpinMode::default(),
            window: None,
            unreliable_rate: FreePaces::USUAL,
            pcap: None,
            pcap_append: false,
            #[cfg(feature = "pcap")]
            ring: None,
            guid: None,
            sockets: None,
            shards: 1,
            qpn_slot: None,
            qpn_parts: None,
            services: None,
            faults: None,
        }
    }
}

impl DeviceConfig {
    /// The most engines of a device.
    pub const MAX_SHARDS: usize = Steering::MAX_SHARDS;

    /// The usual settings for a device at an address.
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            ..Self::default()
        }
    }
}
