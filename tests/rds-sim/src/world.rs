//! Hosts with nodes and programs, and everything that can happen to them.

use std::{collections::BTreeMap, net::IpAddr};

use rds::{Config, Node, PairKey, PairState};
use roce_port::fabric::Usage;
use roce_sim::{
    Check, Coverage, Faults, LanWorld, Link, MS, Rng, SEC, Simulation, Trace,
    lan::{Lan, LanEvent, Way, of_host},
};
use roce_verbs::provider::Cx;

use crate::{
    RdsStats,
    board::Board,
    draw::Draw,
    ledger::Ledger,
    program::{Env, Side, Turn},
    stranger,
};

/// Event that is none of the network's.
#[derive(Debug)]
pub(crate) enum WorldEvent {
    /// A trouble begins.
    Trouble,
    /// A host starts again.
    Boot(usize),
    /// The link carries packets again.
    Heal(Way),
    /// A stranger asks for a connection.
    Forge,
    /// From here on nothing goes wrong any more.
    Quiet,
}

/// Everything.
pub(crate) struct World {
    lan: Lan<WorldEvent>,
    config: Config,
    /// Address of each host, and sockets of its program.
    hosts: Vec<(IpAddr, usize)>,
    /// By host; `None` while it is dead.
    sides: Vec<Option<Side>>,
    /// States that each node has kept over its deaths, and its program's plan.
    kept: Vec<BTreeMap<PairKey, PairState>>,
    plans: Vec<crate::draw::ProgramPlan>,
    empty: Vec<Usage>,
    ledger: Ledger,
    board: Board,
    coverage: Coverage,
    rng: Rng,
    chaos: Rng,
    dies: bool,
    quiet: bool,
    /// All programs are done, and nodes end.
    stopping: bool,
}

/// State of the world that a program works with.
macro_rules! env {
    ($self:ident) => {
        Env {
            ledger: &mut $self.ledger,
            board: &mut $self.board,
            rng: &mut $self.rng,
            coverage: &mut $self.coverage,
            hosts: &$self.hosts,
            quiet: $self.quiet,
        }
    };
}

impl World {
    pub(crate) fn new(seed: u64, scale: u32, trace: Trace) -> Self {
        let draw = Draw::new(scale, &mut Rng::new(seed, 60));
        let scenario = &draw.scenario;
        let link = |rng: &mut Rng| Link::new(scenario.link(rng));
        let lan = Lan::new(&draw.hosts, 1, link, Rng::new(seed, 61), trace);
        let count = draw.hosts.len();
        let mut world = Self {
            empty: lan.nodes.iter().map(|node| node.fabric.usage()).collect(),
            lan,
            config: draw.config,
            hosts: draw
                .hosts
                .iter()
                .zip(&draw.programs)
                .map(|((host, ..), plan)| (host.addr, plan.sockets))
                .collect(),
            sides: (0..count).map(|_| None).collect(),
            kept: vec![BTreeMap::new(); count],
            plans: draw.programs,
            ledger: Ledger::default(),
            board: Board::new(Rng::new(seed, 64)),
            coverage: Coverage::default(),
            rng: Rng::new(seed, 62),
            chaos: Rng::new(seed, 63),
            dies: draw.dies,
            quiet: false,
            stopping: false,
        };
        for host in 0..count {
            world.start(host).expect("sockets can be opened");
        }
        let end = draw.scenario.chaos_end.max(2 * SEC);
        for _ in 0..draw.troubles {
            let at = world.chaos.range(0, end);
            world.lan.schedule(at, LanEvent::World(WorldEvent::Trouble));
        }
        for _ in 0..draw.forged {
            let at = world.chaos.range(0, end + SEC);
            world.lan.schedule(at, LanEvent::World(WorldEvent::Forge));
        }
        world.lan.schedule(end, LanEvent::World(WorldEvent::Quiet));
        world
    }

