//! Queue pairs that the user names: `--qp 10.0.0.1:0x12=peer:10.0.0.2:0x15,mtu:1024`.

use std::{net::IpAddr, str::FromStr};

use roce::{Psn, Qpn};
use roce_pcap::judge::Stated;

/// Reads the value of `--qp`.
pub(super) fn parse(text: &str) -> Result<Stated, String> {
    let (end, rest) = text
        .split_once('=')
        .ok_or("expected ADDRESS:QPN=peer:ADDRESS:QPN[,mtu:BYTES][,psn:PSN][,peer-psn:PSN][,depth:N]")?;
    let mut stated = Stated {
        ends: [endpoint(end)?; 2],
        mtu: None,
        first_psn: [None; 2],
        depth: [None; 2],
    };
    let mut peer = None;
    for part in rest.split(',') {
        let (key, value) = part
            .split_once(':')
            .ok_or_else(|| format!("{part}: expected KEY:VALUE"))?;
        match key {
            "peer" => peer = Some(endpoint(value)?),
            "mtu" => stated.mtu = Some(mtu(value)?),
            "psn" => stated.first_psn[0] = Some(Psn::new(number24(value)?)),
            "peer-psn" => stated.first_psn[1] = Some(Psn::new(number24(value)?)),
            "depth" => stated.depth = [Some(value.parse().map_err(|e| format!("depth {value}: {e}"))?); 2],
            _ => return Err(format!("{key}: expected peer, mtu, psn, peer-psn or depth")),
        }
    }
    stated.ends[1] = peer.ok_or("expected the other queue pair: peer:ADDRESS:QPN")?;
    Ok(stated)
}

/// Reads `ADDRESS:QPN`; IPv6 addresses may be in brackets.
pub(super) fn endpoint(text: &str) -> Result<(IpAddr, Qpn), String> {
    let (addr, qpn) = text
        .rsplit_once(':')
        .ok_or_else(|| format!("{text}: expected ADDRESS:QPN"))?;
    let addr = addr.trim_start_matches('[').trim_end_matches(']');
    let addr = IpAddr::from_str(addr).map_err(|_| format!("{addr} is no IP address"))?;
    Ok((addr, Qpn::new(number24(qpn)?)))
}

/// Reads `QPN` or `ADDRESS:QPN`.
pub(super) fn queue_pair(text: &str) -> Result<(Option<IpAddr>, Qpn), String> {
    match text.contains(':') {
        true => endpoint(text).map(|(addr, qpn)| (Some(addr), qpn)),
        false => Ok((None, Qpn::new(number24(text)?))),
    }
}

fn mtu(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        _ => Err(format!("{text} is no path MTU: expected 256, 512, 1024, 2048 or 4096")),
    }
}

/// Reads a 24-bit number, decimal or hexadecimal.
fn number24(text: &str) -> Result<u32, String> {
    let number = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    match number {
        Ok(n) if n < 1 << 24 => Ok(n),
        _ => Err(format!("{text}: expected a number below 2^24")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_are_read_or_refused_by_name() {
        let stated = parse("10.0.0.1:0x12=peer:[fd00::2]:21,mtu:1024,psn:0xfffff0,depth:4").unwrap();
        assert_eq!(stated.ends[0], ("10.0.0.1".parse().unwrap(), Qpn::new(0x12)));
        assert_eq!(stated.ends[1], ("fd00::2".parse().unwrap(), Qpn::new(21)));
        assert_eq!(
            (stated.mtu, stated.first_psn[0]),
            (Some(1024), Some(Psn::new(0xff_fff0)))
        );
        for (text, why) in [
            ("10.0.0.1:18", "expected ADDRESS:QPN=peer"),
            ("10.0.0.1:18=mtu:1024", "the other queue pair"),
            ("10.0.0.1:18=peer:10.0.0.2:16777216", "below 2^24"),
            ("10.0.0.1:18=peer:10.0.0.2:1,mtu:1500", "no path MTU"),
            ("host:18=peer:10.0.0.2:1", "no IP address"),
            ("10.0.0.1:18=peer:10.0.0.2:1,speed:9", "expected peer, mtu"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
