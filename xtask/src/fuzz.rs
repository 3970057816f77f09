//! Fuzz targets: with cargo-fuzz where it is, else by building them for libFuzzer ourselves.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use clap::Args;

use crate::{Result, cargo, files, process};

const DIR: &str = "fuzz/fuzz_targets";
const MANIFEST: &str = "fuzz/Cargo.toml";
/// Flags that make the compiler put libFuzzer's counters into the code (see fuzz/README.md).
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                        -Cllvm-args=-sanitizer-coverage-pc-table \
                        -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";
/// Limits of what `--keep` keeps of a corpus: `tests/fuzz` refuses more.
const MAX_FILES: usize = 100;
const MAX_BYTES: u64 = 200 << 10;

#[derive(Args)]
pub(crate) struct FuzzArgs {
    /// The target; without it all are run one after another
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Afterwards put the smallest inputs that reach all that was reached into fuzz/seeds
    #[arg(long)]
    keep: bool,
    /// List the targets and stop
    #[arg(long)]
    list: bool,
}

/// How targets are built and run.
enum Way {
    /// cargo-fuzz on a nightly toolchain.
    Nightly,
    /// cargo-fuzz on the stable toolchain, which is told to allow what cargo-fuzz asks for.
    Stable,
    /// Without cargo-fuzz.
    Plain,
}

pub(crate) fn run(args: &FuzzArgs) -> Result<()> {
    let targets = targets()?;
    if args.list {
        println!("{}", targets.join("\n"));
        return Ok(());
    }
    let chosen: Vec<&String> = targets
        .iter()
        .filter(|t| args.target.as_ref().is_none_or(|n| n == *t))
        .collect();
    if chosen.is_empty() {
        let name = args.target.as_deref().unwrap_or_default();
        return Err(format!("no fuzz target {name}; there are: {}", targets.join(", ")));
    }
    let way = way();
    for name in chosen {
        let (corpus, seeds) = (folder("corpus", name)?, folder("seeds", name)?);
        let limit = format!("-max_total_time={}", args.seconds);
        fuzzer(&way, name, &[&corpus, &seeds], &[&limit])?;
        if args.keep {
            keep(&way, name, &corpus, &seeds)?;
        }
    }
    Ok(())
}

/// Checks that each target only hands its input to the function of its name in `tests/fuzz`, which the workspace compiles and replays,
/// that it is in the manifest, and that the lock file fits.
pub(crate) fn check() -> Result<()> {
    let args = [
        "metadata",
        "--locked",
        "--format-version=1",
        "--manifest-path",
        MANIFEST,
    ];
    process::capture("cargo metadata of fuzz/", cargo::command().args(args))?;
    let manifest = files::text(MANIFEST.as_ref())?;
    for name in targets()? {
        let path = format!("{DIR}/{name}.rs");
        let body = format!("libfuzzer_sys::fuzz_target!(|data: &[u8]| ferroce_fuzz_targets::{name}::run(data));\n");
        let whole = format!("//! See `ferroce_fuzz_targets::{name}`.\n#![no_main]\n{body}");
        if files::text(path.as_ref())? != whole {
            return Err(format!("{path}: is not\n{whole}"));
        }
        if !manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")) {
            return Err(format!("{path}: is not in {MANIFEST}"));
        }
    }
    Ok(())
}

