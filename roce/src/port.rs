//! The port as programs see it: state, GIDs, partition keys, counters, and membership in multicast groups.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use roce_net::{
    gids::{self, GidTable},
    iface,
    links::LinkChange,
};
use roce_verbs::{AsyncEvent, Mtu, PKey, PathMtus, provider::VerbsError};

use crate::device::{Device, DeviceInner, io_error};

/// Attributes of the port (`ibv_port_attr`). Its number is 1, its link layer Ethernet, its GIDs are of RoCE v2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// It can send and receive.
    pub active: bool,
    /// `IBV_PORT_PHYS_STATE_*` number: 5 link up, 2 polling (no link), 3 disabled.
    pub phys_state: u8,
    /// The largest path MTU of the protocol.
    pub max_mtu: Mtu,
    /// The largest path MTU that the interface carries.
    pub active_mtu: Mtu,
    /// Places in the table of GIDs.
    pub gid_tbl_len: u32,
    /// Places in the table of partition keys.
    pub pkey_tbl_len: u16,
    /// Longest message, bytes.
    pub max_msg_size: u32,
    /// Packets with a foreign partition key.
    pub bad_pkey_cntr: u16,
    /// Datagrams with a wrong queue key.
    pub qkey_viol_cntr: u16,
    /// Width and speed in the numbers of `ibv_port_attr`, from the interface's speed.
    pub active_width: u8,
    /// See `active_width`.
    pub active_speed: u8,
}

/// An entry of the table of GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place.
    pub index: u32,
    /// The GID: the address, IPv4 mapped into IPv6.
    pub gid: [u8; 16],
    /// The address.
    pub addr: IpAddr,
}

/// State of the interfaces that a device uses.
pub(crate) struct PortView {
    /// The interface that has the device's address; `None`: it uses all.
    interface: Option<String>,
    addr: IpAddr,
    /// Path MTU that was asked for.
    wanted: Option<Mtu>,
    state: Mutex<State>,
    link_downed: AtomicU64,
}

struct State {
    gids: GidTable,
    active: bool,
}

impl PortView {
    pub(crate) fn new(addr: IpAddr, wanted: Option<Mtu>) -> Self {
        let interface = match addr.is_unspecified() {
            true => None,
            false => iface::interface_of(addr).ok().map(|(name, _)| name),
        };
        let view = Self {
            interface,
            addr,
            wanted,
            state: Mutex::new(State {
                gids: GidTable::default(),
                active: false,
            }),
            link_downed: AtomicU64::new(0),
        };
        view.refresh();
        view
    }

    /// The addresses that the device has now.
    fn addresses(&self) -> Vec<IpAddr> {
        let all = iface::interface_addresses().unwrap_or_default();
        if !self.addr.is_unspecified() {
            let whole_loopback = self.addr.is_loopback() && self.addr.is_ipv4();
            let here = whole_loopback || all.iter().any(|a| a.ip == self.addr);
            return if here { vec![self.addr] } else { vec![] };
        }
        let mut names: Vec<(u32, String)> = all.into_iter().map(|a| (a.index, a.name)).collect();
        names.sort();
        names.dedup();
        let each = names
            .iter()
            .flat_map(|(_, name)| GidTable::addresses(name).unwrap_or_default());
        each.filter(|ip| ip.is_ipv4() || self.addr.is_ipv6()).collect()
    }

    fn is_active(&self) -> bool {
        LinkState::of(self.interface.as_deref()).active
    }

    /// Looks at the interfaces anew; what changed as asynchronous events.
    fn refresh(&self) -> Vec<AsyncEvent> {
        let (addresses, active) = (self.addresses(), self.is_active());
        let mut state = self.state.lock();
        let mut events = vec![];
        if state.gids.follow(&addresses) {
            events.push(AsyncEvent::GidChange);
        }
        match (core::mem::replace(&mut state.active, active), active) {
            (false, true) => events.push(AsyncEvent::PortActive),
            (true, false) => events.push(AsyncEvent::PortError),
            _ => {}
        }
        events
    }

