//! Plan of a run, drawn from its seed.

use core::time::Duration;

use rds::{Config, Rings};
use roce_port::fabric::FabricConfig;
use roce_sim::{HostPlan, MS, Rng, SEC, Scenario, US, lan::LagPlan};

/// Plan of a program.
#[derive(Clone, Debug)]
pub(crate) struct ProgramPlan {
    pub(crate) sockets: usize,
    /// Messages to send.
    pub(crate) messages: u32,
    /// Lengths of messages.
    pub(crate) lens: Vec<usize>,
    /// Longest pause between two messages, nanoseconds.
    pub(crate) think: u64,
    /// Longest pause between two looks into a socket, nanoseconds.
    pub(crate) reads_each: u64,
    /// Probability that a socket is not read until the network is quiet.
    pub(crate) sleepers: f64,
    /// Probability that a socket is closed, or messages canceled, instead of a message being sent.
    pub(crate) closes: f64,
    pub(crate) cancels: f64,
    /// Some sockets have another type of service.
    pub(crate) tos: bool,
    /// Sockets want to know of ports that are free again.
    pub(crate) monitors: f64,
}

/// Plan of a run.
pub(crate) struct Draw {
    pub(crate) scenario: Scenario,
    pub(crate) hosts: Vec<(HostPlan, FabricConfig, LagPlan)>,
    pub(crate) config: Config,
    pub(crate) programs: Vec<ProgramPlan>,
    pub(crate) troubles: u32,
    pub(crate) dies: bool,
    /// Requests to connect that a stranger forges.
    pub(crate) forged: u32,
}

fn config(rng: &mut Rng) -> Config {
    Config {
        send_buffer: rng.pick(&[5000, 106_496, 2 << 20]),
        recv_buffer: rng.pick(&[1000, 20_000, 106_496]),
        rings: Rings {
            send: rng.pick(&[4, 16, 256]),
            recv: rng.pick(&[4, 16, 256]),
        },
        ack_delay: Duration::from_nanos(rng.pick(&[MS, 100 * MS])),
        probe_delay: Duration::from_nanos(rng.pick(&[50 * MS, SEC])),
        max_unread: rng.pick(&[1 << 20, 4 << 20, 256 << 20]),
        unacked_messages: rng.pick(&[1, 8, 100]),
        ..Config::default()
    }
}

fn program(scale: u32, rng: &mut Rng) -> ProgramPlan {
    let lens: &[usize] = match rng.index(4) {
        0 => &[0, 1, 100, 900],
        1 => &[0, 1, 4095, 4096, 4097, 5000],
        2 => &[64, 8192, 100_000],
        _ => &[10, 4096, 10, 4097, 10, 20_000, 10, 1 << 20],
    };
    ProgramPlan {
        sockets: 1 + rng.index(4),
        messages: rng.range(1, u64::from(scale)) as u32,
        lens: lens.to_vec(),
        think: rng.pick(&[0, 20 * US, MS, 20 * MS]),
        reads_each: rng.pick(&[0, 100 * US, 10 * MS]),
        sleepers: rng.pick(&[0.0, 0.0, 0.3]),
        closes: rng.pick(&[0.0, 0.0, 0.01]),
        cancels: rng.pick(&[0.0, 0.0, 0.03]),
        tos: rng.chance(0.5),
        monitors: rng.pick(&[0.0, 0.5]),
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
        let (count, v6) = (2 + rng.index(2), rng.chance(0.3));
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
                let mut host = HostPlan::draw(i, v6, rng);
                host.mtu = host.mtu.min(roce_verbs::Mtu::B4096);
                (host, keys, lag)
            })
            .collect();
        Self {
            scenario,
            hosts,
            config: config(rng),
            programs: (0..count).map(|_| program(scale, rng)).collect(),
            troubles: if calm { 0 } else { rng.range(0, 6) as u32 },
            dies: rng.chance(0.5),
            forged: rng.pick(&[0, 0, 20, 300]),
        }
    }
}
