//! Throughput picture: payload over time, in bins.

use std::fmt::Write as _;

use roce_pcap::judge::{Event, EventKind};

use super::{
    latency::Losses,
    overview::{Chosen, requester},
    panel::{HEIGHT, LEFT, Layer, MARGIN, Named, Panel, Picture, RIGHT, ticks},
    scale::{Scale, label, unit_of_rate, unit_of_time},
    time::TimeScale,
};
use crate::pcap::stream::end;

/// Bins of a picture.
const BINS: u64 = 200;
/// Shortest bin, nanoseconds.
const SHORTEST_NS: u64 = 1000;

/// Payload that one endpoint sends.
struct Direction {
    title: String,
    /// Bytes of first transmissions in each bin, and of repetitions.
    first: Vec<u64>,
    again: Vec<u64>,
    /// Packets with payload of each.
    packets: [u64; 2],
    losses: Losses,
}

/// Throughput picture. Its bins are of one width, so no pause is cut out.
pub(super) struct Throughput {
    bin_ns: u64,
    time: TimeScale,
    directions: [Option<Direction>; 2],
}

impl Throughput {
    /// Creates one without packets.
    pub(super) fn new(chosen: &Chosen) -> Self {
        let duration = chosen.duration_ns();
        let bin_ns = round(duration.div_ceil(BINS).max(SHORTEST_NS));
        let bins = (duration / bin_ns + 1) as usize;
        let (unit, size) = unit_of_time(bin_ns as f64);
        let time = TimeScale::new(bins as u64 * bin_ns, &[], [LEFT, RIGHT]);
        let direction = |sender: usize| {
            let flow = chosen.flows[sender].as_ref()?;
            (flow.first_bytes > 0).then(|| Direction {
                title: format!(
                    "{} to {}: payload in bins of {} {unit}",
                    end(&chosen.ends[sender]),
                    end(&chosen.ends[1 - sender]),
                    label(bin_ns as f64 / size)
                ),
                first: vec![0; bins],
                again: vec![0; bins],
                packets: [0; 2],
                losses: Losses::new(time.clone()),
            })
        };
        let directions = [direction(0), direction(1)];
        Self {
            bin_ns,
            time,
            directions,
        }
    }
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round(ns: u64) -> u64 {
    let decade = 10u64.saturating_pow(ns.max(1).ilog10());
    let fits = [1, 2, 5]
        .map(|n: u64| n.saturating_mul(decade))
        .into_iter()
        .find(|bin| *bin >= ns);
    fits.unwrap_or(decade.saturating_mul(10))
}

impl Picture for Throughput {
    fn event(&mut self, event: &Event) {
        if let Some(direction) = &mut self.directions[requester(event)] {
            direction.losses.event(event);
        }
        let again = match event.kind {
            EventKind::Request { repeated, .. } | EventKind::ReadResponse { repeated, .. } => repeated,
            EventKind::Datagram => false,
            _ => return,
        };
        let Some(direction) = self.directions[event.sender].as_mut().filter(|_| event.bytes > 0) else {
            return;
        };
        direction.packets[usize::from(again)] += 1;
        let bins = if again {
            &mut direction.again
        } else {
            &mut direction.first
        };
        // Times that go back may lie outside.
        if let Some(bin) = bins.get_mut((event.time_ns / self.bin_ns) as usize) {
            *bin += event.bytes as u64;
        }
    }

    fn finish(self: Box<Self>) -> Vec<Panel> {
        let Self {
            bin_ns,
            time,
            directions,
        } = *self;
        let panels = directions.into_iter().flatten();
        panels.map(|direction| direction.panel(bin_ns, time.clone())).collect()
    }
}

impl Direction {
    fn panel(self, bin_ns: u64, time: TimeScale) -> Panel {
        let rate = |bytes: u64| bytes as f64 * 8e9 / bin_ns as f64;
        let most = self.first.iter().chain(&self.again).copied().max().unwrap_or(0);
        let height = Scale::linear([0.0, rate(most)], [HEIGHT, MARGIN]);
        let (unit, size) = unit_of_rate(height.most());
        let steps = |bins: &[u64]| {
            let width = (RIGHT - LEFT) / bins.len() as f64;
            let mut path = format!("M{LEFT:.1} {HEIGHT:.1}");
            for (n, bytes) in bins.iter().enumerate() {
                let (y, x) = (height.at(rate(*bytes)), LEFT + (n + 1) as f64 * width);
                let _ = write!(path, "V{y:.1}H{x:.1}");
            }
            let _ = write!(path, "V{HEIGHT:.1}");
            path
        };
        let mut layers = vec![
            Named::new("goodput", "goodput", Layer::Path(steps(&self.first), self.packets[0])),
            Named::new(
                "wasted",
                "payload sent again",
                Layer::Path(steps(&self.again), self.packets[1]),
            ),
        ];
        layers.extend(self.losses.layers());
        Panel {
            title: self.title,
            time,
            ticks: ticks(&height, |value| format!("{} {unit}", label(value / size))),
            layers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::round;

    #[test]
    fn bins_are_round() {
        assert_eq!([1, 3, 1000, 1001, 6000].map(round), [1, 5, 1000, 2000, 10_000]);
        assert!(round(u64::MAX) >= 1 << 62);
    }
}
