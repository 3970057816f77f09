//! A server, its clients, and everything that can happen to them.

use roce_port::fabric::Usage;
use roce_verbs::Instant;
use rtrs::{Cx, server::ServerConfig};

use roce_sim::{
    Check, Coverage, Faults, LanWorld, Link, MS, Rng, SEC, Simulation, Trace,
    lan::{Lan, LanEvent, Way, of_host},
};

use crate::{
    client::{ClientEnv, ClientSide},
    disk::SimDisk,
    draw::{Draw, Wide},
    ledger::Ledger,
    raw::RawSide,
    server::{Job, Names, ServerEnv, ServerPlan, ServerSide},
    tally::StorageStats,
    turn::{ClientTurn, RawTurn, ServerTurn},
    wide::another_server,
};

/// The server's host.
const SERVER: usize = 0;
/// How long what went wrong before may still have an effect then.
const AFTERMATH: u64 = 40 * SEC;

/// Event that is none of the network's.
#[derive(Debug)]
pub(crate) enum WorldEvent {
    /// A job of the server's ends.
    Job { boot: u32, job: Job },
    /// A trouble begins.
    Trouble,
    /// A host starts again.
    Boot { node: usize },
    /// A link carries no packets for a while.
    Cut { way: Way, pause: u64 },
    /// The link carries packets again.
    Heal(Way),
    /// Packets sent from here on take so much longer.
    Lag { way: Way, lag: u64 },
    /// A client's user gives up the paths over a network.
    Leave { client: usize, network: usize },
    /// A disk is as fast as before.
    Recover { disk: usize, stall: (f64, u64) },
    /// From here on nothing goes wrong any more.
    Quiet,
}

/// Trouble that can begin.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// The server's process dies; what it wrote is in its system's cache.
    ServerDies,
    /// Its power fails.
    PowerFails,
    ClientDies,
    /// No packets for a while, in both directions or in one.
    Partition,
    OneWay,
    SlowDisk,
    SessionEnded,
    /// A process stands still for a while.
    Stopped,
    /// One network has no packets for a client for a while, in both directions or in one.
    NetworkCut,
    NetworkOneWay,
    /// The disk takes seconds for what comes, and then a network is cut.
    StallAndCut,
    PathEnded,
    /// Packets on a network take longer for a while, in one direction or both.
    Lag,
    /// Packets to the server take longer, and its answers are lost.
    LagAndCut,
    /// Packets to the server take longer, and the client's user gives the paths up.
    LagAndLeave,
}

const TROUBLES: [Trouble; 9] = [
    Trouble::ServerDies,
    Trouble::PowerFails,
    Trouble::PowerFails,
    Trouble::ClientDies,
    Trouble::Partition,
    Trouble::OneWay,
    Trouble::SlowDisk,
    Trouble::SessionEnded,
    Trouble::Stopped,
];

/// With several networks.
const WIDE: [Trouble; 6] = [
    Trouble::NetworkCut,
    Trouble::NetworkCut,
    Trouble::NetworkOneWay,
    Trouble::NetworkOneWay,
    Trouble::StallAndCut,
    Trouble::PathEnded,
];

const STORM: [Trouble; 7] = [
    Trouble::StallAndCut,
    Trouble::StallAndCut,
    Trouble::StallAndCut,
    Trouble::NetworkCut,
    Trouble::NetworkOneWay,
    Trouble::PathEnded,
    Trouble::Partition,
];

/// With delays that jump.
const SLOW: [Trouble; 7] = [
    Trouble::Lag,
    Trouble::LagAndCut,
    Trouble::LagAndCut,
    Trouble::LagAndLeave,
    Trouble::LagAndLeave,
    Trouble::LagAndLeave,
    Trouble::NetworkOneWay,
];

