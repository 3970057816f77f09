//! Who has UDP port 4791.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    path::Path,
};

use roce::broker::Isolation;
use roce_bth::ROCE_UDP_PORT;
use roce_net::holder;

use super::{Check, Status};
use crate::sharing;

const ID: &str = "port-4791";

/// Tries to take the port; if that fails, finds out who has it.
pub(super) fn check(addr: Option<IpAddr>) -> Check {
    let addrs = addr.map_or_else(
        || vec![IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)],
        |a| vec![a],
    );
    let mut free = Vec::new();
    for addr in &addrs {
        let socket = SocketAddr::new(*addr, ROCE_UDP_PORT);
        match bind(socket) {
            Ok(_) => free.push(socket.to_string()),
            Err((e, holders)) if e.kind() == io::ErrorKind::AddrInUse => {
                return shared(*addr).unwrap_or_else(|| taken(*addr, &holders));
            }
            // No IPv6 here is not in the way of IPv4.
            Err(_) if addr.is_ipv6() && addrs.len() > 1 => {}
            Err((e, _)) => {
                let advice = "use an address of this machine: `ip addr` lists them";
                return Check::found(ID, Status::Fail, format!("can't bind {socket}: {e}"), advice);
            }
        }
    }
    Check::ok(ID, format!("free ({})", free.join(", ")))
}

/// So often a port is tried that is taken by nobody: who had it has let it go before the kernel's tables were read.
const TRIES: u32 = 5;

/// Takes the port, or says who has it.
fn bind(socket: SocketAddr) -> Result<UdpSocket, (io::Error, Vec<Holder>)> {
    let mut tries = 0;
    loop {
        let e = match UdpSocket::bind(socket) {
            Ok(bound) => return Ok(bound),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => e,
            Err(e) => return Err((e, Vec::new())),
        };
        let holders = holders(socket.ip());
        tries += 1;
        if !holders.is_empty() || tries == TRIES {
            return Err((e, holders));
        }
    }
}

/// Sockets of one owner on the port of an address.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Holder {
    addr: IpAddr,
    owner: Owner,
    sockets: usize,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Owner {
    Process {
        pid: u32,
        name: String,
    },
    Kernel,
    /// Of another user, or in another container.
    Hidden,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.owner {
            Owner::Process { pid, name } => write!(f, "{name} (process {pid}) on {}", self.addr),
            Owner::Kernel => write!(f, "the kernel on {}", self.addr),
            Owner::Hidden => write!(
                f,
                "a process that can't be seen from here, or the kernel, on {}",
                self.addr
            ),
        }?;
        match self.sockets {
            1 => Ok(()),
            n => write!(f, " ({n} sockets)"),
        }
    }
}

/// The port is our own broker's: more processes may use it.
fn shared(wanted: IpAddr) -> Option<Check> {
    let statistics = sharing::statistics().ok()??;
    let covers =
        |a: &IpAddr| wanted.is_unspecified() || *a == wanted || (a.is_unspecified() && a.is_ipv4() == wanted.is_ipv4());
    let addrs: Vec<String> = statistics
        .addrs
        .iter()
        .filter(|a| covers(a))
        .map(ToString::to_string)
        .collect();
    if addrs.is_empty() {
        return None;
    }
    let (pid, users) = (statistics.pid, statistics.processes.len());
    let text = format!(
        "shared on {} by ferroce's broker (process {pid}), which {users} processes use",
        addrs.join(", ")
    );
    Some(Check::ok(ID, text))
}

/// The broker of this user, or of the system.
pub(super) fn broker() -> Check {
    const ID: &str = "broker";
    let dir = sharing::directory();
    match roce::broker::statistics(&dir) {
        Ok(Some(s)) => {
            let users = s.processes.len();
            let text = format!(
                "runs in {} (process {}), {users} processes use it",
                dir.display(),
                s.pid
            );
            match s.isolation {
                Isolation::OneUser => Check::ok(ID, text),
                Isolation::Isolated => Check::ok(ID, text + "; its users can't read what is another's"),
                Isolation::TrustDomain => Check::found(
                    ID,
                    Status::Note,
                    text + "; its users can read each other's packets",
                    "to keep them apart it must be allowed to load a BPF program: `AmbientCapabilities=CAP_BPF`, as in \
                     ferroce's own unit",
                ),
            }
        }
        Ok(None) => Check::ok(
            ID,
            format!(
                "none runs; the first of `ferroce serve`, `map` and `run` starts one ({})",
                dir.display()
            ),
        ),
        Err(e) => Check::found(
            ID,
            Status::Warn,
            e.to_string(),
            "without a broker only one process can use an address: `FERROCE_BROKER=off` for that, or \
             FERROCE_BROKER_DIR to have it elsewhere",
        ),
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
        let advice = "the other addresses are free: give one with `--addr` or as source in `--path`";
        return Check::found(ID, Status::Note, summary, advice);
    }
    let kernels = holders.iter().any(|h| h.owner == Owner::Kernel);
    if kernels && crate::rdma::is_built_in() {
        let advice =
            "RDMA devices are used at their addresses; for software `rdma link delete NAME` for each link of rdma_rxe";
        return Check::found(ID, Status::Note, summary, advice);
    }
    let advice = if kernels {
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

/// The sockets that keep us from this address.
fn holders(addr: IpAddr) -> Vec<Holder> {
    let may_be_kernel = nix::unistd::geteuid().is_root() && Path::new("/sys/module/rdma_rxe").exists();
    grouped(holder::port_holders(addr, ROCE_UDP_PORT), may_be_kernel)
}

/// By address and owner. `may_be_kernel`: every process of this host can be seen, and it has rdma_rxe, which has one socket for each
/// version of IP. A broker has many on one address, which no process shows when all of them are in messages.
fn grouped(found: Vec<holder::Holder>, may_be_kernel: bool) -> Vec<Holder> {
    let mut sockets = BTreeMap::new();
    for one in found {
        let owner = match one.process {
            Some((pid, name)) => Owner::Process { pid, name },
            None => Owner::Hidden,
        };
        *sockets.entry((one.addr, owner)).or_insert(0) += 1;
    }
    let holder = |((addr, owner), sockets)| Holder {
        addr,
        owner: match owner {
            Owner::Hidden if may_be_kernel && sockets == 1 && addr.is_unspecified() => Owner::Kernel,
            owner => owner,
        },
        sockets,
    };
    sockets.into_iter().map(holder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_port_decides_what_to_do() {
        let holder = |addr: &str, owner| Holder {
            addr: addr.parse().unwrap(),
            owner,
            sockets: 1,
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
    fn many_sockets_of_one_owner_are_one_holder() {
        let socket = |addr: &str, process: Option<(u32, &str)>| holder::Holder {
            addr: addr.parse().unwrap(),
            process: process.map(|(pid, name)| (pid, name.to_owned())),
        };
        let mut found = vec![socket("0.0.0.0", None); 300];
        found.extend([socket("::", None), socket("127.0.0.1", Some((7, "ferroce")))]);
        let holders = grouped(found, true);
        let shown: Vec<String> = holders.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "a process that can't be seen from here, or the kernel, on 0.0.0.0 (300 sockets)",
                "ferroce (process 7) on 127.0.0.1",
                "the kernel on ::"
            ]
        );
    }
}
