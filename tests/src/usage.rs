//! What a process takes of the host.

use std::{fs, io};

/// A look at `/proc/PID`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Memory of its own, bytes (`RssAnon`).
    pub anonymous: u64,
    /// All resident memory, bytes (`VmRSS`).
    pub resident: u64,
    /// Address space, bytes (`VmSize`).
    pub address_space: u64,
    /// Threads.
    pub threads: u64,
    /// Open descriptors.
    pub descriptors: u64,
}

impl Usage {
    /// Of a process.
    ///
    /// # Errors
    /// When there is no such process, it has ended and nobody has waited for it, or it is not ours to look at.
    pub fn of(pid: u32) -> io::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let number = |name: &str| -> io::Result<u64> {
            let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
            // A process that has ended has no memory.
            number.ok_or_else(|| io::Error::other(format!("process {pid} has no {name}")))
        };
        Ok(Self {
            anonymous: number("RssAnon")? << 10,
            resident: number("VmRSS")? << 10,
            address_space: number("VmSize")? << 10,
            threads: number("Threads")?,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64,
        })
    }

    /// Each number the larger of the two.
    pub fn max(self, other: Self) -> Self {
        Self {
            anonymous: self.anonymous.max(other.anonymous),
            resident: self.resident.max(other.resident),
            address_space: self.address_space.max(other.address_space),
            threads: self.threads.max(other.threads),
            descriptors: self.descriptors.max(other.descriptors),
        }
    }
}

/// How much more a process may take at the end of a long test than at its begin, and still count as flat.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flat {
    /// Memory of its own, bytes: an allocator's caches.
    pub memory: u64,
    /// Threads.
    pub threads: u64,
    /// Descriptors.
    pub descriptors: u64,
}

impl Flat {
    /// What of a process has grown by more.
    pub fn grown(&self, name: &str, before: Usage, after: Usage) -> Vec<String> {
        let each = [
            ("bytes of memory", before.anonymous, after.anonymous, self.memory),
            ("threads", before.threads, after.threads, self.threads),
            ("descriptors", before.descriptors, after.descriptors, self.descriptors),
        ];
        let grown = each
            .into_iter()
            .filter(|(_, before, after, more)| *after > before + more);
        grown
            .map(|(what, before, after, _)| format!("{name}: {after} {what}, {before} at first"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_threads_memory_and_descriptors() {
        let here = Usage::of(std::process::id()).unwrap();
        assert!(
            here.threads > 0 && here.descriptors > 2 && here.anonymous > 0,
            "{here:?}"
        );
        assert!(here.resident >= here.anonymous && here.address_space > here.resident);
    }

    #[test]
    fn a_process_that_has_ended_has_nothing_to_tell() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        // Not waited for, so that it is still there.
        while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
            std::thread::yield_now();
        }
        let usage = Usage::of(child.id());
        child.wait().unwrap();
        assert!(usage.is_err(), "{usage:?}");
        assert!(Usage::of(child.id()).is_err());
    }

    #[test]
    fn what_grows_is_told() {
        let flat = Flat {
            memory: 10,
            threads: 0,
            descriptors: 2,
        };
        let usage = |anonymous, threads, descriptors| Usage {
            anonymous,
            threads,
            descriptors,
            ..Usage::default()
        };
        assert_eq!(
            flat.grown("it", usage(100, 4, 9), usage(110, 3, 11)),
            Vec::<String>::new()
        );
        let grown = flat.grown("it", usage(100, 4, 9), usage(111, 5, 12));
        assert_eq!(grown[1], "it: 5 threads, 4 at first");
        assert_eq!(grown.len(), 3);
    }
}
