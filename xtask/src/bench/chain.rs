//! Chains of programs that a load passes: ours and those compared with it.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::usage::{self, Usage};
use crate::{Result, peers::Ferroce, process, process::Guard, tools};

const SERVER: &str = "127.0.0.1";
const CLIENT: &str = "127.0.0.2";
/// Time for a program to be ready.
const START: Duration = Duration::from_secs(10);

/// From an NBD client to a file in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Unix socket, `ferroce map`, RTRS, `ferroce serve`.
    Ferroce,
    /// Unix socket, nbdkit's nbd plugin, TCP, nbdkit.
    TwoHops,
    /// TCP, nbdkit.
    OneHop,
    /// Unix socket, `ferroce-bare`, UDP, `ferroce-bare`: requests of up to 32 KiB.
    Bare,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Ferroce, Self::TwoHops, Self::OneHop, Self::Bare];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ferroce => "ferroce",
            Self::TwoHops => "two hops",
            Self::OneHop => "one hop",
            Self::Bare => "bare",
        }
    }

    /// Whether it takes requests of so many bytes; 0: of any size.
    pub(super) const fn takes(self, block: u32) -> bool {
        !matches!(self, Self::Bare) || (block > 0 && block <= 32 << 10)
    }
}

/// Paths of the programs.
pub(super) struct Programs {
    pub(super) ferroce: PathBuf,
    pub(super) bare: PathBuf,
}

enum Process {
    Ferroce(Ferroce),
    Other(Guard),
}

/// A running chain.
pub(super) struct Chain {
    pub(super) kind: Kind,
    pub(super) uri: String,
    /// From the NBD client to the file.
    processes: Vec<(&'static str, Process)>,
}

impl Chain {
    /// Starts it on this image; its sockets are in `dir`.
    pub(super) fn start(kind: Kind, programs: &Programs, image: &Path, dir: &Path) -> Result<Self> {
        let socket = dir.join(format!("{kind:?}.sock"));
        let mut chain = Self {
            kind,
            uri: format!("nbd+unix:///?socket={}", socket.display()),
            processes: Vec::new(),
        };
        match kind {
            Kind::Ferroce => chain.ferroce(&programs.ferroce, image, &socket)?,
            Kind::TwoHops => {
                let port = chain.nbdkit_file(image)?;
                let hop = ["nbd", &format!("hostname={SERVER}"), &format!("port={port}")];
                chain.nbdkit("client", &["-U".into(), socket.display().to_string()], &hop)?;
                chain.wait(|| UnixStream::connect(&socket).is_ok())?;
            }
            Kind::OneHop => {
                let port = chain.nbdkit_file(image)?;
                chain.uri = format!("nbd://{SERVER}:{port}");
            }
            Kind::Bare => chain.bare(&programs.bare, image, &socket)?,
        }
        // The client's first.
        chain.processes.reverse();
        Ok(chain)
    }

    /// Resources that each of its processes has used so far.
    pub(super) fn usage(&self) -> Result<Vec<(&'static str, Usage)>> {
        let id = |p: &Process| match p {
            Process::Ferroce(ferroce) => ferroce.id(),
            Process::Other(guard) => guard.id(),
        };
        self.processes
            .iter()
            .map(|(name, p)| Ok((*name, usage::of(id(p))?)))
            .collect()
    }

    /// Fails if a process of it has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        for (name, process) in &mut self.processes {
            match process {
                Process::Ferroce(ferroce) => ferroce.check()?,
                Process::Other(guard) => {
                    if let Some(status) = guard.try_wait()? {
                        return Err(format!("{}'s {name} ended early with {status}", self.kind.name()));
                    }
                }
            }
        }
        Ok(())
    }

    fn ferroce(&mut self, program: &Path, image: &Path, socket: &Path) -> Result<()> {
        let export = format!("disk={}", image.display());
        let serve = ["serve", "--json", "--addr", SERVER, "--export", &export];
        let mut serve = Ferroce::start("ferroce serve", program, &serve)?;
        serve.wait_for("listening")?;
        self.processes.push(("server", Process::Ferroce(serve)));
        let (path, socket) = (format!("{CLIENT},{SERVER}"), socket.to_string_lossy());
        let map = ["map", "--json", "--session", "bench", "--path", &path];
        let map = [&map[..], &["--device", "disk", "--nbd", &socket]].concat();
        let mut map = Ferroce::start("ferroce map", program, &map)?;
        map.wait_for("mapped")?;
        self.processes.push(("client", Process::Ferroce(map)));
        Ok(())
    }

    /// The hop with the file, and its TCP port.
    fn nbdkit_file(&mut self, image: &Path) -> Result<u16> {
        let port = free_port()?;
        let listen = ["-i".into(), SERVER.into(), "-p".into(), port.to_string()];
        self.nbdkit("server", &listen, &["file", &image.display().to_string()])?;
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // Looking whether it listens would be a client that leaves at once.
        self.wait(|| TcpListener::bind(addr).is_err())?;
        Ok(port)
    }

    fn nbdkit(&mut self, name: &'static str, listen: &[String], plugin: &[&str]) -> Result<()> {
        let mut command = Command::new(tools::find("nbdkit").unwrap_or_else(|| "nbdkit".into()));
        command.arg("-f").args(listen).args(plugin).stdin(Stdio::null());
        let guard = Guard::spawn("nbdkit", &mut command)?;
        self.processes.push((name, Process::Other(guard)));
        Ok(())
    }

    fn bare(&mut self, program: &Path, image: &Path, socket: &Path) -> Result<()> {
        let size = std::fs::metadata(image).map_err(|e| format!("{}: {e}", image.display()))?;
        let addr = format!("{SERVER}:{}", free_port()?);
        let mut start = |name, args: &[&str]| {
            let mut command = Command::new(program);
            command.args(args).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut guard = Guard::spawn("ferroce-bare", &mut command)?;
            let said = guard.stdout_lines().recv_timeout(START);
            self.processes.push((name, Process::Other(guard)));
            said.map(drop)
                .map_err(|_| format!("ferroce-bare {name} is not ready after {} s", START.as_secs()))
        };
        let image = image.to_string_lossy();
        start("server", &["server", "--listen", &addr, &image])?;
        let (size, socket) = (size.len().to_string(), socket.to_string_lossy());
        start("client", &["client", "--server", &addr, "--size", &size, &socket])
    }

    fn wait(&mut self, ready: impl Fn() -> bool) -> Result<()> {
        let end = Instant::now() + START;
        while !ready() {
            self.check()?;
            process::check_interrupt()?;
            if Instant::now() > end {
                return Err(format!("{} is not ready after {} s", self.kind.name(), START.as_secs()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

/// A port of TCP and UDP that nobody has at the moment.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|l| l.local_addr());
    listener.map(|a| a.port()).map_err(|e| format!("a free port: {e}"))
}
