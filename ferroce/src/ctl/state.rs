//! State of a process, as it reports it, and its objects by their names.

use std::collections::BTreeSet;

use rnbd_host::control::{
    ClientPath, ClientSession, MapListing, MappedDevice, MappedPath, Mappings, OpenDevice, OpenDevices, ProcessRequest,
    Sessions, read_path,
};
use rtrs::addr::PathAddr;
use serde::Serialize;

use super::client::Client;
use crate::output::Failure;

/// Name of a server's path, as its client names it.
pub(super) fn client_path_name(path: &ClientPath) -> String {
    client_path_addr(path).to_string()
}

fn client_path_addr(path: &ClientPath) -> PathAddr {
    PathAddr {
        src: Some(path.client.ip().to_canonical()),
        dst: (path.server.to_canonical(), 0).into(),
    }
}

/// Path that a user names, and whether with its port.
struct Wanted {
    addr: PathAddr,
    has_port: bool,
}

impl Wanted {
    /// `None`: the text is no path.
    fn read(text: &str) -> Option<Self> {
        // Only with a port of its own it is the same path, whatever the default.
        let [addr, other] = [1, 2].map(|port| read_path(text, port).ok());
        let (addr, other) = (addr?, other?);
        let has_port = addr == other;
        Some(Self { addr, has_port })
    }

    fn is(&self, path: &PathAddr) -> bool {
        let same = path.dst.ip() == self.addr.dst.ip() && self.addr.src.is_none_or(|src| path.src == Some(src));
        same && (!self.has_port || path.dst.port() == self.addr.dst.port())
    }
}

/// All mappings, and sessions and open devices of all servers.
#[derive(Serialize)]
pub(super) struct All {
    pub(super) mappings: Vec<MapListing>,
    pub(super) sessions: Vec<ClientSession>,
    #[serde(rename = "devices")]
    pub(super) open: Vec<OpenDevice>,
}

impl All {
    pub(super) fn of(client: &mut Client) -> Result<Self, Failure> {
        let mut all = Self {
            mappings: Vec::new(),
            sessions: Vec::new(),
            open: Vec::new(),
        };
        if client.greeting.maps {
            all.mappings = client.ask::<Mappings>(ProcessRequest::Mappings {})?.mappings;
        }
        if client.greeting.serves {
            all.sessions = client.ask::<Sessions>(ProcessRequest::Sessions {})?.sessions;
            all.open = client.ask::<OpenDevices>(ProcessRequest::Devices {})?.devices;
        }
        Ok(all)
    }

    /// The mapping with this session, or the only one.
    pub(super) fn mapping(&self, session: Option<&str>) -> Result<&MapListing, Failure> {
        match (session, self.mappings.as_slice()) {
            (None, [only]) => Ok(only),
            (None, []) => Err(Failure::failed("nothing is mapped by this process")),
            (None, _) => {
                let names: Vec<_> = self.mappings.iter().map(|m| m.session.as_str()).collect();
                Err(Failure::usage(format!("name a session: {}", names.join(", "))))
            }
            (Some(name), all) => {
                let found = all.iter().find(|mapping| mapping.session == name);
                found.ok_or_else(|| Failure::failed(format!("there is no session {name:?}")))
            }
        }
    }

    /// Whether this session is a mapping's rather than a server's; without a name it is, if there are mappings.
    pub(super) fn is_of_mapping(&self, session: Option<&str>) -> bool {
        match session {
            Some(name) => self.mappings.iter().any(|m| m.session == name) || self.sessions.is_empty(),
            None => !self.mappings.is_empty(),
        }
    }

    /// Mapped devices of this name: `NAME`, `NAME@SESSION`, or `rnbdN`.
    pub(super) fn mapped(&self, name: &str) -> Vec<(&MapListing, &MappedDevice)> {
        let is = |(mapping, device): &(&MapListing, &MappedDevice)| {
            device.name == name
                || device.block.as_deref() == Some(name)
                || name
                    .strip_suffix(mapping.session.as_str())
                    .and_then(|n| n.strip_suffix('@'))
                    == Some(&device.name)
        };
        self.all_mapped().into_iter().filter(is).collect()
    }

