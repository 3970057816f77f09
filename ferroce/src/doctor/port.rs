//! Who has UDP port 4791.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
};

use roce_bth::ROCE_UDP_PORT;

use super::{Check, Status, System};

const ID: &str = "port-4791";

/// Tries to take the port; if that fails, finds out who has it.
pub(super) fn check(system: &System, addr: Option<IpAddr>) -> Check {
    let addrs = addr.map_or_else(
        || vec![IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)],
        |a| vec![a],
    );
    let mut free = Vec::new();
    for addr in &addrs {
        let socket = SocketAddr::new(*addr, ROCE_UDP_PORT);
        match UdpSocket::bind(socket) {
            Ok(_) => free.push(socket.to_string()),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return taken(*addr, &holders(system)),
            // No IPv6 here is not in the way of IPv4.
            Err(_) if addr.is_ipv6() && addrs.len() > 1 => {}
            Err(e) => {
                let advice = "use an address of this machine: `ip addr` lists them";
                return Check::found(ID, Status::Fail, format!("can't bind {socket}: {e}"), advice);
            }
        }
    }
    Check::ok(ID, format!("free ({})", free.join(", ")))
}

/// A socket on the port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Holder {
    addr: IpAddr,
    owner: Owner,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Owner {
    Process {
        pid: u32,
        name: String,
    },
    Kernel,
    /// Of another user, or in another container.
    Hidden {
        uid: u32,
    },
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.owner {
            Owner::Process { pid, name } => write!(f, "{name} (process {pid}) on {}", self.addr),
            Owner::Kernel => write!(f, "the kernel on {}", self.addr),
            Owner::Hidden { uid } => write!(f, "a process of user {uid} on {}", self.addr),
        }
    }
}

fn taken(wanted: IpAddr, holders: &[Holder]) -> Check {
    let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
    let who = if names.is_empty() {
        "somebody who can't be seen from here".to_owned()
    } else {
        names.join(", ")
    };
    let summary = format!("taken by {who}");
    // Sockets on single addresses leave the others free.
    if wanted.is_unspecified() && !holders.is_empty() && holders.iter().all(|h| !h.addr.is_unspecified()) {
        let advice = "the other addresses are free: give one with `--listen` or as source in `--path`";
        return Check::found(ID, Status::Note, summary, advice);
    }
    let advice = if holders.iter().any(|h| h.owner == Owner::Kernel) {
        "rdma_rxe has it: `rdma link delete NAME` for each link, then `modprobe -r rdma_rxe`; or use a network \
         namespace of your own"
            .to_owned()
    } else if let Some(Owner::Process { pid, .. }) = holders.first().map(|h| &h.owner) {
        format!("end it (kill {pid}), or give each an address of its own")
    } else {
        "run `ferroce doctor` as root to see who it is, or use another address".to_owned()
    };
    Check::found(ID, Status::Fail, summary, advice)
}

/// All sockets on the port in this network namespace.
pub(crate) fn holders(system: &System) -> Vec<Holder> {
    let mut found = Vec::new();
    for table in ["/proc/net/udp", "/proc/net/udp6"] {
        let Some(text) = system.text(table) else { continue };
        for (addr, uid, inode) in text.lines().skip(1).filter_map(parse_line) {
            let owner = owner(system, uid, inode);
            found.push(Holder { addr, owner });
        }
    }
    found
}

/// Local address, user and inode of a line of `/proc/net/udp` or `udp6` that is on the port.
fn parse_line(line: &str) -> Option<(IpAddr, u32, u64)> {
    let mut fields = line.split_whitespace();
    let (addr, port) = fields.nth(1)?.split_once(':')?;
    if u16::from_str_radix(port, 16).ok()? != ROCE_UDP_PORT {
        return None;
    }
    // After rem_address, st, queues, tr:tm, retrnsmt.
    let uid = fields.nth(5)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some((parse_addr(addr)?, uid, inode))
}

/// Words of the address in the machine's byte order, in hexadecimal.
fn parse_addr(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(hex.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut octets = [0; 16];
            for (nth, chunk) in octets.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(nth * 8)?);
            }
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

fn owner(system: &System, uid: u32, inode: u64) -> Owner {
    let want = format!("socket:[{inode}]");
    let mut unreadable = false;
    for pid in system.list("/proc").iter().filter_map(|name| name.parse::<u32>().ok()) {
        let Ok(entries) = fs::read_dir(system.path(&format!("/proc/{pid}/fd"))) else {
            unreadable |= system.exists(&format!("/proc/{pid}"));
            continue;
        };
        let has = entries
            .flatten()
            .any(|e| fs::read_link(e.path()).is_ok_and(|to| to.as_os_str() == want.as_str()));
        if has {
            let name = system
                .text(&format!("/proc/{pid}/comm"))
                .unwrap_or_else(|| "?".to_owned());
            return Owner::Process { pid, name };
        }
    }
    if unreadable {
        Owner::Hidden { uid }
    } else {
        Owner::Kernel
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_net_udp() {
        let line = "  512: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 37123 2 \
                    0000000000000000 0";
        let (addr, uid, inode) = parse_line(line).unwrap();
        assert_eq!((addr, uid, inode), ("127.0.0.1".parse().unwrap(), 1000, 37123));
        let line6 = "  512: 00000000000000000000000001000000:12B7 00000000000000000000000000000000:0000 07 \
                     00000000:00000000 00:00000000 00000000     0        0 99 2 0000000000000000 0";
        assert_eq!(parse_line(line6).unwrap(), ("::1".parse().unwrap(), 0, 99));
        assert_eq!(parse_line(&line.replace("12B7", "12B8")), None);
        assert_eq!(parse_line("garbage"), None);
    }

    #[test]
    fn who_has_the_port_decides_what_to_do() {
        let holder = |addr: &str, owner| Holder {
            addr: addr.parse().unwrap(),
            owner,
        };
        let any: IpAddr = "0.0.0.0".parse().unwrap();
        let process = Owner::Process {
            pid: 7,
            name: "ferroce".into(),
        };
        let one = taken(any, &[holder("127.0.0.1", process.clone())]);
        assert_eq!(one.status, Status::Note, "other addresses are free");
        let same = taken("127.0.0.1".parse().unwrap(), &[holder("127.0.0.1", process)]);
        assert_eq!(same.status, Status::Fail);
        assert!(same.summary.contains("ferroce (process 7)"), "{}", same.summary);
        let kernel = taken(any, &[holder("0.0.0.0", Owner::Kernel)]);
        assert_eq!(kernel.status, Status::Fail);
        assert!(kernel.advice.unwrap().contains("rdma_rxe"));
    }

    #[test]
    fn the_process_that_holds_a_socket_is_found() {
        let root = tempfile::tempdir().unwrap();
        let fd = root.path().join("proc/42/fd");
        fs::create_dir_all(&fd).unwrap();
        std::os::unix::fs::symlink("socket:[37123]", fd.join("5")).unwrap();
        fs::write(root.path().join("proc/42/comm"), "tester\n").unwrap();
        let system = System {
            root: root.path().into(),
        };
        let process = Owner::Process {
            pid: 42,
            name: "tester".into(),
        };
        assert_eq!(owner(&system, 0, 37123), process);
        assert_eq!(owner(&system, 0, 1), Owner::Kernel);
    }
}
