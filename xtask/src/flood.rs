//! `cargo xtask flood`: builds the program and its attacker, and hands over to `ferroce-hostile soak`.

use std::{ffi::OsString, process::Command};

use crate::{
    Result,
    cargo::{self, Built, Profile},
    process,
    tally::Tally,
};

fn command(built: &Built) -> Result<Command> {
    let mut command = Command::new(built.program("ferroce-hostile")?);
    command.arg("soak").env("FERROCE_BIN", built.program("ferroce")?);
    Ok(command)
}

/// Runs the soak test with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let built = cargo::build_programs(Profile::Release)?;
    process::hand_over("ferroce-hostile", command(&built)?.args(args))
}

/// The suite `flood`: as long as `cargo xtask flood` takes.
pub(crate) fn suite(built: &Built) -> Result<Tally> {
    let status = process::Guard::spawn("ferroce-hostile", &mut command(built)?)?.wait()?;
    let mut tally = Tally::default();
    match status.success() {
        true => tally.passed = 1,
        false => tally.fail(format!("ferroce-hostile soak ended with {status}")),
    }
    Ok(tally)
}
