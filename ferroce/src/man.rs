//! Manual pages from the command line's definition.

use std::{fs, path::PathBuf};

use clap::Args;

use crate::output::{self, Failure};

#[derive(Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages; made if missing
    dir: PathBuf,
}

/// Writes one page per command.
pub(crate) fn run(args: &ManArgs, command: clap::Command) -> Result<(), Failure> {
    let fail = |e: std::io::Error| Failure::failed(format!("{}: {e}", args.dir.display()));
    fs::create_dir_all(&args.dir).map_err(fail)?;
    clap_mangen::generate_to(command, &args.dir).map_err(fail)?;
    output::line(&format!("manual pages written to {}", args.dir.display()))
}
