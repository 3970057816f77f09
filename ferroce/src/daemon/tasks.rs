//! Tasks of the daemon: start, restart after a failure, reload, end.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rds_node::NodeControl;
use rnbd::Errno;
use rnbd_disk::Exports;
use rnbd_host::{
    control::{
        MapAnswer, MapDevice, MapRequest, MappedDevice, Refused, Reloaded, TaskState, TaskStatus, map::MapControl,
    },
    tls::Tls,
};

use super::{
    change::{Change, change, still_to_do},
    config::Config,
    task::{Job, Kind, Task, TaskName},
};
use crate::{
    control::{Control, Events, ServiceRegistry, not_renewed},
    event::Event,
    lnet, map,
    names::Resolver,
    output::Failure,
    place::{Place, Stage},
    rds::node,
    report::{ReportArgs, Reporter},
    serve,
    signals::Stop,
};

/// Time before a failed task is restarted, the first time; it doubles with each failure in a row.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest time before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time that the start waits for servers before it starts mappings.
const SERVERS_FIRST: Duration = Duration::from_secs(5);
/// Order in which tasks end: a mapping may be of one of our servers, and needs it for its last flush.
const ENDING: [Kind; 4] = [Kind::Map, Kind::Serve, Kind::Rds, Kind::Lnet];
/// Tasks at a time that are not in the file; EBUSY beyond.
const MAX_REQUESTED: usize = 64;
/// Run time after which a failure is the first in a row.
const LASTED: Duration = Duration::from_secs(60);

/// Origin of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// The configuration file.
    File,
    /// A request over the control socket.
    Request,
}

/// Handle of a running task.
#[derive(Clone)]
enum Live {
    /// With the TLS of its NBD clients.
    Map(MapControl, Option<Tls>),
    Serve(Arc<Exports>),
    Rds(NodeControl),
}

/// State that a task's thread reports.
#[derive(Default)]
struct Reported {
    live: Mutex<Option<Live>>,
    up: AtomicBool,
    /// Keeps the addresses of the names in its options.
    resolver: Arc<Resolver>,
}

/// A task that has a thread.
struct Running {
    stop: Stop,
    reported: Arc<Reported>,
    started: Instant,
    thread: JoinHandle<Result<(), Failure>>,
}

/// State of a task.
enum State {
    Running(Running),
    /// Failed; waits for its restart.
    Waiting {
        until: Instant,
        why: Refused,
    },
    /// Exited: its last device was unmapped.
    Exited,
}

struct Entry {
    task: Task,
    origin: Origin,
    state: State,
    /// Failures in a row.
    failures: u32,
    /// Next step after its exit.
    next: Option<Next>,
}

impl Entry {
    /// Stops it, if it runs.
    fn stop(&self) {
        if let State::Running(running) = &self.state {
            running.stop.request();
        }
    }
}

/// Next step of a task that is being stopped.
enum Next {
    Removed,
    Task(Task),
}

/// Changes a mapping to what its file says. Skips what is so already, as after a reload that has failed half-way.
fn apply(control: &MapControl, requests: Vec<MapRequest>) -> Result<(), String> {
    let requests = match control.ask(MapRequest::List {}) {
        Ok(MapAnswer::Listing(listing)) => {
            let device = |device: MappedDevice| MapDevice {
                name: device.name,
                mode: device.mode,
            };
            let mapped: Vec<_> = listing.devices.into_iter().map(device).collect();
            still_to_do(requests, &mapped)
        }
        _ => requests,
    };
    for request in requests {
        let so_already = match request {
            MapRequest::AddPath { .. } => Some(Errno::EEXIST),
            MapRequest::RemovePath { .. } => Some(Errno::ENOENT),
            _ => None,
        };
        match control.ask(request.clone()) {
            Err(refused) if Some(refused.errno) != so_already => return Err(format!("{request:?}: {refused}")),
            _ => {}
        }
    }
    Ok(())
}

/// A failure of a task as the answer to a request.
fn refused(failure: &Failure) -> Refused {
    Refused::new(failure.errno(), failure.text().unwrap_or("its output failed"))
}

