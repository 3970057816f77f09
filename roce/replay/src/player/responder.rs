//! Our engine as the responder.

use roce_bth::{Aeth, Class, ExtHeader, ICRC_LEN, MAX_HEADER_LEN, NakCode, Packet, Syndrome};
use roce_verbs::{Completion, Instant, RecvWr, Sge, WcOpcode, WcStatus};

use super::Player;
use crate::{connection::Event, kind::Kind, model::read_packets};

/// Most responses of a READ that are looked for: more than memory has room for.
const MAX_RESPONSES: u32 = 1 << 20;

impl Player<'_> {
    /// Compares an answer of the captured side with ours.
    pub(super) fn they_answer(&mut self, index: usize) {
        let event = &self.connection.events[index];
        if self.settings.joined_late && self.msn_offset.is_none() {
            self.join(event);
        }
        let header = event.packet().header;
        let refused_again = header
            .aeth()
            .is_some_and(|a| a.syndrome == Syndrome::Nak(NakCode::PsnSequenceError))
            && self.not_ready == Some(header.bth.psn)
            && self.expected == self.not_ready;
        if let Some(Syndrome::Rnr(_)) = header.aeth().map(|a| a.syndrome) {
            self.not_ready = Some(header.bth.psn);
        }
        let (found, equal) = self.answers.match_one(event.body(), self.expected);
        for (kind, texts) in found {
            let kind = match kind {
                Kind::OnlyTheirAnswer if refused_again => Kind::GapAfterRnr,
                kind => kind,
            };
            self.differ(index, kind, texts);
        }
        if equal {
            self.same(index);
        }
        if self.answers.ready.is_empty() {
            self.answers_len = 0;
        }
    }

    /// Learns how many messages there were before the capture, from the first acknowledgement that both sent.
    fn join(&mut self, event: &Event) {
        let is_positive = |aeth: &Aeth| matches!(aeth.syndrome, Syndrome::Ack(_));
        let (packet, ready) = (event.packet(), self.answers.ready.front());
        let Some(theirs) = packet.header.aeth().filter(is_positive) else {
            return;
        };
        let whole = ready.map(|(body, _)| [&body[..], &[0; ICRC_LEN]].concat());
        let whole = whole.as_deref().and_then(|whole| Packet::parse(whole).ok());
        let ours = whole.filter(|ours| ours.header.bth.psn == packet.header.bth.psn);
        if let Some(ours) = ours.and_then(|ours| ours.header.aeth()).filter(is_positive) {
            self.msn_offset = Some(theirs.msn.offset_from(ours.msn));
            let ready: Vec<_> = self.answers.ready.drain(..).collect();
            self.answers.ready = ready.into_iter().map(|(b, d)| (self.with_msn(b), d)).collect();
        }
    }

    /// Gives ours a request that the captured side was sent.
    pub(super) fn get_request(&mut self, index: usize) {
        let event = &self.connection.events[index];
        let packet = event.packet();
        let (header, now) = (packet.header, self.now(event.at));
        let info = header.bth.opcode.info();
        let new = Some(header.bth.psn) == self.expected;
        let duplicate = self
            .expected
            .filter(|e| header.bth.psn.is_before(*e))
            .map(|_| header.bth.psn);
        let refusal = self.refusal(index);
        let original = self.preset(index);
        let takes = match info.class {
            Class::Send => info.position.starts(),
            Class::Write => info.has(ExtHeader::Imm),
            _ => false,
        };
        if new && takes && !matches!(refusal, Some(Syndrome::Rnr(_))) && self.qp.recv_queue_len() == 0 {
            self.post_receive(now, index);
        }
        if new && refusal.is_none() {
            self.model.execute(&packet, original);
            let n = match info.class {
                Class::ReadRequest => read_packets(header.reth().map_or(0, |r| r.dma_len), self.mtu),
                _ => 1,
            };
            self.expected = Some(header.bth.psn.add(n));
            if info.class == Class::Send {
                let before = self.incoming.take().filter(|_| !info.position.starts());
                self.incoming = Some([&before.unwrap_or_default(), packet.payload].concat());
            }
        } else if new && info.class == Class::Send {
            self.incoming = None;
        }
        let translated = self.model.translate(&packet);
        let mut buf = [0; MAX_HEADER_LEN];
        let given = Packet {
            header: translated.view(&mut buf),
            payload: packet.payload,
        };
        let (qp, mut ctx) = self.ctx(now);
        qp.handle_packet(&mut ctx, &given);
        self.poll(now, 0, duplicate);
        self.take_receives();
    }

    fn post_receive(&mut self, now: Instant, index: usize) {
        let sge = Sge {
            addr: self.receive.addr(),
            length: self.receive_len,
            lkey: self.receive.lkey(),
        };
        let (qp, mut ctx) = self.ctx(now);
        let posted = qp.post_recv(
            &mut ctx,
            &RecvWr {
                wr_id: index as u64,
                sges: &[sge],
            },
        );
        if let Err(e) = posted {
            self.differ(
                index,
                Kind::Answer,
                (None, Some(format!("nothing: no receive can be posted: {e}"))),
            );
        }
    }

    /// Compares what a receive got with the SEND's payload.
    fn take_receives(&mut self) {
        let mut done: Vec<Completion> = Vec::new();
        let _ = self.recv_cq.poll(&mut done, 16);
        for completion in done {
            if completion.status == WcStatus::Success && completion.opcode == WcOpcode::Recv {
                let mut bytes = vec![0; completion.byte_len as usize];
                let read = self.receive.read(0, &mut bytes);
                if self
                    .incoming
                    .as_ref()
                    .is_some_and(|incoming| read.is_err() || bytes != *incoming)
                {
                    let text = format!(
                        "the SEND that ends with frame {} was received with other bytes",
                        self.frame
                    );
                    self.outcome.wrong_memory.push(text);
                }
            }
        }
    }

    /// Returns how the captured side refused the request, if it did so before it got the same again.
    fn refusal(&self, index: usize) -> Option<Syndrome> {
        let psn = self.connection.events[index].psn();
        let until = self.index.next_request(psn, index).unwrap_or(usize::MAX);
        let answers = self.index.answers(self.connection, psn, index);
        answers
            .take_while(|(at, _)| *at < until)
            .filter_map(|(_, packet)| packet.header.aeth())
            .map(|a| a.syndrome)
            .find(|s| !matches!(s, Syndrome::Ack(_)))
    }

    /// Gives our memory what the captured responder answered with: READ responses, and an atomic's former value.
    fn preset(&mut self, index: usize) -> Option<u64> {
        let connection = self.connection;
        let header = connection.events[index].packet().header;
        let psn = header.bth.psn;
        match header.bth.opcode.info().class {
            Class::ReadRequest => {
                let reth = header.reth()?;
                let n = read_packets(reth.dma_len, self.mtu).min(MAX_RESPONSES);
                for nth in 0..n {
                    let mut answers = self.index.answers(connection, psn.add(nth), index);
                    let response = answers.find(|(_, p)| p.header.bth.opcode.info().class == Class::ReadResponse);
                    if let Some((_, packet)) = response {
                        let va = reth.va.wrapping_add(u64::from(nth) * self.mtu as u64);
                        self.model.preset(reth.rkey, va, packet.payload);
                    }
                }
                None
            }
            Class::Atomic if Some(psn) == self.expected => {
                let eth = header.atomic_eth()?;
                let (_, answer) = self.index.answers(connection, psn, index).next()?;
                let original = answer.header.atomic_ack()?;
                self.model.preset(eth.rkey, eth.va, &original.to_ne_bytes());
                Some(original)
            }
            _ => None,
        }
    }
}
