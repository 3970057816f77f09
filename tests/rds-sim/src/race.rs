//! Two nodes that connect to each other at about the same time, with every fate of the connection manager's first datagrams: ours with
//! ours, and ours with a [model of the kernel's](crate::kernel).
//!
//! However it goes, in the end one connection stands, soon, and each message has come once and in order.

use core::time::Duration;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use rds::{Config, Node, Output, Received, Rings, SocketId};
use roce_bth::Qpn;
use roce_port::fabric::Usage;
use roce_sim::{
    Check, Coverage, Faults, Frame, LanWorld, Link, MS, Rng, SEC, Simulation, Trace, US,
    lan::{Lan, LanEvent, Machines, of_host, plain_host},
};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

use crate::{
    RdsStats,
    kernel::{Kernel, Number},
};

/// Fates of a datagram: how much later it comes. A round trip takes 200 us, and a request is repeated after seconds.
const FATES: [Option<u64>; 5] = [Some(0), Some(300 * US), Some(30 * MS), Some(VERY_LATE), None];
/// When the connection stands and its messages have come, whatever else has happened.
const VERY_LATE: u64 = 7 * SEC;
/// Datagrams of the connection manager that have one.
const FATED: usize = 5;
/// When the second node begins, after the first.
const STARTS: [u64; 3] = [0, 150 * US, 250 * US];
/// Which of the two is the kernel's.
const KERNELS: [Option<usize>; 3] = [None, Some(0), Some(1)];
/// Orders of events there are.
pub const RACES: u64 = (FATES.len().pow(FATED as u32) * STARTS.len() * KERNELS.len()) as u64;

/// Messages of each program.
const MESSAGES: Number = 3;
/// Port of each program's socket.
const PORT: u16 = 4000;
/// Longest time until all messages have come, nanoseconds: with one of ours that accepts at once, with a kernel's that refuses and tries
/// again after a random time, and if datagrams are lost or come late.
const LONGEST: [u64; 3] = [2 * MS, 20 * MS, 10 * SEC];
/// Time after which an overloaded kernel looks at a datagram of the connection manager. Each attempt of two that refuse each other takes
/// as long.
const OVERLOADED: u64 = 12 * SEC;
/// Attempts until an overloaded kernel and our node are connected: half of those fail in which both ask at once.
const ATTEMPTS: u64 = 20;

/// Event that is none of the network's.
#[derive(Debug)]
pub(crate) enum RaceEvent {
    /// A program sends its messages.
    Begin(usize),
    /// A datagram comes late.
    Late { node: usize, frame: Frame },
}

/// Our node and a program with a socket.
struct Ours {
    node: Node,
    socket: SocketId,
    peer: SocketAddr,
    /// Connections and attempts that have ended.
    downs: u64,
}

enum Side {
    Ours(Box<Ours>),
    Kernel(Box<Kernel>),
}

/// Decoded number of a race.
#[derive(Clone, Copy, Debug)]
struct Plan {
    start: u64,
    kernel: Option<usize>,
    /// How long the kernel does not get to its datagrams of the connection manager.
    lag: u64,
    fates: [Option<u64>; FATED],
}

impl Plan {
    /// The kernel at one of the two addresses is overloaded.
    fn overloaded(number: u64) -> Self {
        Self {
            start: STARTS[0],
            kernel: Some((number % 2) as usize),
            lag: OVERLOADED,
            fates: [Some(0); FATED],
        }
    }

    /// Races whose first datagrams differ come first.
    fn new(mut number: u64) -> Self {
        let mut digit = |of: usize| {
            let digit = number % of as u64;
            number /= of as u64;
            digit as usize
        };
        Self {
            start: STARTS[digit(STARTS.len())],
            kernel: KERNELS[digit(KERNELS.len())],
            lag: 0,
            fates: core::array::from_fn(|_| FATES[digit(FATES.len())]),
        }
    }

