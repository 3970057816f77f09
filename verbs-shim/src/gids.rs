//! The table of GIDs of a device: addresses at fixed places, while they exist.

use std::{
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use roce::{gids, iface};

use crate::{abi::ibv_gid, config, errno::Result};

/// Entries of the table (`gid_tbl_len`).
pub(crate) const TABLE_LEN: usize = 128;
/// How old a picture of the addresses may be.
const FRESH: Duration = Duration::from_millis(500);

/// The GID of an address.
pub(crate) fn gid_of(ip: IpAddr) -> ibv_gid {
    ibv_gid { raw: gids::gid_of(ip) }
}

/// The address of a GID.
pub(crate) fn ip_of(gid: &ibv_gid) -> IpAddr {
    gids::ip_of(&gid.raw)
}

/// Returns the interface that has an address, if any.
///
/// # Errors
/// When the query fails, as without a descriptor left.
pub(crate) fn interface_of(ip: IpAddr) -> Result<Option<String>> {
    match iface::interface_of(ip) {
        Ok((name, _)) => Ok(Some(name)),
        Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns the addresses that the devices are restricted to and that exist; empty: no restriction.
///
/// # Errors
/// When a query fails.
pub(crate) fn selected() -> Result<Vec<IpAddr>> {
    let mut out = Vec::new();
    for ip in config::addresses() {
        out.extend(interface_of(ip)?.map(|_| ip));
    }
    Ok(out)
}

struct State {
    table: gids::GidTable,
    seen: Option<Instant>,
    /// Addresses at the last renewal.
    renewed: Option<Vec<IpAddr>>,
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
                table: gids::GidTable::default(),
                seen: None,
                renewed: None,
            }),
        }
    }

    /// Returns the addresses that the device has; `None` if the query fails.
    fn current(&self) -> Option<Vec<IpAddr>> {
        let mut have = match self.only.is_empty() {
            true => match gids::GidTable::addresses(&self.interface) {
                Ok(all) => all,
                // The interface is gone, and its addresses with it.
                Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
                Err(_) => return None,
            },
            false => {
                let mut only = Vec::new();
                for ip in &self.only {
                    only.extend(interface_of(*ip).ok()?.map(|_| *ip));
                }
                only.sort_by_key(IpAddr::is_ipv6);
                only
            }
        };
        have.truncate(TABLE_LEN);
        Some(have)
    }

    /// Reads the addresses again. Returns whether they differ from those of the last call.
    pub(crate) fn renew(&self) -> bool {
        let mut state = self.state.lock();
        let Some(have) = self.current() else { return false };
        state.seen = Some(Instant::now());
        state.table.follow(&have);
        state.renewed.replace(have.clone()) != Some(have)
    }

    /// The table as it is now.
    fn with<R>(&self, look: impl FnOnce(&gids::GidTable) -> R) -> R {
        let mut state = self.state.lock();
        if state.seen.is_none_or(|at| at.elapsed() >= FRESH)
            && let Some(have) = self.current()
        {
            state.seen = Some(Instant::now());
            state.table.follow(&have);
        }
        look(&state.table)
    }

    /// The address at an index, if there is one.
    pub(crate) fn get(&self, index: usize) -> Option<IpAddr> {
        self.with(|t| t.get(index))
    }

    /// The index of an address.
    pub(crate) fn find(&self, ip: IpAddr) -> Option<usize> {
        self.with(|t| t.index_of(ip.to_canonical()))
    }

    /// The first address of the same IP version as another, with its index.
    pub(crate) fn like(&self, ip: IpAddr) -> Option<(usize, IpAddr)> {
        self.with(|t| t.iter().find(|(_, own)| own.is_ipv4() == ip.is_ipv4()))
    }

    /// All entries in use.
    pub(crate) fn entries(&self) -> Vec<(usize, IpAddr)> {
        self.with(|t| t.iter().collect())
    }
}
