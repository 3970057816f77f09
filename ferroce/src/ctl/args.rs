//! Arguments of `ferroce ctl`, in the words of the kernel's tool `rnbd`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtrs::client::{PathCounters, Policy};

use crate::paths;

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce map --session two --path 192.0.2.7 --device disk --nbd /tmp/disk.sock --control /tmp/ctl &
  export FERROCE_CONTROL=/tmp/ctl
  ferroce ctl list
  ferroce ctl path add 198.51.100.1,198.51.100.7
  ferroce ctl path disconnect ip:192.0.2.1@ip:192.0.2.7
  ferroce ctl policy rr
  ferroce ctl map system ro
  ferroce ctl resize disk 20G
  ferroce ctl unmap system
  ferroce ctl recover
  ferroce ctl stats reset
  ferroce ctl events --json
  ferroce ctl cat class/rtrs-client/two/mpath_policy

Without --socket and FERROCE_CONTROL the socket is control.sock in $XDG_RUNTIME_DIR/ferroce if there is one, else in /run/ferroce-daemon.

DEVICE is its name at the server, DEVICE@SESSION if several sessions have a device of that name, or rnbdN as in the attribute tree (`ls`). \
PATH is as `list` shows it, SRC,DST, or DST alone if only one path leads there. SESSION is optional if there is only one.

With --json the output is one JSON object. Errors go to standard error, with exit status 1.")]
pub(crate) struct CtlArgs {
    /// Control socket of the process [default: $FERROCE_CONTROL, or that of the user's or the system's daemon]
    #[arg(long, value_name = "SOCKET", global = true)]
    pub(super) socket: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum What {
    /// Mapped devices, and devices that clients have open
    Devices,
    /// Sessions of mappings and of clients
    Sessions,
    /// Paths of these sessions
    Paths,
}

#[derive(Subcommand)]
pub(super) enum Verb {
    /// List devices, sessions and paths
    List {
        /// List only these
        what: Option<What>,
    },
    /// Show details of a device, a session or a path
    Show {
        /// Device, session or path
        name: String,
    },
    /// Map another device: DEVICE [from SESSION] [path PATH]... [ro|rw|migration]
    Map {
        /// Name of the device at the server
        device: String,
        /// Session, paths and access mode. Paths are for a new session, which a daemon opens
        #[arg(value_name = "from SESSION|path PATH|ro|rw|migration")]
        words: Vec<String>,
    },
    /// Flush and unmap a device
    Unmap {
        /// The device
        device: String,
        /// Force: disconnect NBD clients and skip the flush
        #[arg(value_enum)]
        force: Option<Force>,
    },
    /// Set the size of a mapped device that new NBD clients see
    Resize {
        /// The device
        device: String,
        /// Sectors of 512 bytes, or bytes with a unit: K, M or G
        #[arg(value_parser = sectors)]
        size: u64,
    },
    /// Open a device again that the server has closed
    Remap {
        /// The device
        device: String,
        /// Force: unmap it, even if in use, and map it again
        #[arg(value_enum)]
        force: Option<Force>,
    },
    /// Close a served device for all clients, or for one session
    Close {
        /// The device
        device: String,
        /// Name of the session
        session: Option<String>,
    },
    /// Reconnect all paths that are down, then open all devices that are closed
    Recover,
    /// Sessions: list, show, disconnect, reconnect, remap, recover, delete, set
    #[command(subcommand, visible_alias = "sess")]
    Session(SessionVerb),
    /// Paths: list, show, add, delete, disconnect, reconnect, readd, recover
    #[command(subcommand)]
    Path(PathVerb),
    /// Show or set the path policy of a session
    Policy {
        /// round-robin (rr), min-inflight (mi) or min-latency (ml)
        #[arg(value_parser = paths::policy)]
        policy: Option<Policy>,
        /// Name of the session
        session: Option<String>,
    },
    /// Show counters, or reset those of paths
    Stats {
        #[command(subcommand)]
        verb: Option<StatsVerb>,
    },
    /// List the tasks of a daemon
    Tasks,
    /// Reload the configuration and TLS certificates of a daemon, or the certificates of a `ferroce map`
    Reload,
    /// Stop a task of a daemon; the next reload starts a task of the file again
    Stop {
        /// map.NAME, serve.NAME, rds.NAME or lnet.NAME, as `tasks` lists it
        task: String,
    },
    /// Print events until ctrl-C or the exit of the process
    Events,
    /// Print all statistics in Prometheus's text format
    Metrics,
    /// List a directory of the attribute tree, which is like Linux's sysfs
    Ls {
        /// The directory [default: the root]
        #[arg(default_value = "")]
        path: String,
        #[command(flatten)]
        names: NameArgs,
    },
    /// Print a file of the attribute tree
    Cat {
        /// The file
        path: String,
        #[command(flatten)]
        names: NameArgs,
    },
    /// Write to a file of the attribute tree, as `echo TEXT > PATH` does
    Write {
        /// The file
        path: String,
        /// Text to write
        #[arg(allow_hyphen_values = true)]
        text: String,
        #[command(flatten)]
        names: NameArgs,
    },
}

#[derive(Args)]
pub(super) struct NameArgs {
    /// Use only names of the kernel's code, not those that only its documentation has
    #[arg(long)]
    pub(super) strict: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Force {
    /// Force
    Force,
}

#[derive(Args)]
pub(super) struct SessionArg {
    /// Name of the session
    session: Option<String>,
}

impl SessionArg {
    /// The session, if it is named.
    pub(super) fn name(&self) -> Option<&str> {
        self.session.as_deref()
    }
}

#[derive(Subcommand)]
pub(super) enum SessionVerb {
    /// List sessions
    List,
    /// Show details of a session
    Show {
        /// Name of the session
        session: String,
    },
    /// Disconnect all paths. A client may connect a session of a server again
    Disconnect(SessionArg),
    /// Reconnect all paths, one after the other
    Reconnect(SessionArg),
    /// Open all devices again that the server has closed
    Remap(SessionArg),
    /// Reconnect paths that are down, then open devices that are closed
    Recover(SessionArg),
    /// Unmap all devices, which ends the session
    Delete {
        #[command(flatten)]
        of: SessionArg,
        /// Force: disconnect NBD clients and skip the flush
        #[arg(long)]
        force: bool,
    },
    /// Change reconnect settings and loss policy
    Set {
        #[command(flatten)]
        of: SessionArg,
        /// Attempts to reconnect a lost path: up to 9999, or -1 for no limit
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=9999))]
        max_reconnects: Option<i64>,
        /// Time before each attempt
        #[arg(long, value_name = "SECONDS", value_parser = crate::units::seconds)]
        reconnect_delay: Option<std::time::Duration>,
        /// Loss policy: requests wait or fail while no path is up (see `ferroce map --help`)
        #[arg(long, value_name = "error|queue[=SECONDS]", value_parser = rnbd_host::control::read_on_loss)]
        on_loss: Option<rnbd::client::OnLoss>,
    },
}

