//! `cargo xtask apps`: builds `ferroce` with the verbs library, and hands over to the matrix of programs.

use std::{ffi::OsString, path::PathBuf, process::Command};

use crate::{
    Result,
    cargo::{self, Profile},
    process,
    suites::Tally,
    tools::{self, Tool},
};

/// rdma-core's tests in python.
const PYVERBS: Tool = Tool::new("/usr/share/doc/rdma-core/tests/__init__.py", "python3-pyverbs");
/// Programs of the set `ci`.
const CI_PROGRAMS: [Tool; 9] = [
    Tool::new("ibv_devinfo", "ibverbs-utils"),
    Tool::new("ib_write_bw", "perftest"),
    Tool::new("rping", "rdmacm-utils"),
    Tool::new("qperf", "qperf"),
    Tool::new("valgrind", "valgrind"),
    Tool::new("cc", "gcc"),
    Tool::new("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    Tool::new("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    PYVERBS,
];
/// What the whole matrix needs beside them.
const PROGRAMS: [Tool; 7] = [
    Tool::new("fio", "fio"),
    Tool::new("ucx_perftest", "ucx-utils"),
    Tool::new("fi_pingpong", "libfabric-bin"),
    Tool::new("mpirun", "openmpi-bin"),
    Tool::new("mpicc", "libopenmpi-dev"),
    Tool::new("pkg-config", "pkg-config"),
    Tool::new("/usr/share/doc/python3-venv/copyright", "python3-venv"),
];

/// Builds everything; returns the matrix's program and `ferroce`.
fn build() -> Result<(PathBuf, PathBuf)> {
    let ferroce = cargo::build("ferroce", "ferroce", Profile::Release)?;
    cargo::run(&["build", "--release", "-p", "verbs-shim"])?;
    let matrix = cargo::build("ferroce-apps", "ferroce-apps", Profile::Release)?;
    Ok((matrix, ferroce))
}

/// The suite `apps`: the programs of the set `ci`, or all.
pub(crate) fn suite(full: bool) -> Result<Tally> {
    let mut needed = CI_PROGRAMS.to_vec();
    if full {
        needed.extend(PROGRAMS);
    }
    if let Err(why) = tools::ensure(&needed) {
        return Ok(Tally::not_run(why));
    }
    let (matrix, ferroce) = build()?;
    let json = cargo::target_dir()?.join("apps.json");
    let _ = std::fs::remove_file(&json);
    let mut command = Command::new(matrix);
    command.arg("--ferroce").arg(ferroce).arg("--json").arg(&json);
    command.args(["--set", if full { "full" } else { "ci" }]);
    let status = process::Guard::spawn("ferroce-apps", &mut command)?.wait()?;
    Tally::from_json(&json).map_err(|e| format!("apps ended with {status}: {e}"))
}

/// Runs the matrix with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let (matrix, ferroce) = build()?;
    // Without the right to install, what is missing is listed as not run.
    if !args.iter().any(|a| a == "--list" || a == "--help")
        && let Err(e) = tools::ensure(&[&CI_PROGRAMS[..], &PROGRAMS[..]].concat())
    {
        println!("{e}");
    }
    let mut command = Command::new(matrix);
    command.arg("--ferroce").arg(ferroce).args(args);
    process::hand_over("ferroce-apps", &mut command)
}
