//! State of a process, as it reports it.

use std::collections::BTreeSet;

use rtrs::{addr::PathAddr, proto::DEFAULT_PORT};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Client, read};
use crate::{names, output::Failure};

#[derive(Clone, Deserialize)]
pub(super) struct Mapping {
    pub(super) session: String,
    pub(super) port: u16,
    pub(super) queue_depth: Option<u32>,
    pub(super) max_io_bytes: Option<u64>,
    pub(super) policy: String,
    pub(super) max_reconnects: i64,
    pub(super) reconnect_delay: f64,
    pub(super) paths: Vec<Path>,
    pub(super) devices: Vec<Device>,
}

#[derive(Clone, Deserialize)]
pub(super) struct Path {
    pub(super) path: String,
    pub(super) port: u16,
    pub(super) state: String,
    pub(super) device: Option<String>,
    pub(super) keys: Option<String>,
    pub(super) latency_us: Option<u64>,
    pub(super) in_flight: u64,
    pub(super) reads: u64,
    pub(super) read_bytes: u64,
    pub(super) writes: u64,
    pub(super) write_bytes: u64,
    pub(super) failovers: u64,
    pub(super) reconnects: i64,
    pub(super) failed_reconnects: u64,
}

impl Path {
    /// As a request names it, with its port.
    pub(super) fn whole(&self) -> String {
        let (src, dst) = self.path.split_once('@').unwrap_or(("", &self.path));
        let dst = dst.strip_prefix("ip:").unwrap_or(dst);
        let dst = match dst.contains(':') {
            true => format!("[{dst}]:{}", self.port),
            false => format!("{dst}:{}", self.port),
        };
        match src {
            "" => dst,
            src => format!("{src},{dst}"),
        }
    }

    fn is(&self, wanted: &PathAddr, has_port: bool) -> bool {
        let Ok(own) = names::path_of_addresses(&self.whole(), DEFAULT_PORT) else {
            return false;
        };
        let same = own.dst.ip() == wanted.dst.ip() && wanted.src.is_none_or(|src| own.src == Some(src));
        same && (!has_port || own.dst.port() == wanted.dst.port())
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) block: Option<String>,
    pub(super) mode: String,
    pub(super) state: String,
    pub(super) bytes: Option<u64>,
    pub(super) block_size: Option<u32>,
    pub(super) on_loss: String,
    pub(super) completed: u64,
    pub(super) failed: u64,
    pub(super) reads: u64,
    pub(super) read_bytes: u64,
    pub(super) writes: u64,
    pub(super) written_bytes: u64,
    pub(super) repeated: u64,
    pub(super) lost: u64,
    pub(super) waiting: u64,
    pub(super) clients: u64,
}

#[derive(Clone, Deserialize)]
pub(super) struct Session {
    /// Which of several servers has it.
    #[serde(default)]
    pub(super) server: u64,
    pub(super) session: u64,
    pub(super) name: String,
    pub(super) paths: Vec<ServedPath>,
}

#[derive(Clone, Deserialize)]
pub(super) struct ServedPath {
    pub(super) path: u64,
    pub(super) client: String,
    pub(super) server: String,
    pub(super) state: String,
    pub(super) device: Option<String>,
    pub(super) keys: String,
    pub(super) connections: u64,
    pub(super) made: u64,
    pub(super) requests: u64,
    pub(super) reads: u64,
    pub(super) read_bytes: u64,
    pub(super) writes: u64,
    pub(super) write_bytes: u64,
}

impl ServedPath {
    /// As its client names it.
    pub(super) fn name(&self) -> String {
        let client = self
            .client
            .parse()
            .map(|addr: std::net::SocketAddr| addr.ip().to_canonical());
        let client = client.map_or_else(|_| self.client.clone(), |ip| ip.to_string());
        let server = self.server.parse().map(|ip: std::net::IpAddr| ip.to_canonical());
        let server = server.map_or_else(|_| self.server.clone(), |ip| ip.to_string());
        format!("ip:{client}@ip:{server}")
    }

    fn is(&self, wanted: &PathAddr) -> bool {
        let Ok(own) = names::path_of_addresses(&self.name(), DEFAULT_PORT) else {
            return false;
        };
        own.dst.ip() == wanted.dst.ip() && wanted.src.is_none_or(|src| own.src == Some(src))
    }
}

#[derive(Clone, Deserialize)]
pub(super) struct OpenDevice {
    /// Which of several servers has it.
    #[serde(default)]
    pub(super) server: u64,
    pub(super) session: u64,
    pub(super) session_name: String,
    pub(super) client: String,
    pub(super) device: u64,
    pub(super) name: String,
    pub(super) mode: String,
    pub(super) image: String,
    pub(super) bytes: u64,
}

/// All that there is.
pub(super) struct All {
    /// As it was told.
    pub(super) json: Value,
    pub(super) mappings: Vec<Mapping>,
    pub(super) sessions: Vec<Session>,
    pub(super) open: Vec<OpenDevice>,
}

