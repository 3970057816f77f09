//! `ferroce link`: the devices that programs see under `ferroce run` (`rdma link`).

use std::net::IpAddr;

use clap::Args;
use roce::{
    Mtu,
    broker::ProcessReport,
    environment,
    gids::{self, GidTable},
    iface,
    names::DeviceNames,
};
use serde::Serialize;

use crate::{
    output::{self, Failure},
    run::DEVICE_NAME_VARIABLE,
};

#[derive(Args)]
#[command(after_help = "\
One line for each device that programs see under `ferroce run`, in their order: one per interface that is up and has an \
address. First come interfaces that lead to other hosts, then lo, last interfaces without a link. A program that names no \
device gets the first. Names are those of $FERROCE_DEVICE_NAME (`ferroce run --device-name`), if it is set.

With --json: one array of objects with `ifname`, `port`, `state`, `physical_state`, `netdev`, `mtu` (the path MTU), \
`gids` (index and address) and `processes` (ids of those that use it now).")]
pub(crate) struct LinkArgs {
    /// Show GIDs and processes, too
    #[arg(short, long)]
    details: bool,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
pub(crate) struct Gid {
    index: usize,
    pub(crate) addr: IpAddr,
}

#[derive(Serialize)]
pub(crate) struct Link {
    pub(crate) ifname: String,
    port: u32,
    state: &'static str,
    physical_state: &'static str,
    pub(crate) netdev: String,
    mtu: Option<usize>,
    pub(crate) gids: Vec<Gid>,
    processes: Vec<u32>,
}

/// Shows the devices.
pub(crate) fn run(args: &LinkArgs) -> Result<(), Failure> {
    let processes = super::statistics()?.map(|s| s.processes).unwrap_or_default();
    let links = links(&processes).map_err(|e| Failure::failed(format!("interfaces can't be listed: {e}")))?;
    if args.json {
        return output::json(&links);
    }
    for link in &links {
        output::line(&format!(
            "link {}/{} state {} physical_state {} netdev {}",
            link.ifname, link.port, link.state, link.physical_state, link.netdev
        ))?;
        if args.details {
            details(link)?;
        }
    }
    Ok(())
}

fn details(link: &Link) -> Result<(), Failure> {
    if let Some(mtu) = link.mtu {
        output::line(&format!("    path_mtu {mtu}"))?;
    }
    for gid in &link.gids {
        output::line(&format!("    gid {} {}", gid.index, gid.addr))?;
    }
    for pid in &link.processes {
        output::line(&format!("    process {pid}"))?;
    }
    Ok(())
}

/// The device that has this address, as programs see it.
pub(crate) fn device_at(addr: IpAddr) -> Option<String> {
    let links = links(&[]).ok()?;
    let owner = || iface::interface_of(addr).ok().map(|(name, _)| name);
    let by_gid = links.iter().find(|link| link.gids.iter().any(|gid| gid.addr == addr));
    // Any address of a loopback network is the loopback interface's.
    let found = by_gid.or_else(|| {
        let owner = owner()?;
        links.iter().find(|link| link.netdev == owner)
    });
    found.map(|link| link.ifname.clone())
}

/// One per interface, in the order in which programs see them.
pub(crate) fn links(processes: &[ProcessReport]) -> std::io::Result<Vec<Link>> {
    let all = iface::interfaces()?;
    let mut out = Vec::new();
    let interfaces = gids::device_names(&all);
    let names: DeviceNames = environment::var(DEVICE_NAME_VARIABLE)
        .unwrap_or_default()
        .parse()
        .map_err(|e| std::io::Error::other(format!("{DEVICE_NAME_VARIABLE}: {e}")))?;
    let names = names.all(&interfaces);
    for (name, ifname) in interfaces.into_iter().zip(names) {
        let table = GidTable::new(GidTable::addresses(name)?);
        let gids: Vec<Gid> = table.iter().map(|(index, addr)| Gid { index, addr }).collect();
        if gids.is_empty() {
            continue;
        }
        let mtu = iface::mtu_of(name).ok().and_then(Mtu::for_interface).map(|m| m.bytes());
        let up = mtu.is_some() && all.iter().any(|interface| interface.name == *name && interface.running);
        out.push(Link {
            ifname,
            port: 1,
            state: if up { "ACTIVE" } else { "DOWN" },
            physical_state: if up { "LINK_UP" } else { "POLLING" },
            netdev: name.to_owned(),
            mtu,
            processes: users(processes, name, &gids),
            gids,
        });
    }
    Ok(out)
}

/// Processes with this device open. Any address of a loopback network is the loopback interface's.
fn users(processes: &[ProcessReport], name: &str, gids: &[Gid]) -> Vec<u32> {
    let has = |addr: &IpAddr| {
        gids.iter().any(|g| g.addr == *addr) || iface::interface_of(*addr).is_ok_and(|(owner, _)| owner == name)
    };
    let uses = |p: &&ProcessReport| {
        p.report
            .as_ref()
            .is_none_or(|r| r.addrs.is_empty() || r.addrs.iter().any(has))
    };
    let mut out: Vec<u32> = processes.iter().filter(uses).map(|p| p.pid).collect();
    out.dedup();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_a_device() {
        let links = links(&[]).unwrap();
        let lo = links.iter().find(|l| l.netdev == "lo").unwrap();
        assert_eq!((lo.state, lo.port), ("ACTIVE", 1));
        assert!(lo.gids.iter().any(|g| g.addr == IpAddr::from([127, 0, 0, 1])));
        let name = Some(lo.ifname.clone());
        assert_eq!(
            (device_at([127, 0, 0, 1].into()), device_at([127, 9, 9, 9].into())),
            (name.clone(), name)
        );
        let names: Vec<String> = (0..links.len()).map(|i| format!("ferroce{i}")).collect();
        assert!(links.iter().map(|l| &l.ifname).eq(&names));
    }
}
