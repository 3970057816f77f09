//! Requests to a process, and to its mappings and servers: by the control socket, the attribute tree, a daemon's reload.
//!
//! As JSON a request is an object: `do` names it, the other members are its fields.

use core::time::Duration;

use rnbd::{Errno, client::OnLoss, proto::AccessMode};
use rtrs::{
    addr::PathAddr,
    admission::PathKey,
    client::{PathCounters, Policy},
    server::request::SessionKey,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{refused::Refused, wire};

/// A device to map.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapDevice {
    /// Name at the server; NBD clients choose it by this name.
    pub name: String,
    /// Access mode.
    pub mode: AccessMode,
}

/// Request to a mapping. Paths go by their addresses; one without ours is the path to that server, if there is only one.
/// The port counts only if one of several paths between the same addresses has it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum MapRequest {
    /// Connects another path. If its source is an address that the mapping has no port of, that is opened first, for all loops, and
    /// stays open as long as the mapping runs. Refused with EADDRNOTAVAIL for an address of another host, with EADDRINUSE when
    /// its port is taken, with ETIMEDOUT when the broker does not answer; and with the errno of connecting the path (the kernel's
    /// `add_path`), which is then removed.
    AddPath {
        /// The path.
        #[serde(with = "wire")]
        path: PathAddr,
    },
    /// Removes a path, the last one too (`remove_path`).
    RemovePath {
        /// The path.
        #[serde(with = "wire")]
        path: PathAddr,
    },
    /// Disconnects a path, until a reconnect is requested (`disconnect`).
    Disconnect {
        /// The path.
        #[serde(with = "wire")]
        path: PathAddr,
    },
    /// Reconnects a path immediately (`reconnect`). Refused with EBUSY while it is being connected or closed, and with ENOTCONN when
    /// the attempt failed; further attempts follow.
    Reconnect {
        /// The path.
        #[serde(with = "wire")]
        path: PathAddr,
    },
    /// Sets counters of a path to zero.
    ResetPathStats {
        /// The path.
        #[serde(with = "wire")]
        path: PathAddr,
        /// Its counters; all by default.
        #[serde(default = "all_counters", with = "wire")]
        which: PathCounters,
    },
    /// Sets the path policy, from the next request on (`mpath_policy`).
    #[serde(rename = "policy")]
    SetPolicy {
        /// The policy.
        #[serde(with = "wire")]
        policy: Policy,
    },
    /// Sets reconnect attempts and delay, from a path's next loss or failure on (`max_reconnect_attempts`).
    #[serde(rename = "reconnects")]
    SetReconnects {
        /// Attempts at most; -1: no limit. `None`: unchanged.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attempts: Option<i64>,
        /// Time before each. `None`: unchanged.
        #[serde(default, with = "wire", skip_serializing_if = "Option::is_none")]
        delay: Option<Duration>,
    },
    /// Sets the loss policy of all devices, those included that are mapped later.
    #[serde(rename = "on_loss")]
    SetOnLoss {
        /// The policy.
        #[serde(with = "wire")]
        on_loss: OnLoss,
    },
    /// Opens another device over the session (`map_device`). Refused with EEXIST when there is one of this name, and with the errno
    /// of opening it. As JSON it is a [`MapOrder`].
    #[serde(skip)]
    Map(MapDevice),
    /// Sets a device's size (`resize`); refused with ENOENT while it is not mapped.
    Resize {
        /// Name of the device.
        device: String,
        /// In sectors of 512 bytes.
        sectors: u64,
    },
    /// Opens the device of this name again (`remap_device`); refused with ENOENT when there is none, with EALREADY when it is open,
    /// and with the server's errno.
    Remap {
        /// Name of the device.
        device: String,
    },
    /// Closes a device (`unmap_device`) after a flush; refused with ENOENT when there is none of this
    /// name. The session and other devices stay; the mapping ends with its last device. An error of the flush or of closing is
    /// the answer, and the device is gone nonetheless.
    Unmap {
        /// Name of the device.
        device: String,
        /// Also if NBD clients use it: their requests fail and they are disconnected, and nothing is flushed. Otherwise
        /// a device in use is refused with EBUSY.
        #[serde(default)]
        force: bool,
    },
    /// Returns the session, its paths and its devices.
    List {},
    /// Returns the statistics.
    Stats {},
}

fn all_counters() -> PathCounters {
    PathCounters::All
}

