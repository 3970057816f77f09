//! Hosts, links, clock and queue of events: the loop that everything runs in.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, VecDeque},
    net::SocketAddr,
    sync::Arc,
};

use roce_bth::ROCE_UDP_PORT;
use roce_cm::{CmConfig, RateLimit};
use roce_icrc::Flow;
use roce_mem::{MemoryTable, PdHandle};
use roce_port::{CmEventKind, ConnId, ListenArgs, Port, PortConfig, RxMeta, TxBatch};
use roce_qp::CompletionQueue;
use roce_verbs::{AsyncEvent, Completion, Instant};

use crate::{
    Class, SimConfig, Stats,
    adversary::{Blind, Copies, Effort, Observer},
    model::{Conn, Phase},
    net::{Frame, Link, NetStats},
    program::Program,
    rng::Rng,
    runner::{Check, Simulation},
    scenario::{HostPlan, SEC, Scenario},
    services::Services,
    trace::Trace,
};

/// Number in the TCP port space that hosts listen on.
pub const LISTEN_PORT: u16 = 7471;
/// Events without progress of the clock after which something spins.
const SPIN: u32 = 200_000;
/// Events of a whole run.
const MAX_EVENTS: u64 = 20_000_000;
/// The stream that decides whether a run is extended: not so for the seeds that tests know by what they draw.
const EXTENDED: u64 = 22;
/// The stream of an adversary's choices.
pub(crate) const ADVERSARY: u64 = 23;
/// Completion queues of a host.
pub(crate) const CQS: usize = 3;

/// Event at a point in time.
#[derive(Debug)]
pub(crate) enum Event {
    Arrive {
        host: usize,
        frame: Frame,
    },
    /// The host's receive loop runs.
    Run {
        host: usize,
        boot: u32,
    },
    /// The host's timer.
    Wake {
        host: usize,
        boot: u32,
    },
    /// Program of an end posts sends.
    Send {
        conn: usize,
        end: usize,
        life: u32,
    },
    /// Program of an end posts receives.
    Recv {
        conn: usize,
        end: usize,
        life: u32,
    },
    Connect {
        conn: usize,
    },
    /// The second end of a connection by modify is raised.
    Raise {
        conn: usize,
        life: u32,
    },
    /// Drained send queue resumes.
    Resume {
        conn: usize,
        end: usize,
        life: u32,
    },
    Repair {
        conn: usize,
        life: u32,
    },
    Disturb,
    Heal {
        a: usize,
        b: usize,
    },
    Boot {
        host: usize,
    },
    /// Flow of the other services posts messages.
    Serve {
        flow: usize,
    },
    /// Host posts buffers to its shared receive queues.
    Replenish {
        host: usize,
        boot: u32,
    },
    /// The adversary sends a burst.
    Attack,
    /// The observer sends a packet.
    Meddle,
    /// Timer of the run's program.
    Program {
        timer: usize,
    },
    /// Program gives up a request that is never confirmed.
    Dismiss {
        host: usize,
        conn: ConnId,
    },
    Quiet,
}

struct Timed {
    at: u64,
    seq: u64,
    event: Event,
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.seq) == (other.at, other.seq)
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}

/// One host.
pub(crate) struct Host {
    pub(crate) plan: HostPlan,
    /// The connection manager's settings.
    pub(crate) cm: CmConfig,
    pub(crate) port: Port,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) pd: PdHandle,
    pub(crate) cqs: Vec<Arc<CompletionQueue>>,
    /// Counts restarts.
    pub(crate) boot: u32,
    pub(crate) alive: bool,
    /// None while it is being filled.
    batch: Option<TxBatch>,
    rx: VecDeque<Frame>,
    rx_bytes: usize,
    run_scheduled: bool,
    wake_at: Option<u64>,
    next_identification: u16,
}

/// State of a run.
pub struct World {
    pub(crate) scenario: Scenario,
    pub(crate) now: u64,
    pub(crate) hosts: Vec<Host>,
    pub(crate) conns: Vec<Conn>,
    links: Vec<Link>,
    queue: BinaryHeap<Reverse<Timed>>,
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
    scratch: Vec<Completion>,
    pub(crate) services: Option<Services>,
    pub(crate) class: Class,
    pub(crate) seed: u64,
    pub(crate) scale: u32,
    pub(crate) blind: Option<Box<Blind>>,
    pub(crate) observer: Option<Box<Observer>>,
    pub(crate) copies: Option<Box<Copies>>,
    pub(crate) program: Option<Box<dyn Program>>,
    /// When the last of the connections came up for the first time.
    pub(crate) all_up: Option<u64>,
}

