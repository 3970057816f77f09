//! Hosts that are driven as a loop drives them, in turns, and the network between them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
    net::{IpAddr, SocketAddr},
};

use roce_port::fabric::{FabricConfig, Ports as _, Usage};
use roce_port::{RxMeta, TxBatch, TxConfig};
use roce_verbs::{Instant, Mtu, provider::Provider as _};

use crate::{Check, Frame, HostPlan, Link, NetStats, Rng, Trace};

mod late;
mod node;
mod turn;

pub use late::{Lag, LagPlan, Late};
pub use node::{Node, address};
pub use turn::{Machines, of_host};

use node::fabric;

/// From a host to another, in all networks or with an end in one.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Sending host.
    pub from: usize,
    /// Receiving host.
    pub to: usize,
    /// Network that one end is in; `None`: all.
    pub network: Option<usize>,
}

/// Host without limits or delays of its own, whose device has everything but selective acknowledgements.
pub fn plain_host(addr: IpAddr) -> (HostPlan, FabricConfig, LagPlan) {
    let plan = HostPlan {
        addr,
        mtu: Mtu::B4096,
        gro: false,
        sees_headers: true,
        counts_up: false,
        tx: TxConfig::default(),
        window: Default::default(),
        rx_buffer: 4 << 20,
        latency: 0,
        turn_packets: 64,
        tight: false,
        keeps: false,
    };
    let keys = FabricConfig {
        instant_keys: true,
        fast_registration: true,
        windows: true,
        tells_invalidated: true,
    };
    let lag = LagPlan {
        most: 0,
        type_1_only: false,
    };
    (plan, keys, lag)
}

/// Event at a point in time.
#[derive(Debug)]
pub enum LanEvent<E> {
    /// A frame arrives.
    Arrive {
        /// Receiver.
        node: usize,
        /// The frame.
        frame: Frame,
    },
    /// A host's loop runs.
    Turn {
        /// The host.
        node: usize,
        /// Its life, so that events of an earlier one are ignored.
        boot: u32,
    },
    /// The world's own.
    World(E),
}

/// Clock, hosts, links.
pub struct Lan<E> {
    /// Time, nanoseconds.
    pub now: u64,
    /// The hosts.
    pub nodes: Vec<Node>,
    networks: usize,
    links: Vec<Link>,
    rng: Rng,
    /// Counts of the links' faults.
    pub stats: NetStats,
    /// Packets that were sent.
    pub packets: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    /// By place in the queue.
    events: BTreeMap<u64, LanEvent<E>>,
    seq: u64,
    /// Capture and log.
    pub trace: Trace,
}

impl<E> Lan<E> {
    /// Hosts with how they handle keys and how long a drain takes them, each in all of the networks, and from each address to each
    /// a link that `link` makes.
    pub fn new(
        plans: &[(HostPlan, FabricConfig, LagPlan)],
        networks: usize,
        mut link: impl FnMut(&mut Rng) -> Link,
        mut rng: Rng,
        trace: Trace,
    ) -> Self {
        let nodes: Vec<Node> = plans
            .iter()
            .enumerate()
            .map(|(i, (plan, keys, lag))| {
                let addrs: Vec<IpAddr> = (0..networks).map(|n| address(plan.addr, n)).collect();
                let fabric = fabric(plan, &addrs, *keys, Node::guid(i, 0), &mut rng);
                Node {
                    lag: Lag::new(*lag, fabric.devices(), Rng::from_seed(rng.seed())),
                    fabric,
                    batch: Some(TxBatch::new(plan.tx.clone())),
                    plan: plan.clone(),
                    addrs,
                    keys: *keys,
                    rx: VecDeque::new(),
                    rx_bytes: 0,
                    boot: 0,
                    alive: true,
                    turn_at: None,
                    stopped_until: 0,
                }
            })
            .collect();
        let ends = nodes.len() * networks;
        let links = (0..ends * ends).map(|_| link(&mut rng)).collect();
        Self {
            now: 0,
            nodes,
            networks,
            links,
            rng,
            stats: NetStats::default(),
            packets: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            seq: 0,
            trace,
        }
    }

