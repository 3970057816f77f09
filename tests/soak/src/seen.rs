//! What `ferroce map` tells of its paths.

use std::{
    collections::BTreeSet,
    ops::Add,
    time::{Duration, Instant},
};

use serde_json::Value;

/// An event may come this much later than what it tells of.
const LATE: Duration = Duration::from_secs(2);

/// How often it happened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Counts {
    pub(crate) path_down: u64,
    pub(crate) path_up: u64,
    pub(crate) failovers: u64,
    /// Requests that went by another path.
    pub(crate) taken_over: u64,
    pub(crate) session_lost: u64,
    pub(crate) remapped: u64,
    pub(crate) resized: u64,
}

impl Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            path_down: self.path_down + other.path_down,
            path_up: self.path_up + other.path_up,
            failovers: self.failovers + other.failovers,
            taken_over: self.taken_over + other.taken_over,
            session_lost: self.session_lost + other.session_lost,
            remapped: self.remapped + other.remapped,
            resized: self.resized + other.resized,
        }
    }
}

/// The state of a session, by its events.
pub(crate) struct Seen {
    paths: Vec<String>,
    up: BTreeSet<String>,
    devices: &'static [&'static str],
    /// Devices that are not open.
    closed: BTreeSet<String>,
    /// When no path was up, or a device not open; the last one may last.
    out: Vec<(Instant, Option<Instant>)>,
    pub(crate) counts: Counts,
}

impl Seen {
    /// A session whose paths are all up, and whose devices are open.
    pub(crate) fn new(paths: &[String], devices: &'static [&'static str]) -> Self {
        Self {
            paths: paths.to_owned(),
            up: paths.iter().cloned().collect(),
            devices,
            closed: BTreeSet::new(),
            out: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Another process maps the session: all paths are up, and the devices open. Outages of the former one stay, for requests that are judged
    /// later.
    pub(crate) fn begin_again(&mut self, now: Instant, paths: &[String]) {
        let mut out = std::mem::take(&mut self.out);
        if let Some((_, end @ None)) = out.last_mut() {
            *end = Some(now);
        }
        *self = Self {
            out,
            ..Self::new(paths, self.devices)
        };
    }

    /// Its paths, those that are down too.
    pub(crate) fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Whether all paths are up and the devices are open.
    pub(crate) fn is_well(&self) -> bool {
        self.up.len() == self.paths.len() && !matches!(self.out.last(), Some((_, None)))
    }

    /// Whether a request may have failed because no path was up.
    pub(crate) fn was_out(&self, begun: Instant, ended: Instant) -> bool {
        let overlaps =
            |(from, to): &(Instant, Option<Instant>)| *from <= ended + LATE && to.is_none_or(|to| begun <= to + LATE);
        self.out.iter().any(overlaps)
    }

    /// An event came. An error if it must not.
    pub(crate) fn event(&mut self, now: Instant, event: &Value) -> Result<(), String> {
        let path = || event["path"].as_str().unwrap_or_default().to_owned();
        let counts = &mut self.counts;
        match event["event"].as_str().unwrap_or_default() {
            "path_up" => {
                counts.path_up += 1;
                self.up.insert(path());
            }
            "path_down" => {
                counts.path_down += 1;
                self.up.remove(&path());
            }
            "path_closed" => {
                self.up.remove(&path());
            }
            "failover" => {
                counts.failovers += 1;
                counts.taken_over += event["requests"].as_u64().unwrap_or(0);
            }
            "session_lost" => {
                counts.session_lost += 1;
                self.closed = self.devices.iter().map(|device| (*device).to_owned()).collect();
                if !matches!(self.out.last(), Some((_, None))) {
                    self.out.push((now, None));
                }
            }
            "remapped" => {
                counts.remapped += 1;
                self.closed.remove(event["device"].as_str().unwrap_or_default());
                if self.closed.is_empty()
                    && let Some((_, end @ None)) = self.out.last_mut()
                {
                    *end = Some(now);
                }
            }
            "resized" => counts.resized += 1,
            // Of its other devices, when it begins.
            "mapped" if self.devices.len() > 1 => {}
            "session_back" | "reconnect_failed" | "not_remapped" | "stats" => {}
            other => return Err(format!("it told {other}: {event}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn errors_are_allowed_while_no_path_is_up_or_a_device_is_not_open() {
        let names = ["a".to_owned(), "b".to_owned()];
        let mut seen = Seen::new(&names, &["x", "y"]);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let tell = |seen: &mut Seen, seconds, event| seen.event(at(seconds), &event);
        assert!(seen.is_well());
        tell(&mut seen, 10, json!({ "event": "path_down", "path": "a" })).unwrap();
        assert!(!seen.is_well() && !seen.was_out(at(5), at(30)));
        tell(&mut seen, 20, json!({ "event": "path_down", "path": "b" })).unwrap();
        tell(&mut seen, 20, json!({ "event": "session_lost" })).unwrap();
        assert!(seen.was_out(at(15), at(21)) && !seen.was_out(at(12), at(13)));
        tell(&mut seen, 30, json!({ "event": "path_up", "path": "a" })).unwrap();
        tell(&mut seen, 30, json!({ "event": "path_up", "path": "b" })).unwrap();
        assert!(!seen.is_well() && seen.was_out(at(40), at(41)));
        tell(&mut seen, 30, json!({ "event": "remapped", "device": "y" })).unwrap();
        assert!(!seen.is_well() && seen.was_out(at(40), at(41)));
        tell(&mut seen, 31, json!({ "event": "remapped", "device": "x" })).unwrap();
        assert!(seen.is_well() && seen.was_out(at(31), at(32)) && !seen.was_out(at(40), at(41)));
        assert!(tell(&mut seen, 40, json!({ "event": "error" })).is_err());
    }

    #[test]
    fn outages_of_a_process_that_ended_explain_errors_of_its_time() {
        let names = ["a".to_owned()];
        let mut seen = Seen::new(&names, &["x"]);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        seen.event(at(10), &json!({ "event": "session_lost" })).unwrap();
        seen.begin_again(at(12), &names);
        assert!(seen.is_well() && seen.counts == Counts::default());
        assert!(seen.was_out(at(9), at(10)) && !seen.was_out(at(20), at(21)));
    }
}
