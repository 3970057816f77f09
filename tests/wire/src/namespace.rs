//! Network namespaces without names.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    process::{Command, Stdio},
    sync::Arc,
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};

/// A network namespace, there for as long as this or a process in it is.
#[derive(Clone)]
pub struct Namespace {
    file: Arc<File>,
}

fn in_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let ended = scope.spawn(work).join();
        ended.unwrap_or_else(|_| Err(io::Error::other("a thread in a namespace panicked")))
    })
}

impl Namespace {
    /// A new one, whose loopback interface is up. The caller stays where it is.
    ///
    /// # Errors
    /// When that is not allowed (it needs root), or the program `ip` is missing.
    pub fn new() -> io::Result<Self> {
        let file = in_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        })?;
        let namespace = Self { file: Arc::new(file) };
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    /// Does this in a thread in the namespace.
    ///
    /// # Errors
    /// Those of the work, or when there is no such thread.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        in_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET)?;
            work()
        })
    }

    /// A command whose process is in the namespace. It is killed when the thread that starts it ends.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let file = self.file.clone();
        let us = std::process::id();
        // SAFETY: setns, prctl and getppid are plain system calls, allowed between fork and exec; nothing is allocated.
        unsafe {
            command.pre_exec(move || {
                setns(&file, CloneFlags::CLONE_NEWNET)?;
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // We may have ended before that call.
                if libc::getppid().unsigned_abs() != us {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                Ok(())
            });
        }
        command
    }

    /// Makes a pair of virtual Ethernet devices: `ours` here, `theirs` in another namespace.
    ///
    /// # Errors
    /// When `ip` fails.
    pub fn link_to(&self, other: &Self, ours: &str, theirs: &str) -> io::Result<()> {
        let (process, descriptor) = (std::process::id(), other.file.as_raw_fd());
        let netns = format!("/proc/{process}/fd/{descriptor}");
        self.ip(&format!("link add {ours} type veth peer name {theirs} netns {netns}"))
    }

    /// Runs `ip` with these arguments, which have no spaces in them.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn ip(&self, args: &str) -> io::Result<()> {
        let out = self.command("ip").args(args.split(' ')).stdin(Stdio::null()).output()?;
        if out.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&out.stderr);
        Err(io::Error::other(format!("ip {args}: {}", said.trim())))
    }
}