/// The GUID of a host's adapter in one of its lives.
pub(crate) fn guid_of(host: usize, boot: u32, keeps: bool) -> u64 {
    let guid = 0x0200_0000_0000_0000 | (host as u64) << 24 | u64::from(boot);
    if keeps { roce_cm::guid::keeping(guid) } else { guid }
}

fn make_port(plan: &HostPlan, index: usize, boot: u32, rng: &mut Rng) -> (Port, CmConfig, Arc<MemoryTable>, PdHandle) {
    let mut config = PortConfig::new(vec![plan.addr], plan.mtu, guid_of(index, boot, plan.keeps));
    config.window = plan.window;
    config.turn_packets = plan.turn_packets;
    // Of those that don't tell some keep packets all the same.
    config.reorder = plan.keeps || index % 2 == 1;
    if plan.tight {
        narrow(&mut config.cm);
    }
    let cm = config.cm.clone();
    let mem = Arc::new(MemoryTable::new(rng.seed(), &config.limits));
    let port = Port::new(config, mem.clone(), rng.seed());
    let pd = mem.alloc_pd().expect("a protection domain");
    (port, cm, mem, pd)
}

/// Limits that an adversary reaches soon.
fn narrow(cm: &mut CmConfig) {
    cm.max_half_open = 24;
    cm.max_half_open_per_peer = 12;
    cm.max_lingering = 32;
    cm.max_rated_peers = 16;
    cm.mad_rate = RateLimit {
        per_second: 1000,
        burst: 200,
    };
}

fn make_cqs() -> Vec<Arc<CompletionQueue>> {
    (0..CQS as u32).map(|i| CompletionQueue::new(i, 8192, None)).collect()
}

impl Host {
    fn new(plan: HostPlan, index: usize, rng: &mut Rng) -> Self {
        let (port, cm, mem, pd) = make_port(&plan, index, 0, rng);
        let mut host = Self {
            cm,
            batch: Some(TxBatch::new(plan.tx.clone())),
            port,
            mem,
            pd,
            cqs: make_cqs(),
            boot: 0,
            alive: true,
            rx: VecDeque::new(),
            rx_bytes: 0,
            run_scheduled: false,
            wake_at: None,
            next_identification: rng.number() as u16,
            plan,
        };
        host.listen();
        host
    }

    /// Gives a frame to the port, with what the socket tells of it.
    pub(crate) fn take(&mut self, now: Instant, frame: &Frame) {
        let meta = RxMeta {
            local: frame.dst,
            remote: frame.src,
            identification: self.plan.sees_headers.then_some(frame.identification),
            segment_len: frame.segment_len,
            tos: frame.tos,
            hop_limit: 0,
        };
        self.port.handle_datagram(now, &meta, &frame.bytes);
    }

    fn listen(&mut self) {
        // Of a tight host, less than a peer's half-open connections.
        let backlog = if self.plan.tight { 6 } else { 64 };
        let args = ListenArgs::new(None, LISTEN_PORT, backlog);
        self.port.cm_listen(&args).expect("a listener");
    }

    /// Starts anew without any memory of the past.
    pub(crate) fn restart(&mut self, index: usize, rng: &mut Rng) {
        self.boot += 1;
        (self.port, self.cm, self.mem, self.pd) = make_port(&self.plan, index, self.boot, rng);
        self.cqs = make_cqs();
        self.rx.clear();
        self.rx_bytes = 0;
        self.run_scheduled = false;
        self.wake_at = None;
        self.alive = true;
        self.listen();
    }
}

/// The rules of a GSO send: sizes, one destination queue pair, and ICRCs that are right as Linux numbers segments.
fn check_train(train: &roce_port::Train<'_>, flow: &Flow) -> Check {
    let (len, segment, n) = (train.bytes.len(), train.segment_len, train.segments);
    if segment == 0 || len.div_ceil(segment) != n || n > roce_port::MAX_SEGMENTS || len > roce_port::MAX_TRAIN_BYTES {
        return Err(format!("a train of {n} times {segment} bytes that has {len}"));
    }
    let dest = |packet: &[u8]| packet.get(5..8).map(<[u8]>::to_vec);
    let first = dest(train.bytes);
    for (i, packet) in train.packets().enumerate() {
        if dest(packet) != first {
            return Err("a train that mixes queue pairs".into());
        }
        if !flow.verify(i as u16, packet) {
            return Err(format!("packet {i} of {n} leaves with a wrong ICRC"));
        }
    }
    Ok(())
}

