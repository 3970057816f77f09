//! `ferroce lnet serve`: a node of LNet in the foreground.

use std::{io::ErrorKind, time::Duration};

use clap::Args;
use lnet_host::{Error, LnetNode, Nid, NodeOptions, Output, Served, TargetConfig};
use serde::Serialize;

use super::{
    Offer, o2ib, open,
    portals::{self, PortalCounts, Portals, Sink, Source},
};
use crate::{
    output::{self, Failure},
    signals::Stop,
};

/// Time between two questions whether to stop.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Args)]
#[command(after_help = "\
Kernels and other nodes reach it by `lctl ping`, `lnetctl ping`, `lnetctl discover` and `ferroce lnet ping`. `lst` of Lustre can have it take \
part in tests (pings, and data up to 1 MiB each way), unless --no-selftest. It is not a client or server of Lustre. LNet has no \
authentication: any host that reaches it can use it for such tests, write the memory of --sink and read the data of --source.

A sink takes the PUTs to its portal, with any match bits, a source answers the GETs. Each operation says at which byte it begins, and is cut \
where the memory ends.

It prints a line for each connection, ping and refused request, and its counts at the end. With --json these are objects with `event`: \
`listening` (`nid`), `connected` (`peer`, `queue_depth`, `fragments`, `incarnation`), `disconnected` (`peer`, `why`), `refused` (`address`, \
`why`), `pinged` (`peer`), `discovered` (`peer`: it has sent its interfaces), `put` and `got` (an operation on a sink or source: `peer`, `portal`, \
`match_bits`, `offset`, `bytes`; `hdr_data` of a PUT), `failed` (one that has failed: `peer`, `portal`, `match_bits`, `why`), and `summary` (`sent`, \
`sent_bytes`, `received`, `received_bytes`, `dropped`: LNet messages and bytes of their data; `portals`: of each sink and source `portal`, \
`kind`, and operations: `done` with `bytes`, and `failed`; `events_lost`: lines that were not printed, because there were too many at a time).")]
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
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    Listening {
        nid: String,
    },
    Connected {
        peer: String,
        queue_depth: u16,
        fragments: u16,
        incarnation: u64,
    },
    Disconnected {
        peer: String,
        why: String,
    },
    Refused {
        address: String,
        why: String,
    },
    Pinged {
        peer: String,
    },
    Discovered {
        peer: String,
    },
    Put {
        peer: String,
        portal: u32,
        match_bits: u64,
        hdr_data: u64,
        offset: usize,
        bytes: u32,
    },
    Got {
        peer: String,
        portal: u32,
        match_bits: u64,
        offset: usize,
        bytes: u32,
    },
    Failed {
        peer: String,
        portal: u32,
        match_bits: u64,
        why: String,
    },
    Summary {
        sent: u64,
        sent_bytes: u64,
        received: u64,
        received_bytes: u64,
        dropped: u64,
        portals: Vec<PortalCounts>,
        events_lost: u64,
    },
}

impl Event {
    fn of(output: Output, portals: &Portals) -> Option<Self> {
        Some(match output {
            Output::Up(peer, negotiated) => Self::Connected {
                peer: peer.to_string(),
                queue_depth: negotiated.depth,
                fragments: negotiated.frags,
                incarnation: negotiated.incarnation,
            },
            Output::Down(peer, why) => Self::Disconnected {
                peer: peer.to_string(),
                why: why.to_string(),
            },
            Output::Refused(address, why) => Self::Refused {
                address: address.to_string(),
                why: why.to_string(),
            },
            Output::Pinged(peer) => Self::Pinged { peer: peer.to_string() },
            Output::Pushed(peer) => Self::Discovered { peer: peer.to_string() },
            Output::Served(served, result) => Self::served(&served, portals.portal_of(served.entry)?, result),
            Output::Done(..) | Output::Unlinked(_) => return None,
        })
    }

