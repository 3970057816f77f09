//! A peer that numbers its Identifications in some way, and an adversary that has its address.
//!
//! The adversary knows all addresses, queue pair numbers and PSNs, not the peer's source port. Whatever it sends, every packet of a peer that
//! keeps its way of numbering Identifications is believed, and of one that changes it all but three.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};
use std::sync::Arc;

use roce_bth::{Aeth, Bth, Credits, Deth, Header, Msn, Opcode, QKey, ROCE_UDP_PORT, Reth, Syndrome};
use roce_icrc::{Flow, Recovery};
use roce_port::{Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    AccessFlags, AddressVector, Instant, Mtu, Payload, Psn, QpAttr, QpCaps, QpState, QpType, Qpn, RemoteAddr,
    SendFlags, SendOp, SendWr,
};

use crate::input::Input;

const HERE: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 2));
const PEER: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(192, 0, 2, 1));
const GROUP: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(239, 0, 0, 1));
/// The PSNs that both sides start with.
const FIRST: u32 = 0xff_fff0;
/// UDP source port of the peer.
const PORT: u16 = 0xc000;
/// PSNs before the expected one at which a copy teaches nothing.
const FAR: u32 = 2000;
/// A peer that changes its numbering is refused so many packets in a row.
const REFUSED: u32 = 3;
/// Numbers that a counter may skip at once, and the time in which it may skip one more.
const SKIPPED: u64 = 4000;
const PER_SKIPPED: u64 = 256;

/// How the peer numbers its packets.
enum Numbering {
    /// Zero, or the place in a train.
    Index,
    /// A counter over all that it sends.
    Counter(u16),
}

/// A connected queue pair as its peer knows it.
struct Connection {
    qpn: Qpn,
    /// PSN of the next request to it.
    request: Psn,
    /// PSN of its oldest request that is not acknowledged, and how many those are.
    oldest: Psn,
    outstanding: u32,
}

struct World {
    now: Instant,
    port: Port,
    batch: TxBatch,
    cq: Arc<CompletionQueue>,
    datagram: Qpn,
    connections: Vec<Connection>,
    numbering: Numbering,
    /// The peer keeps its numbering.
    steady: bool,
    /// Numbers that went elsewhere since a packet that taught, and its time.
    skipped: u64,
    taught: Instant,
    /// Packets at their place refused in a row.
    refused: u32,
}

fn raise(port: &mut Port, qpn: Qpn, qp_type: QpType) {
    let way = QpAttr {
        access: Some(AccessFlags::REMOTE_WRITE),
        rq_psn: Some(Psn::new(FIRST)),
        sq_psn: Some(Psn::new(FIRST)),
        qkey: Some(7),
        ..QpAttr::to_rts(AddressVector::new(HERE, PEER), Mtu::B1024, Qpn::new(9))
    };
    for attr in way.steps(qp_type) {
        port.modify_qp(Instant::ZERO, qpn, &attr).expect("legal attributes");
    }
}

impl World {
    fn new(numbering: Numbering, steady: bool) -> Self {
        let config = PortConfig::new(vec![HERE], Mtu::B1024, 1);
        let mem = Arc::new(MemoryTable::new([1; 32], &config.limits));
        let pd = mem.alloc_pd().expect("the first");
        let cq = CompletionQueue::new(0, 1 << 12, None);
        let mut port = Port::new(config, mem, [1; 32]);
        let init = |qp_type| QpInit {
            pd,
            qp_type,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        };
        let connections = [(); 2].map(|()| {
            let qpn = port.create_qp(init(QpType::Rc)).expect("within limits");
            raise(&mut port, qpn, QpType::Rc);
            port.set_peer_source(qpn, PORT).expect("it exists");
            let first = Psn::new(FIRST);
            Connection {
                qpn,
                request: first,
                oldest: first,
                outstanding: 0,
            }
        });
        let datagram = port.create_qp(init(QpType::Ud)).expect("within limits");
        raise(&mut port, datagram, QpType::Ud);
        port.attach_mcast(datagram, GROUP).expect("the first");
        Self {
            now: Instant::from_nanos(1_000_000_000),
            port,
            batch: TxBatch::new(TxConfig::default()),
            cq,
            datagram,
            connections: connections.into(),
            numbering,
            steady,
            skipped: 0,
            taught: Instant::from_nanos(1_000_000_000),
            refused: 0,
        }
    }

    /// The Identification of the peer's next packet.
    fn next_id(&mut self) -> u16 {
        match &mut self.numbering {
            Numbering::Index => 0,
            Numbering::Counter(next) => {
                *next = next.wrapping_add(1);
                next.wrapping_sub(1)
            }
        }
    }