/// Draws the scenario of a run of this class.
fn draw_scenario(config: &SimConfig, class: Class) -> Scenario {
    let seed = config.run.seed;
    let mut rng = Rng::new(seed, 0);
    let mut scenario = Scenario::draw(config.run.scale, &mut rng);
    if config.bottleneck {
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
            .map(|(i, plan)| Host::new(plan.clone(), i, &mut seed_rng))
            .collect();
        let links = (0..hosts.len() * hosts.len())
            .map(|_| Link::new(scenario.link(&mut net_rng)))
            .collect();
        let mut world = Self {
            now: 0,
            conns: Vec::new(),
            hosts,
            links,
            queue: BinaryHeap::new(),
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
            self.schedule(at, Event::Connect { conn });
        }
        for _ in 0..self.scenario.disturbances {
            let at = self.chaos_rng.range(0, self.scenario.chaos_end);
            self.schedule(at, Event::Disturb);
        }
        self.schedule(self.scenario.chaos_end, Event::Quiet);
    }

    /// Creates the run's attacker.
    fn create_attacker(&mut self) {
        let mut rng = Rng::new(self.seed, ADVERSARY);
        let effort = match self.class {
            Class::Blind => Effort::draw(&mut rng, self.scenario.chaos_end),
            Class::Observed => {
                let victim = rng.index(self.conns.len());
                let plan = &mut self.conns[victim].plan;
                // What it makes wait for ever must give up, and soon enough for a run.
                plan.timeout = plan.timeout.clamp(12, 16);
                plan.retry_cnt = plan.retry_cnt.max(1);
                let observer = Observer::new(rng, victim, self.scenario.chaos_end);
                self.observer = Some(Box::new(observer));
                return;
            }
            Class::Copies => {
                self.copies = Some(Box::new(Copies::new(rng)));
                return;
            }
            Class::Goodput { attacked: true } => Effort::throughout(&mut rng),
            Class::Strangers { attacked: true } => Effort::strangers(&mut rng, self.scenario.chaos_end),
            Class::Plain | Class::Flood | Class::Goodput { attacked: false } | Class::Strangers { attacked: false } => {
                return;
            }
        };
        let after = rng.range(0, self.scenario.chaos_end / 2);
        self.blind = Some(Box::new(Blind::new(rng, effort)));
        match self.class {
            Class::Blind => self.start_attack(after),
            Class::Strangers { .. } => self.start_attack(0),
            _ => {}
        }
    }

    /// Puts an event `after` nanoseconds from now into the queue.
    pub(crate) fn schedule(&mut self, after: u64, event: Event) {
        self.seq += 1;
        let (at, seq) = (self.now + after, self.seq);
        self.queue.push(Reverse(Timed { at, seq, event }));
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

    fn run_to_end(&mut self) -> Check {
        let mut at_once = 0;
        let mut events = 0u64;
        let deadline = self.scenario.chaos_end + 300 * SEC;
        while !self.is_finished() {
            let Some(Reverse(Timed { at, event, .. })) = self.queue.pop() else {
                return Err(format!("nothing left to happen, but not done: {}", self.situation()));
            };
            if at > self.now {
                at_once = 0;
            }
            at_once += 1;
            events += 1;
            self.now = at;
            if at_once > SPIN || events > MAX_EVENTS {
                return Err(format!("it spins at {event:?}: {}", self.situation()));
            }
            if at > deadline {
                return Err(format!("stuck in the quiet phase: {}", self.situation()));
            }
            self.step(event)?;
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
        while let Some(Reverse(Timed { at, event, .. })) = self.queue.pop() {
            if at > end {
                break;
            }
            self.now = at;
            self.stats.events += 1;
            events += u32::from(at > rest);
            wakes += u32::from(at > rest && matches!(event, Event::Wake { .. }));
            if events > allowance || self.stats.events > MAX_EVENTS {
                let text = self.situation();
                return Err(format!(
                    "an idle network does not come to rest: {wakes} timers of {events} events: {text}"
                ));
            }
            self.step(event)?;
        }
        self.check_end()?;
        self.check_strays()?;
        self.program.as_ref().map_or(Ok(()), |p| p.check_end())?;
        self.stats.simulated_ns += self.now;
        Ok(())
    }

    fn step(&mut self, event: Event) -> Check {
        match event {
            Event::Arrive { host, frame } => self.arrive(host, frame),
            Event::Run { host, boot } => self.run_host(host, boot)?,
            Event::Wake { host, boot } => self.wake(host, boot)?,
            Event::Send { conn, end, life } => self.on_send(conn, end, life)?,
            Event::Recv { conn, end, life } => self.on_recv(conn, end, life)?,
            Event::Connect { conn } => self.connect(conn)?,
            Event::Raise { conn, life } => self.raise_second(conn, life)?,
            Event::Resume { conn, end, life } => self.resume(conn, end, life)?,
            Event::Repair { conn, life } => self.repair(conn, life)?,
            Event::Disturb => self.disturb()?,
            Event::Heal { a, b } => {
                self.link(a, b).cut = false;
                self.link(b, a).cut = false;
            }
            Event::Boot { host } => self.boot(host)?,
            Event::Serve { flow } => self.serve(flow)?,
            Event::Replenish { host, boot } => self.replenish(host, boot)?,
            Event::Attack => self.attack()?,
            Event::Meddle => self.meddle()?,
            Event::Program { timer } => self.on_program_timer(timer)?,
            Event::Dismiss { host, conn } => self.dismiss(host, conn)?,
            Event::Quiet => self.enter_quiet()?,
        }
        Ok(())
    }

    fn arrive(&mut self, h: usize, frame: Frame) {
        let host = &mut self.hosts[h];
        if !host.alive {
            return;
        }
        if host.rx_bytes + frame.bytes.len() > host.plan.rx_buffer {
            self.net_stats.overflowed += 1;
            return;
        }
        host.rx_bytes += frame.bytes.len();
        host.rx.push_back(frame);
        if !host.run_scheduled {
            host.run_scheduled = true;
            let (boot, most) = (host.boot, host.plan.latency);
            let after = self.net_rng.range(0, most);
            self.schedule(after, Event::Run { host: h, boot });
        }
    }

    fn run_host(&mut self, h: usize, boot: u32) -> Check {
        let host = &mut self.hosts[h];
        if !host.alive || host.boot != boot {
            return Ok(());
        }
        host.run_scheduled = false;
        while let Some(frame) = self.hosts[h].rx.pop_front() {
            self.hosts[h].rx_bytes -= frame.bytes.len();
            self.trace.received(self.now, h, &frame);
            self.take_after_copy(h, &frame);
        }
        self.service(h)
    }

    fn wake(&mut self, h: usize, boot: u32) -> Check {
        let now = self.instant();
        let host = &mut self.hosts[h];
        if !host.alive || host.boot != boot || host.wake_at != Some(self.now) {
            return Ok(());
        }
        host.wake_at = None;
        self.stats.timer_runs += 1;
        host.port.handle_timeout(now);
        if host.port.poll_timeout().is_some_and(|at| at < now) {
            return Err(format!("host {h}: a timer stays in the past after it has run"));
        }
        self.service(h)
    }

    /// After anything was done to a host: sends what it has to send, and looks at what it has to tell.
    pub(crate) fn service(&mut self, h: usize) -> Check {
        for _ in 0..10_000 {
            self.transmit(h)?;
            // Completions come before the events that tell why the last of them were flushed.
            let now = self.instant();
            let port = &mut self.hosts[h].port;
            let events: Vec<CmEventKind> = std::iter::from_fn(|| port.poll_cm_event(now)).collect();
            for event in &events {
                self.allow_flushes(h, event);
            }
            self.poll_cqs(h)?;
            self.poll_services(h)?;
            let mut busy = !events.is_empty();
            for event in events {
                self.trace.cm(self.now, h, &event);
                self.on_cm_event(h, event)?;
            }
            while let Some(event) = self.hosts[h].port.poll_async_event() {
                busy = true;
                self.on_async_event(h, event)?;
            }
            if !busy {
                self.arm_timer(h);
                return Ok(());
            }
        }
        Err(format!("host {h} has events without end"))
    }

    fn on_async_event(&mut self, h: usize, event: AsyncEvent) -> Check {
        match event {
            AsyncEvent::SqDrained(qpn) => self.on_drained(h, qpn),
            AsyncEvent::SrqLimitReached(_) | AsyncEvent::SrqError(_) => self.on_srq_event(h, event),
            AsyncEvent::CqError(cq) => Err(format!("host {h}: completion queue {cq} overflowed")),
            // Errors that completions and the states of queue pairs show as well.
            _ => Ok(()),
        }
    }

    pub(crate) fn poll_cqs(&mut self, h: usize) -> Check {
        for cq in 0..CQS {
            loop {
                let mut out = std::mem::take(&mut self.scratch);
                out.clear();
                let polled = self.hosts[h].cqs[cq].poll(&mut out, 64);
                let polled = polled.map_err(|_| format!("host {h}: completion queue {cq} overflowed"));
                let checked = polled.and_then(|_| {
                    for completion in &out {
                        self.trace.completed(self.now, h, completion);
                        self.on_completion(h, cq, completion)?;
                    }
                    Ok(out.is_empty())
                });
                self.scratch = out;
                if checked? {
                    break;
                }
            }
        }
        Ok(())
    }

    fn arm_timer(&mut self, h: usize) {
        let now = self.now;
        let host = &mut self.hosts[h];
        let Some(at) = host.port.poll_timeout().map(|at| at.as_nanos().max(now)) else {
            return;
        };
        if host.wake_at.is_none_or(|armed| at < armed || armed < now) {
            host.wake_at = Some(at);
            let boot = host.boot;
            self.schedule(at - now, Event::Wake { host: h, boot });
        }
    }

    /// Lets the port stage what it has, and gives it to the links.
    fn transmit(&mut self, h: usize) -> Check {
        let now = self.instant();
        loop {
            let Some(mut batch) = self.hosts[h].batch.take() else {
                return Err(format!("host {h} transmits within transmitting"));
            };
            let more = self.hosts[h].port.poll_transmit(now, &mut batch);
            for train in batch.trains() {
                self.stats.packets += train.segments as u64;
                self.stats.trains += 1;
                self.send_train(h, &train)?;
            }
            batch.clear();
            self.hosts[h].batch = Some(batch);
            if !more {
                return Ok(());
            }
        }
    }

    fn send_train(&mut self, h: usize, train: &roce_port::Train<'_>) -> Check {
        let remote = train.remote.ip();
        let to = self.hosts.iter().position(|host| host.plan.addr == remote);
        let src = SocketAddr::new(train.local, train.src_port);
        let flow = Flow::try_from((src, SocketAddr::new(remote, ROCE_UDP_PORT)));
        let frame = |bytes: &[u8], identification: u16, segment_len: usize| Frame {
            src,
            dst: remote,
            tos: train.tos,
            identification,
            segment_len,
            bytes: bytes.to_vec(),
            damaged: false,
        };
        let Ok(flow) = flow else {
            return Err(format!("host {h} sends from {} to {remote}", train.local));
        };
        check_train(train, &flow).map_err(|text| format!("host {h}: {text}"))?;
        let Some(to) = to else {
            return self.reflect(h, train);
        };
        if self.copies.is_some() {
            train
                .packets()
                .for_each(|packet| self.note_for_copies(to, train.src_port, packet));
        }
        if self.blind.is_some() {
            train
                .packets()
                .for_each(|packet| self.note_genuine(to, train.src_port, packet));
        }
        self.trace.leaves(self.now, h, train);
        let whole = self.hosts[to].plan.gro
            && !self.hosts[to].plan.sees_headers
            && !self.hosts[h].plan.counts_up
            && train.segments > 1
            && self.net_rng.chance(0.7);
        if whole {
            if self.observer.is_some() {
                for (i, packet) in train.packets().enumerate() {
                    self.observe(to, &frame(packet, i as u16, 0));
                }
            }
            let frame = frame(train.bytes, 0, train.segment_len);
            self.trace.sent(self.now, &frame);
            self.carry(h, to, frame);
            return Ok(());
        }
        for (i, packet) in train.packets().enumerate() {
            let mut frame = frame(packet, i as u16, 0);
            if self.hosts[h].plan.counts_up {
                let next = &mut self.hosts[h].next_identification;
                *next = next.wrapping_add(1);
                frame.identification = *next;
                flow.seal(*next, &mut frame.bytes);
            }
            self.trace.sent(self.now, &frame);
            self.observe(to, &frame);
            self.carry(h, to, frame);
        }
        Ok(())
    }

    fn carry(&mut self, from: usize, to: usize, frame: Frame) {
        let n = self.hosts.len();
        let sees = self.hosts[to].plan.sees_headers;
        let mut arrivals: [Option<(u64, Frame)>; 2] = [None, None];
        let mut count = 0;
        self.links[from * n + to].send(
            self.now,
            frame,
            sees,
            &mut self.net_rng,
            &mut self.net_stats,
            |at, f| {
                if let Some(slot) = arrivals.get_mut(count) {
                    *slot = Some((at, f));
                    count += 1;
                }
            },
        );
        for (at, frame) in arrivals.into_iter().flatten() {
            let after = at.saturating_sub(self.now);
            self.schedule(after, Event::Arrive { host: to, frame });
        }
    }

    fn on_cm_event(&mut self, h: usize, event: CmEventKind) -> Check {
        self.stats.cm_events += 1;
        self.handle_cm_event(h, event)
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

    fn into_counts(self) -> Stats {
        self.into_stats()
    }
}
