//! `--peer HOST`: the scenarios against another host with an RDMA device.

use std::{
    fs::File,
    io::Write as _,
    net::{IpAddr, UdpSocket},
    path::Path,
    process::Command,
    time::Duration,
};

use crate::{
    Cli, Error,
    far::{Far, Ip},
    lab::{Places, Proc},
};

const TEMPLATE: &str = include_str!("../../lab/peer.sh");
const SOURCES: [(&str, &str); 3] = [
    ("verbs-agent.c", include_str!("../../lab/verbs-agent.c")),
    ("cm-agent.c", include_str!("../../lab/cm-agent.c")),
    ("host-agent.c", include_str!("../../lab/host-agent.c")),
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
    pub(crate) local: [Option<IpAddr>; 2],
    /// Interface MTU by which both ends can choose the path MTU.
    pub(crate) mtu: u32,
    /// Our network interface towards it.
    pub(crate) interface: String,
    /// The other half, if we started it.
    _script: Option<Proc>,
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

/// Runs the script on the host by ssh (or what `FERROCE_SSH` names), which ends with the returned process.
fn start_by_ssh(target: &str, addr: IpAddr, port: u16, logs: &Path) -> Result<Proc, Error> {
    let file = logs.join("ferroce-peer.sh");
    File::create(&file)?.write_all(script().as_bytes())?;
    let ssh = std::env::var("FERROCE_SSH").unwrap_or_else(|_| "ssh".to_owned());
    let mut command = Command::new(ssh);
    command.args(["-o", "BatchMode=yes", target, &format!("bash -s -- {addr} {port}")]);
    Proc::spawn_with_input("peer-script", &mut command, logs, Some(File::open(&file)?))
}

impl Peer {
    /// Finds the way to the peer and waits until its half runs.
    pub(crate) fn find(cli: &Cli, places: &Places) -> Result<Option<Self>, Error> {
        let Some(host) = cli.peer else { return Ok(None) };
        let mut addrs = [None, cli.peer_v6];
        addrs[usize::from(host.is_ipv6())] = Some(host);
        let far = Far {
            v4: addrs[0],
            v6: addrs[1],
            port: cli.peer_port,
            peer: places.peer.clone(),
        };
        let mut started = None;
        if let Some(target) = &cli.ssh {
            started = Some(start_by_ssh(target, host, cli.peer_port, &places.logs)?);
        }
        if let Err(e) = far.wait_up(Duration::from_secs(cli.peer_wait.max(if started.is_some() {
            120
        } else {
            0
        }))) {
            let said = started.map(|p| p.text()).unwrap_or_default();
            return Err(format!("{e}\n{said}\nstart the other half there: --peer-script prints it").into());
        }
        let (interface, mtu) = interface(host)?;
        let ip = if host.is_ipv4() { Ip::V4 } else { Ip::V6 };
        let theirs = far.gid(ip, &places.logs)?;
        let local = [addrs[0].map(source).transpose()?, addrs[1].map(source).transpose()?];
        println!(
            "peer {host}: device {}, path MTU up to {}; we are {local:?} on {interface}",
            theirs.device, theirs.mtu
        );
        Ok(Some(Self {
            far,
            local,
            mtu: mtu.min(theirs.mtu + 96),
            interface,
            _script: started,
        }))
    }
}