    fn start(&mut self, host: usize) -> Check {
        let now = self.lan.instant();
        let mut random = self.rng.source();
        let mut provider = self.lan.nodes[host].provider(now);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let config = Config {
            first_sequence: (1 + now.as_nanos() / MS) << 10,
            ..self.config.clone()
        };
        let former = core::mem::take(&mut self.kept[host]);
        let node = Node::listen(&mut cx, config, &[self.hosts[host].0], former).map_err(|e| e.to_string())?;
        let plan = self.plans[host].clone();
        let mut env = env!(self);
        self.sides[host] = Some(Side::start(node, plan, now.as_nanos(), &mut env)?);
        self.lan.want_turn(host, self.lan.now);
        Ok(())
    }

    /// All programs are done: nodes end, and what they had is given back.
    fn rest(&mut self) -> Check {
        self.pass(400 * SEC)?;
        self.check_known()?;
        self.board.end()?;
        self.stopping = true;
        for host in 0..self.sides.len() {
            self.note_counters(host);
            self.lan.want_turn(host, self.lan.now);
        }
        self.pass(400 * SEC)?;
        for (host, side) in self.sides.iter().enumerate() {
            if side.as_ref().is_some_and(|side| !side.node.is_stopped()) {
                return Err(format!("the node of host {host} does not end"));
            }
        }
        self.lan.check_usage(&self.empty)
    }

    /// Requests that a stranger forged leave nothing: nodes know the connections of hosts only.
    fn check_known(&self) -> Check {
        for (host, kept) in self.kept.iter().enumerate() {
            let known = |key: &PairKey| self.hosts.iter().any(|(addr, _)| *addr == key.remote);
            if let Some(key) = kept.keys().find(|key| !known(key)) {
                return Err(format!("host {host} remembers {key}"));
            }
        }
        Ok(())
    }

    fn turn(&mut self, host: usize) -> Check {
        self.lan.receive(host);
        let now = self.lan.instant();
        let mut next = None;
        if let Some(side) = &mut self.sides[host] {
            let mut random = self.rng.source();
            let mut turn = Turn { side, env: env!(self) };
            next = of_host(&mut self.lan.nodes[host], now, &mut random, &mut turn)?;
            // What it has to remember is on its way to the disk before anything leaves that says so.
            self.kept[host] = side.node.pair_states().collect();
            if self.stopping && !side.node.is_stopped() {
                let mut provider = self.lan.nodes[host].provider(now);
                side.node.stop(&mut Cx {
                    now,
                    provider: &mut provider,
                    random: &mut random,
                });
            }
        }
        self.lan.nodes[host].lag.check()?;
        self.lan.transmit(host);
        let port = self.lan.nodes[host].next_timeout();
        if let Some(at) = [next, port].into_iter().flatten().min() {
            let at = at.as_nanos().max(now.as_nanos() + 1);
            self.lan.want_turn(host, at);
        }
        Ok(())
    }

    fn trouble(&mut self) -> Check {
        let hosts = self.lan.nodes.len();
        let host = self.chaos.index(hosts);
        let other = (host + 1 + self.chaos.index(hosts - 1)) % hosts;
        let pause = self.chaos.range(MS, 3 * SEC);
        match self.chaos.index(4) {
            0 if self.dies => self.die(host, pause)?,
            1 => {
                self.coverage.note("process that stands still");
                self.lan.stop(host, pause);
            }
            2 => {
                self.coverage.note("one-way cut");
                self.cut(host, other, pause);
            }
            _ => {
                self.coverage.note("partition");
                self.cut(host, other, pause);
                self.cut(other, host, pause);
            }
        }
        Ok(())
    }

    /// A request in the name of a host, or of an address that nobody has.
    fn forge(&mut self) {
        let hosts = self.hosts.len();
        let to = self.chaos.index(hosts);
        let from = match self.hosts[(to + 1 + self.chaos.index(hosts - 1)) % hosts].0 {
            addr if self.chaos.chance(0.7) => addr,
            IpAddr::V4(_) => IpAddr::from((0x0a00_0100 | self.chaos.range(1, 200) as u32).to_be_bytes()),
            IpAddr::V6(_) => {
                IpAddr::from((0xfd_u128 << 120 | u128::from(self.chaos.range(0x100, 0x200))).to_be_bytes())
            }
        };
        let frame = stranger::request(from, self.hosts[to].0, &mut self.chaos);
        self.coverage.note("forged request to connect");
        self.lan.schedule(0, LanEvent::Arrive { node: to, frame });
    }

