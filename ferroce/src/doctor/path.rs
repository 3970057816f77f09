//! The path to a peer: route, path MTU, and address translation, which the ICRC does not survive.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use nix::sys::socket::{getsockopt, sockopt};
use roce::{CmEventKind, ConnParams, Device, DeviceConfig, Mtu, NoAnswer, QpCaps, QpInit, RejectReason, VerbsError};
use roce_bth::ROCE_UDP_PORT;

use super::{Diagnosis, Finding, System, fail, host, note, ok, warn};

/// Time for the peer to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Checks the path to `peer`.
pub(super) fn check(all: &mut Diagnosis, system: &System, from: Option<IpAddr>, peer: IpAddr) {
    let any = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let route = || {
        let socket = UdpSocket::bind((from.unwrap_or(any), 0))?;
        socket.connect((peer, ROCE_UDP_PORT))?;
        Ok::<_, io::Error>((socket.local_addr()?.ip(), socket))
    };
    let (local, socket) = match route() {
        Ok(route) => route,
        Err(e) => {
            let advice = format!("`ip route get {peer}` shows what the kernel would do");
            return all.add("route", [fail(format!("no route to {peer}: {e}"), advice)]);
        }
    };
    all.add("route", [ok(format!("{local} to {peer}"))]);
    all.add("path-mtu", path_mtu(&socket, peer));
    all.add("nat", [nat(system, local, peer)]);
    all.add("peer", [answer(local, peer)]);
}

/// Asks the peer's connection manager for a connection. Any answer, also a refusal, has come both ways with a right ICRC.
fn answer(local: IpAddr, peer: IpAddr) -> Finding {
    match ask(local, peer) {
        Ok(Answer::Here(what)) => ok(format!(
            "{peer} answers: packets and their ICRC come through both ways ({what})"
        )),
        Ok(Answer::None(NoAnswer::PortUnreachable)) => warn(
            format!("{peer} is there, but nothing receives on its UDP port {ROCE_UDP_PORT} (ICMP: port unreachable)"),
            "start ferroce there, or load rdma_rxe",
        ),
        Ok(Answer::None(NoAnswer::Prohibited)) => fail(
            format!("a firewall forbids UDP port {ROCE_UDP_PORT} of {peer} (ICMP: administratively prohibited)"),
            format!("open UDP port {ROCE_UDP_PORT} there and on the way, in both directions"),
        ),
        Ok(Answer::None(NoAnswer::Timeout)) => warn(
            format!("{peer} does not answer on UDP port {ROCE_UDP_PORT}"),
            "start ferroce or load rdma_rxe there; if it runs, packets are dropped on the way (firewall) or because \
             their ICRC does not fit (NAT), which `ferroce doctor` there reports. For other peers: `tcpdump -i any -w trace.pcap udp \
             port 4791` there, then `ferroce pcap check trace.pcap`",
        ),
        Err(e) => note(
            format!("{peer} was not asked: {e}"),
            "see the check port-4791, and try again",
        ),
    }
}

enum Answer {
    /// The peer answers, and what.
    Here(String),
    None(NoAnswer),
}

fn ask(local: IpAddr, peer: IpAddr) -> Result<Answer, VerbsError> {
    let device = Device::open(DeviceConfig::new(local))?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(8, None, 0)?;
    let init = QpInit {
        send_cq: &cq,
        recv_cq: &cq,
        caps: QpCaps::default(),
        signal_all: true,
    };
    let qp = device.create_qp(&pd, &init)?;
    let channel = device.create_cm_channel()?;
    let to = SocketAddr::new(peer, rtrs::proto::DEFAULT_PORT);
    let id = device.connect(&channel, Some(local), to, &qp, ConnParams::default())?;
    let event = channel.wait(Some(ANSWER))?;
    id.disconnect()?;
    Ok(match event.map(|e| e.kind) {
        Some(CmEventKind::Rejected { reason, .. }) if reason == RejectReason::INVALID_SERVICE_ID => {
            Answer::Here(format!("no RTRS server at port {}", to.port()))
        }
        Some(CmEventKind::Rejected { .. } | CmEventKind::Established { .. }) => {
            Answer::Here(format!("an RTRS server listens at port {}", to.port()))
        }
        Some(CmEventKind::Failed { text: e, .. }) => return Err(VerbsError::State(e)),
        Some(CmEventKind::Unreachable { why, .. }) => Answer::None(why),
        _ => Answer::None(NoAnswer::Timeout),
    })
}

fn path_mtu(socket: &UdpSocket, peer: IpAddr) -> Option<Finding> {
    let mtu = getsockopt(socket, sockopt::IpMtu)
        .ok()
        .and_then(|m| u32::try_from(m).ok())
        .filter(|_| peer.is_ipv4())?;
    Some(match Mtu::for_interface(mtu) {
        Some(path) => ok(format!("{mtu} to {peer}: RoCE path MTU {} at most", path.bytes())),
        None => fail(
            format!("{mtu} to {peer}: too small for RoCE"),
            "raise the MTU of the interface and of every hop to at least 352",
        ),
    })
}

