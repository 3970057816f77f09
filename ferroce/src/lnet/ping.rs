//! `ferroce lnet ping`: probes of NIDs.

use std::{
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use clap::Args;
use lnet_host::{Config, Error, LnetNode, Negotiated, Nid, NodeOptions, PingReply, STATUS_DOWN, STATUS_UP};
use serde::Serialize;

use super::{Offer, explain::explain, o2ib, open, source};
use crate::{
    output::{self, Failure},
    units,
};

#[derive(Args)]
#[command(after_help = "\
One line for each ping: the round trip in microseconds, which for the first includes connecting, or the reason why there is none, and what \
to look at. Below the first answer of a NID: the parameters of the connection, and the peer's interfaces with their state.

This host needs no kernel module, and no other program with RoCE at the address that is sent from. While it runs it is a node of LNet \
itself, and answers pings.

With --json, one object for each ping: `nid`, `number`, and either `usec`, `version`, `queue_depth`, `fragments`, `incarnation`, \
`features` (names), `feature_bits` and `interfaces` (`nid`; `status` is `up`, `down`, or null for the loopback), or `cause`, `message` and \
`remedy`. Causes: `no_answer`, `no_roce` (nothing receives RoCE there), `prohibited` (firewall), `no_listener` (port 987), `wrong_nid`, \
`refused`, `queue_depth`, `fragments`, `no_resources`, `early`, `version`, `rejected`, `timeout`, `disconnected`, `connection_lost`, \
`peer_error`, `protocol`, `local`.

The exit status is 1 if a NID has not answered at all.")]
pub(crate) struct PingArgs {
    /// NIDs to ping, as 192.0.2.1@o2ib; without a network it is `o2ib`
    #[arg(value_name = "NID", required = true, value_parser = o2ib)]
    nids: Vec<Nid>,
    /// Pings to send to each
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    count: u64,
    /// Time from one to the next, in seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = units::seconds)]
    interval: Duration,
    /// Time to wait for an answer, in seconds; connecting may take 5 s in any case
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "5", value_parser = units::seconds)]
    timeout: Duration,
    /// Address to send from [default: that of the route]
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    source: Option<Ipv4Addr>,
    #[command(flatten)]
    offer: Offer,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Interface {
    nid: String,
    status: Option<&'static str>,
}

#[derive(Serialize)]
struct Answer {
    usec: u64,
    version: u8,
    queue_depth: Option<u16>,
    fragments: Option<u16>,
    incarnation: Option<u64>,
    features: Vec<&'static str>,
    feature_bits: u32,
    interfaces: Vec<Interface>,
}

#[derive(Serialize)]
struct Fault {
    cause: &'static str,
    message: String,
    remedy: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Outcome {
    Answer(Answer),
    Fault(Fault),
}

#[derive(Serialize)]
struct Ping {
    nid: String,
    number: u64,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Pings.
pub(super) fn run(args: &PingArgs) -> Result<(), Failure> {
    let mut node: Option<LnetNode> = None;
    let mut all_answered = true;
    for nid in &args.nids {
        let source = source(args.source, *nid)?;
        // The former one has its address until it is dropped.
        node = node.filter(|node| node.nid() == source);
        let node = match &node {
            Some(node) => node,
            None => node.insert(open(options(args, source), &args.offer)?),
        };
        all_answered &= ping_all(args, node, *nid)?;
    }
    match all_answered {
        true => Ok(()),
        false => Err(Failure::reported(1)),
    }
}

fn options(args: &PingArgs, source: Nid) -> NodeOptions {
    NodeOptions {
        config: Config {
            timeout: args.timeout,
            ..args.offer.config()
        },
        ..NodeOptions::new(source)
    }
}

/// Pings a NID as often as was asked for. Returns whether it has answered.
fn ping_all(args: &PingArgs, node: &LnetNode, nid: Nid) -> Result<bool, Failure> {
    let mut answered = false;
    for number in 1..=args.count {
        let begun = Instant::now();
        let outcome = match ping(node, nid) {
            Ok(answer) => Outcome::Answer(answer),
            Err(e) => {
                let explained = explain(&e);
                Outcome::Fault(Fault {
                    cause: explained.cause,
                    message: e.to_string(),
                    remedy: explained.remedy,
                })
            }
        };
        let is_first = !answered;
        answered |= matches!(outcome, Outcome::Answer(_));
        let nid = nid.to_string();
        let ping = Ping { nid, number, outcome };
        match args.json {
            true => output::json(&ping)?,
            false => output::text(&text(&ping, is_first))?,
        }
        if number < args.count {
            thread::sleep(args.interval.saturating_sub(begun.elapsed()));
        }
    }
    Ok(answered)
}

fn ping(node: &LnetNode, nid: Nid) -> Result<Answer, Error> {
    let begun = Instant::now();
    let reply = node.ping(nid)?.wait()?;
    let usec = begun.elapsed().as_micros() as u64;
    let connections = node.connections()?;
    let ours = connections.iter().find(|c| c.peer == nid && c.is_established);
    Ok(answer(usec, &reply, ours.map(|connection| connection.negotiated)))
}

fn answer(usec: u64, reply: &PingReply, negotiated: Option<Negotiated>) -> Answer {
    let interface = |ni: &lnet_host::NiStatus| Interface {
        nid: ni.nid.to_string(),
        status: match ni.status {
            STATUS_UP => Some("up"),
            STATUS_DOWN => Some("down"),
            // The first one's is a number.
            _ => None,
        },
    };
    Answer {
        usec,
        // Others are refused.
        version: 2,
        queue_depth: negotiated.map(|of| of.depth),
        fragments: negotiated.map(|of| of.frags),
        incarnation: negotiated.map(|of| of.incarnation),
        features: reply.features.iter_names().map(|(name, _)| name).collect(),
        feature_bits: reply.features.bits(),
        interfaces: reply.interfaces.iter().map(interface).collect(),
    }
}

/// Lines of a ping.
fn text(ping: &Ping, is_first: bool) -> String {
    let (nid, number) = (&ping.nid, ping.number);
    match &ping.outcome {
        Outcome::Fault(fault) => format!("{nid} {number:4}: ERROR: {}\n  {}\n", fault.message, fault.remedy),
        Outcome::Answer(answer) => {
            let mut lines = format!("{nid} {number:4}: {} usec\n", answer.usec);
            if is_first {
                lines += &details(answer);
            }
            lines
        }
    }
}

fn details(answer: &Answer) -> String {
    let mut lines = format!("  o2iblnd version {}", answer.version);
    if let (Some(depth), Some(frags)) = (answer.queue_depth, answer.fragments) {
        lines += &format!(", queue depth {depth}, {frags} fragments");
    }
    lines += &format!(
        "\n  features {:#04x}: {}\n",
        answer.feature_bits,
        answer.features.join(", ")
    );
    for interface in &answer.interfaces {
        lines += &match interface.status {
            Some(status) => format!("  {} {status}\n", interface.nid),
            None => format!("  {}\n", interface.nid),
        };
    }
    lines
}
