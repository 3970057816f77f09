//! RDMA devices, socket buffer limits, interfaces.

use std::{collections::BTreeMap, fs, net::IpAddr};

use nix::{
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    sys::socket::{SockaddrLike, SockaddrStorage},
};
use roce_verbs::Mtu;

use super::{Finding, System, fail, note, ok, warn};
use crate::output;

/// Bytes of socket buffer below which bursts of one peer are lost at full speed.
const BUFFER: u64 = 4 << 20;

/// Kernel RDMA devices that want the same packets. `usable`: this program can use them itself.
pub(super) fn rdma(system: &System, usable: bool) -> Vec<Finding> {
    let devices: Vec<Device> = system
        .list("/sys/class/infiniband")
        .iter()
        .filter_map(|n| Device::read(system, n))
        .collect();
    let mut checks: Vec<Finding> = devices.iter().filter_map(|d| d.check(usable)).collect();
    if system.exists("/sys/module/rdma_rxe") && !devices.iter().any(|d| d.kind == Kind::Rxe) {
        checks.push(warn(
            "the module rdma_rxe is loaded and may hold port 4791 although it has no link",
            "`modprobe -r rdma_rxe`",
        ));
    }
    if checks.is_empty() {
        checks.push(ok("no rdma_rxe and no HCA in the way"));
    }
    checks
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Rxe,
    /// RoCE in hardware.
    Hca,
    /// InfiniBand or iWARP: other packets.
    Other,
}

struct Device {
    name: String,
    kind: Kind,
    driver: String,
    interfaces: Vec<String>,
}

impl Device {
    fn read(system: &System, name: &str) -> Option<Self> {
        let dir = format!("/sys/class/infiniband/{name}");
        let ports = system.list(&format!("{dir}/ports"));
        let ethernet = ports.iter().any(|p| {
            system
                .text(&format!("{dir}/ports/{p}/link_layer"))
                .is_some_and(|l| l == "Ethernet")
        });
        // 4 is an RNIC: iWARP, over TCP.
        let iwarp = system
            .text(&format!("{dir}/node_type"))
            .is_some_and(|t| t.starts_with('4'));
        let driver = fs::read_link(system.path(&format!("{dir}/device/driver")))
            .ok()
            .and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
        // Only rxe and siw have no bus device; they name their interface in `parent`.
        let parent = system.text(&format!("{dir}/parent"));
        let kind = match (ethernet && !iwarp, &driver) {
            (false, _) => Kind::Other,
            (true, None) => Kind::Rxe,
            (true, Some(_)) => Kind::Hca,
        };
        let mut interfaces: Vec<String> = parent.into_iter().collect();
        for port in &ports {
            let ndevs = format!("{dir}/ports/{port}/gid_attrs/ndevs");
            interfaces.extend(
                system
                    .list(&ndevs)
                    .iter()
                    .filter_map(|n| system.text(&format!("{ndevs}/{n}"))),
            );
        }
        interfaces.retain(|n| !n.is_empty());
        interfaces.sort();
        interfaces.dedup();
        Some(Self {
            name: name.to_owned(),
            kind,
            driver: driver.unwrap_or_else(|| "rdma_rxe".to_owned()),
            interfaces,
        })
    }

