//! Conversation: two queue pairs and what they send each other.

use std::net::IpAddr;

use roce_bth::Service;
use serde::Serialize;

use super::{
    context::{Context, PathMtu},
    direction::{Direction, wrap},
};
use crate::{finding::Finding, rule::Rule, severity::Severity, verdict::Verdict};

/// Time that a capture must go on after a request for it to count as unanswered, nanoseconds.
const TIMEOUT_NS: u64 = 2_000_000_000;
/// Packets that experienced congestion after which a notification is due.
const MARKED: u64 = 64;
/// Largest value of a retry counter.
const MAX_RETRIES: u32 = 7;

/// Endpoint of a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Endpoint {
    /// Address.
    pub addr: IpAddr,
    /// Queue pair; `None`: no packet to it was recognised.
    pub qpn: Option<u32>,
}

/// How the two queue pairs of a conversation are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The connection manager's messages name them.
    ConnectionManager,
    /// The user named them.
    Stated,
    /// Their packets fit together.
    Packets,
}

/// Two queue pairs and what they send each other.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) service: Service,
    pub(super) origin: Origin,
    /// The first one sent the first packet, or the connection request.
    pub(super) ends: [Endpoint; 2],
    /// Directions by the requester's endpoint.
    pub(super) directions: [Direction; 2],
    pub(super) mtu: PathMtu,
    /// READs and atomics that each endpoint may have outstanding.
    pub(super) depth: [Option<u8>; 2],
    pub(super) name: Option<String>,
    /// Packets by the sender's endpoint.
    pub(super) packets: [u64; 2],
    /// UDP source port of each endpoint's last packet.
    pub(super) ports: [Option<u16>; 2],
    /// Packets that experienced congestion, and notifications, likewise.
    pub(super) marked: [u64; 2],
    pub(super) cnps: [u64; 2],
    pub(super) first_ns: u64,
    pub(super) last_ns: u64,
    pub(super) last_frame: u64,
    pub(super) disconnected: Option<u64>,
    pub(super) errors: u64,
    pub(super) warnings: u64,
    /// Conversation that it was found to be a part of.
    pub(super) merged: Option<usize>,
    /// Its end was judged.
    pub(super) closed: bool,
}

impl Conversation {
    pub(super) fn new(service: Service, origin: Origin, ends: [Endpoint; 2]) -> Self {
        Self {
            service,
            origin,
            ends,
            directions: [Direction::default(), Direction::default()],
            mtu: PathMtu::Unknown,
            depth: [None; 2],
            name: None,
            packets: [0; 2],
            ports: [None; 2],
            marked: [0; 2],
            cnps: [0; 2],
            first_ns: 0,
            last_ns: 0,
            last_frame: 0,
            disconnected: None,
            errors: 0,
            warnings: 0,
            merged: None,
            closed: false,
        }
    }

    /// Returns whether both queue pairs are known.
    pub(super) fn is_paired(&self) -> bool {
        self.ends.iter().all(|end| end.qpn.is_some())
    }

    /// Returns how many packets the capture misses, as far as answers show it.
    pub(super) fn missed(&self) -> u64 {
        self.directions.iter().map(|d| d.missed).sum()
    }

    pub(super) fn count(&mut self, findings: &[Finding]) {
        for finding in findings {
            match finding.severity {
                Severity::Error => self.errors += 1,
                Severity::Warning => self.warnings += 1,
                Severity::Note => {}
            }
        }
    }

    /// Judges what the end of the capture, or of the conversation, shows.
    pub(super) fn close(&mut self, index: usize, now_ns: u64, findings: &mut Vec<Finding>) {
        if std::mem::replace(&mut self.closed, true) || self.merged.is_some() {
            return;
        }
        let (before, missed) = (findings.len(), self.missed());
        for requester in 0..2 {
            let peers = (self.ends[requester].addr, self.ends[1 - requester].addr);
            let mut mtu = self.mtu;
            let d = &mut self.directions[requester];
            let mut cx = Context {
                conversation: index,
                mtu: &mut mtu,
                depth: None,
                room: 0,
                disconnected: None,
                missed,
                findings,
            };
            if self.service == Service::Rc || self.service == Service::Xrc {
                end_of_direction(d, peers, now_ns, &mut cx);
            }
            check_congestion(
                self.marked[requester],
                self.cnps[1 - requester],
                peers,
                self.last_frame,
                &mut cx,
            );
            d.spans = super::spans::Spans::default();
        }
        let own = findings[before..].to_vec();
        self.count(&own);
    }

