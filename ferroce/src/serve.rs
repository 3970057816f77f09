//! `ferroce serve`: image files and block devices for RNBD clients.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, thread};

use clap::{ArgAction, Args};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rnbd::{
    backend::{ExportSpec, Exports, FolderSpec, Image},
    server::{Server, ServerOptions, StartError},
};
use roce::Device;
use roce_verbs::shown;
use rtrs::{
    addr::PathAddr,
    admission::{AccessList, AccessRule},
    proto::DEFAULT_PORT,
    server::{ServerConfig, SessionHandle},
};
use serde_json::{Value, json};

use crate::{
    output::{self, Failure},
    report::{Moved, ReportArgs, Reporter},
    signals::Stop,
    transport::TransportArgs,
    units::size32,
};

/// Open files at most; more than devices, sessions and sockets can take.
const OPEN_FILES: u64 = 65_536;

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce serve --listen 192.0.2.7 --export disk=/images/disk.img --export system=/dev/sdb,ro
  ferroce serve --listen 192.0.2.7 --export-dir /images --allow 192.0.2.0/24
  ferroce serve --listen 192.0.2.7 --export disk=disk.img --allow db=192.0.2.8 --allow web=192.0.2.16/28
  ferroce serve --listen 127.0.0.1:1234 --export disk=disk.img --pcap trace.pcap

On a Linux client, as root, with rdma_rxe or RoCE hardware and the module rnbd_client:
  echo 'sessname=test path=ip:192.0.2.7 device_path=disk' > /sys/class/rnbd-client/ctl/map_device

Runs until SIGINT or SIGTERM, then ends its sessions and makes everything durable. With --json, one event per line on \
standard output: `listening`, `session_opened` and `session_closed` (`session`, `peer`, and `connections`, how many the \
client made for its first path), `stats` (with --stats-interval), `error`, and at the end `summary`.")]
pub(crate) struct ServeArgs {
    /// Our address, perhaps with port; 0.0.0.0 or :: for all
    #[arg(long, value_name = "ADDR[:1234]", value_parser = listen)]
    listen: SocketAddr,
    /// An image file or block device and the name that clients ask for; may be given several times. `ro`: nobody may write;
    /// `migrate`: beside a writer a second one gets in if it asks for access mode `migration`, as always with the kernel's
    /// server; a comma in the path is written `,,`
    #[arg(
        long = "export",
        value_name = "NAME=PATH[,ro][,migrate]",
        required_unless_present = "export_dir"
    )]
    exports: Vec<ExportSpec>,
    /// A folder whose files and block devices are offered by their names; %SESSNAME% in it stands for the client's session.
    /// Options as those of --export
    #[arg(long, value_name = "DIR[,ro][,migrate]")]
    export_dir: Option<FolderSpec>,
    /// Who may connect; may be given several times [default: everybody]. With NAME: a session of that name only from there,
    /// its further paths too, while a name without a rule is for the addresses without a name
    #[arg(long, value_name = "[NAME=]CIDR")]
    allow: Vec<AccessRule>,
    /// Sessions at a time [default: 64]
    #[arg(long, value_name = "N")]
    max_sessions: Option<usize>,
    /// Sessions at a time of one client: of an IPv4 or link-local IPv6 address, or of the /64 of another IPv6 address
    /// [default: 16]
    #[arg(long, value_name = "N")]
    max_sessions_per_client: Option<usize>,
    /// Paths of all sessions at a time [default: 128]. Beside them at most 256 wait for a first answer from their client's
    /// address, 32 of one client; the oldest of these gives way to a newcomer
    #[arg(long, value_name = "N")]
    max_paths: Option<usize>,
    /// Devices that one session may have open [default: 256]
    #[arg(long, value_name = "N")]
    max_devices_per_session: Option<usize>,
    /// Devices that all sessions together may have open [default: 1024]
    #[arg(long, value_name = "N")]
    max_devices: Option<usize>,
    /// Requests in flight of a session [default: 512]
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,
    /// Bytes of a request, its headers (4 KiB) included; a power of two. A session takes queue depth times this of memory
    /// [default: 128K]
    #[arg(long, value_name = "BYTES", value_parser = size32)]
    max_chunk_size: Option<u32>,
    /// Take back a chunk's key while its request is worked on. Off, a client can change data under the server's hands,
    /// and requests are a little cheaper
    #[arg(long, value_name = "on|off", value_parser = on_off, default_value = "on", action = ArgAction::Set)]
    always_invalidate: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    transport: TransportArgs,
}

