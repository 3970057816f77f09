//! Processes that end together.

use std::{
    io,
    os::unix::process::CommandExt as _,
    process::{Child, Command, ExitStatus},
};

use nix::{
    sys::{
        signal::{Signal, killpg},
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
    unistd::Pid,
};

/// A process, and what it has started: that ends with it and with this, unless it is in another process group.
#[derive(Debug)]
pub struct Group {
    first: Child,
    /// The process group, until the first process is waited for.
    group: Option<Pid>,
}

impl Group {
    /// Starts a command in a process group of its own.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let first = command.process_group(0).spawn()?;
        let group = i32::try_from(first.id()).ok().map(Pid::from_raw);
        Ok(Self { first, group })
    }

    /// The first process's id.
    pub fn id(&self) -> u32 {
        self.first.id()
    }

    /// How the first process has ended, or `None` as long as it runs. The rest is killed then.
    ///
    /// # Errors
    /// When it can't be told.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match self.group {
            Some(first) if waitid(Id::Pid(first), flags)? == WaitStatus::StillAlive => Ok(None),
            _ => self.kill().map(Some),
        }
    }

    /// Kills all of it (SIGKILL); how the first process has ended.
    ///
    /// # Errors
    /// When that can't be told.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        // As long as the first process is not waited for, the number is no other group's.
        if let Some(group) = self.group.take() {
            let _ = killpg(group, Signal::SIGKILL);
        }
        self.first.wait()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Read as _},
        process::Stdio,
        thread,
        time::Duration,
    };

    use super::*;

    /// A shell that has started a process, which would print more a minute later, and goes on with this.
    fn two(then: &str) -> (Group, BufReader<std::process::ChildStdout>) {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("(sleep 60; echo late) & echo started; {then}")])
            .stdout(Stdio::piped());
        let mut group = Group::spawn(&mut command).unwrap();
        let mut out = BufReader::new(group.first.stdout.take().unwrap());
        out.read_line(&mut String::new()).unwrap();
        (group, out)
    }

    #[test]
    fn the_rest_ends_with_the_first_process() {
        let (mut group, mut out) = two("exit 3");
        let status = loop {
            match group.try_wait().unwrap() {
                Some(status) => break status,
                None => thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(status.code(), Some(3));
        assert_eq!(out.read_to_string(&mut String::new()).unwrap(), 0);
        assert_eq!(group.try_wait().unwrap(), Some(status));
        assert_eq!(group.kill().unwrap(), status);
    }

    #[test]
    fn all_of_it_ends_when_it_is_killed_or_dropped() {
        let (mut group, mut out) = two("wait");
        assert_eq!(group.try_wait().unwrap(), None);
        assert!(!group.kill().unwrap().success());
        assert_eq!(out.read_to_string(&mut String::new()).unwrap(), 0);
        let (group, mut out) = two("wait");
        drop(group);
        assert_eq!(out.read_to_string(&mut String::new()).unwrap(), 0);
    }
}
