//! `ferroce rds node`: the process that owns RDS addresses, in the foreground, in the background, or as a task of the daemon.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use rds_node::{Config, Limits, NodeControl, NodeEvent, NodeStats, Running, start};
use rnbd_host::LoopStats;
use roce::{Hardware, broker::Error};

use crate::{
    control::ControlArgs,
    event::{Event, Moved},
    output::Failure,
    place::{Place, Stage, foreground},
    rdma::RdmaArgs,
    report::{ReportArgs, Reporter},
    signals::Stop,
    units,
};

#[derive(Args)]
#[command(after_help = "\
RDS peers know a connection by its addresses, so one process has to have all connections of an address. The first program with an RDS \
socket starts it, and it exits some seconds after the last (FERROCE_BROKER_LINGER sets how many), up to 30 s later while peers have not \
acknowledged all messages. It opens an address when a socket is bound to it, or from the start with --addr. There is one for each user; \
an address belongs to the user who binds a socket first, and others get EADDRINUSE.

For each address a file rds-ADDRESS.state in its folder keeps the sequence numbers of the connections. After it was killed \
messages come neither twice nor in another order. A file that can't be used is renamed to rds-ADDRESS.state.corrupt.

The --max options limit programs: beyond them `socket` and `setsockopt` fail with ENOBUFS. Buffers count as large as they are set \
(SO_SNDBUF, SO_RCVBUF), whatever they hold.

With --json, one event per line on standard output: `rds_listening` (`dir`); `rds_opened` (`address`, and the `device` if it is an RDMA device) and `rds_not_opened` (`address`, \
`why`); `rds_up`, `rds_down`, `rds_connect_failed` and `rds_peer_restarted` (`local`, `remote`, `tos`, and `why` of an end or a failure); \
`rds_refused` (`peer`, `why`); `rds_congested` (`address` with the port of a program that does not read) and `rds_peer_congested` \
(`peer`); `rds_limit` (`process`, `what`); `rds_state_file` (`address`, `why`); `stats` (with --stats-interval), and at the end `summary`, \
both with all counters of `ferroce rds info -c`. What peers and programs can repeat is reported every 10 s at most.")]
pub(crate) struct NodeArgs {
    /// Address to open from the start, for peers that come first; fail if that is not possible. Repeatable
    #[arg(long, value_name = "ADDRESS")]
    addr: Vec<IpAddr>,
    /// Folder of the socket and the state files. Programs find a node in the usual one only
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Keep running when no program uses it
    #[arg(long)]
    stay: bool,
    /// Seconds before it exits without programs [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = units::seconds)]
    linger: Option<Duration>,
    /// Most sockets of one process
    #[arg(long, value_name = "N", default_value_t = Limits::default().process_sockets)]
    max_sockets: usize,
    /// Most bytes of the buffers of one process's sockets
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = units::memory)]
    max_buffers: usize,
    /// Hand this over to a running `ferroce daemon`, as its task rds.ADDRESS (or rds.node), and exit
    #[arg(long)]
    pub(super) daemon: bool,
    #[command(flatten)]
    rdma: RdmaArgs,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    report: ReportArgs,
    /// Go to the background: leave the terminal and close what the starting program left open
    #[arg(long, hide = true)]
    detach: bool,
    /// Say `ready` on standard output, and close it
    #[arg(long, hide = true)]
    announce: bool,
}

impl NodeArgs {
    /// Name of its task.
    pub(super) fn task_name(&self) -> String {
        self.addr.first().map_or("node".to_owned(), IpAddr::to_string)
    }

    fn limits(&self) -> Limits {
        Limits {
            process_sockets: self.max_sockets,
            process_buffers: self.max_buffers,
            ..Limits::default()
        }
    }

    /// Folder of its socket.
    pub(crate) fn dir(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(rds_local::directory)
    }

    /// Addresses that it opens from the start.
    pub(crate) fn addrs(&self) -> &[IpAddr] {
        &self.addr
    }

    /// Changes a node that runs to these options, as far as that is possible: more addresses, other limits.
    pub(crate) fn apply(&self, control: &NodeControl) {
        control.set_limits(self.limits());
        self.addr.iter().for_each(|addr| control.open(*addr));
    }

