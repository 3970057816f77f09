//! Rust crates over libibverbs: their own tests, built from the sources that crates.io has, at these versions and with the lock
//! files that come with them.
//!
//! What is checked: sideway's tests, of its library and of whole transfers, over verbs and RDMA_CM, but for those that compare
//! compiler messages; those of `ibverbs`, and its example, which sends to itself and compares what arrives.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{
    Result,
    cases::{Case, Source},
    wheels::quietly,
};

const SIDEWAY: Source = Source {
    name: "sideway",
    version: "0.4.3",
    targets: &[
        "--lib",
        "--test=test_atomic",
        "--test=test_cq",
        "--test=test_mr_and_cq",
        "--test=test_post_send",
        "--test=test_qp",
    ],
};
const IBVERBS: Source = Source {
    name: "ibverbs",
    version: "0.9.2",
    targets: &["--lib", "--example=loopback"],
};

/// What they need beside cargo: bindgen, and rdma-core's own build.
const NEEDS: [(&str, &str); 3] = [
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ("cmake", "cmake"),
    ("/usr/share/doc/libclang-dev/copyright", "libclang-dev"),
];
/// How long one may take to build, in seconds.
const TIMEOUT: &str = "1800";

/// The crates that a run has built.
pub(crate) struct Crates {
    dir: PathBuf,
    cargo: OsString,
    built: RefCell<HashMap<&'static str, Result<()>>>,
}

impl Crates {
    /// Those that are built in this directory when they are needed.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            cargo: std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            built: RefCell::default(),
        }
    }

    /// Where the programs of a crate are.
    pub(crate) fn programs(&self, source: &Source) -> PathBuf {
        self.dir.join(source.name).join("programs")
    }

    /// Builds what a case needs; the error says what can't be had.
    pub(crate) fn build(&self, case: &Case) -> Result<()> {
        let Some(source) = case.source else { return Ok(()) };
        let mut built = self.built.borrow_mut();
        let done = built.entry(source.name).or_insert_with(|| self.make(source));
        done.clone()
            .map_err(|e| format!("{} {} of crates.io: {e}", source.name, source.version))
    }

    fn make(&self, source: &Source) -> Result<()> {
        let dir = self.dir.join(source.name);
        let programs = self.programs(source);
        fs::create_dir_all(&programs).map_err(|e| format!("{}: {e}", programs.display()))?;
        // Cargo builds tests of its own packages alone, so the crate is copied from where cargo keeps what it has fetched.
        let copy = dir.join("source");
        let mut cp = Command::new("cp");
        cp.arg("-r").arg(self.fetch(source, &dir.join("user"))?).arg(&copy);
        quietly("cp", &mut cp)?;
        let mut test = self.cargo("test", &copy);
        test.args(["--quiet", "--locked", "--no-run", "--message-format=json"])
            .args(source.targets)
            .env("CARGO_TARGET_DIR", dir.join("target"))
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        let made = messages(&mut test)?;
        let paths: Vec<_> = made
            .iter()
            .filter_map(|m| m["executable"].as_str())
            .map(Path::new)
            .collect();
        if paths.len() != source.targets.len() {
            return Err(format!(
                "cargo built {} programs of {}",
                paths.len(),
                source.targets.len()
            ));
        }
        for path in paths {
            let to = programs.join(path.file_name().unwrap_or_default());
            fs::copy(path, to).map_err(|e| format!("copying {}: {e}", path.display()))?;
        }
        Ok(())
    }

    /// Has cargo fetch a crate, for a package that does nothing but need it; returns where it is.
    fn fetch(&self, source: &Source, user: &Path) -> Result<PathBuf> {
        let fail = |e: std::io::Error| format!("{}: {e}", user.display());
        fs::create_dir_all(user.join("src")).map_err(fail)?;
        fs::write(user.join("src/lib.rs"), "").map_err(fail)?;
        let Source { name, version, .. } = source;
        let package = "[workspace]\n[package]\nname = \"user\"\nedition = \"2024\"\n";
        let manifest = format!("{package}[dependencies]\n{name} = \"={version}\"\n");
        fs::write(user.join("Cargo.toml"), manifest).map_err(fail)?;
        let found = messages(self.cargo("metadata", user).arg("--format-version=1"))?;
        let packages = found.iter().filter_map(|m| m["packages"].as_array()).flatten();
        packages
            .filter(|p| p["name"] == *name && p["version"] == *version)
            .find_map(|p| Path::new(p["manifest_path"].as_str()?).parent())
            .map(Path::to_owned)
            .ok_or_else(|| "cargo does not say where it is".into())
    }

    fn cargo(&self, task: &str, dir: &Path) -> Command {
        let mut command = Command::new("timeout");
        command.arg(TIMEOUT).arg(&self.cargo).arg(task).current_dir(dir);
        command
    }
}

/// What cargo says in JSON, one value a line.
fn messages(command: &mut Command) -> Result<Vec<Value>> {
    let said = quietly("cargo", command)?;
    let lines = said.split(|b| *b == b'\n').filter(|line| !line.is_empty());
    let values = lines.map(serde_json::from_slice).collect::<Result<_, _>>();
    values.map_err(|e| format!("cargo prints no JSON: {e}"))
}

fn tests_of(source: &'static Source) -> Case {
    let text = "for program in {programs}/*; do $program || exit; done; echo all of them passed";
    let case = Case::script(&format!("{} of crates.io", source.name), NEEDS[0].1, text);
    Case {
        source: Some(source),
        ..case.says("all of them passed").within(300)
    }
    .needs(&NEEDS)
}

pub(crate) fn all() -> Vec<Case> {
    // The example takes the second GID of the first device.
    vec![tests_of(&SIDEWAY), tests_of(&IBVERBS).everywhere()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_built_is_told_for_each_of_its_cases() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let crates = Crates {
            cargo: "/bin/false".into(),
            ..Crates::new(dir.path().to_owned())
        };
        let case = Case {
            source: Some(&SIDEWAY),
            ..Case::alone("x", "x", "x")
        };
        for _ in 0..2 {
            let why = crates.build(&case).expect_err("built by /bin/false");
            assert!(
                why.starts_with("sideway 0.4.3 of crates.io: ") && why.contains("exit status: 1"),
                "{why}"
            );
        }
        assert_eq!(crates.build(&Case::alone("x", "x", "x")), Ok(()));
    }
}
