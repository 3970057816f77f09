//! Opening of devices: engines, addresses, memory tables.

use std::{io, net::IpAddr, sync::Arc};

use roce_fault::Faults;
use roce_net::{Datapath, DatapathKind, LocalConfig, OpenError, Tap, UdpConfig, UdpDatapath, iface, open_shards};
use roce_port::{Numbers, Port, PortConfig, Steering};
use roce_qp::WindowConfig;
use roce_verbs::mem::MemoryTable;
use roce_verbs::{DeviceLimits, Mtu, PathMtus, provider::VerbsError};

use crate::{config::DeviceConfig, error::io_error, tap::SharedTap};

pub(crate) fn error(e: OpenError) -> VerbsError {
    match e {
        OpenError::Io { context, source } => io_error(context)(source),
        OpenError::NeedsNetRaw { datapath } => VerbsError::Io {
            context: format!("the {datapath} datapath needs CAP_NET_RAW"),
            source: io::Error::new(io::ErrorKind::PermissionDenied, OpenError::WITHOUT_NET_RAW),
        },
        taken @ OpenError::PortTaken { .. } => VerbsError::Address(format!(
            "{taken}; processes share an address if each opens it with `open_shared`"
        )),
        other => VerbsError::Address(other.to_string()),
    }
}

/// Returns 32 bytes from the system's random number generator.
pub(crate) fn random() -> Result<[u8; 32], VerbsError> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|e| VerbsError::Io {
        context: "asking the system for random numbers".into(),
        source: std::io::Error::other(e.to_string()),
    })?;
    Ok(seed)
}

/// Returns the path MTUs to use: what the interfaces carry, unless less was requested.
fn choose_mtus(addr: IpAddr, wanted: Option<Mtu>) -> Result<PathMtus, VerbsError> {
    let fits = match iface::path_mtus(addr) {
        Ok(mtus) => mtus,
        Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
            return Err(VerbsError::Address(OpenError::NotLocal(addr).to_string()));
        }
        Err(e) => return Err(io_error("finding the interface's MTU")(e)),
    };
    match wanted {
        Some(mtu) if mtu > fits.most() => Err(VerbsError::Invalid(format!(
            "path MTU {} does not fit the interface of {addr}, which carries {}: raise the interface's MTU to {} or more",
            mtu.bytes(),
            fits.most().bytes(),
            mtu.bytes() + Mtu::HEADERS as usize,
        ))),
        Some(mtu) => Ok(fits.at_most(mtu)),
        None => Ok(fits),
    }
}

/// Returns whether a device on all addresses has those of the peer's IP version; `::` has both.
pub(crate) fn serves(any: IpAddr, dst: IpAddr) -> bool {
    any.is_ipv6() || dst.to_canonical().is_ipv4()
}

/// Checks that no two devices have the same address. An unspecified one has all addresses of its IP version, and `::` those of both.
pub(crate) fn check_apart(addrs: impl Iterator<Item = IpAddr>) -> Result<(), VerbsError> {
    let covers = |a: IpAddr, b: IpAddr| a == b || (a.is_unspecified() && (a.is_ipv6() || b.is_ipv4()));
    let mut others = Vec::new();
    for addr in addrs.map(|addr| addr.to_canonical()) {
        if let Some(other) = others
            .iter()
            .find(|other| covers(addr, **other) || covers(**other, addr))
        {
            return Err(VerbsError::Address(match addr == *other {
                true => format!("{addr} can't be two devices"),
                false => format!("{addr} and {other} can't be two devices: one includes the other"),
            }));
        }
        others.push(addr);
    }
    Ok(())
}

/// Configurations and sockets of the loops or engines at an address.
pub(crate) type Bound = Vec<(DeviceConfig, Box<dyn Datapath>)>;

/// Checks a device's configuration.
///
/// # Errors
/// If the interface does not carry the MTU, the slot does not exist, or several shards have an address that other processes have too.
pub(crate) fn check(config: &DeviceConfig, steering: Option<Steering>) -> Result<(), VerbsError> {
    let shared = config.sockets.is_some() || config.qpn_slot.is_some() || config.services.is_some();
    if steering.is_some() && shared {
        let addr = config.addr;
        return Err(VerbsError::Invalid(format!(
            "several loops or shards can't have {addr}, which is shared with other processes"
        )));
    }
    if shared {
        check_shareable(config)?;
    }
    if let Some(slot) = config.qpn_slot.filter(|s| !s.is_valid()) {
        return Err(VerbsError::Invalid(format!(
            "no slot {} of {} bits",
            slot.slot, slot.bits
        )));
    }
    choose_mtus(config.addr, config.mtu).map(drop)
}

/// Checks that a device's address can be shared with other processes.
///
/// # Errors
/// If only UDP sockets can be shared, and it has others.
pub(crate) fn check_shareable(config: &DeviceConfig) -> Result<(), VerbsError> {
    match config.datapath {
        DatapathKind::Udp => Ok(()),
        datapath => Err(VerbsError::Invalid(format!(
            "processes share {} by the udp datapath alone: the {datapath} datapath has its address for itself",
            config.addr
        ))),
    }
}

