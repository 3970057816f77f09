//! First reading of a capture: conversations, and the extent of each.

use std::collections::BTreeMap;

use roce_pcap::{
    Flow, Flows,
    judge::{Endpoint, Event, EventKind, Judge},
};

use super::time::Pauses;

/// Conversations whose PSNs are remembered, as many as [`Flows`] counts.
const MAX: usize = roce_pcap::MAX_FLOWS / 2;

/// Numbers from the first to behind the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    pub(super) from: i64,
    pub(super) to: i64,
}

impl Extent {
    fn add(known: &mut Option<Self>, from: i64, to: i64) {
        *known = Some(match *known {
            Some(known) => Self {
                from: known.from.min(from),
                to: known.to.max(to),
            },
            None => Self { from, to },
        });
    }
}

/// PSNs of one endpoint's requests.
#[derive(Clone, Copy, Default)]
struct Psns {
    /// Of requests and READ responses.
    sent: Option<Extent>,
    /// Of other answers, which may name PSNs that were never sent.
    answered: Option<Extent>,
}

/// Extent of a conversation.
#[derive(Clone, Default)]
struct Extents {
    psns: [Psns; 2],
    pauses: Pauses,
}

/// Conversations of a capture.
#[derive(Default)]
pub(super) struct Overview {
    flows: Flows,
    extents: BTreeMap<usize, Extents>,
}

/// Conversation to draw.
pub(super) struct Chosen {
    pub(super) index: usize,
    pub(super) service: &'static str,
    pub(super) name: Option<String>,
    pub(super) ends: [Endpoint; 2],
    /// Time of its first and last packet, nanoseconds since 1970.
    pub(super) time_ns: [u64; 2],
    /// Pauses to cut out of the picture, nanoseconds since the first packet.
    pub(super) pauses: Vec<(u64, u64)>,
    /// PSNs of each endpoint's requests.
    pub(super) psns: [Option<Extent>; 2],
    /// Statistics of each direction.
    pub(super) flows: [Option<Flow>; 2],
}

/// Returns the endpoint whose request a packet is, or answers.
pub(super) const fn requester(event: &Event) -> usize {
    match event.kind {
        EventKind::Request { .. } | EventKind::Datagram | EventKind::Unknown => event.sender,
        _ => 1 - event.sender,
    }
}

impl Overview {
    /// Takes a packet.
    pub(super) fn event(&mut self, event: &Event) {
        self.flows.event(event);
        if self.extents.len() >= MAX && !self.extents.contains_key(&event.conversation) {
            return;
        }
        let extents = self.extents.entry(event.conversation).or_default();
        extents.pauses.packet(event.time_ns);
        let psns = &mut extents.psns[requester(event)];
        match event.kind {
            EventKind::Request { psn, psns: count, .. } => Extent::add(&mut psns.sent, psn, psn + count),
            EventKind::ReadResponse { psn, .. } => Extent::add(&mut psns.sent, psn, psn + 1),
            EventKind::Ack { psn, .. } | EventKind::Nak { psn, .. } | EventKind::Rnr { psn, .. } => {
                Extent::add(&mut psns.answered, psn, psn + 1);
            }
            EventKind::Cnp | EventKind::Datagram | EventKind::Unknown => {}
        }
    }

    /// Chooses a conversation, by default the one with most packets.
    pub(super) fn choose(self, judge: &Judge, index: Option<usize>) -> Result<Chosen, String> {
        let all = judge.conversations();
        let summary = match index {
            Some(index) => all.iter().find(|summary| summary.index == index),
            None => all
                .iter()
                .rev()
                .max_by_key(|summary| summary.packets.iter().sum::<u64>()),
        };
        let summary = summary.ok_or_else(|| match index {
            Some(index) => format!("there is no conversation {index}: `ferroce pcap flows` lists them"),
            None => "no RoCEv2 conversation".to_owned(),
        })?;
        let mut psns = [Psns::default(); 2];
        let mut pauses = vec![];
        for (known, extents) in &self.extents {
            if judge.conversation_of(*known) == summary.index {
                pauses.push(&extents.pauses);
            }
            for (end, of_end) in extents.psns.iter().enumerate() {
                let (whole, end) = judge.endpoint_of(*known, end);
                for (known, added) in [
                    (&mut psns[end].sent, of_end.sent),
                    (&mut psns[end].answered, of_end.answered),
                ] {
                    if let Some(added) = added.filter(|_| whole == summary.index) {
                        Extent::add(known, added.from, added.to);
                    }
                }
            }
        }
        let [first, last] = summary.time_ns;
        let cut = match pauses.as_slice() {
            [pauses] => pauses.to_cut(last.saturating_sub(first)),
            // In a pause of one part the other may have packets.
            _ => vec![],
        };
        let since_first = |(from, to): (u64, u64)| (from.saturating_sub(first), to.saturating_sub(first));
        let pauses = cut.into_iter().map(since_first).collect();
        let mut flows = self.flows.finish(judge).flows;
        flows.retain(|flow| flow.conversation == summary.index);
        let flow = |end: usize| flows.iter().find(|flow| flow.src == summary.ends[end]).cloned();
        Ok(Chosen {
            index: summary.index,
            service: summary.service,
            name: summary.name.clone(),
            ends: summary.ends,
            time_ns: summary.time_ns,
            pauses,
            psns: psns.map(|psns| psns.sent.or(psns.answered)),
            flows: [flow(0), flow(1)],
        })
    }
}

impl Chosen {
    /// Returns a packet of this conversation, with its sender's index in it and its time since the conversation's first packet.
    pub(super) fn event(&self, judge: &Judge, event: &Event) -> Option<Event> {
        let (conversation, sender) = judge.endpoint_of(event.conversation, event.sender);
        (conversation == self.index).then(|| Event {
            conversation,
            sender,
            time_ns: event.time_ns.saturating_sub(self.time_ns[0]),
            ..*event
        })
    }

    /// Nanoseconds from its first to its last packet.
    pub(super) fn duration_ns(&self) -> u64 {
        self.time_ns[1].saturating_sub(self.time_ns[0])
    }
}
