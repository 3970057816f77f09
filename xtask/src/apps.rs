//! `cargo xtask apps`: builds `ferroce` with the verbs library, and hands over to the matrix of programs.

use std::{ffi::OsString, process::Command};

use crate::{
    Result,
    cargo::{self, Built, Profile},
    process,
    tally::Tally,
    tools::{self, Tool},
};

/// rdma-core's tests in python.
const PYVERBS: Tool = Tool::new("/usr/share/doc/rdma-core/tests/__init__.py", "python3-pyverbs");
/// Programs of the set `ci`.
const CI_PROGRAMS: [Tool; 9] = [
    tools::IBVERBS,
    tools::PERFTEST,
    Tool::new("rping", "rdmacm-utils"),
    Tool::new("qperf", "qperf"),
    Tool::new("valgrind", "valgrind"),
    Tool::new("cc", "gcc"),
    Tool::new("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    Tool::new("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    PYVERBS,
];
/// Programs that the whole matrix needs in addition.
const PROGRAMS: [Tool; 22] = [
    Tool::new("fio", "fio"),
    Tool::new("ucx_perftest", "ucx-utils"),
    Tool::new("fi_pingpong", "libfabric-bin"),
    Tool::new("mpirun.openmpi", "openmpi-bin"),
    Tool::new("mpicc.openmpi", "libopenmpi-dev"),
    Tool::new("mpiexec.mpich", "mpich"),
    Tool::new("mpicc.mpich", "libmpich-dev"),
    Tool::new("pkg-config", "pkg-config"),
    Tool::new("/usr/share/doc/python3-venv/copyright", "python3-venv"),
    Tool::new("/usr/lib/python3/dist-packages/mpi4py/__init__.py", "python3-mpi4py"),
    Tool::new("qemu-system-x86_64", "qemu-system-x86"),
    Tool::new("/usr/include/librpma.h", "librpma-dev"),
    Tool::new("tgtd", "tgt"),
    Tool::new("iscsi-perf", "libiscsi-bin"),
    Tool::new("dapltest", "dapl2-utils"),
    Tool::new("iperf3", "iperf3"),
    Tool::new("qemu-img", "qemu-utils"),
    Tool::new("/usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so", "qemu-block-extra"),
    Tool::new("/usr/include/gloo/context.h", "libgloo-dev"),
    Tool::new("c++", "g++"),
    Tool::new("cmake", "cmake"),
    Tool::new("/usr/share/doc/libclang-dev/copyright", "libclang-dev"),
];

/// Programs of the set `ci`, or of the whole matrix.
pub(crate) fn needed(full: bool) -> Vec<Tool> {
    let mut needed = CI_PROGRAMS.to_vec();
    if full {
        needed.extend(PROGRAMS);
    }
    needed
}

fn command(built: &Built) -> Result<Command> {
    let mut command = Command::new(built.program("ferroce-apps")?);
    command.arg("--ferroce").arg(built.program("ferroce")?);
    Ok(command)
}

/// The suite `apps`: the programs of the set `ci`, or all.
pub(crate) fn suite(built: &Built, full: bool) -> Result<Tally> {
    if let Err(why) = tools::ensure(&needed(full)) {
        return Ok(Tally::not_run(why));
    }
    let mut command = command(built)?;
    command.args(["--set", if full { "full" } else { "ci" }]);
    Tally::of_program("ferroce-apps", &mut command, "apps.json")
}

/// Runs the matrix with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let built = cargo::build_programs(Profile::Release)?;
    // Without the right to install, what is missing is listed as not run.
    if !args.iter().any(|a| a == "--list" || a == "--help")
        && let Err(e) = tools::ensure(&needed(true))
    {
        println!("{e}");
    }
    process::hand_over("ferroce-apps", command(&built)?.args(args))
}
