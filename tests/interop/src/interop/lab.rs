//! What the lab owns: the prepared folder, a network namespace, processes. Everything ends with its owner.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use roce::DatapathKind;
use serde_json::Value;

use crate::{Error, guest::Kernel};

/// What an error says of a process that did not end in time.
pub(crate) const STILL_RUNS: &str = "still runs after";

/// How long an answer to a request may take: a path may have to be connected before.
const ANSWER: Duration = Duration::from_secs(120);

/// Set by SIGINT and SIGTERM.
pub(crate) static STOP: AtomicBool = AtomicBool::new(false);

/// The lab's networks between host and guests, each with a bridge of its own, and a card in each guest.
pub(crate) const NETS: u8 = 2;
/// The host's addresses on them; guests have `.1`, `.2` … and `fd77::1` ….
pub(crate) const HOST_V4: [&str; NETS as usize] = ["10.77.0.254", "10.78.0.254"];
pub(crate) const HOST_V6: [&str; NETS as usize] = ["fd77::254", "fd78::254"];

/// The host's end of a guest's card.
pub(crate) fn tap(net: u8, guest: u8) -> String {
    match net {
        0 => format!("tap{guest}"),
        _ => format!("tap{guest}-{net}"),
    }
}

/// Files that a run works with.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// The prepared folder, kept between runs.
    pub(crate) lab: PathBuf,
    /// Output and captures of this run.
    pub(crate) logs: PathBuf,
    /// `lab/` of the source tree.
    pub(crate) scripts: PathBuf,
    /// Sockets: a short path, removed at the end.
    pub(crate) run: PathBuf,
    pub(crate) ferroce: PathBuf,
    /// `ferroce-lab`.
    pub(crate) peer: PathBuf,
    /// `ferroce-hostile`.
    pub(crate) hostile: PathBuf,
    /// `provider-contract`, if it was built.
    pub(crate) contract: PathBuf,
    /// `ferroce-rdma`, with that.
    pub(crate) rdma: PathBuf,
    /// The tarball of the conformance kit, if there is one.
    pub(crate) kit: Option<PathBuf>,
    /// `ferroce-ublk`, if it was built.
    pub(crate) ublk: Option<PathBuf>,
    /// A checkout of Lustre, if there is one.
    pub(crate) lustre: Option<PathBuf>,
    /// Captures of scenarios that passed are kept, too.
    pub(crate) keep: bool,
    /// Sockets that our programs use.
    pub(crate) datapath: DatapathKind,
}

impl Places {
    /// `rdma-end`, which a kit has beside its programs.
    pub(crate) fn end_script(&self) -> PathBuf {
        let beside = self.peer.with_file_name("rdma-end");
        match beside.is_file() {
            true => beside,
            false => self.scripts.join("rdma-end"),
        }
    }

    /// What the lab has of a kernel.
    pub(crate) fn linux(&self, kernel: Kernel) -> PathBuf {
        self.lab.join(format!("linux-{}", kernel.series()))
    }

    /// LNet's modules for a kernel, and its programs.
    pub(crate) fn lnet(&self, kernel: Kernel) -> PathBuf {
        self.lab.join(format!("lustre-{}", kernel.series()))
    }

    /// Why a kernel could not be had, if it could not.
    pub(crate) fn missing(&self, kernel: Kernel) -> Option<String> {
        let why = not_made(&self.linux(kernel))?;
        Some(format!("no Linux {}: {why}", kernel.series()))
    }

    /// The same of LNet for it, made from a checkout of Lustre.
    pub(crate) fn missing_lnet(&self, kernel: Kernel) -> Option<String> {
        let why = not_made(&self.lnet(kernel))?;
        Some(format!("no LNet for Linux {}: {why}", kernel.series()))
    }
}

/// Why a folder of the lab's is not ready, if it is not.
fn not_made(folder: &Path) -> Option<String> {
    let mut log = folder.to_owned().into_os_string();
    log.push(".log");
    let said = fs::read_to_string(log).ok();
    if said.is_none() && folder.join("ready").exists() {
        return None;
    }
    let why = said.as_deref().unwrap_or_default().lines().last();
    Some(
        why.unwrap_or("it is not in the lab's folder, which another run uses")
            .to_owned(),
    )
}

