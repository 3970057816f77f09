//! `cargo xtask interop`: builds our programs and hands over to the lab.

use std::{ffi::OsString, process::Command};

use crate::{
    Result,
    cargo::{self, Built, Profile},
    process,
    tally::Tally,
};

/// Runs `ferroce-interop` with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let built = cargo::build_programs(Profile::Release)?;
    let mut command = Command::new(built.program("ferroce-interop")?);
    process::hand_over("ferroce-interop", command.args(args))
}

/// The suite `interop`: a set of the scenarios. What else the lab runs is beside its program.
pub(crate) fn suite(built: &Built, set: &str) -> Result<Tally> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(Tally::not_run(
            "the lab needs root: namespaces, taps, packages".to_owned(),
        ));
    }
    let mut command = Command::new(built.program("ferroce-interop")?);
    command.args(["--set", set]);
    Tally::of_program("ferroce-interop", &mut command, &format!("interop-{set}.json"))
}
