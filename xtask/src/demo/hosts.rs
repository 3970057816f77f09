//! The demo's two hosts: network namespaces with two links between them, or loopback addresses for want of rights.
//!
//! A namespace lives as long as the process that made it, and that process as long as the demo: its standard input is a pipe from us.
//! So nothing is left behind even if the demo is killed.

use std::{
    ffi::OsStr,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{Result, process, tools};

/// Links between the hosts, and paths of the session.
pub(super) const LINKS: u8 = 2;
/// Bytes of the links' frames, as storage networks have them: room for path MTU 4096.
const MTU: &str = "9000";

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Host {
    Server,
    Client,
}

impl Host {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Client => "client",
        }
    }
}

pub(super) enum Hosts {
    Namespaces {
        server: process::Guard,
        client: process::Guard,
    },
    Loopback,
}

impl Hosts {
    /// Namespaces where they can be made, unless only loopback is wanted.
    pub(super) fn new(loopback: bool) -> Result<Self> {
        if loopback || !tools::may_make_namespaces() {
            return Ok(Self::Loopback);
        }
        let (server, client) = (namespace(Host::Server)?, namespace(Host::Client)?);
        let hosts = Self::Namespaces { server, client };
        for link in 1..=LINKS {
            let (a, b) = (hosts.id(Host::Server), hosts.id(Host::Client));
            let name = format!("link{link}");
            process::capture(
                "ip link add",
                tool("ip").args([
                    "link", "add", &name, "mtu", MTU, "netns", &a, "type", "veth", "peer", "name", &name, "mtu", MTU,
                    "netns", &b,
                ]),
            )?;
            for host in [Host::Server, Host::Client] {
                hosts.ip(
                    host,
                    &[
                        "addr",
                        "add",
                        &format!("{}/24", hosts.address(host, link)),
                        "dev",
                        &name,
                    ],
                )?;
                hosts.ip(host, &["link", "set", &name, "up"])?;
            }
        }
        hosts.wait_for_links()?;
        Ok(hosts)
    }

    /// Description for users.
    pub(super) const fn described(&self) -> &'static str {
        match self {
            Self::Namespaces { .. } => "two hosts: network namespaces with two links between them",
            Self::Loopback => "two hosts: loopback addresses (two network namespaces with links if run as root)",
        }
    }

    /// The address of a host on a link, counted from 1.
    pub(super) fn address(&self, host: Host, link: u8) -> String {
        match (self, host) {
            (Self::Namespaces { .. }, Host::Server) => format!("10.9.{link}.1"),
            (Self::Namespaces { .. }, Host::Client) => format!("10.9.{link}.2"),
            (Self::Loopback, Host::Server) => format!("127.0.{link}.1"),
            (Self::Loopback, Host::Client) => format!("127.0.{link}.2"),
        }
    }

    /// A link, as `ferroce map --path` has it.
    pub(super) fn path(&self, link: u8) -> String {
        format!(
            "{},{}",
            self.address(Host::Client, link),
            self.address(Host::Server, link)
        )
    }

    /// Options that tell `ferroce run` which host it is on. A namespace has addresses of its own.
    pub(super) fn own_addresses(&self, host: Host) -> Vec<String> {
        match self {
            Self::Namespaces { .. } => Vec::new(),
            Self::Loopback => vec!["--addr".into(), self.address(host, 1)],
        }
    }

    /// A command on a host.
    pub(super) fn command(&self, host: Host, program: impl AsRef<OsStr>) -> Command {
        match self {
            Self::Loopback => Command::new(program),
            Self::Namespaces { .. } => {
                let mut command = tool("nsenter");
                command
                    .arg(format!("--net=/proc/{}/ns/net", self.id(host)))
                    .arg(program);
                command
            }
        }
    }

    /// Whether links can be taken down.
    pub(super) const fn have_links(&self) -> bool {
        matches!(self, Self::Namespaces { .. })
    }

    /// Runs `ip` on a host and returns its output.
    pub(super) fn ip(&self, host: Host, args: &[&str]) -> Result<String> {
        let ip = tools::find("ip").unwrap_or_else(|| "ip".into());
        let name = format!("ip {}", args.join(" "));
        let output = process::capture(&name, self.command(host, ip).args(args))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Waits until all ports are active: the kernel takes up to a second to see that a link has two ends.
    fn wait_for_links(&self) -> Result<()> {
        let end = Instant::now() + super::START;
        for host in [Host::Server, Host::Client] {
            loop {
                let links = self.ip(host, &["-o", "link", "show", "type", "veth"])?;
                if links.matches("state UP").count() == usize::from(LINKS) {
                    break;
                }
                if Instant::now() > end {
                    return Err(format!("links of the {} do not come up:\n{links}", host.name()));
                }
                process::check_interrupt()?;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// The process that has the host's namespace.
    fn id(&self, host: Host) -> String {
        match (self, host) {
            (Self::Namespaces { server, .. }, Host::Server) => server.id().to_string(),
            (Self::Namespaces { client, .. }, Host::Client) => client.id().to_string(),
            (Self::Loopback, _) => "self".into(),
        }
    }
}

/// A namespace, and the process that keeps it: `cat` ends with our end of the pipe.
fn namespace(host: Host) -> Result<process::Guard> {
    let mut command = tool("unshare");
    command
        .args(["--net", "sh", "-c", "echo made; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut keeper = process::Guard::spawn(host.name(), &mut command)?;
    match keeper.stdout_lines().recv() {
        Ok(_) => Ok(keeper),
        Err(_) => Err(format!("no network namespace could be made ({})", keeper.wait()?)),
    }
}

/// Whether a process's network has a TCP socket that listens at a port.
pub(super) fn listens(process: u32, port: u16) -> bool {
    ["tcp", "tcp6"].iter().any(|table| {
        let path = Path::new("/proc").join(process.to_string()).join("net").join(table);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        is_listening(&text, port)
    })
}

/// Whether a table of sockets (proc_net(5)) has one in state LISTEN, 0A, at a port.
fn is_listening(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.len() > 3 && fields[1].ends_with(&port) && fields[3] == "0A"
    })
}

fn tool(name: &str) -> Command {
    Command::new(tools::find(name).unwrap_or_else(|| name.into()))
}

#[cfg(test)]
mod tests {
    use super::is_listening;

    #[test]
    fn a_socket_that_listens_is_found_and_a_connected_one_is_not() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n   \
                     1: 0100007F:4854 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1 1\n";
        assert!(is_listening(table, 18515));
        assert!(!is_listening(table, 18516), "connected");
        assert!(!is_listening(table, 22));
    }
}