    fn cut(&mut self, from: usize, to: usize, pause: u64) {
        let way = Way {
            from,
            to,
            network: None,
        };
        self.lan.set_cut(way, true);
        self.lan.schedule(pause, LanEvent::World(WorldEvent::Heal(way)));
    }

    fn die(&mut self, host: usize, pause: u64) -> Check {
        self.note_counters(host);
        let Some(mut side) = self.sides[host].take() else {
            return Ok(());
        };
        self.coverage.note("crash");
        side.die(&mut self.ledger)?;
        let addr = self.hosts[host].0;
        self.board.gone(|at| at.ip() == addr);
        self.plans[host] = side.plan;
        self.lan.kill(host);
        self.lan.schedule(pause, LanEvent::World(WorldEvent::Boot(host)));
        Ok(())
    }

    fn note_counters(&mut self, host: usize) {
        let Some(side) = &self.sides[host] else { return };
        let counters = side.node.counters();
        for (event, count) in [
            ("both connected at once", counters.ib_connect_raced),
            ("connection replaced", counters.ib_listen_closed_stale),
            ("message dropped that had come before", counters.recv_drop_old_seq),
            ("map received", counters.cong_update_received),
            ("no socket", counters.recv_drop_no_sock),
        ] {
            self.coverage.note_if(event, count > 0);
        }
    }

    fn enter_quiet(&mut self) {
        self.quiet = true;
        for link in self.lan.links() {
            link.faults = Faults::quiet(link.faults);
            (link.cut, link.lag) = (false, 0);
        }
        let now = self.lan.now;
        for (host, side) in self.sides.iter_mut().enumerate() {
            if let Some(side) = side {
                side.enter_quiet(now);
            }
            self.lan.want_turn(host, now);
        }
    }
}

impl LanWorld for World {
    type Event = WorldEvent;

    fn lan(&mut self) -> &mut Lan<WorldEvent> {
        &mut self.lan
    }

    fn is_quiet(&self) -> bool {
        self.quiet
    }

    fn is_done(&self) -> bool {
        let done = |side: &Option<Side>| side.as_ref().is_some_and(Side::is_done);
        self.quiet && self.ledger.is_settled() && self.sides.iter().all(done)
    }

    fn situation(&self) -> String {
        let sides = self.sides.iter().flatten().map(Side::situation);
        sides.chain([self.ledger.situation()]).collect::<Vec<_>>().join("; ")
    }

    fn step(&mut self, what: LanEvent<WorldEvent>) -> Check {
        match what {
            LanEvent::Arrive { node, frame } => self.lan.arrive(node, frame),
            LanEvent::Turn { node, boot } => {
                if self.lan.begin_turn(node, boot) {
                    self.turn(node)?;
                }
            }
            LanEvent::World(WorldEvent::Trouble) if self.quiet => {}
            LanEvent::World(WorldEvent::Trouble) => self.trouble()?,
            LanEvent::World(WorldEvent::Boot(host)) => {
                self.lan.boot(host);
                self.start(host)?;
            }
            LanEvent::World(WorldEvent::Forge) => self.forge(),
            LanEvent::World(WorldEvent::Heal(way)) => self.lan.set_cut(way, false),
            LanEvent::World(WorldEvent::Quiet) => self.enter_quiet(),
        }
        Ok(())
    }
}

impl Simulation for World {
    type Counts = RdsStats;

    fn run(&mut self) -> Check {
        self.run_until_done()?;
        self.rest()
    }

    fn now(&self) -> u64 {
        self.lan.now
    }

    fn into_counts(self) -> RdsStats {
        RdsStats {
            runs: 1,
            packets: self.lan.packets,
            lost: self.lan.stats.lost + self.lan.stats.overflowed,
            sent: self.ledger.sent,
            received: self.ledger.received,
            simulated_ns: self.lan.now,
            trace_hash: self.lan.trace.hash() ^ self.ledger.received,
            coverage: self.coverage.runs(),
        }
    }
}
