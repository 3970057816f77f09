//! A loop of a server: a share of it, with its connections of each session and disks of its own.

use core::time::Duration;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, mpsc::Sender},
};

use mio::{Interest, Token};
use rnbd::{
    Errno,
    proto::AccessMode,
    server::{
        Server as Rnbd,
        action::{Action, Identity, OpenRefused, Opened, Ticket},
        disk::StoreId,
        parts::Letter as RnbdLetter,
    },
};
use rnbd_disk::{Budget, Disk, Ended, Exports, OpenExport};
use roce::Completion;
use roce_devices::Devices;
use roce_mem::{MemError, Pages};
use roce_reactor::{Handle, JobResult, JobTicket, Reactor, ReactorError, Readiness, Service as Loop, TurnCx};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use rtrs::{
    admission::PathKey,
    cx::Cx,
    server::{
        Server as Rtrs, Share,
        letter::Letter as RtrsLetter,
        request::{Output, SessionKey, SessionOpened, Ticket as MemoryTicket},
    },
};

use crate::{
    control::{
        Refused, Reply,
        serve::{ServeAnswer, ServeRequest},
    },
    dice::Dice,
    gate::{Door, SharedPlaces},
    images::Images,
    serve::{ServeConfig, ServeEvent, ServeStats, ServedPath, StartError, Tell},
    stats::LoopStats,
};

/// How often the sizes of open devices are looked at.
const SIZES: Duration = Duration::from_secs(5);
/// The disk's descriptor.
const DISK: Token = Token(0);

/// What other threads ask for.
pub(crate) enum Command {
    Stats(Sender<ServeStats>),
    /// Of the home of the session that it is about, but for what every loop has something of.
    Steer(ServeRequest, Reply<ServeAnswer>),
    /// A half-open path of this loop has given way to one of another.
    GaveWay(PathKey),
    /// To end in good order.
    Stop,
    /// To end without waiting for clients and other loops, one of which has failed.
    Quit,
    /// From another loop, and which.
    Letter(usize, Letter),
    #[cfg(test)]
    Panic,
}

/// What the loops of a server tell one another.
pub(crate) enum Letter {
    Rtrs(RtrsLetter),
    Rnbd(RnbdLetter),
    /// The loop lets nobody in any more, and nothing is left there.
    Idle,
}

/// Which loop it is, and what those of the same server have in common.
pub(crate) struct Place {
    pub(crate) index: usize,
    pub(crate) loops: Arc<[Handle<Command, Done>]>,
    pub(crate) images: Images,
}

impl Place {
    fn others(&self) -> usize {
        self.loops.len().saturating_sub(1)
    }

    fn tell(&self, to: usize, letter: Letter) {
        if let Some(handle) = self.loops.get(to) {
            handle.command(Command::Letter(self.index, letter));
        }
    }
}

/// What opening an export gave.
type OpenResult = Result<(Identity, Box<OpenExport>), OpenRefused>;

/// What jobs return.
pub(crate) enum Done {
    Memory(MemoryTicket, Result<Arc<Pages>, MemError>),
    Opened(Ticket, OpenResult),
    Closed(Ticket),
    Nothing,
}

/// What a turn does on disks: what is larger leaves the processor's cache before it is sent.
const TURN: Budget = Budget {
    bytes: 256 << 10,
    operations: 64,
};

/// What a job is for.
#[derive(Clone, Copy, Debug)]
enum Job {
    Memory(MemoryTicket),
    Open(Ticket),
    Close(Ticket),
    /// Nobody waits for it.
    Nothing,
}

/// What a loop is given.
pub(crate) struct Plan {
    pub(crate) config: ServeConfig,
    /// Of a loop of several.
    pub(crate) shared: Option<(Door, SharedPlaces)>,
    pub(crate) place: Place,
    pub(crate) tell: Tell,
}

/// A server on a loop, or one loop's part of it.
pub(crate) struct Service {
    place: Place,
    rtrs: Rtrs,
    rnbd: Rnbd,
    disk: Disk,
    /// What is left of this turn's.
    budget: Budget,
    exports: Arc<Exports>,
    dice: Dice,
    tell: Tell,
    /// Sessions whose home this is, and that were reported as opened.
    sessions: BTreeMap<SessionKey, SessionOpened>,
    /// Operations that have ended.
    ended: Vec<Ended>,
    /// Jobs that are under way, for one that panics.
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    grace: Duration,
    /// When the sizes of open devices are looked at next.
    sizes_at: Option<Instant>,
    /// It stops, and at that time at the latest.
    stop_at: Option<Instant>,
    /// It stops, and waits for nobody.
    quits: bool,
    /// While it stops: the others know that nothing is left here.
    told_idle: bool,
    /// Other loops that have not said so.
    busy_others: usize,
}

