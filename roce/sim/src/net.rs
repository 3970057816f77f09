//! The faulty network: one-way links with loss, duplication, reordering, corruption, delay, jitter, bandwidth and a
//! queue that overflows.

use std::net::{IpAddr, SocketAddr};

use roce_icrc::{Flow, Recovery};

use crate::rng::Rng;

/// Faults of a link.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that later frames overtake a frame.
    pub reorder: f64,
    /// Probability that a frame is damaged.
    pub corrupt: f64,
    /// One way, nanoseconds.
    pub delay: u64,
    /// Random addition to it, at most, nanoseconds. Packets stay in order.
    pub jitter: u64,
    /// Bytes per second.
    pub bandwidth: u64,
    /// Bytes that may wait for the link.
    pub queue: u64,
}

impl Faults {
    /// Returns a link without faults.
    pub fn quiet(self) -> Self {
        Self {
            jitter: 0,
            bandwidth: self.bandwidth.max(100_000_000),
            queue: 64 << 20,
            ..self.sound()
        }
    }

    /// Returns a link that loses, doubles, swaps and damages nothing.
    pub(crate) fn sound(self) -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            ..self
        }
    }

    /// Whether packets may get lost, so that errors need not look the same on both sides.
    pub fn lossy(&self) -> bool {
        self.loss + self.corrupt > 0.0 || self.queue < 16 << 20
    }
}

/// One direction between two hosts.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its faults.
    pub faults: Faults,
    /// Nothing passes.
    pub cut: bool,
    /// Addition to the delay of what is sent, nanoseconds. When it falls, what is sent from then on arrives behind what is under way.
    pub lag: u64,
    busy_until: u64,
    last_arrival: u64,
}

/// Datagram in flight: a packet, or several of one GSO train that stayed together.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Sender.
    pub src: SocketAddr,
    /// Receiver.
    pub dst: IpAddr,
    /// Type of service, with its ECN bits.
    pub tos: u8,
    /// Identification of the first packet.
    pub identification: u16,
    /// Bytes of each packet but the last; 0: one packet.
    pub segment_len: usize,
    /// UDP payload: the packets, one after the other.
    pub bytes: Vec<u8>,
    /// Whether the network has changed the bytes.
    pub damaged: bool,
}

impl Frame {
    /// Returns the packets.
    pub fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let step = match self.segment_len {
            0 => self.bytes.len().max(1),
            len => len,
        };
        self.bytes.chunks(step)
    }
}

/// Counts of the network's faults.
#[derive(Clone, Copy, Default, Debug)]
pub struct NetStats {
    /// Frames lost.
    pub lost: u64,
    /// Frames doubled.
    pub duplicated: u64,
    /// Frames overtaken.
    pub reordered: u64,
    /// Frames damaged.
    pub corrupted: u64,
    /// Frames that found a queue or buffer full.
    pub overflowed: u64,
}

impl Link {
    /// Creates an idle link.
    pub fn new(faults: Faults) -> Self {
        Self {
            faults,
            cut: false,
            lag: 0,
            busy_until: 0,
            last_arrival: 0,
        }
    }

    /// Decides a frame's fate. `arrive` gets each copy with its time of arrival. `sees_headers`: the receiver knows the
    /// IP header, so that no corruption can hide behind the Identification.
    pub fn send(
        &mut self,
        now: u64,
        frame: Frame,
        sees_headers: bool,
        rng: &mut Rng,
        stats: &mut NetStats,
        mut arrive: impl FnMut(u64, Frame),
    ) {
        let f = self.faults;
        let len = frame.bytes.len() as u64 + 42;
        let waiting = self.busy_until.saturating_sub(now) as f64 * f.bandwidth as f64 / 1e9;
        if waiting > f.queue as f64 {
            stats.overflowed += 1;
            return;
        }
        let departure = self.busy_until.max(now) + len * 1_000_000_000 / f.bandwidth;
        self.busy_until = departure;
        if self.cut || rng.chance(f.loss) {
            stats.lost += 1;
            return;
        }
        let copies = 1 + u64::from(rng.chance(f.duplicate));
        stats.duplicated += copies - 1;
        for _ in 0..copies {
            let mut frame = frame.clone();
            if rng.chance(f.corrupt) {
                stats.corrupted += 1;
                frame.damaged = true;
                if !corrupt(&mut frame, sees_headers, rng) {
                    continue;
                }
            }
            let mut at = departure + f.delay + self.lag + if f.jitter > 0 { rng.range(0, f.jitter) } else { 0 };
            if rng.chance(f.reorder) {
                stats.reordered += 1;
                at += rng.range(1, 4 * f.delay + 4 * f.jitter + 20_000);
            } else {
                at = at.max(self.last_arrival);
                self.last_arrival = at;
            }
            arrive(at, frame);
        }
    }
}

/// Damages a frame. False when the damage can't be seen by anybody: an ICRC that is right with another Identification
/// happens once in 2^16 and proves nothing against the receiver.
fn corrupt(frame: &mut Frame, sees_headers: bool, rng: &mut Rng) -> bool {
    let len = frame.bytes.len();
    match rng.index(20) {
        0 => {
            let port = frame.src.port() ^ 1 << rng.index(16);
            frame.src.set_port(port);
        }
        1 => {
            let ip = match frame.src.ip() {
                IpAddr::V4(a) => IpAddr::from((u32::from(a) ^ 1 << rng.index(32)).to_be_bytes()),
                IpAddr::V6(a) => IpAddr::from((u128::from(a) ^ 1 << rng.index(128)).to_be_bytes()),
            };
            frame.src.set_ip(ip);
        }
        2 => frame.bytes.truncate(rng.index(len)),
        3 => {
            let extra = rng.range(1, 64) as usize;
            let tail = rng.bytes(extra);
            frame.bytes.extend_from_slice(&tail);
        }
        4 if sees_headers && frame.src.is_ipv4() => frame.identification ^= 1 << rng.index(16),
        5 => {
            // FECN, BECN and reserved bits: not covered, and without meaning to the receiver.
            frame.bytes[4] ^= rng.range(1, 255) as u8;
            return true;
        }
        _ => {
            let first = rng.index(len);
            for _ in 0..rng.range(1, 8) {
                let near = (first + rng.index(12)).min(len - 1);
                frame.bytes[if near == 4 { 5 } else { near }] ^= 1 << rng.index(8);
            }
        }
    }
    sees_headers || frame.src.is_ipv6() || !looks_sound(frame)
}

fn looks_sound(frame: &Frame) -> bool {
    let dst = SocketAddr::new(frame.dst, roce_bth::ROCE_UDP_PORT);
    let Ok(flow) = Flow::try_from((frame.src, dst)) else {
        return false;
    };
    // Sound packets beside a damaged one in the same buffer pass, of course: the whole frame is spared then only if all
    // are sound.
    frame
        .packets()
        .all(|p| matches!(flow.recover(p, 0), Recovery::Exact(_)))
}
