//! `ferroce serve`: image files and block devices for RNBD clients.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{ArgAction, Args};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rnbd::server::Limits;
use rnbd_admin::Parameters;
use rnbd_disk::{Caching, DiskConfig, ExportSpec, Exports, FolderSpec};
use rnbd_host::{
    LoopStats,
    admission::ServerAdmission,
    serve::{ServeConfig, ServeEvent, ServeStats, Serving},
};
use roce::{LocalDevice, Mtu};
use rtrs::{
    admission::{AccessList, AccessRule},
    proto::DEFAULT_PORT,
    server::ServerConfig,
};

use crate::{
    control::{ControlArgs, Served},
    event::{Event, Export, Listener, Listening, Moved},
    names::{Endpoint, Resolver},
    output::Failure,
    place::{Place, Stage, foreground},
    report::{ReportArgs, Reporter},
    transport::{Instruments, TransportArgs},
    units::{size32, twice},
};

/// As the kernel's server. To cut off a client whose machine is only paused costs it what was under way, and a kernel's client without
/// another path its file systems; one that is gone shows sooner, as the heartbeat itself is not acknowledged.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Time for sessions to end and files to be written back at the end.
const GRACE: Duration = Duration::from_secs(30);
/// Open files at most; more than devices, sessions and sockets can take.
const OPEN_FILES: u64 = 65_536;

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce serve --addr 192.0.2.7 --export disk=/images/disk.img --export system=/dev/sdb,ro
  ferroce serve --addr 192.0.2.7 --export-dir /images --allow 192.0.2.0/24 --threads 4
  ferroce serve --addr 192.0.2.7 --export disk=disk.img --allow db=192.0.2.8 --allow web=192.0.2.16/28
  ferroce serve --addr 192.0.2.7 --addr 198.51.100.7 --export disk=disk.img --threads 2
  ferroce serve --addr 127.0.0.1:1234 --export disk=disk.img --pcap trace.pcap

On a Linux client, as root, with rdma_rxe or RoCE hardware and the module rnbd_client:
  echo 'sessname=test path=ip:192.0.2.7 device_path=disk' > /sys/class/rnbd-client/ctl/map_device

Exits on SIGINT or SIGTERM, after it has closed its sessions and made all writes durable. With --json, one event per line on \
standard output: `listening`, `session_opened` and `session_closed` (`session`, `peer`, and `connections`, how many the \
client made for its first path), `path_up` and `path_down` (`session`, `path`, and `why` it is down), \
`stats` (with --stats-interval), `error`, and at the end `summary`.")]
pub(crate) struct ServeArgs {
    /// Address or name of this host to listen at, optionally with a port; 0.0.0.0 or :: for all. Repeat it to listen at several
    /// addresses, IPv4 and IPv6; the paths of one session may lead to several of them
    #[arg(long, alias = "listen", value_name = "HOST[:1234]", value_parser = listen, required = true)]
    addr: Vec<Endpoint>,
    /// Export an image file or block device under this name. `ro`: read-only; `migrate`: allow a second writer with access mode
    /// `migration`, as the kernel's server always does. Write a comma in the path as `,,`. Repeat it for several exports
    #[arg(
        long = "export",
        value_name = "NAME=PATH[,ro][,migrate]",
        required_unless_present = "export_dir"
    )]
    exports: Vec<ExportSpec>,
    /// Export all files and block devices of a folder under their names. %SESSNAME% in its path stands for the client's session.
    /// Options as for --export
    #[arg(long, value_name = "DIR[,ro][,migrate]")]
    export_dir: Option<FolderSpec>,
    /// Folder that exports must be in, after symbolic links are followed; or the only file or block device that may be exported. `ro`:
    /// read-only. Repeat it to allow several [default: anywhere]
    #[arg(long, value_name = "PATH[,ro]", value_parser = root)]
    export_within: Vec<FolderSpec>,
    /// Accept clients of these addresses only. With NAME: accept a session of that name, all its paths, from there only; sessions of other
    /// names need a rule without NAME. Repeat it for several rules [default: all clients]
    #[arg(long, value_name = "[NAME=]CIDR")]
    allow: Vec<AccessRule>,
    /// Most sessions at a time [default: 64]
    #[arg(long, value_name = "N")]
    max_sessions: Option<usize>,
    /// Most sessions at a time of one client: of one IPv4 or link-local IPv6 address, or of one /64 of other IPv6 addresses [default: 16]
    #[arg(long, value_name = "N")]
    max_sessions_per_client: Option<usize>,
    /// Most paths of all sessions at a time. Another 256 at most, 32 of one client, wait for a first answer from their client's
    /// address; beyond that the oldest is evicted [default: 128]
    #[arg(long, value_name = "N")]
    max_paths: Option<usize>,
    /// Most connections of one path, up to 4096. Linux makes one for each of its processors and poll queues, and one more [default: 257]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=4096))]
    max_connections: Option<u16>,
    /// Most devices that one session may have open [default: 256]
    #[arg(long, value_name = "N")]
    max_devices_per_session: Option<usize>,
    /// Most devices that all sessions together may have open [default: 1024]
    #[arg(long, value_name = "N")]
    max_devices: Option<usize>,
    /// Most requests in flight of a session [default: 512]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,
    /// Size of a request's chunk: data and headers (4 KiB); a power of two. A session takes queue depth times this much memory
    /// [default: 128K]
    #[arg(long, value_name = "BYTES", value_parser = size32)]
    max_chunk_size: Option<u32>,
    /// Invalidate a chunk's key while its request is processed. Without it a client can modify a chunk while the server is processing
    /// it; requests are a little cheaper
    #[arg(long, value_name = "on|off", value_parser = on_off, default_value = "on", action = ArgAction::Set)]
    always_invalidate: bool,
    /// Threads, each with an event loop, over which sessions are distributed. More than one helps with several sessions and a processor
    /// for each thread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Bypass the page cache (O_DIRECT) where the file system supports that
    #[arg(long)]
    direct: bool,
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

