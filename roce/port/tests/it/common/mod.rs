//! Shared by the tests: CM frames out of captures, and two managers with a faulty link between them.
#![allow(unreachable_pub, missing_docs)]

pub mod pair;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use roce_port::cm::{CmConfig, Manager, OutMad};
use roce_verbs::Instant;

pub const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
pub const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1));
/// The hosts' other addresses.
pub const CLIENT_2: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 2));
pub const SERVER_2: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 1));

/// A MAD of a capture.
#[derive(Clone)]
pub struct Captured {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub mad: [u8; 256],
}

/// The MADs on QP1 in a classic little-endian pcap of Ethernet, IPv4 and UDP frames.
pub fn mads(file: &str) -> Vec<Captured> {
    let path = format!("{}/../../pcap-fixtures/{file}", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert_eq!(bytes[..4], [0xd4, 0xc3, 0xb2, 0xa1], "{path}: not a little-endian pcap");
    let mut rest = &bytes[24..];
    let mut out = Vec::new();
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let udp_4791 = frame[12..14] == [8, 0] && frame[14] == 0x45 && frame[23] == 17 && frame[36..38] == [18, 183];
        // UD SEND ONLY to QP1.
        if !udp_4791 || frame[42] != 0x64 || frame[47..50] != [0, 0, 1] {
            continue;
        }
        let ip = |at: usize| IpAddr::V4(Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]));
        assert_eq!(frame.len(), 42 + 12 + 8 + 256 + 4, "{path}: a CM frame's length");
        out.push(Captured {
            src: ip(26),
            dst: ip(30),
            mad: frame[62..318].try_into().unwrap(),
        });
    }
    out
}

/// A small generator, so that a seed repeats a run.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Faults of the link, in percent and milliseconds.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    pub loss: u64,
    pub duplication: u64,
    pub max_delay_ms: u64,
}

/// Two managers with a link between them.
pub struct World {
    pub now: Instant,
    pub m: [Manager; 2],
    pub rng: Rng,
    pub faults: Faults,
    /// MADs under way: when, order, to whom.
    wire: BTreeMap<(Instant, u64), OutMad>,
    order: u64,
    /// All MADs ever sent.
    pub sent: Vec<OutMad>,
}

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl World {
    /// Managers at [`CLIENT`] (0) and [`SERVER`] (1).
    pub fn new(seed: u64, config: impl Fn(u64) -> CmConfig) -> Self {
        let manager = |n: u8| Manager::new(config(0xfe00_0000_0000_0000 + u64::from(n)), [n ^ seed as u8; 32]);
        Self {
            now: Instant::ZERO + ms(1),
            m: [manager(1), manager(2)],
            rng: Rng(seed),
            faults: Faults::default(),
            wire: BTreeMap::new(),
            order: 0,
            sent: Vec::new(),
        }
    }

    /// Puts what the managers want to send on the wire.
    pub fn pump(&mut self) {
        for side in 0..2 {
            while let Some(out) = self.m[side].poll_mad() {
                self.sent.push(out);
                let copies = 1 + u64::from(self.rng.chance(self.faults.duplication));
                for _ in 0..copies {
                    if !self.rng.chance(self.faults.loss) {
                        let at = self.now + ms(1 + self.rng.below(self.faults.max_delay_ms + 1));
                        self.order += 1;
                        self.wire.insert((at, self.order), out);
                    }
                }
            }
        }
    }

    /// When something happens next by itself.
    pub fn next_event(&mut self) -> Option<Instant> {
        self.pump();
        let wire = self.wire.keys().next().map(|(at, _)| *at);
        let timers = self.m.iter().filter_map(Manager::next_timeout);
        timers.chain(wire).min()
    }

    /// Lets everything happen that is due at `at`.
    pub fn advance(&mut self, at: Instant) {
        self.now = self.now.max(at);
        while let Some(e) = self.wire.first_entry().filter(|e| e.key().0 <= self.now) {
            let out = e.remove();
            let side = usize::from([SERVER, SERVER_2].contains(&out.remote));
            self.m[side].handle_mad(self.now, out.remote, out.local, &out.mad);
        }
        for m in &mut self.m {
            m.handle_timeout(self.now);
        }
        self.pump();
    }

    /// Delivers what is under way until nothing is, without waiting for timers.
    pub fn settle(&mut self) {
        self.pump();
        while let Some(at) = self.wire.keys().next().map(|(at, _)| *at) {
            self.advance(at);
        }
    }

    /// Runs for a time.
    pub fn run_for(&mut self, d: Duration) {
        let end = self.now + d;
        while let Some(at) = self.next_event().filter(|at| *at <= end) {
            self.advance(at);
        }
        self.now = end;
    }

    /// Runs until no MAD is under way and no timer runs.
    pub fn run_dry(&mut self) {
        for _ in 0..100_000 {
            let Some(at) = self.next_event() else { return };
            self.advance(at);
        }
        panic!("timers never end");
    }
}

/// Returns the text of a call's error.
pub fn error<T: std::fmt::Debug>(result: Result<T, roce_verbs::provider::VerbsError>) -> String {
    result.unwrap_err().to_string()
}