    fn check(&self, usable: bool) -> Option<Finding> {
        let on = if self.interfaces.is_empty() {
            "?".to_owned()
        } else {
            self.interfaces.join(", ")
        };
        let (name, driver) = (&self.name, &self.driver);
        match self.kind {
            Kind::Rxe if usable => Some(note(
                format!(
                    "{name} (rdma_rxe) on {on} takes UDP port 4791 of the whole network namespace: no address can be in software"
                ),
                format!(
                    "it is used at its addresses (`--rdma auto`, `--rdma {name}`); for software `rdma link delete {name}`"
                ),
            )),
            Kind::Hca if usable => Some(ok(format!(
                "{name} ({driver}) on {on} is used at its addresses (`--rdma auto`)"
            ))),
            Kind::Rxe => Some(fail(
                format!("{name} (rdma_rxe) on {on} takes UDP port 4791 of the whole network namespace"),
                format!("`rdma link delete {name}` and `modprobe -r rdma_rxe`, or a network namespace of your own"),
            )),
            Kind::Hca => Some(warn(
                format!("{name} ({driver}) does RoCE in hardware on {on} and may take packets to port 4791 there"),
                "use an address of another interface, or unload the RDMA driver (mlx5_ib for ConnectX), or use the \
                 hardware itself",
            )),
            Kind::Other => None,
        }
    }
}

/// The kernel's limits for socket buffers.
pub(super) fn socket_buffers(system: &System) -> Finding {
    let mut low = Vec::new();
    let mut text = Vec::new();
    for name in ["rmem_max", "wmem_max"] {
        match system.number(&format!("/proc/sys/net/core/{name}")) {
            Some(n) => {
                text.push(format!("{name} {}", output::bytes(n)));
                if n < BUFFER {
                    low.push(format!("net.core.{name}={BUFFER}"));
                }
            }
            None => text.push(format!("{name} not visible here")),
        }
    }
    let text = text.join(", ");
    if low.is_empty() {
        return ok(text);
    }
    let summary = format!("{text}: bursts will be lost and sent again");
    warn(summary, format!("as root: sysctl -w {}", low.join(" ")))
}

/// Every interface that is up, with its RoCE path MTU.
pub(super) fn interfaces(system: &System) -> Vec<Finding> {
    let mut addrs: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    let list = match getifaddrs() {
        Ok(list) => list,
        Err(e) => {
            let advice = "look at `ip link`: the interface needs an MTU of at least 352";
            return vec![note(format!("interfaces can't be listed: {e}"), advice)];
        }
    };
    for interface in list.filter(|i| i.flags.contains(InterfaceFlags::IFF_UP)) {
        if let Some(addr) = interface.address.as_ref().and_then(ip_of) {
            addrs.entry(interface.interface_name).or_default().push(addr);
        }
    }
    if addrs.is_empty() {
        return vec![fail("no interface has an address", "configure one: `ip addr add …`")];
    }
    addrs
        .iter()
        .map(|(name, addrs)| {
            let mtu = system.number(&format!("/sys/class/net/{name}/mtu"));
            mtu_check(name, addrs, mtu.and_then(|m| u32::try_from(m).ok()))
        })
        .collect()
}

fn mtu_check(name: &str, addrs: &[IpAddr], mtu: Option<u32>) -> Finding {
    let addrs: Vec<String> = addrs.iter().map(ToString::to_string).collect();
    let head = format!("{name} ({})", addrs.join(", "));
    let Some(mtu) = mtu else {
        let advice = format!("look at `ip link show {name}`");
        return note(format!("{head}: MTU not visible"), advice);
    };
    match Mtu::for_interface(mtu) {
        None => {
            let advice = format!("ip link set {name} mtu 1500");
            warn(format!("{head}: MTU {mtu} is too small for RoCE"), advice)
        }
        Some(Mtu::B4096) => ok(format!("{head}: MTU {mtu}, path MTU 4096")),
        Some(path) => {
            let need = Mtu::B4096.bytes() as u32 + Mtu::HEADERS;
            let advice = format!(
                "where every hop can do it, `ip link set {name} mtu {need}` (or more) gives path MTU 4096 and more speed"
            );
            note(format!("{head}: MTU {mtu}, path MTU {}", path.bytes()), advice)
        }
    }
}

fn ip_of(addr: &SockaddrStorage) -> Option<IpAddr> {
    addr.family()?;
    if let Some(v4) = addr.as_sockaddr_in() {
        return Some(v4.ip().into());
    }
    addr.as_sockaddr_in6().map(|v6| v6.ip().into())
}

