//! `ferroce map`: a device of a server as an NBD socket.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use rnbd::{
    block::BlockDevice,
    client::{Client, Device as Disk, MapError},
    nbd::{NbdConfig, NbdServer},
    proto::AccessMode,
};
use roce::{Device, iface};
use rtrs::{
    PathError,
    addr::PathAddr,
    client::{OpenArgs, Session},
};
use serde_json::json;

use crate::{
    output::{self, Failure},
    report::{Moved, ReportArgs, Reporter},
    signals::Stop,
    transport::TransportArgs,
    units::seconds,
};

/// What the NBD clients' requests in flight get at an orderly end.
const GRACE: Duration = Duration::from_secs(5);
/// How often a wait looks whether the user wants to end.
const LOOK: Duration = Duration::from_millis(50);
/// After which time without a session the user is told that we still wait.
const SILENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce map --session backup --path 192.0.2.7 --device disk --nbd /run/disk.sock
  ferroce map --session test --path 127.0.0.2,127.0.0.1 --device disk --nbd disk.sock --ro
  qemu-img convert -p -O raw 'nbd+unix:///?socket=disk.sock' copy.img

NBD clients find the device under its name and under the empty one; 16 may be connected at a time.

Runs until SIGINT or SIGTERM, or until the server is gone. With --json, one event per line on standard output: `mapped`, \
`stats` (with --stats-interval), `error`, and at the end `summary`.")]
pub(crate) struct MapArgs {
    /// Name of the session: the server tells its clients apart by it
    #[arg(long, value_name = "NAME")]
    session: String,
    /// Our address (optional) and the server's, perhaps with port; or as the kernel writes it: ip:SRC,ip:DST
    #[arg(long, value_name = "[SRC,]DST[:1234]")]
    path: PathAddr,
    /// Device to open, as the server calls it
    #[arg(long, value_name = "NAME")]
    device: String,
    /// Unix socket to make for NBD clients (mode 0600, removed at the end)
    #[arg(long, value_name = "SOCKET")]
    nbd: PathBuf,
    /// Open the device read-only
    #[arg(long)]
    ro: bool,
    /// Connections for I/O [default: number of CPUs]
    #[arg(long, value_name = "N")]
    connections: Option<u16>,
    /// Longest time for each step of connecting; the default is the kernel client's, as a kernel server on a busy machine may
    /// take more than 5 s to register its chunks before it answers
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    connect_timeout: Duration,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    transport: TransportArgs,
}

impl MapArgs {
    /// Our end of the path.
    fn source(&self) -> Result<IpAddr, Failure> {
        match self.path.src {
            Some(src) => Ok(src),
            None => iface::route_to(self.path.dst.ip())
                .map_err(|e| Failure::failed(format!("no way to {}: {e}", self.path.dst.ip()))),
        }
    }

    fn open_session(&self, device: &Device) -> Result<Session<Device>, Failure> {
        let mut open = OpenArgs::new(&self.session, self.path);
        if let Some(connections) = self.connections {
            open.connections = connections;
        }
        // RNBD's longest message names a device.
        open.max_user_header = size_of::<rnbd::proto::MsgOpen>() as u16;
        open.connect_timeout = self.connect_timeout;
        open.heartbeat = self.transport.heartbeat();
        Session::open(device, open).map_err(|e| session_failure(self.path.dst, &e))
    }

    /// Opens the session; `None` when the user wanted to end meanwhile.
    fn connect(&self, device: &Device, stop: &Stop) -> Result<Option<Session<Device>>, Failure> {
        let (sender, opened) = mpsc::channel();
        let begun = Instant::now();
        let mut told = false;
        thread::scope(|scope| {
            scope.spawn(move || {
                let _ = sender.send(self.open_session(device));
            });
            loop {
                if !told && begun.elapsed() >= SILENCE {
                    told = true;
                    tracing::warn!(
                        "no session with {} yet; each step may take {} s (--connect-timeout)",
                        self.path.dst,
                        self.connect_timeout.as_secs_f64()
                    );
                }
                match opened.recv_timeout(LOOK) {
                    Err(RecvTimeoutError::Timeout) if stop.requested() => {
                        // Whoever waits for an answer is woken.
                        device.close();
                        return Ok(None);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(session) => return session.map(Some),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(Failure::failed("opening the session panicked".to_owned()));
                    }
                }
            }
        })
    }
}

/// What went wrong, where, and what to look at.
fn session_failure(dst: SocketAddr, e: &rtrs::Error) -> Failure {
    use rtrs::Error;
    let ip = dst.ip();
    let hint = match e {
        Error::Unreachable | Error::Timeout(..) => format!(
            "\nis the server running there? `ferroce doctor --peer {ip}` looks at the way (firewall, NAT, port 4791)"
        ),
        Error::Rejected { errno: None, .. } => {
            "\nsomething speaks RoCE there, but no RTRS server listens at this port".to_owned()
        }
        Error::Path(PathError::PeerDisconnected) => {
            "\nthe server's log says why; mostly a session of this name exists there: choose another with --session"
                .to_owned()
        }
        _ => String::new(),
    };
    Failure::failed(format!("no session with {dst}: {e}{hint}"))
}

