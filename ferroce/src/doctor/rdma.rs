//! RDMA devices that `--rdma` can use: whose addresses are theirs, and what stands in the way.

use std::{collections::BTreeMap, net::IpAddr};

use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{AccessFlags, access},
};
use roce_verbs::Mtu;

use super::{Diagnosis, Finding, System, fail, note, ok, warn};
use crate::{output, rdma};

/// Memory that a server has to lock for one session: 512 chunks of 128 KiB.
const SESSION: u64 = 64 << 20;

/// A port that does RoCE.
#[derive(Debug)]
struct Port {
    device: String,
    number: String,
    active: bool,
    /// Addresses of its RoCE v2 GIDs.
    addrs: Vec<IpAddr>,
    /// It has GIDs of RoCE v1.
    v1: bool,
    interfaces: Vec<String>,
}

/// The address of a GID; `None` of one that says none without an interface.
fn address(gid: &str) -> Option<IpAddr> {
    let addr: std::net::Ipv6Addr = gid.parse().ok()?;
    (!addr.is_unspecified() && !addr.is_unicast_link_local()).then(|| IpAddr::V6(addr).to_canonical())
}

impl Port {
    fn read(system: &System, device: &str, number: &str) -> Option<Self> {
        let dir = format!("/sys/class/infiniband/{device}/ports/{number}");
        if system.text(&format!("{dir}/link_layer"))? != "Ethernet" {
            return None;
        }
        let mut port = Self {
            device: device.to_owned(),
            number: number.to_owned(),
            active: system
                .text(&format!("{dir}/state"))
                .is_some_and(|s| s.contains("ACTIVE")),
            addrs: Vec::new(),
            v1: false,
            interfaces: Vec::new(),
        };
        for index in system.list(&format!("{dir}/gids")) {
            let kind = system.text(&format!("{dir}/gid_attrs/types/{index}"));
            let gid = system.text(&format!("{dir}/gids/{index}"));
            let addr = gid.as_deref().and_then(address);
            match kind.as_deref() {
                Some("RoCE v2") => port.addrs.extend(addr),
                Some(_) => port.v1 |= addr.is_some(),
                None => continue,
            }
            port.interfaces
                .extend(system.text(&format!("{dir}/gid_attrs/ndevs/{index}")));
        }
        port.interfaces.sort();
        port.interfaces.dedup();
        port.addrs.sort();
        port.addrs.dedup();
        Some(port)
    }

    fn name(&self) -> String {
        format!("{}:{}", self.device, self.number)
    }

    fn gids(&self) -> Finding {
        let (name, on) = (self.name(), self.interfaces.join(", "));
        match (self.active, self.addrs.is_empty(), self.v1) {
            (true, false, _) => {
                let addrs: Vec<String> = self.addrs.iter().map(ToString::to_string).collect();
                ok(format!("{name} on {on} has {} (RoCE v2)", addrs.join(", ")))
            }
            (false, ..) => warn(
                format!("the port of {name} is not active"),
                "look at its link: `ip link`, `rdma link`",
            ),
            (true, true, true) => fail(
                format!("{name} has GIDs of RoCE v1 only, which is not RoCEv2"),
                format!(
                    "have the adapter do RoCE v2: `cma_roce_mode -d {} -p {} -m 2`, or its driver's parameter",
                    self.device, self.number
                ),
            ),
            (true, true, false) => fail(
                format!("{name} has no address"),
                "give its interface one: `ip addr add`",
            ),
        }
    }

    fn mtu(&self, system: &System) -> Option<Finding> {
        let interface = self.interfaces.first()?;
        let bytes = system.number(&format!("/sys/class/net/{interface}/mtu"))?;
        let mtu = Mtu::for_interface(u32::try_from(bytes).ok()?)?;
        let text = format!("{} on {interface}, MTU {bytes}: path MTU {}", self.name(), mtu.bytes());
        if mtu == Mtu::B4096 {
            return Some(ok(text));
        }
        let advice =
            format!("an MTU of 4200 or more, here and on the way, gives 4096: `ip link set {interface} mtu 4200`");
        Some(note(text, advice))
    }