fn listen(text: &str) -> Result<Endpoint, String> {
    let endpoint: Endpoint = text.parse()?;
    match endpoint.port {
        Some(0) => Err("clients have to name the port: it can't be 0".to_owned()),
        _ => Ok(endpoint),
    }
}

/// A root of exports.
pub(crate) fn root(text: &str) -> Result<FolderSpec, String> {
    let root: FolderSpec = text.parse()?;
    match root.migrate {
        true => Err("`migrate` is of an export".to_owned()),
        false => Ok(root),
    }
}

pub(crate) fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".to_owned()),
    }
}

impl ServeArgs {
    /// Returns the name of the daemon's task.
    pub(crate) fn task_name(&self) -> String {
        self.addr[0].with_port(DEFAULT_PORT)
    }

    /// Returns the exports that have names.
    pub(crate) fn exports(&self) -> Result<Vec<ExportSpec>, Failure> {
        let named = self.exports.iter().cloned().map(|export| {
            let at = self.placed(FolderSpec {
                path: export.path,
                read_only: export.read_only,
                migrate: export.migrate,
                within: export.within,
            })?;
            Ok(ExportSpec {
                name: export.name,
                path: at.path,
                read_only: at.read_only,
                migrate: at.migrate,
                within: at.within,
            })
        });
        named.collect()
    }

    /// Returns the paths of the exports that have names, as given.
    pub(crate) fn named_paths(&self) -> impl Iterator<Item = &Path> {
        self.exports.iter().map(|export| &*export.path)
    }

    /// The folder whose files are offered, as it was given.
    pub(crate) fn folder_path(&self) -> Option<&Path> {
        self.export_dir.as_ref().map(|folder| &*folder.path)
    }

    /// Limits a file or folder to --export-within.
    fn placed(&self, given: FolderSpec) -> Result<FolderSpec, Failure> {
        if self.export_within.is_empty() {
            return Ok(given);
        }
        let path = absolute(&given.path)?;
        for root in &self.export_within {
            let within = absolute(&root.path)?;
            if path.starts_with(&within) {
                return Ok(FolderSpec {
                    path,
                    read_only: given.read_only || root.read_only,
                    migrate: given.migrate && !root.read_only,
                    within: Some(within),
                });
            }
        }
        let text = format!("{} is not below --export-within", path.display());
        Err(Failure::usage(text))
    }

    /// The capture file.
    pub(crate) fn capture(&self) -> Option<&Path> {
        self.transport.capture()
    }

    /// The addresses to listen at. Blocks while names are resolved.
    fn listens(&self, resolver: &Resolver) -> Result<Vec<SocketAddr>, Failure> {
        let mut listens = Vec::new();
        for endpoint in &self.addr {
            listens.extend(resolver.own(endpoint, DEFAULT_PORT)?);
        }
        match twice(&listens) {
            Some(addr) => Err(Failure::usage(format!("--addr {addr} is given twice"))),
            None => Ok(listens),
        }
    }

