//! What both hosts of a run with `--peer` have, and what of that a scenario wants.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

use crate::{Error, far::Far, lab::Places};

/// What a scenario against another host needs beside the verbs-agent there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Want {
    /// Our transport in software here: the address must not be an RDMA device's, which would take its packets.
    Software,
    /// A program there.
    Program(&'static str),
    /// An RDMA device here, and our program for it.
    DeviceHere,
    /// A device of the kernel's RNBD server there that may be overwritten (`--rnbd`).
    Rnbd,
}

/// Lines `name=value` about a host.
#[derive(Clone, Default, serde::Serialize, Debug)]
#[serde(transparent)]
pub(crate) struct Facts(BTreeMap<String, String>);

impl Facts {
    pub(crate) fn parse(text: &str) -> Self {
        let pair = |line: &str| {
            let (name, value) = line.split_once('=')?;
            let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
            plain.then(|| (name.to_owned(), value.trim().to_owned()))
        };
        Self(text.lines().filter_map(pair).collect())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Why a program does not run there, if it does not.
    fn lacks(&self, program: &str) -> Option<String> {
        if self.get(&format!("program.{program}")).is_some() {
            return None;
        }
        Some(match self.get(&format!("broken.{program}")) {
            Some(why) => format!("{program} does not run there: {why}"),
            None => format!("no {program} there"),
        })
    }
}

/// Both hosts.
#[derive(Clone, Default, serde::Serialize, Debug)]
pub(crate) struct Hosts {
    pub(crate) here: Facts,
    pub(crate) there: Facts,
    /// The device of the kernel's RNBD server there.
    pub(crate) rnbd: Option<String>,
}

impl Hosts {
    /// Asks both. `device`: `--device`.
    pub(crate) fn ask(
        far: &Far,
        there: IpAddr,
        here: &[Option<IpAddr>],
        places: &Places,
        rnbd: Option<String>,
    ) -> Result<Self, Error> {
        let address = there.to_string();
        let mut program = vec!["host-facts", address.as_str()];
        program.extend(far.device.as_deref());
        let mut asked = far.start("host-facts", &program, 60, &places.logs)?;
        let said = asked.finish(std::time::Duration::from_secs(90))?;
        Ok(Self {
            here: of_this_host(here, places, Path::new("/sys/class/infiniband")),
            there: Facts::parse(&said),
            rnbd,
        })
    }

    /// Why a scenario can't be run between them.
    pub(crate) fn lack(&self, wants: &[Want]) -> Option<String> {
        wants.iter().find_map(|want| match want {
            Want::Program(name) => self.there.lacks(name),
            Want::Software => {
                let device = self.here.get("device")?;
                let addr = self.here.get("device-address").unwrap_or_default();
                Some(format!(
                    "not in software here: {addr} is an address of the RDMA device {device}, which takes the packets"
                ))
            }
            Want::DeviceHere => match (self.here.get("device"), self.here.get("program.ferroce-rdma")) {
                (None, _) => Some("no RDMA device here has our address".to_owned()),
                (_, None) => Some("no ferroce-rdma here".to_owned()),
                _ => None,
            },
            Want::Rnbd => match self.rnbd {
                Some(_) => None,
                None => Some("no --rnbd DEVICE".to_owned()),
            },
        })
    }
}

/// `sys` is `/sys/class/infiniband`.
fn of_this_host(addrs: &[Option<IpAddr>], places: &Places, sys: &Path) -> Facts {
    let mut facts = BTreeMap::new();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value.filter(|v| !v.is_empty()) {
            facts.insert(name.to_owned(), value);
        }
    };
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let release = read("/etc/os-release").unwrap_or_default();
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    add("system", pretty.map(|name| name.trim_matches('"').to_owned()));
    add("kernel", read("/proc/sys/kernel/osrelease"));
    let processors = std::thread::available_parallelism().ok();
    add("processors", processors.map(|n| n.to_string()));
    for addr in addrs.iter().flatten() {
        if let Some(device) = owner(*addr, sys) {
            add("device", Some(device));
            add("device-address", Some(addr.to_string()));
        }
    }
    if places.rdma.is_file() {
        add("program.ferroce-rdma", Some(places.rdma.display().to_string()));
    }
    Facts(facts)
}

/// The RDMA device that has an address as a GID, `NAME:PORT`.
fn owner(addr: IpAddr, sys: &Path) -> Option<String> {
    let gid = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let is = |path: &Path| {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().parse::<Ipv6Addr>().is_ok_and(|found| found == gid)
    };
    for device in entries(sys) {
        for port in entries(&device.path().join("ports")) {
            if entries(&port.path().join("gids")).any(|entry| is(&entry.path())) {
                let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
                return Some(format!("{}:{}", name(&device), name(&port)));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_lines() {
        let facts =
            Facts::parse("kernel=Linux 6.1\nnonsense\n=x\nno name=y\nprogram.rping=/usr/bin/rping\nbroken.a=no lib\n");
        assert_eq!(facts.get("kernel"), Some("Linux 6.1"));
        assert_eq!(facts.all().count(), 3);
        assert_eq!(facts.lacks("rping"), None);
        assert_eq!(facts.lacks("a").as_deref(), Some("a does not run there: no lib"));
        assert_eq!(facts.lacks("b").as_deref(), Some("no b there"));
    }

    #[test]
    fn what_is_not_there_keeps_a_scenario_from_running() {
        let mut hosts = Hosts::default();
        assert_eq!(hosts.lack(&[Want::Software]), None);
        assert!(
            hosts
                .lack(&[Want::DeviceHere])
                .is_some_and(|why| why.starts_with("no RDMA device"))
        );
        assert!(hosts.lack(&[Want::Software, Want::Program("rping")]).is_some());
        assert_eq!(hosts.lack(&[Want::Rnbd]).as_deref(), Some("no --rnbd DEVICE"));
        hosts.here = Facts::parse("device=mlx5_0:1\ndevice-address=192.0.2.1\n");
        let why = hosts.lack(&[Want::Software]).expect("the device takes the packets");
        assert!(why.contains("192.0.2.1") && why.contains("mlx5_0:1"), "{why}");
        assert_eq!(hosts.lack(&[Want::DeviceHere]).as_deref(), Some("no ferroce-rdma here"));
        hosts.here = Facts::parse("device=mlx5_0:1\nprogram.ferroce-rdma=/x\n");
        assert_eq!(hosts.lack(&[Want::DeviceHere]), None);
    }

    #[test]
    fn an_address_has_the_device_whose_gid_it_is() {
        let sys = tempfile::tempdir().expect("a folder");
        let gids = sys.path().join("mlx5_0/ports/1/gids");
        fs::create_dir_all(&gids).expect("made");
        fs::write(gids.join("0"), "0000:0000:0000:0000:0000:ffff:c000:0201\n").expect("written");
        fs::write(gids.join("1"), "2001:0db8:0000:0000:0000:0000:0000:0001\n").expect("written");
        let of = |addr: &str| owner(addr.parse().expect("an address"), sys.path());
        assert_eq!(of("192.0.2.1").as_deref(), Some("mlx5_0:1"));
        assert_eq!(of("2001:db8::1").as_deref(), Some("mlx5_0:1"));
        assert_eq!(of("192.0.2.2"), None);
        assert_eq!(
            owner("192.0.2.1".parse().expect("an address"), Path::new("/nowhere")),
            None
        );
    }
}
