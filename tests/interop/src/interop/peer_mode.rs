//! `--peer HOST`: the scenarios against another host with an RDMA device.

use std::{
    io::{PipeWriter, Write as _},
    net::{IpAddr, ToSocketAddrs as _, UdpSocket},
    path::Path,
    process::Command,
    time::Duration,
};

use crate::{
    Cli, Error,
    facts::Hosts,
    far::{Far, Ip},
    lab::{Places, Proc},
};

const TEMPLATE: &str = include_str!("../../lab/peer.sh");
const SOURCES: [(&str, &str); 7] = [
    ("listen.h", include_str!("../../lab/listen.h")),
    ("rxe-flush.h", include_str!("../../lab/rxe-flush.h")),
    ("verbs-agent.c", include_str!("../../lab/verbs-agent.c")),
    ("cm-agent.c", include_str!("../../lab/cm-agent.c")),
    ("host-agent.c", include_str!("../../lab/host-agent.c")),
    ("host-facts", include_str!("../../lab/host-facts")),
    ("rdma-end", include_str!("../../lab/rdma-end")),
];

/// The script that is the other half, complete in itself.
pub(crate) fn script() -> String {
    let mut sources = String::new();
    for (name, text) in SOURCES {
        sources += &format!("cat > {name} <<'END_OF_SOURCE'\n{text}END_OF_SOURCE\n");
    }
    TEMPLATE.replace("#@SOURCES@\n", &sources)
}

/// The peer, and our way to it.
pub(crate) struct Peer {
    pub(crate) far: Far,
    pub(crate) addr: IpAddr,
    pub(crate) local: [Option<IpAddr>; 2],
    /// Interface MTU by which both ends can choose the path MTU.
    pub(crate) mtu: u32,
    /// Our network interface towards it.
    pub(crate) interface: String,
    /// What both hosts have.
    pub(crate) hosts: Hosts,
    /// Why packets can't be captured here, if they can't.
    pub(crate) uncaptured: Option<String>,
    /// The other half, if we started it.
    _started: Option<Started>,
}

/// Addresses of a host, which may be an address itself.
fn addresses(host: &str) -> Result<Vec<IpAddr>, String> {
    let found = (host, 0).to_socket_addrs().map_err(|e| format!("no such host: {e}"))?;
    Ok(found.map(|addr| addr.ip()).collect())
}

/// The address of `--peer`: the first of IPv4, else the first of IPv6. A name may have more of them than are on the RoCE
/// network; who means another one gives it.
pub(crate) fn resolve(host: &str) -> Result<IpAddr, String> {
    let found = addresses(host)?;
    let v4 = found.iter().find(|addr| addr.is_ipv4());
    v4.or(found.first())
        .copied()
        .ok_or_else(|| "it has no address".to_owned())
}

/// The address of `--peer-v6`.
pub(crate) fn resolve_v6(host: &str) -> Result<IpAddr, String> {
    let v6 = addresses(host)?.into_iter().find(IpAddr::is_ipv6);
    v6.ok_or_else(|| "it has no IPv6 address".to_owned())
}

/// The address that packets to `far` leave from.
fn source(far: IpAddr) -> Result<IpAddr, Error> {
    let any: IpAddr = if far.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((far, roce_port()))?;
    Ok(socket.local_addr()?.ip())
}

const fn roce_port() -> u16 {
    4791
}

fn ip_json(args: &[&str]) -> Result<serde_json::Value, Error> {
    let out = Command::new("ip").arg("-j").args(args).output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(&text).map_err(|e| format!("ip -j {}: {e}: {text}", args.join(" ")).into())
}

/// Interface and MTU of the route.
fn interface(far: IpAddr) -> Result<(String, u32), Error> {
    let route = ip_json(&["route", "get", &far.to_string()])?;
    let dev = route[0]["dev"].as_str().ok_or("no route to the peer")?.to_owned();
    let link = ip_json(&["link", "show", "dev", &dev])?;
    let mtu = link[0]["mtu"].as_u64().ok_or("the interface has no MTU")?;
    Ok((dev, u32::try_from(mtu)?))
}

/// A name that a shell takes for itself.
fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    !text.is_empty() && !text.starts_with('-') && text.chars().all(plain)
}

/// Why packets can't be captured here, if they can't.
fn no_capture() -> Option<String> {
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        return Some("that needs root".to_owned());
    }
    let found = Command::new("tcpdump").arg("--version").output();
    found.is_err().then(|| "no tcpdump here".to_owned())
}