/// Opens the sockets of each of a device's shards.
///
/// # Errors
/// If the port is taken, or the system refuses.
pub(crate) fn bind(config: &DeviceConfig, steering: Option<Steering>) -> Result<Bound, OpenError> {
    let udp = UdpConfig {
        addr: config.addr,
        receive_buffer: config.socket_buffer,
        gso: config.gso,
        gro: config.gro,
        ..UdpConfig::default()
    };
    let paths = match &config.sockets {
        Some(sockets) => vec![Box::new(UdpDatapath::from_sockets(&udp, sockets)?) as Box<dyn Datapath>],
        None => open_shards(config.datapath, &udp, steering)?,
    };
    let of_shard = |(shard, path)| {
        let qpn_slot = steering.and_then(|s| s.slot(shard)).or(config.qpn_slot);
        let config = config.clone();
        (DeviceConfig { qpn_slot, ..config }, path)
    };
    Ok(paths.into_iter().enumerate().map(of_shard).collect())
}

/// Checks the configuration and opens the sockets of each of a device's shards.
///
/// # Errors
/// As [`check`] and [`bind`].
pub(crate) fn open(config: &DeviceConfig, steering: Option<Steering>) -> Result<Bound, VerbsError> {
    check(config, steering)?;
    bind(config, steering).map_err(error)
}

/// Returns the assignment of numbers to these loops or engines. `None`: one has all numbers.
pub(crate) fn numbers(configs: &[&DeviceConfig]) -> Option<Numbers> {
    let alone = configs.iter().all(|config| config.services.is_none());
    if let Some(steering) = Steering::new(configs.len()).filter(|_| alone) {
        return Some(Numbers::All(steering));
    }
    let places: Arc<[_]> = configs.iter().filter_map(|config| config.qpn_slot).collect();
    (!places.is_empty()).then_some(Numbers::Places(places))
}

/// Returns how numbers are spread over so many shards; `None`: there is one.
///
/// # Errors
/// When that many are not possible.
pub(crate) fn check_shards(shards: usize) -> Result<Option<Steering>, VerbsError> {
    let most = Steering::MAX_SHARDS;
    match (shards, Steering::new(shards)) {
        (1, _) => Ok(None),
        (_, None) => Err(VerbsError::Invalid(format!(
            "{shards} shards of an address: 1 to {most} are possible"
        ))),
        (_, steering) => Ok(steering),
    }
}

/// Returns a device's addresses: none if it is open at the unspecified address.
pub(crate) fn addresses(addr: IpAddr) -> Vec<IpAddr> {
    match addr.is_unspecified() {
        true => Vec::new(),
        false => vec![addr.to_canonical()],
    }
}

/// Memory tables of the parts at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// One for all.
    Shared,
    /// One for each.
    Separate,
}

/// A port, with its configuration, datapath, capture and faults.
pub(crate) struct Parts {
    pub(crate) config: DeviceConfig,
    pub(crate) port: Port,
    pub(crate) path: Box<dyn Datapath>,
    pub(crate) local: LocalConfig,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) limits: DeviceLimits,
    pub(crate) mtu: Mtu,
}

impl Parts {
    /// Builds the parts of loops or engines at an address. Engines of a device share a memory table, loops do not. `tap` captures the
    /// packets of all.
    pub(crate) fn all(bound: Bound, tap: Option<&SharedTap>, memory: Memory) -> Result<Vec<Self>, VerbsError> {
        let [a, b, c, d, e, f, g, h, ..] = random()?;
        let guid = roce_port::cm::guid::keeping(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        let mut mem = None;
        let parts = bound.into_iter().map(|(config, path)| {
            let tap = tap.map(SharedTap::to_tap);
            let parts = Self::new(config, path, tap, guid, mem.clone())?;
            if memory == Memory::Shared {
                mem.get_or_insert_with(|| parts.mem.clone());
            }
            Ok(parts)
        });
        parts.collect()
    }

    fn new(
        config: DeviceConfig,
        path: Box<dyn Datapath>,
        tap: Option<Box<dyn Tap>>,
        guid: u64,
        mem: Option<Arc<MemoryTable>>,
    ) -> Result<Self, VerbsError> {
        let mtus = choose_mtus(config.addr, config.mtu)?;
        let caps = path.capabilities();
        let mtu = mtus.usual();
        let mut port = PortConfig::new(addresses(config.addr), mtu, config.guid.unwrap_or(guid));
        port.mtus = mtus;
        port.src_ports = caps.src_ports;
        port.mad_port = caps.mad_port;
        if let Some(slot) = config.qpn_slot {
            (port.qpns, port.qpn_parts) = (slot.qpns(), config.qpn_parts);
            let count = port.qpn_parts.map_or(port.qpns.count(), |parts| parts.count(port.qpns));
            port.limits.max_qp = port.limits.max_qp.min(count);
            // One part has enough of these.
            port.cm.comm_ids = config.qpn_parts.map_or(slot, |parts| slot.part(parts.home)).comm_ids();
        }
        port.cm.report_changes = config.services.is_some();
        let limits = port.limits.clone();
        // Peers are taken to have the receive buffer that we have; half of it is the kernel's own overhead.
        port.window = config.window.unwrap_or_else(|| {
            let usual = port.window;
            WindowConfig {
                max: (caps.receive_buffer / 2).clamp(usual.min, usual.max.max(usual.min)),
                ..usual
            }
        });
        port.unreliable_rate = config.unreliable_rate;
        let mem = match mem {
            Some(mem) => mem,
            None => Arc::new(MemoryTable::new(random()?, &limits)),
        };
        let port = Port::new(port, mem.clone(), random()?);
        Ok(Self {
            port,
            path,
            local: LocalConfig {
                tap,
                recipients: None,
                faults: config.faults.as_ref().map(Faults::network),
            },
            config,
            mem,
            limits,
            mtu,
        })
    }
}