    /// An operation on a portal has ended.
    fn served(served: &Served, portal: u32, result: Result<u32, lnet_host::Failure>) -> Self {
        let &Served {
            match_bits,
            hdr_data,
            offset,
            ..
        } = served;
        let peer = served.from.to_string();
        match result {
            Err(why) => Self::Failed {
                peer,
                portal,
                match_bits,
                why: why.to_string(),
            },
            Ok(bytes) if served.is_put => Self::Put {
                peer,
                portal,
                match_bits,
                hdr_data,
                offset,
                bytes,
            },
            Ok(bytes) => Self::Got {
                peer,
                portal,
                match_bits,
                offset,
                bytes,
            },
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Listening { nid } => format!("listening: {nid}"),
            Self::Connected {
                peer,
                queue_depth,
                fragments,
                ..
            } => format!("{peer} is connected, queue depth {queue_depth}, {fragments} fragments"),
            Self::Disconnected { peer, why } => format!("{peer} is disconnected: {why}"),
            Self::Refused { address, why } => format!("a request of {address} was refused: {why}"),
            Self::Pinged { peer } => format!("{peer} has pinged"),
            Self::Discovered { peer } => format!("{peer} has sent its interfaces (discovery)"),
            Self::Put {
                peer,
                portal,
                match_bits,
                offset,
                bytes,
                ..
            } => {
                format!("{peer} has put {bytes} bytes to portal {portal}, match bits {match_bits:#x}, offset {offset}")
            }
            Self::Got {
                peer,
                portal,
                match_bits,
                offset,
                bytes,
            } => format!(
                "{peer} has got {bytes} bytes from portal {portal}, match bits {match_bits:#x}, offset {offset}"
            ),
            Self::Failed {
                peer,
                portal,
                match_bits,
                why,
            } => {
                format!("an operation of {peer} on portal {portal} has failed, match bits {match_bits:#x}: {why}")
            }
            Self::Summary {
                sent,
                sent_bytes,
                received,
                received_bytes,
                dropped,
                portals,
                events_lost,
            } => {
                let mut lines = vec![format!(
                    "received {received} messages with {received_bytes} bytes, sent {sent} with {sent_bytes} bytes, dropped {dropped}"
                )];
                lines.extend(portals.iter().map(PortalCounts::text));
                lines.extend((*events_lost > 0).then(|| format!("{events_lost} events were lost")));
                lines.join("\n")
            }
        }
    }
}

/// Serves until a signal.
pub(super) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let options = NodeOptions {
        config: args.offer.config(),
        target: (!args.no_selftest).then(TargetConfig::default),
        ..NodeOptions::new(args.nid)
    };
    let node = open(options, &args.offer)?;
    let portals = Portals::attach(&node, (&args.sink, &args.source), !args.no_selftest)?;
    let nid = args.nid.to_string();
    report(args, &Event::Listening { nid })?;
    while !stop.requested() {
        match node.next_event(Some(PAUSE)) {
            Ok(output) => {
                if let Some(event) = Event::of(output, &portals) {
                    report(args, &event)?;
                }
            }
            Err(Error::Ended(e)) if e.kind() == ErrorKind::TimedOut => {}
            Err(e) => return Err(Failure::of(e)),
        }
    }
    report(args, &summary(&node, &portals)?)
}

fn summary(node: &LnetNode, portals: &Portals) -> Result<Event, Failure> {
    let counters = node.counters().map_err(Failure::of)?;
    Ok(Event::Summary {
        sent: counters.sent,
        sent_bytes: counters.sent_bytes,
        received: counters.received,
        received_bytes: counters.received_bytes,
        dropped: counters.dropped,
        portals: portals.counts()?,
        events_lost: node.lost_events().map_err(Failure::of)?,
    })
}

fn report(args: &ServeArgs, event: &Event) -> Result<(), Failure> {
    match args.json {
        true => output::json(event),
        false => output::line(&event.text()),
    }
}