#[derive(Subcommand)]
pub(super) enum PathVerb {
    /// List paths
    List,
    /// Show details of a path
    Show {
        /// The path
        path: String,
    },
    /// Add and connect a path
    Add(PathWords),
    /// Disconnect and remove a path, even the last one
    #[command(visible_alias = "del")]
    Delete(PathWords),
    /// Disconnect a path until `reconnect`. A client may connect a path of a server again
    Disconnect(PathWords),
    /// Reconnect a path immediately
    Reconnect(PathWords),
    /// Delete a path and add it again
    Readd(PathWords),
    /// Reconnect a path if it is down
    Recover(PathWords),
}

#[derive(Args)]
pub(super) struct PathWords {
    /// The path, and its session if several have such a path
    #[arg(value_name = "[SESSION] PATH", num_args = 1..=2, required = true)]
    words: Vec<String>,
}

impl PathWords {
    /// The session, if it is named, and the path.
    pub(super) fn parts(&self) -> (Option<&str>, &str) {
        match self.words.as_slice() {
            [session, path] => (Some(session), path),
            [path] => (None, path),
            _ => (None, ""),
        }
    }
}

#[derive(Subcommand)]
pub(super) enum StatsVerb {
    /// Reset counters of paths
    Reset {
        /// Only this path [default: all]
        path: Option<String>,
        /// Only these counters [default: all]; paths of a server have only `rdma`
        #[arg(long, value_enum)]
        which: Option<Which>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Which {
    /// Requests, bytes and failovers
    Rdma,
    /// Reconnects and failed attempts
    Reconnects,
    /// Answers on another processor
    CpuMigration,
}

impl From<Which> for PathCounters {
    fn from(which: Which) -> Self {
        match which {
            Which::Rdma => Self::Rdma,
            Which::Reconnects => Self::Reconnects,
            Which::CpuMigration => Self::CpuMigration,
        }
    }
}

/// Sectors, or bytes with a unit.
fn sectors(text: &str) -> Result<u64, String> {
    if let Ok(sectors) = text.parse() {
        return Ok(sectors);
    }
    let bytes = crate::units::size(text)?;
    match bytes % 512 {
        0 => Ok(bytes / 512),
        _ => Err(format!("{text} is not a number of sectors of 512 bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::sectors;

    #[test]
    fn sizes_are_sectors_or_have_a_unit() {
        assert_eq!(sectors("2048"), Ok(2048));
        assert_eq!((sectors("1K"), sectors("20G")), (Ok(2), Ok(41_943_040)));
        for wrong in ["", "-1", "1.5K", "x", "99999999999G"] {
            assert!(sectors(wrong).is_err(), "{wrong}");
        }
    }
}