    /// All mapped devices.
    pub(super) fn all_mapped(&self) -> Vec<(&MapListing, &MappedDevice)> {
        let each = self.mappings.iter();
        each.flat_map(|mapping| mapping.devices.iter().map(move |device| (mapping, device)))
            .collect()
    }

    /// Objects with all others.
    pub(super) fn with<'a, T>(&'a self, objects: &'a [T]) -> Vec<(&'a Self, &'a T)> {
        objects.iter().map(|object| (self, object)).collect()
    }

    /// The only mapped device of this name.
    pub(super) fn one_mapped(&self, name: &str) -> Result<(&MapListing, &MappedDevice), Failure> {
        match self.mapped(name).as_slice() {
            [one] => Ok(*one),
            [] if self.mappings.is_empty() => Err(Failure::failed("nothing is mapped by this process")),
            [] => Err(Failure::failed(format!("no device {name:?} is mapped"))),
            several => {
                let names: Vec<_> = several
                    .iter()
                    .map(|(m, d)| format!("{}@{}", d.name, m.session))
                    .collect();
                Err(Failure::usage(format!(
                    "several devices: name one of {}",
                    names.join(", ")
                )))
            }
        }
    }

    /// Paths of mappings, those with these addresses.
    pub(super) fn paths(&self, session: Option<&str>, text: &str) -> Vec<(&MapListing, &MappedPath)> {
        let Some(wanted) = Wanted::read(text) else {
            return Vec::new();
        };
        let mut all = self.all_paths();
        all.retain(|(mapping, path)| session.is_none_or(|s| mapping.session == s) && wanted.is(&path.addr));
        all
    }

    /// All paths of mappings.
    pub(super) fn all_paths(&self) -> Vec<(&MapListing, &MappedPath)> {
        let each = self.mappings.iter();
        each.flat_map(|mapping| mapping.paths.iter().map(move |path| (mapping, path)))
            .collect()
    }

    /// Paths of servers, those with these addresses.
    pub(super) fn client_paths(&self, session: Option<&str>, text: &str) -> Vec<(&ClientSession, &ClientPath)> {
        let Some(mut wanted) = Wanted::read(text) else {
            return Vec::new();
        };
        // A server's path has no port of its own.
        wanted.has_port = false;
        let mut all = self.all_client_paths();
        all.retain(|(of, path)| session.is_none_or(|s| of.name == s) && wanted.is(&client_path_addr(path)));
        all
    }

    /// All paths of servers.
    pub(super) fn all_client_paths(&self) -> Vec<(&ClientSession, &ClientPath)> {
        let each = self.sessions.iter();
        each.flat_map(|session| session.paths.iter().map(move |path| (session, path)))
            .collect()
    }

    /// Open devices of a server's session.
    pub(super) fn open_of(&self, session: &ClientSession) -> Vec<&OpenDevice> {
        let is = |device: &&OpenDevice| (device.server, device.session) == (session.server, session.session);
        self.open.iter().filter(is).collect()
    }

    /// Names of sessions.
    pub(super) fn session_names(&self) -> BTreeSet<&str> {
        let mapped = self.mappings.iter().map(|m| m.session.as_str());
        mapped.chain(self.sessions.iter().map(|s| s.name.as_str())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_by_their_addresses_with_or_without_a_port() {
        let v4: PathAddr = "10.0.0.1,10.0.0.2:1300".parse().unwrap();
        let v6: PathAddr = "fe80::1,fe80::2".parse().unwrap();
        let is = |path: &PathAddr, text: &str| Wanted::read(text).is_some_and(|wanted| wanted.is(path));
        for text in [
            "ip:10.0.0.1@ip:10.0.0.2",
            "10.0.0.1,10.0.0.2",
            "10.0.0.2",
            "10.0.0.1,10.0.0.2:1300",
        ] {
            assert!(is(&v4, text), "{text}");
        }
        for text in ["10.0.0.2:1234", "10.0.0.9,10.0.0.2", "10.0.0.1", "disk", ""] {
            assert!(!is(&v4, text), "{text}");
        }
        assert!(is(&v6, "fe80::2") && is(&v6, "ip:fe80::1@ip:fe80::2") && !is(&v6, "[fe80::2]:1"));
    }
}
