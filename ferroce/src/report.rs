//! Events of `serve`, `map` and `daemon`: lines for people, or JSON.

use std::{
    borrow::Cow,
    net::IpAddr,
    time::{Duration, Instant},
};

use clap::Args;
use rnbd_host::LoopStats;
use roce::DeviceStats;
use serde_json::{Map, Value, json};

use crate::{
    control::Events,
    output::{self, Failure, escape_json},
    printer::{Format, Printer},
    transport::{packets_json, stats_json},
    units::seconds,
};

/// Options of reports.
#[derive(Clone, Debug, Args)]
pub(crate) struct ReportArgs {
    /// Interval of printed statistics
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    stats_interval: Option<Duration>,
    /// Report events as JSON, one object per line
    #[arg(long)]
    json: bool,
}

impl ReportArgs {
    /// Whether events are reported as JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Starts the report of a run, which also goes to the subscribers of `events`.
    pub(crate) fn reporter(&self, events: Events) -> Reporter {
        let now = Instant::now();
        Reporter {
            json: self.json,
            task: None,
            events,
            printer: Printer::stdout(),
            started: now,
            every: self.stats_interval,
            last: (now, Moved::default()),
        }
    }

    /// Reports the error of a run that failed, and waits until the report is written.
    pub(crate) fn end(&self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        let printer = Printer::stdout();
        if let (true, Err(failure)) = (self.json, &outcome)
            && let Some(text) = failure.text()
        {
            let error = json!({ "event": "error", "message": text }).to_string();
            printer.event(escape_json(&error).into_owned(), Format::Json)?;
        }
        let finished = printer.finish();
        outcome.and(finished)
    }
}

/// Bytes and requests of the users of devices.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Moved {
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    /// Requests answered, errors included.
    pub(crate) requests: u64,
    /// Requests answered with an error.
    pub(crate) failed: u64,
    /// Counts of rejected clients and requests, by name.
    pub(crate) refused: Vec<(&'static str, u64)>,
}

impl Moved {
    fn json(&self) -> Map<String, Value> {
        [
            ("bytes_read", self.bytes_read),
            ("bytes_written", self.bytes_written),
            ("requests", self.requests),
            ("failed_requests", self.failed),
        ]
        .iter()
        .chain(&self.refused)
        .map(|(name, n)| ((*name).to_owned(), (*n).into()))
        .collect()
    }
}

/// Reports the events of a run.
pub(crate) struct Reporter {
    json: bool,
    /// Name of the daemon's task that runs.
    task: Option<String>,
    events: Events,
    printer: Printer,
    started: Instant,
    every: Option<Duration>,
    /// Time of the last statistics, and their counts.
    last: (Instant, Moved),
}

impl Reporter {
    /// Names the daemon's task in each event.
    pub(crate) fn of_task(self, task: String) -> Self {
        Self {
            task: Some(task),
            ..self
        }
    }

    /// Reports an event; `fields` is an object of its members. Never waits for the reader of standard output.
    ///
    /// # Errors
    /// When standard output could not be written.
    pub(crate) fn event(&self, name: &str, fields: Value, text: &str) -> Result<(), Failure> {
        let mut event = Map::new();
        event.insert("event".into(), name.into());
        let mut text = Cow::Borrowed(text);
        if let Some(task) = &self.task {
            event.insert("task".into(), task.clone().into());
            text = format!("{task}: {text}").into();
        }
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.events.publish(&event, &text);
        match self.json {
            true => {
                let line = Value::from(event).to_string();
                self.printer.event(escape_json(&line).into_owned(), Format::Json)
            }
            false => self.printer.event(text.into_owned(), Format::Text),
        }
    }

    /// Time until the next [`Reporter::tick`] is due.
    pub(crate) fn patience(&self) -> Duration {
        const LOOK: Duration = Duration::from_millis(100);
        self.every.map_or(LOOK, |every| every.min(LOOK))
    }

    /// Reports statistics, which `counted` returns, when they are due.
    ///
    /// # Errors
    /// When standard output could not be written.
    pub(crate) fn tick(&mut self, counted: impl FnOnce() -> (LoopStats, Moved)) -> Result<(), Failure> {
        self.printer.check()?;
        let now = Instant::now();
        let then = self.last.0;
        if self.every.is_none_or(|every| now.duration_since(then) < every) {
            return Ok(());
        }
        let (stats, moved) = counted();
        let before = std::mem::replace(&mut self.last, (now, moved.clone())).1;
        let seconds = now.duration_since(then).as_secs_f64();
        let rate = |new: u64, old: u64| output::bytes(((new - old) as f64 / seconds) as u64);
        let text = format!(
            "read {}/s, written {}/s, {} retransmissions so far",
            rate(moved.bytes_read, before.bytes_read),
            rate(moved.bytes_written, before.bytes_written),
            stats.device().retransmits()
        );
        self.event("stats", self.numbers(&stats, &moved), &text)
    }

    /// Reports the statistics of the whole run.
    pub(crate) fn summary(&self, stats: &LoopStats, moved: &Moved) -> Result<(), Failure> {
        let mut text = format!(
            "{:.1} s: read {}, written {}, {} requests ({} failed); {}",
            self.started.elapsed().as_secs_f64(),
            output::bytes(moved.bytes_read),
            output::bytes(moved.bytes_written),
            moved.requests,
            moved.failed,
            packets(&stats.device()),
        );
        if stats.devices.len() > 1 {
            for (addr, of_device) in &stats.devices {
                text.push_str(&format!("\n{addr}: {}", packets(of_device)));
            }
        }
        self.event("summary", self.numbers(stats, moved), &text)
    }

    fn numbers(&self, stats: &LoopStats, moved: &Moved) -> Value {
        let mut json = Map::new();
        json.insert("seconds".into(), self.started.elapsed().as_secs_f64().into());
        json.extend(moved.json());
        json.extend(stats_json(&stats.device()));
        let of_device = |(addr, of_device): &(IpAddr, DeviceStats)| {
            let mut json = packets_json(of_device);
            json.insert("address".into(), addr.to_string().into());
            Value::from(json)
        };
        json.insert("addresses".into(), stats.devices.iter().map(of_device).collect());
        json.into()
    }
}

fn packets(stats: &DeviceStats) -> String {
    format!(
        "packets sent {}, received {}, retransmissions {}, ICRC errors {}",
        stats.port.tx_packets,
        stats.port.rx_packets,
        stats.retransmits(),
        stats.icrc_errors()
    )
}
