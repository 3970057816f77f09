//! Packets that a port sends to the address that a packet was forged with.
//!
//! The forger knows addresses, the listeners' ports and queue pair numbers, not communication IDs, PSNs or keys, and sees no
//! answer. Whatever it sends, of the tables of management datagrams and opcodes: at most 5 packets and 3 times its bytes go
//! to the address, and the connection of the real peer stands.

use core::time::Duration;
use std::collections::BTreeMap;

use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roce_bth::{AtomicEth, Bth, Deth, Header, Opcode, QKey, RKey, Reth};
use roce_port::cm::{
    CmConfig, Manager,
    mad::{Attribute, Dreq, MAD_LEN, Mad, Message, Mra, Rej, Rep, Rtu, SidrRep},
};
use roce_port::{ConnectArgs, PortSpace, ResolveArgs, SidrAnswer};
use roce_verbs::{SendOp, provider::RejectReason};

use super::{drops::sealed, *};

const SERVICE: u16 = 7000;
/// So long it is watched what a packet causes.
const WATCH: Duration = Duration::from_secs(600);

/// Behaviour of the program at the listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Consumer {
    Accepts,
    /// After a while, in which repetitions are answered with an MRA.
    AcceptsLate,
    /// And ends the connection at once.
    AcceptsAndEnds,
    Rejects,
    DoesNothing,
}

/// A port with listeners, and a peer that is connected to it.
struct Scene {
    peer: Host,
    host: Host,
    consumer: Consumer,
    /// Connection and queue pair of the two.
    conns: [ConnId; 2],
    qps: [Qpn; 2],
    datagram_qp: Qpn,
    /// Requests that the program will accept, and when.
    planned: BTreeMap<(Instant, ConnId), ()>,
    accepted: BTreeMap<ConnId, Qpn>,
}

fn scene(consumer: Consumer) -> Scene {
    let (mut peer, mut host) = (Host::new(1), Host::new(2));
    host.port.cm_listen(&ListenArgs::new(None, SERVICE, 64)).unwrap();
    let questions = ListenArgs {
        addr: None,
        space: PortSpace::Udp,
        port: SERVICE,
        transport: None,
        backlog: 64,
    };
    host.port.cm_listen(&questions).unwrap();
    let qps = [peer.qp(), host.qp()];
    let (local, remote) = ((peer.addr, 0).into(), (host.addr, SERVICE).into());
    let ours = peer
        .port
        .connect_qp(peer.now, local, remote, qps[0], params(b""))
        .unwrap();
    peer.take().iter().for_each(|d| host.give(d));
    let [CmEventKind::Request { conn, .. }] = host.events()[..] else {
        panic!("no request")
    };
    host.port.accept_qp(host.now, conn, qps[1], params(b"")).unwrap();
    exchange(&mut peer, &mut host);
    peer.events();
    host.events();
    let ud = QpInit {
        qp_type: QpType::Ud,
        ..host.init()
    };
    let datagram_qp = host.port.create_qp(ud).unwrap();
    let nobody = AddressVector::new(host.addr, host.addr);
    let way = QpAttr {
        qkey: Some(0x77),
        ..QpAttr::to_rts(nobody, Mtu::B1024, Qpn::new(0))
    };
    for attr in way.steps(QpType::Ud) {
        host.port.modify_qp(host.now, datagram_qp, &attr).unwrap();
    }
    Scene {
        peer,
        host,
        consumer,
        conns: [ours, conn],
        qps,
        datagram_qp,
        planned: BTreeMap::new(),
        accepted: BTreeMap::new(),
    }
}

impl Scene {
    fn accept(&mut self, conn: ConnId) {
        let qp = self.host.qp();
        match self.host.port.accept_qp(self.host.now, conn, qp, params(b"")) {
            Ok(()) => drop(self.accepted.insert(conn, qp)),
            Err(_) => self.end(conn, Some(qp)),
        }
    }

    fn end(&mut self, conn: ConnId, qp: Option<Qpn>) {
        let now = self.host.now;
        self.host.port.cm_destroy(now, conn);
        if let Some(qp) = qp {
            self.host.port.destroy_qp(now, qp).unwrap();
        }
    }