    /// Returns the events of the device that follow from changes of interfaces.
    pub(crate) fn follow(&self, changes: &[(String, LinkChange)]) -> Vec<AsyncEvent> {
        let mut concerns = changes.to_vec();
        concerns.retain(|(name, _)| self.interface.as_ref().is_none_or(|mine| mine == name));
        let downed = concerns
            .iter()
            .filter(|(_, change)| *change == LinkChange::Down)
            .count();
        self.link_downed.fetch_add(downed as u64, Ordering::Relaxed);
        match concerns.is_empty() {
            true => vec![],
            false => self.refresh(),
        }
    }

    /// Returns how often the link has gone down.
    pub(crate) fn link_downed(&self) -> u64 {
        self.link_downed.load(Ordering::Relaxed)
    }

    /// Returns the MTUs that the interfaces carry now.
    pub(crate) fn path_mtus(&self) -> Option<PathMtus> {
        let fits = iface::path_mtus(self.addr).ok()?;
        Some(match self.wanted {
            Some(mtu) => fits.at_most(mtu),
            None => fits,
        })
    }
}

/// State of an interface's link, in the numbers of `ibv_port_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// It can send and receive: it is up and has a carrier.
    pub active: bool,
    /// `IBV_PORT_PHYS_STATE_*` number: 5 link up, 2 polling (no carrier), 3 disabled.
    pub phys_state: u8,
    /// Width (1: 1x, 2: 4x), from the interface's speed.
    pub active_width: u8,
    /// Speed of one lane.
    pub active_speed: u8,
}

impl LinkState {
    /// That of an interface; `None`: of all together.
    pub fn of(interface: Option<&str>) -> Self {
        let all = iface::interfaces().unwrap_or_default();
        let any = |is: fn(&iface::Interface) -> bool| {
            let mine = |i: &&iface::Interface| interface.is_none_or(|name| i.name == name);
            all.iter().filter(mine).any(is)
        };
        let active = any(|i| i.running);
        let (active_width, active_speed) = speed_codes(interface.map_or(1000, speed_of));
        Self {
            active,
            phys_state: match (active, any(|i| i.up)) {
                (true, _) => 5,
                (false, true) => 2,
                (false, false) => 3,
            },
            active_width,
            active_speed,
        }
    }
}

/// Width and speed codes of an interface's speed in Mbit/s (`ib_get_eth_speed`).
fn speed_codes(mbits: u32) -> (u8, u8) {
    const WIDTH_1X: u8 = 1;
    const WIDTH_4X: u8 = 2;
    match mbits {
        0..=1000 => (WIDTH_1X, 1),
        1001..=10_000 => (WIDTH_1X, 8),
        10_001..=20_000 => (WIDTH_4X, 2),
        20_001..=25_000 => (WIDTH_1X, 32),
        25_001..=40_000 => (WIDTH_4X, 8),
        _ => (WIDTH_4X, 32),
    }
}

fn speed_of(interface: &str) -> u32 {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/speed"));
    text.ok().and_then(|t| t.trim().parse().ok()).unwrap_or(1000)
}

/// Membership of the device in a multicast group; it ends with the drop. Queue pairs that are attached have their own.
pub struct Membership {
    group: IpAddr,
    local: IpAddr,
    device: Arc<DeviceInner>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.device.engines.first().leave(self.group, self.local);
    }
}

impl core::fmt::Debug for Membership {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Membership")
            .field("group", &self.group)
            .field("local", &self.local)
            .finish()
    }
}

