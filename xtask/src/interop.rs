//! `cargo xtask interop`: builds our programs and hands over to the lab.

use std::{ffi::OsString, fs, path::PathBuf};

use crate::{
    Result,
    cargo::{self, Profile},
    process,
    suites::Tally,
};

/// Builds everything that the lab runs; returns its own program.
fn build() -> Result<PathBuf> {
    cargo::build("ferroce", "ferroce", Profile::Release)?;
    cargo::run(&["build", "--release", "-p", "verbs-shim"])?;
    cargo::build("ferroce-interop", "ferroce-lab", Profile::Release)?;
    cargo::build("ferroce-hostile", "ferroce-hostile", Profile::Release)?;
    cargo::build("ferroce-interop", "ferroce-interop", Profile::Release)
}

/// Runs `ferroce-interop` with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let mut command = std::process::Command::new(build()?);
    command.args(args);
    process::hand_over("ferroce-interop", &mut command)
}

/// The suite `interop`: a set of the scenarios.
pub(crate) fn suite(set: &str) -> Result<Tally> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(Tally::not_run(
            "the lab needs root: namespaces, taps, packages".to_owned(),
        ));
    }
    let mut command = std::process::Command::new(build()?);
    let json = cargo::target_dir()?.join(format!("interop-{set}.json"));
    let _ = fs::remove_file(&json);
    command.args(["--set", set, "--json"]).arg(&json);
    let status = process::Guard::spawn("ferroce-interop", &mut command)?.wait()?;
    Tally::from_json(&json).map_err(|e| format!("interop ended with {status}: {e}"))
}