impl Trouble {
    fn name(self) -> &'static str {
        match self {
            Self::ServerDies => "server crash",
            Self::PowerFails => "power failure",
            Self::ClientDies => "client crash",
            Self::Partition => "partition",
            Self::OneWay => "one-way cut",
            Self::SlowDisk => "slow disk",
            Self::SessionEnded => "session ended by the server",
            Self::Stopped => "stopped process",
            Self::NetworkCut => "network cut",
            Self::NetworkOneWay => "network cut one way",
            Self::StallAndCut => "stall and cut",
            Self::PathEnded => "path ended by the server",
            Self::Lag => "delay that jumps",
            Self::LagAndCut => "delay that jumps, and cut",
            Self::LagAndLeave => "delay that jumps, and path given up",
        }
    }
}

/// Everything.
pub(crate) struct World {
    lan: Lan<WorldEvent>,
    server: Option<ServerSide>,
    server_config: ServerConfig,
    server_plan: ServerPlan,
    wide: Option<Wide>,
    /// By host, from 1.
    clients: Vec<ClientSide>,
    /// On the last two hosts.
    raw: Option<RawSide>,
    disks: Vec<SimDisk>,
    /// Objects of each host without sessions.
    empty: Vec<Usage>,
    ledger: Ledger,
    coverage: Coverage,
    rng: Rng,
    chaos: Rng,
    quiet: bool,
}

impl World {
    /// `hides`: the server says nothing of power failures.
    pub(crate) fn new(seed: u64, scale: u32, hides: bool, trace: Trace) -> Self {
        let mut draw = Draw::new(scale, &mut Rng::new(seed, 40), &mut Rng::new(seed, 44));
        draw.server.names = Names::draw(hides, &mut Rng::new(seed, 45));
        let mut coverage = Coverage::default();
        draw.note(&mut coverage);
        let scenario = &draw.scenario;
        let link = |rng: &mut Rng| Link::new(scenario.link(rng));
        let networks = draw.wide.map_or(1, |wide| wide.networks);
        let lan = Lan::new(&draw.hosts, networks, link, Rng::new(seed, 41), trace);
        let disks: Vec<SimDisk> = draw
            .disks
            .iter()
            .map(|(blocks, faults)| SimDisk::new(*blocks, *faults))
            .collect();
        let notes = lan.trace.notes();
        let blocks = disks.last().map_or(0, SimDisk::blocks);
        let clients = draw.clients.into_iter().enumerate();
        let mut world = Self {
            clients: clients.map(|(i, plan)| ClientSide::new(i, plan, notes)).collect(),
            raw: draw.raw.map(|plan| RawSide::new(plan, blocks, notes)),
            ledger: Ledger::new(disks.iter().map(SimDisk::blocks)),
            empty: lan.nodes.iter().map(|node| node.fabric.usage()).collect(),
            lan,
            server: None,
            server_config: draw.server_config,
            server_plan: draw.server,
            wide: draw.wide,
            disks,
            coverage,
            rng: Rng::new(seed, 42),
            chaos: Rng::new(seed, 43),
            quiet: false,
        };
        for (i, client) in world.clients.iter().enumerate() {
            if client.plan.holds() {
                world.ledger.add_holder(i);
            }
        }
        if draw.calm {
            world.clients.iter_mut().for_each(ClientSide::stay_calm);
            world.raw.iter_mut().for_each(|raw| raw.be_safe_from(0));
        }
        world.start_server();
        for node in 0..world.lan.nodes.len() {
            world.lan.want_turn(node, 0);
        }
        world.lag_networks();
        let slow = world.wide.is_some_and(|wide| wide.lag > 0);
        let end = draw.scenario.chaos_end.max(if slow { 5 * SEC } else { 2 * SEC });
        for _ in 0..draw.troubles {
            let at = world.chaos.range(0, end);
            world.lan.schedule(at, LanEvent::World(WorldEvent::Trouble));
        }
        world.lan.schedule(end, LanEvent::World(WorldEvent::Quiet));
        world
    }

