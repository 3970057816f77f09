//! Detection of interfaces that break trains of several packets.
//!
//! Segmentation in the hardware of some interfaces numbers the segments otherwise than Linux does. Then the ICRC of all but
//! the first packet of each train is wrong, and the peer drops them. It looks like loss, but always of the same packet: the
//! second of a train is the first that is sent again. So the second packet of one train at a time is a witness. Its
//! acknowledgement proves that trains arrive. If it is the first one to be sent again, it has failed; if the peer lacks
//! an earlier one, nothing is known. After [`FAILURES`] in a row, packets are sent one by one.

use roce_bth::{Class, Opcode, Psn, Qpn};
use roce_qp::TxKind;

/// Witnesses that must fail in a row: at 10 % random loss, one run in 10^10 does.
const FAILURES: u8 = 10;
/// Packets after which a witness without result is replaced.
const WITNESS_PACKETS: u64 = 4096;
/// Single packets after which trains are tried again: routes change.
const RETRY: u64 = 1 << 18;
/// Failures that end such a trial.
const RETRY_FAILURES: u8 = 3;

/// Statistics of the packets that one turn of a queue pair has staged.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Staging {
    packets: u64,
    /// First packet that was the second of a train.
    second: Option<(TxKind, Psn)>,
    /// First request, and first answer, that was sent again.
    resent: Option<Psn>,
    repeated: Option<Psn>,
    /// READs whose answer was begun.
    reads: u32,
}

impl Staging {
    /// Counts a packet, from its BTH on, that was staged as number `index` of its train.
    pub(crate) fn note(&mut self, kind: TxKind, index: usize, packet: &[u8]) {
        self.packets += 1;
        if kind == TxKind::Request && index != 1 {
            return;
        }
        let Some(&[opcode, .., p2, p1, p0]) = packet.first_chunk::<12>() else {
            return;
        };
        let psn = Psn::new(u32::from_be_bytes([0, p2, p1, p0]));
        match kind {
            TxKind::Retransmission => drop(self.resent.get_or_insert(psn)),
            TxKind::Repetition => drop(self.repeated.get_or_insert(psn)),
            TxKind::Request | TxKind::Response if index == 1 => drop(self.second.get_or_insert((kind, psn))),
            _ => {}
        }
        if kind == TxKind::Response {
            let info = Opcode::from_byte(opcode).map(Opcode::info);
            let begins = info.is_some_and(|i| i.class == Class::ReadResponse && i.position.starts());
            self.reads += u32::from(begins);
        }
    }
}

/// Second packet of a train, whose fate is awaited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Witness {
    qpn: Qpn,
    psn: Psn,
    answer: bool,
    /// Packets sent to the peer since.
    packets: u64,
    /// READs that the queue pair has begun to answer since.
    reads: u32,
}

/// State of trains towards one peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gso {
    proven: bool,
    failures: u8,
    witness: Option<Witness>,
    /// Single packets since trains were found not to arrive.
    off: Option<u64>,
}

impl Gso {
    /// Returns whether trains of several packets may be sent.
    pub(crate) fn may_send(&self) -> bool {
        self.off.is_none()
    }

    /// Returns whether trains are known to arrive as they were sealed.
    pub(crate) fn is_proven(&self) -> bool {
        self.proven
    }

    /// Records the packets staged by a reliable queue pair, whose peer has at most `max_reads` READs outstanding. Returns whether this
    /// has switched trains off.
    pub(crate) fn on_staged(&mut self, qpn: Qpn, staged: &Staging, max_reads: u32) -> bool {
        if let Some(single) = &mut self.off {
            *single += staged.packets;
            if *single >= RETRY {
                self.off = None;
                self.failures = FAILURES - RETRY_FAILURES;
            }
            return false;
        }
        let switched = self.judge(qpn, staged, max_reads);
        if self.witness.is_none() && !switched {
            self.witness = staged.second.map(|(kind, psn)| Witness {
                qpn,
                psn,
                answer: kind == TxKind::Response,
                packets: 0,
                reads: 0,
            });
        }
        switched
    }

    fn judge(&mut self, qpn: Qpn, staged: &Staging, max_reads: u32) -> bool {
        let Some(w) = &mut self.witness else { return false };
        w.packets += staged.packets;
        let again = match w.answer {
            true => staged.repeated,
            false => staged.resent,
        };
        if w.qpn == qpn {
            match again {
                Some(psn) if psn == w.psn => return self.failed(),
                Some(psn) if psn.is_before(w.psn) => self.witness = None,
                _ if w.answer => {
                    w.reads += staged.reads;
                    // The requester has its answer: otherwise it would not send so many other requests.
                    if w.reads > max_reads {
                        self.arrived();
                    }
                }
                _ => {}
            }
        }
        if self.witness.is_some_and(|w| w.packets > WITNESS_PACKETS) {
            self.witness = None;
        }
        false
    }

    /// Returns whether the witness is a packet of this queue pair.
    pub(crate) fn waits_for(&self, qpn: Qpn) -> bool {
        self.witness.is_some_and(|w| w.qpn == qpn)
    }

    /// Records that a queue pair's requests before `una` are acknowledged; `None`: none will be.
    pub(crate) fn on_acked(&mut self, qpn: Qpn, una: Option<Psn>) {
        let Some(w) = self.witness.filter(|w| w.qpn == qpn) else {
            return;
        };
        match una {
            None => self.witness = None,
            Some(una) if !w.answer && una.is_after(w.psn) => self.arrived(),
            Some(_) => {}
        }
    }