/// The addresses of interfaces that are up.
pub(super) fn own_addrs() -> Vec<IpAddr> {
    let up = getifaddrs().into_iter().flatten();
    let up = up.filter(|i| i.flags.contains(InterfaceFlags::IFF_UP));
    up.filter_map(|i| i.address.as_ref().and_then(ip_of)).collect()
}

/// Whether an address is one of this machine's.
pub(super) fn is_own(addr: IpAddr) -> bool {
    addr.is_loopback()
        || getifaddrs().is_ok_and(|mut list| list.any(|i| i.address.as_ref().and_then(ip_of) == Some(addr)))
}

#[cfg(test)]
mod tests {
    use super::{super::Status, *};

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(dir)
        }

        fn system(&self) -> System {
            System {
                root: self.0.path().into(),
            }
        }
    }

    #[test]
    fn rxe_is_in_the_way() {
        let tree = Tree::new(&[
            ("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet\n"),
            ("sys/class/infiniband/rxe0/node_type", "1: CA\n"),
            ("sys/class/infiniband/rxe0/parent", "eth0\n"),
            ("sys/module/rdma_rxe/refcnt", "1\n"),
        ]);
        let checks = rdma(&tree.system(), false);
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].status, Status::Fail);
        assert!(
            checks[0].summary.contains("rxe0") && checks[0].summary.contains("eth0"),
            "{}",
            checks[0].summary
        );
        assert!(checks[0].advice.as_ref().unwrap().contains("rdma link delete rxe0"));
    }

    #[test]
    fn an_hca_may_be_in_the_way_and_infiniband_is_not() {
        let tree = Tree::new(&[
            ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "enp1s0\n"),
            ("sys/class/infiniband/mlx5_0/node_type", "1: CA\n"),
            ("sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n"),
            ("sys/class/infiniband/ib0/ports/1/link_layer", "InfiniBand\n"),
            ("sys/class/infiniband/siw0/ports/1/link_layer", "Ethernet\n"),
            ("sys/class/infiniband/siw0/node_type", "4: RNIC\n"),
        ]);
        let device = tree.0.path().join("sys/class/infiniband/mlx5_0/device/driver");
        std::os::unix::fs::symlink("../../bus/pci/drivers/mlx5_core", device).unwrap();
        let checks = rdma(&tree.system(), false);
        assert_eq!(checks.len(), 1, "{checks:?}");
        assert_eq!(checks[0].status, Status::Warn);
        assert!(checks[0].summary.contains("mlx5_core") && checks[0].summary.contains("enp1s0"));
    }

    #[test]
    fn nothing_in_the_way() {
        let tree = Tree::new(&[("sys/class/net/lo/mtu", "65536\n")]);
        assert_eq!(rdma(&tree.system(), false)[0].status, Status::Ok);
    }

    #[test]
    fn small_socket_buffers_are_named_with_the_command() {
        let tree = Tree::new(&[
            ("proc/sys/net/core/rmem_max", "212992\n"),
            ("proc/sys/net/core/wmem_max", "8388608\n"),
        ]);
        let check = socket_buffers(&tree.system());
        assert_eq!(check.status, Status::Warn);
        assert_eq!(
            check.advice.as_deref(),
            Some("as root: sysctl -w net.core.rmem_max=4194304")
        );
    }

    #[test]
    fn path_mtu_of_an_interface() {
        let status = |mtu| {
            let check = mtu_check("eth0", &["192.0.2.1".parse().unwrap()], mtu);
            (check.status, check.summary)
        };
        assert!(status(Some(1500)).1.ends_with("path MTU 1024"));
        assert_eq!(status(Some(4192)).0, Status::Ok);
        assert!(status(Some(4191)).1.ends_with("path MTU 2048"));
        assert_eq!(status(Some(351)).0, Status::Warn);
        assert_eq!(status(None).0, Status::Note);
    }
}
