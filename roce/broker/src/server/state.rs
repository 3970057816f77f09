//! The file by which a broker knows what its predecessor had given away.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    process::{Pid, test_kill_process},
    time::{ClockId, clock_gettime},
};

use super::slots::{Process, Slots};

const FILE: &str = "places.json";
/// Far more than the file has.
const MAX_LEN: u64 = 4 << 20;

/// Milliseconds since the machine was started, sleep included.
pub(super) fn boot_time() -> u64 {
    let t = clock_gettime(ClockId::Boottime);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1000 + u64::try_from(t.tv_nsec).unwrap_or(0) / 1_000_000
}

/// A process as it can be recognised later; `None` when there is none of this id, or only its remains.
pub(super) fn process(pid: u32) -> Option<Process> {
    // A process names itself, and may have no UTF-8 there.
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    start_of(&String::from_utf8_lossy(&text)).map(|start| Process { pid, start })
}

/// When a process was started, by its `/proc/PID/stat`; `None` of a dead one. A zombie with more threads than one lives: only
/// its main thread has ended.
fn start_of(stat: &str) -> Option<u64> {
    // The name, in parentheses, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let start = fields.nth(1)?.parse().ok()?;
    let dead = state == "X" || (state == "Z" && threads <= 1);
    (!dead).then_some(start)
}

/// The namespace that this process's numbers of processes are of; 0 if that can't be found out.
pub(super) fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino())
}

/// Whether a process that was known once still lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Alive,
    Dead,
    /// It can't be seen: it is in another namespace, or `/proc` hides it (`hidepid`).
    Unknown,
}

pub(super) fn life(p: Process) -> Life {
    if p.pid == 0 {
        return Life::Unknown;
    }
    if process(p.pid) == Some(p) {
        return Life::Alive;
    }
    let hidden = !Path::new(&format!("/proc/{}/stat", p.pid)).exists()
        && i32::try_from(p.pid)
            .ok()
            .and_then(Pid::from_raw)
            .is_some_and(|pid| matches!(test_kill_process(pid), Ok(()) | Err(rustix::io::Errno::PERM)));
    if hidden { Life::Unknown } else { Life::Dead }
}

/// Whether a process is not known to be dead.
pub(super) fn is_alive(p: Process) -> bool {
    life(p) != Life::Dead
}

/// The state as a file has it; `None` if it can't be understood.
pub(super) fn parse(text: &[u8]) -> Option<Slots> {
    serde_json::from_slice(text).ok().filter(Slots::is_sound)
}

/// Path of the state file of a directory's broker.
pub(super) struct StateFile(PathBuf);

impl StateFile {
    pub(super) fn new(dir: &Path) -> Self {
        Self(dir.join(FILE))
    }

    /// Reads the predecessor's state; `None` if there was none or it can't be parsed.
    pub(super) fn read(&self) -> Option<Slots> {
        let meta = fs::symlink_metadata(&self.0).ok()?;
        if !meta.is_file() || meta.len() > MAX_LEN {
            return None;
        }
        parse(&fs::read(&self.0).ok()?)
    }

    /// Writes the state; a reader sees the former or this one.
    pub(super) fn write(&self, slots: &Slots) -> io::Result<()> {
        let new = self.0.with_extension("new");
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(slots)?)?;
        fs::rename(&new, &self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::slots::Tenant, *};

    #[test]
    fn the_state_survives_and_garbage_does_not_hurt() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(dir.path());
        assert!(file.read().is_none());
        let mut slots = Slots::new(5, namespace());
        let own = process(std::process::id()).unwrap();
        let tenant = Tenant {
            process: own,
            uid: 0,
            token: u64::MAX,
        };
        slots.allocate(boot_time(), tenant, 0).unwrap();
        file.write(&slots).unwrap();
        file.write(&slots).unwrap();
        assert_eq!(file.read(), Some(slots));
        for text in ["", "{", "null", r#"{"owners":[],"rests":[],"next":0}"#] {
            fs::write(dir.path().join(FILE), text).unwrap();
            assert!(file.read().is_none(), "{text}");
        }
    }

    #[test]
    fn a_process_is_told_from_its_successor() {
        let own = process(std::process::id()).unwrap();
        assert!(is_alive(own));
        assert!(!is_alive(Process {
            start: own.start + 1,
            ..own
        }));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(process(pid).is_none());
    }

    #[test]
    fn a_process_lives_whatever_its_name() {
        let name = fs::read("/proc/self/comm").unwrap();
        fs::write("/proc/self/comm", b"\xff)").unwrap();
        let own = process(std::process::id());
        fs::write("/proc/self/comm", name.trim_ascii_end()).unwrap();
        assert!(own.is_some_and(is_alive));
    }

    #[test]
    fn a_process_lives_without_its_main_thread() {
        let stat = |state: &str, threads: u32| {
            format!(
                "7 (a ) b) {state} 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 {threads} 0 4711 9 9 18446744073709551615"
            )
        };
        assert_eq!(start_of(&stat("S", 1)), Some(4711));
        assert_eq!(start_of(&stat("Z", 2)), Some(4711));
        assert_eq!(start_of(&stat("Z", 1)), None);
        assert_eq!(start_of(&stat("X", 0)), None);
    }
}
