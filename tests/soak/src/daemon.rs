//! A `ferroce daemon` under load that is administered all the while: its file changes and is read again, `ferroce ctl` looks at it and
//! steers it, NBD clients and front ends of virtual machines come and leave.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs, io,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ferroce_tests::{
    nbd::Client,
    pattern,
    process::Running,
    vhost::{BUFFERS, Guest},
};
use ferroce_wire::wire::{End, Wire};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rand::{Rng, SeedableRng as _, seq::IndexedRandom as _};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::{
    client::PLANS,
    limits::{BASE, BEYOND, CONNECT_TIMEOUT, LIMIT},
    load::Load,
    logs::Logs,
    trouble::NETWORKS,
};

/// Its devices: one under load, two that come and go, and a virtual machine's.
pub(crate) const DEVICES: [&str; 4] = [STEADY, "visitor", "passing", "guest"];
const STEADY: &str = "steady";
/// Sessions that it always has.
pub(crate) const SESSIONS: usize = 2;
/// Between two things that are done, at most.
const PAUSE: Duration = Duration::from_secs(3);
/// Bytes that a visitor writes.
const VISIT: usize = 64 << 10;

/// What the file says beside what never changes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct File {
    visitor: bool,
    passing: bool,
    policy: Option<&'static str>,
}

/// What is done meanwhile, and how it went.
#[derive(Default)]
struct Told {
    stop: AtomicBool,
    /// No trouble: everything has to succeed.
    calm: AtomicBool,
    /// Everything is as it was at first.
    well: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    violations: Vec<String>,
    lines: Vec<String>,
    done: BTreeMap<&'static str, u64>,
}

impl Told {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The daemon, the load on it, and who administers it.
pub(crate) struct Daemon {
    process: Running,
    pub(crate) load: Load,
    told: Arc<Told>,
    administrator: Option<JoinHandle<()>>,
}

impl Daemon {
    pub(crate) fn start(wire: &Wire, program: &Path, dir: &Path, seed: u64) -> io::Result<Self> {
        let mut paths = Vec::new();
        for network in 0..NETWORKS {
            let server = Wire::address(network, End::A);
            let [a, b, c, _] = server.octets();
            let ours = format!("{a}.{b}.{c}.{}", 100 + PLANS.len());
            wire.namespace(End::B)
                .ip(&format!("addr add {ours}/24 dev wire{network}"))?;
            paths.push(format!("{ours},{server}"));
        }
        let told = Arc::<Told>::default();
        let mut administrator = Administrator {
            program: program.to_owned(),
            dir: dir.to_owned(),
            daemon: Pid::from_raw(0),
            rng: ChaCha8Rng::seed_from_u64(seed ^ 0xdae_u64),
            told: told.clone(),
            paths,
            file: File::default(),
            away: None,
            visits: 0,
        };
        administrator.write()?;
        let mut command = wire.namespace(End::B).command(program);
        command
            .args(["daemon", "--json", "--config"])
            .arg(administrator.config());
        command.arg("--control").arg(administrator.control());
        let mut process = Running::start_command(command, "ferroce daemon".to_owned());
        (0..SESSIONS).for_each(|_| drop(process.event("mapped")));
        administrator.daemon = Pid::from_raw(i32::try_from(process.id()).map_err(io::Error::other)?);
        let image = dir.join(format!("{STEADY}.img"));
        let load = Load::start(&administrator.socket(STEADY), STEADY, image, seed ^ 0x10ad, LIMIT);
        let administrator = Some(thread::spawn(move || administrator.run()));
        Ok(Self {
            process,
            load,
            told,
            administrator,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// Whether all is to succeed from now on.
    pub(crate) fn calm(&self, calm: bool) {
        self.told.well.store(false, Relaxed);
        self.told.calm.store(calm, Relaxed);
    }

    /// In calm: whether everything is as it was at first.
    pub(crate) fn is_well(&self) -> bool {
        self.told.well.load(Relaxed)
    }

    /// What was done, and how often.
    pub(crate) fn done(&self) -> BTreeMap<&'static str, u64> {
        self.told.notes().done.clone()
    }

    /// Reads what it tells; an error if it has ended, or something was wrong.
    pub(crate) fn listen(&mut self, logs: &mut Logs) -> Result<(), String> {
        while let Some(line) = self.process.new_line() {
            logs.say(&format!("daemon: {line}"));
        }
        let mut notes = self.told.notes();
        notes.lines.drain(..).for_each(|line| logs.say(&line));
        if let Some(violation) = notes.violations.pop() {
            return Err(format!("daemon: {violation}"));
        }
        drop(notes);
        if self.process.has_ended() {
            return Err("ferroce daemon has ended".to_owned());
        }
        // Its requests wait for a path: none may fail.
        match self.load.told.take_failed().pop() {
            None => Ok(()),
            Some(failed) => Err(format!("daemon: {}, although requests wait for a path", failed.what)),
        }
    }

    /// Nobody administers it any more.
    pub(crate) fn leave(&mut self) {
        self.told.stop.store(true, Relaxed);
        if self.administrator.take().is_some_and(|thread| thread.join().is_err()) {
            self.told
                .notes()
                .violations
                .push("the administrator panicked".to_owned());
        }
    }

    /// It ends orderly.
    pub(crate) fn finish(mut self, logs: &Logs) -> Result<(), String> {
        self.leave();
        if let Some(violation) = self.told.notes().violations.pop() {
            return Err(format!("daemon: {violation}"));
        }
        let Self { process, load, .. } = self;
        drop(load);
        let left = process.stop();
        logs.keep("daemon.log", &format!("{}\n{}", left.stdout, left.stderr));
        match left.code {
            Some(0) => Ok(()),
            code => Err(format!("the daemon did not end well ({code:?})")),
        }
    }

    pub(crate) fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        self.told.stop.store(true, Relaxed);
        if !self.process.has_ended() {
            self.process.signal(Signal::SIGKILL);
        }
    }
}

struct Administrator {
    program: PathBuf,
    dir: PathBuf,
    daemon: Pid,
    rng: ChaCha8Rng,
    told: Arc<Told>,
    paths: Vec<String>,
    file: File,
    /// How what was taken away comes back: a verb of paths, and which.
    away: Option<(&'static str, String)>,
    visits: u64,
}

impl Administrator {
    fn config(&self) -> PathBuf {
        self.dir.join("daemon.toml")
    }