/// The names of all targets.
fn targets() -> Result<Vec<String>> {
    let entries = fs::read_dir(DIR).map_err(|e| format!("{DIR}: {e}"))?;
    let mut names: Vec<String> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "rs"))
        .filter_map(|p| Some(p.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

fn folder(kind: &str, name: &str) -> Result<PathBuf> {
    let dir = std::env::current_dir().map_err(|e| e.to_string())?;
    let dir = dir.join("fuzz").join(kind).join(name);
    fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    Ok(dir)
}

/// Set by the cargo that started us; rustup's proxies must not inherit it.
fn rustup(args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(args).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    command
}

fn way() -> Way {
    let have = |args: &[&str]| {
        let mut command = rustup(args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|s| s.success())
    };
    match (have(&["fuzz", "--version"]), have(&["+nightly", "--version"])) {
        (true, true) => Way::Nightly,
        (true, false) => Way::Stable,
        (false, _) => Way::Plain,
    }
}

/// Runs libFuzzer's program of a target in fuzz/, where it leaves inputs that made it fail.
fn fuzzer(way: &Way, name: &str, dirs: &[&Path], args: &[&str]) -> Result<()> {
    let mut command = match way {
        Way::Nightly => rustup(&["+nightly", "fuzz", "run", name]),
        Way::Stable => rustup(&["fuzz", "run", name]),
        Way::Plain => Command::new(build(name)?),
    };
    if matches!(way, Way::Stable) {
        command.env("RUSTC_BOOTSTRAP", "1");
    }
    command.args(dirs);
    if !matches!(way, Way::Plain) {
        command.arg("--");
    }
    let artifacts = folder("artifacts", name)?;
    command
        .args(args)
        .arg(format!("-artifact_prefix={}/", artifacts.display()));
    // Large buffers come from the kernel as zeros each time; otherwise glibc soon clears them itself, which takes most of the time.
    command.env("MALLOC_MMAP_THRESHOLD_", "1000000");
    println!("+ fuzz target {name}: {}", args.join(" "));
    let ran = process::run(&format!("fuzz target {name}"), &mut command);
    ran.map_err(|e| format!("{e}; its input is in {}", artifacts.display()))
}

/// Builds a target without cargo-fuzz: any toolchain will do, and a C++ compiler for libFuzzer.
fn build(name: &str) -> Result<PathBuf> {
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let args = [
        "build",
        "--release",
        "--target",
        &triple,
        "--manifest-path",
        MANIFEST,
        "--bin",
        name,
    ];
    cargo::run_with(&args, &[("RUSTFLAGS", COVERAGE), ("CARGO_TARGET_DIR", "fuzz/target")])?;
    let dir = std::env::current_dir().map_err(|e| e.to_string())?;
    Ok(dir.join("fuzz/target").join(&triple).join("release").join(name))
}

/// Replaces the seeds by the smallest inputs that together reach every edge, as far as they are not too many.
fn keep(way: &Way, name: &str, corpus: &Path, seeds: &Path) -> Result<()> {
    let merged = folder("merged", name)?;
    let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    fs::remove_dir_all(&merged).map_err(|e| failed(&merged, e))?;
    let merged = folder("merged", name)?;
    fuzzer(
        way,
        name,
        &[&merged, seeds, corpus],
        &["-merge=1", "-use_counters=0", "-use_cmp=0"],
    )?;
    let entries = fs::read_dir(&merged).map_err(|e| failed(&merged, e))?;
    let mut files: Vec<(u64, PathBuf)> = entries
        .filter_map(|e| e.ok())
        .filter_map(|e| Some((e.metadata().ok()?.len(), e.path())))
        .collect();
    files.sort();
    fs::remove_dir_all(seeds).map_err(|e| failed(seeds, e))?;
    let seeds = folder("seeds", name)?;
    // If they are too many: some of every size, the large ones first, which reach more each.
    let step = files.len().div_ceil(MAX_FILES).max(1);
    let (mut count, mut bytes) = (0, 0);
    for (len, file) in files.iter().rev().step_by(step) {
        if bytes + len > MAX_BYTES {
            continue;
        }
        let to = seeds.join(file.file_name().unwrap_or_default());
        fs::copy(file, &to).map_err(|e| failed(&to, e))?;
        (count, bytes) = (count + 1, bytes + len);
    }
    println!("{name}: {count} of {} inputs kept, {bytes} bytes", files.len());
    fs::remove_dir_all(&merged).map_err(|e| failed(&merged, e))
}
