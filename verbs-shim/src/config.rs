//! Settings of `ferroce run`: the environment, unless the program has rights that its user hasn't.

use std::{
    fmt::{self, Display},
    fs::{self, File},
    io::ErrorKind,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use parking_lot::Mutex;
use roce::{
    DatapathKind, DeviceConfig, Faults, Mtu, environment,
    names::DeviceNames,
    ring::{Ring, usual_file},
};

use crate::fork::Own;

/// Addresses of the devices, separated by commas.
pub(crate) const ADDR: &str = "FERROCE_ADDR";
/// Names of the devices, separated by commas: NAME or INTERFACE=NAME.
const DEVICE_NAME: &str = "FERROCE_DEVICE_NAME";
/// Largest path MTU: 256, 512, 1024, 2048 or 4096.
const MTU: &str = "FERROCE_MTU";
/// Bytes per second of UC and UD towards one peer, or `off`.
const UNRELIABLE_RATE: &str = "FERROCE_UNRELIABLE_RATE";
/// Engines of the device.
const SHARDS: &str = "FERROCE_SHARDS";
/// Sockets that carry packets: `udp`, `raw`, `packet` or `packet,vlan=ID`.
const DATAPATH: &str = "FERROCE_DATAPATH";
/// How long threads look for packets before they sleep.
const SPIN: &str = "FERROCE_SPIN";
/// Capture file; `%p` stands for the process number.
const PCAP: &str = "FERROCE_PCAP";
/// Bytes of a ring of packets, and with a comma behind them the file to write it to.
const RING: &str = "FERROCE_PCAP_RING";
/// `bad`: write the ring when something goes wrong.
const RING_ON: &str = "FERROCE_PCAP_ON";
/// Rules of faults on demand, with `;` between; `none`: none yet.
const FAULT: &str = "FERROCE_FAULT";
/// The tree of `--sysfs`.
pub(crate) const SYS: &str = "FERROCE_SYS";

/// Reports something to the user. Programs check errno, which has no reason.
pub(crate) fn complain(text: fmt::Arguments<'_>) {
    eprintln!("ferroce: {text}");
}

/// Returns the requested addresses; none: all interfaces.
pub(crate) fn addresses() -> Vec<IpAddr> {
    let text = environment::var(ADDR).unwrap_or_default();
    let mut out = Vec::new();
    for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        match part.parse::<IpAddr>() {
            Ok(ip) if ip.is_unspecified() => return Vec::new(),
            Ok(ip) => out.push(ip.to_canonical()),
            Err(_) => complain(format_args!("{ADDR}: {part:?} is not an IP address; it is ignored")),
        }
    }
    out
}

/// Reads a setting, if it is given. A malformed value is reported and ignored.
fn setting<T, E: Display>(name: &str, parse: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
    let parsed = parse(environment::var(name)?.trim());
    parsed
        .inspect_err(|e| complain(format_args!("{name}: {e}; it is ignored")))
        .ok()
}

/// Returns the requested names of devices.
pub(crate) fn device_names() -> DeviceNames {
    setting(DEVICE_NAME, str::parse).unwrap_or_default()
}

/// Returns the requested path MTU.
pub(crate) fn mtu() -> Option<Mtu> {
    setting(MTU, str::parse)
}

/// Returns the requested datapath. A malformed value ends the process, so that a program does not run on other sockets than it was to.
fn datapath() -> DatapathKind {
    let text = environment::var(DATAPATH).unwrap_or_default();
    match text.trim() {
        "" => DatapathKind::default(),
        text => text.parse().unwrap_or_else(|e| {
            complain(format_args!("{DATAPATH}: {e}"));
            std::process::exit(2);
        }),
    }
}

