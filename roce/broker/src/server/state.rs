//! The file by which a broker knows what its predecessor had given away.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::time::{ClockId, clock_gettime};

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
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(Process { pid, start })
}

/// Whether a process still lives. Of one that can't be seen it is not known.
pub(super) fn is_alive(p: Process) -> bool {
    p.pid == 0 || process(p.pid) == Some(p)
}

/// Where the state of a directory's broker is.
pub(super) struct StateFile(PathBuf);

impl StateFile {
    pub(super) fn new(dir: &Path) -> Self {
        Self(dir.join(FILE))
    }

    /// What the predecessor left; `None` if there was none or it can't be understood.
    pub(super) fn read(&self) -> Option<Slots> {
        let meta = fs::symlink_metadata(&self.0).ok()?;
        if !meta.is_file() || meta.len() > MAX_LEN {
            return None;
        }
        let text = fs::read(&self.0).ok()?;
        serde_json::from_slice(&text).ok().filter(Slots::is_sound)
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
    use super::*;

    #[test]
    fn the_state_survives_and_garbage_does_not_hurt() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(dir.path());
        assert!(file.read().is_none());
        let mut slots = Slots::new(5);
        let own = process(std::process::id()).unwrap();
        slots.allocate(boot_time(), own).unwrap();
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
}
