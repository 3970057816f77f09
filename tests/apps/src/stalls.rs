//! Long ping-pongs on busy processors, of SENDs and of UDP datagrams in turns: finds the slowest rounds and their causes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;

use crate::{
    Result,
    capture::{self, Seen},
    lifetime::long_pingpong,
    process::{Setup, interrupted},
};

const SIDES: [&str; 2] = ["client", "target"];

/// A slow round as `progress.c` prints it. Times are in microseconds.
#[derive(Deserialize, Clone, Debug)]
struct Slow {
    round: u32,
    /// Since 1970.
    begin: f64,
    took: f64,
    /// Time without a poll, of each side.
    away: [f64; 2],
    /// Part of it in which the polling thread was runnable but not running.
    waited: [f64; 2],
}

/// A packet in the capture of one side.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Event {
    side: usize,
    sent: bool,
    packet: Seen,
}

impl Event {
    fn text(&self) -> String {
        let way = if self.sent { "sent" } else { "received" };
        format!("{} {way} {}", SIDES[self.side], self.packet)
    }
}

/// Merges both captures in the order of time.
fn merge(mut captures: [Vec<Seen>; 2]) -> Vec<Event> {
    // The first message is the client's, and is in its capture first.
    let first = captures
        .each_ref()
        .map(|c| c.iter().find(|p| p.is_send()).map_or(f64::MAX, |p| p.at));
    if first[1] < first[0] {
        captures.swap(0, 1);
    }
    let target = captures[0].iter().find(|p| p.is_send()).map(|p| p.to);
    let of = |side: usize| {
        let sent = move |p: &Seen| (Some(p.to) == target) == (side == 0);
        move |packet: Seen| Event {
            side,
            sent: sent(&packet),
            packet,
        }
    };
    let [client, other] = captures;
    let mut all: Vec<Event> = client
        .into_iter()
        .map(of(0))
        .chain(other.into_iter().map(of(1)))
        .collect();
    all.sort_by(|a, b| a.packet.at.total_cmp(&b.packet.at));
    all
}

/// Cause of a slow round.
#[derive(Clone, PartialEq, Debug)]
enum Cause {
    /// A polling thread did not run for half of the round.
    NotScheduled,
    /// A packet was sent and never received.
    Lost(String),
    /// A packet stayed in a socket while its receiver ran.
    NotRead(String),
    /// A side received a packet, ran, and sent nothing.
    Withheld(String),
    /// There is no packet of it in a capture.
    Unknown,
}

impl Cause {
    fn name(&self) -> &'static str {
        match self {
            Self::NotScheduled => "not scheduled",
            Self::Lost(_) => "lost",
            Self::NotRead(_) => "not read",
            Self::Withheld(_) => "withheld",
            Self::Unknown => "unknown",
        }
    }

    fn detail(&self) -> &str {
        match self {
            Self::NotScheduled | Self::Unknown => "",
            Self::Lost(text) | Self::NotRead(text) | Self::Withheld(text) => text,
        }
    }
}

fn cause(slow: &Slow, events: &[Event]) -> Cause {
    if slow.away.iter().sum::<f64>() >= slow.took / 2.0 {
        return Cause::NotScheduled;
    }
    let end = slow.begin + slow.took;
    let within: Vec<&Event> = events
        .iter()
        .filter(|e| (slow.begin..=end).contains(&e.packet.at))
        .collect();
    let received: BTreeSet<_> = within
        .iter()
        .filter(|e| !e.sent)
        .map(|e| (e.side, e.packet.key()))
        .collect();
    let mut sent = BTreeMap::<_, u32>::new();
    within
        .iter()
        .filter(|e| e.sent)
        .for_each(|e| *sent.entry((1 - e.side, e.packet.key())).or_default() += 1);
    let again: u32 = sent.values().map(|n| n - 1).sum();
    // The last acknowledgement may come after the round.
    let lost = within
        .iter()
        .find(|e| e.sent && e.packet.is_send() && !received.contains(&(1 - e.side, e.packet.key())));
    if let Some(lost) = lost {
        return Cause::Lost(format!("{}, {again} sent again", lost.text()));
    }
    let times = within.iter().map(|e| e.packet.at);
    let gaps = within
        .iter()
        .zip(times.skip(1).chain([end]))
        .map(|(e, next)| (next - e.packet.at, *e));
    let longest = gaps.max_by(|a, b| a.0.total_cmp(&b.0));
    match longest {
        None => Cause::Unknown,
        Some((gap, before)) => {
            let text = format!("{:.1} ms after {}, {again} sent again", gap / 1e3, before.text());
            if before.sent {
                Cause::NotRead(text)
            } else {
                Cause::Withheld(text)
            }
        }
    }
}

