//! `cargo xtask apps`: builds `ferroce` with the verbs library, and hands over to the matrix of programs.

use std::{ffi::OsString, path::PathBuf, process::Command};

use crate::{
    Result,
    cargo::{self, Profile},
    process,
    tools::{self, Tool},
};

/// Programs of the matrix.
const PROGRAMS: [Tool; 10] = [
    Tool::new("ibv_devinfo", "ibverbs-utils"),
    Tool::new("ib_write_bw", "perftest"),
    Tool::new("rping", "rdmacm-utils"),
    Tool::new("qperf", "qperf"),
    Tool::new("fio", "fio"),
    Tool::new("ucx_perftest", "ucx-utils"),
    Tool::new("fi_pingpong", "libfabric-bin"),
    Tool::new("mpirun", "openmpi-bin"),
    Tool::new("mpicc", "libopenmpi-dev"),
    Tool::new("/usr/share/doc/rdma-core/tests/__init__.py", "python3-pyverbs"),
];

/// Builds everything; returns the matrix's program and `ferroce`.
fn build() -> Result<(PathBuf, PathBuf)> {
    let ferroce = cargo::build("ferroce", "ferroce", Profile::Release)?;
    cargo::run(&["build", "--release", "-p", "verbs-shim"])?;
    let matrix = cargo::build("ferroce-apps", "ferroce-apps", Profile::Release)?;
    Ok((matrix, ferroce))
}

/// Runs the matrix with these arguments.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let (matrix, ferroce) = build()?;
    // Without the right to install, what is missing is listed as not run.
    if !args.iter().any(|a| a == "--list" || a == "--help")
        && let Err(e) = tools::ensure(&PROGRAMS)
    {
        println!("{e}");
    }
    let mut command = Command::new(matrix);
    command.arg("--ferroce").arg(ferroce).args(args);
    let status = process::Guard::spawn("ferroce-apps", &mut command)?.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("apps ended with {status}"))
    }
}