fn listen(text: &str) -> Result<SocketAddr, String> {
    let path = PathAddr::parse(text, DEFAULT_PORT).map_err(|e| e.to_string())?;
    match path.src {
        None if path.dst.port() == 0 => Err("clients have to name the port: it can't be 0".to_owned()),
        None => Ok(path.dst),
        Some(_) => Err("one address, not a path".to_owned()),
    }
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".to_owned()),
    }
}

impl ServeArgs {
    fn config(&self) -> ServerConfig {
        let usual = ServerConfig::default();
        ServerConfig {
            addr: self.listen.ip(),
            port: self.listen.port(),
            allow: AccessList::new(self.allow.clone()),
            max_sessions: self.max_sessions.unwrap_or(usual.max_sessions),
            max_sessions_per_client: self.max_sessions_per_client.unwrap_or(usual.max_sessions_per_client),
            max_paths: self.max_paths.unwrap_or(usual.max_paths),
            queue_depth: self.queue_depth.unwrap_or(usual.queue_depth),
            max_chunk_size: self.max_chunk_size.unwrap_or(usual.max_chunk_size),
            always_invalidate: self.always_invalidate,
            heartbeat: self.transport.heartbeat(),
            ..usual
        }
    }

    fn options(&self, exports: Arc<Exports>) -> ServerOptions {
        let usual = ServerOptions::new(exports);
        ServerOptions {
            max_devices: self.max_devices_per_session.unwrap_or(usual.max_devices),
            max_open: self.max_devices.unwrap_or(usual.max_open),
            ..usual
        }
    }
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
    args.report.end(serve(args))
}

fn serve(args: &ServeArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    raise_open_files();
    let mut reporter = args.report.reporter();
    let exports = Exports::new(args.exports.iter().cloned(), args.export_dir.as_ref())
        .map_err(|e| Failure::failed(e.to_string()))?;
    let roce = args.transport.open(args.listen.ip())?;
    let server = Server::start(&*roce, args.config(), args.options(exports)).map_err(|e| start_failure(args, &e))?;
    announce(args, &reporter, &roce)?;

    let mut sessions = Sessions::default();
    let mut told = Ok(());
    while !stop.requested() && told.is_ok() {
        thread::sleep(reporter.patience());
        told = still_open(&roce)
            .and_then(|()| sessions.update(&reporter, server.rtrs().sessions()))
            .and_then(|()| reporter.tick(&roce, moved(&server)));
    }
    // Answers requests in flight, ends the sessions and makes what they wrote durable.
    server.shutdown();
    sessions.update(&reporter, Vec::new())?;
    let moved = moved(&server);
    drop(server);
    reporter.summary(&roce, moved)?;
    told
}

fn start_failure(args: &ServeArgs, e: &StartError) -> Failure {
    Failure::failed(format!("can't serve on {}: {e}", args.listen))
}

/// A device that has stopped serves nobody, and nobody would notice.
fn still_open(roce: &Device) -> Result<(), Failure> {
    match roce.is_closed() {
        true => Err(Failure::failed(
            "the RoCE device has stopped; the log says why".to_owned(),
        )),
        false => Ok(()),
    }
}

/// What clients have moved.
fn moved(server: &Server<Device>) -> Moved {
    let c = server.counters();
    Moved {
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
        .chain(server.rtrs().counters().named())
        .filter(|(name, _)| !matches!(*name, "sessions_opened" | "connections_accepted"))
        .collect(),
    }
}

