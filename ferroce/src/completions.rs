//! Completions of the command line for shells.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::output::{self, Failure};

#[derive(Args)]
#[command(after_help = "\
Examples:
  ferroce completions bash > ~/.local/share/bash-completion/completions/ferroce
  ferroce completions zsh > ~/.zfunc/_ferroce
  ferroce completions fish > ~/.config/fish/completions/ferroce.fish

Packages have installed them already.")]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Prints the shell's script.
pub(crate) fn run(args: &CompletionsArgs, mut command: Command) -> Result<(), Failure> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    output::text(&String::from_utf8_lossy(&script))
}
