//! `ferroce map`: devices of a server as exports at NBD sockets.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use rnbd::{block::Geometry, client::error::MapError, proto::AccessMode};
use rnbd_host::{
    LoopStats, activation,
    listen::{Inherited, Listen, NbdAddress},
    map::{MapConfig, MapDevice, MapEvent, MapFailure, MapNews, MapStats, Mapping, Nobody, VhostSocket},
    tls::Tls,
};
use roce::{LocalDevice, iface};
use roce_verbs::provider::RejectReason;
use rtrs::{
    PathError,
    addr::PathAddr,
    client::{SessionConfig, SessionInfo},
    proto::DEFAULT_PORT,
};

use crate::{
    attach::AttachArgs,
    control::ControlArgs,
    event::{Event, Mapped, Moved},
    names::{self, Host, Resolver},
    nbd::NbdArgs,
    output::Failure,
    paths::PathArgs,
    place::{Place, Stage, foreground},
    report::{ReportArgs, Reporter},
    transport::{Instruments, TransportArgs},
    units::{seconds, twice},
    vhost::VhostArgs,
};

/// Time for the NBD clients' in-flight requests at an orderly end.
const GRACE: Duration = Duration::from_secs(5);
/// A path that is lost is noticed in 7 s at the latest.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How often a wait looks whether the user wants to end.
const LOOK: Duration = Duration::from_millis(50);
/// After which time without a session the user is told that we still wait.
const SILENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce map --session backup --path 192.0.2.7 --device disk --nbd /run/disk.sock
  ferroce map --session test --path 127.0.0.2,127.0.0.1 --device disk --nbd disk.sock --ro
  ferroce map --session copy --path 192.0.2.7 --device disk --nbd disk.sock
  ferroce map --session two --path 192.0.2.1,192.0.2.7 --path 198.51.100.1,198.51.100.7 \\
    --device disk --nbd disk.sock --on-loss queue
  ferroce map --session many --path 192.0.2.7 --device disk --device system,ro --nbd disks.sock
  ferroce map --session far --path 192.0.2.7 --device disk --nbd-listen 192.0.2.8 \\
    --tls require --tls-certificates /etc/pki/nbd --tls-verify-peer
  ferroce map --session guest --path 192.0.2.7 --device disk --vhost-user /run/disk.vhost
  ferroce map --session local --path 192.0.2.7 --device disk --attach
  nbdinfo --list 'nbd+unix:///?socket=disks.sock'
  nbdinfo 'nbds://192.0.2.8/?tls-certificates=/etc/pki/client'
  qemu-img convert -p -O raw 'nbd+unix:///?socket=disk.sock' copy.img

Each device is an NBD export of its name; the first is also the default export. 16 NBD clients may connect at a time; if there are TCP \
sockets, 4 of these places are for Unix sockets. The sockets are those of --nbd and --nbd-listen, or without these options those that systemd \
passes (LISTEN_FDS and LISTEN_PID). A vhost-user socket takes one front end at a time.

With --attach devices become /dev/nbdN of this host, to partition, format and mount. It needs the kernel's module nbd, which is loaded if \
necessary, and root in the host's network namespace; --nbd is not needed then. SIGINT or SIGTERM writes back what the kernel has cached and \
detaches the nodes. While one is mounted or otherwise in use the mapping keeps serving. `ferroce ctl unmap DEVICE force` detaches one at once.

