//! Hosts, links, clock and queue of events: the loop that everything runs in.

use std::collections::BTreeMap;

use roce_port::CmEventKind;
use roce_port::cm::DropReason;
use roce_verbs::Completion;

use crate::{
    adversary::{
        live::Live,
        state::{Blind, Copies, Observer},
    },
    config::{Class, Runs, SimConfig},
    forge::PRIVATE_LEN,
    host::Host,
    model::{Conn, Phase},
    net::{Link, NetStats},
    rng::Rng,
    runner::{Check, Simulation},
    scenario::{SEC, Scenario},
    services::Services,
    stats::Stats,
    trace::Trace,
};

/// Events without progress of the clock after which something spins.
const SPIN: u32 = 200_000;
/// Events of a whole run.
const MAX_EVENTS: u64 = 20_000_000;
/// The stream that decides whether a run is extended: not so for the seeds that tests know by what they draw.
const EXTENDED: u64 = 22;
/// Name of the events that are timers of hosts.
pub(crate) const WAKE: &str = "timer";
/// The stream of an adversary's choices.
pub(crate) const ADVERSARY: u64 = 23;

/// Programs of all hosts of a run, which [`simulate_program`](crate::simulate_program) calls. While a method runs, no other one is called: packets and events that it causes are
/// delivered after it.
pub trait Program {
    /// Handles a timer that [`World::set_timer`] has set.
    ///
    /// # Errors
    /// When a rule is broken.
    fn on_timer(&mut self, world: &mut World, timer: usize) -> Check;

    /// Handles an event of a host's connection manager.
    ///
    /// # Errors
    /// When a rule is broken.
    fn on_event(&mut self, world: &mut World, host: usize, event: &CmEventKind) -> Check;

    /// Draws the private data of a request that the adversary forges.
    fn forged_request(&self, rng: &mut Rng) -> [u8; PRIVATE_LEN];

    /// Whether all work is done.
    fn is_done(&self) -> bool;

    /// Checks that nothing is left of the flood, when the run has ended.
    ///
    /// # Errors
    /// When a rule is broken.
    fn check_end(&self) -> Check;

    /// Returns a summary of its state, for reports.
    fn situation(&self) -> String;
}

