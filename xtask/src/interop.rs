//! `cargo xtask interop`: builds our programs and hands over to the lab.

use std::{
    ffi::OsString,
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use crate::{
    Result,
    cargo::{self, Built, Profile},
    kit, process,
    tally::Tally,
    tools,
};

/// Runs `ferroce-interop` with these arguments; its exit status is ours.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    // A scenario that lacks them says so.
    let _ = tools::ensure(&tools::of_hardware());
    let built = cargo::build_programs(Profile::Release)?;
    let mut command = Command::new(built.program("ferroce-interop")?);
    command.args(args);
    let words: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
    let words: Vec<&str> = words.iter().map(|word| word.as_ref()).collect();
    EXTRAS
        .iter()
        .filter(|extra| extra.is_wanted(&words))
        .for_each(|extra| extra.add(&mut command));
    process::hand_over("ferroce-interop", &mut command)
}

/// File that one scenario needs, and says that there is none where it can't be made.
struct Extra {
    scenario: &'static str,
    option: &'static str,
    what: &'static str,
    make: fn() -> Result<PathBuf>,
}

const EXTRAS: [Extra; 2] = [
    Extra {
        scenario: "hardware-kit",
        option: "--kit",
        what: "conformance kit",
        make: || kit::make(None),
    },
    Extra {
        scenario: "attach-speed",
        option: "--ublk",
        what: "program for ublk",
        make: cargo::build_ublk,
    },
];

impl Extra {
    /// Whether its scenario is among what runs with these arguments, and they don't give the file.
    fn is_wanted(&self, args: &[&str]) -> bool {
        let has = |option: &str| args.iter().any(|arg| arg.split('=').next() == Some(option));
        let else_wise = [
            self.option,
            "--peer",
            "--peer-script",
            "--list",
            "--from",
            "--help",
            "-h",
            "--version",
            "capture",
            "speed",
            "ci",
        ];
        let value = |n: usize| {
            args[n]
                .strip_prefix("--only=")
                .or_else(|| (n > 0 && args[n - 1] == "--only").then_some(args[n]))
        };
        let named = (0..args.len())
            .filter_map(value)
            .any(|name| self.scenario.contains(name));
        !else_wise.into_iter().any(has) && !args.contains(&"--set=ci") && (named || !has("--only"))
    }

    /// Makes it, and passes it on.
    fn add(&self, command: &mut Command) {
        match (self.make)() {
            Ok(file) => drop(command.arg(self.option).arg(file)),
            Err(e) => eprintln!("no {}: {e}", self.what),
        }
    }
}

/// Prepares the lab's folder, where `ferroce-interop` looks for it, while something else is done. What goes wrong is told by the
/// suite, which tries again.
pub(crate) fn prepare(set: &str) -> Result<()> {
    if !is_root() {
        return Ok(());
    }
    let folder = Path::new("target/lab");
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut command = process::command("flock");
    // Where another run uses the folder there is nothing to prepare.
    command.args(["--nonblock", "--no-fork"]).arg(folder.join("lock"));
    command.args(["bash", "tests/interop/lab/setup.sh"]).arg(folder);
    // As `ferroce-interop` does where it is not told which.
    command.arg(if set == "full" { "6.1,6.12,7.3" } else { "6.1" });
    // A package manager must not be interrupted: ctrl-C of a terminal goes to us alone, and the script ends after its step.
    let mut child = command
        .process_group(0)
        .stdin(Stdio::null())
        .spawn()
        .map_err(|e| format!("flock: {e}"))?;
    let mut told = false;
    while child.try_wait().map_err(|e| format!("flock: {e}"))?.is_none() {
        if process::interrupted() && !told {
            told = true;
            process::terminate(child.id());
        }
        thread::sleep(Duration::from_millis(20));
    }
    process::check_interrupt()
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The suite `interop`: a set of the scenarios. What else the lab runs is beside its program.
pub(crate) fn suite(built: &Built, set: &str) -> Result<Tally> {
    if !is_root() {
        return Ok(Tally::not_run(
            "the lab needs root: namespaces, taps, packages".to_owned(),
        ));
    }
    let mut command = Command::new(built.program("ferroce-interop")?);
    command.args(["--set", set]);
    if set == "full" {
        EXTRAS.iter().for_each(|extra| extra.add(&mut command));
    }
    Tally::of_program("ferroce-interop", &mut command, &format!("interop-{set}.json"))
}

#[cfg(test)]
mod tests {
    use super::EXTRAS;

    #[test]
    fn a_kit_is_made_for_the_scenario_that_tries_it() {
        let [kit, ublk] = &EXTRAS;
        for with in [
            &[][..],
            &["--set", "full"],
            &["--only", "kit"],
            &["--only=rping", "--only", "hardware-kit"],
        ] {
            assert!(kit.is_wanted(with), "{with:?}");
        }
        for without in [
            &["--list"][..],
            &["--set", "ci"],
            &["--set=ci"],
            &["--only", "rping"],
            &["--peer", "h"],
            &["--kit=f"],
            &["capture"],
            &["speed"],
        ] {
            assert!(!kit.is_wanted(without), "{without:?}");
        }
        assert!(ublk.is_wanted(&["--kernel", "6.12", "--only", "attach-speed"]));
        assert!(!ublk.is_wanted(&["--only", "kit"]));
    }
}
