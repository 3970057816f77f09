//! What `ferroce run` tells us: the environment, unless the program has rights that its user hasn't.

use std::{net::IpAddr, num::NonZeroU64, path::PathBuf};

use roce::{DeviceConfig, Mtu, SpinMode, environment};

/// Addresses of the devices, separated by commas.
pub(crate) const ADDR: &str = "FERROCE_ADDR";
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

/// The capture file for this process. A file that exists is another process's: the number is appended then.
pub(crate) fn pcap() -> Option<PathBuf> {
    let text = environment::var(PCAP)?;
    let pid = std::process::id();
    if text.contains("%p") {
        return Some(text.replace("%p", &pid.to_string()).into());
    }
    let path = PathBuf::from(&text);
    match path.exists() {
        true => Some(format!("{text}.{pid}").into()),
        false => Some(path),
    }
}
