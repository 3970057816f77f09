//! Latency picture: round trips and READs over time.

use roce_pcap::judge::{Event, EventKind};

use super::{
    marks::{Points, Segments, Shape},
    overview::{Chosen, requester},
    panel::{HEIGHT, HEIGHTS, Layer, Named, Panel, Picture, ticks, time_scale},
    scale::{Scale, decade},
    time::TimeScale,
};
use crate::pcap::stream::end;

/// Height of a tick at the lower end, pixels.
const TICK: f64 = 12.0;

/// Times of losses, as ticks at the lower end of a panel.
pub(super) struct Losses {
    time: TimeScale,
    again: Segments,
    naks: Segments,
    rnrs: Segments,
}

impl Losses {
    pub(super) fn new(time: TimeScale) -> Self {
        Self {
            time,
            again: Segments::default(),
            naks: Segments::default(),
            rnrs: Segments::default(),
        }
    }

    pub(super) fn event(&mut self, event: &Event) {
        let (marks, what) = match event.kind {
            EventKind::Request { repeated: true, .. } | EventKind::ReadResponse { repeated: true, .. } => {
                (&mut self.again, "sent again")
            }
            EventKind::Nak { .. } => (&mut self.naks, "NAK"),
            EventKind::Rnr { .. } => (&mut self.rnrs, "RNR NAK"),
            _ => return,
        };
        let x = self.time.at(event.time_ns);
        marks.add(x, [HEIGHT - TICK, HEIGHT], || format!("frame {}: {what}", event.frame));
    }

    pub(super) fn layers(self) -> [Named; 3] {
        [
            Named::new("again", "sent again", Layer::Segments(self.again)),
            Named::new("rnr", "RNR NAKs", Layer::Segments(self.rnrs)),
            Named::new("nak", "NAKs", Layer::Segments(self.naks)),
        ]
    }
}

/// Latencies of one endpoint's requests.
struct Direction {
    title: String,
    time: TimeScale,
    height: Scale,
    round_trips: Points,
    reads: Points,
    losses: Losses,
}

/// Latency picture.
pub(super) struct Latencies {
    directions: [Option<Direction>; 2],
}

impl Latencies {
    /// Creates one without packets.
    pub(super) fn new(chosen: &Chosen) -> Self {
        let direction = |requester: usize| {
            let flow = chosen.flows[requester].as_ref()?;
            let known = [flow.round_trip, flow.read_latency].into_iter().flatten();
            let (low, high) = known.fold((u64::MAX, 0), |(low, high), l| (low.min(l.min_ns), high.max(l.max_ns)));
            (high > 0).then(|| Direction {
                title: format!(
                    "{} to {}: latency of its requests",
                    end(&chosen.ends[requester]),
                    end(&chosen.ends[1 - requester])
                ),
                time: time_scale(chosen),
                height: Scale::logarithmic([low as f64, high as f64], HEIGHTS),
                round_trips: Points::default(),
                reads: Points::default(),
                losses: Losses::new(time_scale(chosen)),
            })
        };
        Self {
            directions: [direction(0), direction(1)],
        }
    }
}

impl Picture for Latencies {
    fn event(&mut self, event: &Event) {
        let Some(direction) = &mut self.directions[requester(event)] else {
            return;
        };
        direction.losses.event(event);
        let marks = match event.kind {
            EventKind::Ack { .. } => &mut direction.round_trips,
            _ => &mut direction.reads,
        };
        if let Some(latency) = event.kind.latency_ns() {
            let (x, y) = (direction.time.at(event.time_ns), direction.height.at(latency as f64));
            marks.add(x, y, String::new);
        }
    }

    fn finish(self: Box<Self>) -> Vec<Panel> {
        let panel = |direction: Direction| {
            let mut layers = vec![
                Named::new("data", "round trips", Layer::Points(direction.round_trips, Shape::Dot)),
                Named::new("response", "READs", Layer::Points(direction.reads, Shape::Dot)),
            ];
            layers.extend(direction.losses.layers());
            Panel {
                title: direction.title,
                time: direction.time,
                ticks: ticks(&direction.height, decade),
                layers,
            }
        };
        self.directions.into_iter().flatten().map(panel).collect()
    }
}