/// Whether addresses are translated on the way. From one end it can only be told when there are signs of it.
fn nat(system: &System, local: IpAddr, peer: IpAddr) -> Finding {
    const WHY: &str = "the ICRC covers the addresses, so translated packets are dropped as corrupt";
    if host::is_own(peer) {
        return ok("none: the peer is this machine");
    }
    if let Some(translated) = translated_flow(system, local, peer) {
        let advice = format!("{WHY}: route between the two without translation");
        return fail(format!("conntrack shows {local} translated to {translated}"), advice);
    }
    if is_private(local) && !is_private(peer) {
        return fail(
            format!("{local} is a private address and {peer} a public one: there is translation between them"),
            format!("{WHY}: use a tunnel (WireGuard, IPsec, VXLAN) or addresses of one network"),
        );
    }
    if let Some(sign) = container(system, local)
        && !same_network(local, peer)
    {
        return warn(
            format!(
                "{local} is in a container ({sign}) and {peer} is outside its network, which is usually translated"
            ),
            format!(
                "{WHY}: start the container with the host's network (--network host) or macvlan, or a pod network \
                     that routes"
            ),
        );
    }
    let tables = system
        .text("/proc/net/ip_tables_names")
        .is_some_and(|t| t.lines().any(|l| l == "nat"));
    if tables
        || system
            .number("/proc/sys/net/netfilter/nf_conntrack_count")
            .is_some_and(|n| n > 0)
    {
        return note(
            format!("no sign of translation between {local} and {peer}, but this machine tracks connections"),
            format!("if packets to {peer} are translated by a rule (`nft list ruleset`), except UDP port 4791: {WHY}"),
        );
    }
    ok(format!("no sign of address translation between {local} and {peer}"))
}

/// Returns the source address into which conntrack translates ours on the way to the peer, if it is another one.
fn translated_flow(system: &System, local: IpAddr, peer: IpAddr) -> Option<IpAddr> {
    let table = system.text("/proc/net/nf_conntrack")?;
    table
        .lines()
        .filter_map(|line| flow(line, local, peer))
        .find(|seen| *seen != local)
}

/// The destination of the reply direction: where the peer answers to.
fn flow(line: &str, local: IpAddr, peer: IpAddr) -> Option<IpAddr> {
    let values = |key: &str| -> Vec<&str> { line.split_whitespace().filter_map(|w| w.strip_prefix(key)).collect() };
    let addr = |list: &[&str], nth: usize| list.get(nth)?.parse::<IpAddr>().ok();
    let (src, dst) = (values("src="), values("dst="));
    (addr(&src, 0)? == local && addr(&dst, 0)? == peer).then(|| addr(&dst, 1))?
}

/// Why we believe to be in a container with a network of its own.
fn container(system: &System, local: IpAddr) -> Option<&'static str> {
    if system.exists("/.dockerenv") {
        return Some("docker");
    }
    if system.exists("/run/.containerenv") {
        return Some("podman");
    }
    let cgroup = system.text("/proc/1/cgroup").unwrap_or_default();
    if let Some(sign) = ["kubepods", "docker", "lxc"].into_iter().find(|s| cgroup.contains(s)) {
        return Some(sign);
    }
    let IpAddr::V4(v4) = local else { return None };
    match v4.octets() {
        [172, 17, ..] => Some("docker's default network"),
        [10, 88, ..] => Some("podman's default network"),
        [10, 0, 2, _] => Some("slirp or QEMU's user network"),
        _ => None,
    }
}

/// Addresses that are not routed on the Internet: RFC 1918, RFC 6598, RFC 4193, link-local, documentation.
fn is_private(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(a) => {
            let [first, second, ..] = a.octets();
            a.is_private() || a.is_link_local() || a.is_documentation() || (first == 100 && second & 0xc0 == 64)
        }
        IpAddr::V6(a) => a.is_unique_local() || a.is_unicast_link_local(),
    }
}

/// A guess without the netmask: /16 for IPv4 (docker, podman), /64 for IPv6.
fn same_network(a: IpAddr, b: IpAddr) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => a.octets()[..2] == b.octets()[..2],
        (IpAddr::V6(a), IpAddr::V6(b)) => a.octets()[..8] == b.octets()[..8],
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Status, *};

    fn system(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let system = System {
            root: dir.path().into(),
        };
        (dir, system)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_translated_flow_is_seen() {
        let table = "ipv4     2 udp      17 29 src=172.18.0.2 dst=198.51.100.7 sport=49152 dport=4791 [UNREPLIED] \
                     src=198.51.100.7 dst=203.0.113.5 sport=4791 dport=49152 mark=0 use=2\n";
        let (_dir, system) = system(&[("proc/net/nf_conntrack", table)]);
        let check = nat(&system, ip("172.18.0.2"), ip("198.51.100.7"));
        assert_eq!(check.status, Status::Fail);
        assert!(check.summary.contains("203.0.113.5"), "{}", check.summary);
    }

    #[test]
    fn private_to_public_is_translated() {
        let (_dir, system) = system(&[]);
        assert_eq!(nat(&system, ip("192.168.1.2"), ip("9.9.9.9")).status, Status::Fail);
        assert_eq!(nat(&system, ip("100.64.0.1"), ip("9.9.9.9")).status, Status::Fail);
        assert_eq!(nat(&system, ip("10.1.2.3"), ip("10.2.2.3")).status, Status::Ok);
        assert_eq!(nat(&system, ip("127.0.0.1"), ip("127.0.0.2")).status, Status::Ok);
    }

    #[test]
    fn a_container_is_warned_about_peers_outside() {
        let (_dir, system) = system(&[(".dockerenv", "")]);
        assert_eq!(nat(&system, ip("172.17.0.2"), ip("172.17.0.3")).status, Status::Ok);
        let check = nat(&system, ip("172.17.0.2"), ip("192.168.7.7"));
        assert_eq!(check.status, Status::Warn);
        assert!(check.advice.unwrap().contains("--network host"));
    }

    #[test]
    fn no_way_to_a_peer_of_the_other_family() {
        let (_dir, system) = system(&[]);
        let mut all = Diagnosis::default();
        super::check(&mut all, &system, Some(ip("127.0.0.1")), ip("::1"));
        assert_eq!(all.checks[0].finding.status, Status::Fail);
    }
}