    fn config(&self, listens: &[SocketAddr]) -> ServerConfig {
        let usual = ServerConfig::default();
        ServerConfig {
            addr: listens[0].ip(),
            port: listens[0].port(),
            further: listens[1..].to_vec(),
            allow: AccessList::new(self.allow.clone()),
            max_sessions: self.max_sessions.unwrap_or(usual.max_sessions),
            max_sessions_per_client: self.max_sessions_per_client.unwrap_or(usual.max_sessions_per_client),
            max_paths: self.max_paths.unwrap_or(usual.max_paths),
            max_connections: self.max_connections.unwrap_or(usual.max_connections),
            queue_depth: self.queue_depth.unwrap_or(usual.queue_depth),
            max_chunk_size: self.max_chunk_size.unwrap_or(usual.max_chunk_size),
            always_invalidate: self.always_invalidate,
            heartbeat: self.transport.heartbeat(HEARTBEAT),
            ..usual
        }
    }

    /// As the kernel's modules have them.
    fn parameters(&self, config: &ServerConfig) -> Parameters {
        let folder = self.export_dir.as_ref().map(|f| f.path.display().to_string());
        Parameters {
            max_chunk_size: config.max_chunk_size,
            sess_queue_depth: config.queue_depth,
            always_invalidate: config.always_invalidate,
            dev_search_path: folder.unwrap_or_default(),
            port: config.port,
        }
    }

    fn limits(&self) -> Limits {
        let usual = Limits::default();
        Limits {
            max_devices: self.max_devices_per_session.unwrap_or(usual.max_devices),
            max_open: self.max_devices.unwrap_or(usual.max_open),
        }
    }

    /// Checks what needs no network: exports can be opened, and no address is given twice.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if let Some(addr) = twice(&self.addr) {
            return Err(Failure::usage(format!(
                "--addr {} is given twice",
                addr.with_port(DEFAULT_PORT)
            )));
        }
        self.open_exports().map(drop)
    }

    fn open_exports(&self) -> Result<Arc<Exports>, Failure> {
        let folder = self.export_dir.clone().map(|folder| self.placed(folder)).transpose()?;
        Exports::new(self.exports()?, folder.as_ref(), self.caching()).map_err(Failure::of)
    }

    /// Addresses and names to listen at, as given, with their ports.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = String> {
        self.addr.iter().map(|addr| addr.with_port(DEFAULT_PORT))
    }

    fn caching(&self) -> Caching {
        match self.direct {
            true => Caching::Direct,
            false => Caching::PageCache,
        }
    }
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::failed(format!("{}: {e}", path.display())))
}

/// Every open device takes a descriptor or two, and the usual limit (1024) is one for programs that call `select`.
fn raise_open_files() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(OPEN_FILES)), hard));
    if let Err(e) = raised {
        tracing::info!("the limit of open files stays as it is: {e}");
    }
}

/// Runs the command.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let served = foreground(&args.control, &args.report, |place| serve(args, place));
    args.report.end(served)
}

/// Serves until it is to stop.
pub(crate) fn serve(args: &ServeArgs, place: Place<'_>) -> Result<(), Failure> {
    raise_open_files();
    let Place {
        stop,
        services,
        mut reporter,
        tell: told_to,
        resolver,
        ..
    } = place;
    let listens = args.listens(&resolver)?;
    let exports = args.open_exports()?;
    let config = ServeConfig {
        rtrs: args.config(&listens),
        limits: args.limits(),
        exports: exports.clone(),
        disk: DiskConfig::default(),
        reactor: args.transport.reactor(),
        grace: GRACE,
    };
    let parameters = args.parameters(&config.rtrs);
    let instruments = args.transport.instruments(&args.task_name())?;
    let (mut server, mtus) = start(args, &listens, config, &instruments)?;
    let _listed = services.add_server(Served {
        control: server.control(),
        parameters,
    });
    told_to(Stage::Serving(exports));
    told_to(Stage::Up);
    announce(args, &reporter, &listens, &mtus)?;

    let mut told = Ok(());
    while !stop.requested() && told.is_ok() {
        told = match server.next(reporter.timeout()) {
            Some(event) => {
                if let ServeEvent::PathDown(_, why) = &event {
                    instruments.server_path_down(why);
                }
                report(&reporter, event)
            }
            None => reporter.tick(|| counted(server.stats().unwrap_or_default())),
        };
    }
    let last = server.stats().unwrap_or_default();
    // Answers requests in flight, ends the sessions and makes what they wrote durable.
    let events = server.stop();
    for event in events {
        report(&reporter, event)?;
    }
    let (stats, moved) = counted(last);
    reporter.summary(&stats, moved)?;
    told
}