/// The tasks of the daemon.
pub(super) struct Tasks {
    entries: Mutex<BTreeMap<TaskName, Entry>>,
    /// One reload at a time.
    reloading: Mutex<()>,
    services: Arc<ServiceRegistry>,
    events: Events,
    report_args: ReportArgs,
    reporter: Reporter,
    /// The daemon's own options in the file, when it started.
    of_daemon: Vec<String>,
    ending: AtomicBool,
}

impl Tasks {
    pub(super) fn new(control: &Control, report: &ReportArgs, of_daemon: Vec<String>) -> Self {
        Self {
            of_daemon,
            entries: Mutex::default(),
            reloading: Mutex::default(),
            services: control.services().clone(),
            events: control.events(),
            report_args: report.clone(),
            reporter: report.reporter(control.events()),
            ending: AtomicBool::new(false),
        }
    }

    fn report(&self, event: &Event) {
        if let Err(e) = self.reporter.event(event) {
            tracing::debug!("the daemon's report is not read: {e:?}");
        }
    }

    /// Reports that there are no tasks yet, and how to start one.
    pub(super) fn announce_idle(&self, config: Option<&Path>, control: Option<&Path>) {
        let [config, control] = [config, control].map(|path| path.map(|path| path.display().to_string()));
        self.report(&Event::Idle { config, control });
    }

    fn spawn(&self, name: &TaskName, task: &Task) -> Result<Running, Failure> {
        let job = task.job(&name.kind)?;
        let (stop, reported) = (Stop::by_request(), Arc::<Reported>::default());
        let place = (name.name.clone(), stop.clone(), self.services.clone());
        let reporter = self.report_args.reporter(self.events.clone()).of_task(name.to_string());
        let to = reported.clone();
        let run = move || {
            let (sockets, stop, services) = place;
            let place = Place {
                sockets: Some(sockets),
                stop,
                services,
                resolver: to.resolver.clone(),
                reporter,
                tell: &|stage| match stage {
                    Stage::Mapping(control, tls) => *to.live.lock() = Some(Live::Map(control, tls)),
                    Stage::Serving(exports) => *to.live.lock() = Some(Live::Serve(exports)),
                    Stage::Node(control) => *to.live.lock() = Some(Live::Rds(control)),
                    Stage::Up => to.up.store(true, Ordering::Release),
                },
            };
            match job {
                Job::Serve(args) => serve::serve(&args, place),
                Job::Map(args) => map::map(&args, place),
                Job::Rds(args) => node::node(&args, place),
                Job::Lnet(args) => lnet::serve::serve(&args, place),
            }
        };
        let thread = thread::Builder::new()
            .name("ferroce-task".to_owned())
            .spawn(run)
            .map_err(|e| Failure::failed(format!("no thread: {e}")))?;
        Ok(Running {
            stop,
            reported,
            started: Instant::now(),
            thread,
        })
    }

    fn launch(&self, name: &TaskName, task: &Task, failures: u32) -> State {
        match self.spawn(name, task) {
            Ok(running) => {
                let task = name.to_string();
                self.report(&Event::TaskStarted { task });
                State::Running(running)
            }
            Err(failure) => self.pause(name, failures, refused(&failure)),
        }
    }

    /// State after a failure.
    fn pause(&self, name: &TaskName, failures: u32, why: Refused) -> State {
        let pause = FIRST_PAUSE.saturating_mul(1 << failures.min(8)).min(LONGEST_PAUSE);
        self.report(&Event::TaskFailed {
            task: name.to_string(),
            why: why.text.clone(),
            restart_in: pause.as_secs_f64(),
        });
        State::Waiting {
            until: Instant::now() + pause,
            why,
        }
    }

    /// Removes stopped tasks, and restarts failed ones when it is time.
    pub(super) fn poll(&self) {
        let mut entries = self.entries.lock();
        entries.retain(|name, entry| self.poll_one(name, entry));
    }