impl All {
    pub(super) fn of(client: &mut Client) -> Result<Self, Failure> {
        let mut json = json!({});
        if client.hello.maps {
            json["mappings"] = client.ask(json!({ "do": "mappings" }))?["mappings"].take();
        }
        if client.hello.serves {
            json["sessions"] = client.ask(json!({ "do": "sessions" }))?["sessions"].take();
            json["devices"] = client.ask(json!({ "do": "devices" }))?["devices"].take();
        }
        let part = |name: &str| match &json[name] {
            Value::Null => json!([]),
            part => part.clone(),
        };
        Ok(Self {
            mappings: read(part("mappings"))?,
            sessions: read(part("sessions"))?,
            open: read(part("devices"))?,
            json,
        })
    }

    /// The mapping with this session, or the only one.
    pub(super) fn mapping(&self, session: Option<&str>) -> Result<&Mapping, Failure> {
        match (session, self.mappings.as_slice()) {
            (None, [only]) => Ok(only),
            (None, []) => Err(Failure::failed("nothing is mapped by this process")),
            (None, _) => {
                let names: Vec<_> = self.mappings.iter().map(|m| m.session.as_str()).collect();
                Err(Failure::usage(format!("say which session: {}", names.join(", "))))
            }
            (Some(name), all) => {
                let found = all.iter().find(|mapping| mapping.session == name);
                found.ok_or_else(|| Failure::failed(format!("there is no session {name:?}")))
            }
        }
    }

    /// Whether this session is a mapping's rather than a server's client's; one that is not named is, if there are any.
    pub(super) fn is_of_mapping(&self, session: Option<&str>) -> bool {
        match session {
            Some(name) => self.mappings.iter().any(|m| m.session == name) || self.sessions.is_empty(),
            None => !self.mappings.is_empty(),
        }
    }

    /// Mapped devices of this name: `NAME`, `NAME@SESSION`, or `rnbdN`.
    pub(super) fn mapped(&self, name: &str) -> Vec<(&Mapping, &Device)> {
        let all = self.mappings.iter().flat_map(|m| m.devices.iter().map(move |d| (m, d)));
        let is = |(mapping, device): &(&Mapping, &Device)| {
            device.name == name
                || device.block.as_deref() == Some(name)
                || name
                    .strip_suffix(mapping.session.as_str())
                    .and_then(|n| n.strip_suffix('@'))
                    == Some(&device.name)
        };
        all.filter(is).collect()
    }

    /// The only mapped device of this name.
    pub(super) fn one_mapped(&self, name: &str) -> Result<(&Mapping, &Device), Failure> {
        match self.mapped(name).as_slice() {
            [one] => Ok(*one),
            [] if self.mappings.is_empty() => Err(Failure::failed("nothing is mapped by this process")),
            [] => Err(Failure::failed(format!("no device {name:?} is mapped"))),
            several => {
                let names: Vec<_> = several
                    .iter()
                    .map(|(m, d)| format!("{}@{}", d.name, m.session))
                    .collect();
                Err(Failure::usage(format!("say which: {}", names.join(", "))))
            }
        }
    }

    /// Paths of mappings with these addresses.
    pub(super) fn paths(&self, session: Option<&str>, text: &str) -> Vec<(&Mapping, &Path)> {
        let Some((wanted, has_port)) = path_words(text) else {
            return Vec::new();
        };
        let all = self.mappings.iter().filter(|m| session.is_none_or(|s| m.session == s));
        let all = all.flat_map(|m| m.paths.iter().map(move |p| (m, p)));
        all.filter(|(_, path)| path.is(&wanted, has_port)).collect()
    }

    /// Paths of a server's clients with these addresses.
    pub(super) fn served_paths(&self, session: Option<&str>, text: &str) -> Vec<(&Session, &ServedPath)> {
        let Some((wanted, _)) = path_words(text) else {
            return Vec::new();
        };
        let all = self
            .sessions
            .iter()
            .filter(|s| session.is_none_or(|name| s.name == name));
        let all = all.flat_map(|s| s.paths.iter().map(move |p| (s, p)));
        all.filter(|(_, path)| path.is(&wanted)).collect()
    }

    /// Names of sessions.
    pub(super) fn session_names(&self) -> BTreeSet<&str> {
        let ours = self.mappings.iter().map(|m| m.session.as_str());
        ours.chain(self.sessions.iter().map(|s| s.name.as_str())).collect()
    }
}

/// A path as it was named, and whether with its port: read with two different ones, only such a path stays the same.
fn path_words(text: &str) -> Option<(PathAddr, bool)> {
    let with = |port| names::path_of_addresses(text, port);
    let (first, second) = (with(1).ok()?, with(2).ok()?);
    Some((first, first == second))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str, port: u16) -> Path {
        let json = json!({
            "path": path, "port": port, "state": "connected", "latency_us": null, "in_flight": 0, "reads": 0, "read_bytes": 0,
            "writes": 0, "write_bytes": 0, "failovers": 0, "reconnects": 0, "failed_reconnects": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn paths_go_by_their_addresses_with_or_without_a_port() {
        let v4 = path("ip:10.0.0.1@ip:10.0.0.2", 1300);
        assert_eq!(v4.whole(), "ip:10.0.0.1,10.0.0.2:1300");
        let v6 = path("ip:fe80::1@ip:fe80::2", 1234);
        assert_eq!(v6.whole(), "ip:fe80::1,[fe80::2]:1234");
        let is =
            |path: &Path, text: &str| path_words(text).is_some_and(|(wanted, has_port)| path.is(&wanted, has_port));
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