    fn control(&self) -> PathBuf {
        self.dir.join("daemon.control")
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.join(format!("daemon-{name}.sock"))
    }

    /// Writes the file.
    fn write(&self) -> io::Result<()> {
        let mut text = String::new();
        let mut task = |name: &str, devices: &str, front: &str, more: &str| {
            let _ = writeln!(
                text,
                "[map.{name}]\npath = {:?}\ndevice = [{devices}]\n{front} = {:?}\non-loss = \"queue\"\nconnect-timeout = {CONNECT_TIMEOUT}\n{more}",
                self.paths,
                self.socket(name)
            );
        };
        let policy = self
            .file
            .policy
            .map(|policy| format!("policy = {policy:?}"))
            .unwrap_or_default();
        let visitor = if self.file.visitor { ", \"visitor\"" } else { "" };
        task(STEADY, &format!("{STEADY:?}{visitor}"), "nbd", &policy);
        task("guest", "\"guest\"", "vhost-user", "");
        if self.file.passing {
            task("passing", "\"passing\"", "nbd", "");
        }
        fs::write(self.config(), text)
    }

    fn run(mut self) {
        while !self.told.stop.load(Relaxed) {
            let calm = self.told.calm.load(Relaxed);
            let done = match calm {
                true => self.tidy_up(),
                false => self.trouble(),
            };
            let mut notes = self.told.notes();
            match done {
                // What is wrong in trouble may be the trouble.
                Err(e) if calm && self.told.calm.load(Relaxed) => notes.violations.push(e),
                Err(e) => notes.lines.push(format!("daemon: in trouble: {e}")),
                Ok(()) => {}
            }
            drop(notes);
            thread::sleep(PAUSE.mul_f64(self.rng.random_range(0.1..1.0)));
        }
    }

    fn count(&self, what: &'static str) {
        *self.told.notes().done.entry(what).or_default() += 1;
    }

    /// Runs `ferroce ctl`; what it printed, if it succeeded. It is answered in time, whatever happens meanwhile.
    fn ctl(&self, what: &'static str, args: &[&str]) -> Result<Value, String> {
        self.count(what);
        self.told.notes().lines.push(format!("daemon: ctl {args:?}"));
        let mut command = Command::new(&self.program);
        command
            .args(["ctl", "--json", "--socket"])
            .arg(self.control())
            .args(args);
        let begun = Instant::now();
        let out = command.stdin(Stdio::null()).output().map_err(|e| format!("ctl: {e}"))?;
        let said = String::from_utf8_lossy(&out.stderr);
        if begun.elapsed() > LIMIT {
            let late = format!("ctl {args:?} took {:?}", begun.elapsed());
            self.told.notes().violations.push(late);
        }
        match out.status.code() {
            Some(0) => Ok(serde_json::from_slice(&out.stdout).unwrap_or(Value::Null)),
            Some(1) => Err(format!("ctl {args:?}: {said}")),
            code => {
                let wrong = format!("ctl {args:?} ended with {code:?}: {said}");
                self.told.notes().violations.push(wrong.clone());
                Err(wrong)
            }
        }
    }

    fn reload(&mut self, file: File) -> Result<(), String> {
        self.file = file;
        self.write().map_err(|e| e.to_string())?;
        self.ctl("reload", &["reload"]).map(drop)
    }