/// Starts the loops; also the path MTU of each device.
fn start(
    args: &ServeArgs,
    listens: &[SocketAddr],
    config: ServeConfig,
    instruments: &Instruments,
) -> Result<(Serving, Vec<(IpAddr, Mtu)>), Failure> {
    let loops = usize::from(args.threads);
    // One device for each address, whatever the ports.
    let mut addrs: Vec<IpAddr> = Vec::new();
    for ip in listens.iter().map(SocketAddr::ip) {
        if !addrs.contains(&ip) {
            addrs.push(ip);
        }
    }
    let admission = ServerAdmission::new(&config.rtrs, loops);
    let mut devices = args.transport.open(&addrs, loops, admission.clone(), instruments)?;
    let mtus = |device: &mut LocalDevice| {
        let all = addrs.iter();
        all.filter_map(|addr| Some((*addr, device.mtu(*addr).ok()?))).collect()
    };
    let mtus = devices.first_mut().map(mtus).unwrap_or_default();
    let started = Serving::start_shards(devices, config, &admission);
    let server = started.map_err(|e| Failure::failed(format!("can't serve: {e}")))?;
    Ok((server, mtus))
}

fn report(reporter: &Reporter, event: ServeEvent) -> Result<(), Failure> {
    match Event::of_server(event)? {
        Some(event) => reporter.event(&event),
        None => Ok(()),
    }
}

/// Returns the traffic of clients, and the packets that it took.
fn counted(stats: ServeStats) -> (LoopStats, Moved) {
    let c = &stats.rnbd;
    let moved = Moved {
        bytes_read: c.read_bytes,
        bytes_written: c.written_bytes,
        requests: c.requests,
        failed: c.failed,
        refused: [
            ("opens_refused", c.refused),
            ("opens_refused_limit", c.refused_limit),
            ("malformed_messages", c.malformed),
        ]
        .into_iter()
        .chain(stats.rtrs.iter().copied())
        .filter(|(name, _)| !matches!(*name, "sessions_opened" | "connections_accepted"))
        .collect(),
    };
    (stats.turns, moved)
}

fn announce(
    args: &ServeArgs,
    reporter: &Reporter,
    listens: &[SocketAddr],
    mtus: &[(IpAddr, Mtu)],
) -> Result<(), Failure> {
    let config = args.config(listens);
    let listener = |listen: &SocketAddr| {
        let found = mtus.iter().find(|(addr, _)| *addr == listen.ip());
        Listener {
            address: *listen,
            path_mtu: found.map_or(Mtu::B1024, |(_, mtu)| *mtu).bytes(),
        }
    };
    let exports = args.exports()?.into_iter().map(|export| Export {
        bytes: export
            .open(false, args.caching())
            .map_or(0, |image| image.geometry().size),
        path: export.path.display().to_string(),
        name: export.name,
        read_only: export.read_only,
        migrate: export.migrate,
    });
    let server = Box::new(Listening {
        first: listener(&listens[0]),
        addresses: listens.iter().map(listener).collect(),
        exports: exports.collect(),
        export_dir: args.folder_path().map(|folder| folder.display().to_string()),
        queue_depth: config.queue_depth,
        max_chunk_size: config.max_chunk_size,
        session_bytes: config.session_bytes(),
        always_invalidate: config.always_invalidate,
        threads: args.threads,
    });
    reporter.event(&Event::Listening { server })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_addresses() {
        for (text, addr) in [
            ("192.0.2.7", "192.0.2.7:1234"),
            ("ip:192.0.2.7:99", "192.0.2.7:99"),
            ("[::]", "[::]:1234"),
            ("store.example", "store.example:1234"),
        ] {
            assert_eq!(listen(text).unwrap().with_port(DEFAULT_PORT), addr);
        }
        assert!(listen("192.0.2.7,192.0.2.8").is_err());
        assert!(listen("192.0.2.7:0").is_err());
    }
}
