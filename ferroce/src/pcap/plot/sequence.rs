//! Sequence picture: PSNs over time.

use roce_bth::{Class, NakCode};
use roce_pcap::judge::{Event, EventKind};

use super::{
    marks::{Points, Segments, Shape, Staircase},
    overview::{Chosen, Extent, requester},
    panel::{HEIGHT, HEIGHTS, Layer, Named, Panel, Picture, ticks, time_scale},
    scale::{Scale, label},
    time::TimeScale,
};
use crate::pcap::stream::end;

/// Requests of one endpoint and their answers.
struct Direction {
    title: String,
    psns: Extent,
    time: TimeScale,
    height: Scale,
    data: Segments,
    reads: Segments,
    responses: Segments,
    again: Segments,
    gaps: Segments,
    acks: Staircase,
    naks: Points,
    rnrs: Points,
    fatal: Points,
    cnps: Points,
}

/// Sequence picture.
pub(super) struct Sequence {
    directions: [Option<Direction>; 2],
}

impl Sequence {
    /// Creates one without packets.
    pub(super) fn new(chosen: &Chosen) -> Self {
        let direction = |requester: usize| {
            let psns = chosen.psns[requester]?;
            let values = [0.0, (psns.to - psns.from) as f64];
            Some(Direction {
                title: format!(
                    "{} to {}: PSNs from {:#08x} on",
                    end(&chosen.ends[requester]),
                    end(&chosen.ends[1 - requester]),
                    wrapped(psns.from)
                ),
                psns,
                time: time_scale(chosen),
                height: Scale::linear(values, HEIGHTS),
                data: Segments::default(),
                reads: Segments::default(),
                responses: Segments::default(),
                again: Segments::default(),
                gaps: Segments::default(),
                acks: Staircase::default(),
                naks: Points::default(),
                rnrs: Points::default(),
                fatal: Points::default(),
                cnps: Points::default(),
            })
        };
        Self {
            directions: [direction(0), direction(1)],
        }
    }
}

impl Picture for Sequence {
    fn event(&mut self, event: &Event) {
        if let Some(direction) = &mut self.directions[requester(event)] {
            direction.event(event);
        }
    }

    fn finish(self: Box<Self>) -> Vec<Panel> {
        self.directions.into_iter().flatten().map(Direction::panel).collect()
    }
}

const fn wrapped(psn: i64) -> i64 {
    psn & 0x00ff_ffff
}

impl Direction {
    fn y(&self, psn: i64) -> f64 {
        self.height.at((psn - self.psns.from) as f64)
    }

    fn event(&mut self, event: &Event) {
        let x = self.time.at(event.time_ns);
        let name = event.opcode.info().name;
        let frame = event.frame;
        let no_note = String::new;
        match event.kind {
            EventKind::Request {
                psn,
                psns,
                repeated,
                skipped,
                ..
            } => {
                let ends = [self.y(psn), self.y(psn + psns)];
                if skipped > 0 {
                    let note = || {
                        format!(
                            "frame {frame}: {skipped} PSNs from {:#08x} on are missing",
                            wrapped(psn - skipped)
                        )
                    };
                    self.gaps.add(x, [self.y(psn - skipped), ends[0]], note);
                }
                if repeated {
                    let note = || format!("frame {frame}: {name} with PSN {:#08x} again", wrapped(psn));
                    self.again.add(x, ends, note);
                } else if event.opcode.info().class == Class::ReadRequest {
                    self.reads.add(x, ends, no_note);
                } else {
                    self.data.add(x, ends, no_note);
                }
            }
            EventKind::ReadResponse { psn, repeated, .. } => {
                let ends = [self.y(psn), self.y(psn + 1)];
                if repeated {
                    let note = || format!("frame {frame}: {name} with PSN {:#08x} again", wrapped(psn));
                    self.again.add(x, ends, note);
                } else {
                    self.responses.add(x, ends, no_note);
                }
            }
            EventKind::Ack { psn, .. } if event.opcode.info().class != Class::SelectiveAcknowledge => {
                self.acks.add(x, self.y(psn + 1));
            }
            EventKind::Nak { psn, code } => {
                // It acknowledges everything before.
                self.acks.raise(x, self.y(psn));
                let (marks, what) = match code {
                    NakCode::PsnSequenceError => (&mut self.naks, "NAK, expected"),
                    _ => (&mut self.fatal, "fatal NAK of"),
                };
                let y = self.height.at((psn - self.psns.from) as f64);
                marks.add(x, y, || format!("frame {frame}: {what} PSN {:#08x}", wrapped(psn)));
            }
            EventKind::Rnr { psn, wait } => {
                self.acks.raise(x, self.y(psn));
                let until = self.time.at(event.time_ns.saturating_add(wait.as_nanos() as u64));
                let note = || format!("frame {frame}: RNR NAK of PSN {:#08x}, wait {wait:?}", wrapped(psn));
                self.rnrs.add_with_tail(x, self.y(psn), until, note);
            }
            EventKind::Cnp => self.cnps.add(x, HEIGHT - 5.0, || format!("frame {frame}: CNP")),
            EventKind::Ack { .. } | EventKind::Datagram | EventKind::Unknown => {}
        }
    }

    fn panel(self) -> Panel {
        let layers = vec![
            Named::new("ack", "acknowledged", Layer::Staircase(self.acks)),
            Named::new("read", "READs", Layer::Segments(self.reads)),
            Named::new("data", "requests", Layer::Segments(self.data)),
            Named::new("response", "READ responses", Layer::Segments(self.responses)),
            Named::new("gap", "gaps", Layer::Segments(self.gaps)),
            Named::new("again", "sent again", Layer::Segments(self.again)),
            Named::new("rnr", "RNR NAKs, with wait", Layer::Points(self.rnrs, Shape::Diamond)),
            Named::new("nak", "sequence NAKs", Layer::Points(self.naks, Shape::Cross)),
            Named::new("fatal", "fatal NAKs", Layer::Points(self.fatal, Shape::Triangle)),
            Named::new("cnp", "CNPs", Layer::Points(self.cnps, Shape::Triangle)),
        ];
        Panel {
            title: self.title,
            time: self.time,
            ticks: ticks(&self.height, |value| format!("+{}", label(value))),
            layers,
        }
    }
}
