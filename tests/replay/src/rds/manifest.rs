//! Manifest of the captures of RDS, `pcap-fixtures/rds/manifest.toml`, as far as it is about replaying.

use std::{fs, net::IpAddr};

use serde::Deserialize;

use super::kind::Kind;
use crate::{error::Error, fixture::fixtures};

/// The manifest.
#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    /// Captures.
    pub(super) capture: Vec<Entry>,
}

/// Capture. The rest that the manifest says of it is for the checker.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) replay: Replay,
}

/// How a capture is replayed.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Replay {
    /// Sides that our node takes.
    pub(super) sides: Vec<IpAddr>,
    /// Why not both.
    pub(super) note: Option<String>,
    /// Known differences.
    #[serde(default)]
    pub(super) differences: Vec<Allowed>,
    #[serde(default)]
    pub(super) settings: Settings,
}

/// Known difference.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct Allowed {
    /// Our side.
    pub(super) side: IpAddr,
    pub(super) kind: Kind,
    /// How often.
    pub(super) count: usize,
    /// Why it is no fault of ours.
    pub(super) reason: String,
}

/// Settings of the captured sides that the wire does not tell.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(super) struct Settings {
    /// Effective `SO_SNDBUF`, bytes.
    pub(super) send_buffer: usize,
    /// Effective `SO_RCVBUF`, bytes.
    pub(super) recv_buffer: usize,
    /// Port of a program that does not read before it has to.
    pub(super) unread: Option<u16>,
}

impl Default for Settings {
    fn default() -> Self {
        let node = rds::Config::default();
        Self {
            send_buffer: node.send_buffer,
            recv_buffer: node.recv_buffer,
            unread: None,
        }
    }
}

impl Manifest {
    /// Reads it.
    pub(super) fn read() -> Result<Self, Error> {
        let path = fixtures().join("rds/manifest.toml");
        let text = fs::read_to_string(&path).map_err(|e| Error::Unsuitable(format!("{}: {e}", path.display())))?;
        toml::from_str(&text).map_err(|e| Error::Unsuitable(format!("{}: {e}", path.display())))
    }
}
