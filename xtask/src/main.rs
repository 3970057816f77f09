//! Project tasks, run as `cargo xtask TASK`. `cargo xtask help` lists them.

mod apps;
mod bench;
mod book;
mod cargo;
mod demo;
mod deny;
mod dist;
mod files;
mod fuzz;
mod harness;
mod install;
mod interop;
mod kit;
mod lint;
mod long;
mod pages;
mod peers;
mod process;
mod readelf;
mod results;
mod sim;
mod specs;
mod suites;
mod tally;
mod test_program;
mod tools;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

/// Any failure, with the text that the user shall read.
pub(crate) type Result<T, E = String> = std::result::Result<T, E>;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Tasks of the ferroce project",
    after_help = "Exit status: 0 all well, 1 a task failed or a test did not pass or could not be run, 2 wrong usage, 130 \
                  interrupted."
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Show ferroce at work in under a minute: a verbs program, and a file system on a block device of two paths
    ///
    /// perftest runs under `ferroce run`; an ext4 image of the sources is served, mapped over two paths, copied while one of them is cut,
    /// checked, changed and written back. As root between two network namespaces, else on loopback. Installs perftest, e2fsprogs,
    /// libnbd-bin and iproute2 if they are missing (apt; sudo if not root), or says what is missing. Builds only the program and its
    /// libraries, without link-time optimization (profile `demo`). Ctrl-C leaves nothing behind.
    Demo(demo::DemoArgs),
    /// Run every test suite
    ///
    /// Suites: `unit` (the tests of the workspace), `sim` (simulated networks, and storage on them, from the same seeds each time
    /// and from fresh ones, which are printed, and the corpora of the fuzz targets), `end-to-end` (two processes of the program),
    /// `real-clients` (tests marked ignored because they need qemu-img, nbdcopy, fio or ib_write_bw, which are installed first, and the demo),
    /// `roce-hw` (the provider contract over libibverbs and librdmacm, with our own library in their place, also under valgrind),
    /// `apps` (unmodified RDMA programs, which are installed first, under `ferroce run`), `packages` (packages of the programs
    /// under test, installed, used and removed in fresh roots; needs root and Debian's package archive), `interop` (scenarios against
    /// Linux kernels in virtual machines; needs root and Debian's package archive), `flood` (the soak test, in the full
    /// set only). The workspace is built as a whole before, in the dev profile; in the full set the programs under test are
    /// of the release profile. Each suite prints how many tests passed, failed and were not run, with the reason, and how
    /// long it took. It fails if tests that it names are not there, or have no result. A suite that could not
    /// be run makes the exit status 1 unless --allow-not-run is given; suites that are left out do not count.
    Test(suites::TestArgs),
    /// Run simulated networks with every fault, from seeds
    Sim(SimArgs),
    /// Format all code
    Fmt,
    /// fmt --check, clippy, docs (warnings are errors), rules for dependencies, and the rules for files
    ///
    /// The engine, RTRS and RNBD do no I/O; no two files of a crate import each other; no file is longer than 1000 lines; docstrings
    /// don't begin with "What" and its like; all that specs/ names exists.
    ///
    /// The rules for dependencies are in deny.toml; cargo-deny, which checks them, is built if it is missing. Known
    /// vulnerabilities are looked up where their database can be reached; it is told when not.
    Lint {
        /// Check pages only: links, the book's table of contents, and generated text
        #[arg(long)]
        pages: bool,
    },
    /// Write the counts, dates and commits of docs/results.json into the pages that quote them
    ///
    /// `cargo xtask test --record` records the suites that it runs.
    Results,
    /// Check the rules and points in specs/, and the file that is generated from them
    ///
    /// specs/rules.toml becomes roce/pcap/src/rule.rs. Each rule has a test, each refusal of the engine a rule or a reason, each point
    /// of specs/points.toml a rule, a test or a reason, each fault in specs/rxe-faults.md a test or a reason. All that they name exists. `lint`
    /// checks the same.
    Specs {
        /// Write the generated file before
        #[arg(long)]
        write: bool,
    },
    /// Preprocessor of mdBook, which `mdbook build` runs: links out of the book lead to the repository
    #[command(hide = true)]
    Book { args: Vec<String> },
    /// Run CI: lint and test
    ///
    /// Tests are built, and the lints and the simulator run, at the lowest priority beside the lab and the tests.
    Ci(suites::TestArgs),
    /// Run our transport against stock Debian kernels in virtual machines (`cargo xtask interop -- --help`)
    ///
    /// Needs root and Debian's package archive: the lab installs qemu and builds the RTRS and RNBD modules.
    Interop {
        /// Arguments for ferroce-interop, such as --list, --only NAME, --set ci, --json FILE
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Make the conformance kit for RDMA hardware: a tarball that needs nothing but libibverbs and librdmacm there
    ///
    /// Its instructions are docs/hardware/kit.md, README.md in it.
    Kit(kit::KitArgs),
    /// Run unmodified RDMA programs over `ferroce run`, both sides on this host (`cargo xtask apps -- --help`)
    ///
    /// Programs that are missing are installed if that is possible, else listed as not run.
    Apps {
        /// Arguments for ferroce-apps, such as --list, --only NAME, --set ci, --json FILE
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Measure speed beside that of others, in one run and in turns, and write BENCHMARKS.md
    ///
    /// Every figure has a reference that is measured in the same rounds. Figures are written to docs/bench/figures.json. Installs ucx-utils, iperf3, fio, nbdcopy and nbdkit if they
    /// are missing; parts that can't run say why.
    Bench(bench::BenchArgs),
    /// Flood a served and mapped device with forged packets for minutes, and judge whether that shows
    ///
    /// Builds the release program and `ferroce-hostile`. Both ends of a session get forged REQ, REP, DREQ, SIDR, MRA and
    /// random bytes from 1000 loopback addresses while the device is written and read. Prints a line a minute and a
    /// verdict: memory, threads, descriptors and log lines are flat, the device works, new clients get in within 2 s.
    Flood {
        /// Arguments for `ferroce-hostile soak`, such as --minutes N (default 10), --rate N, --json FILE, --help
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Serve and map devices for minutes or hours while networks are cut and lose packets and the server is killed and comes back
    ///
    /// Builds the release program and `ferroce-soak`. Needs root: everything happens in network namespaces. Prints a line a minute,
    /// a summary and a verdict: nothing that was written is lost, no request fails or hangs that must not, memory, threads and
    /// descriptors are flat.
    Soak {
        /// Arguments for `ferroce-soak`, such as --minutes N (default 10), --seed N, --help
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Install the program, the verbs library, its header and pkg-config file, and the manual pages
    ///
    /// Programs are then built with `cc program.c $(pkg-config --cflags --libs ferroce-verbs)`, or run unchanged with
    /// `ferroce run`.
    Install(install::InstallArgs),
    /// Make the packages: tarball, .deb, Python wheel and OCI image layout, with bills of materials and checksums
    ///
    /// The program is linked statically, the libraries need glibc 2.28 or later, all of the release profile, which takes some
    /// ten minutes on two processors. What is made is of this machine's architecture. `cargo xtask test --suite packages` makes
    /// the same packages of the programs under test, and installs, uses and removes each in a fresh root.
    Dist(dist::DistArgs),
    /// Generate the manual pages
    Man {
        /// Folder for the pages
        #[arg(long, default_value = "target/man")]
        dir: PathBuf,
    },
    /// Run a fuzz target, or list them
    ///
    /// With cargo-fuzz if that is installed, otherwise by the recipe in fuzz/README.md, which needs a C++ compiler. The
    /// corpora in fuzz/seeds are replayed by `cargo test -p ferroce-fuzz-targets`, for which nothing is needed.
    Fuzz(fuzz::FuzzArgs),
}

#[derive(Args, Clone)]
pub(crate) struct SimArgs {
    /// How many seeds to run
    #[arg(long, default_value_t = 200)]
    pub(crate) seeds: u64,
    /// First seed; with --seeds 1 it repeats one run exactly
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Runs at a time; default: the processors
    #[arg(long)]
    pub(crate) jobs: Option<usize>,
    /// An adversary in every run: it knows addresses and the protocol, sees nothing, and sends what it likes. Without this
    /// option a quarter of the runs have it
    #[arg(long)]
    pub(crate) adversary: bool,
    /// Somebody in every run who sees all packets and sends its own in the name of one connection
    #[arg(long, conflicts_with = "adversary")]
    pub(crate) observer: bool,
    /// Servers and clients with RTRS, RNBD and disks instead of transports alone
    #[arg(long, conflicts_with_all = ["adversary", "observer"])]
    pub(crate) storage: bool,
    /// Nodes and sockets of RDS instead of transports alone
    #[arg(long, conflicts_with_all = ["adversary", "observer", "storage"])]
    pub(crate) rds: bool,
    /// Nodes of LNet instead of transports alone
    #[arg(long, conflicts_with_all = ["adversary", "observer", "storage", "rds"])]
    pub(crate) lnet: bool,
    /// Further arguments for the simulator (see `cargo run -p roce-sim -- --help`; -p ferroce-storage-sim with --storage,
    /// -p ferroce-rds-sim with --rds, -p ferroce-lnet-sim with --lnet)
    #[arg(last = true)]
    pub(crate) rest: Vec<String>,
}

fn main() -> ExitCode {
    process::catch_signals();
    let root = cargo::workspace_root();
    if let Err(e) = std::env::set_current_dir(&root) {
        eprintln!("error: {}: {e}", root.display());
        return ExitCode::FAILURE;
    }
    let outcome = match Cli::parse().task {
        Task::Demo(args) => demo::run(&args),
        Task::Test(args) => suites::test(&args),
        Task::Sim(args) => sim::run(&args),
        Task::Book { args } => book::preprocess(&args),
        Task::Fmt => cargo::run(&["fmt", "--all"]),
        Task::Lint { pages: true } => lint::pages::check(),
        Task::Lint { pages: false } => lint::run(),
        Task::Results => results::run(),
        Task::Specs { write } => specs::run(write),
        Task::Ci(args) => suites::ci(&args),
        Task::Interop { args } => interop::run(&args),
        Task::Kit(args) => kit::run(&args),
        Task::Apps { args } => apps::run(&args),
        Task::Bench(task) => bench::run(&task),
        Task::Flood { args } => long::FLOOD.run(&args),
        Task::Soak { args } => long::SOAK.run(&args),
        Task::Install(args) => install::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::Man { dir } => man(&dir),
        Task::Fuzz(args) => fuzz::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if process::interrupted() => {
            eprintln!("interrupted");
            ExitCode::from(130)
        }
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::FAILURE
        }
    }
}

fn man(dir: &std::path::Path) -> Result<()> {
    let ferroce = cargo::build("ferroce", "ferroce", cargo::Profile::Dev)?;
    process::run("ferroce man", std::process::Command::new(&ferroce).arg("man").arg(dir))?;
    println!("manual pages are in {}", dir.display());
    Ok(())
}
