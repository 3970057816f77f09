//! The daemon's tasks: those that run, wait to be restarted, and end.

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
use rnbd::Errno;
use rnbd_disk::Exports;
use rnbd_host::{
    control::{
        Refused,
        map::{MapAnswer, MapControl, MapRequest, MappedDevice},
    },
    map::MapDevice,
    tls::Tls,
};
use serde_json::{Map, Value, json};

use super::{
    change::{Change, change, still_to_do},
    config::Config,
    task::{Job, Kind, Task, TaskName},
};
use crate::{
    control::{Control, Events, ServiceRegistry, not_renewed},
    map,
    names::Resolver,
    output::Failure,
    place::{Place, Stage},
    report::{ReportArgs, Reporter},
    serve,
    signals::Stop,
};

/// Time before a task that has failed is restarted, the first time; it doubles with each failure in a row.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long the start waits for servers.
const SERVERS_FIRST: Duration = Duration::from_secs(5);
/// The order in which tasks end: a mapping may be of one of our servers, and needs it until what was written is durable.
const ENDING: [Kind; 2] = [Kind::Map, Kind::Serve];
/// Tasks that are not in the file, at a time.
const MAX_REQUESTED: usize = 64;
/// A task that ran for so long had not failed in a row.
const LASTED: Duration = Duration::from_secs(60);

/// Origin of a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    /// The configuration file.
    File,
    /// A request over the control socket.
    Request,
}

/// How a running task is reached.
#[derive(Clone)]
enum Live {
    /// With the TLS of its NBD clients.
    Map(MapControl, Option<Tls>),
    Serve(Arc<Exports>),
}

/// Report of a task's thread.
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
    told: Arc<Reported>,
    begun: Instant,
    thread: JoinHandle<Result<(), Failure>>,
}

/// How a task is.
enum State {
    Running(Running),
    /// It has failed, and is restarted then.
    Waiting {
        until: Instant,
        why: Refused,
    },
    /// It has ended by itself: its last device was unmapped.
    Ended,
}

struct Entry {
    task: Task,
    origin: Origin,
    state: State,
    /// Failures in a row.
    failures: u32,
    /// Next step once it has ended.
    next: Option<Next>,
}

impl Entry {
    /// Requests its end, if it runs.
    fn stop(&self) {
        if let State::Running(running) = &self.state {
            running.stop.request();
        }
    }
}

enum Next {
    Gone,
    Task(Task),
}

/// Result of a reload, by task.
#[derive(Default)]
struct Reloaded {
    begun: Vec<String>,
    changed: Vec<String>,
    restarted: Vec<String>,
    ended: Vec<String>,
    unchanged: Vec<String>,
    failed: Vec<String>,
}

impl Reloaded {
    fn lists(&self) -> [(&'static str, &Vec<String>); 6] {
        [
            ("begun", &self.begun),
            ("changed", &self.changed),
            ("restarted", &self.restarted),
            ("ended", &self.ended),
            ("unchanged", &self.unchanged),
            ("failed", &self.failed),
        ]
    }

    fn fields(&self) -> Map<String, Value> {
        let each = self.lists().into_iter();
        each.map(|(what, tasks)| (what.to_owned(), tasks.clone().into()))
            .collect()
    }

    fn text(&self) -> String {
        let said = self.lists().into_iter().filter(|(_, tasks)| !tasks.is_empty());
        let said: Vec<_> = said
            .map(|(what, tasks)| format!("{what}: {}", tasks.join(", ")))
            .collect();
        match said.is_empty() {
            true => "reloaded: there is nothing to do".to_owned(),
            false => format!("reloaded; {}", said.join("; ")),
        }
    }
}

/// Makes a mapping what its file says. What is so already, as after a reload that has failed half-way, is left alone.
fn comply(control: &MapControl, requests: Vec<MapRequest>) -> Result<(), String> {
    let requests = match control.ask(MapRequest::List) {
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
            MapRequest::AddPath(_) => Some(Errno::EEXIST),
            MapRequest::RemovePath(_) => Some(Errno::ENOENT),
            _ => None,
        };
        match control.ask(request.clone()) {
            Err(refused) if Some(refused.errno) != so_already => return Err(format!("{request:?}: {refused}")),
            _ => {}
        }
    }
    Ok(())
}

