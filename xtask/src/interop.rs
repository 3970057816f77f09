//! `cargo xtask interop`: builds our programs and hands over to the lab.

use std::ffi::OsString;

use crate::{
    Result,
    cargo::{self, Profile},
    process,
};

/// Runs `ferroce-interop` with these arguments.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    cargo::build("ferroce", "ferroce", Profile::Release)?;
    cargo::build("ferroce-interop", "ferroce-lab", Profile::Release)?;
    let bin = cargo::build("ferroce-interop", "ferroce-interop", Profile::Release)?;
    let mut command = std::process::Command::new(bin);
    command.args(args);
    let status = process::Guard::spawn("ferroce-interop", &mut command)?.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("interop ended with {status}"))
    }
}
