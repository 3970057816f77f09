//! `ferroce lnet selftest`: tests of other nodes, as their console and client.

use std::{
    collections::BTreeMap,
    io::ErrorKind,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use lnet_host::{
    Error, Nid, NodeCounters, NodeOptions, Parameters, Pattern, RunEvent, RunPlan, SelfTest, SelfTestBody,
};
use serde::Serialize;

use super::{Offer, o2ib, open, source};
use crate::{
    output::{self, Failure},
    signals::Stop,
    units,
};

/// Time between two figures, and most between two questions whether to stop.
const INTERVAL: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);
const MIB: f64 = (1 << 20) as f64;

#[derive(Args)]
#[command(after_help = "\
The nodes are kernels with the module lnet_selftest, or `ferroce lnet serve`. This host is the console (as `lst` of Lustre) and the only \
client. Other nodes must not have a session of another console; --force ends that.

Each second it prints what `lst stat` shows of the nodes: LNet messages (RPC) and data that they received (R) and sent (W), as average, \
minimum and maximum of the nodes; at the end, requests and data of this host. With --json these are objects with `event`: `lost` (`nid`, \
`why`), `begun`, `rates` (`nid`, `received_per_s`, `sent_per_s`, `received_mib_per_s`, `sent_mib_per_s`), and `summary` (`seconds`, \
`done`, `failed`, `bytes`, `mib_per_s`).

The exit status is 1 if a node took no part, or a request failed.")]
pub(crate) struct SelftestArgs {
    /// NIDs to test, as 192.0.2.1@o2ib; without a network it is `o2ib`
    #[arg(value_name = "NID", required = true, value_parser = o2ib)]
    nids: Vec<Nid>,
    /// Requests
    #[arg(long, value_enum, default_value_t = Kind::Read)]
    test: Kind,
    /// Data of a request, up to 1 MiB. Of kernels, a multiple of 8 bytes: others stop them
    #[arg(short, long, value_name = "SIZE", default_value = "1M", value_parser = units::size32)]
    size: u32,
    /// Words of the data that the receiver checks
    #[arg(long, value_enum, default_value_t = Check::None)]
    check: Check,
    /// Requests to each node at a time
    #[arg(long, value_name = "N", default_value_t = 8)]
    concurrency: u32,
    /// Requests to each node, rounded up to a multiple of --concurrency; without it the test takes --duration
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<u32>,
    /// Time of the test, in seconds
    #[arg(short, long, value_name = "SECONDS", default_value = "10", value_parser = units::seconds, conflicts_with = "count")]
    duration: Duration,
    /// Time to wait for a reply, in seconds
    #[arg(short = 'W', long, value_name = "SECONDS", default_value = "20", value_parser = units::seconds)]
    timeout: Duration,
    /// End sessions of other consoles
    #[arg(long)]
    force: bool,
    /// Address to test from [default: that of the route to the first]
    #[arg(short = 'I', long, value_name = "ADDRESS")]
    source: Option<Ipv4Addr>,
    #[command(flatten)]
    offer: Offer,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    /// Pings of lnet_selftest, without data
    Ping,
    /// Nodes send data
    Read,
    /// Nodes take data
    Write,
}

