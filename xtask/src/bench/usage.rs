//! Resources that processes have used, from /proc.

use std::{fs, ops::Sub, path::Path};

use crate::Result;

/// Ticks a second in /proc/PID/stat, on x86, ARM and nearly all else.
const USER_HZ: f64 = 100.0;

/// Of a process, since it began.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub(super) struct Usage {
    /// Processor time in the program and for it in the kernel, seconds.
    pub(super) seconds: f64,
    /// Context switches of the threads that there are now.
    pub(super) switches: u64,
    pub(super) threads: usize,
}

impl Sub for Usage {
    type Output = Self;

    /// Resources used since an earlier time, with the present threads. Threads that have exited take their switches along.
    fn sub(self, earlier: Self) -> Self {
        Self {
            seconds: self.seconds - earlier.seconds,
            switches: self.switches.saturating_sub(earlier.switches),
            threads: self.threads,
        }
    }
}

/// Of a running process.
pub(super) fn of(process: u32) -> Result<Usage> {
    let dir = Path::new("/proc").join(process.to_string());
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()));
    let ticks = ticks(&read(&dir.join("stat"))?).ok_or("/proc/PID/stat is not as expected")?;
    let tasks = fs::read_dir(dir.join("task")).map_err(|e| format!("{}: {e}", dir.display()))?;
    // A thread may end while we look.
    let all: Vec<u64> = tasks
        .flatten()
        .filter_map(|task| read(&task.path().join("status")).ok())
        .map(|status| switches(&status))
        .collect();
    Ok(Usage {
        seconds: ticks as f64 / USER_HZ,
        switches: all.iter().sum(),
        threads: all.len(),
    })
}

/// User and system time: the 14th and 15th field, counted from behind the name, which may have spaces and parentheses.
fn ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

fn switches(status: &str) -> u64 {
    let lines = status.lines().filter_map(|l| l.split_once(':'));
    lines
        .filter(|(key, _)| key.ends_with("voluntary_ctxt_switches"))
        .filter_map(|(_, n)| n.trim().parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::{of, switches, ticks};

    #[test]
    fn proc_is_read_as_the_manual_page_has_it() {
        let stat = "77 (a) (b c) S 1 2 3 4 5 6 7 8 9 10 111 222 0 0 20 0";
        assert_eq!(ticks(stat), Some(333));
        assert_eq!(ticks("77 (a"), None);
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(switches(status), 42);
        let own = of(std::process::id()).unwrap();
        assert!(own.threads >= 1 && own.switches >= 1);
    }
}