    /// Networks but the first may be slower all the time.
    fn lag_networks(&mut self) {
        let Some(wide) = self.wide.filter(|wide| wide.lag > 0) else {
            return;
        };
        for network in 1..wide.networks {
            let lag = self.chaos.pick(&[0, 0, wide.lag / 10, wide.lag / 2]);
            for client in 1..=self.clients.len() {
                for (from, to) in [(client, SERVER), (SERVER, client)] {
                    let network = Some(network);
                    self.lan.set_lag(Way { from, to, network }, lag);
                }
            }
        }
    }

    fn start_server(&mut self) {
        let (config, mut plan) = (self.server_config.clone(), self.server_plan);
        if self.quiet {
            plan.no_memory = 0.0;
        }
        let (notes, now) = (self.lan.trace.notes(), self.lan.instant());
        let mut random = self.rng.source();
        let mut provider = self.lan.nodes[SERVER].provider(now);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        self.server = Some(ServerSide::new(&mut cx, config, plan, notes));
    }

    /// All clients are done: what they had is given back.
    fn rest(&mut self) -> Check {
        self.pass(400 * SEC)?;
        self.note_server();
        let overtaken: u64 = self.lan.nodes.iter().map(|node| node.lag.overtaken).sum();
        self.coverage
            .note_if("path lost while a key is taken back", overtaken > 0);
        for client in &self.clients {
            client.check_empty()?;
        }
        if let Some(raw) = &self.raw {
            raw.check_empty()?;
        }
        if let Some(server) = &self.server {
            server.check_empty()?;
            self.empty[SERVER].cms = 1;
        }
        self.lan.check_usage(&self.empty)
    }

    /// A turn of a host's loop, in the order in which loops do it.
    fn turn(&mut self, node: usize, job: Option<Job>) -> Check {
        self.lan.receive(node);
        let now = self.lan.instant();
        let next = match node {
            SERVER => self.server_turn(now, job)?,
            _ if node > self.clients.len() => self.raw_turn(now, node)?,
            _ => self.client_turn(now, node)?,
        };
        self.lan.nodes[node].lag.check()?;
        self.lan.transmit(node);
        let host = self.lan.nodes[node].next_timeout();
        if let Some(at) = [next, host].into_iter().flatten().min() {
            // Not at once again: a deadline in the past would make it spin without the clock moving.
            let at = at.as_nanos().max(now.as_nanos() + 1);
            self.lan.want_turn(node, at);
        }
        Ok(())
    }

    fn server_turn(&mut self, now: Instant, job: Option<Job>) -> Result<Option<Instant>, String> {
        let Some(server) = &mut self.server else {
            return Ok(None);
        };
        let mut random = self.rng.source();
        let node = &mut self.lan.nodes[SERVER];
        let boot = node.boot;
        let mut machines = ServerTurn {
            server,
            job,
            env: ServerEnv {
                disks: &mut self.disks,
                ledger: &mut self.ledger,
                rng: &mut self.rng,
                coverage: &mut self.coverage,
                plan: Vec::new(),
            },
        };
        let next = of_host(node, now, &mut random, &mut machines)?;
        for (after, job) in machines.env.plan {
            self.lan.schedule(after, LanEvent::World(WorldEvent::Job { boot, job }));
        }
        Ok(next)
    }

    fn client_turn(&mut self, now: Instant, node: usize) -> Result<Option<Instant>, String> {
        let mut random = self.rng.source();
        let mut machines = ClientTurn {
            client: &mut self.clients[node - 1],
            env: ClientEnv {
                ledger: &mut self.ledger,
                disks: &self.disks,
                rng: &mut self.rng,
                coverage: &mut self.coverage,
                silent: self.server_plan.names == Names::None,
            },
        };
        of_host(&mut self.lan.nodes[node], now, &mut random, &mut machines)
    }