/// A folder for sockets that goes away with its owner.
pub(crate) struct RunDir {
    pub(crate) path: PathBuf,
    /// Locked as long as the run lives: the file in it, and that of the logs.
    locks: Vec<File>,
}

const RUN_PREFIX: &str = "ferroce-lab-";
const RUN_LOCK: &str = "lock";

impl RunDir {
    pub(crate) fn new() -> Result<Self, Error> {
        let temp = std::env::temp_dir();
        remove_stale(&temp);
        let path = temp.join(format!("{RUN_PREFIX}{}", std::process::id()));
        // Another run that begins takes what has this name and is not locked for left over.
        let fresh = temp.join(format!(".{RUN_PREFIX}{}", std::process::id()));
        fs::create_dir_all(&fresh)?;
        let lock = File::create(fresh.join(RUN_LOCK))?;
        lock.try_lock()?;
        fs::rename(&fresh, &path)?;
        Ok(Self {
            path,
            locks: vec![lock],
        })
    }

    /// The folder `logs`, or `logs-2` … while other runs write to those before.
    pub(crate) fn logs(&mut self, lab: &Path) -> Result<PathBuf, Error> {
        for n in 1..100 {
            let path = lab.join(if n == 1 { "logs".to_owned() } else { format!("logs-{n}") });
            fs::create_dir_all(&path)?;
            let lock = File::create(path.join(".lock"))?;
            if lock.try_lock().is_ok() {
                self.locks.push(lock);
                return Ok(path);
            }
        }
        Err("no folder for logs is free".into())
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders of runs that were killed: nobody locks them any more.
fn remove_stale(temp: &Path) {
    for entry in fs::read_dir(temp).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(RUN_PREFIX);
        let lock = entry.path().join(RUN_LOCK);
        if ours && File::open(lock).is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// An error when the user wants to stop.
pub(crate) fn check_stop() -> Result<(), Error> {
    if STOP.load(Ordering::Relaxed) {
        Err("interrupted".into())
    } else {
        Ok(())
    }
}

/// Runs a program to its end; an error with what it said unless it succeeds.
pub(crate) fn run_quiet(program: &str, args: &[&str]) -> Result<(), Error> {
    let out = Command::new(program).args(args).stdin(Stdio::null()).output()?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!(
        "{program} {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&out.stderr).trim()
    )
    .into())
}

/// Runs `lab/setup.sh`; the folder is ready afterwards, and stays so while the returned file is open. A kernel may be
/// [missing](Places::missing), and [LNet](Places::missing_lnet) for one.
pub(crate) fn prepare(places: &Places, kernels: &[Kernel]) -> Result<File, Error> {
    let folder = &places.lab;
    if folder.display().to_string().contains(char::is_whitespace) {
        // The kernel's makefiles can't do with it.
        return Err(format!(
            "{} has spaces in its path: choose another folder with --lab",
            folder.display()
        )
        .into());
    }
    fs::create_dir_all(folder)?;
    let lock = File::create(folder.join("lock"))?;
    let kernels: Vec<&str> = kernels.iter().map(|k| k.series()).collect();
    let kernels = kernels.join(",");
    loop {
        check_stop()?;
        if lock.try_lock().is_ok() {
            setup(places, &lock, &[&kernels])?;
            lock.lock_shared()?;
            return Ok(lock);
        }
        if lock.try_lock_shared().is_ok() {
            // Others use it: it is ready, unless setup.sh has changed since.
            setup(places, &lock, &[&kernels, "in-use"])?;
            return Ok(lock);
        }
        // Another run prepares it.
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn setup(places: &Places, lock: &File, more: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("bash");
    command.arg(places.scripts.join("setup.sh")).arg(&places.lab).args(more);
    if let Some(lustre) = &places.lustre {
        command.env("LUSTRE", lustre);
    }
    // The lock is held for as long as any of its programs runs, whatever happens to this process. A terminal's ctrl-C goes
    // to us alone, for a package manager must not be interrupted: the script ends after the step that it is at.
    command.stdin(lock.try_clone()?).process_group(0);
    end_with_us(&mut command, libc::SIGTERM);
    let mut child = command.spawn()?;
    let mut told = false;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if check_stop().is_err() && !told {
            told = true;
            eprintln!("interrupted: waiting for the present step of lab/setup.sh");
            send(&child, libc::SIGTERM);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    check_stop()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("lab/setup.sh failed: {status}").into())
    }
}

/// Sends a signal to a child that was not yet waited for.
fn send(child: &Child, signal: i32) {
    if let Ok(pid) = i32::try_from(child.id()) {
        // SAFETY: no memory is passed; the child is ours and not yet waited for, so the number is not another process's.
        unsafe { libc::kill(pid, signal) };
    }
}

/// The command gets the signal when this process ends, however that comes.
fn end_with_us(command: &mut Command, signal: i32) {
    let us = std::process::id();
    // SAFETY: prctl and getppid are plain system calls, allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // We may have ended before that call.
            if libc::getppid().unsigned_abs() != us {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            Ok(())
        });
    }
}

/// A network namespace with a bridge for each network, and one tap a guest on each. It has no name: it is this process's and
/// its children's, and goes with the last of them.
pub(crate) struct Net(());

impl Net {
    /// Moves this process (still single-threaded) into a new namespace.
    pub(crate) fn up(guests: u8) -> Result<Self, Error> {
        // SAFETY: no memory is passed.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            let why = std::io::Error::last_os_error();
            return Err(format!("no network namespace (the lab needs root): {why}").into());
        }
        ip("link set lo up")?;
        for net in 0..NETS {
            Self::bridge(net, guests)?;
        }
        Ok(Self(()))
    }

