//! Changes of interfaces and addresses, told by the kernel (rtnetlink).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use crate::{
    iface::{Interface, interfaces, mtu_of},
    sys,
};

/// Change of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkChange {
    /// It is up and has a link: the port is active.
    Active,
    /// It went down, or away.
    Down,
    /// Its addresses changed: the table of GIDs did.
    Addresses,
    /// Its MTU changed.
    Mtu,
}

#[derive(Clone, PartialEq, Eq, Default)]
struct LinkState {
    running: bool,
    addresses: Vec<IpAddr>,
    /// Bytes; 0: unknown.
    mtu: u32,
}

type Picture = BTreeMap<String, LinkState>;

fn picture() -> io::Result<Picture> {
    let state = |mut link: Interface| {
        link.addresses.sort_unstable();
        let state = LinkState {
            running: link.running,
            mtu: mtu_of(&link.name).unwrap_or(0),
            addresses: link.addresses,
        };
        (link.name, state)
    };
    Ok(interfaces()?.into_iter().map(state).collect())
}

/// Differences between two pictures.
fn changes(before: &Picture, after: &Picture) -> Vec<(String, LinkChange)> {
    let mut out = vec![];
    let gone = before.keys().filter(|name| !after.contains_key(*name));
    let none = LinkState::default();
    for name in after.keys().chain(gone) {
        let was = before.get(name).unwrap_or(&none);
        let is = after.get(name).unwrap_or(&none);
        match (was.running, is.running) {
            (false, true) => out.push((name.clone(), LinkChange::Active)),
            (true, false) => out.push((name.clone(), LinkChange::Down)),
            _ => {}
        }
        if was.addresses != is.addresses {
            out.push((name.clone(), LinkChange::Addresses));
        }
        if was.mtu != is.mtu {
            out.push((name.clone(), LinkChange::Mtu));
        }
    }
    out
}

/// Addresses that had a link before and have none after.
fn lost_addresses(before: &Picture, after: &Picture) -> Vec<IpAddr> {
    let usable = |picture: &Picture| -> BTreeSet<IpAddr> {
        let running = picture.values().filter(|link| link.running);
        running.flat_map(|link| link.addresses.iter().copied()).collect()
    };
    usable(before).difference(&usable(after)).copied().collect()
}

/// Watches all interfaces of a network namespace. Its descriptor is readable when something may have changed.
pub struct LinkWatch {
    socket: OwnedFd,
    last: Picture,
}

impl core::fmt::Debug for LinkWatch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("LinkWatch").finish_non_exhaustive()
    }
}

impl LinkWatch {
    /// Watches from now on.
    ///
    /// # Errors
    /// When the system has no netlink.
    pub fn new() -> io::Result<Self> {
        // The socket first, so that nothing is missed between.
        let socket = sys::watch_links()?;
        Ok(Self {
            socket,
            last: picture()?,
        })
    }

    /// Returns the changes since the last call, by interface. Never waits.
    ///
    /// # Errors
    /// When the kernel can't tell how the interfaces are; the change is not lost.
    pub fn take(&mut self) -> io::Result<Vec<(String, LinkChange)>> {
        self.compare(changes)
    }

    /// Compares the interfaces with those of the last call if something may have changed.
    fn compare<T>(&mut self, difference: fn(&Picture, &Picture) -> Vec<T>) -> io::Result<Vec<T>> {
        if !sys::drain(self.socket.as_fd()) {
            return Ok(vec![]);
        }
        let now = picture()?;
        let found = difference(&self.last, &now);
        self.last = now;
        Ok(found)
    }

    /// Addresses that lost their link since the last call: their interface went down or away, or they were removed. Never waits.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_lost(&mut self) -> io::Result<Vec<IpAddr>> {
        self.compare(lost_addresses)
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(running: bool, ips: &[&str]) -> LinkState {
        LinkState {
            running,
            addresses: ips.iter().map(|t| t.parse().unwrap()).collect(),
            mtu: 1500,
        }
    }

    #[test]
    fn links_and_addresses_that_come_and_go_are_told() {
        let before = Picture::from([
            ("a".into(), state(true, &["10.0.0.1"])),
            ("b".into(), state(true, &[])),
            ("c".into(), state(false, &["10.0.0.3"])),
        ]);
        let after = Picture::from([
            ("a".into(), state(true, &["10.0.0.2"])),
            ("c".into(), state(true, &["10.0.0.3"])),
        ]);
        let told = changes(&before, &after);
        let expected = [
            ("a".to_owned(), LinkChange::Addresses),
            ("c".to_owned(), LinkChange::Active),
            ("b".to_owned(), LinkChange::Down),
            ("b".to_owned(), LinkChange::Mtu),
        ];
        assert_eq!(told, expected);
        assert!(changes(&after, &after).is_empty());
    }

    #[test]
    fn addresses_without_a_link_are_lost() {
        let before = Picture::from([
            ("a".into(), state(true, &["10.0.0.1", "10.0.0.4"])),
            ("b".into(), state(true, &["10.0.0.2"])),
            ("c".into(), state(false, &["10.0.0.3"])),
            ("d".into(), state(true, &["10.0.0.5"])),
        ]);
        let after = Picture::from([
            ("a".into(), state(true, &["10.0.0.1"])),
            ("b".into(), state(false, &["10.0.0.2"])),
            // It has moved.
            ("c".into(), state(true, &["10.0.0.5"])),
        ]);
        let lost: Vec<String> = lost_addresses(&before, &after)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(lost, ["10.0.0.2", "10.0.0.4"]);
    }

    #[test]
    fn another_mtu_is_told() {
        let picture = |mtu| {
            let link = LinkState {
                mtu,
                ..state(true, &["10.0.0.1"])
            };
            Picture::from([("a".to_owned(), link)])
        };
        let told = changes(&picture(1500), &picture(9000));
        assert_eq!(told, [("a".to_owned(), LinkChange::Mtu)]);
    }

    #[test]
    fn a_watch_begins_quietly() {
        let mut watch = LinkWatch::new().unwrap();
        assert!(watch.take().unwrap().is_empty());
    }
}