    fn longest(&self) -> u64 {
        if self.lag > 0 {
            return ATTEMPTS * self.lag;
        }
        let disturbed = self.fates.iter().any(|fate| fate.is_none_or(|late| late > MS));
        match (disturbed, self.kernel) {
            (false, None) => LONGEST[0],
            (false, Some(_)) => LONGEST[1],
            (true, _) => LONGEST[2],
        }
    }
}

pub(crate) struct Race {
    plan: Plan,
    lan: Lan<RaceEvent>,
    sides: [Side; 2],
    empty: Vec<Usage>,
    rng: Rng,
    /// Datagrams of the connection manager that have come.
    datagrams: usize,
    /// By receiver.
    received: [Vec<Number>; 2],
    begun: usize,
    /// When all messages had come.
    came_at: Option<u64>,
    stopping: bool,
}

fn config() -> Config {
    Config {
        rings: Rings { send: 16, recv: 16 },
        ack_delay: Duration::from_millis(100),
        ..Config::default()
    }
}

impl Race {
    /// Two nodes that begin at about the same time.
    pub(crate) fn new(number: u64, trace: Trace) -> Self {
        Self::with(Plan::new(number), number, trace)
    }

    /// Our node and an overloaded kernel.
    pub(crate) fn overloaded(number: u64, trace: Trace) -> Self {
        Self::with(Plan::overloaded(number), number, trace)
    }

    fn with(plan: Plan, number: u64, trace: Trace) -> Self {
        let faults = Faults {
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay: 100 * US,
            jitter: 0,
            bandwidth: 1_250_000_000,
            queue: 64 << 20,
        };
        let hosts = [0, 1].map(|index| plain_host(Ipv4Addr::new(10, 0, 0, index + 1).into()));
        let mut lan = Lan::new(&hosts, 1, |_| Link::new(faults), Rng::new(number, 71), trace);
        let empty = lan.nodes.iter().map(|node| node.fabric.usage()).collect();
        let mut rng = Rng::new(number, 72);
        let addrs = hosts.each_ref().map(|(plan, ..)| plan.addr);
        let sides = [0, 1].map(|i| {
            let now = lan.instant();
            let mut provider = lan.nodes[i].provider(now);
            let mut cx = Cx {
                now,
                provider: &mut provider,
                random: &mut rng.source(),
            };
            Side::start(&mut cx, plan.kernel == Some(i), addrs[i], addrs[1 - i])
        });
        lan.schedule(0, LanEvent::World(RaceEvent::Begin(0)));
        lan.schedule(plan.start, LanEvent::World(RaceEvent::Begin(1)));
        Self {
            plan,
            lan,
            sides,
            empty,
            rng,
            datagrams: 0,
            received: [Vec::new(), Vec::new()],
            begun: 0,
            came_at: None,
            stopping: false,
        }
    }

    /// A datagram comes, if it does.
    fn arrive(&mut self, node: usize, frame: Frame) {
        let is_management = frame.bytes.get(5..8) == Some(&Qpn::GSI.value().to_be_bytes()[1..]);
        if !is_management {
            return self.lan.arrive(node, frame);
        }
        let lag = u64::from(self.plan.kernel == Some(node)) * self.plan.lag;
        let fate = self.plan.fates.get(self.datagrams).copied().unwrap_or(Some(0));
        let fate = fate.map(|late| late + lag);
        self.datagrams += 1;
        match fate {
            Some(0) => self.lan.arrive(node, frame),
            Some(late) => self
                .lan
                .schedule(late, LanEvent::World(RaceEvent::Late { node, frame })),
            None => {}
        }
    }

    fn turn(&mut self, i: usize) -> Check {
        self.lan.receive(i);
        let now = self.lan.instant();
        let mut random = self.rng.source();
        let side = &mut self.sides[i];
        let next = of_host(&mut self.lan.nodes[i], now, &mut random, side)?;
        self.received[i].extend(side.take_received());
        if self.received.iter().all(|received| received.len() >= MESSAGES as usize) {
            self.came_at.get_or_insert(now.as_nanos());
        }
        if self.stopping && !side.is_stopped() {
            let mut provider = self.lan.nodes[i].provider(now);
            side.stop(&mut Cx {
                now,
                provider: &mut provider,
                random: &mut random,
            });
        }
        self.lan.transmit(i);
        let port = self.lan.nodes[i].next_timeout();
        if let Some(at) = next.into_iter().chain(port).min() {
            let at = at.as_nanos().max(now.as_nanos() + 1);
            self.lan.want_turn(i, at);
        }
        Ok(())
    }

