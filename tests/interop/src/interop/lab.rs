//! What the lab owns: the prepared folder, a network namespace, processes. Everything ends with its owner.

use std::{
    fs::{self, File},
    io::Read as _,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use crate::Error;

/// Set by SIGINT and SIGTERM.
pub(crate) static STOP: AtomicBool = AtomicBool::new(false);

/// The host's addresses on the lab's bridge; guests have `.1`, `.2` … and `fd77::1` ….
pub(crate) const HOST_V4: &str = "10.77.0.254";
pub(crate) const HOST_V6: &str = "fd77::254";

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
    /// Captures of scenarios that passed are kept, too.
    pub(crate) keep: bool,
}

/// A folder for sockets that goes away with its owner.
pub(crate) struct RunDir(pub(crate) PathBuf);

impl RunDir {
    pub(crate) fn new() -> Result<Self, Error> {
        let temp = std::env::temp_dir();
        for name in own_names(&temp) {
            let _ = fs::remove_dir_all(temp.join(name));
        }
        let dir = temp.join(format!("ferroce-lab-{}", std::process::id()));
        fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Entries `ferroce-lab-PID` of labs that were killed.
fn own_names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let dead = |name: &String| {
        let pid = name.strip_prefix("ferroce-lab-");
        pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists())
    };
    let names = entries.flatten().filter_map(|e| e.file_name().into_string().ok());
    names.filter(dead).collect()
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

/// Runs `lab/setup.sh`; the folder is ready afterwards, and stays so while the returned file is open.
pub(crate) fn prepare(scripts: &Path, folder: &Path) -> Result<File, Error> {
    fs::create_dir_all(folder)?;
    let lock = File::create(folder.join("lock"))?;
    // A lab that another run uses is ready and not touched.
    let alone = lock.try_lock().is_ok();
    if !alone {
        lock.lock_shared()?;
        return Ok(lock);
    }
    let status = Command::new("bash")
        .arg(scripts.join("setup.sh"))
        .arg(folder)
        .stdin(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(format!("lab/setup.sh failed: {status}").into());
    }
    lock.lock_shared()?;
    Ok(lock)
}

/// A network namespace with a bridge and one tap a guest. This process and its children live in it.
pub(crate) struct Net {
    name: String,
}

impl Net {
    pub(crate) fn up(guests: u8) -> Result<Self, Error> {
        remove_stale();
        let name = format!("ferroce-lab-{}", std::process::id());
        run_quiet("ip", &["netns", "add", &name])?;
        let net = Self { name };
        enter(&net.name)?;
        run_quiet("ip", &["link", "set", "lo", "up"])?;
        run_quiet("ip", &["link", "add", "br0", "type", "bridge"])?;
        run_quiet("ip", &["addr", "add", &format!("{HOST_V4}/24"), "dev", "br0"])?;
        run_quiet("ip", &["addr", "add", &format!("{HOST_V6}/64"), "dev", "br0", "nodad"])?;
        for i in 1..=guests {
            let tap = format!("tap{i}");
            run_quiet("ip", &["tuntap", "add", &tap, "mode", "tap"])?;
            run_quiet("ip", &["link", "set", &tap, "mtu", "9000", "master", "br0", "up"])?;
        }
        // A port that never goes keeps the bridge's carrier when a guest's port is out of service.
        run_quiet(
            "ip",
            &[
                "link", "add", "other", "mtu", "9000", "type", "veth", "peer", "name", "far",
            ],
        )?;
        run_quiet("ip", &["link", "set", "far", "up"])?;
        run_quiet("ip", &["link", "set", "other", "master", "br0", "up"])?;
        run_quiet("ip", &["link", "set", "br0", "mtu", "9000", "up"])?;
        Ok(net)
    }

    /// Sets the MTU of the bridge, by which our side chooses its path MTU.
    pub(crate) fn set_mtu(&self, mtu: u32) -> Result<(), Error> {
        run_quiet("ip", &["link", "set", "br0", "mtu", &mtu.to_string()])
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = run_quiet("ip", &["netns", "del", &self.name]);
    }
}

/// Moves this process (still single-threaded) into the namespace.
fn enter(name: &str) -> Result<(), Error> {
    let file = File::open(format!("/run/netns/{name}"))?;
    // SAFETY: setns takes a descriptor, which `file` keeps open, and touches no memory of ours.
    if unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
        return Err(format!("setns: {}", std::io::Error::last_os_error()).into());
    }
    Ok(())
}

/// Removes namespaces of labs that were killed.
fn remove_stale() {
    for name in own_names(Path::new("/run/netns")) {
        let _ = run_quiet("ip", &["netns", "del", &name]);
    }
}

/// A process with its output in a file. Dropping it interrupts it, and kills it when that does not help.
pub(crate) struct Proc {
    pub(crate) name: String,
    child: Child,
    pub(crate) log: PathBuf,
}

impl Proc {
    pub(crate) fn spawn(name: &str, command: &mut Command, logs: &Path) -> Result<Self, Error> {
        Self::spawn_with_input(name, command, logs, None)
    }

    pub(crate) fn spawn_with_input(
        name: &str,
        command: &mut Command,
        logs: &Path,
        input: Option<File>,
    ) -> Result<Self, Error> {
        let log = logs.join(format!("{name}.log"));
        let file = File::create(&log)?;
        let input = input.map_or_else(Stdio::null, Stdio::from);
        command.stdin(input).stdout(file.try_clone()?).stderr(file);
        // Nothing outlives this process, however it ends.
        // SAFETY: prctl is a plain system call, allowed between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command
            .spawn()
            .map_err(|e| format!("{name}: {:?}: {e}", command.get_program()))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log,
        })
    }

    pub(crate) fn text(&self) -> String {
        let mut bytes = Vec::new();
        let _ = File::open(&self.log).and_then(|mut f| f.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the output contains `what`.
    pub(crate) fn wait_for(&mut self, what: &str, patience: Duration) -> Result<(), Error> {
        let until = Instant::now() + patience;
        loop {
            check_stop()?;
            if self.text().contains(what) {
                return Ok(());
            }
            if !self.running() && !self.text().contains(what) {
                return Err(format!("{} ended early:\n{}", self.name, self.text()).into());
            }
            if Instant::now() > until {
                return Err(format!("{}: no {what:?} within {patience:?}:\n{}", self.name, self.text()).into());
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Waits for the end; an error unless the exit status is 0.
    pub(crate) fn finish(&mut self, patience: Duration) -> Result<String, Error> {
        let status = self.wait(patience)?;
        let text = self.text();
        if status.success() {
            Ok(text)
        } else {
            Err(format!("{}: {status}:\n{text}", self.name).into())
        }
    }

    fn wait(&mut self, patience: Duration) -> Result<ExitStatus, Error> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            check_stop()?;
            if Instant::now() > until {
                return Err(format!("{} still runs after {patience:?}:\n{}", self.name, self.text()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the process to end, as ctrl-C does.
    pub(crate) fn interrupt(&mut self) {
        self.signal(libc::SIGINT);
    }

    /// Ends the process without a chance to say good-bye.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn signal(&mut self, signal: i32) {
        if let Ok(pid) = i32::try_from(self.child.id())
            && self.running()
        {
            // SAFETY: the child is ours and not yet waited for, so the number is not another process's.
            unsafe { libc::kill(pid, signal) };
        }
    }
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
