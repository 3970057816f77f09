//! Two connection managers whose MADs are changed, repeated and misled on their way, under any calls of their consumers: no
//! panic, no event of what is destroyed, and nothing left in the end.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_port::cm::{
    AcceptArgs, CmConfig, ConnId, ConnParams, ConnTransport, ConnectArgs, Event, ListenArgs, Manager, OutMad,
    RejectReason, ResolveArgs, SidrAnswer, cma::PortSpace, mad::Attribute,
};
use roce_verbs::{Instant, Mtu, Psn, QKey, Qpn};

use crate::input::Input;

const PORTS: [(PortSpace, u16); 2] = [(PortSpace::Tcp, 7), (PortSpace::Udp, 7)];
const CONNECTIONS: usize = 12;
/// MADs to repeat.
const POOL: usize = 64;
/// More rounds than timers can take to run out: after the last call nothing new begins.
const ROUNDS: usize = 100_000;

struct Side {
    addr: IpAddr,
    manager: Manager,
    ids: Vec<ConnId>,
    destroyed: BTreeSet<ConnId>,
}

impl Side {
    fn new(n: u8) -> Self {
        let config = CmConfig {
            max_connections: CONNECTIONS,
            max_half_open: 8,
            max_lingering: 8,
            max_queued_mads: 16,
            // The same numbers in every run, so that the fuzzer can find them.
            comm_ids: (1, 40),
            ..CmConfig::new(u64::from(n), Mtu::B4096)
        };
        let mut manager = Manager::new(config, [n; 32]);
        for (space, port) in PORTS {
            let args = ListenArgs {
                addr: None,
                space,
                port,
                transport: None,
                backlog: 4,
            };
            manager.listen_for(&args).expect("a free port");
        }
        Self {
            addr: [10, 0, 0, n].into(),
            manager,
            ids: vec![],
            destroyed: BTreeSet::new(),
        }
    }

    fn begin(&mut self, now: Instant, peer: IpAddr, input: &mut Input<'_>) {
        let (local, (space, port)) = (SocketAddr::new(self.addr, 0), PORTS[input.below(2)]);
        let remote = SocketAddr::new(peer, port);
        let begun = if space.is_datagram() {
            let private_data = input.take(3).to_vec();
            self.manager.resolve(
                now,
                &ResolveArgs {
                    local,
                    remote,
                    space,
                    private_data,
                },
            )
        } else {
            let qpn = Qpn::new(2 + u32::from(input.byte() % 8));
            let transports = [ConnTransport::Rc, ConnTransport::Uc, ConnTransport::Xrc];
            let mut args = ConnectArgs::new(local, remote, qpn, Psn::new(1), Mtu::B1024);
            args.qp.transport = transports[input.below(3)];
            self.manager.connect(now, &args)
        };
        self.ids.extend(begun.ok());
    }

    /// A call on one of the connections; those of the wrong state have to be refused, not to harm.
    fn call(&mut self, now: Instant, input: &mut Input<'_>) {
        let Some(&id) = self.ids.get(input.below(self.ids.len())) else {
            return;
        };
        let m = &mut self.manager;
        match input.byte() % 9 {
            0 => {
                let params = ConnParams {
                    private_data: input.take(5).to_vec(),
                    ..ConnParams::default()
                };
                let _ = m.accept(now, id, &AcceptArgs::new(Qpn::new(9), Psn::new(3), params));
            }
            1 => _ = m.reject(now, id, RejectReason::CONSUMER, input.take(4)),
            2 => _ = m.qp_ready(now, id),
            3 => _ = m.reject(now, id, RejectReason::CONSUMER, &[]),
            4 => m.disconnect(now, id),
            5 => {
                m.destroy(now, id);
                self.ids.retain(|i| *i != id);
                self.destroyed.insert(id);
            }
            6 => _ = m.reject(now, id, RejectReason::NO_QP, &[]),
            7 => {
                let answer = SidrAnswer {
                    status: input.byte(),
                    qpn: Qpn::new(4),
                    qkey: QKey(5),
                    private_data: vec![],
                };
                let _ = m.answer(now, id, &answer);
            }
            _ => m.communication_established(now, id),
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.manager.poll_event() {
            let id = event.conn();
            assert!(!self.destroyed.contains(&id), "{event:?} of what is destroyed");
            if matches!(event, Event::Request { .. } | Event::SidrRequest { .. }) {
                self.ids.push(id);
            }
            assert!(self.ids.contains(&id), "{event:?} of nothing known");
        }
        assert!(self.manager.usage().connections <= CONNECTIONS);
    }
}

/// A changed MAD: another kind, numbers of others, single bytes.
fn change(out: &mut OutMad, pool: &[OutMad], input: &mut Input<'_>) {
    for _ in 0..input.byte() % 4 {
        match input.byte() % 4 {
            0 => out.mad[17] = Attribute::ALL[input.below(Attribute::ALL.len())] as u16 as u8,
            1 => {
                // Communication IDs and what else stands in the first words.
                if let Some(other) = pool.get(input.below(pool.len())) {
                    let (from, to) = (24 + 4 * input.below(4), 24 + 4 * input.below(4));
                    out.mad[to..to + 4].copy_from_slice(&other.mad[from..from + 4]);
                }
            }
            2 => {
                // The transaction ID.
                if let Some(other) = pool.get(input.below(pool.len())) {
                    out.mad[8..16].copy_from_slice(&other.mad[8..16]);
                }
            }
            _ => out.mad[24 + input.below(232)] = input.byte(),
        }
    }
}

/// See the module.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut sides = [Side::new(1), Side::new(2)];
    let mut now = Instant::ZERO + Duration::from_millis(1);
    let (mut wire, mut pool) = (Vec::<OutMad>::new(), Vec::<OutMad>::new());
    while !input.0.is_empty() {
        let op = input.byte();
        let which = usize::from(op >> 7);
        let peer = sides[1 - which].addr;
        match op & 7 {
            0 => sides[which].begin(now, peer, &mut input),
            1 | 2 => sides[which].call(now, &mut input),
            3 => now = now + Duration::from_millis(1 << (input.byte() % 16)),
            4 => drop(wire.pop()),
            kind => {
                let from = if kind == 7 { &pool } else { &wire };
                let index = input.below(from.len());
                if let Some(mut out) = from.get(index).copied() {
                    if kind == 5 {
                        wire.remove(index);
                    } else {
                        change(&mut out, &pool, &mut input);
                    }
                    let to = usize::from(out.remote == sides[1].addr);
                    sides[to].manager.handle_mad(now, out.remote, out.local, &out.mad);
                }
            }
        }
        for side in &mut sides {
            side.manager.handle_timeout(now);
            while let Some(out) = side.manager.poll_mad() {
                pool.push(out);
                wire.push(out);
            }
            // A consumer may be slow to look.
            if op & 0x40 == 0 {
                side.events();
            }
        }
        let surplus = pool.len().saturating_sub(POOL);
        pool.drain(..surplus);
        let surplus = wire.len().saturating_sub(POOL);
        wire.drain(..surplus);
    }
    for side in &mut sides {
        side.events();
        for id in std::mem::take(&mut side.ids) {
            side.manager.destroy(now, id);
            side.destroyed.insert(id);
        }
        let mut rounds = 0;
        while let Some(at) = side.manager.next_timeout() {
            rounds += 1;
            assert!(rounds < ROUNDS, "timers never run out");
            side.manager.handle_timeout(at);
            while side.manager.poll_mad().is_some() {}
            side.events();
        }
        assert_eq!(side.manager.usage().connections, 0, "what is destroyed stays");
    }
}