/// Makes the configuration of the transport.
pub(crate) fn device(bind: IpAddr) -> DeviceConfig {
    let mut device = DeviceConfig::new(bind);
    device.mtu = mtu();
    device.datapath = datapath();
    if let Some((file, begun)) = pcap() {
        (device.pcap, device.pcap_append) = (Some(file), begun);
    }
    let rate = |text: &str| match text {
        "off" => Ok(None),
        number => number
            .parse()
            .map(Some)
            .map_err(|_| format!("{text:?} is neither a number of bytes per second nor `off`")),
    };
    if let Some(rate) = setting(UNRELIABLE_RATE, rate) {
        device.unreliable_rate = rate;
    }
    let shards = |text: &str| {
        let most = DeviceConfig::MAX_SHARDS;
        let count = text.parse().ok().filter(|n| (1..=most).contains(n));
        count.ok_or_else(|| format!("{text:?} is not a number from 1 to {most}"))
    };
    if let Some(shards) = setting(SHARDS, shards) {
        device.shards = shards;
    }
    if let Some(spin) = setting(SPIN, str::parse) {
        device.spin = spin;
    }
    device.faults = faults();
    device
}

/// Reads the ring of packets that is wanted: its bytes, its file, and whether to write it when something goes wrong. The default file is
/// that of `ferroce serve --pcap-ring`.
pub(crate) fn ring(program: &str) -> Option<(Ring, PathBuf, bool)> {
    let parse = |text: &str| {
        let (bytes, file) = text
            .split_once(',')
            .map_or((text, None), |(bytes, file)| (bytes, Some(file)));
        let bytes = bytes
            .parse()
            .map_err(|_| format!("{bytes:?} is not a number of bytes"))?;
        let ring = Ring::new(bytes).map_err(|e| e.to_string())?;
        let file = match file {
            Some(file) => file.replace("%p", &std::process::id().to_string()).into(),
            None => usual_file(program),
        };
        let file = std::path::absolute(file).map_err(|e| e.to_string())?;
        Ok::<_, String>((ring, file))
    };
    let (ring, file) = setting(RING, parse)?;
    let on_bad = |text: &str| match text {
        "bad" => Ok(true),
        _ => Err(format!("{text:?} is not `bad`")),
    };
    Some((ring, file, setting(RING_ON, on_bad).unwrap_or(false)))
}

/// Reads the fault rules, if faults are allowed. A mistake in one of them ends the process, so that a test does not pass for want of
/// faults.
fn faults() -> Option<Faults> {
    let text = environment::var(FAULT)?;
    match roce::fault::rules(&text).and_then(Faults::new) {
        Ok(faults) => Some(faults),
        Err(e) => {
            complain(format_args!("{FAULT}: {e}"));
            std::process::exit(2);
        }
    }
}

/// Capture file of this process: a program may open the transport more than once.
static CAPTURE: Own<Mutex<Option<PathBuf>>> = Own::new(Mutex::default);

/// Returns the capture file of this process, and whether it is open already. A file that exists is another process's: the process's
/// number is appended then, which is reported.
fn pcap() -> Option<(PathBuf, bool)> {
    let text = environment::var(PCAP)?;
    let mut capture = CAPTURE.get().lock();
    if let Some(begun) = &*capture {
        return Some((begun.clone(), true));
    }
    let path = capture_file(&text);
    *capture = Some(path.clone());
    Some((path, false))
}

fn capture_file(text: &str) -> PathBuf {
    let pid = std::process::id();
    if text.contains("%p") {
        return text.replace("%p", &pid.to_string()).into();
    }
    // The file is made here, so that of two processes that begin at the same time one has it.
    let made = File::options().write(true).create_new(true).mode(0o600).open(text);
    let taken = made.is_err_and(|e| e.kind() == ErrorKind::AlreadyExists);
    // A pipe or device can be written by several.
    if !taken || !fs::metadata(text).is_ok_and(|meta| meta.is_file()) {
        return text.into();
    }
    let own = format!("{text}.{pid}");
    complain(format_args!(
        "{text} is another process's capture: the one of this process is {own} (`%p` in the name gives each its own)"
    ));
    own.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_of_another_process_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("wire.pcap");
        let name = name.to_str().unwrap();
        assert_eq!(capture_file(name), PathBuf::from(name));
        assert!(fs::metadata(name).unwrap().is_file(), "made at once");
        let pid = std::process::id();
        assert_eq!(capture_file(name), PathBuf::from(format!("{name}.{pid}")));
        assert_eq!(
            capture_file("/x/wire-%p.pcap"),
            PathBuf::from(format!("/x/wire-{pid}.pcap"))
        );
        assert_eq!(capture_file("/dev/null"), PathBuf::from("/dev/null"));
    }
}