    /// Delivers bytes from the peer's address; returns how many packets were refused for their Identification.
    fn deliver(&mut self, src_port: u16, dst: IpAddr, bytes: &[u8]) -> u64 {
        let before = self.port.counters().icrc_implausible;
        let meta = RxMeta::new(dst, SocketAddr::new(PEER, src_port));
        self.port.handle_datagram(self.now, &meta, bytes);
        self.port.counters().icrc_implausible - before
    }

    fn sealed(src_port: u16, dst: IpAddr, header: &Header, payload: usize, id: u16) -> Vec<u8> {
        let mut bytes = vec![0; header.wire_len()];
        header.emit(&mut bytes);
        bytes.resize(bytes.len() + payload + 4, 0);
        flow(src_port, dst).seal(id, &mut bytes);
        bytes
    }

    /// A packet that the peer sends where it is expected. False: it was refused.
    fn at_its_place(&mut self, header: &Header, id: u16) -> bool {
        let bytes = Self::sealed(PORT, HERE, header, 0, id);
        let refused = self.deliver(PORT, HERE, &bytes) > 0;
        self.refused = if refused { self.refused + 1 } else { 0 };
        let most = if self.steady { 0 } else { REFUSED };
        assert!(self.refused <= most, "Identification {id} of the peer's was refused");
        (self.skipped, self.taught) = (0, self.now);
        !refused
    }

    /// A packet that the peer sends where it teaches nothing.
    fn elsewhere(&mut self, dst: IpAddr, header: &Header, payload: usize) {
        let id = self.next_id();
        self.skipped += 1;
        let bytes = Self::sealed(PORT, dst, header, payload, id);
        let refused = self.deliver(PORT, dst, &bytes);
        assert!(
            !self.steady || refused == 0,
            "Identification {id} of a stranger's was refused"
        );
    }

    /// The peer writes nothing, with all that belongs to a request.
    fn request(&mut self, which: usize, overtaken: bool) {
        let Connection { qpn, request, .. } = self.connections[which];
        let first = self.next_id();
        if overtaken {
            let second = self.next_id();
            self.at_its_place(&write(qpn, request.next()), second);
        }
        if self.at_its_place(&write(qpn, request), first) {
            self.connections[which].request = request.next();
        }
    }

    /// The program writes nothing to the peer.
    fn post(&mut self, which: usize) {
        let c = &mut self.connections[which];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Write(RemoteAddr::default()),
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        if c.outstanding < 16 {
            self.port.post_send(self.now, c.qpn, &[wr]).expect("room for 16");
            c.outstanding += 1;
        }
    }

    /// The peer acknowledges all that it was sent.
    fn acknowledge(&mut self, which: usize) {
        let Connection {
            qpn,
            oldest,
            outstanding,
            ..
        } = self.connections[which];
        if outstanding == 0 {
            return;
        }
        let id = self.next_id();
        if self.at_its_place(&ack(qpn, oldest.add(outstanding - 1)), id) {
            let mut completions = Vec::new();
            self.cq.poll(&mut completions, 64).expect("it did not overflow");
            assert_eq!(completions.len(), outstanding as usize);
            assert!(completions.iter().all(roce_verbs::Completion::is_ok));
            let c = &mut self.connections[which];
            (c.oldest, c.outstanding) = (oldest.add(outstanding), 0);
        }
    }

    /// The peer's counter goes on for packets to others, as fast as a fast host sends.
    fn skip(&mut self, n: u16) {
        let allowed = SKIPPED + self.now.saturating_since(self.taught).as_nanos() as u64 / PER_SKIPPED;
        let Numbering::Counter(next) = &mut self.numbering else {
            return;
        };
        if self.skipped + u64::from(n) + 256 > allowed {
            return;
        }
        self.skipped += u64::from(n);
        *next = next.wrapping_add(n);
        // Nobody can tell a counter from an index that is seen at 0 again and again, and nowhere else.
        if n >= 64 && *next < 128 {
            self.skipped += 128;
            *next += 128;
        }
    }

    /// The adversary sends packets that are right but for the source port.
    fn forge(&mut self, input: &mut Input<'_>) {
        let kind = input.byte();
        let (mut id, step, n) = (
            input.number_or_zeros(2) as u16,
            input.number_or_zeros(2) as u16,
            1 + input.byte() % 32,
        );
        let src_port = match input.number_or_zeros(2) as u16 {
            PORT => PORT + 1,
            other => other,
        };
        for _ in 0..n {
            let c = &self.connections[usize::from(kind >> 7)];
            let ahead = input.number_or_zeros(2) as u32 % 64;
            let (dst, header, payload) = match kind & 7 {
                0 | 1 => (HERE, datagram(Qpn::GSI), 256),
                2 => (HERE, datagram(self.datagram), 8),
                3 => (GROUP, datagram(Qpn::MULTICAST), 8),
                4 => (HERE, write(c.qpn, c.request.add(ahead)), 0),
                5 => (HERE, ack(c.qpn, c.oldest.add(ahead)), 0),
                6 => (HERE, Header::new(Bth::new(Opcode::Cnp, c.qpn, c.request)), 0),
                _ => (HERE, ack(c.qpn, c.oldest.sub(ahead)), 0),
            };
            let bytes = Self::sealed(src_port, dst, &header, payload, id);
            self.deliver(src_port, dst, &bytes);
            assert!(self.drain() <= 1, "answered by more than one packet");
            id = id.wrapping_add(step);
        }
    }

