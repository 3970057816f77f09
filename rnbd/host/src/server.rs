//! A loop of a server: a share of it, with its connections of each session and disks of its own.

use core::time::Duration;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::{Arc, mpsc::Sender},
};

use mio::{Interest, Token};
use rnbd::{
    Errno,
    server::{
        Server as Rnbd,
        action::{Action, Opened, Ticket},
        disk::StoreId,
        parts::Letter as RnbdLetter,
    },
};
use rnbd_disk::{Budget, Disk, Ended, Exports, FileSystem};
use roce::{Completion, LocalDevice};
use roce_mem::{MemError, Pages};
use roce_reactor::{
    Handle, JobResult, JobTicket, Reactor, ReactorError, Readiness, Service as Loop, StartedJob, TurnCx,
};
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
        request::{Output, SessionKey, SessionOpened},
    },
};

use crate::{
    control::{
        Refused, Reply,
        serve::{ServeAnswer, ServeRequest},
    },
    dice::Dice,
    events::EventSender,
    gate::{Door, SharedPlaces},
    images::Images,
    jobs::{Done, Job, Opening, Queue, Workers, look_at_sizes},
    serve::{ServeConfig, ServeEvent, ServeStats, ServedPath, StartError},
    stats::LoopStats,
};

/// How often the sizes of open devices are looked at.
const SIZES: Duration = Duration::from_secs(5);
/// The disk's descriptor.
const DISK: Token = Token(0);

/// Command of another thread.
pub(crate) enum Command {
    Stats(Sender<ServeStats>),
    /// Request to the home of a session, or to every loop if each has a part of what it is about.
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

/// Message between the loops of a server.
pub(crate) enum Letter {
    Rtrs(RtrsLetter),
    Rnbd(RnbdLetter),
    /// The loop lets nobody in any more, and nothing is left there.
    Idle,
}

/// Index of a loop, and the state that the loops of a server share.
pub(crate) struct Place {
    pub(crate) index: usize,
    pub(crate) loops: Arc<[Handle<Command, Done>]>,
    pub(crate) images: Images,
    pub(crate) workers: Workers,
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

/// Disk work of a turn: more would leave the processor's cache before it is sent.
const TURN: Budget = Budget {
    bytes: 256 << 10,
    operations: 64,
};

/// Settings of a loop.
pub(crate) struct Plan {
    pub(crate) config: ServeConfig,
    /// Connection to the other loops, if there are several.
    pub(crate) shared: Option<(Door, SharedPlaces)>,
    pub(crate) place: Place,
    pub(crate) events: EventSender<ServeEvent>,
}

/// A server on a loop, or one loop's part of it.
pub(crate) struct Service {
    place: Place,
    rtrs: Rtrs,
    rnbd: Rnbd,
    disk: Disk,
    /// Rest of this turn's.
    budget: Budget,
    exports: Arc<Exports>,
    dice: Dice,
    events: EventSender<ServeEvent>,
    /// Sessions whose home this is, and that were reported as opened.
    sessions: BTreeMap<SessionKey, SessionOpened>,
    /// Operations that have ended.
    ended: Vec<Ended>,
    /// Jobs in flight.
    jobs: BTreeMap<u64, Job>,
    next_job: u64,
    grace: Duration,
    /// When the sizes of open devices are looked at next.
    sizes_at: Option<Instant>,
    /// File systems of which that is in flight.
    looking: BTreeSet<FileSystem>,
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
        mut device: LocalDevice,
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

