//! Plan of a run, drawn from its seed.

use core::time::Duration;

use lnet::{Config, Planted, TieBreak};
use roce_port::fabric::FabricConfig;
use roce_sim::{
    Faults, HostPlan, MS, Rng, SEC, Scenario, US,
    lan::{LagPlan, plain_host},
};

use crate::{
    full::Full,
    intruder::IntruderPlan,
    plan::{Places, ProgramPlan},
};

/// Share of runs with a stranger that has a node.
const INTRUDED: f64 = 0.3;

/// Plan of a run.
pub(crate) struct Draw {
    pub(crate) scenario: Scenario,
    pub(crate) hosts: Vec<(HostPlan, FabricConfig, LagPlan)>,
    /// By host.
    pub(crate) configs: Vec<Config>,
    pub(crate) programs: Vec<ProgramPlan>,
    pub(crate) troubles: u32,
    pub(crate) dies: bool,
    /// Nothing goes wrong: each operation has to end well, and no connection ends.
    pub(crate) strict: bool,
    pub(crate) places: Places,
    /// Requests to connect that a stranger forges.
    pub(crate) forged: u32,
    /// Stranger with a node, on the host behind the others.
    pub(crate) intruder: Option<IntruderPlan>,
}

fn config(rng: &mut Rng) -> Config {
    let peer_credits = rng.pick(&[2, 3, 8, 8, 42, 128, 255]);
    Config {
        peer_credits,
        high_water: (peer_credits / 2 + rng.index(usize::from(peer_credits / 2)) as u16).max(1),
        max_frags: rng.pick(&[256, 257, 257]),
        timeout: Duration::from_nanos(rng.pick(&[5 * SEC, 10 * SEC, 50 * SEC])),
        keepalive: Some(Duration::from_nanos(rng.pick(&[SEC, 20 * SEC, 100 * SEC]))),
        tie_break: rng.pick(&[TieBreak::Nid, TieBreak::Hash]),
        ..Config::default()
    }
}

fn program(scale: u32, rng: &mut Rng) -> ProgramPlan {
    let lens: &[usize] = match rng.index(4) {
        0 => &[0, 1, 100, 3976],
        1 => &[3976, 3977, 4096],
        2 => &[8192, 65_536, 3977],
        _ => &[0, 48, 4096, 100, 3977, 1 << 17],
    };
    ProgramPlan {
        operations: rng.range(1, u64::from(scale)) as u32,
        at_once: rng.pick(&[1, 4, 16]),
        lens: lens.to_vec(),
        think: rng.pick(&[0, 20 * US, MS, 20 * MS]),
        gets: rng.pick(&[0.0, 0.5, 1.0]),
        acks: rng.pick(&[0.0, 0.5, 1.0]),
        misses: rng.pick(&[0.0, 0.0, 0.1]),
        pings: 0.05,
    }
}

impl Draw {
    pub(crate) fn new(scale: u32, rng: &mut Rng) -> Self {
        let calm = rng.chance(0.25);
        let mut scenario = Scenario::draw(scale, rng);
        if calm {
            scenario.faults.loss = scenario.faults.loss.min(0.01);
            scenario.faults.corrupt = 0.0;
        }
        let count = 2 + rng.index(2);
        let hosts = (0..count)
            .map(|i| {
                let lag = LagPlan {
                    most: rng.pick(&[0, 0, 20 * US, MS]),
                    type_1_only: false,
                };
                let keys = FabricConfig {
                    instant_keys: true,
                    fast_registration: true,
                    windows: true,
                    tells_invalidated: true,
                };
                (HostPlan::draw(i, false, rng), keys, lag)
            })
            .collect();
        let mut draw = Self {
            scenario,
            hosts,
            configs: (0..count).map(|_| config(rng)).collect(),
            programs: (0..count).map(|_| program(scale, rng)).collect(),
            troubles: if calm { 0 } else { rng.range(0, 6) as u32 },
            dies: rng.chance(0.5),
            strict: false,
            places: Places {
                len: 1 << 17,
                count: 16,
            },
            forged: rng.pick(&[0, 0, 20, 300]),
            intruder: None,
        };
        if rng.chance(INTRUDED) {
            draw.intruder = Some(IntruderPlan::draw(rng));
            draw.hosts.push(plain_host([10, 0, 1, 66].into()));
        }
        draw
    }

    /// Draws the rest of a run in which two hosts have more to send than credits.
    pub(crate) fn full(full: &Full, scale: u32, rng: &mut Rng) -> Self {
        let mut draw = Self::new(scale, rng);
        let tie_break = rng.pick(&[TieBreak::Nid, TieBreak::Hash]);
        draw.hosts.truncate(2);
        draw.configs = full
            .depths
            .map(|depth| Config {
                tie_break,
                ..full.config(depth)
            })
            .into();
        draw.programs = full.programs(rng).into();
        draw.scenario.faults = Faults::quiet(draw.scenario.faults);
        let operations = draw.programs.iter().map(|program| program.operations as usize);
        // Each PUT has its own place.
        draw.places = Places {
            len: 8192,
            count: operations.max().unwrap_or(1),
        };
        (draw.troubles, draw.dies, draw.forged, draw.strict) = (0, false, 0, true);
        draw.intruder = None;
        draw
    }

    /// Has all hosts count credits with a bug.
    pub(crate) fn plant(&mut self, planted: Planted) {
        self.configs.iter_mut().for_each(|config| config.planted = planted);
    }
}
