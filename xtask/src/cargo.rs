//! Calls of cargo.

use std::{
    collections::BTreeMap,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use serde_json::Value;

use crate::{Result, harness::TestProgram, process, tools};

/// Which build.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    Dev,
    Release,
    /// As fast as release to within some percent, built in a fraction of its time.
    Demo,
}

impl Profile {
    pub(crate) const fn args(self) -> &'static [&'static str] {
        match self {
            Self::Dev => &[],
            Self::Release => &["--release"],
            Self::Demo => &["--profile", "demo"],
        }
    }
}

/// The folder of the workspace's Cargo.toml.
pub(crate) fn workspace_root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// A cargo command in the workspace.
pub(crate) fn command() -> Command {
    process::command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

fn metadata() -> Result<Value> {
    let out = command()
        .args(["metadata", "--locked", "--no-deps", "--format-version=1"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    serde_json::from_slice(&out.stdout).map_err(|e| format!("cargo metadata printed no JSON: {e}"))
}

/// Where cargo puts its output.
pub(crate) fn target_dir() -> Result<PathBuf> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let metadata = metadata()?;
    let found = metadata["target_directory"]
        .as_str()
        .ok_or("cargo metadata has no target_directory")?;
    Ok(FOUND.get_or_init(|| found.into()).clone())
}

/// Runs cargo with these arguments to its end, its output going to ours. The lock file is never changed.
pub(crate) fn run(args: &[&str]) -> Result<()> {
    run_with(args, &[])
}

/// Like [`run`], with environment variables.
pub(crate) fn run_with(args: &[&str], env: &[(&str, &str)]) -> Result<()> {
    let (task, rest) = args.split_first().ok_or("cargo without a task")?;
    // Formatting resolves no dependencies.
    let locked = (*task != "fmt").then_some("--locked");
    let args: Vec<&str> = core::iter::once(*task)
        .chain(locked)
        .chain(rest.iter().copied())
        .collect();
    println!("+ cargo {}", args.join(" "));
    let mut command = command();
    command.args(&args).envs(env.iter().copied());
    let status = process::Guard::spawn("cargo", &mut command)?.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("cargo {} ended with {status}", args.join(" ")))
    }
}

/// What one build of the whole workspace made. With all of its packages at once the dependencies have the same features in
/// every build, so that nothing is compiled again for another selection of them.
pub(crate) struct Built {
    programs: BTreeMap<String, PathBuf>,
    pub(crate) tests: Vec<TestProgram>,
    /// What the compiler, or clippy, has warned of in our crates.
    pub(crate) warnings: usize,
}

impl Built {
    /// The path of a program.
    pub(crate) fn program(&self, name: &str) -> Result<&Path> {
        let found = self.programs.get(name).map(PathBuf::as_path);
        found.ok_or_else(|| format!("cargo named no executable {name}"))
    }
}

/// From now on clippy compiles our crates in all builds (not with `cargo xtask lint`), so that it needs none of its own.
pub(crate) fn compile_with_clippy() -> Result<()> {
    let cargo = std::env::var_os("CARGO").map(PathBuf::from);
    let driver = cargo
        .and_then(|c| Some(c.parent()?.join("clippy-driver")))
        .filter(|d| d.is_file());
    let driver = driver.ok_or("clippy is not installed (rustup component add clippy)")?;
    let _ = CLIPPY.set(driver);
    Ok(())
}

static CLIPPY: OnceLock<PathBuf> = OnceLock::new();

/// A cargo command that compiles our crates, in the way that all of them have in common.
pub(crate) fn compiling() -> Command {
    let mut command = command();
    if let Some(driver) = CLIPPY.get() {
        command.env("RUSTC_WORKSPACE_WRAPPER", driver);
    }
    command
}

/// Builds all libraries and programs of the workspace. In the dev profile one test is among them: without any, the features of
/// dev-dependencies would be left out, and much be compiled again for [`build_tests`].
pub(crate) fn build_programs(profile: Profile) -> Result<Built> {
    let what: &[&str] = match profile {
        Profile::Dev => &["--lib", "--bins", "--test", "cleanup"],
        Profile::Release | Profile::Demo => &["--lib", "--bins"],
    };
    build_workspace(&[profile.args(), what, with_contract()].concat())
}

/// Builds all libraries, programs, tests, examples and benchmarks of the workspace.
pub(crate) fn build_tests() -> Result<Built> {
    build_workspace(&[&["--all-targets"], with_contract()].concat())
}