/// Event, with its name.
type Event = (&'static str, Box<dyn FnOnce(&mut World) -> Check>);

/// State of a run.
pub struct World {
    pub(crate) scenario: Scenario,
    pub(crate) now: u64,
    pub(crate) hosts: Vec<Host>,
    pub(crate) conns: Vec<Conn>,
    pub(crate) links: Vec<Link>,
    /// By time, and in the order of scheduling.
    queue: BTreeMap<(u64, u64), Event>,
    seq: u64,
    /// Choices of the network, of the programs, of the disturber.
    pub(crate) net_rng: Rng,
    pub(crate) rng: Rng,
    pub(crate) chaos_rng: Rng,
    pub(crate) seed_rng: Rng,
    pub(crate) net_stats: NetStats,
    pub(crate) stats: Stats,
    pub(crate) trace: Trace,
    pub(crate) quiet: bool,
    pub(crate) quiet_since: u64,
    pub(crate) scratch: Vec<Completion>,
    pub(crate) services: Option<Services>,
    pub(crate) class: Class,
    pub(crate) seed: u64,
    pub(crate) scale: u32,
    pub(crate) blind: Option<Box<Blind>>,
    pub(crate) observer: Option<Box<Observer>>,
    pub(crate) copies: Option<Box<Copies>>,
    /// Genuine packets to connected queue pairs, of which attackers know.
    pub(crate) live: Live,
    pub(crate) program: Option<Box<dyn Program>>,
    /// When the last of the connections came up for the first time.
    pub(crate) all_up: Option<u64>,
}

/// Draws the scenario of a run of this class.
fn draw_scenario(config: &SimConfig, class: Class) -> Scenario {
    let seed = config.run.seed;
    let mut rng = Rng::new(seed, 0);
    let mut scenario = Scenario::draw(config.run.scale, &mut rng);
    if config.runs == Runs::Narrow {
        scenario.narrow(&mut rng);
    } else {
        // Before narrow places nothing would slow services without acknowledgements down.
        scenario.extended = Rng::new(seed, EXTENDED).chance(0.5);
    }
    match class {
        Class::Goodput { .. } => scenario.clear(&mut rng),
        Class::Flood => {
            scenario.clear(&mut rng);
            scenario.conns.clear();
            let mtu = scenario.hosts[0].mtu;
            scenario.hosts.iter_mut().for_each(|h| h.mtu = mtu);
        }
        // Each copy costs a packet, as a loss does.
        Class::Copies => scenario.conns.iter_mut().for_each(|c| c.retry_cnt = 7),
        // The seed's parity: nothing that others draw depends on it.
        Class::Blind => scenario.hosts.iter_mut().for_each(|h| h.tight = seed % 2 == 1),
        Class::Plain | Class::Observed | Class::Strangers { .. } => {}
    }
    scenario
}

impl World {
    pub(crate) fn new(config: &SimConfig, class: Class, trace: Trace) -> Self {
        let (seed, scale) = (config.run.seed, config.run.scale);
        let scenario = draw_scenario(config, class);
        let mut seed_rng = Rng::new(seed, 1);
        let mut net_rng = Rng::new(seed, 2);
        let hosts: Vec<Host> = scenario
            .hosts
            .iter()
            .enumerate()
            .map(|(i, plan)| {
                let mut host = Host::new(plan.clone(), i, 0, &mut seed_rng);
                host.next_identification = seed_rng.number() as u16;
                host
            })
            .collect();
        let links = (0..hosts.len() * hosts.len())
            .map(|_| Link::new(scenario.link(&mut net_rng)))
            .collect();
        let mut world = Self {
            now: 0,
            conns: Vec::new(),
            hosts,
            links,
            queue: BTreeMap::new(),
            seq: 0,
            net_rng,
            rng: Rng::new(seed, 3),
            chaos_rng: Rng::new(seed, 4),
            seed_rng,
            net_stats: NetStats::default(),
            stats: Stats::default(),
            trace,
            quiet: false,
            quiet_since: 0,
            scratch: Vec::new(),
            services: None,
            class,
            seed,
            scale,
            blind: None,
            observer: None,
            copies: None,
            live: Live::default(),
            program: None,
            all_up: None,
            scenario,
        };
        world.plan_events();
        world.create_attacker();
        world
    }

    /// Creates the connections, and schedules their beginning, the disturbances and the quiet phase.
    fn plan_events(&mut self) {
        for plan in self.scenario.conns.clone() {
            let conn = self.make_conn(plan);
            self.conns.push(conn);
        }
        for conn in 0..self.conns.len() {
            let at = self.rng.range(0, 100_000);
            self.schedule(at, "connect", move |w| w.connect(conn));
        }
        for _ in 0..self.scenario.disturbances {
            let at = self.chaos_rng.range(0, self.scenario.chaos_end);
            self.schedule(at, "disturb", Self::disturb);
        }
        self.schedule(self.scenario.chaos_end, "quiet", Self::enter_quiet);
    }

    /// Lets something happen `after` nanoseconds from now.
    pub(crate) fn schedule(
        &mut self,
        after: u64,
        name: &'static str,
        event: impl FnOnce(&mut Self) -> Check + 'static,
    ) {
        self.seq += 1;
        let key = (self.now + after, self.seq);
        self.queue.insert(key, (name, Box::new(event)));
    }

    pub(crate) fn link(&mut self, from: usize, to: usize) -> &mut Link {
        let n = self.hosts.len();
        &mut self.links[from * n + to]
    }

    /// Whether packets between the two may get lost, one way or the other.
    pub(crate) fn lossy(&self, a: usize, b: usize) -> bool {
        let n = self.hosts.len();
        let buffer = |h: usize| self.hosts[h].plan.rx_buffer < 4 << 20;
        let pairs = [a * n + b, b * n + a];
        pairs
            .iter()
            .any(|i| self.links[*i].faults.lossy() || self.links[*i].cut)
            || buffer(a)
            || buffer(b)
    }

    /// Whether packets between the two may be overtaken, one way or the other: a peer that sees the gap asks for them again.
    pub(crate) fn disorderly(&self, a: usize, b: usize) -> bool {
        let n = self.hosts.len();
        [a * n + b, b * n + a]
            .iter()
            .any(|i| self.links[*i].faults.reorder > 0.0)
    }

    fn run_to_end(&mut self) -> Check {
        let mut at_once = 0;
        let mut events = 0u64;
        let deadline = self.scenario.chaos_end + 300 * SEC;
        while !self.is_finished() {
            let Some(((at, _), (name, event))) = self.queue.pop_first() else {
                return Err(format!("nothing left to happen, but not done: {}", self.situation()));
            };
            if at > self.now {
                at_once = 0;
            }
            at_once += 1;
            events += 1;
            self.now = at;
            if at_once > SPIN || events > MAX_EVENTS {
                return Err(format!("it spins at {name}: {}", self.situation()));
            }
            if at > deadline {
                return Err(format!("stuck in the quiet phase: {}", self.situation()));
            }
            event(self)?;
        }
        self.check_end()?;
        self.stats.work_ns = self.now - self.all_up.unwrap_or_default();
        self.stats.longest_quiet_ns = self.now - self.quiet_since;
        self.stats.events += events;
        self.run_idle()
    }

    fn is_finished(&self) -> bool {
        self.quiet
            && self.services_done()
            && self.program.as_ref().is_none_or(|p| p.is_done())
            && self
                .conns
                .iter()
                .enumerate()
                .all(|(i, c)| c.phase == Phase::Up && !c.repair_scheduled && self.is_done(i))
    }

    /// Runs on when all work is done: late copies and answers to them pass, then hardly an event may occur.
    fn run_idle(&mut self) -> Check {
        let calm = self.now + self.adversary_rest();
        let (rest, end) = (calm + 10 * SEC, calm + 30 * SEC);
        let allowance = 20 + 40 * self.conns.len() as u32;
        let (mut events, mut wakes) = (0, 0);
        while let Some(((at, _), (name, event))) = self.queue.pop_first() {
            if at > end {
                break;
            }
            self.now = at;
            self.stats.events += 1;
            events += u32::from(at > rest);
            wakes += u32::from(at > rest && name == WAKE);
            if events > allowance || self.stats.events > MAX_EVENTS {
                let text = self.situation();
                return Err(format!(
                    "an idle network does not come to rest: {wakes} timers of {events} events: {text}"
                ));
            }
            event(self)?;
        }
        self.check_end()?;
        self.check_strays()?;
        self.program.as_ref().map_or(Ok(()), |p| p.check_end())?;
        self.stats.simulated_ns += self.now;
        Ok(())
    }
}

impl Simulation for World {
    type Counts = Stats;

    fn run(&mut self) -> Check {
        self.set_guards()?;
        self.begin_services()?;
        self.run_to_end()
    }

    fn now(&self) -> u64 {
        self.now
    }

    fn into_counts(mut self) -> Stats {
        self.stats.runs = 1;
        self.stats.trace_hash = self.trace.hash();
        self.stats.lost = self.net_stats.lost;
        self.stats.duplicated = self.net_stats.duplicated;
        self.stats.reordered = self.net_stats.reordered;
        self.stats.corrupted = self.net_stats.corrupted;
        self.stats.overflowed = self.net_stats.overflowed;
        if let Some(blind) = &self.blind {
            (self.stats.forged, self.stats.reflected) = (blind.forged, blind.reflected);
            self.stats.at_live = blind.at_live;
            self.stats.exact = blind.exact;
            [self.stats.port_hits, self.stats.psn_hits] = blind.redrawn;
        }
        if let Some(copies) = &self.copies {
            self.stats.copies = copies.sent;
        }
        if let Some(observer) = &self.observer {
            self.stats.meddled = observer.sent;
        }
        // Of hosts that died only their last life.
        for host in &self.hosts {
            let c = host.port.counters();
            self.stats.icrc_errors += c.icrc_errors + c.icrc_implausible;
            self.stats.retransmissions += c.tx_retransmissions;
            self.stats.rnr_naks += c.transport.send_rnr_err;
            let full = [DropReason::Backlog, DropReason::BacklogPeer];
            self.stats.question_drops += c.cm.dropped(DropReason::Connections);
            self.stats.backlog_drops += full.map(|reason| c.cm.dropped(reason)).iter().sum::<u64>();
        }
        self.stats
    }
}
