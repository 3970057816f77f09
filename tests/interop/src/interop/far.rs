//! The host on the other end: a guest of the lab, or any host that runs `host-agent`.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    Error,
    lab::{Proc, check_stop},
};

/// TCP port of `verbs-agent` on either end.
pub(crate) const AGENT_PORT: u16 = 18600;

/// Internet protocol of a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ip {
    V4,
    V6,
}

impl Ip {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// As names of scenarios have it.
    pub(crate) const fn tag(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        }
    }
}

/// A host and how to run programs there.
#[derive(Clone, Debug)]
pub(crate) struct Far {
    pub(crate) v4: Option<IpAddr>,
    pub(crate) v6: Option<IpAddr>,
    /// TCP port of `host-agent`.
    pub(crate) port: u16,
    /// The RDMA device that has to have the address, if it matters which.
    pub(crate) device: Option<String>,
    /// `ferroce-lab`, which talks to it.
    pub(crate) peer: PathBuf,
}

/// The RDMA device that an address belongs to, as the tools want it.
pub(crate) struct Gid {
    pub(crate) device: String,
    pub(crate) index: String,
    /// Number of its port.
    pub(crate) port: String,
    /// Largest path MTU of its port, bytes.
    pub(crate) mtu: u32,
}

impl Far {
    /// Its address.
    pub(crate) fn addr(&self, ip: Ip) -> Result<IpAddr, Error> {
        let addr = if ip == Ip::V4 { self.v4 } else { self.v6 };
        addr.ok_or_else(|| format!("the peer has no address of IP{}", ip.tag()).into())
    }

    /// Where `host-agent` listens.
    pub(crate) fn daemon(&self) -> Result<SocketAddr, Error> {
        let addr = self.v4.or(self.v6).ok_or("the peer has no address")?;
        Ok(SocketAddr::new(addr, self.port))
    }

    /// Starts one of the programs that `host-agent` knows; it ends with the returned process.
    pub(crate) fn start(&self, name: &str, program: &[&str], seconds: u32, dir: &Path) -> Result<Proc, Error> {
        let mut command = Command::new(&self.peer);
        command.args([
            "far",
            "--at",
            &self.daemon()?.to_string(),
            "--seconds",
            &seconds.to_string(),
            "--",
        ]);
        Proc::spawn(name, command.args(program), dir)
    }

    /// Starts `verbs-agent` for an address, waits until it listens, and says where.
    pub(crate) fn agent(&self, name: &str, ip: Ip, dir: &Path) -> Result<(Proc, SocketAddr), Error> {
        let addr = self.addr(ip)?;
        let port = AGENT_PORT.to_string();
        let addr = addr.to_string();
        let mut program = vec!["verbs-agent", "-p", &port, "-g", &addr];
        if let Some(device) = &self.device {
            program.extend(["-d", device]);
        }
        let mut agent = self.start(name, &program, 1200, dir)?;
        agent.wait_for("ready", Duration::from_secs(60))?;
        Ok((agent, SocketAddr::new(self.addr(ip)?, AGENT_PORT)))
    }

    /// Asks which device and GID index belong to the address.
    pub(crate) fn gid(&self, ip: Ip, dir: &Path) -> Result<Gid, Error> {
        let (mut agent, at) = self.agent("gid-agent", ip, dir)?;
        let stream = TcpStream::connect_timeout(&at, Duration::from_secs(20))?;
        (&stream).write_all(b"device\nquit\n")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        agent.finish(Duration::from_secs(30))?;
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["ok", device, index, mtu, port] => Ok(Gid {
                device: device.to_owned(),
                index: index.to_owned(),
                port: port.to_owned(),
                mtu: mtu.parse()?,
            }),
            _ => Err(format!("verbs-agent answered {line:?}").into()),
        }
    }

    /// Whether its command daemon takes connections.
    pub(crate) fn is_up(&self) -> bool {
        let Ok(addr) = self.daemon() else { return false };
        TcpStream::connect_timeout(&addr, Duration::from_secs(1)).is_ok()
    }

    /// Waits for the command daemon.
    pub(crate) fn wait_up(&self, timeout: Duration) -> Result<(), Error> {
        self.wait_up_while(timeout, || Ok(()))
    }

    /// The same, unless `hope` finds it in vain.
    pub(crate) fn wait_up_while(
        &self,
        timeout: Duration,
        mut hope: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let until = Instant::now() + timeout;
        while !self.is_up() {
            check_stop()?;
            hope()?;
            if Instant::now() > until {
                return Err(format!("no host-agent on {} within {timeout:?}", self.daemon()?).into());
            }
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    }
}