    fn bridge(net: u8, guests: u8) -> Result<(), Error> {
        let bridge = format!("br{net}");
        let (v4, v6) = (HOST_V4[usize::from(net)], HOST_V6[usize::from(net)]);
        ip(&format!("link add {bridge} type bridge"))?;
        ip(&format!("addr add {v4}/24 dev {bridge}"))?;
        ip(&format!("addr add {v6}/64 dev {bridge} nodad"))?;
        for guest in 1..=guests {
            let tap = tap(net, guest);
            ip(&format!("tuntap add {tap} mode tap"))?;
            ip(&format!("link set {tap} mtu 9000 master {bridge} up"))?;
        }
        // A port that never goes keeps the bridge's carrier when a guest's port is out of service.
        let (other, end) = (format!("other{net}"), format!("end{net}"));
        ip(&format!("link add {other} mtu 9000 type veth peer {end} mtu 9000"))?;
        ip(&format!("link set {end} up"))?;
        ip(&format!("link set {other} master {bridge} up"))?;
        ip(&format!("link set {bridge} mtu 9000 up"))
    }

    /// Sets the MTU of the bridges, by which our side chooses its path MTU.
    pub(crate) fn set_mtu(&self, mtu: u32) -> Result<(), Error> {
        (0..NETS).try_for_each(|net| ip(&format!("link set br{net} mtu {mtu}")))
    }
}

fn ip(args: &str) -> Result<(), Error> {
    run_quiet("ip", &args.split(' ').collect::<Vec<_>>())
}

/// A process with its output in a file. Dropping it interrupts it, and kills it when that does not help.
pub(crate) struct Proc {
    pub(crate) name: String,
    child: Child,
    pub(crate) log: PathBuf,
}

impl Proc {
    pub(crate) fn spawn(name: &str, command: &mut Command, logs: &Path) -> Result<Self, Error> {
        Self::spawn_with_input(name, command, logs, Stdio::null())
    }