    /// Time.
    pub fn instant(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    /// Checks that each host's provider has as many objects as this.
    ///
    /// # Errors
    /// Names the host that has others.
    pub fn check_usage(&self, expected: &[Usage]) -> Check {
        for (i, (node, expected)) in self.nodes.iter().zip(expected).enumerate() {
            let left = node.fabric.usage();
            if left != *expected {
                return Err(format!("host {i} is left with {left:?} instead of {expected:?}"));
            }
        }
        Ok(())
    }

    /// Schedules an event `after` nanoseconds from now.
    pub fn schedule(&mut self, after: u64, what: LanEvent<E>) {
        self.seq += 1;
        self.queue.push(Reverse((self.now + after, self.seq)));
        self.events.insert(self.seq, what);
    }

    /// The next thing to happen. The clock has moved there.
    pub fn pop(&mut self) -> Option<LanEvent<E>> {
        let Reverse((at, seq)) = self.queue.pop()?;
        self.now = at;
        self.events.remove(&seq)
    }

    /// Cuts or mends what leads from a host to another.
    pub fn set_cut(&mut self, way: Way, cut: bool) {
        self.each_link(way, |link| link.cut = cut);
    }

    /// How much longer what leads from a host to another takes, nanoseconds.
    pub fn set_lag(&mut self, way: Way, lag: u64) {
        self.each_link(way, |link| link.lag = lag);
    }

    fn each_link(&mut self, way: Way, change: impl Fn(&mut Link)) {
        for (a, b) in (0..self.networks).flat_map(|a| (0..self.networks).map(move |b| (a, b))) {
            if way.network.is_none_or(|n| n == a || n == b) {
                let link = self.link([way.from, a], [way.to, b]);
                change(&mut self.links[link]);
            }
        }
    }

    /// From a host's address in a network to another's.
    fn link(&self, [from, a]: [usize; 2], [to, b]: [usize; 2]) -> usize {
        let n = self.nodes.len();
        ((a * self.networks + b) * n + from) * n + to
    }

    /// Links of each address to each.
    pub fn links(&mut self) -> &mut [Link] {
        &mut self.links
    }

    /// Plans a turn of a host's loop at this time, unless an earlier one is planned.
    pub fn want_turn(&mut self, node: usize, at: u64) {
        let (now, host) = (self.now, &mut self.nodes[node]);
        let at = at.max(now).max(host.stopped_until);
        if host.alive && host.turn_at.is_none_or(|planned| at < planned) {
            host.turn_at = Some(at);
            let boot = host.boot;
            self.schedule(at - now, LanEvent::Turn { node, boot });
        }
    }

    /// Whether a planned turn is still wanted; then it begins.
    pub fn begin_turn(&mut self, node: usize, boot: u32) -> bool {
        let (now, host) = (self.now, &mut self.nodes[node]);
        if !host.alive || host.boot != boot || host.turn_at != Some(now) {
            return false;
        }
        host.turn_at = None;
        if now < host.stopped_until {
            let until = host.stopped_until;
            self.want_turn(node, until);
            return false;
        }
        true
    }

    /// A host's process stands still for so long; packets for it wait.
    pub fn stop(&mut self, node: usize, pause: u64) {
        self.nodes[node].stopped_until = self.now + pause;
        self.want_turn(node, self.now + pause);
    }

    /// Whether a host stands still.
    pub fn is_stopped(&self, node: usize) -> bool {
        self.now < self.nodes[node].stopped_until
    }

    /// A frame arrives at a host.
    pub fn arrive(&mut self, node: usize, frame: Frame) {
        let host = &mut self.nodes[node];
        if !host.alive {
            return;
        }
        if host.rx_bytes + frame.bytes.len() > host.plan.rx_buffer {
            self.stats.overflowed += 1;
            return;
        }
        host.rx_bytes += frame.bytes.len();
        host.rx.push_back(frame);
        let latency = host.plan.latency;
        let at = self.now + self.rng.range(0, latency);
        self.want_turn(node, at);
    }

    /// First part of a turn: packets, then timers.
    pub fn receive(&mut self, node: usize) {
        let (now, host) = (Instant::from_nanos(self.now), &mut self.nodes[node]);
        host.fabric.set_now(now);
        while let Some(frame) = host.rx.pop_front() {
            host.rx_bytes -= frame.bytes.len();
            self.trace.received(self.now, node, &frame);
            let meta = RxMeta {
                local: frame.dst,
                remote: frame.src,
                identification: host.plan.sees_headers.then_some(frame.identification),
                segment_len: frame.segment_len,
                tos: frame.tos,
                hop_limit: 0,
            };
            host.fabric.ports().port(0).handle_datagram(now, &meta, &frame.bytes);
        }
        let port = host.fabric.ports().port(0);
        if port.poll_timeout().is_some_and(|at| at <= now) {
            port.handle_timeout(now);
        }
    }

    /// Last part of a turn: everything leaves.
    pub fn transmit(&mut self, node: usize) {
        let now = self.instant();
        let Some(mut batch) = self.nodes[node].batch.take() else {
            return;
        };
        loop {
            let more = self.nodes[node].fabric.ports().port(0).poll_transmit(now, &mut batch);
            let trains: Vec<Frame> = batch.trains().flat_map(|train| self.frames(&train)).collect();
            for frame in trains {
                self.trace.sent(self.now, &frame);
                self.carry(node, frame);
            }
            batch.clear();
            if !more {
                break;
            }
        }
        self.nodes[node].batch = Some(batch);
    }

    /// A train as one frame, or packet by packet.
    fn frames(&mut self, train: &roce_port::Train<'_>) -> Vec<Frame> {
        self.packets += train.segments() as u64;
        let frame = |bytes: &[u8], identification, segment_len| Frame {
            src: SocketAddr::new(train.local, train.src_port),
            dst: train.remote.ip(),
            tos: train.tos,
            identification,
            segment_len,
            bytes: bytes.to_vec(),
            damaged: false,
        };
        let to = self.find(train.remote.ip());
        let whole = to.is_some_and(|[to, _]| self.nodes[to].plan.gro && !self.nodes[to].plan.sees_headers);
        if whole && train.segments() > 1 && self.rng.chance(0.7) {
            return vec![frame(train.bytes, 0, train.segment_len)];
        }
        let packets = train.packets().enumerate();
        packets.map(|(i, packet)| frame(packet, i as u16, 0)).collect()
    }

    /// Returns the host and the network of an address.
    fn find(&self, addr: IpAddr) -> Option<[usize; 2]> {
        let of = |node: &Node| node.addrs.iter().position(|of| *of == addr);
        let mut found = self.nodes.iter().enumerate();
        found.find_map(|(node, plan)| Some([node, of(plan)?]))
    }

    fn carry(&mut self, from: usize, frame: Frame) {
        let Some([to, network]) = self.find(frame.dst) else {
            return;
        };
        let src = frame.src.ip();
        let own = self.nodes[from].addrs.iter().position(|addr| *addr == src);
        let link = self.link([from, own.unwrap_or(0)], [to, network]);
        let sees = self.nodes[to].plan.sees_headers;
        let mut arrivals = Vec::new();
        self.links[link].send(self.now, frame, sees, &mut self.rng, &mut self.stats, |at, frame| {
            arrivals.push((at, frame))
        });
        for (at, frame) in arrivals {
            let after = at.saturating_sub(self.now);
            self.schedule(after, LanEvent::Arrive { node: to, frame });
        }
    }

    /// A host dies: what it had in its hands is gone.
    pub fn kill(&mut self, node: usize) {
        let host = &mut self.nodes[node];
        host.alive = false;
        (host.turn_at, host.stopped_until) = (None, 0);
        host.lag.clear();
        host.rx.clear();
        host.rx_bytes = 0;
    }

    /// Starts a host again, without any memory of the past.
    pub fn boot(&mut self, node: usize) {
        let host = &mut self.nodes[node];
        host.boot += 1;
        host.alive = true;
        let guid = Node::guid(node, host.boot);
        host.fabric = fabric(&host.plan, &host.addrs, host.keys, guid, &mut self.rng);
        host.fabric.set_now(Instant::from_nanos(self.now));
    }
}