    /// The next state of a task; false: it is removed.
    fn poll_one(&self, name: &TaskName, entry: &mut Entry) -> bool {
        let stopped = entry.next.is_some() || self.is_ending();
        let (outcome, lasted) = match std::mem::replace(&mut entry.state, State::Exited) {
            State::Running(running) if running.thread.is_finished() => {
                let lasted = running.started.elapsed() >= LASTED;
                let panicked = |_| Err(Failure::failed("the task panicked"));
                (running.thread.join().unwrap_or_else(panicked), lasted)
            }
            State::Waiting { .. } | State::Exited if stopped => (Ok(()), true),
            State::Waiting { until, .. } if until <= Instant::now() => {
                entry.failures += 1;
                entry.state = self.launch(name, &entry.task, entry.failures);
                return true;
            }
            other => {
                entry.state = other;
                return true;
            }
        };
        self.exited(name, entry, outcome.err().map(|failure| refused(&failure)), lasted)
    }

    /// The next state of a task that has exited, and why if it failed; false: it is removed.
    fn exited(&self, name: &TaskName, entry: &mut Entry, why: Option<Refused>, lasted: bool) -> bool {
        let report = |why: Option<Refused>| {
            let (task, why) = (name.to_string(), why.map(|why| why.text));
            self.report(&Event::TaskExited { task, why });
        };
        match (entry.next.take(), why) {
            (_, None) if self.is_ending() => false,
            (Some(Next::Task(task)), why) if !self.is_ending() => {
                report(why);
                entry.state = self.launch(name, &task, 0);
                (entry.task, entry.failures) = (task, 0);
                true
            }
            (None, None) => {
                report(None);
                entry.origin == Origin::File
            }
            (None, Some(why)) if !self.is_ending() => {
                if lasted {
                    entry.failures = 0;
                }
                entry.state = self.pause(name, entry.failures, why);
                true
            }
            (_, why) => {
                report(why);
                false
            }
        }
    }

    fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Stops all tasks, and waits for that.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        for kind in ENDING {
            self.entries
                .lock()
                .iter()
                .filter(|(name, _)| name.kind == kind)
                .for_each(|(_, entry)| entry.stop());
            while self.entries.lock().keys().any(|name| name.kind == kind) {
                self.poll();
                thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Stops the tasks that the file has dropped.
    fn drop_from_file(&self, gone: &[TaskName]) {
        for kind in ENDING {
            let names: Vec<_> = gone.iter().filter(|name| name.kind == kind).collect();
            for name in &names {
                self.replace(name, Next::Removed);
            }
            let others_wait = kind != Kind::Serve && gone.iter().any(|name| name.kind == Kind::Serve);
            while others_wait && names.iter().any(|name| self.entries.lock().contains_key(name)) {
                thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Whether each task is up, or has failed once.
    pub(super) fn settled(&self) -> bool {
        self.entries.lock().values().all(|entry| match &entry.state {
            State::Running(running) => entry.failures > 0 || running.reported.up.load(Ordering::Acquire),
            State::Waiting { .. } | State::Exited => true,
        })
    }

    /// Applies a new configuration file. Unchanged tasks keep running.
    pub(super) fn reload(&self, config: Config) -> Reloaded {
        let _one = self.reloading.lock();
        let mut done = Reloaded::default();
        let known: Vec<(TaskName, Task)> = {
            let entries = self.entries.lock();
            let of_file = entries.iter().filter(|(_, entry)| entry.origin == Origin::File);
            of_file
                .map(|(name, entry)| (name.clone(), entry.task.clone()))
                .collect()
        };
        let names = known.iter().map(|(name, _)| name);
        let gone: Vec<TaskName> = names.filter(|name| !config.tasks.contains_key(name)).cloned().collect();
        self.drop_from_file(&gone);
        done.stopped.extend(gone.iter().map(ToString::to_string));
        for (name, task) in config.tasks {
            let text = name.to_string();
            match known.iter().find(|(known, _)| *known == name) {
                None => match self.add(name, task, Origin::File) {
                    Ok(()) => done.started.push(text),
                    Err(refused) => done.failed.push(format!("{text} ({refused})")),
                },
                Some((_, old)) if *old == task => match self.renew(&name) {
                    Ok(true) => done.changed.push(text),
                    Ok(false) => done.unchanged.push(text),
                    Err(why) => done.failed.push(format!("{text} ({why})")),
                },
                Some((_, old)) => self.change(&name, old, task, &mut done),
            }
        }
        if config.daemon != self.of_daemon {
            done.failed
                .push("[daemon] (changed: restart the daemon to apply it)".to_owned());
        }
        self.report(&Event::Reloaded { done: done.clone() });
        done
    }

    /// Handle and resolver of a task that runs.
    fn live(&self, name: &TaskName) -> Option<(Live, Arc<Resolver>)> {
        match self.entries.lock().get(name).map(|entry| &entry.state) {
            Some(State::Running(running)) => {
                Some((running.reported.live.lock().clone()?, running.reported.resolver.clone()))
            }
            _ => None,
        }
    }

    /// Loads a task's certificates again; returns whether they have changed.
    fn renew(&self, name: &TaskName) -> Result<bool, String> {
        match self.live(name) {
            Some((Live::Map(_, Some(tls)), _)) => tls.renew().map_err(|e| not_renewed(&e)),
            _ => Ok(false),
        }
    }

    fn change(&self, name: &TaskName, old: &Task, new: Task, done: &mut Reloaded) {
        let how = self
            .live(name)
            .map(|(live, resolver)| (live, change(&name.kind, old, &new, &resolver)));
        let changed = match how {
            Some((_, Err(e))) => Err(refused(&e).to_string()),
            // Certificates first: when they are wrong, nothing else has been done yet.
            Some((Live::Map(control, _), Ok(Change::Map(requests)))) => {
                self.renew(name).and_then(|_| apply(&control, requests))
            }
            Some((Live::Serve(exports), Ok(Change::Exports))) => match new.job(&name.kind) {
                Ok(Job::Serve(args)) => args
                    .exports()
                    .map_err(|e| e.text().unwrap_or_default().to_owned())
                    .and_then(|named| exports.set_named(named).map_err(|e| e.to_string())),
                _ => Err("not a server".to_owned()),
            },
            Some((Live::Rds(control), Ok(Change::Node))) => match new.job(&name.kind) {
                Ok(Job::Rds(args)) => {
                    args.apply(&control);
                    Ok(())
                }
                _ => Err("not an RDS node".to_owned()),
            },
            _ => {
                self.replace(name, Next::Task(new));
                return done.restarted.push(name.to_string());
            }
        };
        match changed {
            Ok(()) => {
                if let Some(entry) = self.entries.lock().get_mut(name) {
                    entry.task = new;
                }
                done.changed.push(name.to_string());
            }
            // The entry stays different from the file, so that the next reload tries again.
            Err(why) => done.failed.push(format!("{name} ({why})")),
        }
    }

    fn replace(&self, name: &TaskName, next: Next) {
        if let Some(entry) = self.entries.lock().get_mut(name) {
            entry.next = Some(next);
            entry.stop();
        }
    }

    fn add(&self, name: TaskName, task: Task, origin: Origin) -> Result<(), Refused> {
        let mut entries = self.entries.lock();
        if self.is_ending() {
            return Err(Refused::new(Errno::ESHUTDOWN, "the daemon is ending"));
        }
        if entries.contains_key(&name) {
            return Err(Refused::new(Errno::EEXIST, format!("task {name} exists already")));
        }
        let requested = entries.values().filter(|entry| entry.origin == Origin::Request).count();
        if origin == Origin::Request && requested >= MAX_REQUESTED {
            let text = format!("{MAX_REQUESTED} tasks were started over the control socket, the limit: stop one");
            return Err(Refused::new(Errno::EBUSY, text));
        }
        let state = self.launch(&name, &task, 0);
        let (failures, next) = (0, None);
        entries.insert(
            name,
            Entry {
                task,
                origin,
                state,
                failures,
                next,
            },
        );
        Ok(())
    }

    /// Starts a task that is not in the file.
    pub(super) fn start(&self, name: TaskName, task: Task) -> Result<(), Refused> {
        let job = task.job(&name.kind);
        job.map_err(|e| Refused::new(Errno::EINVAL, e.text().unwrap_or_default()))?;
        self.add(name, task, Origin::Request)
    }

    /// Stops a task, and waits for its exit. The next reload starts one of the file again.
    pub(super) fn stop(&self, name: &TaskName) -> Result<(), Refused> {
        if !self.entries.lock().contains_key(name) {
            return Err(Refused::new(Errno::ENOENT, format!("there is no task {name}")));
        }
        self.replace(name, Next::Removed);
        while self.entries.lock().contains_key(name) {
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Starts the tasks of the file, servers first: mappings may be of these.
    pub(super) fn load(&self, config: Config) {
        let (servers, mappings): (Vec<_>, Vec<_>) =
            config.tasks.into_iter().partition(|(name, _)| name.kind == Kind::Serve);
        // The file has each name once.
        let start = |tasks: Vec<(TaskName, Task)>| {
            for (name, task) in tasks {
                let _ = self.add(name, task, Origin::File);
            }
        };
        start(servers);
        let started = Instant::now();
        while !self.settled() && started.elapsed() < SERVERS_FIRST {
            self.poll();
            thread::sleep(Duration::from_millis(5));
        }
        start(mappings);
    }

    /// Starts a mapping, and waits until it is up. One that fails is removed.
    pub(super) fn open(&self, name: TaskName, task: Task) -> Result<(), Refused> {
        self.start(name.clone(), task)?;
        loop {
            match self.started(&name) {
                Some(Ok(())) => return Ok(()),
                Some(Err(refused)) => {
                    // It may have exited already.
                    let _ = self.stop(&name);
                    return Err(refused);
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Whether a task is up, or why not; `None`: not yet.
    fn started(&self, name: &TaskName) -> Option<Result<(), Refused>> {
        match self.entries.lock().get(name).map(|entry| &entry.state) {
            Some(State::Running(running)) => running.reported.up.load(Ordering::Acquire).then_some(Ok(())),
            Some(State::Waiting { why, .. }) => Some(Err(why.clone())),
            Some(State::Exited) | None => Some(Err(Refused::new(Errno::ENODEV, "it has exited"))),
        }
    }

    /// Reports a refused reload.
    pub(super) fn not_reloaded(&self, why: &Refused) {
        let why = why.text.clone();
        self.report(&Event::NotReloaded { why });
    }

    /// Lists the tasks.
    pub(super) fn list(&self) -> Vec<TaskStatus> {
        let entries = self.entries.lock();
        let status = |(name, entry): (&TaskName, &Entry)| {
            let (state, why) = match &entry.state {
                State::Running(_) if entry.next.is_some() => (TaskState::Stopping, None),
                State::Running(running) if running.reported.up.load(Ordering::Acquire) => (TaskState::Up, None),
                State::Running(_) => (TaskState::Starting, None),
                State::Waiting { why, .. } => (TaskState::Failed, Some(why.text.clone())),
                State::Exited => (TaskState::Exited, None),
            };
            TaskStatus {
                task: name.to_string(),
                kind: name.kind.name().to_owned(),
                state,
                why,
                in_file: entry.origin == Origin::File,
                options: entry.task.words.clone(),
            }
        };
        entries.iter().map(status).collect()
    }

    /// Reads the name of a task, `map.NAME`, `serve.NAME`, `rds.NAME` or `lnet.NAME`.
    pub(super) fn name(text: &str) -> Result<TaskName, Refused> {
        let split = text
            .split_once('.')
            .and_then(|(kind, name)| Some((Kind::named(kind)?, name)));
        match split {
            Some((kind, name)) if !name.is_empty() => Ok(TaskName {
                kind,
                name: name.to_owned(),
            }),
            _ => Err(Refused::new(
                Errno::EINVAL,
                format!("{text:?} is not a task: map.NAME, serve.NAME, rds.NAME or lnet.NAME"),
            )),
        }
    }
}