    /// Connections and attempts of ours that have ended.
    fn downs(&self) -> u64 {
        let of = |side: &Side| match side {
            Side::Ours(ours) => ours.downs,
            Side::Kernel(_) => 0,
        };
        self.sides.iter().map(of).sum()
    }

    /// Checks that the messages before this one have come, once and in order.
    fn check_received(&self, before: Number) -> Check {
        let expected: Vec<Number> = (0..before).collect();
        match self.received.iter().find(|received| **received != expected) {
            Some(wrong) => Err(format!("{wrong:?} came instead of {expected:?}; {}", self.situation())),
            None => Ok(()),
        }
    }
}

impl Side {
    fn start(cx: &mut Cx<'_>, is_kernel: bool, addr: IpAddr, peer: IpAddr) -> Self {
        if is_kernel {
            return Self::Kernel(Box::new(Kernel::listen(cx, addr, peer).expect("a listener")));
        }
        let mut node = Node::listen(cx, config(), &[addr], []).expect("a listener");
        let socket = node.socket().expect("a socket");
        node.bind(socket, (addr, PORT).into(), 0).expect("a free port");
        Self::Ours(Box::new(Ours {
            node,
            socket,
            peer: (peer, PORT).into(),
            downs: 0,
        }))
    }

    /// The program sends its first messages, or those after them.
    fn begin(&mut self, first: Number) -> Check {
        for number in first..first + MESSAGES {
            match self {
                Self::Ours(ours) => ours
                    .node
                    .send(ours.socket, Some(ours.peer), &number.to_be_bytes())
                    .map_err(|e| e.to_string())?,
                Self::Kernel(kernel) => kernel.send(number),
            }
        }
        Ok(())
    }

    fn take_received(&mut self) -> Vec<Number> {
        let ours = match self {
            Self::Kernel(kernel) => return kernel.take_received(),
            Self::Ours(ours) => ours,
        };
        let mut received = Vec::new();
        while let Ok(next) = ours.node.receive(ours.socket) {
            if let Received::Message(message) = next {
                received.extend(message.data.try_into().map(Number::from_be_bytes).ok());
            }
        }
        received
    }

    /// Returns whether it is connected, and all that it had to send is acknowledged.
    fn is_settled(&self) -> bool {
        match self {
            Self::Ours(ours) => ours.node.is_idle() && ours.node.connections().all(|c| c.is_up),
            Self::Kernel(kernel) => kernel.is_settled(),
        }
    }

    fn raced(&self) -> bool {
        match self {
            Self::Ours(ours) => ours.node.counters().ib_connect_raced > 0,
            Self::Kernel(kernel) => kernel.raced > 0,
        }
    }

    fn situation(&self) -> String {
        match self {
            Self::Ours(ours) => format!("{:?}", ours.node.connections().collect::<Vec<_>>()),
            Self::Kernel(kernel) => kernel.situation(),
        }
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        match self {
            Self::Ours(ours) => ours.node.stop(cx),
            Self::Kernel(kernel) => kernel.stop(cx),
        }
    }

    fn is_stopped(&self) -> bool {
        match self {
            Self::Ours(ours) => ours.node.is_stopped(),
            Self::Kernel(kernel) => kernel.is_stopped(),
        }
    }
}