/// Request to a server. Refused with ENOENT when there is no such session, path or device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum ServeRequest {
    /// Returns its sessions and their paths. As JSON that is [`ProcessRequest::Sessions`].
    #[serde(skip)]
    Sessions,
    /// Returns the open devices. As JSON that is [`ProcessRequest::Devices`].
    #[serde(skip)]
    Devices,
    /// Disconnects a session. An event reports its end, when its requests have been answered.
    CloseSession {
        /// Its number.
        #[serde(with = "wire")]
        session: SessionKey,
    },
    /// Disconnects a path; its client may connect it again (the kernel's `disconnect`).
    ClosePath {
        /// Number of the session.
        #[serde(with = "wire")]
        session: SessionKey,
        /// Number of the path.
        #[serde(with = "wire")]
        path: PathKey,
    },
    /// Closes a device for a session (the kernel's `force_close`).
    ForceClose {
        /// Number of the session.
        #[serde(with = "wire")]
        session: SessionKey,
        /// The client's number for the device.
        device: u32,
    },
    /// Sets a path's counters to zero (`stats/rdma`).
    #[serde(rename = "reset_server_path_stats")]
    ResetPathStats {
        /// Number of the session.
        #[serde(with = "wire")]
        session: SessionKey,
        /// Number of the path.
        #[serde(with = "wire")]
        path: PathKey,
    },
    /// Returns the statistics.
    #[serde(rename = "server_stats")]
    Stats {},
}

/// Request to map a device, over an open session or a new one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapOrder {
    /// Name of the session; by default that of the only mapping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Paths of a new session. Ignored for one that is open, as in the kernel.
    #[serde(default, with = "wire", skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathAddr>,
    /// Name of the device at the server.
    pub device: String,
    /// Access mode.
    #[serde(default = "read_write", with = "wire")]
    pub mode: AccessMode,
}

impl MapOrder {
    /// The device.
    pub fn device(&self) -> MapDevice {
        MapDevice {
            name: self.device.clone(),
            mode: self.mode,
        }
    }
}

fn read_write() -> AccessMode {
    AccessMode::ReadWrite
}

/// Request to the process itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum ProcessRequest {
    /// Agrees on the protocol: the first request of a connection.
    Hello {
        /// [Version](super::VERSION) of the client.
        version: u32,
    },
    /// Sends events from here on.
    Subscribe {},
    /// Lists a directory of the attribute tree.
    Ls(AttributePath),
    /// Returns the status of a node of the attribute tree.
    Stat(AttributePath),
    /// Returns the text of an attribute.
    Read(AttributePath),
    /// Writes an attribute.
    Write {
        /// Its path in the tree.
        file: String,
        /// Only names of the kernel's code.
        #[serde(default)]
        strict: bool,
        /// Text to write.
        text: String,
    },
    /// Returns all statistics in Prometheus's text format.
    Metrics {},
    /// Lists all mappings.
    Mappings {},
    /// Lists the sessions of all servers.
    Sessions {},
    /// Lists the open devices of all servers.
    Devices {},
    /// Maps a device.
    Map(MapOrder),
    /// Reads a daemon's configuration again, or the certificates of a mapping in the foreground.
    Reload {},
    /// Lists the LNet nodes, with their connections and counters.
    Lnet {},
    /// Lists the tasks of a daemon.
    Tasks {},
    /// Starts a task of a daemon.
    Start {
        /// `map.NAME`, `serve.NAME`, `rds.NAME` or `lnet.NAME`.
        task: String,
        /// Arguments of the command.
        #[serde(default)]
        options: Vec<String>,
    },
    /// Stops a task of a daemon.
    Stop {
        /// `map.NAME`, `serve.NAME`, `rds.NAME` or `lnet.NAME`.
        task: String,
    },
}

/// A node of the attribute tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttributePath {
    /// Its path in the tree.
    pub file: String,
    /// Only names of the kernel's code.
    #[serde(default)]
    pub strict: bool,
}

/// Request over the control socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(untagged)]
pub enum Request {
    /// To the process.
    Process(ProcessRequest),
    /// To a mapping.
    Mapping {
        /// Name of its session; not needed if there is only one.
        #[serde(skip_serializing_if = "Option::is_none")]
        session: Option<String>,
        /// The request.
        #[serde(flatten)]
        request: MapRequest,
    },
    /// To a server.
    Server {
        /// Its place among the servers of the process; not needed if there is only one.
        #[serde(skip_serializing_if = "Option::is_none")]
        server: Option<usize>,
        /// The request.
        #[serde(flatten)]
        request: ServeRequest,
    },
}

impl Request {
    /// Request to the mapping with this session.
    pub fn to_mapping(session: &str, request: MapRequest) -> Self {
        let session = Some(session.to_owned());
        Self::Mapping { session, request }
    }

    /// Request to the server at this place.
    pub fn to_server(server: usize, request: ServeRequest) -> Self {
        let server = Some(server);
        Self::Server { server, request }
    }
}

