//! Calls of cargo.

use std::{
    collections::BTreeMap,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use serde_json::Value;

use crate::{Result, process, test_program::TestProgram, tools};

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

/// Returns cargo's folder of output.
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
    let line = format!("cargo {}", args.join(" "));
    println!("+ {line}");
    process::run(&line, command().args(&args).envs(env.iter().copied()))
}

/// Result of one build of the whole workspace. With all of its packages at once the dependencies have the same features in
/// every build, so that nothing is compiled again for another selection of them.
pub(crate) struct Built {
    programs: BTreeMap<String, PathBuf>,
    pub(crate) tests: Vec<TestProgram>,
    /// Warnings of the compiler, or clippy, in our crates.
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
    let _ = CLIPPY.set(clippy_driver()?);
    Ok(())
}

/// Returns the compiler that is clippy.
pub(crate) fn clippy_driver() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").map(PathBuf::from);
    let driver = cargo
        .and_then(|c| Some(c.parent()?.join("clippy-driver")))
        .filter(|d| d.is_file());
    driver.ok_or_else(|| "clippy is not installed (rustup component add clippy)".into())
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

/// Features of a build of the published packages with everything that is over libibverbs and librdmacm.
pub(crate) const HARDWARE: [&str; 2] = ["--features", "ferroce/hardware"];

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

/// The version of the workspace.
pub(crate) fn version() -> Result<String> {
    package("ferroce").map(|package| text(&package, "version"))
}

/// All packages that the workspace is made of, those of others too.
pub(crate) fn dependencies() -> Result<Vec<Value>> {
    let mut metadata = command();
    let out = process::capture(
        "cargo metadata",
        metadata.args(["metadata", "--locked", "--format-version=1"]),
    )?;
    packages_in(serde_json::from_slice(&out.stdout).map_err(|e| format!("cargo metadata: {e}"))?)
}

/// The packages of the workspace.
fn own_packages() -> Result<Vec<Value>> {
    packages_in(metadata()?)
}

/// The manifest of a package of the workspace.
pub(crate) fn package(name: &str) -> Result<Value> {
    let found = own_packages()?.into_iter().find(|package| package["name"] == name);
    found.ok_or_else(|| format!("no package {name}"))
}

/// The packages of the workspace that crates.io may have.
pub(crate) fn published() -> Result<Vec<String>> {
    let packages = own_packages()?;
    let published = packages.iter().filter(|package| package["publish"].is_null());
    Ok(published.map(|package| text(package, "name")).collect())
}

/// The folders of the workspace's packages.
pub(crate) fn folders() -> Result<Vec<PathBuf>> {
    let manifests = own_packages()?.into_iter().map(|p| text(&p, "manifest_path"));
    Ok(manifests.map(|file| Path::new(&file).with_file_name("")).collect())
}

/// The packages of the workspace by their manifests.
fn package_names() -> Result<BTreeMap<String, String>> {
    let packages = own_packages()?;
    let named = packages.iter().map(|p| (text(p, "manifest_path"), text(p, "name")));
    Ok(named.collect())
}

fn packages_in(mut metadata: Value) -> Result<Vec<Value>> {
    match metadata["packages"].take() {
        Value::Array(packages) => Ok(packages),
        _ => Err("cargo metadata has no packages".into()),
    }
}

fn text(package: &Value, key: &str) -> String {
    package[key].as_str().unwrap_or_default().to_owned()
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

/// Builds `ferroce-ublk`, which is outside the workspace.
pub(crate) fn build_ublk() -> Result<PathBuf> {
    let target = target_dir()?;
    let target = target.to_str().ok_or("the target folder's path isn't UTF-8")?;
    executable(
        &[
            "--release",
            "--manifest-path",
            "tests/ublk/Cargo.toml",
            "--target-dir",
            target,
        ],
        "ferroce-ublk",
    )
}

fn executable(args: &[&str], bin: &str) -> Result<PathBuf> {
    artifacts(args)?
        .iter()
        .filter(|a| a["target"]["name"] == bin)
        .find_map(|a| a["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo named no executable {bin}"))
}

/// Builds programs that load nothing, optimized: packages and names.
pub(crate) fn build_static(programs: &[(&str, &str)]) -> Result<Vec<PathBuf>> {
    // Build scripts and macros are not for the target, which is named for that alone, and can't be static.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let folder = target_dir()?.join("static");
    let mut command = compiling();
    command.args(["build", "--locked", "--release", "--target", &target, "--target-dir"]);
    command.arg(&folder).env("RUSTFLAGS", "-C target-feature=+crt-static");
    for (package, program) in programs {
        command.args(["-p", package, "--bin", program]);
    }
    println!("+ cargo build --release (static)");
    process::run("cargo build", &mut command)?;
    let built = folder.join(&target).join("release");
    Ok(programs.iter().map(|(_, program)| built.join(program)).collect())
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

/// Returns the path of a subcommand of cargo. It is built if it is missing, and stays in cargo's folder of programs.
pub(crate) fn installed(name: &str, version: &str) -> Result<PathBuf> {
    if let Some(found) = subcommand(name, version) {
        return Ok(found);
    }
    println!("building {name} {version}: some two minutes on two processors, once");
    // Quick to build rather than quick: it runs for seconds.
    let args = ["--version", version, "--locked", "--debug"];
    let mut install = command();
    install.args(["install", name]).args(args).args(["--force", "--quiet"]);
    install.env("CARGO_PROFILE_DEV_DEBUG", "0");
    process::run(&format!("cargo install {name}"), &mut install)?;
    subcommand(name, version).ok_or_else(|| format!("cargo install {name}: version {version} is not there"))
}

pub(crate) fn subcommand(name: &str, version: &str) -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let own = home.map(|home| home.join("bin").join(name)).filter(|p| p.is_file());
    // Some want the word that cargo passes, some don't.
    let word = name.trim_start_matches("cargo-");
    let says = |program: &PathBuf, args: &[&str]| {
        let out = Command::new(program).args(args).stderr(Stdio::null()).output();
        out.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).split_whitespace().nth(1) == Some(version))
    };
    let fits = |program: &PathBuf| says(program, &["--version"]) || says(program, &[word, "--version"]);
    own.into_iter().chain(tools::find(name)).find(fits)
}