    fn requested(&mut self, conn: ConnId) {
        let now = self.host.now;
        match self.consumer {
            Consumer::Accepts => self.accept(conn),
            Consumer::AcceptsLate => drop(self.planned.insert((now + Duration::from_secs(3), conn), ())),
            Consumer::AcceptsAndEnds => {
                self.accept(conn);
                let qp = self.accepted.remove(&conn);
                self.end(conn, qp);
            }
            Consumer::Rejects => {
                let reason = RejectReason::CONSUMER;
                self.host.port.cm_reject(now, conn, reason, b"").unwrap();
                self.host.port.cm_destroy(now, conn);
            }
            Consumer::DoesNothing => {}
        }
    }

    /// The program takes its events.
    fn program(&mut self) {
        for event in self.host.events() {
            let conn = event.conn();
            match event {
                CmEventKind::Request { .. } => self.requested(conn),
                CmEventKind::SidrRequest { .. } if self.consumer != Consumer::DoesNothing => {
                    let answer = SidrAnswer::default();
                    self.host.port.cm_answer(self.host.now, conn, &answer).unwrap();
                    self.host.port.cm_destroy(self.host.now, conn);
                }
                CmEventKind::Rejected { .. } | CmEventKind::Unreachable { .. } | CmEventKind::Disconnected { .. } => {
                    assert_ne!(conn, self.conns[1], "the peer's connection has ended: {event:?}");
                    let qp = self.accepted.remove(&conn);
                    self.end(conn, qp);
                }
                _ => {}
            }
        }
        while let Some(planned) = self.planned.first_entry().filter(|e| e.key().0 <= self.host.now) {
            let (_, conn) = planned.remove_entry().0;
            self.accept(conn);
        }
    }

    /// Packets and bytes to `to` until nothing is left to do or the time is over. The peer lives, strangers don't.
    fn watch(&mut self, to: IpAddr) -> (usize, usize) {
        let end = self.host.now + WATCH;
        let (mut packets, mut bytes) = (0, 0);
        for _ in 0..100_000 {
            self.program();
            let out = self.host.take();
            for d in &out {
                if d.dst == to {
                    packets += d.segments;
                    bytes += d.bytes.len();
                }
                if d.dst == self.peer.addr {
                    self.peer.give(d);
                }
            }
            let back = self.peer.take();
            back.iter().for_each(|d| self.host.give(d));
            if !out.is_empty() || !back.is_empty() {
                continue;
            }
            let timers = [self.host.port.poll_timeout(), self.peer.port.poll_timeout()];
            let planned = self.planned.keys().next().map(|(at, _)| *at);
            let next = timers.into_iter().flatten().chain(planned).min();
            let at = next.filter(|at| *at <= end).unwrap_or(end);
            for h in [&mut self.host, &mut self.peer] {
                h.now = h.now.max(at);
                h.port.handle_timeout(h.now);
            }
            if at == end {
                return (packets, bytes);
            }
        }
        panic!("it never comes to rest");
    }

    /// Gives forged packets to the port, and checks what comes of them. Returns how many packets that are.
    fn check(&mut self, forged: &[Datagram], what: &str) -> usize {
        let (count, len) = (forged.len(), forged.iter().map(|d| d.bytes.len()).sum::<usize>());
        let to = forged[0].src.ip();
        for d in forged {
            self.give_forged(d);
            self.program();
        }
        let (packets, bytes) = self.watch(to);
        assert!(
            packets <= 5 * count && bytes <= 3 * len,
            "{:?}: {count} forged packets of {len} bytes in all from {to}, {what}: {packets} packets, {bytes} bytes",
            self.consumer
        );
        packets
    }

    /// The Identification is told, as by a datapath that sees IP headers: nothing but what is tested shall stop the packet.
    fn give_forged(&mut self, d: &Datagram) {
        let meta = RxMeta {
            identification: Some(0),
            ..RxMeta::new(d.dst, d.src)
        };
        self.host.port.handle_datagram(self.host.now, &meta, &d.bytes);
    }

    /// The peer's connection stands and carries data.
    fn peer_is_well(&mut self) {
        let (peer, host) = (&mut self.peer, &mut self.host);
        peer.completions();
        let (from, to) = (peer.region(64), host.region(64));
        from.write(0, &noise(64)).unwrap();
        peer.send(self.qps[0], 5, SendOp::Write(remote(&to)), &from, 64);
        exchange(peer, host);
        assert_eq!(contents(&to), noise(64));
        assert!(peer.completions()[0].is_ok());
    }
}

fn stranger() -> IpAddr {
    ip(99)
}

/// A management datagram as it travels.
fn wrapped(from: IpAddr, to: IpAddr, mad: &[u8; MAD_LEN]) -> Datagram {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(7)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    sealed(SocketAddr::new(from, ROCE), to, &header, mad)
}

