//! Programs that PyPI has as wheels: installed, in these versions, into a virtual environment of the run; what they bring of
//! libibverbs themselves (NIXL) stays unused. Each case is two processes with a script of `wheels/`, which compares what
//! arrives byte for byte. None needs a GPU.
//!
//! Not here:
//! - PyPI's `mooncake-transfer-engine` is linked against libcuda.so.1, and its other variants are for GPUs or EFA; the same
//!   version's `-non-cuda` is run.
//! - InfiniStore's own tests keep their data on `cuda:0`.
//! - The parts for GPUs of `ibverbs` (GPUNetIO), NIXL (GDS, `nixl_ep`) and DLSlime (NVLink) need CUDA.
//! - mpi4py's own tests; docs/verbs/programs.md says why.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashSet,
    path::PathBuf,
    process::{Command, Stdio},
};

use crate::{Result, cases::Case};

/// Debian's package that makes virtual environments.
const PACKAGE: &str = "python3-venv";
const PYTHON: &str = "/usr/bin/python3";
/// How long pip may take, in seconds.
const TIMEOUT: &str = "900";
/// What more than one needs.
const NUMPY: &str = "numpy==2.4.6";

/// The module that the scripts have in common.
pub(crate) const SIDES: (&str, &str) = ("sides.py", include_str!("../wheels/sides.py"));

const IBVERBS: &[&str] = &["ibverbs==2026.10.22"];
const MOONCAKE: &[&str] = &["mooncake-transfer-engine-non-cuda==0.3.13.post1"];
const DLSLIME: &[&str] = &["dlslime==0.1.23"];
const NIXL: &[&str] = &["nixl-cu12==1.5.1", NUMPY];
/// InfiniStore's copy of libuv works on the event loop of uvloop's, which must be of the same layout: uvloop 0.23 ends with
/// `uv__io_cb: Assertion`. What FastAPI and Uvicorn need is named, since none of their own requirements is pinned.
const INFINISTORE: &[&str] = &[
    "infinistore==0.2.35",
    NUMPY,
    "uvloop==0.21.0",
    "fastapi==0.165.0",
    "starlette==1.10.0",
    "opentelemetry-api==1.45.2",
    "uvicorn==0.54.0",
    "annotated-doc==0.0.7",
    "annotated-types==0.8.0",
    "anyio==4.16.0",
    "click==8.5.1",
    "h11==0.16.0",
    "idna==3.20",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "typing-extensions==4.16.0",
    "typing-inspection==0.4.5",
];

/// The virtual environment of a run.
pub(crate) struct Environment {
    dir: PathBuf,
    made: OnceCell<Result<()>>,
    installed: RefCell<HashSet<&'static str>>,
}

impl Environment {
    /// One that is made in this directory when it is needed.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            made: OnceCell::new(),
            installed: RefCell::default(),
        }
    }

    /// Installs what a case needs; the error says what can't be had.
    pub(crate) fn install(&self, case: &Case) -> Result<()> {
        let mut installed = self.installed.borrow_mut();
        let lacking: Vec<_> = case.wheels.iter().copied().filter(|w| !installed.contains(w)).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let made = || {
            let mut command = Command::new(PYTHON);
            command.args(["-m", "venv"]).arg(&self.dir);
            quietly("python3 -m venv", &mut command)
                .map(drop)
                .map_err(|e| format!("no virtual environment (Debian package {PACKAGE}): {e}"))
        };
        self.made.get_or_init(made).clone()?;
        let mut command = Command::new("timeout");
        command.arg(TIMEOUT).arg(self.dir.join("bin/pip")).args([
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            "--no-deps",
            "--only-binary=:all:",
        ]);
        command.args(&lacking);
        quietly("pip", &mut command).map_err(|e| format!("{} of PyPI: {e}", case.wheels[0]))?;
        installed.extend(lacking);
        Ok(())
    }

    /// The search path of a case's programs, if it is another than ours.
    pub(crate) fn path(&self, case: &Case) -> Option<String> {
        let path = std::env::var("PATH").unwrap_or_default();
        (!case.wheels.is_empty()).then(|| format!("{}:{path}", self.dir.join("bin").display()))
    }

    /// Where its programs are.
    #[cfg(test)]
    fn bin(&self) -> PathBuf {
        self.dir.join("bin")
    }
}

