//! End of a replay: what is left, and what memory must contain.

use std::collections::BTreeMap;

use super::{Outcome, Player};
use crate::{compare::align, kind::Kind};
use roce_bth::Class;

impl Player<'_> {
    /// Compares the requests of both sides, and what memory contains.
    pub(super) fn finish(mut self) -> Outcome {
        let last = self.connection.events.len().saturating_sub(1);
        for (kind, texts) in self.answers.rest() {
            self.differ(last, kind, texts);
        }
        // A message that nobody refused and that breaks off goes on behind the capture.
        let ends_early = self.settings.ends_early || self.messages.breaks_off && !self.asking.is_refused();
        if !ends_early {
            // Nothing comes any more: ours has nothing to send either, but what silence makes it repeat.
            self.poll(self.now(self.connection.events[last].at), usize::MAX, None);
        }
        let aligned = align(&self.sent[1], &self.sent[0]);
        for mut difference in aligned.differences {
            let only_theirs = matches!(difference.kind, Kind::OnlyTheirRequest | Kind::OnlyTheirRepeat);
            if only_theirs && self.asking.refused_before(difference.frame) {
                difference.kind = Kind::AfterRefusal;
            }
            self.outcome.differences.push(difference);
        }
        for index in 0..self.connection.events.len() {
            if aligned.equal.contains(&index) {
                self.same(index);
            }
        }
        if !ends_early {
            self.drain(last);
        }
        self.take_sends();
        self.outcome.messages_before = self.msn_offset.unwrap_or(0);
        self.outcome.wrong_memory.extend(self.model.wrong());
        self.check_reads();
        self.outcome
    }

    /// Lets retries run out, if anything is left.
    fn drain(&mut self, last: usize) {
        let mut now = self.now(self.connection.events[last].at);
        for _ in 0..10_000 {
            let Some(at) = self.qp.next_timeout() else { break };
            now = now.max(at);
            let (qp, mut ctx) = self.ctx(now);
            qp.handle_timeout(&mut ctx);
            self.poll(now, usize::MAX, None);
        }
    }

    /// Compares what READs brought with what the captured responses carried.
    fn check_reads(&mut self) {
        let mut responses = BTreeMap::<u32, Vec<u8>>::new();
        for event in self.connection.events.iter().filter(|e| e.sender != self.side) {
            let packet = event.packet();
            if packet.header.bth.opcode.info().class == Class::ReadResponse {
                responses.insert(packet.header.bth.psn.value(), packet.payload.to_vec());
            }
        }
        for (at, len, psn, packets) in std::mem::take(&mut self.reads) {
            let bytes: Vec<u8> = (0..packets)
                .filter_map(|i| responses.get(&psn.add(i).value()))
                .flatten()
                .copied()
                .collect();
            let mut got = vec![0; len];
            let read = self.local.read(at, &mut got);
            if bytes.len() == len && (read.is_err() || got != bytes) {
                let text = format!("the READ at PSN {} brought other bytes", psn.value());
                self.outcome.wrong_memory.push(text);
            }
        }
    }
}