/// Why a task has failed, as the answer to a request.
fn refused(failure: &Failure) -> Refused {
    Refused::new(failure.errno(), failure.text().unwrap_or("it can't report"))
}

/// All tasks.
pub(super) struct Tasks {
    entries: Mutex<BTreeMap<TaskName, Entry>>,
    /// One reload at a time.
    reloading: Mutex<()>,
    services: Arc<ServiceRegistry>,
    events: Events,
    report: ReportArgs,
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
            report: report.clone(),
            reporter: report.reporter(control.events()),
            ending: AtomicBool::new(false),
        }
    }

    fn tell(&self, name: &str, fields: Value, text: &str) {
        if let Err(e) = self.reporter.event(name, fields, text) {
            tracing::debug!("the daemon's report is not read: {e:?}");
        }
    }

    /// Reports that there is nothing to do yet, and how tasks come.
    pub(super) fn announce_idle(&self, config: Option<&Path>, control: Option<&Path>) {
        let why = match config {
            None => "no --config FILE was given".to_owned(),
            Some(file) => format!("{} has no [serve.NAME] and no [map.NAME]", file.display()),
        };
        let at = control.map(|path| format!(" (control socket {})", path.display()));
        let text = format!(
            "waiting for tasks, as {why}: `ferroce serve --daemon …` and `ferroce map --daemon …` start them{}; `ferroce daemon --help` has an \
             example of a file",
            at.unwrap_or_default()
        );
        self.tell("idle", json!({ "config": config, "control": control }), &text);
    }

    fn spawn(&self, name: &TaskName, task: &Task) -> Result<Running, Failure> {
        let job = task.job(&name.kind)?;
        let (stop, told) = (Stop::by_request(), Arc::<Reported>::default());
        let place = (name.name.clone(), stop.clone(), self.services.clone());
        let reporter = self.report.reporter(self.events.clone()).of_task(name.to_string());
        let tell = told.clone();
        let run = move || {
            let (sockets, stop, services) = place;
            let place = Place {
                sockets: Some(sockets),
                stop,
                services,
                resolver: tell.resolver.clone(),
                reporter,
                tell: &|stage| match stage {
                    Stage::Mapping(control, tls) => *tell.live.lock() = Some(Live::Map(control, tls)),
                    Stage::Serving(exports) => *tell.live.lock() = Some(Live::Serve(exports)),
                    Stage::Up => tell.up.store(true, Ordering::Release),
                },
            };
            match job {
                Job::Serve(args) => serve::serve(&args, place),
                Job::Map(args) => map::map(&args, place),
            }
        };
        let thread = thread::Builder::new()
            .name("ferroce-task".to_owned())
            .spawn(run)
            .map_err(|e| Failure::failed(format!("no thread: {e}")))?;
        Ok(Running {
            stop,
            told,
            begun: Instant::now(),
            thread,
        })
    }

    fn begin(&self, name: &TaskName, task: Task, origin: Origin, failures: u32) -> Entry {
        let state = match self.spawn(name, &task) {
            Ok(running) => {
                self.tell(
                    "task_begun",
                    json!({ "task": name.to_string() }),
                    &format!("{name} begins"),
                );
                State::Running(running)
            }
            Err(failure) => self.pause(name, failures, refused(&failure)),
        };
        Entry {
            task,
            origin,
            state,
            failures,
            next: None,
        }
    }

    /// After a failure.
    fn pause(&self, name: &TaskName, failures: u32, why: Refused) -> State {
        let pause = FIRST_PAUSE.saturating_mul(1 << failures.min(8)).min(LONGEST_PAUSE);
        let fields = json!({ "task": name.to_string(), "why": why.text, "again_in": pause.as_secs_f64() });
        let text = format!("{name} has failed, and is restarted in {} s: {why}", pause.as_secs());
        self.tell("task_failed", fields, &text);
        State::Waiting {
            until: Instant::now() + pause,
            why,
        }
    }

    /// Removes the tasks that have ended, and restarts those whose time has come.
    pub(super) fn tend(&self) {
        let mut entries = self.entries.lock();
        let names: Vec<TaskName> = entries.keys().cloned().collect();
        for name in names {
            let Some(entry) = entries.remove(&name) else { continue };
            if let Some(entry) = self.tended(&name, entry) {
                entries.insert(name, entry);
            }
        }
    }

    /// The next state of a task; `None`: it is gone.
    fn tended(&self, name: &TaskName, entry: Entry) -> Option<Entry> {
        match entry.state {
            State::Running(running) if running.thread.is_finished() => {
                let lasted = running.begun.elapsed() >= LASTED;
                let ended = running
                    .thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::failed("it has panicked")));
                self.ended(
                    name,
                    Entry {
                        state: State::Ended,
                        ..entry
                    },
                    ended,
                    lasted,
                )
            }
            State::Waiting { .. } | State::Ended if entry.next.is_some() || self.is_ending() => self.ended(
                name,
                Entry {
                    state: State::Ended,
                    ..entry
                },
                Ok(()),
                true,
            ),
            State::Waiting { until, .. } if until <= Instant::now() => {
                Some(self.begin(name, entry.task, entry.origin, entry.failures + 1))
            }
            _ => Some(entry),
        }
    }

    fn ended(&self, name: &TaskName, entry: Entry, how: Result<(), Failure>, lasted: bool) -> Option<Entry> {
        let why = how.err().map(|failure| refused(&failure));
        let gone = |why: Option<Refused>| {
            let why = why.map(|why| why.text);
            let text = match &why {
                None => format!("{name} has ended"),
                Some(why) => format!("{name} has ended: {why}"),
            };
            self.tell("task_ended", json!({ "task": name.to_string(), "why": why }), &text);
        };
        match (entry.next, why) {
            (_, why) if self.is_ending() => {
                if why.is_some() {
                    gone(why);
                }
                None
            }
            (Some(Next::Gone), why) => {
                gone(why);
                None
            }
            (Some(Next::Task(task)), why) => {
                gone(why);
                Some(self.begin(name, task, entry.origin, 0))
            }
            (None, None) => {
                gone(None);
                (entry.origin == Origin::File).then_some(Entry { next: None, ..entry })
            }
            (None, Some(why)) => {
                let failures = if lasted { 0 } else { entry.failures };
                let state = self.pause(name, failures, why);
                Some(Entry {
                    state,
                    failures,
                    next: None,
                    ..entry
                })
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
                self.tend();
                thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Ends tasks that are no longer in the file.
    fn drop_from_file(&self, gone: &[TaskName]) {
        for kind in ENDING {
            let names: Vec<_> = gone.iter().filter(|name| name.kind == kind).collect();
            for name in &names {
                self.replace(name, Next::Gone);
            }
            let others_wait = kind != Kind::Serve && gone.iter().any(|name| name.kind == Kind::Serve);
            while others_wait && names.iter().any(|name| self.entries.lock().contains_key(name)) {
                thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Whether each task has come up, or has failed once.
    pub(super) fn settled(&self) -> bool {
        self.entries.lock().values().all(|entry| match &entry.state {
            State::Running(running) => entry.failures > 0 || running.told.up.load(Ordering::Acquire),
            State::Waiting { .. } | State::Ended => true,
        })
    }

    /// Makes the tasks of the file those that it has. What is the same goes on.
    pub(super) fn reload(&self, config: Config) -> Map<String, Value> {
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
        done.ended.extend(gone.iter().map(ToString::to_string));
        for (name, task) in config.tasks {
            let text = name.to_string();
            match known.iter().find(|(known, _)| *known == name) {
                None => match self.add(name, task, Origin::File) {
                    Ok(()) => done.begun.push(text),
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
                .push("[daemon] (it has changed, which takes a restart of the daemon)".to_owned());
        }
        self.tell("reloaded", done.fields().into(), &done.text());
        done.fields()
    }

    /// How a task is reached, and its resolver, if it runs.
    fn live(&self, name: &TaskName) -> Option<(Live, Arc<Resolver>)> {
        match self.entries.lock().get(name).map(|entry| &entry.state) {
            Some(State::Running(running)) => Some((running.told.live.lock().clone()?, running.told.resolver.clone())),
            _ => None,
        }
    }

    /// A task is the same, but there may be other certificates in its files: whether there are.
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
                self.renew(name).and_then(|_| comply(&control, requests))
            }
            Some((Live::Serve(exports), Ok(Change::Exports))) => match new.job(&name.kind) {
                Ok(Job::Serve(args)) => args
                    .exports()
                    .map_err(|e| e.text().unwrap_or_default().to_owned())
                    .and_then(|named| exports.set_named(named).map_err(|e| e.to_string())),
                _ => Err("it is no server".to_owned()),
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
            // It stays different from the file, so that the next reload tries again.
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
            return Err(Refused::new(Errno::EEXIST, format!("there is a task {name} already")));
        }
        let requested = entries.values().filter(|entry| entry.origin == Origin::Request).count();
        if origin == Origin::Request && requested >= MAX_REQUESTED {
            let text = format!(
                "{MAX_REQUESTED} tasks were started over the control socket, as many as there may be: stop one"
            );
            return Err(Refused::new(Errno::EBUSY, text));
        }
        let entry = self.begin(&name, task, origin, 0);
        entries.insert(name, entry);
        Ok(())
    }

    /// Begins a task that is not in the file; it ends with the daemon.
    pub(super) fn start(&self, name: TaskName, task: Task) -> Result<(), Refused> {
        let job = task.job(&name.kind);
        job.map_err(|e| Refused::new(Errno::EINVAL, e.text().unwrap_or_default()))?;
        self.add(name, task, Origin::Request)
    }

    /// Ends a task, and waits for that. One of the file begins again with the next reload.
    pub(super) fn stop(&self, name: &TaskName) -> Result<(), Refused> {
        if !self.entries.lock().contains_key(name) {
            return Err(Refused::new(Errno::ENOENT, format!("there is no task {name}")));
        }
        self.replace(name, Next::Gone);
        while self.entries.lock().contains_key(name) {
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The tasks of the file, at the start. Mappings may be of the file's own servers: these come first.
    pub(super) fn load(&self, config: Config) {
        let (servers, mappings): (Vec<_>, Vec<_>) =
            config.tasks.into_iter().partition(|(name, _)| name.kind == Kind::Serve);
        // The file has each name once.
        let begin = |tasks: Vec<(TaskName, Task)>| {
            for (name, task) in tasks {
                let _ = self.add(name, task, Origin::File);
            }
        };
        begin(servers);
        let begun = Instant::now();
        while !self.settled() && begun.elapsed() < SERVERS_FIRST {
            self.tend();
            thread::sleep(Duration::from_millis(5));
        }
        begin(mappings);
    }

    /// Begins a mapping, and waits until it has come up or failed: then it is gone again.
    pub(super) fn open(&self, name: TaskName, task: Task) -> Result<(), Refused> {
        self.start(name.clone(), task)?;
        loop {
            match self.come_up(&name) {
                Some(Ok(())) => return Ok(()),
                Some(Err(refused)) => {
                    // It may be gone already.
                    let _ = self.stop(&name);
                    return Err(refused);
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Whether a task has come up, or why not; `None`: not yet.
    fn come_up(&self, name: &TaskName) -> Option<Result<(), Refused>> {
        match self.entries.lock().get(name).map(|entry| &entry.state) {
            Some(State::Running(running)) => running.told.up.load(Ordering::Acquire).then_some(Ok(())),
            Some(State::Waiting { why, .. }) => Some(Err(why.clone())),
            Some(State::Ended) | None => Some(Err(Refused::new(Errno::ENODEV, "it has ended"))),
        }
    }

    /// A reload was refused.
    pub(super) fn not_reloaded(&self, why: &Refused) {
        let text = format!("not reloaded: {}", why.text);
        self.tell("not_reloaded", json!({ "why": why.text }), &text);
    }

    /// How they are.
    pub(super) fn list(&self) -> Map<String, Value> {
        let entries = self.entries.lock();
        let shown = |(name, entry): (&TaskName, &Entry)| {
            let (state, why) = match &entry.state {
                State::Running(_) if entry.next.is_some() => ("ending", None),
                State::Running(running) if running.told.up.load(Ordering::Acquire) => ("up", None),
                State::Running(_) => ("starting", None),
                State::Waiting { why, .. } => ("failed", Some(&why.text)),
                State::Ended => ("ended", None),
            };
            json!({
                "task": name.to_string(),
                "kind": name.kind.name(),
                "state": state,
                "why": why,
                "in_file": entry.origin == Origin::File,
                "options": entry.task.words,
            })
        };
        let all: Vec<Value> = entries.iter().map(shown).collect();
        Map::from_iter([("tasks".to_owned(), all.into())])
    }

    /// The kind and name that a text stands for, `map.NAME` or `serve.NAME`.
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
                format!("{text:?} is no task: map.NAME or serve.NAME"),
            )),
        }
    }
}