#[derive(Clone, Copy, ValueEnum)]
enum Check {
    /// None
    None,
    /// The first and the last word
    Simple,
    /// All
    Full,
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Report<'a> {
    Lost { nid: String, why: String },
    Begun,
    Rates(&'a Rates),
    Summary(&'a Summary),
}

/// Figures of a node in an interval.
#[derive(Clone, Serialize)]
struct Rates {
    nid: String,
    received_per_s: f64,
    sent_per_s: f64,
    received_mib_per_s: f64,
    sent_mib_per_s: f64,
}

#[derive(Serialize)]
struct Summary {
    seconds: f64,
    done: u64,
    failed: u64,
    bytes: u64,
    mib_per_s: f64,
}

impl SelftestArgs {
    fn plan(&self) -> RunPlan {
        let bulk = |operation| Parameters::Bulk {
            operation,
            pattern: match self.check {
                Check::None => Pattern::None,
                Check::Simple => Pattern::Simple,
                Check::Full => Pattern::Full,
            } as u32,
            len: self.size,
            offset: 0,
        };
        RunPlan {
            nodes: self.nids.clone(),
            parameters: match self.test {
                Kind::Ping => Parameters::Ping { size: 0, flags: 0 },
                Kind::Read => bulk(SelfTestBody::READ),
                Kind::Write => bulk(SelfTestBody::WRITE),
            },
            // A unit sends its requests one after the other.
            concurrency: self.count.map_or(self.concurrency, |count| self.concurrency.min(count)),
            loops: self
                .count
                .map(|count| count.div_ceil(self.concurrency.clamp(1, count.max(1)))),
            name: "ferroce".into(),
            force: self.force,
            timeout: self.timeout,
        }
    }
}

/// Tests.
pub(super) fn run(args: &SelftestArgs) -> Result<(), Failure> {
    let plan = args.plan();
    plan.check().map_err(Failure::usage)?;
    let stop = Stop::on_signals()?;
    let [first, ..] = args.nids[..] else {
        return Err(Failure::usage("no NID"));
    };
    let options = NodeOptions {
        config: args.offer.config(),
        ..NodeOptions::new(source(args.source, first)?)
    };
    let node = open(options, &args.offer)?;
    let test = node.selftest(plan).map_err(Failure::of)?;
    let mut watch = Watch::new(args);
    while watch.next(&test)? {
        watch.stop_if_due(&test, &stop)?;
        watch.ask_if_due(&test)?;
    }
    watch.end(&test)
}

/// Course of a test.
struct Watch<'a> {
    args: &'a SelftestArgs,
    begun: Option<Instant>,
    is_stopped: bool,
    ask_at: Option<Instant>,
    last: BTreeMap<Nid, NodeCounters>,
    rates: BTreeMap<Nid, Rates>,
    lost: usize,
}

impl<'a> Watch<'a> {
    fn new(args: &'a SelftestArgs) -> Self {
        Self {
            args,
            begun: None,
            is_stopped: false,
            ask_at: None,
            last: BTreeMap::new(),
            rates: BTreeMap::new(),
            lost: 0,
        }
    }

    fn report(&self, report: &Report<'_>, text: &str) -> Result<(), Failure> {
        match self.args.json {
            true => output::json(report),
            false => output::line(text),
        }
    }

    /// Handles the next report, if one comes in time. Returns whether more may come.
    fn next(&mut self, test: &SelfTest) -> Result<bool, Failure> {
        match test.next(Some(PAUSE)) {
            Ok(RunEvent::Ended) => return Ok(false),
            Ok(RunEvent::Lost(nid, why)) => {
                self.lost += 1;
                let (nid, why) = (nid.to_string(), why.to_string());
                let text = format!("{nid} takes no part: {why}");
                self.report(&Report::Lost { nid, why }, &text)?;
            }
            Ok(RunEvent::Begun) => {
                let now = Instant::now();
                (self.begun, self.ask_at) = (Some(now), Some(now));
                self.report(&Report::Begun, "the test has begun")?;
            }
            Ok(RunEvent::Counters(nid, counters)) => {
                // The last counters may come before the former figures were shown.
                if self.rates.contains_key(&nid) {
                    self.show_rates()?;
                }
                let before = self.last.insert(nid, *counters);
                if let Some(rates) = before.and_then(|before| rates(nid, &before, &counters)) {
                    self.rates.insert(nid, rates);
                }
            }
            Err(Error::Ended(e)) if e.kind() == ErrorKind::TimedOut => {}
            Err(e) => return Err(Failure::of(e)),
        }
        Ok(true)
    }

    fn stop_if_due(&mut self, test: &SelfTest, stop: &Stop) -> Result<(), Failure> {
        let is_due = |begun: Instant| self.args.count.is_none() && begun.elapsed() >= self.args.duration;
        if !self.is_stopped && (stop.requested() || self.begun.is_some_and(is_due)) {
            self.is_stopped = true;
            test.stop(false).map_err(Failure::of)?;
        }
        Ok(())
    }

    fn ask_if_due(&mut self, test: &SelfTest) -> Result<(), Failure> {
        let now = Instant::now();
        if self.is_stopped || self.ask_at.is_none_or(|at| at > now) {
            return Ok(());
        }
        self.ask_at = Some(now + INTERVAL);
        self.show_rates()?;
        test.ask().map_err(Failure::of)
    }

