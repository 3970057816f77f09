//! Opening of devices: engines, addresses, memory tables.

use std::{net::IpAddr, path::PathBuf, sync::Arc};

use roce_fault::{Faults, Network};
use roce_mem::MemoryTable;
use roce_net::{Datapath as _, OpenError, Tap, UdpConfig, UdpDatapath, iface};
use roce_port::{Port, PortConfig, Steering};
use roce_qp::WindowConfig;
use roce_verbs::{DeviceLimits, Mtu, PathMtus, provider::VerbsError};

use crate::{
    device::{DeviceConfig, io_error},
    tap::{PcapTap, SharedTap},
};

pub(crate) fn error(e: OpenError) -> VerbsError {
    match e {
        OpenError::Io { context, source } => io_error(context)(source),
        taken @ OpenError::PortTaken { .. } => VerbsError::Address(format!(
            "{taken}; processes share an address if each opens it with `open_shared`"
        )),
        other => VerbsError::Address(other.to_string()),
    }
}

/// 32 bytes from the system's random number generator.
pub(crate) fn random() -> Result<[u8; 32], VerbsError> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).map_err(|e| VerbsError::Io {
        context: "asking the system for random numbers".into(),
        source: std::io::Error::other(e.to_string()),
    })?;
    Ok(seed)
}

/// The path MTUs to use: what the interfaces carry, unless less was asked for.
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

fn udp_config(config: &DeviceConfig) -> UdpConfig {
    UdpConfig {
        addr: config.addr,
        receive_buffer: config.socket_buffer,
        gso: config.gso,
        gro: config.gro,
        ..UdpConfig::default()
    }
}

/// Whether a device on all addresses has those of the peer's IP version; `::` has both.
pub(crate) fn serves(any: IpAddr, dst: IpAddr) -> bool {
    any.is_ipv6() || dst.to_canonical().is_ipv4()
}

/// Each address is one device's; an unspecified one has all of its IP version, and `::` those of both.
pub(crate) fn check_apart(configs: &[DeviceConfig]) -> Result<(), VerbsError> {
    let covers = |a: IpAddr, b: IpAddr| a == b || (a.is_unspecified() && (a.is_ipv6() || b.is_ipv4()));
    for (index, config) in configs.iter().enumerate() {
        let addr = config.addr.to_canonical();
        for other in configs[..index].iter().map(|other| other.addr.to_canonical()) {
            if covers(addr, other) || covers(other, addr) {
                return Err(VerbsError::Address(match addr == other {
                    true => format!("{addr} can't be two devices"),
                    false => format!("{addr} and {other} can't be two devices: one includes the other"),
                }));
            }
        }
    }
    Ok(())
}

/// The sockets of loops that share a device's address.
///
/// # Errors
/// As [`datapath`]; when other processes have the address too. Inside: when they can't be opened.
pub(crate) fn shard_datapaths(
    config: &DeviceConfig,
    steering: Steering,
) -> Result<Result<Vec<UdpDatapath>, OpenError>, VerbsError> {
    if config.sockets.is_some() || config.qpn_slot.is_some() || config.services.is_some() {
        let addr = config.addr;
        return Err(VerbsError::Invalid(format!(
            "several loops or shards can't have {addr}, which is shared with other processes"
        )));
    }
    choose_mtus(config.addr, config.mtu)?;
    Ok(UdpDatapath::open_shards(&udp_config(config), steering))
}

/// The sockets of each of a device's engines.
///
/// # Errors
/// As [`shard_datapaths`], and for a number of shards that is not possible.
pub(crate) fn datapaths(config: &DeviceConfig) -> Result<Result<Vec<UdpDatapath>, OpenError>, VerbsError> {
    match check_shards(config.shards)? {
        None => Ok(datapath(config)?.map(|path| vec![path])),
        Some(steering) => shard_datapaths(config, steering),
    }
}

/// How numbers are spread over so many shards; `None`: there is one.
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

/// Opens the capture of a device's packets, if one is wanted.
pub(crate) fn tap(config: &DeviceConfig) -> Result<Option<PcapTap>, VerbsError> {
    let create = |file: &PathBuf| {
        PcapTap::create(file, config.pcap_append).map_err(io_error(&format!("creating {}", file.display())))
    };
    config.pcap.as_ref().map(create).transpose()
}

/// The sockets of a device.
///
/// # Errors
/// When it makes no sense. Inside: when they can't be opened.
pub(crate) fn datapath(config: &DeviceConfig) -> Result<Result<UdpDatapath, OpenError>, VerbsError> {
    let udp = udp_config(config);
    if let Some(slot) = config.qpn_slot.filter(|s| !s.is_valid()) {
        return Err(VerbsError::Invalid(format!(
            "no slot {} of {} bits",
            slot.slot, slot.bits
        )));
    }
    choose_mtus(config.addr, config.mtu)?;
    Ok(match &config.sockets {
        Some(sockets) => UdpDatapath::from_sockets(&udp, sockets),
        None => UdpDatapath::open(&udp),
    })
}

/// A port, and what moves it.
pub(crate) struct Parts {
    pub(crate) path: UdpDatapath,
    pub(crate) tap: Option<Box<dyn Tap>>,
    pub(crate) faults: Option<Network>,
    pub(crate) port: Port,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) limits: DeviceLimits,
    pub(crate) mtu: Mtu,
}

impl Parts {
    /// Builds the parts of loops or engines that share a memory table; `tap` captures the packets of all.
    pub(crate) fn sharing_memory(
        all: impl Iterator<Item = (DeviceConfig, UdpDatapath)>,
        tap: Option<&SharedTap>,
    ) -> Result<Vec<(DeviceConfig, Self)>, VerbsError> {
        let mut mem = None;
        let parts = all.map(|(config, path)| {
            let parts = Self::new(&config, path, tap.cloned().map(SharedTap::boxed), mem.clone())?;
            mem.get_or_insert_with(|| parts.mem.clone());
            Ok((config, parts))
        });
        parts.collect()
    }

    /// With somebody who sees all packets; the configuration's file is not written. `mem` is another port's, if they are to have
    /// the same.
    pub(crate) fn new(
        config: &DeviceConfig,
        path: UdpDatapath,
        tap: Option<Box<dyn Tap>>,
        mem: Option<Arc<MemoryTable>>,
    ) -> Result<Self, VerbsError> {
        let mtus = choose_mtus(config.addr, config.mtu)?;
        let seed = random()?;
        let guid = config
            .guid
            .unwrap_or_else(|| roce_cm::guid::keeping(u64::from_le_bytes(std::array::from_fn(|i| seed[i]))));
        let caps = path.capabilities();
        let local = match config.addr.is_unspecified() {
            true => vec![],
            false => vec![config.addr.to_canonical()],
        };
        let mtu = mtus.usual();
        let mut port = PortConfig::new(local, mtu, guid);
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
            path,
            tap,
            faults: config.faults.as_ref().map(Faults::network),
            port,
            mem,
            limits,
            mtu,
        })
    }
}
