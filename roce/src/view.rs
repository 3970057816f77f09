//! State of the interfaces that a device uses.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use parking_lot::Mutex;
use roce_net::{gids::GidTable, iface, links::LinkChange};
use roce_verbs::{AsyncEvent, Mtu, PathMtus};

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

/// Addresses, and whether the port is active.
#[derive(Default)]
struct State {
    addresses: BTreeSet<IpAddr>,
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
            state: Mutex::default(),
            link_downed: AtomicU64::new(0),
        };
        view.refresh();
        view
    }

    /// Returns the addresses that the device has now.
    fn addresses(&self) -> BTreeSet<IpAddr> {
        let all = iface::interfaces().unwrap_or_default();
        if !self.addr.is_unspecified() {
            let whole_loopback = self.addr.is_loopback() && self.addr.is_ipv4();
            let here = whole_loopback || all.iter().any(|i| i.addresses.contains(&self.addr));
            return here.then_some(self.addr).into_iter().collect();
        }
        let each = all
            .iter()
            .flat_map(|i| GidTable::addresses(&i.name).unwrap_or_default());
        each.filter(|ip| ip.is_ipv4() || self.addr.is_ipv6()).collect()
    }

    /// Reads the state of the interfaces. Returns events of its changes.
    fn refresh(&self) -> Vec<AsyncEvent> {
        let active = LinkState::of(self.interface.as_deref()).active;
        let addresses = self.addresses();
        let mut state = self.state.lock();
        let mut events = vec![];
        if state.addresses != addresses {
            state.addresses = addresses;
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
    /// Returns the state of an interface; `None`: of all together.
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
