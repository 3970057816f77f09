//! A loop of a server, with sessions and disks of its own.

use core::time::Duration;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::AtomicUsize, mpsc::Sender},
};

use mio::{Interest, Token};
use rnbd::{
    Errno,
    server::{
        Server as Rnbd,
        action::{Opened, Output, Ticket},
        disk::StoreId,
        transport::OverRtrs,
    },
};
use rnbd_disk::{Budget, Disk, Exports, FileSystem};
use roce::reactor::{
    Handle, JobResult, JobTicket, Reactor, ReactorError, Readiness, Service as Loop, StartedJob, TurnCx,
};
use roce::{Completion, LocalDevice};
use roce_verbs::mem::{MemError, Pages};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use rtrs::{
    admission::shared::SharedAdmission,
    server::{
        Server as Rtrs,
        request::{Output as RtrsOutput, SessionKey, SessionOpened},
    },
};

use crate::{
    control::{Refused, Reply, ServeAnswer, ServeRequest},
    events::EventSender,
    jobs::{Done, Opening, Queue, Workers, look_at_sizes},
    rng::Rng,
    serve::config::{ServeConfig, ServeEvent, ServedPath, StartError},
    stats::ServeStats,
};

/// How often the sizes of open devices are looked at.
const SIZES: Duration = Duration::from_secs(5);
/// The disk's descriptor.
const DISK: Token = Token(0);

/// Command of another thread.
pub(crate) enum Command {
    Steer(ServeRequest, Reply<ServeAnswer>),
    /// To end in good order.
    Stop,
    /// To end without waiting for clients and other loops, one of which has failed.
    Quit,
    /// Another loop accepts nobody any more and has nothing left.
    Idle,
    #[cfg(test)]
    Panic,
}

/// Disk work of a turn: more would leave the processor's cache before it is sent.
const TURN: Budget = Budget {
    bytes: 256 << 10,
    operations: 64,
};

/// Settings of a loop.
pub(crate) struct Plan {
    pub(crate) config: ServeConfig,
    pub(crate) admission: SharedAdmission,
    /// Devices that the sessions of all loops have open.
    pub(crate) open: Arc<AtomicUsize>,
    pub(crate) workers: Workers,
    pub(crate) loops: Arc<[Handle<Command, Done>]>,
    pub(crate) index: usize,
    pub(crate) events: EventSender<ServeEvent>,
}