impl From<ProcessRequest> for Request {
    fn from(request: ProcessRequest) -> Self {
        Self::Process(request)
    }
}

impl TryFrom<Map<String, Value>> for Request {
    type Error = Refused;

    /// Reads a JSON object. EINVAL for an unknown request, and for a field that is unknown, missing or malformed.
    fn try_from(mut fields: Map<String, Value>) -> Result<Self, Refused> {
        let Some(Value::String(name)) = fields.get("do").cloned() else {
            return Err(invalid("`do` must be a string, the name of a request".to_owned()));
        };
        if has::<MapRequest>(&name) {
            let session = read(&name, fields.remove("session").unwrap_or_default())?;
            let request = read(&name, fields.into())?;
            Ok(Self::Mapping { session, request })
        } else if has::<ServeRequest>(&name) {
            let server = read(&name, fields.remove("server").unwrap_or_default())?;
            let request = read(&name, fields.into())?;
            Ok(Self::Server { server, request })
        } else if has::<ProcessRequest>(&name) {
            read(&name, fields.into()).map(Self::Process)
        } else {
            Err(invalid(format!("unknown request {name:?}")))
        }
    }
}

/// Whether a type has a request of this name: whatever its fields are, reading it says so only of an unknown name.
fn has<T: DeserializeOwned>(name: &str) -> bool {
    let read = serde_json::from_value::<T>(json!({ "do": name }));
    !read.is_err_and(|e| e.to_string().starts_with("unknown variant"))
}

fn read<T: DeserializeOwned>(name: &str, value: Value) -> Result<T, Refused> {
    serde_json::from_value(value).map_err(|e| invalid(format!("{name}: {e}")))
}

fn invalid(text: String) -> Refused {
    Refused::new(Errno::EINVAL, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(value: Value) -> Result<Request, Refused> {
        let Value::Object(fields) = value else {
            panic!("{value}")
        };
        Request::try_from(fields)
    }

    #[test]
    fn requests_are_read_as_they_are_written() {
        let path = "192.0.2.1,192.0.2.7:1234";
        for request in [
            json!({ "do": "hello", "version": 1 }),
            json!({ "do": "ls", "file": "class", "strict": true }),
            json!({ "do": "map", "session": "s", "device": "d", "mode": "ro", "paths": [path] }),
            json!({ "do": "add_path", "session": "s", "path": path }),
            json!({ "do": "reset_path_stats", "path": path, "which": "cpu_migration" }),
            json!({ "do": "policy", "policy": "round-robin" }),
            json!({ "do": "reconnects", "attempts": -1 }),
            json!({ "do": "reconnects", "delay": 1.5 }),
            json!({ "do": "on_loss", "on_loss": "queue=0.5" }),
            json!({ "do": "unmap", "device": "d", "force": true }),
            json!({ "do": "list" }),
            json!({ "do": "close_path", "server": 1, "session": 2, "path": 3 }),
            json!({ "do": "server_stats" }),
        ] {
            let read = parsed(request.clone()).unwrap();
            assert_eq!(serde_json::to_value(&read).unwrap(), request, "{read:?}");
        }
        let map = parsed(json!({ "do": "map", "device": "d" })).unwrap();
        let order = MapOrder {
            session: None,
            paths: Vec::new(),
            device: "d".into(),
            mode: AccessMode::ReadWrite,
        };
        assert_eq!(map, ProcessRequest::Map(order).into());
    }

    #[test]
    fn what_is_unknown_is_refused_by_name() {
        for (request, named) in [
            (json!({ "do": "fly" }), "fly"),
            (json!({ "do": 7 }), "do"),
            (json!({}), "do"),
            (json!({ "do": "list", "odd": 1 }), "odd"),
            (json!({ "do": "server_stats", "session": 1 }), "session"),
            (json!({ "do": "tasks", "odd": null }), "odd"),
            (json!({ "do": "stat", "file": "class", "odd": 1 }), "odd"),
            (json!({ "do": "map", "device": "d", "odd": 1 }), "odd"),
            (json!({ "do": "unmap", "device": "d", "fource": true }), "fource"),
            (json!({ "do": "resize", "device": "d" }), "sectors"),
            (json!({ "do": "add_path", "path": 5 }), "5"),
            (json!({ "do": "policy", "policy": "best" }), "best"),
            (json!({ "do": "add_path", "path": "x", "session": 5 }), "5"),
        ] {
            let refused = parsed(request.clone()).unwrap_err();
            assert_eq!(refused.errno, Errno::EINVAL, "{request}");
            assert!(refused.text.contains(named), "{request}: {refused}");
        }
    }
}
