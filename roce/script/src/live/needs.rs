//! Needs of scripts that not every live host or network has, and its addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use roce_bth::{Class, Opcode};
use roce_verbs::AccessFlags;

use super::{agent::Answer, config::LiveConfig};
use crate::script::{Action, Ip, SCRIPT_PORT, Script};

/// Returns why a script can't be played on a host. `caps`: its agent's answer about its device.
pub(super) fn missing(script: &Script, config: &LiveConfig, caps: &Answer) -> Option<String> {
    let (setup, is_v6) = (&script.setup, config.host.is_ipv6());
    if setup.ip.is_some_and(|ip| (ip == Ip::V6) != is_v6) {
        let version = if is_v6 { 4 } else { 6 };
        return Some(format!("it is over IPv{version}, and the host's address is not"));
    }
    if let Some(port) = setup.source_port.filter(|port| *port != SCRIPT_PORT) {
        return Some(format!(
            "by verbs alone the UDP source port {port} can't be announced to the host"
        ));
    }
    if config.is_ferroce && !setup.reorder {
        return Some("the host keeps packets beyond a gap".to_owned());
    }
    let flushes = AccessFlags::FLUSH_GLOBAL | AccessFlags::FLUSH_PERSISTENT;
    let mut rights = setup.regions.iter().map(|region| region.access).chain([setup.access]);
    let sent = |class: Class| {
        script.steps.iter().any(|step| match &step.action {
            Action::Send(spec) => spec
                .kind
                .opcode()
                .map(Opcode::info)
                .is_some_and(|info| info.class == class),
            _ => false,
        })
    };
    let annex = |has: &str, needed: bool| needed && caps.named(has) == 0;
    if annex(
        "flush",
        rights.any(|rights| rights.intersects(flushes)) || sent(Class::Flush),
    ) {
        return Some("the host has no FLUSH".to_owned());
    }
    if annex("atomic_write", sent(Class::AtomicWrite)) {
        return Some("the host has no ATOMIC WRITE".to_owned());
    }
    if annex("atomics", sent(Class::Atomic)) {
        return Some("the host has no atomic operations".to_owned());
    }
    None
}

/// Returns the address that one of a script stands for: number 1 of the documentation's networks (192.0.2.0/24, 2001:db8::/32) is the
/// host, 2 the script, others are neighbours that neither of them is. Any other address is itself.
pub(super) fn address(named: IpAddr, host: IpAddr, script: IpAddr) -> IpAddr {
    let number = match named {
        IpAddr::V4(addr) => Some(addr.octets()).filter(|o| o[..3] == [192, 0, 2]).map(|o| o[3]),
        IpAddr::V6(addr) => Some(addr.octets())
            .filter(|o| o[..4] == [0x20, 0x01, 0x0d, 0xb8])
            .map(|o| o[15]),
    };
    match number {
        None => named,
        Some(1) => host,
        Some(2) => script,
        Some(number) => {
            let candidates = (0..=u8::MAX).map(|n| with_last(script, number.wrapping_add(n.wrapping_mul(16))));
            let mut free = candidates.filter(|addr| *addr != host && *addr != script);
            free.next().unwrap_or(named)
        }
    }
}

/// Returns an address with another last byte.
fn with_last(addr: IpAddr, last: u8) -> IpAddr {
    match addr {
        IpAddr::V4(addr) => {
            let [a, b, c, _] = addr.octets();
            Ipv4Addr::new(a, b, c, last).into()
        }
        IpAddr::V6(addr) => {
            let mut octets = addr.octets();
            octets[15] = last;
            Ipv6Addr::from(octets).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_scripts_stand_for_those_of_the_network() {
        let of = |named: &str, host: &str, script: &str| {
            let parse = |text: &str| text.parse::<IpAddr>().expect(text);
            address(parse(named), parse(host), parse(script)).to_string()
        };
        let lab = |named| of(named, "10.77.0.1", "10.77.0.254");
        assert_eq!(
            ["192.0.2.1", "192.0.2.2", "192.0.2.3"].map(lab),
            ["10.77.0.1", "10.77.0.254", "10.77.0.3"]
        );
        assert_eq!(lab("198.51.100.3"), "198.51.100.3");
        // A neighbour is neither end.
        assert_eq!(of("192.0.2.3", "10.77.0.3", "10.77.0.19"), "10.77.0.35");
        assert_eq!(of("2001:db8::9", "fd77::1", "fd77::fe"), "fd77::9");
    }
}