/// The other half, running at the end of an ssh connection. It ends there when its input does: with its owner, or with this
/// process.
struct Started {
    input: Option<PipeWriter>,
    ssh: Proc,
}

impl Started {
    fn by_ssh(cli: &Cli, target: &str, addr: IpAddr, logs: &Path) -> Result<Self, Error> {
        let (rsh, port) = (&cli.rsh, cli.peer_port);
        let device = match &cli.device {
            Some(name) if is_name(name) => format!("--device {name} "),
            Some(name) => return Err(format!("{name:?} is no name of an RDMA device").into()),
            None => String::new(),
        };
        let text = script();
        let (output, mut input) = std::io::pipe()?;
        let mut words = rsh.split_whitespace();
        let mut command = Command::new(words.next().ok_or("--rsh names no program")?);
        // The script comes first in the input, which then stays open. The user's shell there may be any.
        let remote = format!(
            "exec bash -c 'eval \"$(head -c {})\"' ferroce-peer.sh --until-eof {device}{addr} {port}",
            text.len()
        );
        command.args(words).args([target, &remote]);
        let ssh = Proc::spawn_with_input("peer-script", &mut command, logs, output.into())?;
        drop(command);
        input.write_all(text.as_bytes())?;
        Ok(Self {
            input: Some(input),
            ssh,
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.input = None;
        if let Err(e) = self.ssh.wait_gone(Duration::from_secs(10)) {
            eprintln!("the other half may still run there: {e}");
        }
    }
}

impl Peer {
    /// One of which a report is made.
    #[cfg(test)]
    pub(crate) fn for_report(addr: IpAddr) -> Self {
        Self {
            far: Far {
                v4: Some(addr),
                v6: None,
                port: 0,
                device: None,
                peer: "".into(),
            },
            addr,
            local: [None; 2],
            mtu: 1500,
            interface: "eth0".to_owned(),
            hosts: Hosts::default(),
            uncaptured: None,
            _started: None,
        }
    }

    /// Finds the way to the peer and waits until its half runs.
    pub(crate) fn find(cli: &Cli, places: &Places) -> Result<Option<Self>, Error> {
        let Some(host) = cli.peer else { return Ok(None) };
        let mut addrs = [None, cli.peer_v6];
        addrs[usize::from(host.is_ipv6())] = Some(host);
        let far = Far {
            v4: addrs[0],
            v6: addrs[1],
            port: cli.peer_port,
            device: cli.device.clone(),
            peer: places.peer.clone(),
        };
        let mut started = match &cli.ssh {
            Some(target) => Some(Started::by_ssh(cli, target, host, &places.logs)?),
            None => None,
        };
        let timeout = Duration::from_secs(cli.peer_wait.max(if started.is_some() { 120 } else { 0 }));
        let up = far.wait_up_while(timeout, || match &mut started {
            Some(s) => s.ssh.still_runs(),
            None => Ok(()),
        });
        if let Err(e) = up {
            let said = started.map_or_else(
                || "start the other half there: --peer-script prints it".to_owned(),
                |s| format!("{} printed:\n{}", cli.rsh, s.ssh.text()),
            );
            return Err(format!("{e}\n{said}").into());
        }
        let (interface, mtu) = interface(host)?;
        let ip = if host.is_ipv4() { Ip::V4 } else { Ip::V6 };
        let theirs = far.gid(ip, &places.logs)?;
        let local = [addrs[0].map(source).transpose()?, addrs[1].map(source).transpose()?];
        let hosts = Hosts::ask(&far, host, &local, places, cli.rnbd.clone())?;
        let uncaptured = no_capture();
        println!(
            "peer {host}: device {}, path MTU up to {}; we are {local:?} on {interface}",
            theirs.device, theirs.mtu
        );
        Ok(Some(Self {
            far,
            addr: host,
            local,
            mtu: mtu.min(theirs.mtu + 96),
            interface,
            hosts,
            uncaptured,
            _started: started,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::{resolve, resolve_v6};

    #[test]
    fn a_peer_is_an_address_or_a_name() {
        for host in ["192.0.2.1", "2001:db8::1"] {
            assert_eq!(resolve(host).map(|a| a.to_string()).as_deref(), Ok(host));
        }
        assert_eq!(resolve("localhost").map(|a| a.is_loopback()), Ok(true));
        assert_eq!(
            resolve_v6("2001:db8::1").map(|a| a.to_string()).as_deref(),
            Ok("2001:db8::1")
        );
        assert_eq!(resolve_v6("192.0.2.1"), Err("it has no IPv6 address".to_owned()));
        assert!(resolve("no such host").is_err_and(|e| e.starts_with("no such host: ")));
    }
}