Exits on SIGINT or SIGTERM, or when every path has used up its reconnect attempts. With --json, one event per line on standard output: \
`mapped` (for each device), `stats` (with --stats-interval), `path_up`, `path_down`, `failover`, `reconnect_failed`, `path_closed`, `session_lost`, \
`session_back`, `remapped`, `not_remapped`, `writes_lost`, `resized`, `unmapped`, `attached`, `detached`, `error`, and at the end `summary`.")]
pub(crate) struct MapArgs {
    /// Name of the session, by which the server distinguishes its clients
    #[arg(long, value_name = "NAME")]
    session: String,
    /// Path to the server: its address or name, optionally with a port, and before it optionally the address of this host; also in the
    /// kernel's form, ip:SRC,ip:DST. Repeat it for several paths, up to 128. Requests are spread over them, and those of a lost path move
    /// to the others
    #[arg(long = "path", value_name = "[SRC,]DST[:1234]", required = true)]
    paths: Vec<names::Path>,
    /// Address of this host for each --path that names none, one of IPv4 and one of IPv6 [default: the route's source address]
    #[arg(long, value_name = "HOST")]
    addr: Vec<Host>,
    /// Device to open, by its name at the server, optionally with an access mode. If the name itself ends in `,ro`, add the mode:
    /// NAME,ro,rw. Repeat it for several devices, which share the session
    #[arg(long = "device", value_name = "NAME[,ro|rw|migration]", value_parser = DeviceArg::parse, required = true)]
    devices: Vec<DeviceArg>,
    #[command(flatten)]
    attach: AttachArgs,
    #[command(flatten)]
    vhost: VhostArgs,
    /// Access mode of devices without one of their own. `migration`: write although there is another writer, if the server allows that
    #[arg(long, value_name = "ro|rw|migration", default_value_t = AccessMode::ReadWrite)]
    access_mode: AccessMode,
    /// Open devices read-only, as with --access-mode ro
    #[arg(long, conflicts_with = "access_mode")]
    ro: bool,
    /// I/O connections of each path. One batches best; a server that distributes a session's connections over threads uses more
    #[arg(long, value_name = "N", default_value_t = 1)]
    connections: u16,
    /// Timeout of each step of connecting. The default is the kernel client's: a kernel server on a busy machine may take more than 5 s
    /// to register its chunks before it answers
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    connect_timeout: Duration,
    #[command(flatten)]
    nbd: NbdArgs,
    #[command(flatten)]
    lasting: PathArgs,
    /// Start this as a task of a running `ferroce daemon`, which runs it until `ferroce ctl stop` or its own exit
    #[arg(long)]
    pub(crate) daemon: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    transport: TransportArgs,
}

/// Settings of a mapping that can be changed while it runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Changeable {
    /// The first is the one that NBD clients find without a name.
    pub(crate) devices: Vec<MapDevice>,
    /// With our ends of them.
    pub(crate) paths: Vec<PathAddr>,
    pub(crate) lasting: PathArgs,
}

impl Changeable {
    /// The options that it is made of.
    pub(crate) const OPTIONS: [&str; 7] = [
        "addr",
        "device",
        "path",
        "policy",
        "max-reconnects",
        "reconnect-delay",
        "on-loss",
    ];
}

impl MapArgs {
    /// Returns the name of the daemon's task.
    pub(crate) fn task_name(&self) -> &str {
        &self.session
    }

    /// Returns the settings that can be changed.
    pub(crate) fn changeable(&self, resolver: &Resolver) -> Result<Changeable, Failure> {
        Ok(Changeable {
            devices: self.map_devices(),
            paths: self.ways(resolver)?,
            lasting: self.lasting.clone(),
        })
    }

    fn map_devices(&self) -> Vec<MapDevice> {
        let mode = match self.ro {
            true => AccessMode::ReadOnly,
            false => self.access_mode,
        };
        let device = |device: &DeviceArg| MapDevice {
            name: device.name.clone(),
            mode: device.mode.unwrap_or(mode),
        };
        self.devices.iter().map(device).collect()
    }

    /// The options of NBD clients.
    pub(crate) fn nbd(&self) -> &NbdArgs {
        &self.nbd
    }

    /// The socket files that it creates.
    pub(crate) fn socket_files(&self) -> Result<Vec<PathBuf>, Failure> {
        let vhost = self.vhost.sockets(&self.map_devices())?;
        let nbd = self.nbd.socket_file().map(Path::to_owned);
        Ok(nbd
            .into_iter()
            .chain(vhost.into_iter().map(|socket| socket.path))
            .collect())
    }

    /// The capture file.
    pub(crate) fn capture(&self) -> Option<&Path> {
        self.transport.capture()
    }

