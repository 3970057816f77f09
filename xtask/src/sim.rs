//! The simulators: `cargo xtask sim`, and the suite `sim`.

use std::{
    hash::{BuildHasher as _, RandomState},
    path::Path,
    process::Stdio,
};

use crate::{
    Result, SimArgs,
    cargo::{self, Profile},
    process,
    tally::Tally,
};

/// Simulators, each with a program of its own, which is named after its package.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Simulator {
    /// Transports alone.
    #[default]
    Transport,
    /// RTRS, RNBD and disks.
    Storage,
    /// Nodes and sockets of RDS.
    Rds,
    /// Nodes of LNet.
    Lnet,
}

impl Simulator {
    pub(crate) const ALL: [Self; 4] = [Self::Transport, Self::Storage, Self::Rds, Self::Lnet];

    fn of(args: &SimArgs) -> Self {
        match (args.storage, args.rds, args.lnet) {
            (true, ..) => Self::Storage,
            (_, true, _) => Self::Rds,
            (.., true) => Self::Lnet,
            _ => Self::Transport,
        }
    }

    /// Name of the program.
    pub(crate) const fn program(self) -> &'static str {
        match self {
            Self::Transport => "roce-sim",
            Self::Storage => "ferroce-storage-sim",
            Self::Rds => "ferroce-rds-sim",
            Self::Lnet => "ferroce-lnet-sim",
        }
    }

    /// Option of `cargo xtask sim` that chooses it.
    const fn option(self) -> &'static str {
        match self {
            Self::Transport => "",
            Self::Storage => " --storage",
            Self::Rds => " --rds",
            Self::Lnet => " --lnet",
        }
    }
}

/// Fresh seeds are above those that anybody counts to.
const FRESH: std::ops::Range<u64> = 1 << 32..1 << 48;

/// `cargo xtask sim`.
pub(crate) fn run(args: &SimArgs) -> Result<()> {
    let name = Simulator::of(args).program();
    let bin = cargo::build(name, name, Profile::Release)?;
    let tally = simulate(&bin, args)?;
    println!("{} passed, {} failed", tally.passed, tally.failed);
    if tally.failed == 0 {
        Ok(())
    } else {
        Err(tally.failures.join("\n"))
    }
}

/// Runs the same seeds each time, from 1, and then as many `fresh` ones. Each counts as a test.
pub(crate) fn suite(bin: &Path, simulator: Simulator, fixed: u64, fresh: u64) -> Result<Tally> {
    let args = |seed, seeds| SimArgs {
        seeds,
        seed,
        jobs: None,
        adversary: false,
        observer: false,
        storage: simulator == Simulator::Storage,
        rds: simulator == Simulator::Rds,
        lnet: simulator == Simulator::Lnet,
        rest: Vec::new(),
    };
    let mut tally = simulate(bin, &args(None, fixed))?;
    // The hasher's keys are random.
    let first = FRESH.start + RandomState::new().hash_one(0) % (FRESH.end - FRESH.start);
    let option = simulator.option();
    println!("fresh seeds: `cargo xtask sim --seed {first} --seeds {fresh}{option}` repeats them");
    tally.add(simulate(bin, &args(Some(first), fresh))?);
    Ok(tally)
}

/// Runs a simulator's program; each seed counts as a test.
fn simulate(bin: &Path, args: &SimArgs) -> Result<Tally> {
    let name = Simulator::of(args).program();
    let mut command = process::command(bin);
    command.arg("--seeds").arg(args.seeds.to_string());
    if let Some(seed) = args.seed {
        command.arg("--seed").arg(seed.to_string());
    }
    if let Some(jobs) = args.jobs {
        command.arg("--jobs").arg(jobs.to_string());
    }
    let options = [("--adversary", args.adversary), ("--observer", args.observer)];
    for (option, wanted) in options {
        if wanted {
            command.arg(option);
        }
    }
    command.args(&args.rest).stdout(Stdio::piped());
    let mut child = process::Guard::spawn(name, &mut command)?;
    let mut tally = Tally::default();
    let mut counted = false;
    let status = child.for_each_line(|line| {
        println!("{line}");
        if let Some((passed, failed)) = read_totals(line) {
            counted = true;
            (tally.passed, tally.failed) = (passed, failed);
        } else if line.starts_with("seed ") || line.trim_start().starts_with("again: ") {
            tally.failures.push(line.trim_start().to_owned());
        }
    })?;
    if !status.success() || !counted {
        tally.failed = tally.failed.max(1);
        tally.failures.push(format!("{name} ended with {status}"));
    } else if tally.passed != args.seeds {
        tally.fail(format!("{name} ran {} seeds of {}", tally.passed, args.seeds));
    }
    Ok(tally)
}

/// Reads `N passed, M failed`, wherever it stands in a line.
fn read_totals(line: &str) -> Option<(u64, u64)> {
    let before = |word: &str| line.split(word).next()?.split_whitespace().next_back()?.parse().ok();
    (line.contains(" passed") && line.contains(" failed")).then_some((before(" passed")?, before(" failed")?))
}

#[cfg(test)]
mod tests {
    use super::read_totals;

    #[test]
    fn totals_are_found() {
        assert_eq!(read_totals("sim: 200 passed, 3 failed, 12.0 s"), Some((200, 3)));
        assert_eq!(read_totals("200 passed"), None);
    }
}