/// The machines' view of a turn.
macro_rules! cx {
    ($turn:expr, $dice:expr) => {
        &mut Cx {
            now: $turn.now,
            provider: $turn.device.provider(),
            random: &mut |out: &mut [u8]| $dice.fill(out),
        }
    };
}

impl Service {
    /// Runs the loop to its end; says by `ready` whether it listens.
    pub(crate) fn run(
        reactor: Reactor<Self>,
        mut device: Devices,
        plan: Plan,
        ready: Sender<Result<SocketAddr, StartError>>,
    ) -> Result<(), ReactorError> {
        let made = Self::new(&mut device, plan);
        let service = match made {
            Ok((service, local)) => {
                let _ = ready.send(Ok(local));
                service
            }
            Err(e) => {
                let _ = ready.send(Err(e));
                return Ok(());
            }
        };
        // Who waits for several loops would else not see that one has panicked.
        drop(ready);
        let mut watched = Ok(());
        reactor.run(device, |turn| {
            let disk = service.disk.descriptor();
            watched = turn.sockets.register(disk, DISK, Interest::READABLE);
            if watched.is_err() {
                turn.stop();
            }
            service
        })?;
        Ok(watched?)
    }

    fn new(device: &mut Devices, plan: Plan) -> Result<(Self, SocketAddr), StartError> {
        let Plan {
            config,
            shared,
            place,
            tell,
        } = plan;
        let share = Share::new(place.index, place.loops.len()).unwrap_or(Share::WHOLE);
        let mut dice = Dice::new()?;
        let disk = Disk::new(config.disk)?;
        let cx = &mut Cx {
            now: roce::now(),
            provider: device.provider(),
            random: &mut |out: &mut [u8]| dice.fill(out),
        };
        let ((rtrs, local), rnbd) = match shared {
            Some((door, places)) => (
                Rtrs::listen_share(cx, config.rtrs, Box::new(door), share)?,
                Rnbd::with_share(config.limits, Box::new(places), share),
            ),
            None => (Rtrs::listen(cx, config.rtrs)?, Rnbd::new(config.limits)),
        };
        let service = Self {
            busy_others: place.others(),
            place,
            rtrs,
            rnbd,
            disk,
            budget: TURN,
            exports: config.exports,
            dice,
            tell,
            sessions: BTreeMap::new(),
            ended: Vec::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            grace: config.grace,
            sizes_at: None,
            stop_at: None,
            quits: false,
            told_idle: false,
        };
        Ok((service, local))
    }

    fn is_home(&self, session: SessionKey) -> bool {
        self.rtrs.share().of_session(session) == self.place.index
    }

    fn told(&mut self, turn: &mut TurnCx<'_, Done>, output: Output) {
        match &output {
            Output::SessionOpened(opened) if self.is_home(opened.session) => {
                self.sessions.insert(opened.session, opened.clone());
                let _ = self.tell.send(ServeEvent::SessionOpened(opened.clone()));
            }
            Output::SessionClosed { session, why } => {
                self.disk.forget(*session);
                if let Some(opened) = self.sessions.remove(session) {
                    let _ = self.tell.send(ServeEvent::SessionClosed(opened, why.clone()));
                }
            }
            Output::PathUp {
                session, peer, local, ..
            } => {
                if let Some(path) = self.path(*session, *peer, *local) {
                    let _ = self.tell.send(ServeEvent::PathUp(path));
                }
            }
            Output::PathDown {
                session,
                peer,
                local,
                why,
            } => {
                if let Some(path) = self.path(*session, *peer, *local) {
                    let _ = self.tell.send(ServeEvent::PathDown(path, why.clone()));
                }
            }
            _ => {}
        }
        match self.rnbd.rtrs(turn.now, output) {
            Some(Output::Allocate { ticket, bytes }) => {
                let job = move || Done::Memory(ticket, Pages::allocate(bytes));
                if !self.start(turn, Job::Memory(ticket), job) {
                    let full = Err(MemError::Limit("jobs"));
                    self.rtrs.ready(cx!(turn, self.dice), ticket, full);
                }
            }
            Some(Output::Free(pages)) => {
                // If too much waits, they go here.
                self.start(turn, Job::Nothing, move || {
                    drop(pages);
                    Done::Nothing
                });
            }
            _ => {}
        }
    }

