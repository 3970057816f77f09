//! The ceiling: the packets of RDMA WRITEs through the same sockets as the device uses, with the staging copy, the ICRC
//! made and checked, and one copy into place, but without a protocol.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use roce_bth::{Bth, ExtHeader, Header, ICRC_LEN, Opcode, Packet, Psn, Qpn, ROCE_UDP_PORT, Reth};
use roce_icrc::{Flow, IdSolver, Recovery};
use roce_net::{DEFAULT_HOP_LIMIT, Datapath, DatapathKind, OpenError, Train, UdpConfig, open_shards, packets};

/// Settings of a measurement.
#[derive(Clone, Debug)]
pub(crate) struct CeilingConfig {
    /// Address of the sender.
    pub(crate) from: IpAddr,
    /// Address of the receiver.
    pub(crate) to: IpAddr,
    /// Payload bytes of a packet.
    pub(crate) mtu: usize,
    /// Bytes of a message.
    pub(crate) bytes: usize,
    /// Most bytes in flight.
    pub(crate) window: usize,
    /// Sockets.
    pub(crate) datapath: DatapathKind,
    /// Send many packets with one call.
    pub(crate) gso: bool,
    /// Receive many packets with one call.
    pub(crate) gro: bool,
    /// Duration.
    pub(crate) duration: Duration,
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ceiling {
    /// 10^9 payload bytes copied into place per second.
    pub(crate) gbytes_per_s: f64,
    /// Messages per second.
    pub(crate) msgs_per_s: f64,
    /// Time taken.
    pub(crate) time: Duration,
    /// Packets copied into place.
    pub(crate) packets: u64,
    /// Packets that did not arrive.
    pub(crate) lost: u64,
    /// Packets whose ICRC was wrong.
    pub(crate) icrc_errors: u64,
}

/// Trains that are staged before they are sent.
const SPANS: usize = 4;
/// Time without arrivals after which packets in flight count as lost.
const LOST: Duration = Duration::from_millis(5);

/// State shared by the two threads.
struct Shared {
    start: Barrier,
    stop: AtomicBool,
    /// Packets copied into place.
    placed: AtomicU64,
    icrc_errors: AtomicU64,
    sent: AtomicU64,
}

/// Runs a sender and a receiver thread against each other.
///
/// # Errors
/// When the sockets can't be made.
pub(crate) fn run(config: &CeilingConfig) -> Result<Ceiling, OpenError> {
    let open = |addr| {
        let udp = UdpConfig {
            addr,
            gso: config.gso,
            gro: config.gro,
            ..UdpConfig::default()
        };
        let mut opened = open_shards(config.datapath, &udp, None)?;
        opened.pop().ok_or(OpenError::NotLocal(addr))
    };
    let (mut tx, mut rx) = (open(config.from)?, open(config.to)?);
    let shared = Shared {
        start: Barrier::new(2),
        stop: AtomicBool::new(false),
        placed: AtomicU64::new(0),
        icrc_errors: AtomicU64::new(0),
        sent: AtomicU64::new(0),
    };
    let elapsed = thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(config, &mut *rx, &shared));
        let sender = scope.spawn(|| send(config, &mut *tx, &shared));
        let elapsed = sender.join().unwrap_or_default();
        shared.stop.store(true, Ordering::Relaxed);
        let _ = receiver.join();
        elapsed
    });
    let packets = shared.placed.load(Ordering::Relaxed);
    let bytes = packets as f64 * config.mtu.min(config.bytes) as f64;
    let seconds = elapsed.as_secs_f64().max(1e-9);
    Ok(Ceiling {
        gbytes_per_s: bytes / seconds / 1e9,
        msgs_per_s: bytes / seconds / config.bytes as f64,
        time: elapsed,
        packets,
        lost: shared.sent.load(Ordering::Relaxed).saturating_sub(packets),
        icrc_errors: shared.icrc_errors.load(Ordering::Relaxed),
    })
}

/// Returns the headers of packet `index` of a message of `count`.
fn header(index: usize, count: usize, psn: u64, bytes: usize) -> Header {
    let opcode = match (index, count) {
        (_, 1) => Opcode::RcWriteOnly,
        (0, _) => Opcode::RcWriteFirst,
        (i, n) if i + 1 == n => Opcode::RcWriteLast,
        _ => Opcode::RcWriteMiddle,
    };
    let mut header = Header::new(Bth::new(opcode, Qpn::new(0x11), Psn::new(psn as u32)));
    if opcode.info().has(ExtHeader::Reth) {
        header.reth = Some(Reth {
            dma_len: bytes as u32,
            ..Reth::default()
        });
    }
    header
}

