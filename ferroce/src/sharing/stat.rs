//! `ferroce stat`: what the processes that share addresses have counted (`rdma statistic`).

use std::{collections::BTreeMap, fmt::Write};

use clap::Args;
use rnbd_host::control::LnetNode;
use roce::broker::{Ended, Isolation, ProcessReport, Statistics};
use roce_verbs::shown;
use serde::Serialize;

use crate::{
    ctl,
    output::{self, Failure},
    rds::info::{self, Summary},
};

#[derive(Args)]
#[command(after_help = "\
One line for each process that uses an address through the broker, with the counters that `rdma statistic` shows for \
rdma_rxe; then the sums of all processes that have exited since the broker started (a line for each address, if they \
had single ones); then the broker's own counters, and of a broker for several users whether it isolates them \
(`users isolated`) or they have to trust each other (`users one-trust-domain`); then the RDS node of this user, if one runs, with its sockets, connections and counters; \
then each LNet node of this user and of the daemon that `ferroce ctl` finds, with its counters and its rejects by reason, and a line for each of its connections with the credits to \
send (`credits`), those of the peer (`peer_credits`) and those that go back with the next message (`outstanding`). Counters that are \
zero are left out.

Counters of a process are at most 100 ms old, also if it was killed or has exited without closing its device.