    fn path(&self, session: SessionKey, client: SocketAddr, server: IpAddr) -> Option<ServedPath> {
        let session = self.sessions.get(&session)?.name.clone();
        Some(ServedPath {
            session,
            client,
            server,
        })
    }

    /// False when too much waits already.
    fn start(&mut self, turn: &TurnCx<'_, Done>, job: Job, work: impl FnOnce() -> Done + Send + 'static) -> bool {
        self.next_job += 1;
        let started = turn.jobs.start(JobTicket(self.next_job), work).is_ok();
        if started {
            self.jobs.insert(self.next_job, job);
        }
        started
    }

    /// A job has panicked; that is in the log.
    fn job_failed(&mut self, turn: &mut TurnCx<'_, Done>, job: Job) {
        match job {
            Job::Memory(ticket) => {
                let failed = Err(MemError::Limit("memory"));
                self.rtrs.ready(cx!(turn, self.dice), ticket, failed);
            }
            Job::Open(ticket) => self.rnbd.opened(turn.now, ticket, Err(Errno::EIO.into())),
            Job::Close(ticket) => self.rnbd.closed(turn.now, ticket),
            Job::Nothing => {}
        }
    }

    fn act(&mut self, turn: &mut TurnCx<'_, Done>, action: Action) {
        match action {
            Action::Answer(request, errno) => self.rtrs.answer(cx!(turn, self.dice), request, errno),
            Action::AnswerWith { request, at, message } => {
                let memory = self.rtrs.memory(request.session);
                let written = memory.is_some_and(|memory| memory.write(at, &message).is_ok());
                let errno = if written { 0 } else { Errno::EINVAL.raw() };
                self.rtrs.answer(cx!(turn, self.dice), request, errno);
            }
            Action::Zero { request, from, len } => {
                if let Some(memory) = self.rtrs.memory(request.session) {
                    zero(memory, from, len);
                }
            }
            Action::Open {
                ticket,
                session_name,
                name,
                mode,
            } => {
                let exports = self.exports.clone();
                let job = move || Done::Opened(ticket, open(&exports, &session_name, &name, mode));
                if !self.start(turn, Job::Open(ticket), job) {
                    self.rnbd.opened(turn.now, ticket, Err(Errno::ENFILE.into()));
                }
            }
            Action::Close { ticket, store } => self.close(turn, ticket, store),
            Action::TakeOver { ticket, home, store } => {
                let part = self.place.images.part(home, store).ok_or(Errno::ENODEV);
                self.rnbd.taken_over(ticket, part.map(|part| self.disk.add(part)));
            }
            Action::Io(ticket, session, op) => match self.rtrs.memory(session) {
                Some(memory) => self.disk.start(session, ticket, op, memory),
                // A session that is gone is answered to nobody.
                None => self.rnbd.io_done(ticket, Err(Errno::ECONNABORTED)),
            },
        }
    }

    /// Devices may grow and shrink while they are open.
    fn look_at_sizes(&mut self, now: Instant) {
        if self.sizes_at.is_some_and(|at| at <= now) {
            self.disk.look_at_sizes();
            self.tell_sizes();
            self.sizes_at = self.disk.has_stores().then_some(now + SIZES);
        }
    }

    /// Clients that open a device again are told of another size.
    fn tell_sizes(&mut self) {
        while let Some((store, size)) = self.disk.poll_resized() {
            self.rnbd.resized(store, size);
        }
    }

    /// Closing makes durable what was written, which takes its time.
    fn close(&mut self, turn: &mut TurnCx<'_, Done>, ticket: Ticket, store: StoreId) {
        let Some(export) = self.disk.take(store) else {
            return self.rnbd.closed(turn.now, ticket);
        };
        if self.place.others() > 0 {
            self.place.images.withdraw(self.place.index, store);
        }
        let export = Box::new(export);
        let job = move || {
            drop(export);
            Done::Closed(ticket)
        };
        if !self.start(turn, Job::Close(ticket), job) {
            // Too much waits: it has been closed here, when the job was dropped.
            self.rnbd.closed(turn.now, ticket);
        }
    }