    pub(crate) fn spawn_with_input(
        name: &str,
        command: &mut Command,
        logs: &Path,
        input: Stdio,
    ) -> Result<Self, Error> {
        let log = logs.join(format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdin(input).stdout(file.try_clone()?).stderr(file);
        end_with_us(command, libc::SIGKILL);
        let child = command
            .spawn()
            .map_err(|e| format!("{name}: {:?}: {e}", command.get_program()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn text(&self) -> String {
        text_of(&self.log)
    }

    /// What a program that runs with `--json` has reported so far under this name.
    pub(crate) fn events(&self, event: &str) -> Vec<Value> {
        events_in(&self.text(), event)
    }

    /// Writes a line to a program that was spawned with [a pipe](Stdio::piped).
    pub(crate) fn tell(&mut self, line: &str) -> Result<(), Error> {
        let name = &self.name;
        let input = self
            .child
            .stdin
            .as_mut()
            .ok_or_else(|| format!("{name} has no input"))?;
        writeln!(input, "{line}").map_err(|e| format!("{name}: {line}: {e}").into())
    }

    /// Asks `ferroce`, whose control socket is its standard input, for something; its answer, whatever it is.
    pub(crate) fn ask(&mut self, mut request: Value) -> Result<Value, Error> {
        let log = self.log.clone();
        // One after another: the answers so far are those to all before.
        let id = self.events("answer").len() + 1;
        request["id"] = id.into();
        self.tell(&request.to_string())?;
        let mut answer = Value::Null;
        let waited = self.wait_until(ANSWER, || {
            let answers = events_in(&text_of(&log), "answer");
            answer = answers.into_iter().find(|a| a["id"] == id).unwrap_or_default();
            !answer.is_null()
        });
        waited.map_err(|e| format!("{request}: {e}"))?;
        Ok(answer)
    }

    /// The same of what must be done.
    pub(crate) fn done(&mut self, request: Value) -> Result<Value, Error> {
        let answer = self.ask(request.clone())?;
        match answer["ok"] == true {
            true => Ok(answer),
            false => Err(format!("{}: {request}: {answer}", self.name).into()),
        }
    }

    /// The same of what must be refused with this error number.
    pub(crate) fn refused(&mut self, request: Value, errno: i32) -> Result<(), Error> {
        let answer = self.ask(request.clone())?;
        match answer["errno"] == errno {
            true => Ok(()),
            false => Err(format!("{}: {request}: {errno} is right, not {answer}", self.name).into()),
        }
    }

    pub(crate) fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// An error if it has ended.
    pub(crate) fn still_runs(&mut self) -> Result<(), Error> {
        if self.running() {
            Ok(())
        } else {
            Err(format!("{} has ended", self.name).into())
        }
    }

    /// Waits until the output contains `what`.
    pub(crate) fn wait_for(&mut self, what: &str, timeout: Duration) -> Result<(), Error> {
        let log = self.log.clone();
        self.wait_until(timeout, || text_of(&log).contains(what))
            .map_err(|e| format!("no {what:?}: {e}").into())
    }

    /// Waits until `done`, which must come before the process ends.
    pub(crate) fn wait_until(&mut self, timeout: Duration, mut done: impl FnMut() -> bool) -> Result<(), Error> {
        let until = Instant::now() + timeout;
        loop {
            check_stop()?;
            let ended = !self.running();
            if done() {
                return Ok(());
            }
            if ended {
                return Err(format!("{} ended early:\n{}", self.name, self.text()).into());
            }
            if Instant::now() > until {
                return Err(format!("{}: not within {timeout:?}:\n{}", self.name, self.text()).into());
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Waits for the end; an error unless the exit status is 0.
    pub(crate) fn finish(&mut self, timeout: Duration) -> Result<String, Error> {
        let status = self.wait(timeout)?;
        let text = self.text();
        if status.success() {
            Ok(text)
        } else {
            Err(format!("{}: {status}:\n{text}", self.name).into())
        }
    }

    /// Waits for the end, whatever the exit status, even if the user wants to stop.
    pub(crate) fn wait_gone(&mut self, timeout: Duration) -> Result<(), Error> {
        let until = Instant::now() + timeout;
        while self.running() {
            if Instant::now() > until {
                return Err(format!("{} {STILL_RUNS} {timeout:?}:\n{}", self.name, self.text()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, Error> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            check_stop()?;
            if Instant::now() > until {
                return Err(format!("{} {STILL_RUNS} {timeout:?}:\n{}", self.name, self.text()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the process to end, as ctrl-C does.
    pub(crate) fn interrupt(&mut self) {
        if self.running() {
            send(&self.child, libc::SIGINT);
        }
    }

    /// Ends the process without a chance to say good-bye.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn events_in(text: &str, event: &str) -> Vec<Value> {
    let all = text.lines().filter_map(|l| serde_json::from_str(l).ok());
    all.filter(|e: &Value| e["event"] == event).collect()
}

fn text_of(log: &Path) -> String {
    let mut bytes = Vec::new();
    let _ = File::open(log).and_then(|mut f| f.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.interrupt();
        let until = Instant::now() + Duration::from_secs(3);
        while self.running() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.kill();
    }
}
