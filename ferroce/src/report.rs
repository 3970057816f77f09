//! Events of `serve`, `map` and `daemon`: lines for people, or JSON.

use std::time::{Duration, Instant};

use clap::Args;
use rnbd_host::LoopStats;

use crate::{
    control::Events,
    event::{Event, Moved, OfAddress, Packets, Statistics, counters},
    output::{self, Failure},
    printer::{Format, Printer},
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
            let message = text.to_owned();
            printer.event(Event::Error { message }.json(None, false), Format::Json)?;
        }
        let finished = printer.finish();
        outcome.and(finished)
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

    /// Reports an event. Never waits for the reader of standard output.
    ///
    /// # Errors
    /// When standard output could not be written.
    pub(crate) fn event(&self, event: &Event) -> Result<(), Failure> {
        let task = self.task.as_deref();
        self.events.publish(event, task);
        match self.json {
            true => self.printer.event(event.json(task, false), Format::Json),
            false => self.printer.event(event.text(task), Format::Text),
        }
    }

    /// Time until the next [`Reporter::tick`] is due.
    pub(crate) fn timeout(&self) -> Duration {
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
        let so_far = self.statistics(&stats, moved, text);
        self.event(&Event::Stats { so_far })
    }

    /// Reports the statistics of the whole run.
    pub(crate) fn summary(&self, stats: &LoopStats, moved: Moved) -> Result<(), Failure> {
        let mut text = format!(
            "{:.1} s: read {}, written {}, {} requests ({} failed); {}",
            self.started.elapsed().as_secs_f64(),
            output::bytes(moved.bytes_read),
            output::bytes(moved.bytes_written),
            moved.requests,
            moved.failed,
            Packets::from(&stats.device()),
        );
        if stats.devices.len() > 1 {
            for (addr, of_device) in &stats.devices {
                text.push_str(&format!("\n{addr}: {}", Packets::from(of_device)));
            }
        }
        let of_run = self.statistics(stats, moved, text);
        self.event(&Event::Summary { of_run })
    }

    fn statistics(&self, stats: &LoopStats, moved: Moved, text: String) -> Box<Statistics> {
        let all = stats.device();
        let addresses = stats.devices.iter().map(|(address, of_device)| OfAddress {
            address: *address,
            packets: of_device.into(),
        });
        Box::new(Statistics {
            seconds: self.started.elapsed().as_secs_f64(),
            moved,
            packets: (&all).into(),
            counters: counters(&all),
            addresses: addresses.collect(),
            text,
        })
    }
}
