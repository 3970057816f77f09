//! `ferroce daemon`: any number of servers and mappings in one process.

mod allow;
mod args;
mod change;
mod check;
mod config;
mod handover;
mod notify;
mod task;
mod tasks;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use clap::ArgMatches;
use parking_lot::Mutex;
use rnbd::{Errno, proto::AccessMode};
use rnbd_host::control::{self, MapOrder, Refused, Reloaded, path_text};

use self::{
    allow::Allowed,
    notify::Manager,
    task::{Task, TaskName},
    tasks::Tasks,
};
pub(crate) use self::{
    args::DaemonArgs,
    config::{Config, Documented, tables},
    handover::hand_over,
    task::Kind,
};
use crate::{
    control::{Authority, Control, Supervisor},
    output::Failure,
    printer::Printer,
    signals::Stop,
};

/// Interval at which tasks and signals are checked.
const LOOK: Duration = Duration::from_millis(50);

fn read(file: Option<&Path>) -> Result<Config, Failure> {
    let Some(file) = file else { return Ok(Config::default()) };
    let text = fs::read_to_string(file).map_err(|e| Failure::failed(format!("{}: {e}", file.display())))?;
    Config::parse(file, &text).map_err(|e| Failure::usage(e.to_string()))
}

/// Executes the control socket's requests to a daemon.
struct Requests {
    tasks: Arc<Tasks>,
    config: Option<PathBuf>,
    allowed: Mutex<Allowed>,
    nbd_dir: PathBuf,
}

impl Supervisor for Requests {
    fn reload(&self) -> Result<Reloaded, Refused> {
        let config = read(self.config.as_deref());
        let config = config.map_err(|e| Refused::new(Errno::EINVAL, e.text().unwrap_or_default()))?;
        *self.allowed.lock() = config.allowed.clone();
        Ok(self.tasks.reload(config))
    }

    fn tasks(&self) -> control::Tasks {
        let tasks = self.tasks.list();
        control::Tasks { tasks }
    }

    fn start(&self, name: &str, words: Vec<String>, authority: Authority) -> Result<(), Refused> {
        let name = Tasks::name(name)?;
        let task = match authority {
            Authority::Full => Task { words },
            Authority::Limited => self.allowed.lock().task(&name.kind, words, &self.nbd_dir)?,
        };
        self.tasks.start(name, task)
    }

    fn stop(&self, name: &str) -> Result<(), Refused> {
        self.tasks.stop(&Tasks::name(name)?)
    }

    fn open(&self, session: &str, order: &MapOrder) -> Result<(), Refused> {
        if session.contains(['/', '\0']) {
            let text =
                "a session with a slash in its name can't be opened: its socket SESSION.sock is a file of --nbd-dir";
            return Err(Refused::new(Errno::EINVAL, text));
        }
        let mode = match order.mode {
            AccessMode::ReadWrite => String::new(),
            mode => format!(",{mode}"),
        };
        let socket = self.nbd_dir.join(format!("{session}.sock"));
        let mut words = vec![
            format!("--session={session}"),
            format!("--device={}{mode}", order.device),
            format!("--nbd={}", socket.display()),
        ];
        words.extend(order.paths.iter().map(|path| format!("--path={}", path_text(path))));
        let name = TaskName {
            kind: Kind::Map,
            name: session.to_owned(),
        };
        self.tasks.open(name, Task { words })
    }
}

/// Runs the command; `given` is its part of the command line.
pub(crate) fn run(args: &DaemonArgs, given: Option<&ArgMatches>) -> Result<(), Failure> {
    let read = || {
        let config = read(args.config.as_deref())?;
        let given = given.ok_or_else(|| Failure::usage("not the daemon's command line"))?;
        Ok((DaemonArgs::merged(given, &config.daemon)?, config))
    };
    match read() {
        Ok((args, config)) if args.check => args.report.end(check::check(&args, &config)),
        Ok((args, config)) => args.report.end(daemon(&args, config)),
        Err(failure) => args.report.end(Err(failure)),
    }
}

fn daemon(args: &DaemonArgs, config: Config) -> Result<(), Failure> {
    let (stop, hangup) = Stop::on_signals_but_hangup()?;
    let control = Control::of_daemon(&args.control)?;
    let tasks = Arc::new(Tasks::new(&control, &args.report, config.daemon.clone()));
    let requests = Arc::new(Requests {
        tasks: tasks.clone(),
        config: args.config.clone(),
        allowed: Mutex::new(config.allowed.clone()),
        nbd_dir: std::path::absolute(&args.nbd_dir)
            .map_err(|e| Failure::usage(format!("--nbd-dir {}: {e}", args.nbd_dir.display())))?,
    });
    control.services().supervise(requests.clone());
    if config.tasks.is_empty() {
        tasks.announce_idle(args.config.as_deref(), control.socket().as_deref());
    }
    tasks.load(config);
    let mut manager = Manager::from_env();
    while !stop.requested() {
        tasks.poll();
        if hangup.taken() {
            reload(&requests);
        }
        manager.turn(tasks.settled());
        thread::sleep(LOOK);
    }
    manager.stopping();
    tasks.end();
    // The end of `control` waits for answers, which wait for room.
    Printer::stdout().finish()
}

/// Reloads in a thread of its own, as mappings may take long to change.
fn reload(requests: &Arc<Requests>) {
    let requests = requests.clone();
    let spawned = thread::Builder::new().name("ferroce-reload".into()).spawn(move || {
        if let Err(refused) = requests.reload() {
            requests.tasks.not_reloaded(&refused);
        }
    });
    if let Err(e) = spawned {
        tracing::warn!("no thread for the reload: {e}");
    }
}
