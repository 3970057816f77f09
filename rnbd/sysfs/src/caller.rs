//! Callers of the file system, and their access control.

use std::fs;

/// Process that sent a request of the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caller {
    /// The user.
    pub user: u32,
    /// The first of its groups.
    pub group: u32,
    /// Number of the thread; 0: in a namespace that this process does not see.
    pub(crate) thread: u32,
}

impl Caller {
    pub(crate) fn of(request: &fuser::Request) -> Self {
        Self {
            user: request.uid(),
            group: request.gid(),
            thread: request.pid(),
        }
    }

    /// Returns its supplementary groups; none if they can't be read.
    pub fn further_groups(&self) -> Vec<u32> {
        let status = self.status().unwrap_or_default();
        let groups = field(&status, "Groups").unwrap_or_default();
        groups
            .split_whitespace()
            .filter_map(|group| group.parse().ok())
            .collect()
    }

    /// Whether a signal waits for it to return from its system call.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.status().is_some_and(|status| has_signal(&status))
    }

    fn status(&self) -> Option<String> {
        match self.thread {
            0 => None,
            // Its name, in the first line, may be no UTF-8.
            thread => {
                let status = fs::read(format!("/proc/{thread}/status")).ok()?;
                Some(String::from_utf8_lossy(&status).into_owned())
            }
        }
    }
}

/// Access control of a tree.
pub trait Admission: Send + Sync + 'static {
    /// Whether this caller may use the tree; others get EACCES.
    fn admits(&self, caller: &Caller) -> bool;

    /// Whether this user may take reserved places: root and the owner.
    fn trusts(&self, user: u32) -> bool;

    /// Returns the group of the files.
    fn group(&self) -> u32;
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let found = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    found.map(str::trim)
}

/// Whether a signal is pending that is not blocked (proc(5)). Ignored ones never become pending.
fn has_signal(status: &str) -> bool {
    let set = |name| field(status, name).and_then(|set| u64::from_str_radix(set, 16).ok());
    let pending = set("SigPnd").unwrap_or_default() | set("ShdPnd").unwrap_or_default();
    pending & !set("SigBlk").unwrap_or_default() != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pending_signal_interrupts_unless_it_is_blocked() {
        let status = |own: &str, shared: &str, blocked: &str| {
            format!("Name:\tx\nSigQ:\t0/1\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\nSigIgn:\t0\n")
        };
        assert!(!has_signal(&status("0", "0000000000000000", "0")));
        assert!(has_signal(&status("0", "0000000000000002", "0")));
        assert!(has_signal(&status("0000000000000100", "0", "2")));
        assert!(!has_signal(&status("2", "2", "0000000000000002")));
        assert!(!has_signal("nothing known"));
    }

    #[test]
    fn our_own_groups_are_found() {
        let caller = Caller {
            user: 0,
            group: 0,
            thread: std::process::id(),
        };
        let mut told = caller.further_groups();
        let mut ours: Vec<u32> = nix::unistd::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        told.sort_unstable();
        ours.sort_unstable();
        assert_eq!(told, ours);
        assert!(!caller.is_interrupted());
    }
}
