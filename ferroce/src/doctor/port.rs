//! Holder of UDP port 4791.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
};

use roce::broker::{Isolation, Translated};
use roce_bth::ROCE_UDP_PORT;
use roce_net::holder::{Holder, Owner, port_holders};

use super::{Finding, fail, note, ok, warn};
use crate::sharing;

/// Tries to take the port; if that fails, finds out who has it.
pub(super) fn check(addr: Option<IpAddr>) -> Finding {
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
                return fail(format!("can't bind {socket}: {e}"), advice);
            }
        }
    }
    ok(format!("free ({})", free.join(", ")))
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
        let holders = port_holders(socket.ip(), socket.port());
        tries += 1;
        if !holders.is_empty() || tries == TRIES {
            return Err((e, holders));
        }
    }
}

/// The port is our own broker's: more processes may use it.
fn shared(wanted: IpAddr) -> Option<Finding> {
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
    let text = format!(
        "shared on {} by ferroce's broker (process {}), {}",
        addrs.join(", "),
        statistics.pid,
        in_use_by(statistics.processes.len())
    );
    Some(ok(text))
}

/// Number of processes at a broker, in words.
fn in_use_by(processes: usize) -> String {
    let plural = if processes == 1 { "" } else { "es" };
    format!("in use by {processes} process{plural}")
}

/// The broker of this user, or of the system.
pub(super) fn broker() -> Finding {
    let dir = sharing::directory();
    match roce::broker::statistics(&dir) {
        Ok(Some(s)) => {
            let text = format!(
                "runs in {} (process {}), {}",
                dir.display(),
                s.pid,
                in_use_by(s.processes.len())
            );
            match s.isolation {
                Isolation::OneUser => ok(text),
                Isolation::Isolated => ok(text + "; its users can't read what is another's"),
                Isolation::TrustDomain => note(
                    text + "; its users can read each other's packets",
                    "to keep them apart it must be allowed to load a BPF program: `AmbientCapabilities=CAP_BPF`, as in \
                     ferroce's own unit",
                ),
            }
        }
        Ok(None) => ok(format!(
            "none runs; the first of `ferroce serve`, `map` and `run` starts one ({})",
            dir.display()
        )),
        Err(e) => warn(
            e.to_string(),
            "without a broker only one process can use an address: `FERROCE_BROKER=off` for that, or \
             FERROCE_BROKER_DIR to have it elsewhere",
        ),
    }
}

/// A connect request from here or elsewhere that reached the broker with translated addresses. Nothing if there was none.
pub(super) fn translated() -> Option<Finding> {
    translation(&sharing::statistics().ok()??.translated?)
}

fn translation(found: &Translated) -> Option<Finding> {
    /// Seconds after which the cause may have been removed.
    const RECENT: u64 = 24 * 3600;
    let summary = format!("{} s ago a connect request was {}", found.age, found.text);
    (found.age < RECENT).then(|| warn(summary, Translated::ADVICE))
}

fn taken(wanted: IpAddr, holders: &[Holder]) -> Finding {
    let names: Vec<String> = holders.iter().map(shown).collect();
    let who = if names.is_empty() {
        "somebody who can't be seen from here".to_owned()
    } else {
        names.join(", ")
    };
    let summary = format!("taken by {who}");
    // Sockets on single addresses leave the others free.
    if wanted.is_unspecified() && !holders.is_empty() && holders.iter().all(|h| !h.addr.is_unspecified()) {
        let advice = "the other addresses are free: give one with `--addr` or as source in `--path`";
        return note(summary, advice);
    }
    let kernels = holders.iter().any(|h| h.owner == Owner::Kernel);
    if kernels && crate::rdma::is_built_in() {
        let advice =
            "RDMA devices are used at their addresses; for software `rdma link delete NAME` for each link of rdma_rxe";
        return note(summary, advice);
    }
    let advice = match holders.first() {
        Some(holder) => holder.owner.remedy(),
        None => "run `ferroce doctor` as root to see who it is, or use another address".to_owned(),
    };
    fail(summary, advice)
}

/// An owner with its address, and how many sockets it has there.
fn shown(holder: &Holder) -> String {
    let Holder { addr, owner, sockets } = holder;
    match sockets {
        1 => format!("{owner} on {addr}"),
        n => format!("{owner} on {addr} ({n} sockets)"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Status, *};

    #[test]
    fn a_translation_of_late_is_reported() {
        let mut found = Translated {
            text: "translated from 172.17.0.2 to 192.168.1.5".into(),
            age: 7,
        };
        let check = translation(&found).unwrap();
        assert_eq!(check.status, Status::Warn);
        assert_eq!(
            check.summary,
            "7 s ago a connect request was translated from 172.17.0.2 to 192.168.1.5"
        );
        found.age = 1 << 20;
        assert_eq!(translation(&found), None);
    }

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
            uid: 0,
        };
        let one = taken(any, &[holder("127.0.0.1", process.clone())]);
        assert_eq!(one.status, Status::Note, "other addresses are free");
        let same = taken("127.0.0.1".parse().unwrap(), &[holder("127.0.0.1", process)]);
        assert_eq!(same.status, Status::Fail);
        assert!(same.summary.contains("process 7 (ferroce)"), "{}", same.summary);
        let kernel = taken(any, &[holder("0.0.0.0", Owner::Kernel)]);
        assert_eq!(kernel.status, Status::Fail);
        assert!(kernel.advice.unwrap().contains("rdma link delete"));
        let others = Owner::Broker {
            uid: 4_000_000_000,
            pid: None,
            sockets: vec!["/x/broker.sock".into()],
        };
        let advice = taken(any, &[holder("0.0.0.0", others)]).advice.unwrap();
        assert!(
            advice.contains("ferroce-broker.service") && advice.contains("FERROCE_BROKER_DIR"),
            "{advice}"
        );
    }
}