With --json: one object with `pid` (the broker's), `isolation` (OneUser, Isolated or TrustDomain), `addrs`, `processes`, `ended` (an array of objects with `addrs`, \
`processes`, their number, and `counters`), `ended_unknown` (how many have ended whose counters are unknown), \
`counters` and `translated` (null, or `text` and `age` in seconds of the last connect request that proved address translation), `rds` (null, or `sockets`, `connections` and `counters` of the RDS node), `lnet` (an array of objects with \
`pid`, `nid`, `connections`, `counters`, `rejects_sent` and `rejects_received`); only `rds` and `lnet` if no broker runs, and `null` if there is no LNet node either. Of the ports of a process `bindings` has 64 at most. \
`report` is null while a process has no device.")]
pub(crate) struct StatArgs {
    /// Show only this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Show counters that are zero, too
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Everything that is known.
#[derive(Serialize)]
struct All {
    #[serde(flatten)]
    statistics: Option<Statistics>,
    rds: Option<Summary>,
    lnet: Vec<OfLnet>,
}

/// An LNet node of a process.
#[derive(Serialize)]
struct OfLnet {
    pid: u32,
    #[serde(flatten)]
    node: LnetNode,
}

/// Shows what there is.
pub(crate) fn run(args: &StatArgs) -> Result<(), Failure> {
    let mut found = super::statistics()?;
    if let (Some(statistics), Some(pid)) = (&mut found, args.pid) {
        statistics.processes.retain(|p| p.pid == pid);
        statistics.ended.clear();
        statistics.ended_unknown = 0;
    }
    let rds = match args.pid {
        None => info::summary()?,
        Some(_) => None,
    };
    let mut lnet = ctl::lnet::nodes()?;
    lnet.retain(|(pid, _)| args.pid.is_none_or(|of| of == *pid));
    let lnet: Vec<OfLnet> = lnet.into_iter().map(|(pid, node)| OfLnet { pid, node }).collect();
    if args.json {
        let is_any = found.is_some() || !lnet.is_empty();
        let statistics = found;
        return output::json(&is_any.then_some(All { statistics, rds, lnet }));
    }
    match &found {
        Some(statistics) => of_broker(statistics, args)?,
        None => output::line("no broker runs: no process shares an address")?,
    }
    if let Some(rds) = rds {
        output::line(&rds_line(&rds, args.all))?;
    }
    let mut lines = lnet.iter().flat_map(|of| lnet_lines(of, args.all));
    lines.try_for_each(|line| output::line(&line))
}

/// Shows the processes that share addresses, and the broker.
fn of_broker(statistics: &Statistics, args: &StatArgs) -> Result<(), Failure> {
    for process in &statistics.processes {
        output::line(&process_line(process, args.all))?;
    }
    for ended in &statistics.ended {
        output::line(&ended_line(ended, args.all))?;
    }
    if statistics.ended_unknown > 0 {
        output::line(&format!("{} (not counted)", ended(statistics.ended_unknown)))?;
    }
    output::line(&broker_line(statistics, args.all))
}

fn rds_line(rds: &Summary, zeroes: bool) -> String {
    format!(
        "rds sockets {} connections {}{}",
        rds.sockets,
        rds.connections,
        counters(rds.counters.0.iter().map(|(name, value)| (name, value)), zeroes)
    )
}

/// Lines of an LNet node: its counters, then its connections.
fn lnet_lines(OfLnet { pid, node }: &OfLnet, zeroes: bool) -> Vec<String> {
    let rejects = [("sent", &node.rejects_sent), ("received", &node.rejects_received)];
    let by_reason = rejects.map(|(way, rejects)| {
        let named = rejects
            .iter()
            .map(|(why, count)| (format!("rejects_{way}_{why}"), *count));
        named.collect::<BTreeMap<_, _>>()
    });
    let all = node.counters.iter().chain(by_reason.iter().flatten());
    // Another process of this user may have any name for its node.
    let head = format!("lnet {}", shown(&node.nid));
    let mut lines = vec![format!(
        "{head} process {pid} connections {}{}",
        node.connections.len(),
        counters(all, zeroes)
    )];
    lines.extend(node.connections.iter().map(|c| {
        let state = if c.established { "up" } else { "opening" };
        format!(
            "{head} peer {} {state} queue_depth {} fragments {} credits {} peer_credits {} outstanding {} queued {} in_flight {} transfers {}",
            shown(&c.peer), c.queue_depth, c.fragments, c.credits, c.peer_credits, c.outstanding, c.queued, c.in_flight, c.transfers
        )
    }));
    lines
}

fn counters<'a>(all: impl Iterator<Item = (&'a String, &'a u64)>, zeroes: bool) -> String {
    let mut out = String::new();
    for (name, value) in all.filter(|(_, v)| zeroes || **v > 0) {
        let _ = write!(out, " {} {value}", shown(name));
    }
    out
}

fn list(addrs: &[std::net::IpAddr]) -> String {
    match addrs {
        [] => "all".to_owned(),
        some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

fn process_line(p: &ProcessReport, zeroes: bool) -> String {
    // A process chooses its name, and may be another user's.
    let head = format!("process {} {} slot {}", p.pid, shown(&p.name), p.place.slot);
    match &p.report {
        Some(r) => format!(
            "{head} addr {} qps {} connections {}{}",
            list(&r.addrs),
            r.queue_pairs,
            p.connections,
            counters(r.counters.iter(), zeroes)
        ),
        None => format!("{head} connections {}", p.connections),
    }
}

fn ended_line(e: &Ended, zeroes: bool) -> String {
    let counters = counters(e.counters.iter(), zeroes);
    format!("{} addr {}{counters}", ended(e.processes), list(&e.addrs))
}

fn ended(processes: u64) -> String {
    match processes {
        1 => "ended 1 process".to_owned(),
        n => format!("ended {n} processes"),
    }
}

fn broker_line(s: &Statistics, zeroes: bool) -> String {
    let open = if s.addrs.is_empty() {
        "none".to_owned()
    } else {
        list(&s.addrs)
    };
    let users = match s.isolation {
        Isolation::OneUser => "",
        Isolation::Isolated => " users isolated",
        Isolation::TrustDomain => " users one-trust-domain",
    };
    format!(
        "broker {} addr {open}{users}{}",
        s.pid,
        counters(s.counters.iter(), zeroes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rds::info::Counters;
    use rnbd_host::control::LnetConnection;
    use roce::broker::{Place, Report};

    #[test]
    fn a_line_per_process() {
        let mut process = ProcessReport {
            pid: 7,
            uid: 0,
            name: "ib_write_bw".into(),
            place: Place { slot: 3, generation: 1 },
            connections: 1,
            bindings: vec![],
            report: None,
        };
        assert_eq!(
            process_line(&process, false),
            "process 7 ib_write_bw slot 3 connections 1"
        );
        let counters = [("sent_pkts".to_owned(), 5), ("rcvd_pkts".to_owned(), 0)];
        process.report = Some(Report {
            queue_pairs: 2,
            counters: counters.into(),
            ..Report::default()
        });
        let known = "process 7 ib_write_bw slot 3 addr all qps 2 connections 1 sent_pkts 5";
        assert_eq!(process_line(&process, false), known);
        process.name = "a\x1b[2J\nb".into();
        assert!(!process_line(&process, false).contains(char::is_control));
        assert!(process_line(&process, true).contains("rcvd_pkts 0"));
    }

    #[test]
    fn a_line_for_the_rds_node() {
        let rds = Summary {
            sockets: 2,
            connections: 1,
            counters: Counters(vec![("send_queued".to_owned(), 5), ("send_pong".to_owned(), 0)]),
        };
        assert_eq!(rds_line(&rds, false), "rds sockets 2 connections 1 send_queued 5");
        assert!(rds_line(&rds, true).contains("send_pong 0"));
    }

    #[test]
    fn lines_for_an_lnet_node() {
        let connection = LnetConnection {
            peer: "192.0.2.7@o2ib".into(),
            established: true,
            queue_depth: 8,
            fragments: 257,
            credits: 7,
            peer_credits: 6,
            outstanding: 2,
            queued: 0,
            in_flight: 1,
            transfers: 0,
        };
        let node = LnetNode {
            nid: "192.0.2.1@o2ib".into(),
            connections: vec![connection],
            counters: [("sent".to_owned(), 5), ("dropped".to_owned(), 0)].into(),
            rejects_sent: [("CONN_RACE".to_owned(), 1), ("FATAL".to_owned(), 0)].into(),
            rejects_received: BTreeMap::new(),
        };
        let of = OfLnet { pid: 7, node };
        let expected = [
            "lnet 192.0.2.1@o2ib process 7 connections 1 sent 5 rejects_sent_CONN_RACE 1",
            "lnet 192.0.2.1@o2ib peer 192.0.2.7@o2ib up queue_depth 8 fragments 257 credits 7 peer_credits 6 outstanding 2 queued 0 \
             in_flight 1 transfers 0",
        ];
        assert_eq!(lnet_lines(&of, false), expected);
        assert!(lnet_lines(&of, true)[0].contains("dropped 0"));
    }

    #[test]
    fn whom_users_have_to_trust() {
        let mut s = Statistics {
            pid: 7,
            ..Statistics::default()
        };
        assert_eq!(broker_line(&s, false), "broker 7 addr none");
        s.isolation = Isolation::Isolated;
        assert_eq!(broker_line(&s, false), "broker 7 addr none users isolated");
        s.isolation = Isolation::TrustDomain;
        assert_eq!(broker_line(&s, false), "broker 7 addr none users one-trust-domain");
    }

    #[test]
    fn a_line_for_those_that_have_ended() {
        let mut ended = Ended {
            processes: 3,
            counters: [("sent_pkts".to_owned(), 5), ("rcvd_pkts".to_owned(), 0)].into(),
            ..Ended::default()
        };
        assert_eq!(ended_line(&ended, false), "ended 3 processes addr all sent_pkts 5");
        ended.addrs.push([127, 0, 0, 1].into());
        ended.processes = 1;
        assert_eq!(
            ended_line(&ended, true),
            "ended 1 process addr 127.0.0.1 rcvd_pkts 0 sent_pkts 5"
        );
    }
}