/// Of each message one that a real peer could send, if the numbers in it meant something.
fn plausible(attribute: Attribute, from: IpAddr, to: IpAddr) -> [u8; MAD_LEN] {
    let (local_comm_id, remote_comm_id) = (0x1234_5678, 0x9abc_def0);
    let mut asker = Manager::new(CmConfig::new(0x77, Mtu::B1024), [77; 32]);
    let (local, remote) = (SocketAddr::new(from, 40_000), SocketAddr::new(to, SERVICE));
    let now = Instant::ZERO;
    let message = match attribute {
        Attribute::Req => {
            let args = ConnectArgs::new(local, remote, Qpn::new(0x700), Psn::new(3), Mtu::B1024);
            asker.connect(now, &args).unwrap();
            return asker.poll_mad().unwrap().mad;
        }
        Attribute::SidrReq => {
            let args = ResolveArgs {
                local,
                remote,
                space: PortSpace::Udp,
                private_data: vec![],
            };
            asker.resolve(now, &args).unwrap();
            return asker.poll_mad().unwrap().mad;
        }
        Attribute::Mra => Message::Mra(Mra {
            local_comm_id,
            remote_comm_id,
            service_timeout: 31,
            ..Mra::default()
        }),
        Attribute::Rej => Message::Rej(Rej {
            local_comm_id,
            remote_comm_id,
            reason: 4,
            info_length: 8,
            ..Rej::default()
        }),
        Attribute::Rep => Message::Rep(Rep {
            local_comm_id,
            remote_comm_id,
            local_qpn: Qpn::new(0x700),
            ..Rep::default()
        }),
        Attribute::Rtu => Message::Rtu(Rtu {
            local_comm_id,
            remote_comm_id,
            ..Rtu::default()
        }),
        Attribute::Dreq => Message::Dreq(Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: Qpn::new(0x700),
            ..Dreq::default()
        }),
        Attribute::Drep => Message::Drep(roce_port::cm::mad::Drep {
            local_comm_id,
            remote_comm_id,
            ..roce_port::cm::mad::Drep::default()
        }),
        Attribute::SidrRep => Message::SidrRep(SidrRep {
            request_id: local_comm_id,
            ..SidrRep::default()
        }),
    };
    let mut mad = Mad::new(5, Rtu::default());
    mad.message = message;
    mad.emit()
}

/// The message itself, and with each of its fields at either end of what it holds or at random.
fn variants(attribute: Attribute, from: IpAddr, to: IpAddr) -> Vec<([u8; MAD_LEN], String)> {
    let base = plausible(attribute, from, to);
    let mut rng = ChaCha8Rng::seed_from_u64(attribute as u64);
    let mut out = vec![(base, format!("{attribute:?}"))];
    for field in Message::fields(attribute) {
        for fill in ["zeros", "ones", "random"] {
            let mut mad = base;
            for bit in field.first_bit()..field.first_bit() + field.width {
                let mask = 0x80 >> (bit % 8);
                let set = fill == "ones" || (fill == "random" && rng.random());
                mad[bit / 8] = if set { mad[bit / 8] | mask } else { mad[bit / 8] & !mask };
            }
            out.push((mad, format!("{attribute:?} with {} {fill}", field.name)));
        }
    }
    out
}

#[test]
fn management_datagrams_are_not_amplified() {
    use Consumer as C;
    for consumer in [
        C::Accepts,
        C::AcceptsLate,
        C::AcceptsAndEnds,
        C::Rejects,
        C::DoesNothing,
    ] {
        for from in [stranger(), ip(1)] {
            let mut s = scene(consumer);
            let to = s.host.addr;
            let mut most = 0;
            for attribute in Attribute::ALL {
                for (mad, what) in variants(attribute, from, to) {
                    most = most.max(s.check(&[wrapped(from, to, &mad)], &what));
                }
            }
            s.peer_is_well();
            if from == stranger() {
                let expected = match consumer {
                    C::Accepts | C::AcceptsLate => 3,
                    C::AcceptsAndEnds => 2,
                    C::Rejects | C::DoesNothing => 1,
                };
                assert_eq!(most, expected, "{consumer:?}: REPs, a DREQ, or the answer");
            }
        }
    }
}