fn announce(args: &ServeArgs, reporter: &Reporter, roce: &Device) -> Result<(), Failure> {
    let config = args.config();
    let mut exports = Vec::new();
    let mut text = format!("listening on {}, path MTU {}", args.listen, roce.mtu().bytes());
    for export in &args.exports {
        let size = Image::open(&export.path, false).map_or(0, |image| image.geometry().size);
        exports.push(json!({
            "name": export.name,
            "path": export.path.display().to_string(),
            "bytes": size,
            "read_only": export.read_only,
            "migrate": export.migrate,
        }));
        let access = match (export.read_only, export.migrate) {
            (true, _) => "read-only",
            (false, false) => "read-write",
            (false, true) => "read-write, two writers while migrating",
        };
        text.push_str(&format!(
            "\nexport {}: {} ({}, {access})",
            export.name,
            export.path.display(),
            output::bytes(size)
        ));
    }
    let folder = args.export_dir.as_ref().map(|f| f.path.display().to_string());
    if let Some(folder) = &folder {
        text.push_str(&format!("\nexport folder: {folder}"));
    }
    let fields = json!({
        "address": args.listen.to_string(),
        "path_mtu": roce.mtu().bytes(),
        "exports": exports,
        "export_dir": folder,
        "queue_depth": config.queue_depth,
        "max_chunk_size": config.max_chunk_size,
        "session_bytes": config.session_bytes(),
        "always_invalidate": config.always_invalidate,
    });
    reporter.event("listening", fields, &text)
}

/// Sessions that have been reported as opened.
#[derive(Default)]
struct Sessions(BTreeMap<u64, SessionHandle>);

impl Sessions {
    /// Reports who came and who went.
    fn update(&mut self, reporter: &Reporter, now: Vec<SessionHandle>) -> Result<(), Failure> {
        // A session that is being opened has no name yet.
        let now: BTreeMap<u64, SessionHandle> = now
            .into_iter()
            .filter(|s| !s.name().is_empty())
            .map(|s| (s.id(), s))
            .collect();
        for session in self.0.values().filter(|s| !now.contains_key(&s.id())) {
            let text = format!("{} closed", described(session.name(), session.peer()));
            reporter.event("session_closed", fields(session), &text)?;
        }
        for session in now.values().filter(|s| !self.0.contains_key(&s.id())) {
            let (name, peer, connections) = (session.name(), session.peer(), session.connections());
            let text = format!("{} opened, {connections} connections", described(name, peer));
            reporter.event("session_opened", fields(session), &text)?;
        }
        self.0 = now;
        Ok(())
    }
}

/// The client chose the name.
fn described(name: &str, peer: impl std::fmt::Display) -> String {
    format!("session {} of {peer}", shown(name))
}

fn fields(session: &SessionHandle) -> Value {
    json!({
        "session": session.name(),
        "peer": session.peer().to_string(),
        "connections": session.connections(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_can_not_write_on_the_terminal() {
        let name = "a\u{1b}]0;title\u{7}\nlistening on 0.0.0.0\u{9b}31m\u{202e}";
        let text = described(name, "192.0.2.1:1234");
        assert!(!text.contains(char::is_control) && !text.contains('\u{202e}'), "{text}");
        assert_eq!(described("größer", "x"), "session größer of x");
    }

    #[test]
    fn listen_addresses() {
        assert_eq!(listen("192.0.2.7").unwrap(), "192.0.2.7:1234".parse().unwrap());
        assert_eq!(listen("ip:192.0.2.7:99").unwrap(), "192.0.2.7:99".parse().unwrap());
        assert_eq!(listen("[::]").unwrap(), "[::]:1234".parse().unwrap());
        assert!(listen("192.0.2.7,192.0.2.8").is_err() && listen("host").is_err());
        assert!(listen("192.0.2.7:0").is_err());
    }
}