    /// One of the things that may come to nothing when networks are cut or the server is away.
    fn trouble(&mut self) -> Result<(), String> {
        if let Some((verb, path)) = self.away.clone() {
            self.ctl(verb, &["path", verb, STEADY, &path])?;
            self.away = None;
        }
        let path = self.paths.choose(&mut self.rng).ok_or("no path")?.clone();
        match self.rng.random_range(0..12) {
            0..3 => {
                let policies = [None, Some("round-robin"), Some("min-inflight"), Some("min-latency")];
                let file = File {
                    visitor: self.rng.random(),
                    passing: self.rng.random(),
                    policy: policies[self.rng.random_range(0..4)],
                };
                self.reload(file)?;
                self.visits()
            }
            3 => {
                self.count("SIGHUP");
                kill(self.daemon, Signal::SIGHUP).map_err(|e| format!("SIGHUP: {e}"))
            }
            4 => self
                .ctl("path disconnect", &["path", "disconnect", STEADY, &path])
                .map(|_| {
                    self.away = Some(("reconnect", path));
                }),
            5 => self.ctl("path delete", &["path", "delete", STEADY, &path]).map(|_| {
                self.away = Some(("add", path));
            }),
            6 => self
                .ctl("session reconnect", &["session", "reconnect", STEADY])
                .map(drop),
            7 => self.ctl("session recover", &["session", "recover", STEADY]).map(drop),
            8 => {
                let bytes = BASE + self.rng.random_range(0..=BEYOND / 4096) * 4096;
                self.ctl("resize", &["resize", STEADY, &(bytes / 512).to_string()])
                    .map(drop)
            }
            9 => self.ctl("remap", &["remap", STEADY]).map(drop),
            10 => self.looks(),
            _ => self.guest(),
        }
    }

    /// Whatever there is is told.
    fn looks(&mut self) -> Result<(), String> {
        let all: [(&str, &[&str]); 5] = [
            ("list", &["list"]),
            ("tasks", &["tasks"]),
            ("metrics", &["metrics"]),
            ("stats", &["stats"]),
            ("ls", &["ls", "class/rtrs-client"]),
        ];
        all.into_iter()
            .try_for_each(|(what, args)| self.ctl(what, args).map(drop))
    }

    /// NBD clients of the devices that come and go.
    fn visits(&mut self) -> Result<(), String> {
        let places = [
            (STEADY, "visitor", self.file.visitor),
            ("passing", "passing", self.file.passing),
        ];
        for (socket, device, _) in places.into_iter().filter(|place| place.2) {
            self.count("NBD visitor");
            self.visits += 1;
            let bytes = pattern(self.visits, VISIT);
            let fail = |e: &dyn std::fmt::Debug| format!("a client of {device}: {e:?}");
            // Another mapping may not be there yet.
            let mut client = Client::connect_to(&self.socket(socket), device, LIMIT).map_err(|e| fail(&e))?;
            client.write(0, &bytes).map_err(|e| fail(&e))?;
            let back = client.read(0, VISIT).map_err(|e| fail(&e))?;
            if back != bytes {
                let wrong = format!("{device}: something else comes back than was written");
                self.told.notes().violations.push(wrong);
            }
            client.disconnect().map_err(|e| fail(&e))?;
        }
        Ok(())
    }

    /// A virtual machine's front end comes, writes, reads and leaves.
    fn guest(&mut self) -> Result<(), String> {
        self.count("vhost-user front end");
        self.visits += 1;
        let (socket, bytes) = (self.socket("guest"), pattern(self.visits, VISIT));
        // It panics when it is not answered for a minute.
        let back = panic::catch_unwind(AssertUnwindSafe(|| {
            let mut guest = Guest::connect(&socket, 0);
            let ring = guest.start();
            let segments = [(BUFFERS, VISIT as u32)];
            guest.write(ring, 0, &segments, &bytes);
            guest.read(ring, 0, &segments)
        }));
        match back {
            Ok(back) if back == bytes => Ok(()),
            Ok(_) => {
                let wrong = "a guest reads something else than it wrote".to_owned();
                self.told.notes().violations.push(wrong.clone());
                Err(wrong)
            }
            Err(_) => Err("a front end was not served".to_owned()),
        }
    }

    /// Has everything as it was at first, and then does only what takes nothing for good.
    fn tidy_up(&mut self) -> Result<(), String> {
        if !self.told.well.load(Relaxed) {
            // The last trouble may still be felt.
            let restored = self.restore();
            let well = restored.as_ref().is_ok_and(|well| *well) && self.told.calm.load(Relaxed);
            self.told.well.store(well, Relaxed);
            if let Err(e) = restored {
                self.told.notes().lines.push(format!("daemon: not yet: {e}"));
            }
            return Ok(());
        }
        self.ctl("reload", &["reload"])?;
        self.looks()?;
        self.guest()
    }

    fn restore(&mut self) -> Result<bool, String> {
        if let Some((verb, path)) = self.away.clone() {
            self.ctl(verb, &["path", verb, STEADY, &path])?;
            self.away = None;
        }
        self.reload(File::default())?;
        let tasks = self.ctl("tasks", &["tasks"])?;
        let up = tasks["tasks"]
            .as_array()
            .is_some_and(|all| all.len() == SESSIONS && all.iter().all(|task| task["state"] == "up"));
        let list = self.ctl("list", &["list", "paths"])?;
        let paths = list["mappings"].as_array().into_iter().flatten().flat_map(|m| {
            let paths = m["paths"].as_array();
            paths.into_iter().flatten()
        });
        let connected = paths.filter(|path| path["state"] == "connected").count();
        Ok(up && connected == SESSIONS * self.paths.len())
    }
}