    fn raw_turn(&mut self, now: Instant, node: usize) -> Result<Option<Instant>, String> {
        let first = 1 + self.clients.len();
        let (path, other) = (node - first, 2 * first + 1 - node);
        let Some(raw) = &mut self.raw else { return Ok(None) };
        let mut random = self.rng.source();
        let mut machines = RawTurn {
            raw,
            path,
            wakes: false,
            env: ClientEnv {
                ledger: &mut self.ledger,
                disks: &self.disks,
                rng: &mut self.rng,
                coverage: &mut self.coverage,
                silent: self.server_plan.names == Names::None,
            },
        };
        let next = of_host(&mut self.lan.nodes[node], now, &mut random, &mut machines)?;
        if machines.wakes {
            let after = self.rng.range(1, 2 * MS);
            self.lan.want_turn(other, now.as_nanos() + after);
        }
        Ok(next)
    }

    fn trouble(&mut self) -> Check {
        let trouble = match self.wide {
            Some(wide) if wide.lag > 0 => self.chaos.pick(&SLOW),
            Some(wide) if wide.storms && self.chaos.chance(0.8) => self.chaos.pick(&STORM),
            Some(_) if self.chaos.chance(0.5) => self.chaos.pick(&WIDE),
            _ => self.chaos.pick(&TROUBLES),
        };
        let client = 1 + self.chaos.index(self.lan.nodes.len() - 1);
        let pause = self.chaos.range(MS, 3 * SEC);
        let (now, name) = (self.lan.now, trouble.name());
        self.lan.trace.note(now, || format!("{name}, client {client}"));
        let happens = match trouble {
            Trouble::ServerDies => self.server_dies(pause),
            Trouble::PowerFails => {
                let dies = self.server_dies(pause);
                for disk in &mut self.disks {
                    disk.lose_power(&mut self.chaos);
                }
                self.ledger.lose_power(now);
                self.server_plan.names.boot_again();
                self.clients.iter_mut().for_each(ClientSide::power_fails);
                dies
            }
            Trouble::ClientDies => self.client_dies(client, pause),
            Trouble::Partition | Trouble::OneWay => {
                self.part(client, None, matches!(trouble, Trouble::OneWay), 0, pause)
            }
            Trouble::NetworkCut | Trouble::NetworkOneWay => {
                let one_way = matches!(trouble, Trouble::NetworkOneWay);
                let network = self.a_network();
                self.part(client, network, one_way, 0, pause)
            }
            Trouble::SlowDisk => self.slow_disk((0.5, SEC), pause),
            Trouble::StallAndCut => {
                let (after, one_way) = (self.chaos.range(0, 20 * MS), self.chaos.chance(0.3));
                let recovers = after + self.chaos.range(0, 50 * MS);
                self.slow_disk((0.9, 4 * SEC), recovers);
                let network = self.a_network();
                self.part(client, network, one_way, after, pause)
            }
            Trouble::Lag | Trouble::LagAndCut | Trouble::LagAndLeave => self.lag(trouble, client, pause),
            Trouble::SessionEnded => self.end(ServerSide::end_a_session)?,
            Trouble::PathEnded => self.end(ServerSide::end_a_path)?,
            Trouble::Stopped => {
                let node = self.chaos.pick(&[SERVER, client]);
                self.lan.stop(node, pause);
                true
            }
        };
        self.coverage.note_if(name, happens);
        Ok(())
    }

    /// A client and the server have no packets for each other, or in one direction only.
    fn part(&mut self, client: usize, network: Option<usize>, one_way: bool, after: u64, pause: u64) -> bool {
        let mut ways = vec![(SERVER, client), (client, SERVER)];
        if one_way {
            ways.remove(if network.is_some() { self.chaos.index(2) } else { 1 });
        }
        for (from, to) in ways {
            let way = Way { from, to, network };
            match after {
                0 => self.cut(way, pause),
                _ => self
                    .lan
                    .schedule(after, LanEvent::World(WorldEvent::Cut { way, pause })),
            }
        }
        true
    }