/// Stages and sends messages, at most the window ahead of the receiver.
fn send(config: &CeilingConfig, path: &mut dyn Datapath, shared: &Shared) -> Duration {
    let source = vec![0x5au8; config.bytes];
    let caps = path.capabilities();
    let src_port = caps.src_ports.first().copied().unwrap_or(ROCE_UDP_PORT);
    let remote = SocketAddr::new(config.to, ROCE_UDP_PORT);
    let Ok(flow) = Flow::try_from((SocketAddr::new(config.from, src_port), remote)) else {
        return Duration::ZERO;
    };
    let count = config.bytes.div_ceil(config.mtu);
    let window = (config.window / config.mtu).max(1) as u64;
    let mut stage = vec![0u8; SPANS * caps.max_train_bytes.max(config.mtu + 64)];
    let mut spans: Vec<(usize, usize, usize)> = vec![];
    let mut psn = 0u64;
    shared.start.wait();
    let began = Instant::now();
    let mut flight = Flight::new();
    let mut index = 0;
    while began.elapsed() < config.duration {
        spans.clear();
        let mut used = 0;
        loop {
            let head = header(index, count, psn, config.bytes);
            let head_len = head.wire_len();
            let payload = &source[index * config.mtu..config.bytes.min((index + 1) * config.mtu)];
            let total = head_len + payload.len() + ICRC_LEN;
            let joins = spans.last().is_some_and(|(_, len, segment)| {
                total == *segment && *len / *segment < caps.max_segments && *len + total <= caps.max_train_bytes
            });
            if !joins && spans.len() == SPANS {
                break;
            }
            let packet = &mut stage[used..used + total];
            head.emit(packet);
            packet[head_len..head_len + payload.len()].copy_from_slice(payload);
            let place = match spans.last_mut().filter(|_| joins) {
                Some((_, len, segment)) => {
                    *len += total;
                    *len / *segment - 1
                }
                None => {
                    spans.push((used, total, total));
                    0
                }
            };
            flow.seal(place as u16, packet);
            used += total;
            index = (index + 1) % count;
            psn += 1;
        }
        let mut trains = spans.iter().map(|&(start, len, segment_len)| Train {
            local: config.from,
            remote,
            src_port,
            tos: 0,
            ttl: DEFAULT_HOP_LIMIT,
            segment_len,
            bytes: &stage[start..start + len],
        });
        path.send(&mut trains);
        shared.sent.store(psn, Ordering::Relaxed);
        flight.wait(psn, window, shared);
    }
    let end = Instant::now() + Duration::from_millis(50);
    while shared.placed.load(Ordering::Acquire) < psn && Instant::now() < end {
        thread::yield_now();
    }
    began.elapsed()
}

/// Packets in flight, as the sender knows.
struct Flight {
    /// Packets copied into place at the last look, and when that number last grew.
    placed: u64,
    grown: Instant,
    /// Packets that count as lost.
    lost: u64,
}

impl Flight {
    fn new() -> Self {
        Self {
            placed: 0,
            grown: Instant::now(),
            lost: 0,
        }
    }

    /// Waits until at most `window` of `sent` packets are in flight.
    fn wait(&mut self, sent: u64, window: u64, shared: &Shared) {
        loop {
            let placed = shared.placed.load(Ordering::Acquire);
            if placed != self.placed {
                (self.placed, self.grown) = (placed, Instant::now());
            }
            if sent.saturating_sub(placed + self.lost) <= window {
                return;
            }
            if self.grown.elapsed() > LOST {
                self.lost = sent.saturating_sub(placed);
                return;
            }
            // Lets the receiver run if both share a processor.
            thread::yield_now();
        }
    }
}

/// Checks every packet and copies its payload into place.
fn receive(config: &CeilingConfig, path: &mut dyn Datapath, shared: &Shared) {
    let mut place = vec![0u8; config.bytes];
    let count = config.bytes.div_ceil(config.mtu);
    let mut solver = IdSolver::new();
    shared.start.wait();
    while !shared.stop.load(Ordering::Relaxed) {
        let (mut good, mut bad) = (0, 0);
        let received = path.receive(64, &mut |meta, bytes| {
            let local = SocketAddr::new(meta.local, ROCE_UDP_PORT);
            let Ok(flow) = Flow::try_from((meta.remote, local)) else {
                return;
            };
            for (i, packet) in packets(meta, bytes).enumerate() {
                // UDP sockets show the Identification of merged packets; that of single ones must be solved for.
                let sound = match (meta.identification, config.gro) {
                    (Some(id), _) => flow.verify(id.wrapping_add(i as u16), packet),
                    (None, true) => flow.verify(i as u16, packet),
                    (None, false) => matches!(flow.recover_with(&mut solver, packet, 0), Recovery::Exact(_)),
                };
                match Packet::parse(packet) {
                    Ok(p) if sound => {
                        let at = p.header.bth.psn.value() as usize % count * config.mtu;
                        if let Some(to) = place.get_mut(at..at + p.payload.len()) {
                            to.copy_from_slice(p.payload);
                        }
                        good += 1;
                    }
                    _ => bad += 1,
                }
            }
        });
        if received.datagrams == 0 {
            thread::yield_now();
        }
        if good > 0 {
            shared.placed.fetch_add(good, Ordering::Release);
        }
        if bad > 0 {
            shared.icrc_errors.fetch_add(bad, Ordering::Relaxed);
        }
    }
}