fn map_failure(args: &MapArgs, e: &MapError) -> Failure {
    let hint = match e {
        MapError::Refused { errno, mode, .. } if mode.writable() && *errno == rnbd::Errno::EACCES => {
            "\nmap it with --ro"
        }
        MapError::Refused { errno, .. } if *errno == rnbd::Errno::EPERM => "\nend the other one, or map it with --ro",
        _ => "",
    };
    Failure::failed(format!("can't map {} of {}: {e}{hint}", args.device, args.path.dst))
}

/// Why the mapping ended.
enum End {
    Asked,
    Lost(PathError),
}

/// Runs the command.
pub(crate) fn run(args: &MapArgs) -> Result<(), Failure> {
    args.report.end(map(args))
}

fn map(args: &MapArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let mut reporter = args.report.reporter();
    let roce = args.transport.open(args.source()?)?;
    let Some(session) = args.connect(&roce, &stop)? else {
        return reporter.summary(&roce, Moved::default());
    };
    let (lost_tx, lost) = mpsc::channel();
    session.on_down(move |why| {
        // Nobody listens any more at the end of the program.
        let _ = lost_tx.send(why.clone());
    });
    let mode = if args.ro {
        AccessMode::ReadOnly
    } else {
        AccessMode::ReadWrite
    };
    let client = Client::new(session.clone()).map_err(|e| map_failure(args, &e))?;
    let device = client.map(&args.device, mode).map_err(|e| map_failure(args, &e))?;
    let device = Arc::new(device);
    let nbd = serve_nbd(args, &device)?;
    announce(args, &reporter, &session, &device.geometry())?;

    let mut ticks = Ok(());
    let end = loop {
        if stop.requested() || ticks.is_err() {
            break End::Asked;
        }
        match lost.recv_timeout(reporter.patience()) {
            Ok(why) => break End::Lost(why),
            Err(_) => ticks = reporter.tick(&roce, moved(&device, nbd.turned_away())),
        }
    };
    // Requests of clients are answered: by the server, or with an error if it is gone.
    let turned_away = nbd.turned_away();
    nbd.stop();
    let finished = finish(args, &device, end);
    reporter.summary(&roce, moved(&device, turned_away))?;
    session.close();
    finished.and(ticks)
}

/// What NBD clients have moved.
fn moved(device: &Disk<Device>, nbd_turned_away: u64) -> Moved {
    let c = device.counters();
    Moved {
        bytes_read: c.read_bytes,
        bytes_written: c.written_bytes,
        requests: c.completed,
        failed: c.failed,
        refused: vec![("nbd_turned_away", nbd_turned_away)],
    }
}

fn serve_nbd<D: BlockDevice>(args: &MapArgs, device: &Arc<D>) -> Result<NbdServer, Failure> {
    let mut config = NbdConfig::new(&args.nbd, Arc::clone(device)).named(&args.device);
    config.grace = GRACE;
    NbdServer::start(config).map_err(|e| Failure::failed(format!("NBD socket {}: {e}", args.nbd.display())))
}

fn announce(
    args: &MapArgs,
    reporter: &Reporter,
    session: &Session<Device>,
    geometry: &rnbd::block::Geometry,
) -> Result<(), Failure> {
    let info = session.info();
    let socket = args.nbd.display().to_string();
    let access = if geometry.read_only { "read-only" } else { "read-write" };
    let text = format!(
        "mapped {} of {} ({}, {access}): nbd+unix:///?socket={socket}",
        args.device,
        args.path.dst,
        output::bytes(geometry.size)
    );
    let fields = json!({
        "session": args.session,
        "server": args.path.dst.to_string(),
        "device": args.device,
        "bytes": geometry.size,
        "block_size": geometry.logical_block_size,
        "read_only": geometry.read_only,
        "nbd": socket,
        "queue_depth": info.queue_depth,
        "max_io_bytes": info.max_io_size,
    });
    reporter.event("mapped", fields, &text)
}

/// Makes what was written durable and closes the device, if that is still possible.
fn finish(args: &MapArgs, device: &Disk<Device>, end: End) -> Result<(), Failure> {
    let dst = args.path.dst;
    if let End::Lost(why) = end {
        return Err(Failure::failed(format!(
            "connection to {dst} lost: {why}; what was not flushed may not be in the image"
        )));
    }
    let fail =
        |what: &str, e: &dyn std::fmt::Display| Failure::failed(format!("{dst} could not {what} {}: {e}", args.device));
    if !device.geometry().read_only {
        flush(device).map_err(|e| fail("flush", &e))?;
    }
    device.unmap().map_err(|e| fail("close", &e))
}

/// Flushes and waits.
fn flush<D: BlockDevice>(device: &D) -> Result<(), rnbd::Errno> {
    let (sender, receiver) = mpsc::channel();
    device.submit(
        rnbd::block::BlockRequest::Flush,
        Box::new(move |result, _| {
            let _ = sender.send(result);
        }),
    );
    receiver.recv().unwrap_or(Err(rnbd::Errno::ECONNABORTED))
}