    /// A network is slow for a client; a little later the server's answers are lost, or the client gives up its paths there.
    fn lag(&mut self, trouble: Trouble, client: usize, pause: u64) -> bool {
        let (network, most) = (self.a_network(), self.wide.map_or(0, |wide| wide.lag));
        let (there, back) = ((client, SERVER), (SERVER, client));
        let way = |(from, to)| Way { from, to, network };
        let (both, only) = ([there, back], self.chaos.index(3));
        let ways = match only {
            0 => &both[..1],
            _ if !matches!(trouble, Trouble::Lag) => &both[..1],
            1 => &both[1..],
            _ => &both[..],
        };
        let lag = self.chaos.range(most / 10, most);
        let after = self.chaos.range(1, lag);
        for ends in ways {
            let way = way(*ends);
            self.lan.set_lag(way, lag);
            self.lan
                .schedule(pause, LanEvent::World(WorldEvent::Lag { way, lag: 0 }));
        }
        match (trouble, network) {
            (Trouble::LagAndCut, _) => {
                let way = way(back);
                self.lan
                    .schedule(after, LanEvent::World(WorldEvent::Cut { way, pause }));
            }
            (Trouble::LagAndLeave, Some(network)) => {
                self.lan
                    .schedule(after, LanEvent::World(WorldEvent::Leave { client, network }));
            }
            _ => {}
        }
        most > 0
    }

    fn leave(&mut self, client: usize, network: usize) {
        // The raw client has paths of its own.
        if self.lan.nodes[client].alive && client <= self.clients.len() {
            self.clients[client - 1].give_up_network(self.lan.now, network);
            self.lan.want_turn(client, self.lan.now);
        }
    }

    fn cut(&mut self, way: Way, pause: u64) {
        self.lan.set_cut(way, true);
        self.lan.schedule(pause, LanEvent::World(WorldEvent::Heal(way)));
    }

    fn a_network(&mut self) -> Option<usize> {
        self.wide.map(|wide| self.chaos.index(wide.networks))
    }

    fn slow_disk(&mut self, slow: (f64, u64), pause: u64) -> bool {
        let disk = self.chaos.index(self.disks.len());
        let stall = core::mem::replace(&mut self.disks[disk].faults.stall, slow);
        self.lan
            .schedule(pause, LanEvent::World(WorldEvent::Recover { disk, stall }));
        true
    }

    fn server_dies(&mut self, pause: u64) -> bool {
        if !self.lan.nodes[SERVER].alive {
            return false;
        }
        self.note_server();
        self.lan.kill(SERVER);
        self.server = None;
        self.ledger.server_over(self.lan.now);
        self.lan
            .schedule(pause, LanEvent::World(WorldEvent::Boot { node: SERVER }));
        true
    }

    /// Notes the events that the server has met in this life.
    fn note_server(&mut self) {
        let Some(server) = &self.server else { return };
        let counters = server.rtrs.counters();
        self.coverage.note_if("request parked", counters.requests_parked > 0);
        self.coverage.note_if("path held back", counters.paths_held > 0);
        self.coverage.note_if(
            "connection asked for before its path stands",
            counters.requests_held > 0,
        );
    }

    fn client_dies(&mut self, client: usize, pause: u64) -> bool {
        // The raw client has its session on two hosts.
        if !self.lan.nodes[client].alive || client > self.clients.len() {
            return false;
        }
        self.lan.kill(client);
        self.clients[client - 1].crash(self.lan.now, &mut self.ledger);
        self.lan
            .schedule(pause, LanEvent::World(WorldEvent::Boot { node: client }));
        true
    }

