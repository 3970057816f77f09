//! Long tests that are programs of their own, `cargo xtask flood` and `cargo xtask soak`: builds them, and hands over.

use std::{ffi::OsString, process::Command};

use crate::{
    Result,
    cargo::{self, Built, Profile},
    process,
    tally::Tally,
    tools,
};

/// Such a test.
#[derive(Clone, Copy)]
pub(crate) struct Long {
    program: &'static str,
    args: &'static [&'static str],
    /// Whether it makes namespaces.
    namespaces: bool,
}

/// A device under forged packets.
pub(crate) const FLOOD: Long = Long {
    program: "ferroce-hostile",
    args: &["soak"],
    namespaces: false,
};

/// Devices under cuts, loss and restarts.
pub(crate) const SOAK: Long = Long {
    program: "ferroce-soak",
    args: &[],
    namespaces: true,
};

impl Long {
    fn command(self, built: &Built) -> Result<Command> {
        let mut command = Command::new(built.program(self.program)?);
        command.args(self.args).env("FERROCE_BIN", built.program("ferroce")?);
        Ok(command)
    }

    /// Runs it with these arguments; its exit status is ours.
    pub(crate) fn run(self, args: &[OsString]) -> Result<()> {
        let built = cargo::build_programs(Profile::Release)?;
        process::hand_over(self.program, self.command(&built)?.args(args))
    }

    /// As a suite: as long as it takes by itself.
    pub(crate) fn suite(self, built: &Built) -> Result<Tally> {
        if self.namespaces && !tools::may_make_namespaces() {
            return Ok(Tally::not_run(tools::NO_NAMESPACES.to_owned()));
        }
        let mut tally = Tally::default();
        tally.expect(process::run(self.program, &mut self.command(built)?));
        Ok(tally)
    }
}
