//! Administration of a running `serve`, `map` or `daemon`: its control socket, a mounted tree of its attributes, and metrics by
//! HTTP.

pub(crate) mod address;
pub(crate) mod connection;
mod events;
mod execute;
mod http;
pub(crate) mod lnet;
mod metrics;
mod peer;
mod registry;
mod shared;
mod sockets;
mod text;

use std::{
    fs::DirBuilder,
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::{fs::DirBuilderExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use nix::{
    sys::socket::{getsockopt, sockopt::PeerCredentials},
    unistd::geteuid,
};
use rnbd::Errno;
use rnbd_admin::Names;
use rnbd_host::control::Refused;
use rnbd_sysfs::{MountError, Mounted};
use roce_net::{
    places::{Full, Limits, Peer},
    socket_file::{Access, Kind, SocketFile},
};
use roce_verbs::shown;
use socket2::Socket;

pub(crate) use events::Events;
pub(crate) use peer::Authority;
pub(crate) use registry::{Served, ServiceRegistry, Supervisor, not_renewed};

use self::{
    connection::{converse, converse_on_stdio, refusal},
    http::Metrics,
    peer::AccessControl,
    shared::Shared,
    sockets::{Acceptor, Place, Service},
};
use crate::{
    names::{Endpoint, Resolver},
    output::Failure,
};

/// Name for standard input and output.
const STDIO: &str = "-";
/// Time for a connection to say hello.
const HELLO_TIME: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Administration")]
pub(crate) struct ControlArgs {
    /// Create this Unix socket for `ferroce ctl` (mode 0660), in a folder that others can't write to. Root, its owner and the members of its
    /// group may inspect and control the process. Repeatable. `-`: read requests from standard input, answer on standard output
    #[arg(long, value_name = "SOCKET")]
    control: Vec<PathBuf>,
    /// Group of the socket and of the files of --sysfs, by name or number [default: group of the process]
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,
    /// Serve statistics for Prometheus over HTTP, at /metrics. With a port alone only this host can read them, with an address every
    /// host that reaches it
    #[arg(long, value_name = "[HOST:]PORT", value_parser = metrics_address)]
    metrics: Option<Endpoint>,
    /// Mount the attribute tree in this folder (FUSE), with the paths, texts and modes of Linux's /sys, for the users of the control
    /// socket. `ferroce run -- TOOL` finds it in /run/ferroce-daemon/sys
    #[arg(long, value_name = "DIR")]
    sysfs: Option<PathBuf>,
    /// Mount only attributes that the kernel's code has, not those of its documentation alone
    #[arg(long, requires = "sysfs")]
    sysfs_strict: bool,
}

impl ControlArgs {
    /// The same, with another socket.
    pub(crate) fn with(&self, socket: PathBuf) -> Self {
        let mut this = self.clone();
        this.control.push(socket);
        this
    }
}

fn metrics_address(text: &str) -> Result<Endpoint, String> {
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return format!("{}:{port}", Ipv4Addr::LOCALHOST).parse();
    }
    let endpoint = text.parse().ok().filter(|endpoint: &Endpoint| endpoint.port.is_some());
    endpoint.ok_or_else(|| format!("{text:?} is neither a port nor a host with one (9100, 192.0.2.7:9100, [::1]:9100)"))
}

/// The views of a process. Dropping it answers the requests in progress, so what they ask has to have ended before.
pub(crate) struct Control {
    shared: Arc<Shared>,
    acceptors: Vec<Acceptor>,
    /// Removed at the end, after the connections.
    files: Vec<SocketFile>,
    stdio: Option<connection::Requests>,
    /// Unmounted at the end.
    sysfs: Option<Mounted>,
}

impl Control {
    /// Makes the sockets, and listens.
    pub(crate) fn start(args: &ControlArgs) -> Result<Self, Failure> {
        Self::with(args, ServiceRegistry::default())
    }

    fn with(args: &ControlArgs, services: ServiceRegistry) -> Result<Self, Failure> {
        let services = Arc::new(services);
        let mut this = Self {
            shared: Arc::new(Shared::new(services)),
            acceptors: Vec::new(),
            files: Vec::new(),
            stdio: None,
            sysfs: None,
        };
        if args.control_group.is_some() && args.control.is_empty() && args.sysfs.is_none() {
            return Err(Failure::usage(
                "--control-group is of a --control socket, or of --sysfs",
            ));
        }
        let group = args.control_group.as_deref().map(peer::group).transpose()?;
        // First, as the answer to hello on the socket names it.
        if let Some(dir) = &args.sysfs {
            let names = if args.sysfs_strict { Names::Mainline } else { Names::All };
            let mounted = this.mount(dir, names, group);
            mounted.map_err(|e| Failure::failed(format!("--sysfs {}: {e}", dir.display())))?;
        }
        for path in &args.control {
            match path.as_os_str() == STDIO {
                true => this.listen_on_stdio(),
                false => this
                    .listen(path, group)
                    .map_err(|e| Failure::failed(format!("control {e}{}", holder(path))))?,
            }
        }
        if let Some(endpoint) = &args.metrics {
            for addr in Resolver::default().own(endpoint, 0)? {
                let listening = this.serve_metrics(addr);
                listening.map_err(|e| Failure::failed(format!("metrics on {addr}: {e}")))?;
            }
        }
        Ok(this)
    }

    /// The views of a daemon, whose socket is by default where `ferroce ctl` looks.
    pub(crate) fn of_daemon(args: &ControlArgs) -> Result<Self, Failure> {
        if !args.control.is_empty() {
            return Self::with(args, ServiceRegistry::of_daemon());
        }
        let path = address::place_of_daemon().ok_or_else(|| {
            Failure::usage("there is no XDG_RUNTIME_DIR of this user: name the control socket with --control")
        })?;
        if let Some(dir) = path.parent() {
            // The socket's own mode decides who may connect.
            let mode = if geteuid().is_root() { 0o755 } else { 0o700 };
            let made = DirBuilder::new().recursive(true).mode(mode).create(dir);
            made.map_err(|e| Failure::failed(format!("{}: {e}", dir.display())))?;
        }
        let args = ControlArgs {
            control: vec![path],
            ..args.clone()
        };
        Self::with(&args, ServiceRegistry::of_daemon())
    }

    /// The mappings and servers of this process.
    pub(crate) fn services(&self) -> &Arc<ServiceRegistry> {
        &self.shared.services
    }

    /// Path of the first control socket.
    pub(crate) fn socket(&self) -> Option<PathBuf> {
        let bound = self.files.first()?.listener().local_addr().ok()?;
        bound.as_pathname().map(Path::to_owned)
    }

    /// The subscribers of events.
    pub(crate) fn events(&self) -> Events {
        self.shared.events.clone()
    }

    fn listen(&mut self, path: &Path, group: Option<u32>) -> io::Result<()> {
        let file = SocketFile::bind(path, Kind::Stream, Access::Group(group))?;
        let service = Administration {
            shared: self.shared.clone(),
            access: AccessControl::new(group),
        };
        let acceptor = Acceptor::start(file.listener().try_clone()?.into(), self.shared.clone(), service)?;
        self.acceptors.push(acceptor);
        self.files.push(file);
        Ok(())
    }

    fn mount(&mut self, dir: &Path, names: Names, group: Option<u32>) -> Result<(), MountError> {
        let registry = self.shared.registry.with_names(names);
        let mounted = Mounted::mount(dir, registry, AccessControl::new(group))?;
        self.shared.mounted_at(mounted.dir());
        self.sysfs = Some(mounted);
        Ok(())
    }

    fn serve_metrics(&mut self, addr: SocketAddr) -> io::Result<()> {
        let listener = TcpListener::bind(addr)?;
        let acceptor = Acceptor::start(listener.into(), self.shared.clone(), Metrics(self.shared.clone()))?;
        self.acceptors.push(acceptor);
        Ok(())
    }

    fn listen_on_stdio(&mut self) {
        self.stdio = Some(converse_on_stdio(&self.shared));
    }
}

/// Protocol of a control socket.
#[derive(Clone)]
struct Administration {
    shared: Arc<Shared>,
    access: AccessControl,
}

impl Service for Administration {
    const LIMITS: Limits = Limits {
        all: 32,
        open: 32,
        reserved: 8,
        each: 8,
    };
    const FIRST_REQUEST: Duration = HELLO_TIME;

    fn identify(&self, stream: &Socket) -> Result<Peer, String> {
        self.access.identify(stream).map_err(|refused| {
            tracing::warn!("control socket: {refused}");
            refusal(refused)
        })
    }

    fn serve(&self, stream: &Socket, place: &Place) {
        converse(&self.shared, stream, place);
    }

    fn full(&self, full: &Full) -> String {
        refusal(Refused::new(Errno::EBUSY, full.to_string()))
    }

    fn late(&self) -> String {
        let text = format!("no hello within {} s", HELLO_TIME.as_secs());
        refusal(Refused::new(Errno::ETIMEDOUT, text))
    }

    fn evicted(&self) -> String {
        let text = "no hello yet, and other connections need the place";
        refusal(Refused::new(Errno::EBUSY, text))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.end();
        for acceptor in self.acceptors.drain(..) {
            acceptor.end();
        }
        if let Some(requests) = self.stdio.take() {
            requests.end();
        }
        drop(self.sysfs.take());
    }
}

/// The process that listens on a socket.
fn holder(path: &Path) -> String {
    let credentials = UnixStream::connect(path).and_then(|stream| Ok(getsockopt(&stream, PeerCredentials)?));
    let Ok(credentials) = credentials else {
        return String::new();
    };
    let pid = credentials.pid();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!(": process {pid} ({})", shown(name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_for_this_host_unless_an_address_is_named() {
        for (text, at) in [
            ("9100", "127.0.0.1:9100"),
            (":9100", "127.0.0.1:9100"),
            ("[::]:1", "[::]:1"),
            ("localhost:1", "localhost:1"),
        ] {
            assert_eq!(metrics_address(text).unwrap().with_port(0), at);
        }
        for wrong in ["", "host", "127.0.0.1", "70000"] {
            assert!(metrics_address(wrong).is_err(), "{wrong}");
        }
    }
}