    /// RDMA devices for the addresses that it opens at any time.
    fn rdma(&self) -> Result<Option<Box<dyn Hardware>>, Failure> {
        self.rdma.devices(Ipv6Addr::UNSPECIFIED.into())
    }

    fn config(&self) -> Config {
        let usual = Config::new(self.dir());
        Config {
            addrs: self.addr.clone(),
            linger: if self.stay { None } else { self.linger.or(usual.linger) },
            limits: self.limits(),
            detach: self.detach,
            announce: self.announce,
            ..usual
        }
    }
}

/// Serves until no program uses it.
pub(super) fn run(args: &NodeArgs) -> Result<(), Failure> {
    if args.detach || args.announce {
        return in_background(args);
    }
    let ran = foreground(&args.control, &args.report, |place| node(args, place));
    args.report.end(ran)
}

/// Started by a program that needs it: its log has the events.
fn in_background(args: &NodeArgs) -> Result<(), Failure> {
    let log = |event: NodeEvent| match event {
        NodeEvent::NotOpened { .. } | NodeEvent::Limit { .. } | NodeEvent::StateFile { .. } => {
            tracing::warn!("{}", Event::from(event));
        }
        event => tracing::info!("{}", Event::from(event)),
    };
    if args.detach {
        // Before anything is opened.
        return rds_node::run(args.config(), None, || false, log).map_err(Failure::of);
    }
    let stop = Stop::on_signals()?;
    rds_node::run(args.config(), args.rdma()?, || stop.requested(), log).map_err(Failure::of)
}

/// Serves until it is to stop.
pub(crate) fn node(args: &NodeArgs, place: Place<'_>) -> Result<(), Failure> {
    let mut config = args.config();
    if place.sockets.is_some() {
        // A task of the daemon ends when that says so.
        config.linger = None;
    }
    let dir = config.dir.display().to_string();
    let running = start(config, args.rdma()?).map_err(|e| match e {
        Error::Runs(dir) => Failure::failed(format!(
            "an RDS node of this user runs already in {}: a program, another task or `ferroce rds node` has started it",
            dir.display()
        )),
        e => Failure::of(e),
    })?;
    let control = running.control().clone();
    let _listed = place.services.add_node(control.clone());
    (place.tell)(Stage::Node(control.clone()));
    let mut reporter = place.reporter;
    let mut told = reporter.event(&Event::RdsListening { dir });
    let mut awaited: BTreeSet<IpAddr> = args.addr.iter().copied().collect();
    if awaited.is_empty() {
        (place.tell)(Stage::Up);
    }
    let mut last = None;
    while !running.is_over() {
        if last.is_none() && (told.is_err() || place.stop.requested()) {
            last = Some(control.stats().unwrap_or_default());
            running.stop();
        }
        let event = running.next(reporter.timeout());
        match &event {
            Some(NodeEvent::NotOpened { addr, why }) if awaited.contains(addr) => {
                told = told.and(Err(Failure::failed(format!("no RDS at {addr}: {why}"))));
                continue;
            }
            Some(NodeEvent::Opened { addr, .. }) if awaited.remove(addr) && awaited.is_empty() => {
                (place.tell)(Stage::Up)
            }
            _ => {}
        }
        let reported = match event {
            Some(event) => reporter.event(&event.into()),
            None => reporter.tick(|| counted(&control.stats().unwrap_or_default())),
        };
        told = told.and(reported);
    }
    finish(running, &reporter, &last.unwrap_or_default())?;
    told
}

fn finish(running: Running, reporter: &Reporter, last: &NodeStats) -> Result<(), Failure> {
    while let Some(event) = running.next(Duration::ZERO) {
        reporter.event(&event.into())?;
    }
    let (stats, moved) = counted(last);
    reporter.summary(&stats, moved)?;
    running.wait().map_err(Failure::of)
}

/// Returns the messages of programs, and the packets that they took.
fn counted(stats: &NodeStats) -> (LoopStats, Moved) {
    let c = &stats.counters;
    let moved = Moved {
        bytes_read: c.copy_to_user,
        bytes_written: c.copy_from_user,
        requests: c.recv_delivered + c.send_queued,
        failed: 0,
        refused: stats.named().collect(),
    };
    (stats.turns.clone(), moved)
}
