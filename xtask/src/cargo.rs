//! Calls of cargo.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{Result, process};

/// Which build.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    Dev,
    Release,
}

impl Profile {
    pub(crate) const fn args(self) -> &'static [&'static str] {
        match self {
            Self::Dev => &[],
            Self::Release => &["--release"],
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
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Where cargo puts its output.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let out = command()
        .args(["metadata", "--locked", "--no-deps", "--format-version=1"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    let json: serde_json::Value =
        serde_json::from_slice(&out.stdout).map_err(|e| format!("cargo metadata printed no JSON: {e}"))?;
    json["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| "cargo metadata has no target_directory".into())
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

/// Builds one executable and returns its path.
pub(crate) fn build(package: &str, bin: &str, profile: Profile) -> Result<PathBuf> {
    let mut command = command();
    command
        .args([
            "build",
            "--locked",
            "--message-format=json-render-diagnostics",
            "-p",
            package,
            "--bin",
            bin,
        ])
        .args(profile.args())
        .stdout(Stdio::piped());
    println!(
        "+ cargo build --locked -p {package} --bin {bin} {}",
        profile.args().join(" ")
    );
    let mut child = process::Guard::spawn("cargo build", &mut command)?;
    let mut found = None;
    let status = child.for_each_line(|line| {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            return;
        };
        if message["reason"] == "compiler-artifact"
            && message["target"]["name"] == bin
            && let Some(path) = message["executable"].as_str()
        {
            found = Some(PathBuf::from(path));
        }
    })?;
    if !status.success() {
        return Err(format!("building {bin} failed ({status})"));
    }
    found.ok_or_else(|| format!("cargo named no executable {bin}"))
}
