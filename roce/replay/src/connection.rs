//! Reliable connection of a capture, as far as it can be replayed.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use roce_bth::{Class, ICRC_LEN, NakCode, Opcode, Packet, Psn, Syndrome};
use roce_pcap::judge::Endpoint;
use roce_verbs::Instant;

use crate::{error::Error, model::read_packets};

/// RC packet of a capture.
#[derive(Clone, Debug)]
pub struct Event {
    /// The frame's number in the capture, from 1.
    pub frame: u64,
    /// When it was captured, from the capture's first frame on.
    pub at: Instant,
    /// Index of the endpoint that sent it.
    pub sender: usize,
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: SocketAddr,
    /// IPv4 Identification; `None`: one of several packets in a frame.
    pub identification: Option<u16>,
    /// BTH to ICRC.
    pub bytes: Vec<u8>,
}

impl Event {
    /// Returns the packet.
    ///
    /// # Panics
    /// Never for events of [`read`](crate::read()), which parses them.
    pub fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.bytes).expect("parsed when it was read")
    }

    /// Returns its bytes without the ICRC.
    pub fn body(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - ICRC_LEN]
    }

    pub(crate) fn psn(&self) -> Psn {
        self.packet().header.bth.psn
    }

    /// Returns whether it is a request (else it is an answer).
    pub fn is_request(&self) -> bool {
        is_request(self.packet().header.bth.opcode)
    }
}

/// Reliable connection: both ends, and its packets in the order of the capture.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Index of the conversation in the capture's report.
    pub index: usize,
    /// The two queue pairs.
    pub ends: [Endpoint; 2],
    /// Path MTU, bytes; `None`: no packet shows it.
    pub mtu: Option<usize>,
    /// Whether the connection manager's messages are in the capture, so that the connection is there from its beginning.
    pub from_start: bool,
    /// Whether messages that began before the capture were left out.
    pub is_trimmed: bool,
    /// Its packets.
    pub events: Vec<Event>,
    /// Why it can't be replayed; then events may be missing.
    pub lack: Option<String>,
}

/// Returns whether a packet is a request (else it is an answer).
pub fn is_request(opcode: Opcode) -> bool {
    matches!(
        opcode.info().class,
        Class::Send | Class::Write | Class::ReadRequest | Class::Atomic | Class::AtomicWrite | Class::Flush
    )
}

/// Returns the lower of two PSNs.
pub(crate) fn lower(a: Psn, b: Psn) -> Psn {
    if b.is_before(a) { b } else { a }
}

impl Connection {
    /// Returns the endpoint with this address; of two with the same one the first.
    pub fn side(&self, addr: IpAddr) -> Option<usize> {
        self.ends.iter().position(|end| end.addr == addr)
    }

    /// Adds packets with a wrong ICRC that did not come again: their receiver must have taken them.
    pub(crate) fn add_accepted(&mut self, damaged: Vec<Event>) {
        if damaged.is_empty() {
            return;
        }
        let key = |e: &Event| (e.sender, e.is_request(), e.psn().value());
        let intact: BTreeSet<_> = self.events.iter().map(key).collect();
        self.events
            .extend(damaged.into_iter().filter(|e| !intact.contains(&key(e))));
        self.events.sort_by_key(|e| e.frame);
    }

    /// Removes what belongs to messages that began before the capture. Returns whether there was any.
    pub(crate) fn trim(&mut self) -> bool {
        let before = self.events.len();
        for requester in 0..2 {
            let is_own = |e: &Event| e.is_request() == (e.sender == requester);
            let starts = |e: &Event| e.is_request() && e.packet().header.bth.opcode.info().position.starts();
            if self.events.iter().find(|e| is_own(e)).is_none_or(starts) {
                continue;
            }
            // The lowest: the very first packet may have been lost.
            let all = self.events.iter().filter(|e| is_own(e) && starts(e));
            let first = all.map(Event::psn).reduce(lower);
            let stays = |e: &Event| first.is_some_and(|first| !e.psn().is_before(first));
            self.events.retain(|e| !is_own(e) || stays(e));
        }
        self.events.len() < before
    }