    /// Whether anything of a session is left.
    fn is_idle(&self, turn: &TurnCx<'_, Done>) -> bool {
        self.rtrs.is_idle() && self.rnbd.is_idle() && !self.disk.is_busy() && turn.jobs.under_way() == 0
    }

    /// A loop that stops is needed by others as long as they let clients in, and have sessions.
    fn look_stopped(&mut self, turn: &mut TurnCx<'_, Done>) {
        let Some(at) = self.stop_at else { return };
        let idle = self.is_idle(turn);
        if idle && !core::mem::replace(&mut self.told_idle, true) {
            let others = (0..=self.place.others()).filter(|other| *other != self.place.index);
            others.for_each(|other| self.place.tell(other, Letter::Idle));
        }
        let quits = self.quits && !self.disk.is_busy() && turn.jobs.under_way() == 0;
        if quits || (idle && self.busy_others == 0) {
            turn.stop();
        } else if at <= turn.now {
            tracing::warn!("requests are still being worked on, or files being written back, at shutdown");
            turn.stop();
        }
    }

    fn stop(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.stop_at.get_or_insert(turn.now + self.grace);
        self.rtrs.stop(cx!(turn, self.dice));
    }

    /// Another loop has something to say.
    fn letter(&mut self, turn: &mut TurnCx<'_, Done>, from: usize, letter: Letter) {
        match letter {
            Letter::Rtrs(letter) => self.rtrs.letter(cx!(turn, self.dice), from, letter),
            Letter::Rnbd(letter) => {
                // What RTRS was told before comes first.
                self.pass_on(turn);
                self.rnbd.letter(turn.now, from, letter);
            }
            Letter::Idle => self.busy_others = self.busy_others.saturating_sub(1),
        }
    }

    /// Sends what the machines here have for those of other loops.
    fn post_letters(&mut self) {
        while let Some((to, letter)) = self.rtrs.poll_letter() {
            self.place.tell(to, Letter::Rtrs(letter));
        }
        while let Some((to, letter)) = self.rnbd.poll_letter() {
            self.place.tell(to, Letter::Rnbd(letter));
        }
    }

    /// Passes on what one machine has for the other, and for the disks. True: there was something.
    fn pass_on(&mut self, turn: &mut TurnCx<'_, Done>) -> bool {
        let mut worked = false;
        while let Some(output) = self.rtrs.poll_output() {
            worked = true;
            self.told(turn, output);
        }
        while let Some(action) = self.rnbd.poll_action() {
            worked = true;
            self.act(turn, action);
        }
        worked
    }

    /// Complies with a request, as far as this loop has to do with it.
    fn steer(&mut self, turn: &mut TurnCx<'_, Done>, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        let found = match request {
            ServeRequest::Sessions => return Ok(ServeAnswer::Sessions(self.rtrs.listing())),
            ServeRequest::Devices => return Ok(ServeAnswer::Devices(self.rnbd.listing())),
            ServeRequest::Stats => return Ok(ServeAnswer::Stats(Box::new(self.stats(turn)))),
            ServeRequest::CloseSession(session) => self.rtrs.close_session(cx!(turn, self.dice), session),
            ServeRequest::ClosePath(session, path) => self.rtrs.close_path(cx!(turn, self.dice), session, path),
            ServeRequest::ForceClose(session, device) => self.rnbd.force_close(turn.now, session, device),
            ServeRequest::ResetPathStats(session, path) => self.rtrs.reset_stats(session, path),
        };
        match found {
            true => Ok(ServeAnswer::Done),
            false => Err(Refused::new(Errno::ENOENT, "there is no such session, path or device")),
        }
    }

    fn stats(&self, turn: &mut TurnCx<'_, Done>) -> ServeStats {
        ServeStats {
            turns: LoopStats::of(turn),
            rnbd: self.rnbd.counters(),
            rtrs: self.rtrs.counters().named(),
            sessions: vec![self.sessions.len()],
            requests: vec![self.rnbd.counters().requests],
        }
    }
}

impl Loop for Service {
    type Command = Command;
    type Output = Done;