    /// Returns checks that were not possible, in words; the second of each pair says whether the verdict depends on it.
    pub(super) fn unknown(&self) -> Vec<(String, bool)> {
        let mut unknown = vec![];
        let reliable = matches!(self.service, Service::Rc | Service::Xrc);
        if reliable && (self.packets.contains(&0) || !self.is_paired()) {
            unknown.push(("only one direction is there".to_owned(), true));
        }
        let cut: u64 = self.directions.iter().map(|d| d.cut).sum();
        if cut > 0 {
            unknown.push((format!("{cut} packets are cut"), true));
        }
        let unread: u64 = self.directions.iter().map(|d| d.unread_frames).sum();
        if unread > 0 {
            unknown.push((format!("{unread} frames with several packets are cut"), true));
        }
        let missed = self.missed();
        if missed > 0 {
            let place = if unread > 0 {
                "in those frames or missing"
            } else {
                "missing"
            };
            let text = format!("{missed} packets are {place} in the capture, but were answered");
            unknown.push((text, true));
        }
        if self.origin == Origin::Packets && reliable {
            unknown.push(("how the connection began".to_owned(), false));
        }
        unknown
    }

    pub(super) fn verdict(&self) -> Verdict {
        if self.errors > 0 {
            Verdict::Bad
        } else if self.unknown().iter().any(|(_, decides)| *decides) {
            Verdict::NotChecked
        } else {
            Verdict::Good
        }
    }
}

fn end_of_direction(d: &Direction, peers: (IpAddr, IpAddr), now_ns: u64, cx: &mut Context<'_>) {
    let backwards = (peers.1, peers.0);
    if let Some(beyond) = d.beyond.filter(|_| !d.damaged && cx.missed == 0)
        && let Some(next) = d.next
    {
        // The capture may have missed the request, unless the requester goes on as if it had not sent it.
        let far = beyond.psn - next >= 1 << 16;
        if beyond.doubted || far {
            let text = format!("{} of PSN {}, which was never sent", beyond.what, wrap(beyond.psn));
            cx.find_at(Rule::AckGhost, beyond.frame, backwards, text);
        }
    }
    if let Some(rnr) = d.rnr.filter(|rnr| rnr.psn >= d.acked) {
        let text = format!(
            "no receive was posted for PSN {} after {} RNR NAKs",
            wrap(rnr.psn),
            d.rnrs.1
        );
        cx.find_at(Rule::RnrUnresolved, rnr.frame, backwards, text);
        return;
    }
    // What was asked for may have been lost before the capture, and lost again each time it was repeated: where others were, by chance in
    // as many rounds as the retry counter allows.
    let rounds = if d.is_lossy { 1 + MAX_RETRIES } else { 2 };
    if let Some(nak) = d.gap_nak.filter(|nak| nak.psn >= d.acked)
        && let Some(hole) = d
            .spans
            .find(nak.psn)
            .and_then(|at| d.spans.get(at))
            .filter(|span| span.is_hole())
        && d.spans
            .from(nak.psn)
            .any(|span| !span.is_hole() && span.last_ns > nak.time_ns && span.sent > rounds)
    {
        let text = format!(
            "PSN {} was never sent; the peer asked for it in frame {}",
            wrap(nak.psn),
            nak.frame
        );
        cx.find_at(Rule::PsnSkipped, hole.frame, peers, text);
    }
    if d.refused.is_some() {
        return;
    }
    let silent = d.spans.from(d.acked).find(|span| {
        let waited = now_ns.saturating_sub(span.last_ns);
        span.asks && (span.sent > 2 || waited >= TIMEOUT_NS)
    });
    if let Some(span) = silent {
        let text = format!(
            "{} with PSN {} of frame {} was sent {} times in {:.1} s and never answered",
            span.opcode.map_or("a request", |opcode| opcode.info().name),
            wrap(span.start),
            span.frame,
            span.sent,
            span.last_ns.saturating_sub(span.first_ns) as f64 / 1e9
        );
        cx.find_at(Rule::NoAnswer, span.frame, peers, text);
    }
}

fn check_congestion(marked: u64, cnps: u64, peers: (IpAddr, IpAddr), frame: u64, cx: &mut Context<'_>) {
    if marked >= MARKED && cnps == 0 {
        let text = format!("{marked} packets experienced congestion, and no notification came back");
        cx.find_at(Rule::EcnUnanswered, frame, peers, text);
    }
}
