//! Captures of the folder `pcap-fixtures`, and others with the same names.

use std::path::{Path, PathBuf};

use roce_pcap::{Capture, Setup, Survey};
use roce_replay::{Connection, Event};

use crate::error::Error;

/// Returns the folder of the captures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../pcap-fixtures")
}

/// Returns the path of a capture: in the folder that `REPLAY_CAPTURES` names, if it is there, else of the fixture. So a
/// new set of captures is judged by the same tests.
pub fn locate(file: &str) -> PathBuf {
    let other = std::env::var_os("REPLAY_CAPTURES").map(|dir| Path::new(&dir).join(file));
    other.filter(|p| p.exists()).unwrap_or_else(|| fixtures().join(file))
}

/// Reads the reliable connections of a capture.
///
/// # Errors
/// When it can't be read.
pub fn connections(path: &Path) -> Result<Vec<Connection>, Error> {
    let survey = Survey::new(path.display().to_string(), &Setup::default(), &mut Capture::open(path)?);
    Ok(roce_replay::read(&survey, &mut Capture::open(path)?))
}

/// Reads the packets of the reliable connections of a capture, in its order.
///
/// # Errors
/// When it can't be read.
pub fn load(path: &Path) -> Result<Vec<Event>, Error> {
    let mut events: Vec<Event> = connections(path)?.into_iter().flat_map(|c| c.events).collect();
    events.sort_by_key(|event| event.frame);
    Ok(events)
}
