//! Settings of `ferroce run`: the environment, unless the program has rights that its user hasn't.

use std::{
    fs::{self, File},
    io::ErrorKind,
    net::IpAddr,
    num::NonZeroU64,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use parking_lot::Mutex;
use roce::{DeviceConfig, Faults, Mtu, SpinMode, environment, names::DeviceNames};

use crate::fork::Own;

/// Addresses of the devices, separated by commas.
pub(crate) const ADDR: &str = "FERROCE_ADDR";
/// Names of the devices, separated by commas: NAME or INTERFACE=NAME.
pub(crate) const DEVICE_NAME: &str = "FERROCE_DEVICE_NAME";
/// Largest path MTU: 256, 512, 1024, 2048 or 4096.
pub(crate) const MTU: &str = "FERROCE_MTU";
/// Bytes per second of UC and UD towards one peer, or `off`.
pub(crate) const UNRELIABLE_RATE: &str = "FERROCE_UNRELIABLE_RATE";
/// Engines of the device.
pub(crate) const SHARDS: &str = "FERROCE_SHARDS";
/// How long threads look for packets before they sleep.
pub(crate) const SPIN: &str = "FERROCE_SPIN";
/// Capture file; `%p` stands for the process number.
pub(crate) const PCAP: &str = "FERROCE_PCAP";
/// Rules of faults on demand, with `;` between; `none`: none yet.
pub(crate) const FAULT: &str = "FERROCE_FAULT";
/// The tree of `--sysfs`.
pub(crate) const SYS: &str = "FERROCE_SYS";

/// Says something that the user has to know. Programs check errno, but it can't say why.
pub(crate) fn complain(text: std::fmt::Arguments<'_>) {
    eprintln!("ferroce: {text}");
}

/// The addresses asked for; none: all interfaces.
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

/// Returns the names that devices shall have.
pub(crate) fn device_names() -> DeviceNames {
    let text = environment::var(DEVICE_NAME).unwrap_or_default();
    text.parse().unwrap_or_else(|e| {
        complain(format_args!("{DEVICE_NAME}: {e}; it is ignored"));
        DeviceNames::default()
    })
}

/// The path MTU asked for.
pub(crate) fn mtu() -> Option<Mtu> {
    let text = environment::var(MTU)?;
    let mtu = text.trim().parse::<Mtu>();
    mtu.inspect_err(|e| complain(format_args!("{MTU}: {e}; it is ignored")))
        .ok()
}

/// The pace of UC and UD asked for: `Some(None)` is none at all.
pub(crate) fn unreliable_rate() -> Option<Option<NonZeroU64>> {
    let text = environment::var(UNRELIABLE_RATE)?;
    let rate = match text.trim() {
        "off" => Some(None),
        number => number.parse().ok().map(Some),
    };
    if rate.is_none() {
        complain(format_args!(
            "{UNRELIABLE_RATE}: {text:?} is neither a number of bytes per second nor `off`; it is ignored"
        ));
    }
    rate
}

/// How many engines the device has, if that was asked for.
pub(crate) fn shards() -> Option<usize> {
    let text = environment::var(SHARDS)?;
    let most = DeviceConfig::MAX_SHARDS;
    let shards = text.trim().parse().ok().filter(|n| (1..=most).contains(n));
    if shards.is_none() {
        complain(format_args!(
            "{SHARDS}: {text:?} is not a number from 1 to {most}; it is ignored"
        ));
    }
    shards
}

/// How long threads look for packets before they sleep, if that was asked for.
pub(crate) fn spin() -> Option<SpinMode> {
    let text = environment::var(SPIN)?;
    let spin = text.trim().parse();
    spin.map_err(|e| complain(format_args!("{SPIN}: {e}; it is ignored")))
        .ok()
}

/// The faults asked for, if there may be any. Of rules with a mistake none holds, so that a test does not pass for want of faults: the
/// process ends.
pub(crate) fn faults() -> Option<Faults> {
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

/// Returns the capture file of this process, and whether the process has begun it before. A file that exists is another process's:
/// the process's number is appended then, and the user told.
pub(crate) fn pcap() -> Option<(PathBuf, bool)> {
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
