//! Senders with one window each that share the queue of a slow link: what each gets, and how busy the link is.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use roce_qp::{Loss, Window, WindowConfig};
use roce_verbs::Instant;

/// Bytes of a packet.
const PACKET: usize = 4096;
/// Bytes per second of the link.
const RATE: u64 = 250_000_000;
/// Bytes that its queue holds.
const QUEUE: u64 = 2_000_000;

/// Limit of the bytes that a sender has in flight.
enum Sender {
    Ours(Box<Window>),
    Tcp(Cubic),
}

/// As much of TCP as it takes to be beside it: CUBIC's shares of growth and of giving up (RFC 9438).
struct Cubic {
    size: f64,
    threshold: f64,
    most: f64,
    reduced: Instant,
    in_flight: usize,
}

impl Cubic {
    fn new() -> Self {
        Self {
            size: 10.0 * PACKET as f64,
            threshold: f64::MAX,
            most: 0.0,
            reduced: Instant::ZERO,
            in_flight: 0,
        }
    }

    fn on_acked(&mut self, now: Instant) {
        self.in_flight -= PACKET;
        let packet = PACKET as f64;
        if self.size < self.threshold {
            self.size += packet;
            return;
        }
        let secs = now.saturating_since(self.reduced).as_secs_f64();
        let most = self.most / packet;
        let goal = 0.4 * (secs - (most * 0.3 / 0.4).cbrt()).powi(3) + most;
        let packets = self.size / packet;
        self.size += packet * ((goal - packets) / packets).max(0.53 / packets).min(0.5);
    }

    fn on_lost(&mut self, now: Instant, rtt: Duration) {
        self.in_flight -= PACKET;
        if now.saturating_since(self.reduced) > rtt {
            self.reduced = now;
            self.most = self.size;
            self.size = (self.size * 0.7).max(2.0 * PACKET as f64);
            self.threshold = self.size;
        }
    }
}

struct Flow {
    sender: Sender,
    delivered: u64,
    /// It has nothing more to send.
    done: bool,
    /// Sends from this time on are measured: one round trip at a time.
    measure_from: u64,
}

impl Flow {
    fn new(sender: Sender) -> Self {
        Self {
            sender,
            delivered: 0,
            done: false,
            measure_from: 0,
        }
    }

    fn ours() -> Self {
        Self::new(Sender::Ours(Box::new(Window::new(WindowConfig::default()))))
    }

    fn may_send(&self) -> bool {
        if self.done {
            return false;
        }
        match &self.sender {
            Sender::Ours(w) => w.available() >= PACKET || w.in_flight() == 0,
            Sender::Tcp(t) => t.in_flight + PACKET <= t.size as usize,
        }
    }
}

/// Report about a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Word {
    at: u64,
    flow: usize,
    sent: u64,
    lost: bool,
}

struct Link {
    flows: Vec<Flow>,
    words: BinaryHeap<Reverse<Word>>,
    /// When everything in the queue has left it, nanoseconds.
    busy: u64,
    rtt: u64,
    /// Random losses, of a million packets.
    loss: u64,
    rng: u64,
}

impl Link {
    fn new(rtt: Duration, flows: Vec<Flow>) -> Self {
        Self {
            flows,
            words: BinaryHeap::new(),
            busy: 0,
            rtt: rtt.as_nanos() as u64,
            loss: 0,
            rng: 1,
        }
    }

    fn rng(&mut self) -> u64 {
        // Knuth's MMIX generator.
        self.rng = self
            .rng
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.rng >> 33
    }

    fn send(&mut self, now: u64, flow: usize) {
        // No two packets of two senders keep step for long on real machines.
        let jitter = self.rng() % 20_000;
        let waiting = self.busy.saturating_sub(now) * RATE / 1_000_000_000;
        let lost = waiting > QUEUE || self.rng() % 1_000_000 < self.loss;
        if waiting <= QUEUE {
            self.busy = self.busy.max(now) + PACKET as u64 * 1_000_000_000 / RATE;
        }
        let at = self.busy + self.rtt + jitter;
        self.words.push(Reverse(Word {
            at,
            flow,
            sent: now,
            lost,
        }));
        match &mut self.flows[flow].sender {
            Sender::Ours(w) => w.on_sent(PACKET),
            Sender::Tcp(t) => t.in_flight += PACKET,
        }
    }