    /// A packet at its place that was damaged on its way.
    fn damage(&mut self, input: &mut Input<'_>) {
        let Connection { qpn, request, .. } = self.connections[0];
        let mut bytes = Self::sealed(PORT, HERE, &write(qpn, request), 0, 0);
        // Not the reserved byte that the ICRC leaves out, nor what says where to and what it is.
        let at = 12 + usize::from(input.byte()) % (bytes.len() - 12);
        bytes[at] ^= input.byte().max(1);
        if flow(PORT, HERE).recover(&bytes, 0) != Recovery::Corrupt {
            return;
        }
        let before = self.port.counters().icrc_errors;
        self.deliver(PORT, HERE, &bytes);
        assert_eq!(self.port.counters().icrc_errors, before + 1, "whatever the hint was");
    }

    /// Takes what the port sends; returns how many packets.
    fn drain(&mut self) -> usize {
        let mut packets = 0;
        while self.port.poll_transmit(self.now, &mut self.batch) || !self.batch.is_empty() {
            packets += self.batch.trains().map(|t| t.segments()).sum::<usize>();
            self.batch.clear();
        }
        packets
    }
}

fn flow(src_port: u16, dst: IpAddr) -> Flow {
    let ends = (SocketAddr::new(PEER, src_port), SocketAddr::new(dst, ROCE_UDP_PORT));
    Flow::try_from(ends).expect("one family")
}

fn write(qpn: Qpn, psn: Psn) -> Header {
    let mut bth = Bth::new(Opcode::RcWriteOnly, qpn, psn);
    bth.ack_req = true;
    let mut header = Header::new(bth);
    header.reth = Some(Reth::default());
    header
}

fn ack(qpn: Qpn, psn: Psn) -> Header {
    let mut header = Header::new(Bth::new(Opcode::RcAcknowledge, qpn, psn));
    header.aeth = Some(Aeth {
        syndrome: Syndrome::Ack(Credits::INVALID),
        msn: Msn::new(0),
    });
    header
}

fn datagram(dest: Qpn) -> Header {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, dest, Psn::new(0)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    header
}

/// Runs what the bytes say.
///
/// # Panics
/// When a packet is refused that should not be.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let first = input.byte();
    let numbering = |input: &mut Input<'_>, kind: u8| match kind & 1 {
        0 => Numbering::Index,
        _ => Numbering::Counter(input.number_or_zeros(2) as u16),
    };
    let mut w = World::new(numbering(&mut input, first), first & 2 == 0);
    while !input.0.is_empty() {
        let op = input.byte();
        let which = usize::from(op >> 7);
        match op & 15 {
            0..3 => w.request(which, op & 0x40 != 0),
            3 => w.post(which),
            4 => w.acknowledge(which),
            5 => w.now = w.now + Duration::from_nanos(1 << (input.byte() % 36)),
            6 => w.skip(u16::from(input.byte()) << (op >> 5)),
            7 => w.elsewhere(HERE, &datagram(Qpn::GSI), 256),
            8 => w.elsewhere(GROUP, &datagram(Qpn::MULTICAST), 8),
            // A copy of a request that is long done.
            9 => w.elsewhere(
                HERE,
                &write(w.connections[which].qpn, w.connections[which].request.sub(FAR)),
                0,
            ),
            10 => w.damage(&mut input),
            11 if !w.steady && w.refused == 0 => {
                w.numbering = numbering(&mut input, op >> 7);
                (w.skipped, w.taught) = (0, w.now);
            }
            _ => w.forge(&mut input),
        }
        w.drain();
    }
    for c in &w.connections {
        assert_eq!(
            w.port.qp_state(c.qpn),
            Some(QpState::Rts),
            "nothing of that ends a connection"
        );
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, RngCore, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// What the fuzzer would find in a moment.
    #[test]
    fn a_peer_is_believed_whatever_strangers_send() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..300 {
            let mut bytes = vec![0; rng.random_range(20..600)];
            rng.fill_bytes(&mut bytes);
            super::run(&bytes);
        }
    }
}
