//! `cargo xtask flood`: builds the program and its attacker, and hands over to `ferroce-hostile soak`.

use std::ffi::OsString;

use crate::{
    Result,
    cargo::{self, Profile},
    process,
};

/// Runs the soak test with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let ferroce = cargo::build("ferroce", "ferroce", Profile::Release)?;
    let hostile = cargo::build("ferroce-hostile", "ferroce-hostile", Profile::Release)?;
    let mut command = std::process::Command::new(hostile);
    command.arg("soak").args(args).env("FERROCE_BIN", ferroce);
    process::hand_over("ferroce-hostile", &mut command)
}