    /// Shows the figures that have come.
    fn show_rates(&mut self) -> Result<(), Failure> {
        let rates: Vec<Rates> = std::mem::take(&mut self.rates).into_values().collect();
        match self.args.json {
            true => rates.iter().try_for_each(|rates| output::json(&Report::Rates(rates))),
            false if rates.is_empty() => Ok(()),
            false => output::text(&table(&rates)),
        }
    }

    fn end(mut self, test: &SelfTest) -> Result<(), Failure> {
        self.show_rates()?;
        let counts = test.counts().map_err(Failure::of)?;
        let seconds = self.begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
        let summary = Summary {
            seconds,
            done: counts.done,
            failed: counts.failed,
            bytes: counts.bytes,
            mib_per_s: if seconds > 0.0 {
                counts.bytes as f64 / MIB / seconds
            } else {
                0.0
            },
        };
        let text = format!(
            "{} requests in {seconds:.2} s, {} failed, {:.2} MiB/s of data",
            summary.done, summary.failed, summary.mib_per_s
        );
        self.report(&Report::Summary(&summary), &text)?;
        match self.lost > 0 || counts.failed > 0 || counts.done == 0 {
            true => Err(Failure::reported(1)),
            false => Ok(()),
        }
    }
}

/// Figures between two counters of a node, by its own clock.
fn rates(nid: Nid, before: &NodeCounters, after: &NodeCounters) -> Option<Rates> {
    let ms = after.framework.running_ms.wrapping_sub(before.framework.running_ms);
    let seconds = f64::from(ms) / 1000.0;
    let (lnet, former) = (&after.lnet, &before.lnet);
    let bytes = |after: u64, before: u64| after.wrapping_sub(before) as f64 / MIB / seconds;
    let messages = |after: u32, before: u32| f64::from(after.wrapping_sub(before)) / seconds;
    (ms > 0).then(|| Rates {
        nid: nid.to_string(),
        received_per_s: messages(lnet.received, former.received),
        sent_per_s: messages(lnet.sent, former.sent),
        received_mib_per_s: bytes(lnet.received_bytes, former.received_bytes),
        sent_mib_per_s: bytes(lnet.sent_bytes, former.sent_bytes),
    })
}

/// The lines of `lst stat`.
fn table(rates: &[Rates]) -> String {
    let line = |name: &str, unit: &str, of: fn(&Rates) -> f64| {
        let all = rates.iter().map(of);
        let average = all.clone().sum::<f64>() / rates.len() as f64;
        let (least, most) = (all.clone().fold(f64::MAX, f64::min), all.fold(0.0, f64::max));
        format!("[{name}] Avg: {average:<10.2} {unit} Min: {least:<10.2} {unit} Max: {most:<10.2} {unit}\n")
    };
    [
        "[LNet Rates]\n".to_owned(),
        line("R", "RPC/s", |of| of.received_per_s),
        line("W", "RPC/s", |of| of.sent_per_s),
        "[LNet Bandwidth]\n".to_owned(),
        line("R", "MiB/s", |of| of.received_mib_per_s),
        line("W", "MiB/s", |of| of.sent_mib_per_s),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_lst_stat() {
        let nid: Nid = "192.0.2.1@o2ib".parse().unwrap();
        let mut before = NodeCounters::default();
        before.lnet.sent = u32::MAX;
        let mut after = before;
        after.framework.running_ms = 500;
        (after.lnet.sent, after.lnet.sent_bytes) = (99, 3 << 20);
        let first = rates(nid, &before, &after).unwrap();
        assert!(rates(nid, &after, &after).is_none());
        let idle = Rates {
            sent_per_s: 0.0,
            sent_mib_per_s: 0.0,
            ..first.clone()
        };
        let expected = "\
[LNet Rates]
[R] Avg: 0.00       RPC/s Min: 0.00       RPC/s Max: 0.00       RPC/s
[W] Avg: 100.00     RPC/s Min: 0.00       RPC/s Max: 200.00     RPC/s
[LNet Bandwidth]
[R] Avg: 0.00       MiB/s Min: 0.00       MiB/s Max: 0.00       MiB/s
[W] Avg: 3.00       MiB/s Min: 0.00       MiB/s Max: 6.00       MiB/s
";
        assert_eq!(table(&[first, idle]), expected);
    }
}