    /// PFC is the switch's and the driver's, and not to be read from files; of ECN some drivers tell.
    fn congestion(&self, system: &System) -> Option<Finding> {
        let interface = self.interfaces.first()?;
        let dir = format!("/sys/class/net/{interface}/ecn");
        let on = |role: &str| {
            let dir = format!("{dir}/{role}/enable");
            let enabled = |n: &String| system.text(&format!("{dir}/{n}")).is_some_and(|t| t == "1");
            system.list(&dir).into_iter().filter(enabled).collect::<Vec<_>>()
        };
        let name = self.name();
        if !system.exists(&dir) {
            return Some(note(
                format!("{name}: its driver does not tell of ECN here"),
                format!(
                    "hardware loses much where packets are lost: `dcb pfc show dev {interface}` and the adapter's tools show PFC and ECN"
                ),
            ));
        }
        let (np, rp) = (on("roce_np"), on("roce_rp"));
        match np.is_empty() || rp.is_empty() {
            false => Some(ok(format!(
                "{name}: marks are told for priorities {}, heeded for {}",
                np.join(","),
                rp.join(",")
            ))),
            true => Some(warn(
                format!("{name}: ECN is off"),
                format!(
                    "if switches mark packets: `echo 1` to {dir}/roce_np/enable/N and roce_rp/enable/N; else look at PFC (`dcb pfc show \
                     dev {interface}`)"
                ),
            )),
        }
    }
}

/// Checks all RoCE ports; nothing where there is none.
pub(super) fn check(all: &mut Diagnosis, system: &System, addrs: &[IpAddr]) {
    let devices = system.list("/sys/class/infiniband");
    let ports = |device: &String| {
        let numbers = system.list(&format!("/sys/class/infiniband/{device}/ports"));
        let read = |n: String| Port::read(system, device, &n);
        numbers.into_iter().filter_map(read).collect::<Vec<_>>()
    };
    let ports: Vec<Port> = devices.iter().flat_map(ports).collect();
    if ports.is_empty() {
        return;
    }
    all.add("rdma-addresses", [owners(&ports, addrs)]);
    all.add("rdma-gids", ports.iter().map(Port::gids));
    all.add("rdma-mtu", ports.iter().filter_map(|p| p.mtu(system)));
    all.add("rdma-ecn", ports.iter().filter_map(|p| p.congestion(system)));
    all.add("rdma-files", nodes(system, &ports));
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(u64::MAX, |(soft, _)| soft);
    all.add("rdma-locked-memory", [lockable(limit)]);
}

/// Which of our addresses are RDMA devices', and which are in software.
fn owners(ports: &[Port], addrs: &[IpAddr]) -> Finding {
    if !rdma::is_built_in() {
        let names: Vec<String> = ports.iter().map(Port::name).collect();
        return note(
            format!("all in software: this ferroce can't use {}", names.join(", ")),
            "build it with `--features hardware` to use them (docs/hardware/devices.md)",
        );
    }
    let mut by_owner = BTreeMap::<String, Vec<String>>::new();
    for addr in addrs {
        let owner = ports.iter().find(|p| p.active && p.addrs.contains(addr));
        let owner = owner.map_or_else(|| "software".to_owned(), Port::name);
        by_owner.entry(owner).or_default().push(addr.to_string());
    }
    let text = by_owner
        .iter()
        .map(|(owner, addrs)| format!("{owner}: {}", addrs.join(", ")));
    ok(text.collect::<Vec<_>>().join("; "))
}

/// Files that have to be opened.
fn nodes(system: &System, ports: &[Port]) -> Vec<Finding> {
    let verbs = system.list("/sys/class/infiniband_verbs");
    let node = |device: &str| {
        let of = |n: &&String| {
            system
                .text(&format!("/sys/class/infiniband_verbs/{n}/ibdev"))
                .as_deref()
                == Some(device)
        };
        verbs.iter().find(of).map(|n| format!("/dev/infiniband/{n}"))
    };
    let mut files = vec![(Some("/dev/infiniband/rdma_cm".to_owned()), "rdma_ucm")];
    let mut devices: Vec<&str> = ports.iter().map(|p| p.device.as_str()).collect();
    devices.dedup();
    files.extend(devices.into_iter().map(|device| (node(device), "ib_uverbs")));
    let found = files.into_iter().map(|(file, module)| {
        let Some(file) = file.filter(|file| system.exists(file)) else {
            let text = format!(
                "a file of /dev/infiniband is missing: the module {module} is not loaded, or this is a container"
            );
            return fail(text, format!("`modprobe {module}`, or pass /dev/infiniband in"));
        };
        match access(&system.path(&file), AccessFlags::R_OK | AccessFlags::W_OK) {
            Ok(()) => ok(format!("{file} may be used")),
            Err(e) => fail(
                format!("{file}: {e}"),
                format!("`chmod a+rw {file}`, or a rule of udev"),
            ),
        }
    });
    found.collect()
}