impl Machines for Side {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        match self {
            Self::Ours(ours) => drop(ours.node.completion(cx, qp, wc)),
            Self::Kernel(kernel) => kernel.completion(cx, qp, wc),
        }
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        match self {
            Self::Ours(ours) => drop(ours.node.event(cx, event)),
            Self::Kernel(kernel) => kernel.event(cx, event),
        }
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        match self {
            Self::Ours(ours) => ours.node.timeout(cx),
            Self::Kernel(kernel) => kernel.end_batch(cx),
        }
    }

    fn work(&mut self, _: &mut Cx<'_>) -> Check {
        if let Self::Ours(ours) = self {
            while let Some(output) = ours.node.poll_output() {
                ours.downs += u64::from(matches!(output, Output::Down(..)));
            }
        }
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        match self {
            Self::Ours(ours) => ours.node.end_batch(cx),
            Self::Kernel(kernel) => kernel.end_batch(cx),
        }
    }

    fn next_timeout(&self) -> Option<Instant> {
        match self {
            Self::Ours(ours) => ours.node.next_timeout(),
            Self::Kernel(kernel) => kernel.next_timeout(),
        }
    }
}

impl LanWorld for Race {
    type Event = RaceEvent;

    fn lan(&mut self) -> &mut Lan<RaceEvent> {
        &mut self.lan
    }

    fn is_quiet(&self) -> bool {
        true
    }

    fn is_done(&self) -> bool {
        self.begun == 2 && self.came_at.is_some() && self.sides.iter().all(Side::is_settled)
    }

    fn situation(&self) -> String {
        let sides = self.sides.each_ref().map(Side::situation);
        format!("{:?}: {}; received {:?}", self.plan, sides.join("; "), self.received)
    }

    fn step(&mut self, what: LanEvent<RaceEvent>) -> Check {
        match what {
            LanEvent::Arrive { node, frame } => self.arrive(node, frame),
            LanEvent::World(RaceEvent::Late { node, frame }) => self.lan.arrive(node, frame),
            LanEvent::Turn { node, boot } => {
                if self.lan.begin_turn(node, boot) {
                    self.turn(node)?;
                }
            }
            LanEvent::World(RaceEvent::Begin(i)) => {
                self.begun += 1;
                self.sides[i].begin(0)?;
                self.lan.want_turn(i, self.lan.now);
            }
        }
        Ok(())
    }
}

impl Simulation for Race {
    type Counts = RdsStats;

    fn run(&mut self) -> Check {
        self.run_until_done()?;
        if self.came_at.is_none_or(|at| at > self.plan.longest()) {
            return Err(format!("it took too long; {}", self.situation()));
        }
        let downs = self.downs();
        // What is late comes, and does no harm for long.
        self.pass(60 * SEC + 2 * self.plan.lag)?;
        self.check_received(MESSAGES)?;
        if self.downs() > downs && !self.plan.fates.contains(&Some(VERY_LATE)) {
            return Err(format!("what stood was ended; {}", self.situation()));
        }
        // Both mean the same connection: what is sent now is there at once.
        for i in 0..2 {
            self.sides[i].begin(MESSAGES)?;
            self.lan.want_turn(i, self.lan.now);
        }
        self.pass(20 * MS)?;
        self.check_received(2 * MESSAGES)?;
        // An acknowledgement may wait for a timer.
        self.pass(SEC)?;
        if !self.is_done() {
            return Err(format!("the connection does not last; {}", self.situation()));
        }
        self.stopping = true;
        for i in 0..2 {
            self.lan.want_turn(i, self.lan.now);
        }
        self.pass(400 * SEC)?;
        if !self.sides.iter().all(Side::is_stopped) {
            return Err("a node does not end".into());
        }
        self.lan.check_usage(&self.empty)
    }

    fn now(&self) -> u64 {
        self.lan.now
    }

    fn into_counts(self) -> RdsStats {
        let mut coverage = Coverage::default();
        coverage.note_if("both connected at once", self.sides.iter().any(Side::raced));
        RdsStats {
            runs: 1,
            packets: self.lan.packets,
            sent: 2 * u64::from(MESSAGES),
            received: self.received.iter().map(|received| received.len() as u64).sum(),
            simulated_ns: self.lan.now,
            trace_hash: self.lan.trace.hash(),
            coverage: coverage.runs(),
            ..RdsStats::default()
        }
    }
}
