//! `ferroce lnet serve`: a node of LNet, in the foreground or as a task of the daemon.

use std::io::ErrorKind;

use clap::Args;
use lnet_host::{Error, LnetNode, Nid, NodeOptions, NodeStats, Output, Served, TargetConfig};
use rnbd_host::LoopStats;

use super::{
    Offer, o2ib, open,
    portals::{self, Portals, Sink, Source},
};
use crate::{
    control::{ControlArgs, address, lnet::counters},
    event::{Event, Moved},
    output::Failure,
    place::{Place, Stage, foreground},
    report::{ReportArgs, Reporter},
};

#[derive(Args)]
#[command(after_help = "\
Kernels and other nodes reach it by `lctl ping`, `lnetctl ping`, `lnetctl discover` and `ferroce lnet ping`. `lst` of Lustre can have it take \
part in tests (pings, and data up to 1 MiB each way), unless --no-selftest. It is not a client or server of Lustre. LNet has no \
authentication: any host that reaches it can use it for such tests, write the memory of --sink and read the data of --source.

A sink takes the PUTs to its portal, with any match bits, a source answers the GETs. Each operation says at which byte it begins, and is cut \
where the memory ends.

`ferroce stat` shows the nodes of this user and network namespace, and those of the daemon.

With --json, one event per line on standard output: `lnet_listening` (`nid`), `lnet_up` (`peer`, `queue_depth`, `fragments`, `incarnation`), \
`lnet_down` (`peer`, `why`), `lnet_refused` (`address`, `why`), `lnet_pinged` (`peer`), `lnet_discovered` (`peer`: it has sent its interfaces), \
`lnet_put` and `lnet_got` (an operation on a sink or source: `peer`, `portal`, `match_bits`, `offset`, `bytes`; `hdr_data` of a PUT), \
`lnet_failed` (one that has failed: `peer`, `portal`, `match_bits`, `why`); `stats` (with --stats-interval), and at the end `lnet_portal` (of each \
sink and source `portal`, `kind`, and operations: `done` with `bytes`, and `failed`), `events_lost` (`events`: there were too many at a time), \
and `summary`. `stats` and `summary` have the counters of `ferroce stat`: `sent`, `sent_bytes`, `received`, `received_bytes` and `dropped` are \
LNet messages and the bytes of their data.")]
pub(crate) struct ServeArgs {
    /// NID, as 192.0.2.1@o2ib, whose address is one of this host's; without a network it is `o2ib`
    #[arg(value_parser = o2ib)]
    nid: Nid,
    #[command(flatten)]
    offer: Offer,
    /// Take PUTs to this portal into memory of this size [default: 1M]. Repeatable
    #[arg(long, value_name = "PORTAL[:SIZE]", value_parser = portals::sink)]
    sink: Vec<Sink>,
    /// Answer GETs from this portal with a file's bytes, or as many zeros [default: 1M]. Repeatable
    #[arg(long, value_name = "PORTAL[:FILE|:SIZE]", value_parser = portals::source)]
    source: Vec<Source>,
    /// Take no part in tests of lnet_selftest
    #[arg(long)]
    no_selftest: bool,
    /// Hand this over to a running `ferroce daemon`, as its task lnet.NID, and exit
    #[arg(long)]
    pub(super) daemon: bool,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    report: ReportArgs,
}

impl ServeArgs {
    /// Its NID.
    pub(crate) const fn nid(&self) -> Nid {
        self.nid
    }

    /// Checks what can be checked without a node.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        Portals::check((&self.sink, &self.source), !self.no_selftest)
    }
}

fn event(output: Output, portals: &Portals) -> Option<Event> {
    Some(match output {
        Output::Up(peer, negotiated) => Event::LnetUp {
            peer,
            queue_depth: negotiated.depth,
            fragments: negotiated.frags,
            incarnation: negotiated.incarnation,
        },
        Output::Down(peer, why) => Event::LnetDown { peer, why },
        Output::Refused(address, why) => Event::LnetRefused { address, why },
        Output::Pinged(peer) => Event::LnetPinged { peer },
        Output::Pushed(peer) => Event::LnetDiscovered { peer },
        Output::Served(served, result) => of_portal(&served, portals.portal_of(served.entry)?, result),
        Output::Done(..) | Output::Unlinked(_) => return None,
    })
}

/// An operation on a portal has ended.
fn of_portal(served: &Served, portal: u32, result: Result<u32, lnet_host::Failure>) -> Event {
    let &Served {
        from: peer,
        match_bits,
        hdr_data,
        offset,
        ..
    } = served;
    match result {
        Err(why) => Event::LnetFailed {
            peer,
            portal,
            match_bits,
            why,
        },
        Ok(bytes) if served.is_put => Event::LnetPut {
            peer,
            portal,
            match_bits,
            hdr_data,
            offset,
            bytes,
        },
        Ok(bytes) => Event::LnetGot {
            peer,
            portal,
            match_bits,
            offset,
            bytes,
        },
    }
}

/// Serves until a signal.
pub(super) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let control = match address::of_lnet_node() {
        Ok(socket) => args.control.with(socket),
        Err(e) => {
            tracing::warn!("`ferroce stat` does not find this node: {e}");
            args.control.clone()
        }
    };
    let ran = foreground(&control, &args.report, |place| serve(args, place));
    args.report.end(ran)
}

/// Serves until it is to stop.
pub(crate) fn serve(args: &ServeArgs, place: Place<'_>) -> Result<(), Failure> {
    let options = NodeOptions {
        config: args.offer.config(),
        target: (!args.no_selftest).then(TargetConfig::default),
        ..NodeOptions::new(args.nid)
    };
    let node = open(options, &args.offer)?;
    let portals = Portals::attach(&node, (&args.sink, &args.source), !args.no_selftest)?;
    let _listed = place.services.add_lnet_node(node.clone());
    let mut reporter = place.reporter;
    reporter.event(&Event::LnetListening { nid: args.nid })?;
    (place.tell)(Stage::Up);
    while !place.stop.requested() {
        match node.next_event(Some(reporter.timeout())) {
            Ok(output) => {
                if let Some(event) = event(output, &portals) {
                    reporter.event(&event)?;
                }
            }
            Err(Error::Ended(e)) if e.kind() == ErrorKind::TimedOut => {}
            Err(e) => return Err(Failure::of(e)),
        }
        reporter.tick(|| counted(node.stats().unwrap_or_default()))?;
    }
    finish(&node, &portals, &reporter)
}

fn finish(node: &LnetNode, portals: &Portals, reporter: &Reporter) -> Result<(), Failure> {
    let stats = node.stats().map_err(Failure::of)?;
    for event in portals.counts()? {
        reporter.event(&event)?;
    }
    if let events @ 1.. = stats.events_lost {
        reporter.event(&Event::EventsLost { events })?;
    }
    let (turns, moved) = counted(stats);
    reporter.summary(&turns, moved)
}

/// Returns the operations of peers, and the packets that they took.
fn counted(stats: NodeStats) -> (LoopStats, Moved) {
    let c = &stats.counters;
    let moved = Moved {
        bytes_read: c.get_bytes,
        bytes_written: c.put_bytes,
        requests: c.puts + c.gets + c.failed,
        failed: c.failed,
        refused: counters(&stats).collect(),
    };
    (stats.turns, moved)
}
