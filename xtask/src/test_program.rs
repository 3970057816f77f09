//! Test programs that are built already, and the names of their tests.

use std::{path::PathBuf, process::Command};

use crate::{Result, process};

/// Program of libtest's: the unit tests of a crate, or a program in `tests/`.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    pub(crate) package: String,
    pub(crate) target: String,
    /// Folder of the package, in which tests expect to be started.
    pub(crate) dir: PathBuf,
    pub(crate) path: PathBuf,
}

impl TestProgram {
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Returns whether these pairs of package and program name it.
    pub(crate) fn is_one_of(&self, files: &[(&str, &str)]) -> bool {
        files.contains(&(&*self.package, &*self.target))
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.dir).env("CARGO_MANIFEST_DIR", &self.dir);
        command
    }

    pub(crate) fn list(&self, more: &[&str]) -> Result<Vec<String>> {
        let mut command = self.command();
        let out = process::capture(&self.name(), command.args(["--list", "--format", "terse"]).args(more))?;
        let text = String::from_utf8_lossy(&out.stdout);
        Ok(text
            .lines()
            .filter_map(|l| l.strip_suffix(": test"))
            .map(str::to_owned)
            .collect())
    }

    /// Returns the names of its ignored tests.
    pub(crate) fn ignored(&self) -> Result<Vec<String>> {
        self.list(&["--ignored"])
    }
}