    fn new(device: &mut LocalDevice, plan: Plan) -> Result<(Self, SocketAddr), StartError> {
        let Plan {
            config,
            shared,
            place,
            events,
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
            events,
            sessions: BTreeMap::new(),
            ended: Vec::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            grace: config.grace,
            sizes_at: None,
            looking: BTreeSet::new(),
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
                self.events.report(ServeEvent::SessionOpened(opened.clone()));
            }
            Output::SessionClosed { session, why } => {
                self.disk.forget(*session);
                if let Some(opened) = self.sessions.remove(session) {
                    self.events.report(ServeEvent::SessionClosed(opened, why.clone()));
                }
            }
            Output::PathUp {
                session, peer, local, ..
            } => {
                if let Some(path) = self.path(*session, *peer, *local) {
                    self.events.report(ServeEvent::PathUp(path));
                }
            }
            Output::PathDown {
                session,
                peer,
                local,
                why,
            } => {
                if let Some(path) = self.path(*session, *peer, *local) {
                    self.events.report(ServeEvent::PathDown(path, why.clone()));
                }
            }
            _ => {}
        }
        match self.rnbd.rtrs(turn.now, output) {
            Some(Output::Allocate { ticket, bytes }) => {
                self.start(turn, Job::Memory(ticket), Queue::Memory, move || {
                    Done::Memory(ticket, Pages::allocate(bytes))
                });
            }
            Some(Output::Free(pages)) => {
                self.start(turn, Job::Free, Queue::Memory, move || {
                    drop(pages);
                    Done::Freed
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

    /// Starts a job in the threads of its queue. Never waits.
    fn start(&mut self, turn: &TurnCx<'_, Done>, job: Job, queue: Queue, work: impl FnOnce() -> Done + Send + 'static) {
        let started = self.begin(turn, job);
        self.place.workers.start(queue, move || started.finish(work()));
    }

    fn begin(&mut self, turn: &TurnCx<'_, Done>, job: Job) -> StartedJob<Done> {
        self.next_job += 1;
        self.jobs.insert(self.next_job, job);
        turn.jobs.begin(JobTicket(self.next_job))
    }

    /// Whether jobs are in flight that the end waits for.
    fn has_jobs(&self) -> bool {
        self.jobs.values().any(|job| !matches!(job, Job::Sizes(_)))
    }

    /// Completes a job that panicked, which is in the log.
    fn job_failed(&mut self, turn: &mut TurnCx<'_, Done>, job: Job) {
        match job {
            Job::Memory(ticket) => {
                let failed = Err(MemError::Limit("memory"));
                self.rtrs.ready(cx!(turn, self.dice), ticket, failed);
            }
            Job::Open(ticket) => self.rnbd.opened(turn.now, ticket, Err(Errno::EIO.into())),
            Job::Close(ticket) => self.rnbd.closed(turn.now, ticket),
            Job::Sizes(file_system) => {
                self.looking.remove(&file_system);
            }
            Job::Free => {}
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
                let opening = Opening {
                    exports: self.exports.clone(),
                    workers: self.place.workers.clone(),
                    started: self.begin(turn, Job::Open(ticket)),
                    ticket,
                    session_name,
                    name,
                    mode,
                };
                opening.start();
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

    /// Has the sizes of open devices looked at, as devices may grow and shrink. A file system that has not answered is left out.
    fn look_at_sizes(&mut self, turn: &TurnCx<'_, Done>) {
        if self.sizes_at.is_none_or(|at| at > turn.now) {
            return;
        }
        let mut images = BTreeMap::<FileSystem, Vec<_>>::new();
        for (file_system, image) in self.disk.images() {
            images.entry(file_system).or_default().push(image);
        }
        for (file_system, images) in images {
            if self.looking.insert(file_system) {
                self.start(turn, Job::Sizes(file_system), Queue::Sizes(file_system), move || {
                    look_at_sizes(&images);
                    Done::Sizes(file_system)
                });
            }
        }
        self.sizes_at = self.disk.has_stores().then_some(turn.now + SIZES);
    }

    /// Clients that open a device again are told of another size.
    fn tell_sizes(&mut self) {
        while let Some((store, size)) = self.disk.poll_resized() {
            self.rnbd.resized(store, size);
        }
    }

    /// Has a device closed, which makes durable what was written.
    fn close(&mut self, turn: &mut TurnCx<'_, Done>, ticket: Ticket, store: StoreId) {
        let Some(mut export) = self.disk.take(store) else {
            return self.rnbd.closed(turn.now, ticket);
        };
        if self.place.others() > 0 {
            self.place.images.withdraw(self.place.index, store);
        }
        export.begin_close();
        let queue = Queue::Close(export.file_system());
        self.start(turn, Job::Close(ticket), queue, move || {
            export.close();
            Done::Closed(ticket)
        });
    }

    /// Whether anything of a session is left.
    fn is_idle(&self) -> bool {
        self.rtrs.is_idle() && self.rnbd.is_idle() && !self.disk.is_busy() && !self.has_jobs()
    }

    /// A loop that stops is needed by others as long as they let clients in, and have sessions.
    fn look_stopped(&mut self, turn: &mut TurnCx<'_, Done>) {
        let Some(at) = self.stop_at else { return };
        let idle = self.is_idle();
        if idle && !core::mem::replace(&mut self.told_idle, true) {
            let others = (0..=self.place.others()).filter(|other| *other != self.place.index);
            others.for_each(|other| self.place.tell(other, Letter::Idle));
        }
        let quits = self.quits && !self.disk.is_busy() && !self.has_jobs();
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
            Command::Panic => panic!("as intended"),
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
                    let instance = export.instance();
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
                        instance,
                    }
                });
                self.rnbd.opened(turn.now, ticket, opened);
            }
            Ok(Done::Closed(ticket)) => self.rnbd.closed(turn.now, ticket),
            Ok(Done::Sizes(file_system)) => {
                self.looking.remove(&file_system);
                self.disk.note_sizes();
                self.tell_sizes();
            }
            Ok(Done::Freed) => {}
            Err(_) => {
                if let Some(job) = job {
                    self.job_failed(turn, job);
                }
            }
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.rtrs.timeout(cx!(turn, self.dice));
        self.look_at_sizes(turn);
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