/// Runs a command; returns its standard output, and an error has the last line that it printed.
pub(crate) fn quietly(name: &str, command: &mut Command) -> Result<Vec<u8>> {
    let out = command.stdin(Stdio::null()).output();
    let out = out.map_err(|e| format!("{name}: {e}"))?;
    if out.status.success() {
        return Ok(out.stdout);
    }
    let text = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rfind(|l| !l.trim().is_empty()).unwrap_or_default();
    Err(format!("{name} ended with {}: {line}", out.status))
}

/// Two processes of one script.
fn both(name: &str, wheels: &'static [&'static str], script: &'static str, text: &'static str) -> Case {
    let side = |role: &str| format!("python3 {script} {role} {{addr}} {{port}}");
    Case::pair(name, PACKAGE, &side("server"), &side("client"))
        .wheels(wheels)
        .file(script, text)
        .file(SIDES.0, SIDES.1)
        .says("all compared")
        .within(300)
}

pub(crate) fn all() -> Vec<Case> {
    let slime = include_str!("../wheels/slime.py");
    let engine = include_str!("../wheels/mooncake_engine.py");
    let lent = include_str!("../wheels/mooncake_store.py");
    let agents = include_str!("../wheels/agents.py");
    vec![
        both(
            "ibverbs of PyPI",
            IBVERBS,
            "verbs.py",
            include_str!("../wheels/verbs.py"),
        ),
        both("mooncake transfer engine", MOONCAKE, "mooncake_engine.py", engine),
        both("mooncake store", MOONCAKE, "mooncake_store.py", lent),
        both("dlslime endpoints", DLSLIME, "slime.py", slime),
        both("nixl over ucx", NIXL, "agents.py", agents).over_ucx("rc_v"),
        infinistore(),
    ]
}

/// Its server, whose pool of memory is a gigabyte at least, and a client.
fn infinistore() -> Case {
    let server =
        "python3 store_server.py --dev-name ferroce0 --link-type Ethernet --service-port {port} --prealloc-size 1";
    Case::pair("infinistore", PACKAGE, server, "python3 store.py {addr} {port}")
        .wheels(INFINISTORE)
        .file("store_server.py", include_str!("../wheels/store_server.py"))
        .file("store.py", include_str!("../wheels/store.py"))
        .file(SIDES.0, SIDES.1)
        .says("all compared")
        .within(300)
        .stopped()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_is_pinned_to_one_version() {
        let cases = all();
        let pins: HashSet<&str> = cases.iter().flat_map(|case| case.wheels).copied().collect();
        let names: HashSet<&str> = pins
            .iter()
            .filter_map(|pin| pin.split_once("=="))
            .map(|(n, _)| n)
            .collect();
        assert!(!pins.is_empty() && names.len() == pins.len(), "{pins:?}");
    }

    #[test]
    fn what_cannot_be_installed_is_told() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        // A virtual environment whose pip refuses.
        let environment = Environment::new(dir.path().to_owned());
        std::fs::create_dir(environment.bin()).unwrap_or_else(|e| panic!("{e}"));
        std::os::unix::fs::symlink("/bin/false", environment.bin().join("pip")).unwrap_or_else(|e| panic!("{e}"));
        environment.made.set(Ok(())).unwrap_or_else(|e| panic!("{e:?}"));
        let case = both("x", IBVERBS, "x.py", "");
        let why = environment.install(&case).expect_err("installed by /bin/false");
        assert!(why.starts_with("ibverbs==") && why.contains("exit status: 1"), "{why}");
        assert_eq!(environment.path(&Case::alone("x", "x", "x")), None);
    }
}