    fn hear(&mut self, word: Word) {
        let (now, least) = (Instant::from_nanos(word.at), Duration::from_nanos(self.rtt));
        let rtt = Duration::from_nanos(word.at - word.sent);
        let flow = &mut self.flows[word.flow];
        flow.delivered += if word.lost { 0 } else { PACKET as u64 };
        match &mut flow.sender {
            Sender::Ours(w) if word.lost => w.on_loss(now, Loss::Selective, PACKET),
            Sender::Ours(w) => {
                let sample = word.sent >= flow.measure_from;
                if sample {
                    flow.measure_from = word.at;
                }
                w.on_acked(now, PACKET, sample.then_some(rtt));
            }
            Sender::Tcp(t) if word.lost => t.on_lost(now, least),
            Sender::Tcp(t) => t.on_acked(now),
        }
    }

    /// Lets time pass; returns what each got of the link, from 0 to 1.
    fn run(&mut self, from: u64, secs: u64) -> Vec<f64> {
        let before: Vec<u64> = self.flows.iter().map(|f| f.delivered).collect();
        let (mut now, end) = (from * 1_000_000_000, (from + secs) * 1_000_000_000);
        while now < end {
            for flow in 0..self.flows.len() {
                while self.flows[flow].may_send() {
                    self.send(now, flow);
                }
            }
            let Some(Reverse(word)) = self.words.pop() else {
                panic!("nothing is under way");
            };
            now = now.max(word.at);
            self.hear(word);
        }
        let of_link = |bytes: u64| bytes as f64 / (RATE * secs) as f64;
        let flows = self.flows.iter().zip(before);
        flows.map(|(f, before)| of_link(f.delivered - before)).collect()
    }
}

const ROUND_TRIPS: [Duration; 3] = [
    Duration::from_micros(200),
    Duration::from_millis(2),
    Duration::from_millis(20),
];

#[test]
fn one_keeps_the_link_busy() {
    for rtt in ROUND_TRIPS {
        let mut link = Link::new(rtt, vec![Flow::ours()]);
        link.run(0, 1);
        let got = link.run(1, 2)[0];
        // 20 ms hold 5 MB, which is more than a window.
        let most = (4.0 * 1.048_576 / 250.0 / rtt.as_secs_f64()).min(1.0);
        assert!(got > 0.95 * most, "{rtt:?}: {got:.2} of {most:.2}");
    }
}

#[test]
fn random_losses_do_not_make_it_slow() {
    for rtt in ROUND_TRIPS {
        let mut link = Link::new(rtt, vec![Flow::ours()]);
        link.run(0, 1);
        let most = link.run(1, 2)[0];
        for (percent, least) in [(1, 0.9), (3, 0.85), (10, 0.75)] {
            let mut link = Link::new(rtt, vec![Flow::ours()]);
            link.loss = percent * 10_000;
            link.run(0, 1);
            let got = link.run(1, 2)[0] / most;
            assert!(got > least, "{rtt:?}, {percent} %: {got:.2}");
        }
    }
}

#[test]
fn two_get_the_same() {
    for rtt in ROUND_TRIPS {
        let mut link = Link::new(rtt, vec![Flow::ours()]);
        // The second comes when the first has all of the link.
        link.run(0, 1);
        link.flows.push(Flow::ours());
        link.run(1, 2);
        let got = link.run(3, 4);
        let (less, more) = (got[0].min(got[1]), got[0].max(got[1]));
        assert!(less / more > 0.8, "{rtt:?}: {got:.2?}");
        assert!(less + more > 0.95, "{rtt:?}: {got:.2?}");
    }
}

#[test]
fn neither_of_one_and_tcp_starves_the_other() {
    for rtt in ROUND_TRIPS {
        for ours_first in [false, true] {
            let (first, second) = (Flow::ours(), Flow::new(Sender::Tcp(Cubic::new())));
            let (first, second) = if ours_first { (first, second) } else { (second, first) };
            let mut link = Link::new(rtt, vec![first]);
            link.run(0, 1);
            link.flows.push(second);
            link.run(1, 2);
            let got = link.run(3, 8);
            let (ours, all) = (got[usize::from(!ours_first)], got[0] + got[1]);
            let part = ours / all;
            assert!((0.3..=0.7).contains(&part), "{rtt:?}, first {ours_first}: {got:.2?}");
            assert!(all > 0.95, "{rtt:?}: {got:.2?}");
        }
    }
}

#[test]
fn when_tcp_is_gone_the_queue_is_empty_now_and_then() {
    let rtt = Duration::from_micros(200);
    let mut link = Link::new(rtt, vec![Flow::new(Sender::Tcp(Cubic::new())), Flow::ours()]);
    link.run(0, 4);
    link.flows[0].done = true;
    link.run(4, 3);
    let Sender::Ours(window) = &link.flows[1].sender else {
        unreachable!();
    };
    assert!(window.size() < 1 << 20, "{}", window.size());
    assert!(link.run(7, 1)[1] > 0.95);
}
