//! `ferroce daemon`: any number of servers and mappings in one process.

mod allow;
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

use clap::{ArgMatches, Args, Command, FromArgMatches};
use parking_lot::Mutex;
use rnbd::{Errno, proto::AccessMode};
use rnbd_admin::MapOrder;
use rnbd_host::control::Refused;
use rtrs::addr::PathAddr;
use serde_json::{Map, Value};

use self::{
    allow::Allowed,
    notify::Manager,
    task::{Task, TaskName},
    tasks::Tasks,
};
pub(crate) use self::{
    config::{Config, Documented, tables},
    handover::hand_over,
    task::Kind,
};
use crate::{
    control::{Authority, Control, ControlArgs, Supervisor, address::SYSTEM},
    output::Failure,
    printer::Printer,
    report::ReportArgs,
    signals::Stop,
};

/// How often tasks are checked, and signals taken.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Args)]
#[command(after_help = "\
The file is TOML. It has a table for each server and each mapping, whose keys are the options of `ferroce serve` and `ferroce map`:

  [serve.images]
  addr = [\"192.0.2.7\", \"198.51.100.7\"]
  export = \"disk=/images/disk.img\"
  threads = 2

  [map.db]                         # the session is called db, unless there is a `session`
  path = [\"192.0.2.1,192.0.2.8\", \"198.51.100.1,198.51.100.8\"]
  device = [\"data\", \"log\"]
  nbd = \"/run/ferroce-daemon/db.sock\"
  on-loss = \"queue\"

An option without a value is true or false, one that may be repeated has an array, and `on|off` is true or false, too.

Options of `ferroce daemon` itself have a table of their own; those on the command line take precedence:

  [daemon]
  control = \"/run/ferroce-daemon/control.sock\"
  control-group = \"ferroce-admin\"
  metrics = 9100
  sysfs = \"/run/ferroce-daemon/sys\"

Members of the control socket's group start tasks (`ferroce serve --daemon`, `map --daemon`) with no more of the rights of the daemon's user than \
the file allows. Without this table they export no file, write no capture and let no NBD client in by TCP:

  [control]
  export = [\"/images\", \"/dev/sdb,ro\"]   # exports are one of these, or below it
  pcap = \"/var/lib/ferroce-daemon\"      # captures are files in this folder
  tls-certificates = \"/etc/pki/nbd\"     # this folder of certificates may be used
  nbd-listen = true                     # NBD clients may come by TCP

Sockets of their tasks are in --nbd-dir. Root and the daemon's own user may start anything.

SIGHUP, or `ferroce ctl reload`, reads the file again. Unchanged tasks go on. A mapping changes its devices, paths, policy, reconnects and \
--on-loss while it runs, a server its exports, which stay for clients that have them open; tasks with other changes are restarted. A file with a mistake \
changes nothing; `ferroce daemon --config FILE --check` finds it before. What [daemon] says holds from the daemon's start on.

A task that fails is restarted, after a second at first and half a minute at last. Runs until SIGINT or SIGTERM, then ends all tasks as \
`serve` and `map` end. Started by systemd (Type=notify) it says when all tasks have come up or failed once, and feeds the watchdog.")]
pub(crate) struct DaemonArgs {
    /// Configuration file: what to serve and to map. Without one nothing, until `ferroce serve --daemon` or `map --daemon` starts a task
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the file and print the commands that it stands for, without running them. Exit status 0: no mistake; 1: a task could not start
    /// on this host, as an image or a certificate is missing; 2: a mistake in the file. Names are not resolved
    #[arg(long, requires = "config")]
    check: bool,
    /// Folder of the NBD sockets of sessions that `ferroce ctl map` opens (SESSION.sock), and of all sockets of tasks that members of the
    /// control socket's group start
    #[arg(long, value_name = "DIR", default_value = SYSTEM)]
    nbd_dir: PathBuf,
    #[command(flatten)]
    control: ControlArgs,
    #[command(flatten)]
    report: ReportArgs,
}

fn read(file: Option<&Path>) -> Result<Config, Failure> {
    let Some(file) = file else { return Ok(Config::default()) };
    let text = fs::read_to_string(file).map_err(|e| Failure::failed(format!("{}: {e}", file.display())))?;
    Config::parse(file, &text).map_err(|e| Failure::usage(e.to_string()))
}

/// Handler of the control socket's requests to a daemon.
struct Requests {
    tasks: Arc<Tasks>,
    config: Option<PathBuf>,
    allowed: Mutex<Allowed>,
    nbd_dir: PathBuf,
}

impl Supervisor for Requests {
    fn reload(&self) -> Result<Map<String, Value>, Refused> {
        let config = read(self.config.as_deref());
        let config = config.map_err(|e| Refused::new(Errno::EINVAL, e.text().unwrap_or_default()))?;
        *self.allowed.lock() = config.allowed.clone();
        Ok(self.tasks.reload(config))
    }

    fn tasks(&self) -> Map<String, Value> {
        self.tasks.list()
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

    fn open(&self, order: &MapOrder) -> Result<(), Refused> {
        if order.session.contains(['/', '\0']) {
            let text =
                "a session with a slash in its name can't be opened so: its socket SESSION.sock is a file of --nbd-dir";
            return Err(Refused::new(Errno::EINVAL, text));
        }
        let mode = match order.mode {
            AccessMode::ReadWrite => String::new(),
            mode => format!(",{mode}"),
        };
        let mut words = vec![
            format!("--session={}", order.session),
            format!("--device={}{mode}", order.device),
            format!(
                "--nbd={}",
                self.nbd_dir.join(format!("{}.sock", order.session)).display()
            ),
        ];
        words.extend(order.paths.iter().map(path_option));
        let name = TaskName {
            kind: Kind::Map,
            name: order.session.clone(),
        };
        self.tasks.open(name, Task { words })
    }
}

/// The option of `map` for a path, with its port, which is not shown where paths are listed.
fn path_option(path: &PathAddr) -> String {
    match path.src {
        Some(src) => format!("--path={src},{}", path.dst),
        None => format!("--path={}", path.dst),
    }
}

impl DaemonArgs {
    fn command() -> Command {
        Self::augment_args(Command::new("daemon").no_binary_name(true))
    }

    /// The options of the command line, and those of the file that it doesn't have.
    fn merged(given: &ArgMatches, of_file: &[String]) -> Result<Self, Failure> {
        let given = handover::words(&Self::command(), given)?;
        let option = |word: &str| word.split('=').next().map(str::to_owned);
        let is_given = |word: &&String| given.iter().any(|given| option(given) == option(word));
        let words = of_file.iter().filter(|word| !is_given(word)).chain(&given);
        let matches = Self::command().try_get_matches_from(words);
        let merged = matches.and_then(|matches| Self::from_arg_matches(&matches));
        merged.map_err(|e| Failure::usage(task::described(&e)))
    }
}

/// Runs the command; `given` is its part of the command line.
pub(crate) fn run(args: &DaemonArgs, given: Option<&ArgMatches>) -> Result<(), Failure> {
    let read = || {
        let config = read(args.config.as_deref())?;
        let given = given.ok_or_else(|| Failure::usage("it is not the daemon's command line"))?;
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
    let orders = Arc::new(Requests {
        tasks: tasks.clone(),
        config: args.config.clone(),
        allowed: Mutex::new(config.allowed.clone()),
        nbd_dir: std::path::absolute(&args.nbd_dir)
            .map_err(|e| Failure::usage(format!("--nbd-dir {}: {e}", args.nbd_dir.display())))?,
    });
    control.services().supervise(orders.clone());
    if config.tasks.is_empty() {
        tasks.announce_idle(args.config.as_deref(), control.socket().as_deref());
    }
    tasks.load(config);
    let mut manager = Manager::from_env();
    while !stop.requested() {
        tasks.tend();
        if hangup.taken() {
            reload(&orders);
        }
        manager.turn(tasks.settled());
        thread::sleep(LOOK);
    }
    manager.stopping();
    tasks.end();
    // The end of `control` waits for answers, which wait for room.
    Printer::stdout().finish()
}

/// In a thread of its own, as mappings may take long to change.
fn reload(orders: &Arc<Requests>) {
    let orders = orders.clone();
    let begun = thread::Builder::new().name("ferroce-reload".into()).spawn(move || {
        if let Err(refused) = orders.reload() {
            orders.tasks.not_reloaded(&refused);
        }
    });
    if let Err(e) = begun {
        tracing::warn!("not reloaded, no thread: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_takes_precedence_over_the_file() {
        let given = ["--control=/c", "--json"];
        let given = DaemonArgs::command().try_get_matches_from(given).unwrap();
        let of_file = ["--control=/a", "--control=/b", "--metrics=9100", "--nbd-dir=/n"].map(str::to_owned);
        let merged = DaemonArgs::merged(&given, &of_file).unwrap();
        let expected = ["--control=/c", "--json", "--metrics=9100", "--nbd-dir=/n"];
        let expected = DaemonArgs::command().try_get_matches_from(expected).unwrap();
        let words = |args: &DaemonArgs| format!("{:?} {:?} {:?}", args.nbd_dir, args.control, args.report);
        assert_eq!(words(&merged), words(&DaemonArgs::from_arg_matches(&expected).unwrap()));
    }

    #[test]
    fn a_path_keeps_its_port_and_interface() {
        for text in [
            "192.0.2.7:99",
            "192.0.2.1,192.0.2.7:1234",
            "[2001:db8::7]:99",
            "fe80::1,[fe80::7%3]:1234",
        ] {
            let path: PathAddr = text.parse().unwrap();
            let option = path_option(&path);
            assert_eq!(option, format!("--path={text}"));
            assert_eq!(option["--path=".len()..].parse(), Ok(path));
        }
    }
}