    fn arrived(&mut self) {
        self.proven = true;
        self.failures = 0;
        self.witness = None;
    }

    fn failed(&mut self) -> bool {
        self.witness = None;
        self.failures += 1;
        if self.failures < FAILURES {
            return false;
        }
        self.off = Some(0);
        self.proven = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Qpn = Qpn::new(7);
    const B: Qpn = Qpn::new(8);

    fn packet(opcode: Opcode, psn: u32) -> [u8; 12] {
        let [_, p2, p1, p0] = psn.to_be_bytes();
        [opcode as u8, 0, 0xff, 0xff, 0, 0, 0, 7, 0, p2, p1, p0]
    }

    /// A train of requests from a PSN on.
    fn train(psn: u32, n: u32) -> Staging {
        let mut staged = Staging::default();
        for i in 0..n {
            staged.note(TxKind::Request, i as usize, &packet(Opcode::RcWriteMiddle, psn + i));
        }
        staged
    }

    fn again(kind: TxKind, psn: u32) -> Staging {
        let mut staged = Staging::default();
        staged.note(kind, 0, &packet(Opcode::RcWriteMiddle, psn));
        staged
    }

    fn answers(psn: u32, n: u32) -> Staging {
        let mut staged = Staging::default();
        for i in 0..n {
            let opcode = if i == 0 {
                Opcode::RcReadResponseFirst
            } else {
                Opcode::RcReadResponseMiddle
            };
            staged.note(TxKind::Response, i as usize, &packet(opcode, psn + i));
        }
        staged
    }

    #[test]
    fn the_acknowledgement_of_a_second_packet_proves_trains() {
        let mut gso = Gso::default();
        gso.on_staged(A, &train(10, 4), 1);
        gso.on_acked(A, Some(Psn::new(11)));
        assert!(!gso.is_proven(), "the first alone tells nothing");
        gso.on_acked(B, Some(Psn::new(100)));
        assert!(!gso.is_proven(), "another queue pair's neither");
        gso.on_acked(A, Some(Psn::new(12)));
        assert!(gso.is_proven() && gso.may_send());
    }

    #[test]
    fn second_packets_that_are_always_lost_first_switch_it_off() {
        let mut gso = Gso::default();
        let mut psn = 0;
        for i in 1..=FAILURES {
            assert!(!gso.on_staged(A, &train(psn, 8), 1));
            // The first arrives, all others have to be sent again.
            gso.on_acked(A, Some(Psn::new(psn + 1)));
            assert_eq!(
                gso.on_staged(A, &again(TxKind::Retransmission, psn + 1), 1),
                i == FAILURES
            );
            psn += 8;
        }
        assert!(!gso.may_send());
    }

    #[test]
    fn what_is_lost_before_a_witness_does_not_count_against_it() {
        let mut gso = Gso::default();
        for i in 0..100 {
            gso.on_staged(A, &train(i * 8 + 1, 8), 1);
            gso.on_staged(A, &again(TxKind::Retransmission, i * 8), 1);
        }
        assert!(gso.may_send() && !gso.is_proven());
    }

    #[test]
    fn random_losses_do_not_add_up() {
        let mut gso = Gso::default();
        for i in 0..100 {
            gso.on_staged(A, &train(i * 8, 8), 1);
            match i % 9 {
                8 => gso.on_acked(A, Some(Psn::new(i * 8 + 8))),
                _ => drop(gso.on_staged(A, &again(TxKind::Retransmission, i * 8 + 1), 1)),
            }
        }
        assert!(gso.may_send() && gso.is_proven());
    }

    #[test]
    fn answers_are_judged_by_what_is_asked_for_again() {
        let mut gso = Gso::default();
        for i in 0..u32::from(FAILURES) {
            assert!(gso.may_send());
            gso.on_staged(A, &answers(i * 8, 8), 4);
            gso.on_staged(A, &again(TxKind::Repetition, i * 8 + 1), 4);
        }
        assert!(!gso.may_send());
        let mut gso = Gso::default();
        for i in 0..5 {
            assert!(!gso.is_proven());
            gso.on_staged(A, &answers(i * 8, 8), 4);
        }
        gso.on_staged(A, &answers(40, 8), 4);
        assert!(
            gso.is_proven(),
            "its peer would not ask for a fifth before it has the first"
        );
    }

    #[test]
    fn a_witness_of_which_nothing_is_heard_makes_room() {
        let mut gso = Gso::default();
        gso.on_staged(A, &answers(0, 8), 4);
        for i in 0..WITNESS_PACKETS {
            gso.on_staged(B, &train(i as u32 * 2, 2), 4);
        }
        assert!(gso.waits_for(B));
        gso.on_acked(B, None);
        assert!(!gso.waits_for(B) && !gso.is_proven());
    }

    #[test]
    fn after_many_single_packets_trains_get_another_chance() {
        let mut gso = Gso {
            off: Some(0),
            ..Gso::default()
        };
        let mut one = Staging::default();
        one.note(TxKind::Request, 0, &packet(Opcode::RcWriteOnly, 1));
        for _ in 0..RETRY {
            assert!(!gso.may_send());
            gso.on_staged(A, &one, 1);
        }
        for i in 0..u32::from(RETRY_FAILURES) {
            assert!(gso.may_send());
            gso.on_staged(A, &train(i * 8, 8), 1);
            gso.on_staged(A, &again(TxKind::Retransmission, i * 8 + 1), 1);
        }
        assert!(!gso.may_send());
    }
}