/// Features of all builds: the provider contract is with roce-hw, if that can be built. Our program is not: it has to run where
/// neither libibverbs nor librdmacm is.
pub(crate) fn with_contract() -> &'static [&'static str] {
    match tools::may_build_hardware() {
        Ok(()) => &["--features", "ferroce-contract/hardware"],
        Err(_) => &[],
    }
}

/// Features of a build with everything that is over libibverbs and librdmacm.
pub(crate) const HARDWARE: [&str; 2] = ["--features", "ferroce/hardware,ferroce-contract/hardware"];

fn build_workspace(what: &[&str]) -> Result<Built> {
    let packages = package_names()?;
    let args = [&["--workspace"], what].concat();
    let mut built = Built {
        programs: BTreeMap::new(),
        tests: Vec::new(),
        warnings: 0,
    };
    for artifact in artifacts(&args)? {
        // Dependencies' warnings are not shown.
        if artifact["reason"] == "compiler-message" {
            built.warnings += 1;
        }
        let (Some(path), Some(target), Some(manifest)) = (
            artifact["executable"].as_str(),
            artifact["target"]["name"].as_str(),
            artifact["manifest_path"].as_str(),
        ) else {
            continue;
        };
        let kind = artifact["target"]["kind"][0].as_str().unwrap_or_default();
        if artifact["profile"]["test"] == true {
            let package = packages
                .get(manifest)
                .ok_or_else(|| format!("{manifest}: no package of ours"))?;
            built.tests.push(TestProgram {
                package: package.clone(),
                target: if kind == "test" {
                    target.to_owned()
                } else {
                    format!("{target} ({kind})")
                },
                dir: Path::new(manifest).parent().map(Path::to_path_buf).unwrap_or_default(),
                path: path.into(),
            });
        } else if kind == "bin" {
            built.programs.insert(target.to_owned(), path.into());
        }
    }
    // Cargo names them as they are done.
    built
        .tests
        .sort_by(|a, b| (&a.package, &a.target).cmp(&(&b.package, &b.target)));
    Ok(built)
}

/// The packages of the workspace by their manifests.
fn package_names() -> Result<BTreeMap<String, String>> {
    let packages = metadata()?["packages"].take();
    let packages = packages.as_array().ok_or("cargo metadata has no packages")?;
    let text = |p: &Value, key: &str| p[key].as_str().unwrap_or_default().to_owned();
    Ok(packages
        .iter()
        .map(|p| (text(p, "manifest_path"), text(p, "name")))
        .collect())
}

/// Builds one executable and returns its path.
pub(crate) fn build(package: &str, bin: &str, profile: Profile) -> Result<PathBuf> {
    executable(&[&["-p", package, "--bin", bin], profile.args()].concat(), bin)
}

/// Builds what users get, the program and the verbs libraries beside it, and returns the program's path.
pub(crate) fn build_product(profile: Profile) -> Result<PathBuf> {
    executable(
        &[&["-p", "ferroce", "-p", "verbs-shim"], profile.args()].concat(),
        "ferroce",
    )
}

fn executable(args: &[&str], bin: &str) -> Result<PathBuf> {
    artifacts(args)?
        .iter()
        .filter(|a| a["target"]["name"] == bin)
        .find_map(|a| a["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo named no executable {bin}"))
}

/// Builds, and returns what cargo says of each artifact, and what the compiler says, which is also shown.
fn artifacts(args: &[&str]) -> Result<Vec<Value>> {
    let mut command = compiling();
    let format = match std::io::stderr().is_terminal() {
        true => "--message-format=json-diagnostic-rendered-ansi",
        false => "--message-format=json",
    };
    command
        .args(["build", "--locked", format])
        .args(args)
        .stdout(Stdio::piped());
    println!("+ cargo build --locked {}", args.join(" "));
    let mut child = process::Guard::spawn("cargo build", &mut command)?;
    let mut found = Vec::new();
    let status = child.for_each_line(|line| {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            return;
        };
        if let Some(text) = message["message"]["rendered"].as_str() {
            eprint!("{text}");
        }
        if message["reason"] == "compiler-artifact" || message["reason"] == "compiler-message" {
            found.push(message);
        }
    })?;
    match status.success() {
        true => Ok(found),
        false => Err(format!("cargo build {} failed ({status})", args.join(" "))),
    }
}