    /// The paths, each with the address of this host. Blocks while names are resolved.
    fn ways(&self, resolver: &Resolver) -> Result<Vec<PathAddr>, Failure> {
        let ours = self.addr.iter().map(|host| resolver.own_addr(host));
        let ours = ours.collect::<Result<Vec<_>, _>>()?;
        let ipv6 = ours.iter().filter(|addr| addr.is_ipv6()).count();
        if ipv6 > 1 || ours.len() - ipv6 > 1 {
            return Err(Failure::usage(
                "--addr takes one IPv4 and one IPv6 address: for several write each in its path, --path SRC,DST",
            ));
        }
        let way = |path: &names::Path| {
            let path = resolver.path(path, DEFAULT_PORT, &ours)?;
            let route = || {
                let ip = path.dst.ip();
                iface::route_to(ip).map_err(|e| Failure::failed(format!("no route to {ip}: {e}")))
            };
            Ok(PathAddr {
                src: Some(path.src.map_or_else(route, Ok)?),
                ..path
            })
        };
        self.paths.iter().map(way).collect()
    }

    /// The loop's device, with all of our addresses.
    fn local_device(&self, ways: &[PathAddr], instruments: &Instruments) -> Result<LocalDevice, Failure> {
        let mut sources: Vec<IpAddr> = ways.iter().filter_map(|way| way.src).collect();
        sources.sort_unstable();
        sources.dedup();
        let mut opened = self.transport.open(&sources, 1, Arc::new(Nobody), instruments)?;
        opened.pop().ok_or_else(|| Failure::failed("no device is open"))
    }

    fn session(&self, ways: Vec<PathAddr>) -> SessionConfig {
        let mut session = SessionConfig::new(&self.session, ways[0]);
        session.paths = ways;
        session.policy = self.lasting.policy;
        session.connect_any = self.lasting.connect_any;
        session.reconnect_delay = self.lasting.reconnect_delay;
        session.max_reconnects = self.lasting.max_reconnects;
        session.connections = self.connections;
        // RNBD's longest message names a device.
        session.max_user_header = size_of::<rnbd::proto::MsgOpen>() as u16;
        session.connect_timeout = self.connect_timeout;
        session.heartbeat = self.transport.heartbeat(HEARTBEAT);
        session
    }

    /// The sockets for NBD clients.
    fn listen(&self, inherited: Vec<Inherited>, resolver: &Resolver) -> Result<Vec<Listen>, Failure> {
        let has_others = self.attach.is_named() || !self.vhost.is_empty();
        match self.nbd.is_named() || !inherited.is_empty() || !has_others {
            true => self.nbd.listen(inherited, resolver),
            // The kernel and virtual machines are enough.
            false => Ok(Vec::new()),
        }
    }

    /// Checks what needs no network: session, devices, sockets and certificates. Names are not resolved.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if let Some(path) = twice(&self.paths) {
            return Err(Failure::usage(format!("the path {path} is given twice")));
        }
        let any_path = PathAddr::to((Ipv4Addr::LOCALHOST, DEFAULT_PORT).into());
        self.config(vec![any_path], Vec::new()).map(drop)
    }

    fn config(&self, ways: Vec<PathAddr>, listen: Vec<Listen>) -> Result<MapConfig, Failure> {
        let devices = self.map_devices();
        let vhost = self.vhost.sockets(&devices)?;
        self.attach.check(&devices)?;
        let config = MapConfig {
            devices,
            vhost,
            on_loss: self.lasting.on_loss,
            tls: self.nbd.tls()?,
            grace: GRACE,
            reactor: self.transport.reactor(),
            ..MapConfig::new(self.session(ways), &self.devices[0].name, listen)
        };
        config.session.check().map_err(|e| Failure::usage(e.to_string()))?;
        config.check_devices().map_err(|e| Failure::usage(e.to_string()))?;
        Ok(config)
    }
}

/// Returns the failure of a session: the error, the server, and what to check.
fn session_failure(dst: SocketAddr, e: &rtrs::Error) -> Failure {
    use rtrs::Error;
    let ip = dst.ip();
    let hint = match e {
        Error::Unreachable(_) | Error::Timeout(..) => format!(
            "\nis the server running there? `ferroce doctor --peer {ip}` looks at the way (firewall, NAT, port 4791)"
        ),
        Error::Rejected {
            errno: None, reason, ..
        } => match *reason {
            RejectReason::INVALID_SERVICE_ID => {
                "\nsomething speaks RoCE there, but no RTRS server listens at this port".to_owned()
            }
            RejectReason::INVALID_MTU => "\ngive a smaller path MTU with --mtu".to_owned(),
            RejectReason::NO_QP | RejectReason::NO_RESOURCES => {
                "\nthe server has no room for more connections".to_owned()
            }
            _ => String::new(),
        },
        Error::Path(PathError::PeerDisconnected) => {
            "\nthe server's log says why; mostly a session of this name exists there: choose another with --session"
                .to_owned()
        }
        _ => String::new(),
    };
    Failure::failed(format!("no session with {dst}: {e}{hint}"))
}

