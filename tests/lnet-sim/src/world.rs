//! Hosts with nodes and programs, and everything that can happen to them.

use std::{collections::BTreeSet, net::IpAddr};

use lnet::{Config, Node, proto::Nid};
use roce_bth::{Packet, Syndrome};
use roce_port::fabric::Usage;
use roce_sim::{
    Check, Coverage, Faults, Frame, LanWorld, Link, MS, Rng, SEC, Simulation, Trace,
    lan::{Lan, LanEvent, Way, of_host},
};
use roce_verbs::provider::Cx;

use crate::{
    LnetStats,
    draw::Draw,
    intruder::Intruder,
    ledger::Ledger,
    plan::{Places, ProgramPlan},
    program::{Env, Side, Turn},
    stranger,
    tester::{Rules, TesterPlan},
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
    configs: Vec<Config>,
    hosts: Vec<Nid>,
    /// By host; `None` while it is dead.
    sides: Vec<Option<Side>>,
    plans: Vec<(ProgramPlan, Option<TesterPlan>)>,
    empty: Vec<Usage>,
    ledger: Ledger,
    coverage: Coverage,
    rng: Rng,
    chaos: Rng,
    dies: bool,
    strict: bool,
    places: Places,
    rules: Rules,
    /// Stranger with a node, on the host behind the others.
    intruder: Option<Intruder>,
    /// Hosts that have started again.
    restarted: BTreeSet<Nid>,
    quiet: bool,
    /// All programs are done, and nodes end.
    stopping: bool,
}