    /// Checks that the capture has the packets that a replay in place of a side needs.
    ///
    /// # Errors
    /// The error says what it lacks.
    pub(crate) fn check(&self, side: usize, mtu: usize) -> Result<(), Error> {
        if let Some(lack) = &self.lack {
            return Err(Error(lack.clone()));
        }
        let is_silent = |side: usize| self.events.iter().all(|e| e.sender != side);
        // A peer that is gone answers nothing, and requests are repeated.
        let mut seen = BTreeSet::new();
        let mut repeats = || {
            let mut requests = self.events.iter().filter(|e| e.sender == side && e.is_request());
            requests.any(|e| !seen.insert(e.psn().value()))
        };
        let silent = [side, 1 - side].into_iter().find(|side| is_silent(*side));
        if let Some(silent) = silent.filter(|silent| *silent == side || !repeats()) {
            return Err(Error(format!(
                "the capture has no packet from {}: both directions are needed",
                self.ends[silent].addr
            )));
        }
        (0..2).try_for_each(|responder| self.check_answers(responder, responder == side, mtu))
    }

    /// Checks that requests are there that a side has acknowledged; `view`: and that the capture was taken at that side, as far as its
    /// answers tell.
    fn check_answers(&self, responder: usize, view: bool, mtu: usize) -> Result<(), Error> {
        // PSNs from `next` on that were seen, counted from the first one.
        let asked = |e: &&Event| e.sender != responder && e.is_request();
        let first = self.events.iter().filter(asked).map(Event::psn).reduce(lower);
        let (mut next, mut seen) = (0, BTreeSet::new());
        let (mut not_ready, mut response) = (None, None);
        // The capture may have the missing packet before the report, which takes a while.
        let mut has_gap = false;
        for event in &self.events {
            let header = event.packet().header;
            let psn = header.bth.psn;
            if event.sender != responder && event.is_request() {
                let from = first.map_or(0, |first| psn.offset_from(first));
                let n = match header.bth.opcode.info().class {
                    Class::ReadRequest => read_packets(header.reth().map_or(0, |r| r.dma_len), mtu),
                    _ => 1,
                };
                // Further behind than ahead: sent before, or repeated.
                if from < HALF {
                    has_gap |= from > next;
                    seen.insert((from, from.saturating_add(n)));
                }
                while let Some(&(from, to)) = seen.first().filter(|(from, _)| *from <= next) {
                    next = next.max(to);
                    seen.remove(&(from, to));
                }
                continue;
            }
            if event.sender != responder || event.is_request() {
                continue;
            }
            let at = first.map_or(0, |first| psn.offset_from(first));
            match header.aeth().map(|aeth| aeth.syndrome) {
                Some(Syndrome::Rnr(_)) => not_ready = Some(psn),
                Some(Syndrome::Nak(NakCode::PsnSequenceError)) if view && !has_gap && not_ready != Some(psn) => {
                    return Err(Error(format!(
                        "frame {} reports PSN {psn} as missing, but the capture has no gap: it was not taken at this side",
                        event.frame
                    )));
                }
                Some(Syndrome::Ack(_)) | None if first.is_none() || (next..HALF).contains(&at) => {
                    return Err(Error(format!(
                        "frame {} acknowledges PSN {psn}, but not all requests before it are in the capture",
                        event.frame
                    )));
                }
                _ => {}
            }
            let info = header.bth.opcode.info();
            if info.class == Class::ReadResponse {
                let follows = info.position.starts() || response.is_none_or(|before: Psn| before.next() == psn);
                if view && !follows {
                    return Err(Error(format!(
                        "before frame {} responses of this READ are missing: the capture was not taken at this side",
                        event.frame
                    )));
                }
                response = (!info.position.ends()).then_some(psn);
            }
        }
        Ok(())
    }
}

/// Half of the PSNs.
const HALF: u32 = 1 << 23;