fn map_failure(dst: SocketAddr, device: &str, e: &MapError) -> Failure {
    let hint = match e {
        MapError::Refused { errno, mode, .. } if mode.writable() && *errno == rnbd::Errno::EACCES => {
            "\nmap it with --ro"
        }
        MapError::Refused { errno, .. } if *errno == rnbd::Errno::EPERM => "\nend the other one, or map it with --ro",
        _ => "",
    };
    Failure::failed(format!("can't map {device} of {dst}: {e}{hint}"))
}

/// Returns the failure of a mapping that ended otherwise than asked.
fn failure(dst: SocketAddr, e: MapFailure) -> Failure {
    let errno = e.errno();
    let fail = |what: &str, device: &str, e: &dyn std::fmt::Display| {
        Failure::failed(format!("{dst} could not {what} {device}: {e}"))
    };
    let failure = match e {
        MapFailure::Session(e) => session_failure(dst, &e),
        MapFailure::Map { device, error } => map_failure(dst, &device, &error),
        MapFailure::Socket(e) => Failure::failed(format!("can't listen: {e}")),
        MapFailure::Lost(why) => Failure::failed(format!(
            "connection to {dst} lost: {why}; what was not flushed may not be in the image"
        )),
        MapFailure::Flush { device, errno } => fail("flush", &device, &errno),
        MapFailure::Close { device, error } => fail("close", &device, &error),
        MapFailure::Loop(e) => Failure::failed(e),
    };
    failure.with_errno(errno)
}

/// Runs the command.
pub(crate) fn run(args: &MapArgs) -> Result<(), Failure> {
    let mapped = foreground(&args.control, &args.report, |place| map(args, place));
    args.report.end(mapped)
}

/// Maps, until it is to stop or no path is left that is tried again.
pub(crate) fn map(args: &MapArgs, place: Place<'_>) -> Result<(), Failure> {
    let Place {
        sockets,
        stop,
        services,
        resolver,
        mut reporter,
        tell,
    } = place;
    let ways = args.ways(&resolver)?;
    let server = ways[0].dst;
    let mut inherited = activation::sockets().map_err(Failure::of)?;
    inherited.retain(|socket| sockets.as_ref().is_none_or(|name| socket.name == *name));
    let config = args.config(ways.clone(), args.listen(inherited, &resolver)?)?;
    let (vhost, tls) = (config.vhost.clone(), config.tls.clone());
    let instruments = args.transport.instruments(args.task_name())?;
    let attachments = args
        .attach
        .prepare(&config.devices, tls.as_ref().is_some_and(Tls::is_required))?;
    let started = Mapping::start(args.local_device(&ways, &instruments)?, config);
    let mut mapping = started.map_err(Failure::of)?;
    // Dropped before the mapping, whose end waits for NBD clients.
    let mut attachments = attachments;
    let _listed = services.add_client(mapping.control());
    tell(Stage::Mapping(mapping.control(), tls));
    let begun = Instant::now();
    let (mut mapped, mut told, mut stopping) = (false, false, false);
    let mut ticks = Ok(());
    let mut addresses = Vec::new();
    let ended = loop {
        // A device that is in use as a block device goes on being served.
        if (stop.requested() || ticks.is_err()) && !stopping && attachments.release(&reporter)? {
            stopping = true;
            mapping.stop();
        }
        let timeout = if mapped { reporter.timeout() } else { LOOK };
        match mapping.next(timeout) {
            Some(MapEvent::Listening(at)) => addresses = at,
            Some(MapEvent::Mapped { device, geometry, info }) => {
                mapped = true;
                tell(Stage::Up);
                announce(args, &reporter, &ways, (&addresses, &vhost), &device, &info, &geometry)?;
                attachments.mapped(&reporter, &mapping, (&device, &geometry))?;
            }
            // Until then the log says what there is to say of paths.
            Some(MapEvent::News(_)) if !mapped => {}
            Some(MapEvent::News(news)) => {
                if let MapNews::PathDown { why, .. } = &news {
                    instruments.client_path_down(why);
                }
                let event = news.into();
                reporter.event(&event)?;
                attachments.follow(&reporter, &event)?;
            }
            Some(MapEvent::Ended(result)) => break result,
            None if !mapped && !told && begun.elapsed() >= SILENCE => {
                told = true;
                tracing::warn!(
                    "no session with {} yet; each step may take {} s (--connect-timeout)",
                    server,
                    args.connect_timeout.as_secs_f64()
                );
            }
            None if mapped && ticks.is_ok() => ticks = reporter.tick(|| counted(mapping.stats())),
            None => {}
        }
    };
    // Nothing is to be told of a device that never was.
    if mapped || ended.is_ok() {
        let (stats, moved) = counted(mapping.stats());
        reporter.summary(&stats, moved)?;
    }
    ended.map_err(|e| failure(server, e)).and(ticks)
}