impl World {
    pub(crate) fn new(seed: u64, draw: Draw, trace: Trace) -> Self {
        let scenario = &draw.scenario;
        let link = |rng: &mut Rng| Link::new(scenario.link(rng));
        let lan = Lan::new(&draw.hosts, 1, link, Rng::new(seed, 71), trace);
        let count = draw.configs.len();
        let nid = |addr: IpAddr| match addr {
            IpAddr::V4(addr) => Nid::o2ib(addr),
            IpAddr::V6(_) => unreachable!("hosts have IPv4 addresses"),
        };
        let mut hosts: Vec<Nid> = draw.hosts.iter().map(|(host, ..)| nid(host.addr)).collect();
        let intruder = hosts.get(count).copied();
        hosts.truncate(count);
        let mut tests = Rng::new(seed, 74);
        let tester = |(own, plan)| {
            let tester = TesterPlan::draw(own, &hosts, intruder, &mut tests);
            (plan, tester.filter(|_| !draw.strict))
        };
        let plans: Vec<_> = draw.programs.into_iter().enumerate().map(tester).collect();
        let consoles = plans.iter().filter(|(_, tester)| tester.is_some()).count();
        let uses_force = draw.intruder.is_some_and(|intruder| intruder.uses_force);
        let rules = Rules {
            intruder,
            sessions_are_safe: consoles <= 1 && !uses_force && !draw.dies,
        };
        let mut world = Self {
            empty: lan.nodes.iter().map(|node| node.fabric.usage()).collect(),
            lan,
            configs: draw.configs,
            hosts,
            sides: (0..count).map(|_| None).collect(),
            plans,
            ledger: Ledger::default(),
            coverage: Coverage::default(),
            rng: Rng::new(seed, 72),
            chaos: Rng::new(seed, 73),
            dies: draw.dies,
            strict: draw.strict,
            places: draw.places,
            rules,
            intruder: None,
            restarted: BTreeSet::new(),
            quiet: false,
            stopping: false,
        };
        for host in 0..count {
            world.start(host).expect("a node listens");
        }
        if let (Some(plan), Some(nid)) = (draw.intruder, intruder) {
            let node = world.listen(count, Config::default(), nid).expect("a node listens");
            let intruder = Intruder::start(node, plan, &world.hosts, Rng::new(seed, 75));
            world.intruder = Some(intruder);
            world.lan.want_turn(count, 0);
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

    fn listen(&mut self, host: usize, config: Config, nid: Nid) -> Result<Node, String> {
        let now = self.lan.instant();
        let mut random = self.rng.source();
        let mut provider = self.lan.nodes[host].provider(now);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let incarnation = 1 + now.as_nanos() / 1000;
        Node::listen(&mut cx, config, nid, incarnation).map_err(|e| e.to_string())
    }

    fn start(&mut self, host: usize) -> Check {
        let now = self.lan.instant();
        let node = self.listen(host, self.configs[host].clone(), self.hosts[host])?;
        let limits = (self.places, self.rules);
        let side = Side::start(node, self.plans[host].clone(), limits, now, &self.hosts);
        self.sides[host] = Some(side);
        self.lan.want_turn(host, self.lan.now);
        Ok(())
    }

    /// All programs are done: nodes end, and what they had is given back.
    fn rest(&mut self) -> Check {
        self.pass(400 * SEC)?;
        self.check_ledgers()?;
        self.check_taken()?;
        let busy = self.sides.iter().flatten().find(|side| !side.is_idle());
        if let Some(side) = busy {
            return Err(format!("requests of selftest do not end: {}", side.situation()));
        }
        (self.stopping, self.strict) = (true, false);
        if let Some(intruder) = &mut self.intruder {
            intruder.leave();
        }
        for host in 0..self.lan.nodes.len() {
            self.lan.want_turn(host, self.lan.now);
        }
        self.pass(400 * SEC)?;
        if self.intruder.as_ref().is_some_and(|intruder| !intruder.is_gone()) {
            return Err("the stranger's node does not end".into());
        }
        for (host, side) in self.sides.iter().enumerate() {
            if side.as_ref().is_some_and(|side| !side.node.is_stopped()) {
                return Err(format!("the node of host {host} does not end"));
            }
        }
        self.lan.check_usage(&self.empty)
    }

    /// Hosts have taken answers of the stranger only to what they have asked it.
    fn check_taken(&self) -> Check {
        let Some(intruder) = &self.intruder else { return Ok(()) };
        let taken = self.sides.iter().flatten().flat_map(|side| {
            let by = side.node.nid();
            side.taken().iter().map(move |bits| (by, *bits))
        });
        match taken.into_iter().find(|(by, bits)| !intruder.was_asked(*by, *bits)) {
            Some((by, bits)) => Err(format!(
                "{by} takes an answer of a stranger to another node: match bits {bits:#x}"
            )),
            None => Ok(()),
        }
    }

    /// All credits are at either side of a connection, when nothing is on its way.
    fn check_ledgers(&mut self) -> Check {
        let mut last = Ok(());
        // A keepalive may be on its way.
        for _ in 0..3 {
            last = self.ledgers();
            if last.is_ok() {
                break;
            }
            self.pass(MS)?;
        }
        last
    }

    fn ledgers(&self) -> Check {
        let only = |of: usize, to: Nid| {
            let side = self.sides[of].as_ref()?;
            let mut conns = side.node.connections().filter(|conn| conn.peer == to);
            let conn = conns.next().filter(|conn| conn.is_established)?;
            conns.next().is_none().then_some(conn)
        };
        let pairs = (0..self.hosts.len()).flat_map(|a| (0..a).flat_map(move |b| [(a, b), (b, a)]));
        for (a, b) in pairs {
            let (Some(own), Some(theirs)) = (only(a, self.hosts[b]), only(b, self.hosts[a])) else {
                continue;
            };
            let is_right = own.credits.available == theirs.credits.theirs && own.credits.reserved == own.credits.depth;
            // One of a host that has died is of another connection than the peer's.
            if !is_right && own.credits.depth == theirs.credits.depth && self.restarted.is_empty() {
                return Err(format!("credits that nobody has: {own:?}; {theirs:?}"));
            }
        }
        Ok(())
    }

    /// Notes that connections of all hosts have run out of credits.
    fn note_full(&mut self) {
        let is_out = |conn: lnet::ConnectionInfo| conn.is_established && conn.credits.available == 0 && conn.queued > 0;
        let is_full = |side: &Option<Side>| side.as_ref().is_some_and(|side| side.node.connections().any(is_out));
        let all = self.sides.iter().all(is_full);
        self.coverage.note_if("all hosts without credits", all);
    }

    fn turn(&mut self, host: usize) -> Check {
        self.lan.receive(host);
        let now = self.lan.instant();
        let mut next = None;
        if let Some(Some(side)) = self.sides.get_mut(host) {
            let mut random = self.rng.source();
            let env = Env {
                ledger: &mut self.ledger,
                rng: &mut self.rng,
                coverage: &mut self.coverage,
                hosts: &self.hosts,
                restarted: &self.restarted,
                strict: self.strict,
                intruder: self.rules.intruder,
            };
            let mut turn = Turn { side, env };
            next = of_host(&mut self.lan.nodes[host], now, &mut random, &mut turn)?;
            if self.stopping && !side.node.is_stopped() {
                let mut provider = self.lan.nodes[host].provider(now);
                side.node.stop(&mut Cx {
                    now,
                    provider: &mut provider,
                    random: &mut random,
                });
            }
        }
        if let Some(intruder) = self.intruder.as_mut().filter(|_| host == self.hosts.len()) {
            let random = &mut self.rng.source();
            next = of_host(&mut self.lan.nodes[host], now, random, intruder)?;
        }
        self.note_full();
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
        let hosts = self.hosts.len();
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
        let from = match self.hosts[(to + 1 + self.chaos.index(hosts - 1)) % hosts] {
            nid if self.chaos.chance(0.7) => nid,
            _ => Nid::o2ib((0x0a00_0100 | self.chaos.range(1, 200) as u32).into()),
        };
        let frame = stranger::request(from, self.hosts[to], &mut self.chaos);
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
        let Some(side) = self.sides[host].take() else {
            return Ok(());
        };
        self.coverage.note("crash");
        self.restarted.insert(self.hosts[host]);
        let mut env = Env {
            ledger: &mut self.ledger,
            rng: &mut self.rng,
            coverage: &mut self.coverage,
            hosts: &self.hosts,
            restarted: &self.restarted,
            strict: self.strict,
            intruder: self.rules.intruder,
        };
        self.plans[host] = side.die(&mut env)?;
        self.lan.kill(host);
        self.lan.schedule(pause, LanEvent::World(WorldEvent::Boot(host)));
        Ok(())
    }

    fn enter_quiet(&mut self) {
        self.quiet = true;
        if let Some(intruder) = &mut self.intruder {
            intruder.be_quiet();
        }
        for link in self.lan.links() {
            link.faults = Faults::quiet(link.faults);
            (link.cut, link.lag) = (false, 0);
        }
        for host in 0..self.sides.len() {
            if let Some(side) = &mut self.sides[host] {
                // Each takes as long as a timeout.
                side.plan.misses = 0.0;
            }
            self.plans[host].0.misses = 0.0;
            self.lan.want_turn(host, self.lan.now);
        }
    }
}

/// No message may come before there is a receive for it.
fn check_receives(frame: &Frame) -> Check {
    let aeth = Packet::parse(&frame.bytes).ok().and_then(|packet| packet.header.aeth());
    let is_rnr = aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Rnr(_)));
    match is_rnr && !frame.damaged {
        true => Err(format!("{} has no receive for a message", frame.src)),
        false => Ok(()),
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
        self.quiet && self.sides.iter().all(done)
    }

    fn situation(&self) -> String {
        let sides = self.sides.iter().flatten().map(Side::situation);
        sides.collect::<Vec<_>>().join("; ")
    }

    fn step(&mut self, what: LanEvent<WorldEvent>) -> Check {
        match what {
            LanEvent::Arrive { node, frame } => {
                check_receives(&frame)?;
                self.lan.arrive(node, frame);
            }
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
    type Counts = LnetStats;

    fn run(&mut self) -> Check {
        self.run_until_done()?;
        self.rest()
    }

    fn now(&self) -> u64 {
        self.lan.now
    }

    fn into_counts(self) -> LnetStats {
        let mut coverage = self.coverage.runs();
        if let Some(intruder) = &self.intruder {
            Coverage::sum(&mut coverage, &intruder.coverage.runs());
        }
        LnetStats {
            runs: 1,
            packets: self.lan.packets,
            lost: self.lan.stats.lost + self.lan.stats.overflowed,
            begun: self.ledger.begun(),
            done: self.ledger.done,
            simulated_ns: self.lan.now,
            trace_hash: self.lan.trace.hash() ^ self.ledger.done,
            coverage,
        }
    }
}
