//! Libraries of collective operations, whose processes all talk to all.
//!
//! What is checked: `c/gloo.cc`, in four processes, compares every element of what Gloo's ibverbs transport brings: broadcasts,
//! reductions by four algorithms, gathering, scattering, and messages between neighbours, once with pairs that sleep for their
//! completions and once with pairs that poll. `ring.c` compares what four ranks of an MPI pass on, and `wheels/ranks.py` what three
//! of mpi4py do, one-sided too.

use crate::{cases::Case, wheels::SIDES};

/// Four ranks, which meet in a directory; the first that fails is the result.
const GLOO_RANKS: &str = "mkdir store; for rank in 0 1 2 3; do ./gloo $rank 4 store & all=\"$all $!\"; done; \
                          for one in $all; do wait $one || exit; done";

/// Gloo of Debian.
fn gloo() -> Case {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/c/gloo.cc");
    let script = format!("c++ -Wall -Werror -O1 -o gloo {source} -lgloo -libverbs && {{ {GLOO_RANKS}; }}");
    Case::script("gloo over ibverbs, 4 ranks", "libgloo-dev", &script)
        .says("all compared")
        .within(300)
        .needs(&[("/usr/include/gloo/context.h", "libgloo-dev"), ("c++", "g++")])
}

/// An implementation of MPI, of Debian, and how it is told to have UCX and nothing else carry what its ranks say.
struct Mpi {
    name: &'static str,
    compiler: &'static str,
    /// The package of the compiler and the headers.
    package: &'static str,
    /// Before the number of ranks.
    launcher: &'static str,
    env: &'static [(&'static str, &'static str)],
}

const OPEN_MPI: Mpi = Mpi {
    name: "mpi",
    compiler: "mpicc.openmpi",
    package: "libopenmpi-dev",
    launcher: "mpirun.openmpi --oversubscribe --mca pml ucx --mca osc ucx --mca btl ^openib -n",
    env: &[("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")],
};
/// Ranks of one host would share memory, past UCX.
const MPICH: Mpi = Mpi {
    name: "mpich",
    compiler: "mpicc.mpich",
    package: "libmpich-dev",
    launcher: "mpiexec.mpich -n",
    env: &[("MPIR_CVAR_NOLOCAL", "1")],
};

impl Mpi {
    fn case(&self, name: &str, text: &str) -> Case {
        let mut case = Case::script(name, self.package, text).over_ucx("rc_v,self");
        case.env.extend(self.env);
        case.needs(&[(self.compiler, self.package)])
    }

    /// Messages around a ring of four, and a sum.
    fn ring(&self) -> Case {
        let Self {
            name,
            compiler,
            launcher,
            ..
        } = self;
        let text = format!("{compiler} -O2 -o ring ring.c && exec {launcher} 4 ./ring");
        self.case(&format!("{name} over ucx, 4 ranks"), &text)
            .file("ring.c", include_str!("../ring.c"))
            .says("ring done")
    }
}

/// mpi4py of Debian, three ranks over Open MPI.
fn ranks() -> Case {
    const MODULE: &str = "/usr/lib/python3/dist-packages/mpi4py/__init__.py";
    let text = format!("exec {} 3 /usr/bin/python3 ranks.py", OPEN_MPI.launcher);
    OPEN_MPI
        .case("mpi4py over ucx, 3 ranks", &text)
        .file("ranks.py", include_str!("../wheels/ranks.py"))
        .file(SIDES.0, SIDES.1)
        .says("all compared")
        .needs(&[(MODULE, "python3-mpi4py")])
}

pub(crate) fn all() -> Vec<Case> {
    vec![gloo(), OPEN_MPI.ring(), MPICH.ring(), ranks()]
}