/// Returns the traffic of NBD clients, and the packets that it took.
fn counted(stats: MapStats) -> (LoopStats, Moved) {
    let c = &stats.device;
    let moved = Moved {
        bytes_read: c.read_bytes,
        bytes_written: c.written_bytes,
        requests: c.completed,
        failed: c.failed,
        refused: [
            ("nbd_turned_away", stats.turned_away),
            ("vhost_malformed", stats.malformed),
        ]
        .into(),
    };
    (stats.turns, moved)
}

/// A device on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
struct DeviceArg {
    name: String,
    /// How it is to be opened, if that is said here.
    mode: Option<AccessMode>,
}

impl DeviceArg {
    /// Reads `NAME[,ro|rw|migration]`. Names may contain commas.
    fn parse(text: &str) -> Result<Self, String> {
        let with_mode = text
            .rsplit_once(',')
            .and_then(|(name, mode)| Some((name, mode.parse().ok()?)));
        let (name, mode) = match with_mode {
            Some((name, mode)) => (name, Some(mode)),
            None => (text, None),
        };
        if name.is_empty() {
            return Err("empty device name".into());
        }
        let name = name.to_owned();
        Ok(Self { name, mode })
    }
}

fn announce(
    args: &MapArgs,
    reporter: &Reporter,
    paths: &[PathAddr],
    (addresses, vhost): (&[NbdAddress], &[VhostSocket]),
    device: &MapDevice,
    info: &SessionInfo,
    geometry: &Geometry,
) -> Result<(), Failure> {
    let name = Some(device.name.as_str()).filter(|name| *name != args.devices[0].name);
    let uris = args.nbd.uris(addresses, name);
    let vhost = vhost.iter().filter(|socket| socket.device == device.name);
    let device = Box::new(Mapped {
        session: args.session.clone(),
        server: paths[0].dst,
        paths: paths.iter().map(PathAddr::to_string).collect(),
        device: device.name.clone(),
        access_mode: device.mode.to_string(),
        bytes: geometry.size,
        block_size: geometry.logical_block_size,
        read_only: geometry.read_only,
        nbd: addresses.first().map(NbdAddress::to_string),
        uri: uris.first().cloned(),
        uris,
        vhost_user: vhost.map(|socket| socket.path.display().to_string()).collect(),
        queue_depth: info.queue_depth,
        max_io_bytes: info.max_io_size,
    });
    reporter.event(&Event::Mapped { device })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_with_or_without_a_mode() {
        for (text, name, mode) in [
            ("disk", "disk", None),
            ("disk,ro", "disk", Some(AccessMode::ReadOnly)),
            ("a/b=c,rw", "a/b=c", Some(AccessMode::ReadWrite)),
            ("a,b,migration", "a,b", Some(AccessMode::Migration)),
            ("a,b", "a,b", None),
            ("a,RO", "a,RO", None),
            ("a,", "a,", None),
            ("a,ro,rw", "a,ro", Some(AccessMode::ReadWrite)),
        ] {
            let name = name.to_owned();
            assert_eq!(DeviceArg::parse(text), Ok(DeviceArg { name, mode }), "{text}");
        }
        for empty in ["", ",ro"] {
            assert!(DeviceArg::parse(empty).is_err(), "{empty:?}");
        }
    }
}