/// The server of a loop.
pub(crate) struct Service {
    workers: Workers,
    rtrs: Rtrs,
    rnbd: Rnbd<Disk>,
    /// Rest of this turn's.
    budget: Budget,
    /// Room for what RNBD reports.
    outputs: Vec<Output>,
    exports: Arc<Exports>,
    rng: Rng,
    events: EventSender<ServeEvent>,
    /// Sessions that were reported as opened.
    sessions: BTreeMap<SessionKey, SessionOpened>,
    /// Jobs in flight, with their results if they panic.
    jobs: BTreeMap<u64, Done>,
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
    /// Other loops that have not been told that nothing is left here.
    to_tell: Vec<Handle<Command, Done>>,
    /// Other loops with something left, whose packets may come to this one.
    busy_others: usize,
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
            let disk = service.rnbd.disks().descriptor();
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
            admission,
            open,
            workers,
            loops,
            index,
            events,
        } = plan;
        let others = loops.iter().enumerate().filter(|(other, _)| *other != index);
        let to_tell: Vec<_> = others.map(|(_, handle)| handle.clone()).collect();
        let mut rng = Rng::new()?;
        let disk = Disk::new(config.disk)?;
        let cx = &mut rng.context(roce::now(), device);
        let (rtrs, local) = Rtrs::listen_with(cx, config.rtrs, admission, index)?;
        let service = Self {
            workers,
            rtrs,
            rnbd: Rnbd::sharing(config.limits, open, disk),
            budget: TURN,
            outputs: Vec::new(),
            exports: config.exports,
            rng,
            events,
            sessions: BTreeMap::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            grace: config.grace,
            sizes_at: None,
            looking: BTreeSet::new(),
            stop_at: None,
            quits: false,
            busy_others: to_tell.len(),
            to_tell,
        };
        Ok((service, local))
    }

    /// Handles a report of RTRS.
    fn report(&mut self, turn: &TurnCx<'_, Done>, output: RtrsOutput) {
        match output {
            RtrsOutput::SessionOpened(opened) => {
                self.sessions.insert(opened.session, opened.clone());
                self.events.report(ServeEvent::SessionOpened(opened));
            }
            RtrsOutput::SessionClosed { session, why } => {
                if let Some(opened) = self.sessions.remove(&session) {
                    self.events.report(ServeEvent::SessionClosed(opened, why));
                }
            }
            RtrsOutput::PathUp {
                session, peer, local, ..
            } => {
                if let Some(path) = self.path(session, peer, local) {
                    self.events.report(ServeEvent::PathUp(path));
                }
            }
            RtrsOutput::PathDown {
                session,
                peer,
                local,
                why,
            } => {
                if let Some(path) = self.path(session, peer, local) {
                    self.events.report(ServeEvent::PathDown(path, why));
                }
            }
            RtrsOutput::Allocate { ticket, bytes } => {
                let failed = Done::Memory(ticket, Err(MemError::Limit("memory")));
                self.start(turn, failed, Queue::Memory, move || {
                    Done::Memory(ticket, Pages::allocate(bytes))
                });
            }
            RtrsOutput::Free(pages) => {
                self.start(turn, Done::Freed, Queue::Memory, move || {
                    drop(pages);
                    Done::Freed
                });
            }
            // RNBD has taken it.
            RtrsOutput::Request(_) => {}
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

    /// Starts a job in the threads of its queue. Never waits. `failed` is its result if it panics.
    fn start(
        &mut self,
        turn: &TurnCx<'_, Done>,
        failed: Done,
        queue: Queue,
        work: impl FnOnce() -> Done + Send + 'static,
    ) {
        let started = self.begin(turn, failed);
        self.workers.start(queue, move || started.finish(work()));
    }

    fn begin(&mut self, turn: &TurnCx<'_, Done>, failed: Done) -> StartedJob<Done> {
        self.next_job += 1;
        self.jobs.insert(self.next_job, failed);
        turn.jobs.begin(JobTicket(self.next_job))
    }

    /// Whether jobs are in flight that the end waits for.
    fn has_jobs(&self) -> bool {
        self.jobs.values().any(|job| !matches!(job, Done::Sizes(_)))
    }

    /// Calls RNBD over RTRS.
    fn call_rnbd(&mut self, turn: &mut TurnCx<'_, Done>, call: impl FnOnce(&mut Rnbd<Disk>, &mut OverRtrs<'_, '_>)) {
        let (rtrs, cx) = (&mut self.rtrs, &mut self.rng.cx(turn));
        call(&mut self.rnbd, &mut OverRtrs { rtrs, cx });
    }

    /// Handles a report of RNBD, or starts a job for it.
    fn output(&mut self, turn: &mut TurnCx<'_, Done>, output: Output) {
        match output {
            Output::Rtrs(output) => self.report(turn, output),
            Output::Open {
                ticket,
                session_name,
                name,
                mode,
            } => {
                let opening = Opening {
                    exports: self.exports.clone(),
                    workers: self.workers.clone(),
                    started: self.begin(turn, Done::Opened(ticket, Err(Errno::EIO.into()))),
                    ticket,
                    session_name,
                    name,
                    mode,
                };
                opening.start();
            }
            Output::Close { ticket, store } => self.close(turn, ticket, store),
        }
    }

    /// Has the sizes of open devices looked at, as devices may grow and shrink. A file system that has not answered is left out.
    fn look_at_sizes(&mut self, turn: &TurnCx<'_, Done>) {
        if self.sizes_at.is_none_or(|at| at > turn.now) {
            return;
        }
        let mut images = BTreeMap::<FileSystem, Vec<_>>::new();
        for (file_system, image) in self.rnbd.disks().images() {
            images.entry(file_system).or_default().push(image);
        }
        for (file_system, images) in images {
            if self.looking.insert(file_system) {
                let done = Done::Sizes(file_system);
                self.start(turn, done, Queue::Sizes(file_system), move || {
                    look_at_sizes(&images);
                    Done::Sizes(file_system)
                });
            }
        }
        self.sizes_at = self.rnbd.disks().has_stores().then_some(turn.now + SIZES);
    }

    /// Has a device closed, which makes durable what was written.
    fn close(&mut self, turn: &mut TurnCx<'_, Done>, ticket: Ticket, store: StoreId) {
        let Some(mut export) = self.rnbd.disks_mut().take(store) else {
            return self.call_rnbd(turn, |rnbd, rtrs| rnbd.closed(rtrs, ticket));
        };
        export.begin_close();
        let queue = Queue::Close(export.file_system());
        self.start(turn, Done::Closed(ticket), queue, move || {
            export.close();
            Done::Closed(ticket)
        });
    }

    /// Whether anything of a session is left.
    fn is_idle(&self) -> bool {
        self.rtrs.is_idle() && self.rnbd.is_idle() && !self.rnbd.disks().is_busy() && !self.has_jobs()
    }

    /// Ends the loop if it is to stop, and nothing is left here nor at the others.
    fn look_stopped(&mut self, turn: &mut TurnCx<'_, Done>) {
        let Some(at) = self.stop_at else { return };
        let idle = self.is_idle();
        if idle {
            self.to_tell.drain(..).for_each(|other| other.command(Command::Idle));
        }
        let quits = self.quits && !self.rnbd.disks().is_busy() && !self.has_jobs();
        if quits || (idle && self.busy_others == 0) {
            turn.stop();
        } else if at <= turn.now {
            tracing::warn!("requests are still being worked on, or files being written back, at shutdown");
            turn.stop();
        }
    }

    fn stop(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.stop_at.get_or_insert(turn.now + self.grace);
        self.rtrs.stop(&mut self.rng.cx(turn));
    }

    /// Has RNBD work on what RTRS and the disks have. Returns whether there was anything.
    fn serve(&mut self, turn: &mut TurnCx<'_, Done>) -> bool {
        let mut outputs = core::mem::take(&mut self.outputs);
        let worked = self.rnbd.work(&mut self.rtrs, &mut self.rng.cx(turn), &mut outputs);
        for output in outputs.drain(..) {
            self.output(turn, output);
        }
        self.outputs = outputs;
        worked
    }

    /// Complies with a request, as far as this loop has to do with it.
    fn steer(&mut self, turn: &mut TurnCx<'_, Done>, request: ServeRequest) -> Result<ServeAnswer, Refused> {
        let found = match request {
            ServeRequest::Sessions => return Ok(ServeAnswer::Sessions(self.rtrs.listing())),
            ServeRequest::Devices => return Ok(ServeAnswer::Devices(self.rnbd.listing())),
            ServeRequest::Stats {} => return Ok(ServeAnswer::Stats(Box::new(self.stats(turn)))),
            ServeRequest::CloseSession { session } => self.rtrs.close_session(&mut self.rng.cx(turn), session),
            ServeRequest::ClosePath { session, path } => self.rtrs.close_path(&mut self.rng.cx(turn), session, path),
            ServeRequest::ForceClose { session, device } => self.rnbd.force_close(turn.now, session, device),
            ServeRequest::ResetPathStats { session, path } => self.rtrs.reset_stats(session, path),
        };
        match found {
            true => Ok(ServeAnswer::Done),
            false => Err(Refused::new(Errno::ENOENT, "there is no such session, path or device")),
        }
    }

    fn stats(&self, turn: &mut TurnCx<'_, Done>) -> ServeStats {
        ServeStats {
            turns: turn.stats(),
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
            Command::Steer(request, reply) => {
                let done = self.steer(turn, request);
                reply.send(done);
            }
            #[cfg(test)]
            Command::Panic => panic!("as intended"),
            Command::Idle => self.busy_others = self.busy_others.saturating_sub(1),
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
        let cx = &mut self.rng.cx(turn);
        for (qp, wc) in completions {
            self.rtrs.completion(cx, *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, Done>, event: Event) {
        self.rtrs.event(&mut self.rng.cx(turn), &event);
    }

    fn job_done(&mut self, turn: &mut TurnCx<'_, Done>, done: JobResult<Done>) {
        // A panic is in the log.
        let failed = self.jobs.remove(&done.ticket.0);
        let Some(done) = done.result.ok().or(failed) else {
            return;
        };
        match done {
            Done::Memory(ticket, memory) => self.rtrs.ready(&mut self.rng.cx(turn), ticket, memory),
            Done::Opened(ticket, opened) => {
                let opened = opened.map(|(identity, export)| {
                    let (geometry, label) = (export.image().geometry(), export.image().label().to_owned());
                    let instance = export.instance();
                    let store = self.rnbd.disks_mut().add(*export);
                    self.sizes_at.get_or_insert(turn.now + SIZES);
                    Opened {
                        store,
                        geometry,
                        identity,
                        label,
                        instance,
                    }
                });
                self.call_rnbd(turn, |rnbd, rtrs| rnbd.opened(rtrs, ticket, opened));
            }
            Done::Closed(ticket) => self.call_rnbd(turn, |rnbd, rtrs| rnbd.closed(rtrs, ticket)),
            Done::Sizes(file_system) => {
                self.looking.remove(&file_system);
                self.rnbd.disks_mut().note_sizes();
            }
            Done::Freed => {}
        }
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.rtrs.timeout(&mut self.rng.cx(turn));
        self.look_at_sizes(turn);
        self.look_stopped(turn);
    }

    fn work(&mut self, turn: &mut TurnCx<'_, Done>) -> bool {
        let mut worked = self.serve(turn);
        let disks = self.rnbd.disks_mut();
        if disks.is_busy() && !self.budget.is_spent() {
            let more = disks.pump(&mut self.budget);
            worked |= more && !self.budget.is_spent();
            worked |= self.serve(turn);
        }
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, Done>) {
        self.rtrs.end_batch(&mut self.rng.cx(turn));
        self.look_stopped(turn);
    }

    fn sent(&mut self, _: &mut TurnCx<'_, Done>) -> bool {
        let spent = self.budget.is_spent();
        self.budget = TURN;
        spent && self.rnbd.disks().is_busy()
    }

    fn next_timeout(&self) -> Option<Instant> {
        let all = [self.rtrs.next_timeout(), self.stop_at, self.sizes_at];
        all.into_iter().flatten().min()
    }
}
