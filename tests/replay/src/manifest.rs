//! Manifest of the captures, `pcap-fixtures/manifest.toml`, as far as it is about replaying.

use std::{collections::BTreeMap, fs, net::IpAddr};

use roce_replay::{Kind, Settings};
use serde::Deserialize;

use crate::{error::Error, fixture::fixtures};

/// The manifest.
#[derive(Debug, Deserialize)]
pub struct Manifest {
    /// Differences that any capture may show, in any number: they depend on timing.
    pub everywhere: Vec<Common>,
    /// Its captures.
    pub capture: Vec<Entry>,
}

/// Capture. The rest that the manifest says of it is for the checker.
#[derive(Debug, Deserialize)]
pub struct Entry {
    /// File name.
    pub file: String,
    /// RoCE path MTU, bytes.
    pub path_mtu: usize,
    /// How it is replayed.
    pub replay: Replay,
}

/// How a capture is replayed.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Replay {
    /// Whose place our engine takes: the addresses of one or both sides. Empty: nobody's, and `note` says why.
    pub sides: Vec<IpAddr>,
    /// Why not both.
    pub note: Option<String>,
    /// The differences, each with its reason.
    #[serde(default)]
    pub differences: Vec<Allowed>,
    /// The status that a side's last work request ends with, if it is not success: `ibv_wc_status` by our name.
    #[serde(default)]
    pub ends: BTreeMap<IpAddr, String>,
    /// What the wire does not tell.
    #[serde(default)]
    pub settings: Settings,
}

/// A difference that is known.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Allowed {
    /// Our side.
    pub side: IpAddr,
    /// What differs.
    pub kind: Kind,
    /// How often.
    pub count: usize,
    /// Why it is no fault of ours.
    pub reason: String,
}

/// A difference of which the player has proved, packet by packet, that it is harmless.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Common {
    /// What differs.
    pub kind: Kind,
    /// Why it is no fault of ours.
    pub reason: String,
}

impl Manifest {
    /// Reads it.
    ///
    /// # Errors
    /// When it is not there, or wrong.
    pub fn read() -> Result<Self, Error> {
        let path = fixtures().join("manifest.toml");
        let text = fs::read_to_string(&path).map_err(|e| Error::Unsuitable(format!("{}: {e}", path.display())))?;
        toml::from_str(&text).map_err(|e| Error::Unsuitable(format!("{}: {e}", path.display())))
    }
}