    /// The server's operator ends something.
    fn end(&mut self, what: fn(&mut ServerSide, &mut Cx<'_>, &mut Rng) -> bool) -> Result<bool, String> {
        let now = self.lan.instant();
        if self.lan.is_stopped(SERVER) {
            return Ok(false);
        }
        let Some(server) = &mut self.server else {
            return Ok(false);
        };
        let mut random = self.rng.source();
        let mut provider = self.lan.nodes[SERVER].provider(now);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let ended = what(server, &mut cx, &mut self.chaos);
        self.turn(SERVER, None)?;
        Ok(ended)
    }

    fn boot(&mut self, node: usize) {
        self.lan.boot(node);
        if node == SERVER {
            if self.wide.is_some() {
                another_server(&mut self.server_config, &mut self.chaos);
            }
            self.start_server();
        } else {
            self.clients[node - 1].wake_at(self.lan.now);
        }
        self.lan.want_turn(node, self.lan.now);
    }

    fn enter_quiet(&mut self) {
        self.quiet = true;
        for link in self.lan.links() {
            link.faults = Faults::quiet(link.faults);
            (link.cut, link.lag) = (false, 0);
        }
        for disk in &mut self.disks {
            let faults = &mut disk.faults;
            faults.stall = (0.0, 0);
            (faults.read_error, faults.write_error, faults.flush_error) = (0.0, 0.0, 0.0);
        }
        if let Some(server) = &mut self.server {
            server.have_memory();
        }
        let safe_from = self.lan.now + AFTERMATH;
        for client in &mut self.clients {
            client.enter_quiet(safe_from);
        }
        self.raw.iter_mut().for_each(|raw| raw.be_safe_from(safe_from));
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
        let raw = self.raw.as_ref().is_none_or(RawSide::is_done);
        self.quiet && raw && self.clients.iter().all(ClientSide::is_done)
    }

    fn situation(&self) -> String {
        let clients = self.clients.iter().map(ClientSide::situation);
        let all = clients.chain(self.raw.as_ref().map(RawSide::situation));
        all.collect::<Vec<_>>().join("; ")
    }

    fn step(&mut self, what: LanEvent<WorldEvent>) -> Check {
        match what {
            LanEvent::Arrive { node, frame } => self.lan.arrive(node, frame),
            LanEvent::Turn { node, boot } => {
                if self.lan.begin_turn(node, boot) {
                    self.turn(node, None)?;
                }
            }
            LanEvent::World(WorldEvent::Job { boot, job }) => {
                let server = &self.lan.nodes[SERVER];
                if !server.alive || server.boot != boot {
                    return Ok(());
                }
                if self.lan.is_stopped(SERVER) {
                    // It hears of it when it goes on.
                    self.lan.schedule(MS, LanEvent::World(WorldEvent::Job { boot, job }));
                    return Ok(());
                }
                self.turn(SERVER, Some(job))?;
            }
            LanEvent::World(WorldEvent::Trouble) if self.quiet => {}
            LanEvent::World(WorldEvent::Trouble) => self.trouble()?,
            LanEvent::World(WorldEvent::Boot { node }) => self.boot(node),
            LanEvent::World(WorldEvent::Cut { .. }) if self.quiet => {}
            LanEvent::World(WorldEvent::Cut { way, pause }) => self.cut(way, pause),
            LanEvent::World(WorldEvent::Heal(way)) => self.lan.set_cut(way, false),
            LanEvent::World(WorldEvent::Lag { way, lag }) => self.lan.set_lag(way, if self.quiet { 0 } else { lag }),
            LanEvent::World(WorldEvent::Leave { client, network }) => self.leave(client, network),
            LanEvent::World(WorldEvent::Recover { disk, stall }) => {
                self.disks[disk].faults.stall = if self.quiet { (0.0, 0) } else { stall };
            }
            LanEvent::World(WorldEvent::Quiet) => self.enter_quiet(),
        }
        Ok(())
    }
}

impl Simulation for World {
    type Counts = StorageStats;

    fn run(&mut self) -> Check {
        self.run_until_done()?;
        self.rest()
    }

    fn now(&self) -> u64 {
        self.lan.now
    }

    fn into_counts(self) -> StorageStats {
        let ended = |i: usize| self.clients.iter().map(|c| c.ended[i]).sum::<u64>();
        StorageStats {
            packets: self.lan.packets,
            lost: self.lan.stats.lost + self.lan.stats.overflowed,
            operations: ended(0),
            succeeded: ended(1),
            simulated_ns: self.lan.now,
            trace_hash: self.lan.trace.hash() ^ ended(0) ^ ended(1) << 32,
            coverage: self.coverage.runs(),
            ..StorageStats::default()
        }
    }
}