/// Registered memory is locked.
fn lockable(limit: u64) -> Finding {
    match limit {
        u64::MAX => ok("no limit"),
        n if n > 2 * SESSION => ok(format!("{} may be locked", output::bytes(n))),
        n => warn(
            format!(
                "{} may be locked: a session takes {} and more, unless the process has CAP_IPC_LOCK",
                output::bytes(n),
                output::bytes(SESSION)
            ),
            "`ulimit -l unlimited`, memlock in /etc/security/limits.conf, or LimitMEMLOCK=infinity in a unit of systemd",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::Status, *};

    /// A device with a port, its GIDs with their types, and an interface.
    fn system(gids: &[(&str, &str)], mtu: &str) -> (tempfile::TempDir, System) {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        put(&format!("{port}/link_layer"), "Ethernet\n");
        put(&format!("{port}/state"), "4: ACTIVE\n");
        for (n, (gid, kind)) in gids.iter().enumerate() {
            put(&format!("{port}/gids/{n}"), gid);
            put(&format!("{port}/gid_attrs/types/{n}"), kind);
            put(&format!("{port}/gid_attrs/ndevs/{n}"), "eth9\n");
        }
        put("sys/class/net/eth9/mtu", mtu);
        let root = dir.path().to_owned();
        (dir, System { root })
    }

    fn checks(system: &System, addrs: &[IpAddr]) -> Diagnosis {
        let mut all = Diagnosis::default();
        check(&mut all, system, addrs);
        all
    }

    fn found(all: &Diagnosis, id: &str) -> Vec<(Status, String)> {
        let of = all.checks.iter().filter(|c| c.id == id);
        of.map(|c| (c.finding.status, c.finding.summary.clone())).collect()
    }

    const V4: &str = "0000:0000:0000:0000:0000:ffff:c000:0207";
    const LOCAL: &str = "fe80:0000:0000:0000:0000:0000:0000:0001";

    #[test]
    fn a_device_with_an_address_is_fine() {
        let (_dir, system) = system(&[(LOCAL, "RoCE v2"), (V4, "IB/RoCE v1"), (V4, "RoCE v2")], "9000\n");
        let checks = checks(&system, &["192.0.2.7".parse().unwrap()]);
        let gids = found(&checks, "rdma-gids");
        assert_eq!(gids.len(), 1);
        assert!(gids[0].0 == Status::Ok && gids[0].1.contains("192.0.2.7"), "{gids:?}");
        assert_eq!(found(&checks, "rdma-mtu")[0].0, Status::Ok);
        // Its driver tells nothing, and the files are missing.
        assert_eq!(found(&checks, "rdma-ecn")[0].0, Status::Note);
        assert!(found(&checks, "rdma-files").iter().all(|c| c.0 == Status::Fail));
    }

    #[test]
    fn version_1_no_address_and_a_small_mtu_are_told() {
        let (_dir, one) = system(&[(LOCAL, "RoCE v2"), (V4, "IB/RoCE v1")], "1500\n");
        let all = checks(&one, &[]);
        let gids = found(&all, "rdma-gids");
        assert!(gids[0].0 == Status::Fail && gids[0].1.contains("RoCE v1"), "{gids:?}");
        let mtu = found(&all, "rdma-mtu");
        assert!(mtu[0].0 == Status::Note && mtu[0].1.contains("1024"), "{mtu:?}");
        let (_dir, none) = system(&[(LOCAL, "RoCE v2")], "1500\n");
        assert!(found(&checks(&none, &[]), "rdma-gids")[0].1.contains("no address"));
    }

    #[test]
    fn ecn_that_is_off_is_told() {
        let (dir, one) = system(&[(V4, "RoCE v2")], "9000\n");
        for role in ["roce_np", "roce_rp"] {
            let enable = dir.path().join(format!("sys/class/net/eth9/ecn/{role}/enable"));
            fs::create_dir_all(&enable).unwrap();
            fs::write(enable.join("3"), "0\n").unwrap();
        }
        assert_eq!(found(&checks(&one, &[]), "rdma-ecn")[0].0, Status::Warn);
        for role in ["roce_np", "roce_rp"] {
            fs::write(
                dir.path().join(format!("sys/class/net/eth9/ecn/{role}/enable/3")),
                "1\n",
            )
            .unwrap();
        }
        assert_eq!(found(&checks(&one, &[]), "rdma-ecn")[0].0, Status::Ok);
    }

    #[test]
    fn little_memory_to_lock_is_told() {
        assert_eq!(lockable(u64::MAX).status, Status::Ok);
        assert_eq!(lockable(8 << 30).status, Status::Ok);
        let little = lockable(64 << 10);
        assert_eq!(little.status, Status::Warn);
        assert!(little.advice.unwrap().contains("ulimit -l"));
    }

    #[test]
    fn without_a_device_there_is_nothing_to_say() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().to_owned();
        assert!(checks(&System { root }, &[]).checks.is_empty());
    }
}
