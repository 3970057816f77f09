//! `ferroce ctl`: looks at a running `serve` or `map`, and steers it, in the words of the kernel's tool `rnbd`.

mod act;
mod client;
mod model;
mod table;
mod tasks;
mod tell;
mod view;

pub(crate) use self::tasks::start;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtrs::client::Policy;
use serde_json::json;

use crate::{map_news, output::Failure};

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

A device is called by its name at the server, as DEVICE@SESSION if several sessions have one of that name, or rnbdN as in the tree of \
`ls`. A path is called as `list` shows it, SRC,DST, or DST alone if there is only one to there. A SESSION need not be named if there is only one.

With --json: what there is to tell as one object; of what was refused on standard error a message, and status 1.")]
pub(crate) struct CtlArgs {
    /// Control socket of the process [default: $FERROCE_CONTROL, or the usual place]
    #[arg(long, value_name = "SOCKET", global = true)]
    socket: Option<PathBuf>,
    /// JSON instead of tables
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// What is mapped, and what clients have open
    Devices,
    /// Sessions of mappings and of clients
    Sessions,
    /// Their paths
    Paths,
}

#[derive(Subcommand)]
enum Verb {
    /// List devices, sessions and paths
    List {
        /// Only these
        what: Option<What>,
    },
    /// Show all that is known of a device, a session or a path
    Show {
        /// Its name
        name: String,
    },
    /// Map one more device: DEVICE [from SESSION] [path PATH]... [ro|rw|migration]
    Map {
        /// As the server calls it
        device: String,
        /// How, and over which session; paths are for a session that is not open
        #[arg(value_name = "from SESSION|path PATH|ro|rw|migration")]
        words: Vec<String>,
    },
    /// Unmap a device, after what was written to it is made durable
    Unmap {
        /// Which
        device: String,
        /// At any price: NBD clients are cut off, and nothing is made durable
        #[arg(value_enum)]
        force: Option<Force>,
    },
    /// Give a mapped device another size, for NBD clients to come
    Resize {
        /// Which
        device: String,
        /// Sectors of 512 bytes, or bytes with K, M or G behind
        #[arg(value_parser = sectors)]
        size: u64,
    },
    /// Have the server open a device again that it has closed
    Remap {
        /// Which
        device: String,
        /// Force-unmap it and map it again
        #[arg(value_enum)]
        force: Option<Force>,
    },
    /// Close a device of a server for its clients, or for one session
    Close {
        /// Which
        device: String,
        /// The session's name
        session: Option<String>,
    },
    /// Connect again what is down: all paths, and then all devices that are closed
    Recover,
    /// Sessions: list, show, disconnect, reconnect, remap, recover, delete, set
    #[command(subcommand, visible_alias = "sess")]
    Session(SessionVerb),
    /// Paths: list, show, add, delete, disconnect, reconnect, readd, recover
    #[command(subcommand)]
    Path(PathVerb),
    /// Show or set how a session's paths are chosen
    Policy {
        /// round-robin (rr), min-inflight (mi) or min-latency (ml)
        #[arg(value_parser = map_news::policy)]
        policy: Option<Policy>,
        /// The session
        session: Option<String>,
    },
    /// Show counters, or set those of paths to zero
    Stats {
        #[command(subcommand)]
        verb: Option<StatsVerb>,
    },
    /// List the tasks of a daemon
    Tasks,
    /// Have a daemon read its configuration again, and TLS certificates; of a mapping in the foreground: its certificates
    Reload,
    /// End a task of a daemon; one of its file begins again with the next reload
    Stop {
        /// As `tasks` calls it
        task: String,
    },
    /// Tell what happens, until ctrl-C or the end of the process
    Events,
    /// Print all statistics in Prometheus's text format
    Metrics,
    /// List a directory of the tree of attributes, which is as sysfs of Linux
    Ls {
        /// Which [default: the root]
        #[arg(default_value = "")]
        path: String,
        #[command(flatten)]
        names: NameArgs,
    },
    /// Print a file of the tree
    Cat {
        /// Which
        path: String,
        #[command(flatten)]
        names: NameArgs,
    },
    /// Write to a file of the tree, as `echo TEXT > PATH`
    Write {
        /// Which
        path: String,
        /// What
        #[arg(allow_hyphen_values = true)]
        text: String,
        #[command(flatten)]
        names: NameArgs,
    },
}

