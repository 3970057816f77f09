//! Running the two sides of a case, and leaving nothing behind.

use std::{
    cell::{OnceCell, RefCell},
    fs::{self, File},
    io,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use ferroce_loopback::tcp::{free_port, listens};
use nix::{
    sys::{
        prctl,
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use tempfile::TempDir;

use crate::{
    Result,
    cases::{Case, Plan, Ready, ServerEnd},
    crates::Crates,
    memcheck,
    site::{self, Namespace, Place, User},
    wheels::Environment,
};

/// Between two looks at a process.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);
/// How long a client of a server that can't be seen waits before it tries again.
const AGAIN: Duration = Duration::from_millis(700);
/// What a client prints when nobody listens where it connects to: an event of the connection manager, the error number of
/// that in librdmacm's synchronous calls, and how perftest says it of its first connection. Then it is tried again, and for no
/// other reason.
const REFUSED: [&str; 5] = [
    "CM_EVENT_REJECTED",
    "CM_EVENT_UNREACHABLE",
    "Connection refused",
    "Unexpected CM event bl blka 8",
    // uDAPL's, which go by TCP first.
    "Couldn't connect to",
];
/// How perftest's client says that it was refused its second connection (`-R`), for which the server listens once both have
/// agreed on it over the first. It may come too late. The client's own second attempt uses what it has freed, and the server
/// waits for a client that is gone, or takes the next one's first connection for this one's second: both are started again.
const TOO_EARLY: &str = "RDMA CM event error";
/// What a server gets to end after the client did.
const LINGER: Duration = Duration::from_secs(30);

/// Somebody wants us to end. What runs is ended first.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Has SIGINT and SIGTERM end what runs, and then us.
pub(crate) fn catch_signals() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(|e| format!("catching signals: {e}"))?;
    thread::spawn(move || {
        if signals.forever().next().is_some() {
            INTERRUPTED.store(true, Ordering::Relaxed);
        }
    });
    Ok(())
}

/// Whether to end.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// The processes whose parent we are, with their names, and whether they have ended. What programs leave behind in sessions of
/// their own (fio's jobs) becomes ours, since we are a subreaper.
fn children() -> Vec<(Pid, String, bool)> {
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = entries.filter_map(|e| fs::read_to_string(e.path().join("stat")).ok());
    let ours = stats.filter_map(|stat| {
        // "pid (name) state parent …", and the name may have anything in it.
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let (state, parent) = (rest.split(' ').next()?, rest.split(' ').nth(1)?);
        (parent == own).then(|| Some((Pid::from_raw(pid.parse().ok()?), name.to_owned(), state == "Z")))?
    });
    ours.collect()
}

/// Ends what a case left behind, but for those to keep; brokers (`ferroce`) end by themselves, and last of all by us.
fn sweep(keep: &[Pid], brokers_too: bool) {
    for (pid, name, ended) in children() {
        if !keep.contains(&pid) && (brokers_too || ended || name != "ferroce") {
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

/// What all cases have in common.
pub(crate) struct Setup {
    ferroce: PathBuf,
    /// Addresses on this host, of IPv4 and IPv6.
    addrs: [IpAddr; 2],
    user: Option<User>,
    /// Those of the places, made when the first case needs them.
    namespaces: [OnceCell<Result<Namespace>>; Place::ALL.len()],
    /// What was tried again in the present case, and why.
    retried: RefCell<Vec<String>>,
    wheels: Environment,
    crates: Crates,
    /// The brokers' directories, and beside them one for each case.
    dir: TempDir,
}

/// A process group that ends with this, and what it prints.
pub(crate) struct Group {
    processes: ferroce_wire::group::Group,
    output: PathBuf,
}

impl Group {
    /// Starts a command whose output goes to a file.
    pub(crate) fn spawn(mut command: Command, output: PathBuf) -> io::Result<Self> {
        let processes = ferroce_wire::group::Group::spawn(&mut command)?;
        Ok(Self { processes, output })
    }

    /// Process id of what was started.
    pub(crate) fn id(&self) -> u32 {
        self.processes.id()
    }

    /// Kills all of it (SIGKILL).
    pub(crate) fn kill(&mut self) {
        let _ = self.processes.kill();
    }

    /// Waits for its end; none by then: `None`.
    pub(crate) fn wait(&mut self, deadline: Instant) -> io::Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.processes.try_wait()? {
                return Ok(Some(status));
            }
            if INTERRUPTED.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            thread::sleep(PAUSE);
        }
    }

    /// What it has printed.
    pub(crate) fn text(&self) -> String {
        fs::read(&self.output).map_or_else(|e| e.to_string(), |b| String::from_utf8_lossy(&b).into_owned())
    }
}

impl Setup {
    /// `user`: whose rights programs have; of root's they have none unless `root` is named.
    pub(crate) fn new(ferroce: &Path, addrs: [IpAddr; 2], user: Option<&str>) -> Result<Self> {
        let mut ferroce = ferroce
            .canonicalize()
            .map_err(|e| format!("{}: {e}", ferroce.display()))?;
        let dir = tempfile::Builder::new()
            .prefix("ferroce-apps-")
            .tempdir()
            .map_err(|e| format!("making a directory: {e}"))?;
        let user = User::choose(user)?;
        if user.is_some() {
            site::open_to_all(dir.path())?;
            ferroce = site::copy_programs(&ferroce, &dir.path().join("bin"))?;
        }
        prctl::set_child_subreaper(true).map_err(|e| format!("becoming a subreaper: {e}"))?;
        let setup = Self {
            ferroce,
            addrs,
            user,
            namespaces: Default::default(),
            retried: RefCell::default(),
            wheels: Environment::new(dir.path().join("wheels")),
            crates: Crates::new(dir.path().join("crates")),
            dir,
        };
        for place in Place::ALL {
            setup.make_dir(&setup.dir.path().join(place.broker()))?;
        }
        Ok(setup)
    }

    /// Makes a directory for programs to write to.
    fn make_dir(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        self.user.map_or(Ok(()), |user| user.give(dir))
    }

    fn namespace(&self, case: &Case) -> Result<&Namespace> {
        let made = self.namespaces[case.net.place() as usize].get_or_init(|| Namespace::open(self.user));
        made.as_ref().map_err(Clone::clone)
    }

    /// The processes that keep the namespaces, and outlive a case.
    fn holders(&self) -> Vec<Pid> {
        let made = self.namespaces.iter().filter_map(OnceCell::get);
        made.filter_map(|n| n.as_ref().ok()).map(Namespace::holder).collect()
    }

    /// The address of both sides of a case.
    fn addr_of(&self, case: &Case) -> Result<IpAddr> {
        let own = self.addrs[usize::from(case.net.v6)];
        match case.net.ethernet {
            true => Namespace::addr(case.net),
            // These tests take the first address of the device's interface.
            false if matches!(case.plan, Plan::Python(_)) && own.is_loopback() => Ok(Ipv4Addr::LOCALHOST.into()),
            false => Ok(own),
        }
    }

    /// Address of both sides, of IPv4.
    pub(crate) fn addr(&self) -> IpAddr {
        self.addrs[0]
    }

    /// The program `ferroce`.
    pub(crate) fn ferroce(&self) -> &Path {
        &self.ferroce
    }

    /// A directory for a case.
    pub(crate) fn directory(&self, name: &str) -> Result<PathBuf> {
        // It stands in commands of shells.
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let dir = self.dir.path().join(name.replace(|c| !plain(c), "_"));
        self.make_dir(&dir)?;
        Ok(dir)
    }

    /// Makes what a case needs: namespaces, wheels and crates.
    pub(crate) fn prepare(&self, case: &Case) -> Result<()> {
        if case.net.ethernet {
            self.namespace(case)?;
        }
        self.wheels.install(case)?;
        self.crates.build(case)
    }

    /// Ends the processes that a case has left behind.
    pub(crate) fn sweep(&self) {
        sweep(&self.holders(), false);
    }

    /// Notes that a case is tried again.
    pub(crate) fn note_retry(&self, why: String) {
        self.retried.borrow_mut().push(why);
    }

    /// Returns the retries since the last call.
    pub(crate) fn take_retried(&self) -> Vec<String> {
        self.retried.take()
    }

    /// A case's commands with what stands for addresses, ports and directories filled in, and under valgrind if it is to
    /// run there.
    pub(crate) fn fill(&self, case: &Case, words: &[String], port: u16, dir: &Path) -> Result<Vec<String>> {
        let addr = self.addr_of(case)?.to_string();
        let programs = case.source.map(|s| self.crates.programs(s)).unwrap_or_default();
        let with = |w: &String| {
            w.replace("{addr}", &addr)
                .replace("{port}", &port.to_string())
                .replace("{dir}", &dir.display().to_string())
                .replace("{programs}", &programs.display().to_string())
        };
        let words: Vec<String> = words.iter().map(with).collect();
        Ok(match case.memcheck {
            true => memcheck::under(dir, &words),
            false => words,
        })
    }

    /// A command under `ferroce run`, or with the directory of its libraries alone, in a case's directory.
    pub(crate) fn command(&self, case: &Case, words: &[String], dir: &Path) -> Result<Command> {
        let mut all = match case.net.ethernet {
            true => self.namespace(case)?.prefix(),
            false => Vec::new(),
        };
        let addr = self.addr_of(case)?.to_string();
        let libraries = self.ferroce.with_file_name(site::DIRECTORY);
        let program: Vec<String> = match (case.directory, case.net.everywhere) {
            (true, everywhere) => ["env".to_owned(), format!("LD_LIBRARY_PATH={}", libraries.display())]
                .into_iter()
                .chain((!everywhere).then(|| format!("FERROCE_ADDR={addr}")))
                .collect(),
            (false, everywhere) => [self.ferroce.display().to_string(), "run".to_owned()]
                .into_iter()
                .chain((!everywhere).then(|| format!("--addr={addr}")))
                .chain(["--".to_owned()])
                .collect(),
        };
        all.extend(program);
        all.extend_from_slice(words);
        let shared = self.dir.path().join(case.net.place().broker());
        let mut command = Command::new(&all[0]);
        command
            .args(&all[1..])
            .current_dir(dir)
            .env("FERROCE_BROKER", &self.ferroce)
            .env("FERROCE_BROKER_DIR", &shared)
            // What programs find in sysfs is made there.
            .env("XDG_RUNTIME_DIR", &shared)
            .envs(self.wheels.path(case).map(|path| ("PATH", path)))
            .envs(case.env.iter().copied());
        self.confine(&mut command, dir);
        Ok(command)
    }

    /// Has a command run with the rights that programs have.
    pub(crate) fn confine(&self, command: &mut Command, dir: &Path) {
        if let Some(user) = self.user {
            command.env("HOME", dir);
            user.become_it(command);
        }
    }

    /// Starts a command, whose output goes to a file in the case's directory.
    pub(crate) fn start(&self, case: &Case, words: &[String], dir: &Path, output: &str) -> Result<Group> {
        let fail = |e: io::Error| format!("starting {}: {e}", words.join(" "));
        let output = dir.join(output);
        let file = File::create(&output).map_err(fail)?;
        let mut command = self.command(case, words, dir)?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().map_err(fail)?)
            .stderr(file);
        Group::spawn(command, output).map_err(fail)
    }

    /// A client by itself, started again when it is refused while its server may not be there yet: until `again`. `None`: its
    /// server is of no use to another one.
    fn client(
        &self,
        case: &Case,
        words: &[String],
        dir: &Path,
        deadline: Instant,
        again: Instant,
    ) -> Result<Option<String>> {
        loop {
            let mut client = self.start(case, words, dir, "client")?;
            let status = client.wait(deadline).map_err(|e| e.to_string())?;
            let text = client.text();
            // fio's status is 0 although it was refused.
            let for_nothing = refusal(&text).is_some() && case.says.is_some_and(|wanted| !text.contains(wanted));
            match status {
                Some(s) if s.success() && !for_nothing => return Ok(Some(text)),
                Some(_) if Instant::now() < again && refusal(&text).is_some() => {
                    let why = refusal(&text).unwrap_or_default();
                    self.retried.borrow_mut().push(format!("the client was refused: {why}"));
                    if text.contains(TOO_EARLY) {
                        return Ok(None);
                    }
                    thread::sleep(AGAIN);
                }
                Some(s) => return Err(format!("the client ended with {s}\n{text}")),
                None => return Err(format!("the client is not done after {} s\n{text}", case.seconds)),
            }
        }
    }

    /// Both sides of a case; returns what the client printed.
    pub(crate) fn attempt(&self, case: &Case, dir: &Path) -> Result<String> {
        let started = Instant::now();
        let deadline = started + Duration::from_secs(case.seconds);
        let again = match &case.server {
            Some(server) if server.ready == Ready::Retry => {
                started + Duration::from_secs(if case.memcheck { 120 } else { 20 })
            }
            _ => started,
        };
        loop {
            if let Some(text) = self.pair(case, dir, deadline, again)? {
                return says(case, text);
            }
        }
    }

    /// Starts the server of a case, if it has one, and then the client. `None`: both have to be started again.
    fn pair(&self, case: &Case, dir: &Path, deadline: Instant, again: Instant) -> Result<Option<String>> {
        let port = free_port().map_err(|e| format!("finding a port: {e}"))?;
        for (name, text) in &case.files {
            fs::write(dir.join(name), text).map_err(|e| format!("{name}: {e}"))?;
        }
        let client = self.fill(case, &case.client, port, dir)?;
        let Some(server) = &case.server else {
            return self.client(case, &client, dir, deadline, again);
        };
        let mut other = self.start(case, &self.fill(case, &server.command, port, dir)?, dir, "server")?;
        if server.ready == Ready::Listens {
            self.until_listens(case, &mut other, port, deadline)?;
        }
        let done = self.client(case, &client, dir, deadline, again);
        let done = done.map_err(|text| format!("{text}\n--- server\n{}", other.text()))?;
        let Some(text) = done else { return Ok(None) };
        if server.end == ServerEnd::Zero {
            let status = other.wait(Instant::now() + LINGER).map_err(|e| e.to_string())?;
            let how = match status {
                Some(s) if s.success() => return Ok(Some(text)),
                Some(s) => format!("the server ended with {s}"),
                None => "the server does not end".to_owned(),
            };
            return Err(format!("{how}\n{}\n--- client\n{text}", other.text()));
        }
        Ok(Some(text))
    }

    /// Waits until a case's server listens at a TCP port.
    fn until_listens(&self, case: &Case, server: &mut Group, port: u16, deadline: Instant) -> Result<()> {
        let process = match case.net.ethernet {
            true => self.namespace(case)?.holder().to_string(),
            false => "self".to_owned(),
        };
        while !listens(&process, port) {
            if interrupted() {
                return Err("interrupted".into());
            }
            if let Ok(Some(status)) = server.processes.try_wait() {
                return Err(format!("the server ended with {status}\n{}", server.text()));
            }
            if Instant::now() >= deadline {
                return Err(format!("the server does not listen\n{}", server.text()));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Ends the run, and whatever of it is left.
    pub(crate) fn finish(mut self) {
        self.namespaces.iter_mut().for_each(|n| drop(n.take()));
        sweep(&[], true);
        drop(self.dir);
    }
}

/// Which refusal a client's output tells of.
fn refusal(text: &str) -> Option<&'static str> {
    REFUSED.into_iter().find(|word| text.contains(word))
}

fn says(case: &Case, text: String) -> Result<String> {
    match case.says {
        Some(wanted) if !text.contains(wanted) => Err(format!("{wanted:?} is not in its output\n{text}")),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::{TOO_EARLY, refusal};

    #[test]
    fn only_refusals_are_tried_again() {
        let rping = "cma event RDMA_CM_EVENT_REJECTED, error 8\nwait for CONNECTED state 4\n";
        assert_eq!(refusal(rping), Some("CM_EVENT_REJECTED"));
        assert_eq!(
            refusal("rdma_connect: Connection refused\n"),
            Some("Connection refused")
        );
        let perftest = "RDMA CM event error:\nEvent: RDMA_CM_EVENT_REJECTED; error: 8.\n";
        assert!(refusal(perftest).is_some() && perftest.contains(TOO_EARLY) && !rping.contains(TOO_EARLY));
        for other in [
            "",
            "cq completion failed status 12",
            "data mismatch",
            "CM_EVENT_DISCONNECTED",
        ] {
            assert_eq!(refusal(other), None, "{other}");
        }
    }
}
