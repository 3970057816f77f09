//! Order on the wire: no message leaves ahead of the acknowledgement of what its program has received. Random programs, from seeds.

use std::time::Duration;

use roce_bth::{Class, Header, Packet, Position, Psn, Syndrome};
use roce_verbs::{Mtu, SendOp};

use crate::harness::*;

const SEEDS: u64 = 400;
const STEPS: u32 = 120;
const LONG: usize = 40 * 1024;

/// Numbers of a linear congruential generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % n
    }
}

/// Checks what one side sends.
#[derive(Default)]
struct Order {
    /// Newest PSN that completed a receive of this side's program.
    received: Option<Psn>,
    /// Newest PSN that this side has acknowledged, and that it has sent.
    acknowledged: Option<Psn>,
    sent: Option<Psn>,
}

/// Whether `a` comes after `b`.
fn is_after(a: Psn, b: Option<Psn>) -> bool {
    b.is_none_or(|b| matches!(a.value().wrapping_sub(b.value()) & 0x00ff_ffff, 1..0x0080_0000))
}

impl Order {
    fn check(&mut self, header: &Header, seed: u64) {
        let info = header.bth.opcode.info();
        let psn = header.bth.psn;
        let acknowledges = header.aeth.is_some_and(|a| matches!(a.syndrome, Syndrome::Ack(_)));
        if acknowledges && is_after(psn, self.acknowledged) {
            self.acknowledged = Some(psn);
        }
        if matches!(info.class, Class::Send) && is_after(psn, self.sent) {
            self.sent = Some(psn);
            let overtakes = self.received.is_some_and(|r| is_after(r, self.acknowledged));
            assert!(
                !overtakes,
                "seed {seed}: {psn:?} overtakes the acknowledgement of {:?}",
                self.received
            );
        }
    }
}

/// Carries what one side sends to the other one.
fn carry(from: &mut Side, to: &mut Side, (sends, receives): (&mut Order, &mut Order), seed: u64) {
    for (_, bytes) in from.drain() {
        let header = Header::from(Packet::parse(&bytes).unwrap().header);
        sends.check(&header, seed);
        to.handle(&bytes);
        let info = header.bth.opcode.info();
        if info.class == Class::Send && matches!(info.position, Position::Last | Position::Only) {
            receives.received = Some(header.bth.psn);
        }
    }
}

fn run(seed: u64) {
    let mut rng = Rng(seed);
    let mut p = Pair::new(Setup {
        mtu: Mtu::B1024,
        ..Setup::default()
    });
    let (a_memory, b_memory) = (p.a.filled(LONG, 1), p.b.filled(LONG, 2));
    let (mut a_order, mut b_order) = (Order::default(), Order::default());
    for step in 0..STEPS {
        let id = u64::from(step);
        for side in [&mut p.a, &mut p.b] {
            side.recv(id, &[]);
        }
        // Phases of ping-pong let acknowledgements wait.
        let ping_pong = step % 60 < 35;
        match if ping_pong { 0 } else { rng.below(4) } {
            0 => p.a.send(id, SendOp::Send, &[]),
            1 => p.a.send(id, SendOp::Write(at(&b_memory, 0)), &[sge(&a_memory, 0, 64)]),
            2 => p.a.send(id, SendOp::Read(at(&b_memory, 0)), &[sge(&a_memory, 0, LONG)]),
            _ => {}
        }
        carry(&mut p.a, &mut p.b, (&mut a_order, &mut b_order), seed);
        if !ping_pong && rng.below(3) == 0 {
            carry(&mut p.b, &mut p.a, (&mut b_order, &mut a_order), seed);
        }
        if ping_pong || rng.below(2) == 0 {
            p.b.send(id, SendOp::Send, &[]);
        }
        carry(&mut p.b, &mut p.a, (&mut b_order, &mut a_order), seed);
        let now = p.b.now + Duration::from_micros(rng.below(30));
        (p.a.now, p.b.now) = (now, now);
        p.a.timeout();
        p.b.timeout();
        for side in [&p.a, &p.b] {
            side.completions();
            side.received();
        }
    }
}

#[test]
fn no_message_overtakes_the_acknowledgement_of_what_its_program_received() {
    (0..SEEDS).for_each(run);
}
