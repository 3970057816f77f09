//! The table of GIDs: addresses at fixed places, while they exist.

use std::{
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use roce::iface;

use crate::abi::ibv_gid;

/// Entries of the table (`gid_tbl_len`).
pub(crate) const TABLE_LEN: usize = 128;
/// How old a picture of the addresses may be.
const FRESH: Duration = Duration::from_millis(500);

/// The GID of an address: IPv4 is mapped into IPv6.
pub(crate) fn gid_of(ip: IpAddr) -> ibv_gid {
    let v6 = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}

/// The address of a GID.
pub(crate) fn ip_of(gid: &ibv_gid) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid.raw)).to_canonical()
}

/// Whether an address can be the source of RoCE packets: not link-local IPv6, which needs a scope that GIDs don't have.
pub(crate) fn usable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_unspecified() && !v6.is_unicast_link_local(),
    }
}

struct State {
    slots: Vec<Option<IpAddr>>,
    seen: Option<Instant>,
}

/// The table of one device.
pub(crate) struct GidTable {
    interface: String,
    /// Only these; empty: all of the interface.
    only: Vec<IpAddr>,
    state: Mutex<State>,
}

impl GidTable {
    pub(crate) fn new(interface: &str, only: Vec<IpAddr>) -> Self {
        Self {
            interface: interface.to_owned(),
            only,
            state: Mutex::new(State {
                slots: Vec::new(),
                seen: None,
            }),
        }
    }

    /// The addresses that the device has now, IPv4 first.
    fn current(&self) -> Option<Vec<IpAddr>> {
        let all = iface::interface_addresses().ok()?;
        let mut have: Vec<IpAddr> = match self.only.is_empty() {
            true => all
                .iter()
                .filter(|i| i.name == self.interface && usable(i.ip))
                .map(|i| i.ip)
                .collect(),
            // Every address of 127.0.0.0/8 is ours without being listed.
            false => self
                .only
                .iter()
                .copied()
                .filter(|ip| all.iter().any(|i| i.ip == *ip) || (ip.is_loopback() && ip.is_ipv4()))
                .collect(),
        };
        have.sort_by_key(IpAddr::is_ipv6);
        Some(have)
    }

    fn refresh(&self, state: &mut State) {
        if state.seen.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        let Some(have) = self.current() else { return };
        state.seen = Some(Instant::now());
        for slot in &mut state.slots {
            slot.take_if(|ip| !have.contains(ip));
        }
        for ip in have {
            if state.slots.contains(&Some(ip)) {
                continue;
            }
            if let Some(free) = state.slots.iter_mut().find(|s| s.is_none()) {
                *free = Some(ip);
            } else if state.slots.len() < TABLE_LEN {
                state.slots.push(Some(ip));
            }
        }
    }

    /// The address at an index, if there is one.
    pub(crate) fn get(&self, index: usize) -> Option<IpAddr> {
        let mut state = self.state.lock();
        self.refresh(&mut state);
        state.slots.get(index).copied().flatten()
    }

    /// The index of an address.
    pub(crate) fn find(&self, ip: IpAddr) -> Option<usize> {
        let mut state = self.state.lock();
        self.refresh(&mut state);
        state.slots.iter().position(|s| *s == Some(ip.to_canonical()))
    }

    /// All entries in use.
    pub(crate) fn entries(&self) -> Vec<(usize, IpAddr)> {
        let mut state = self.state.lock();
        self.refresh(&mut state);
        let slots = state.slots.iter().enumerate();
        slots.filter_map(|(i, ip)| Some((i, (*ip)?))).collect()
    }
}