    fn command(&mut self, turn: &mut TurnCx<'_, Done>, command: Command) {
        match command {
            Command::Stats(to) => {
                let _ = to.send(self.stats(turn));
            }
            Command::Steer(request, reply) => {
                let done = self.steer(turn, request);
                reply.send(done);
            }
            Command::GaveWay(path) => self.rtrs.gave_way(cx!(turn, self.dice), path),
            #[cfg(test)]
            Command::Panic => panic!("as it is to be"),
            Command::Letter(from, letter) => self.letter(turn, from, letter),
            Command::Stop => self.stop(turn),
            Command::Quit => {
                self.quits = true;
                self.stop(turn);
            }
        }
    }

    /// Only of the disk, which [`work`](Loop::work) looks at in each round.
    fn ready(&mut self, _: &mut TurnCx<'_, Done>, _: Token, _: Readiness) {}

    fn completions(&mut self, turn: &mut TurnCx<'_, Done>, completions: &[(QpId, Completion)]) {
        let cx = cx!(turn, self.dice);
        for (qp, wc) in completions {
            self.rtrs.completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, Done>, event: Event) {
        self.rtrs.event(cx!(turn, self.dice), &event);
    }

    fn job_done(&mut self, turn: &mut TurnCx<'_, Done>, done: JobResult<Done>) {
        let job = self.jobs.remove(&done.ticket.0);
        match done.result {
            Ok(Done::Memory(ticket, memory)) => self.rtrs.ready(cx!(turn, self.dice), ticket, memory),
            Ok(Done::Opened(ticket, opened)) => {
                let opened = opened.map(|(identity, export)| {
                    let (geometry, label) = (export.image().geometry(), export.image().label().to_owned());
                    let part = (self.place.others() > 0).then(|| export.part());
                    let store = self.disk.add(*export);
                    self.sizes_at.get_or_insert(turn.now + SIZES);
                    if let Some(part) = part {
                        self.place.images.offer(self.place.index, store, part);
                    }
                    Opened {
                        store,
                        geometry,
                        identity,
                        label,
                    }
                });
                self.rnbd.opened(turn.now, ticket, opened);
            }
            Ok(Done::Closed(ticket)) => self.rnbd.closed(turn.now, ticket),
            Ok(Done::Nothing) => {}
            Err(_) => {
                if let Some(job) = job {
                    self.job_failed(turn, job);
                }
            }
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.rtrs.timeout(cx!(turn, self.dice));
        self.look_at_sizes(turn.now);
        self.look_stopped(turn);
    }

    fn work(&mut self, turn: &mut TurnCx<'_, Done>) -> bool {
        let mut worked = self.pass_on(turn);
        if self.disk.is_busy() && !self.budget.is_spent() {
            let more = self.disk.pump(&mut self.budget, &mut self.ended);
            worked |= more && !self.budget.is_spent();
            worked |= !self.ended.is_empty();
            self.tell_sizes();
            for (ticket, result) in self.ended.drain(..) {
                self.rnbd.io_done(ticket, result);
            }
        }
        if self.place.others() > 0 {
            self.post_letters();
        }
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.rtrs.end_batch(cx!(turn, self.dice));
        if self.place.others() > 0 {
            self.post_letters();
        }
        self.look_stopped(turn);
    }

    fn sent(&mut self, _: &mut TurnCx<'_, Done>) -> bool {
        let spent = self.budget.is_spent();
        self.budget = TURN;
        spent && self.disk.is_busy()
    }

    fn next_timeout(&self) -> Option<Instant> {
        let all = [self.rtrs.next_timeout(), self.stop_at, self.sizes_at];
        all.into_iter().flatten().min()
    }
}

/// Opens an export. Waits for the file system.
fn open(exports: &Arc<Exports>, session: &str, name: &[u8], mode: AccessMode) -> OpenResult {
    let found = exports.find(session, name)?;
    let identity = found.id().identity();
    match exports.open_found(found, mode) {
        Ok(export) => Ok((identity, Box::new(export))),
        Err(errno) => Err(OpenRefused {
            errno,
            identity: Some(identity),
        }),
    }
}

fn zero(memory: &Pages, from: usize, len: usize) {
    const ZEROES: [u8; 4096] = [0; 4096];
    for at in (0..len).step_by(ZEROES.len()) {
        let part = ZEROES.len().min(len - at);
        if memory.write(from + at, &ZEROES[..part]).is_err() {
            tracing::error!("zeroes outside a session's memory");
            return;
        }
    }
}