/// Stops the busy threads when dropped.
struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn burn(done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        core::hint::spin_loop();
    }
}

/// Runs one ping-pong and returns its slowest rounds.
fn play(setup: &Setup, kind: &str, rounds: u32, dir: &Path) -> Result<Vec<Slow>> {
    let case = long_pingpong(kind, rounds).with("FERROCE_PCAP", "%p.pcap").within(600);
    let text = setup.attempt(&case, dir)?;
    let slow: Vec<Slow> = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    match slow.is_empty() {
        true => Err(format!("no round was printed\n{text}")),
        false => Ok(slow),
    }
}

fn print(kind: &str, slow: &Slow, cause: &Cause) {
    let [client, target] = slow.away.map(|us| us / 1e3);
    println!(
        "{kind:<9} round {:>6}: {:>6.1} ms, client away {client:.1} ms, target {target:.1} ms, {:.1} ms of that waiting for a processor: {} {}",
        slow.round,
        slow.took / 1e3,
        slow.waited.iter().sum::<f64>() / 1e3,
        cause.name(),
        cause.detail()
    );
}

/// Runs ping-pongs in turns next to `load` busy threads, and prints the slowest rounds with their causes.
///
/// # Errors
/// When a ping-pong fails.
pub(crate) fn run(setup: &Setup, minutes: f64, rounds: u32, load: usize) -> Result<()> {
    let dir = setup.directory("stalls")?;
    let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let done = AtomicBool::new(false);
    let mut slowest = BTreeMap::<&str, Vec<f64>>::new();
    let mut causes = BTreeMap::<_, u32>::new();
    thread::scope(|scope| {
        let _busy = Busy(&done);
        (0..load).for_each(|_| drop(scope.spawn(|| burn(&done))));
        while Instant::now() < end && !interrupted() {
            for kind in ["pingpong", "udp"] {
                let slow = play(setup, kind, rounds, &dir)?;
                let files = capture::files(&dir);
                let events = match &files[..] {
                    [a, b] => merge([capture::read(a)?, capture::read(b)?]),
                    _ => Vec::new(),
                };
                for file in &files {
                    fs::remove_file(file).map_err(|e| format!("{}: {e}", file.display()))?;
                }
                for round in &slow {
                    let cause = cause(round, &events);
                    print(kind, round, &cause);
                    *causes.entry((kind, cause.name())).or_default() += 1;
                }
                slowest.entry(kind).or_default().push(slow[0].took / 1e3);
            }
        }
        Ok::<_, String>(())
    })?;
    for (kind, mut worst) in slowest {
        worst.sort_by(f64::total_cmp);
        let (most, middle) = (worst.last().copied().unwrap_or_default(), worst[worst.len() / 2]);
        let slow = worst.iter().filter(|ms| **ms >= 48.0).count();
        println!(
            "{kind:<9} {} runs of {rounds} rounds: slowest round {most:.1} ms, median of the runs {middle:.1} ms, 48 ms or more in {slow} runs",
            worst.len()
        );
    }
    for ((kind, cause), count) in causes {
        println!("{kind:<9} {cause}: {count} rounds");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use roce_bth::Opcode;

    use super::*;

    #[test]
    fn the_capture_tells_why_a_round_was_slow() {
        let packet = |at, opcode, psn, to| Seen { at, opcode, psn, to };
        let send = |at, psn, to| packet(at, Opcode::RcSendOnly, psn, to);
        let ack = |at, psn, to| packet(at, Opcode::RcAcknowledge, psn, to);
        let slow = |away| Slow {
            round: 0,
            begin: 0.0,
            took: 50_000.0,
            away,
            waited: away,
        };
        let client = vec![send(1.0, 7, 1), ack(49_000.0, 7, 2), send(49_001.0, 3, 2)];
        let both = |target: Vec<Seen>| merge([target, client.clone()]);
        // The target's capture is given first: the order of names says nothing.
        let name = |away, target| cause(&slow(away), &both(target)).name();
        let late = vec![send(48_000.0, 7, 1), ack(48_001.0, 7, 2), send(48_002.0, 3, 2)];
        assert_eq!(name([0.0, 0.0], late.clone()), "not read");
        assert_eq!(name([0.0, 47_000.0], late), "not scheduled");
        let early = vec![send(20.0, 7, 1), ack(48_001.0, 7, 2), send(48_002.0, 3, 2)];
        assert_eq!(name([0.0, 0.0], early), "withheld");
        assert_eq!(
            name([0.0, 0.0], vec![ack(48_001.0, 7, 2), send(48_002.0, 3, 2)]),
            "lost"
        );
    }
}
