//! Options of runs, and the kinds of run.

use crate::runner::{Failure, RunConfig};

/// Kind of a run, beside the choices that its seed draws.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Class {
    /// The network's faults and the hosts' misfortunes.
    Plain,
    /// With an off-path attacker.
    Blind,
    /// With an on-path attacker that sees all packets and attacks one connection.
    Observed,
    /// Programs of others, no faults, and a flood of requests to the first host.
    Flood,
    /// Connections over a network without faults: what gets through, with an off-path attacker or without.
    Goodput { attacked: bool },
    /// As `Plain`, with forged copies ahead of packets beyond a gap, from the right source ports.
    Copies,
    /// As `Plain`, with forged packets to connected queue pairs alone or without: both runs are the same.
    Strangers { attacked: bool },
}

impl Class {
    pub(crate) const fn is_goodput(self) -> bool {
        matches!(self, Self::Goodput { .. })
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Blind => "blind",
            Self::Observed => "observed",
            Self::Flood => "flood",
            Self::Goodput { .. } => "goodput",
            Self::Copies => "copies",
            Self::Strangers { .. } => "strangers",
        }
    }
}

/// Runs of a seed. What it draws for everything else does not depend on this.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Runs {
    /// One without an adversary (`adversary/attack.rs`).
    #[default]
    Peaceful,
    /// As the seed decides: a quarter have an adversary, and there are further runs beside some.
    Drawn,
    /// One with an adversary, and beside some a pair that compares goodput.
    Attacked,
    /// One without an adversary or faults, but with narrow links and queues that overflow.
    Narrow,
    /// One with an observer (`adversary/observer.rs`).
    Observed,
    /// A pair that compares goodput.
    Goodput,
    /// One with forged copies of packets beyond a gap.
    Copies,
    /// A pair with and without forged packets to connected queue pairs.
    Strangers,
}

impl Runs {
    /// Returns the options of `cargo xtask sim` that repeat such runs.
    const fn options(self) -> &'static str {
        match self {
            Self::Peaceful | Self::Drawn => "",
            Self::Attacked => " --adversary",
            Self::Narrow => " -- --bottleneck",
            Self::Observed => " --observer",
            Self::Goodput => " -- --goodput",
            Self::Copies => " -- --copies",
            Self::Strangers => " -- --strangers",
        }
    }
}

/// Options of a seed.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Seed, size, capture and log.
    pub run: RunConfig,
    /// Its runs.
    pub runs: Runs,
}

impl SimConfig {
    /// Returns the options of a run without an adversary.
    pub const fn new(run: RunConfig) -> Self {
        let runs = Runs::Peaceful;
        Self { run, runs }
    }

    /// Returns the same options for another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        let mut config = self.clone();
        config.run.seed = seed;
        config
    }

    pub(crate) const fn options(&self) -> &'static str {
        self.runs.options()
    }

    pub(crate) fn failure(&self, text: String) -> Failure {
        Failure {
            seed: self.run.seed,
            options: self.options(),
            text,
            pcap: None,
        }
    }
}
