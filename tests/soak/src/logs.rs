//! Logs and the time line of a run.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    time::Instant,
};

/// The folder that they, sockets and images are in; it goes away unless something failed.
pub(crate) struct Logs {
    dir: tempfile::TempDir,
    timeline: File,
    begun: Instant,
}

impl Logs {
    pub(crate) fn new() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("ferroce-soak-").tempdir()?;
        Ok(Self {
            timeline: File::create(dir.path().join("timeline.log"))?,
            dir,
            begun: Instant::now(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a line of the time line.
    pub(crate) fn say(&mut self, text: &str) {
        let at = self.begun.elapsed().as_secs_f64();
        let _ = writeln!(self.timeline, "{at:9.3} {text}");
    }

    /// Seconds since the start.
    pub(crate) fn at(&self, when: Instant) -> f64 {
        when.saturating_duration_since(self.begun).as_secs_f64()
    }

    /// Writes a file.
    pub(crate) fn keep(&self, name: &str, text: &str) {
        let _ = fs::write(self.dir.path().join(name), text);
    }

    /// The folder stays, but for the images; where it is.
    pub(crate) fn stay(self) -> PathBuf {
        let path = self.dir.keep();
        for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "img") {
                let _ = fs::remove_file(entry.path());
            }
        }
        path
    }
}