#[derive(Args)]
struct NameArgs {
    /// Only names of the kernel's code, not those that its documents have instead
    #[arg(long)]
    strict: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Force {
    /// At any price
    Force,
}

#[derive(Subcommand)]
enum SessionVerb {
    /// List sessions
    List,
    /// Show all that is known of one
    Show {
        /// Its name
        session: String,
    },
    /// Take all of its paths down; a client's session at a server comes back if the client wants
    Disconnect {
        /// Its name
        session: Option<String>,
    },
    /// Reconnect all of its paths, one after the other
    Reconnect {
        /// Its name
        session: Option<String>,
    },
    /// Have the server open all of its devices again that are closed
    Remap {
        /// Its name
        session: Option<String>,
    },
    /// Connect its paths that are down, then open its devices that are closed
    Recover {
        /// Its name
        session: Option<String>,
    },
    /// Unmap all of its devices, with which it ends
    Delete {
        /// Its name
        session: Option<String>,
        /// At any price
        #[arg(long)]
        force: bool,
    },
    /// Change what is done about its losses
    Set {
        /// Its name
        session: Option<String>,
        /// Attempts to connect a lost path again, up to 9999, or -1: without end
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=9999))]
        max_reconnects: Option<i64>,
        /// Time before each
        #[arg(long, value_name = "SECONDS", value_parser = crate::units::seconds)]
        reconnect_delay: Option<std::time::Duration>,
        /// Loss policy: requests wait or fail while no path is up (`ferroce map --help` says what each promises)
        #[arg(long, value_name = "error|queue[=SECONDS]", value_parser = map_news::on_loss)]
        on_loss: Option<rnbd::client::OnLoss>,
    },
}

#[derive(Subcommand)]
enum PathVerb {
    /// List paths
    List,
    /// Show all that is known of one
    Show {
        /// Which
        path: String,
    },
    /// Connect one more
    Add(PathWords),
    /// Take one down and off the list, the last one too
    #[command(visible_alias = "del")]
    Delete(PathWords),
    /// Take one down until somebody connects it; a client's path at a server comes back if the client wants
    Disconnect(PathWords),
    /// Reconnect one immediately
    Reconnect(PathWords),
    /// Delete one and add it again
    Readd(PathWords),
    /// Connect one if it is down
    Recover(PathWords),
}

#[derive(Args)]
struct PathWords {
    /// [SESSION] PATH
    #[arg(value_name = "[SESSION] PATH", num_args = 1..=2, required = true)]
    words: Vec<String>,
}

impl PathWords {
    /// The session, if it is named, and the path.
    fn parts(&self) -> (Option<&str>, &str) {
        match self.words.as_slice() {
            [session, path] => (Some(session), path),
            [path] => (None, path),
            _ => (None, ""),
        }
    }
}

#[derive(Subcommand)]
enum StatsVerb {
    /// Set counters of paths to zero
    Reset {
        /// Only of this path
        path: Option<String>,
        /// Only these; a server's paths have `rdma` alone
        #[arg(long, value_enum)]
        which: Option<Which>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Requests, bytes and failovers
    Rdma,
    /// Reconnects and attempts that failed
    Reconnects,
    /// Answers on another processor
    CpuMigration,
}

impl Which {
    const fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Reconnects => "reconnects",
            Self::CpuMigration => "cpu_migration",
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

/// Runs the command.
pub(crate) fn run(args: &CtlArgs) -> Result<(), Failure> {
    let mut client = client::Client::connect(args.socket.as_deref())?;
    let as_json = args.json;
    match &args.verb {
        Verb::List { what } => view::list(&mut client, *what, as_json),
        Verb::Show { name } => view::show(&mut client, view::Of::Any, name, as_json),
        Verb::Session(SessionVerb::List) => view::list(&mut client, Some(What::Sessions), as_json),
        Verb::Session(SessionVerb::Show { session }) => view::show(&mut client, view::Of::Session, session, as_json),
        Verb::Path(PathVerb::List) => view::list(&mut client, Some(What::Paths), as_json),
        Verb::Path(PathVerb::Show { path }) => view::show(&mut client, view::Of::Path, path, as_json),
        Verb::Policy { policy: None, session } => tell::policy(&mut client, session.as_deref(), as_json),
        Verb::Stats { verb: None } => tell::stats(&mut client, as_json),
        Verb::Events => tell::events(client, as_json),
        Verb::Tasks => tasks::list(&mut client, as_json),
        Verb::Reload => tasks::reload(&mut client, as_json),
        Verb::Stop { task } => tasks::stop(&mut client, task, as_json),
        Verb::Metrics => tell::text_of(&mut client, &json!({ "do": "metrics" }), as_json),
        Verb::Ls { path, names } => tell::ls(&mut client, path, names.strict, as_json),
        Verb::Cat { path, names } => {
            let request = json!({ "do": "read", "file": path, "strict": names.strict });
            tell::text_of(&mut client, &request, as_json)
        }
        verb => act::run(&mut client, verb, as_json),
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
