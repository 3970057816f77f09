//! One request or message.

use std::{fmt, io::Read, ops::RangeInclusive};

use ferroce_dissect::ExchangeId;
use roce_pcap::{
    Capture, Survey,
    judge::{Event, EventKind},
};
use serde::Serialize;

use super::reading::{Packets, Part, Reading};

/// Packets of one request or message.
pub(super) enum One {
    /// Request of a service that is known, with its answer.
    Exchange(ExchangeId),
    /// Message of a queue pair, by its unwrapped PSNs.
    Message {
        conversation: usize,
        /// Index of the endpoint that asks.
        requester: usize,
        psns: RangeInclusive<i64>,
        /// PSN of the acknowledgement that covers its end: more than the last where several messages are acknowledged at once.
        acked: Option<i64>,
    },
}

/// PSN of an answer.
const fn answered(event: &Event) -> Option<i64> {
    match event.kind {
        EventKind::ReadResponse { psn, .. }
        | EventKind::Ack { psn, .. }
        | EventKind::Nak { psn, .. }
        | EventKind::Rnr { psn, .. } => Some(psn),
        _ => None,
    }
}

impl One {
    fn of(part: &Part) -> Option<Self> {
        if let Some(id) = part.dissection.as_ref().and_then(|dissection| dissection.exchange) {
            return Some(Self::Exchange(id));
        }
        let event = part.event?;
        let (requester, psn) = match event.kind {
            EventKind::Request { psn, .. } => (event.sender, psn),
            _ => (1 - event.sender.min(1), answered(&event)?),
        };
        Some(Self::Message {
            conversation: event.conversation,
            requester,
            psns: psn..=psn,
            acked: None,
        })
    }

    /// Returns whether a packet belongs to it.
    pub(super) fn has(&self, part: &Part) -> bool {
        match self {
            Self::Exchange(id) => part.dissection.as_ref().is_some_and(|d| d.exchange == Some(*id)),
            Self::Message {
                conversation,
                requester,
                psns,
                acked,
            } => part.event.is_some_and(|event| {
                let is_part = match (event.sender == *requester, event.kind) {
                    (true, EventKind::Request { psn, .. }) => psns.contains(&psn),
                    (true, _) => false,
                    (false, _) => answered(&event).is_some_and(|psn| psns.contains(&psn) || Some(psn) == *acked),
                };
                event.conversation == *conversation && is_part
            }),
        }
    }
}

/// Finds the request or message that a frame belongs to.
pub(super) fn find<R: Read>(survey: &Survey, capture: &mut Capture<R>, wanted: u64) -> Result<One, String> {
    let mut reading = Reading::new(survey.reviewer());
    while let Some(Ok(frame)) = capture.next_frame() {
        let packets = reading.frame(&frame);
        if frame.index == wanted {
            let one = packets.parts.iter().find_map(One::of);
            return one.ok_or_else(|| format!("frame {wanted} belongs to no request or message"));
        }
    }
    Err(format!("there is no frame {wanted}"))
}

/// Finds the first and last PSN of a message, and the acknowledgement of its end.
pub(super) fn span<R: Read>(survey: &Survey, capture: &mut Capture<R>, one: One) -> One {
    let One::Message {
        conversation,
        requester,
        psns,
        ..
    } = one
    else {
        return one;
    };
    let mut span = Span::new(*psns.start());
    let mut reading = Reading::new(survey.reviewer());
    while let Some(Ok(frame)) = capture.next_frame() {
        let packets = reading.frame(&frame);
        let events = packets.parts.iter().filter_map(|part| part.event);
        for event in events.filter(|event| event.conversation == conversation) {
            span.add(&event, event.sender == requester);
        }
    }
    One::Message {
        conversation,
        requester,
        psns: span.first..=span.last.unwrap_or(span.wanted),
        acked: span.acked,
    }
}

/// Search for the ends of a message.
struct Span {
    /// PSN in it.
    wanted: i64,
    first: i64,
    last: Option<i64>,
    acked: Option<i64>,
    /// The next request packet that is new begins a message.
    begins: bool,
}

impl Span {
    const fn new(wanted: i64) -> Self {
        Self {
            wanted,
            first: wanted,
            last: None,
            acked: None,
            begins: true,
        }
    }

    fn add(&mut self, event: &Event, asks: bool) {
        match event.kind {
            EventKind::Request {
                psn,
                psns,
                ends,
                repeated: false,
                ..
            } if asks => {
                if self.begins && psn <= self.wanted {
                    self.first = psn;
                }
                self.begins = ends;
                let end = psn + psns - 1;
                if ends && end >= self.wanted {
                    self.last.get_or_insert(end);
                }
            }
            EventKind::ReadResponse { psn, .. } | EventKind::Ack { psn, .. }
                if !asks && self.last.is_some_and(|last| psn >= last) =>
            {
                self.acked.get_or_insert(psn);
            }
            _ => {}
        }
    }
}

/// Numbers of a request or message.
#[derive(Serialize)]
pub(super) struct Total {
    #[serde(skip_serializing_if = "Option::is_none")]
    exchange: Option<u64>,
    /// From the first packet to the last of the other side.
    latency_ns: Option<u64>,
    packets: u64,
    retransmissions: u64,
    #[serde(skip)]
    first: Option<(u64, std::net::IpAddr)>,
}

impl Total {
    pub(super) const fn new(one: &One) -> Self {
        Self {
            exchange: match one {
                One::Exchange(id) => Some(id.0),
                One::Message { .. } => None,
            },
            latency_ns: None,
            packets: 0,
            retransmissions: 0,
            first: None,
        }
    }

    pub(super) fn add(&mut self, packets: &Packets, part: &Part) {
        let Some(report) = packets.report() else { return };
        self.packets += 1;
        self.retransmissions += u64::from(part.is_repeated());
        let (began, asker) = *self.first.get_or_insert((packets.time_ns, report.src.ip()));
        if report.src.ip() != asker {
            self.latency_ns = Some(packets.time_ns.saturating_sub(began));
        }
    }
}

/// `latency 1.824 ms, 11 packets, 0 retransmissions`
impl fmt::Display for Total {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.latency_ns {
            Some(ns) => write!(f, "latency {:.3} ms", ns as f64 / 1e6)?,
            None => write!(f, "no answer")?,
        }
        write!(
            f,
            ", {} packets, {} retransmissions",
            self.packets, self.retransmissions
        )
    }
}