impl Membership {
    /// Joins on the interface that has `local`; unspecified: the device's address.
    pub(crate) fn new(device: &Arc<DeviceInner>, group: IpAddr, local: IpAddr) -> Result<Self, VerbsError> {
        let group = group.to_canonical();
        let local = match local.to_canonical() {
            any if any.is_unspecified() => device.local_for(group)?,
            given => given,
        };
        if !group.is_multicast() || group.is_ipv4() != local.is_ipv4() {
            return Err(VerbsError::Address(format!(
                "no way from {local} to a multicast group {group}"
            )));
        }
        let joined = device.engines.first().join(group, local);
        joined.map_err(io_error(&format!(
            "joining multicast group {group} on the interface of {local}"
        )))?;
        Ok(Self {
            group,
            local,
            device: device.clone(),
        })
    }

    /// The group.
    pub fn group(&self) -> IpAddr {
        self.group
    }
}

impl Device {
    /// Attributes of the port (`ibv_query_port`).
    pub fn query_port(&self) -> PortAttr {
        let view = &self.0.router.port;
        let link = LinkState::of(view.interface.as_deref());
        let counters = self.stats().port;
        PortAttr {
            active: link.active,
            phys_state: link.phys_state,
            max_mtu: Mtu::B4096,
            active_mtu: self.mtu_from(self.addr()).unwrap_or(self.mtu()),
            gid_tbl_len: gids::TABLE_LEN as u32,
            pkey_tbl_len: self.0.limits.max_pkeys,
            max_msg_size: self.0.limits.max_msg_size,
            bad_pkey_cntr: counters.pkey_violations(),
            qkey_viol_cntr: counters.qkey_violations(),
            active_width: link.active_width,
            active_speed: link.active_speed,
        }
    }

    /// The table of GIDs, empty places left out. They are the addresses of the interfaces that the device uses, and follow
    /// their changes.
    pub fn gid_table(&self) -> Vec<GidEntry> {
        let state = self.0.router.port.state.lock();
        let entry = |(index, addr): (usize, IpAddr)| GidEntry {
            index: index as u32,
            gid: gids::gid_of(addr),
            addr,
        };
        state.gids.iter().map(entry).collect()
    }

    /// The GID at an index, zeros when the place is empty (`ibv_query_gid`).
    ///
    /// # Errors
    /// When the table has no such place.
    pub fn query_gid(&self, index: usize) -> Result<[u8; 16], VerbsError> {
        if index >= gids::TABLE_LEN {
            return Err(VerbsError::Invalid(format!("GID index {index}")));
        }
        let addr = self.0.router.port.state.lock().gids.get(index);
        Ok(addr.map_or([0; 16], gids::gid_of))
    }

    /// The index of an address in the table of GIDs.
    pub fn gid_index(&self, addr: IpAddr) -> Option<usize> {
        self.0.router.port.state.lock().gids.index_of(addr.to_canonical())
    }

    /// The partition key at an index (`ibv_query_pkey`): there is one, the default partition's.
    ///
    /// # Errors
    /// When the table has no such place.
    pub fn query_pkey(&self, index: usize) -> Result<PKey, VerbsError> {
        match index < usize::from(self.0.limits.max_pkeys) {
            true => Ok(PKey::DEFAULT),
            false => Err(VerbsError::Invalid(format!("partition key index {index}"))),
        }
    }

    /// Receives what is sent to a multicast group on the interface that has `local` (unspecified: the device's address),
    /// as long as the returned membership lives. Queue pairs get nothing of it unless they are attached.
    ///
    /// # Errors
    /// When the address is no group's, or the system refuses.
    pub fn join_group(&self, group: IpAddr, local: IpAddr) -> Result<Membership, VerbsError> {
        Membership::new(&self.0, group, local)
    }

    /// The hardware counters that rdma_rxe has, by its names and in its order (`rxe_hw_counters.c`).
    pub fn hw_counters(&self) -> [(&'static str, u64); 15] {
        self.0.hw_counters()
    }
}

impl DeviceInner {
    pub(crate) fn hw_counters(&self) -> [(&'static str, u64); 15] {
        self.stats().hw_counters(self.router.port.link_downed())
    }
}
