//! `ferroce lnet serve`: a node of LNet in the foreground.

use std::{io::ErrorKind, time::Duration};

use clap::Args;
use lnet_host::{Error, LnetNode, Nid, NodeOptions, Output, TargetConfig};
use serde::Serialize;

use super::{Offer, o2ib, open};
use crate::{
    output::{self, Failure},
    signals::Stop,
};

/// Time between two questions whether to stop.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Args)]
#[command(after_help = "\
Kernels and other nodes reach it by `lctl ping`, `lnetctl ping`, `lnetctl discover` and `ferroce lnet ping`. `lst` of Lustre can have it take \
part in tests (pings, and data up to 1 MiB each way). It is not a client or server of Lustre. LNet has no authentication: any host that \
reaches it can use it for such tests.

It prints a line for each connection, ping and refused request, and its counts at the end. With --json these are objects with `event`: \
`listening` (`nid`), `connected` (`peer`, `queue_depth`, `fragments`, `incarnation`), `disconnected` (`peer`, `why`), `refused` (`address`, \
`why`), `pinged` (`peer`), `discovered` (`peer`: it has sent its interfaces), and `summary` (`sent`, `sent_bytes`, `received`, \
`received_bytes`, `dropped`: LNet messages and bytes of their data).")]
pub(crate) struct ServeArgs {
    /// NID, as 192.0.2.1@o2ib, whose address is one of this host's; without a network it is `o2ib`
    #[arg(value_parser = o2ib)]
    nid: Nid,
    #[command(flatten)]
    offer: Offer,
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
    Summary {
        sent: u64,
        sent_bytes: u64,
        received: u64,
        received_bytes: u64,
        dropped: u64,
    },
}

impl Event {
    fn of(output: Output) -> Option<Self> {
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
            Output::Done(..) | Output::Served(..) | Output::Unlinked(_) => return None,
        })
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
            Self::Summary {
                sent,
                sent_bytes,
                received,
                received_bytes,
                dropped,
            } => format!(
                "received {received} messages with {received_bytes} bytes, sent {sent} with {sent_bytes} bytes, dropped {dropped}"
            ),
        }
    }
}

/// Serves until a signal.
pub(super) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals()?;
    let node = open(NodeOptions {
        config: args.offer.config(),
        target: Some(TargetConfig::default()),
        ..NodeOptions::new(args.nid)
    })?;
    let nid = args.nid.to_string();
    report(args, &Event::Listening { nid })?;
    while !stop.requested() {
        match node.next_event(Some(PAUSE)) {
            Ok(output) => {
                if let Some(event) = Event::of(output) {
                    report(args, &event)?;
                }
            }
            Err(Error::Ended(e)) if e.kind() == ErrorKind::TimedOut => {}
            Err(e) => return Err(Failure::of(e)),
        }
    }
    report(args, &summary(&node)?)
}

fn summary(node: &LnetNode) -> Result<Event, Failure> {
    let counters = node.counters().map_err(Failure::of)?;
    Ok(Event::Summary {
        sent: counters.sent,
        sent_bytes: counters.sent_bytes,
        received: counters.received,
        received_bytes: counters.received_bytes,
        dropped: counters.dropped,
    })
}

fn report(args: &ServeArgs, event: &Event) -> Result<(), Failure> {
    match args.json {
        true => output::json(event),
        false => output::line(&event.text()),
    }
}