/// The same, but what is sent comes again, so that more timers run and more answers are given.
#[test]
fn repeated_management_datagrams_are_not_amplified() {
    use Consumer as C;
    for consumer in [
        C::Accepts,
        C::AcceptsLate,
        C::AcceptsAndEnds,
        C::Rejects,
        C::DoesNothing,
    ] {
        let from = stranger();
        let mut s = scene(consumer);
        let to = s.host.addr;
        for attribute in Attribute::ALL {
            for copies in [2, 3, 10, 100] {
                let mut mad = plausible(attribute, from, to);
                // Another communication ID each time: not what was asked before.
                mad[27] = copies;
                let all = vec![wrapped(from, to, &mad); copies.into()];
                s.check(&all, &format!("{attribute:?}"));
            }
        }
        s.peer_is_well();
    }
}

/// A packet of any opcode, with every header that the opcode has.
fn packet(opcode: Opcode, dest: Qpn, psn: u32, len: usize, rng: &mut ChaCha8Rng) -> (Header, Vec<u8>) {
    let mut bth = Bth::new(opcode, dest, Psn::new(psn));
    bth.ack_req = true;
    let mut header = Header::new(bth);
    header.reth = Some(Reth {
        va: rng.random(),
        rkey: RKey(rng.random()),
        dma_len: len as u32,
    });
    header.atomic_eth = Some(AtomicEth {
        va: rng.random::<u64>() & !7,
        rkey: RKey(rng.random()),
        swap_add: 1,
        compare: 0,
    });
    header.imm = Some(rng.random());
    header.ieth = Some(RKey(rng.random()));
    header.deth = Some(Deth {
        qkey: QKey(rng.random()),
        reserved: 0,
        src_qp: Qpn::new(rng.random_range(2..1000)),
    });
    let mut payload = vec![0; if opcode.info().payload { len } else { 0 }];
    rng.fill_bytes(&mut payload);
    (header, payload)
}

#[test]
fn packets_of_all_opcodes_are_not_amplified() {
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let mut s = scene(Consumer::Accepts);
    let to = s.host.addr;
    let nobodys = Qpn::new(0x00ab_cdef);
    let dests = [Qpn::SMI, Qpn::GSI, s.qps[1], s.datagram_qp, nobodys, Qpn::MULTICAST];
    for opcode in Opcode::ALL {
        for dest in dests {
            for from in [stranger(), s.peer.addr] {
                for (i, len) in [0, 4, 256, 1024].into_iter().enumerate() {
                    // Who does not know the PSN may be anywhere in the circle of 2^24.
                    let psn = (rng.random_range(0..1u32 << 22)) + ((i as u32) << 22);
                    let (header, payload) = packet(*opcode, dest, psn, len, &mut rng);
                    let d = sealed(SocketAddr::new(from, 0xc000), to, &header, &payload);
                    s.check(&[d], &format!("{opcode:?} to {dest:?}, PSN {psn:#x}, {len} bytes"));
                }
            }
        }
    }
    s.peer_is_well();
}

/// While something is under way to the peer, forged answers do not have it sent again.
#[test]
fn forged_answers_do_not_repeat_what_is_outstanding() {
    let mut rng = ChaCha8Rng::seed_from_u64(10);
    let mut s = scene(Consumer::Accepts);
    let memory = (s.host.region(8192), s.peer.region(8192));
    s.host.completions();
    s.host
        .send(s.qps[1], 1, SendOp::Write(remote(&memory.1)), &memory.0, 8192);
    let under_way = s.host.take();
    assert!(!under_way.is_empty());
    let to = s.host.addr;
    for opcode in Opcode::ALL {
        for i in 0..4u32 {
            let psn = rng.random_range(0..1u32 << 22) + (i << 22);
            let (header, payload) = packet(*opcode, s.qps[1], psn, 0, &mut rng);
            let d = sealed(SocketAddr::new(s.peer.addr, 0xc000), to, &header, &payload);
            s.give_forged(&d);
            let out = s.host.take();
            let (packets, bytes): (Vec<_>, Vec<_>) = out.iter().map(|d| (d.segments, d.bytes.len())).unzip();
            assert!(
                packets.iter().sum::<usize>() <= 5 && bytes.iter().sum::<usize>() <= 3 * d.bytes.len(),
                "{opcode:?}, PSN {psn:#x}: {packets:?} packets of {bytes:?} bytes"
            );
        }
    }
    under_way.iter().for_each(|d| s.peer.give(d));
    exchange(&mut s.peer, &mut s.host);
    assert!(s.host.completions()[0].is_ok());
    s.peer_is_well();
}
