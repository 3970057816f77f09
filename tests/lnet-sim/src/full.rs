//! Runs in which hosts have more to send than credits, and nothing goes wrong.

use core::time::Duration;

use lnet::Config;
use roce_sim::Rng;

use crate::plan::ProgramPlan;

/// Operations of a run's hosts. All data is too long for an IMMEDIATE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Traffic {
    /// Both PUT: each message is a PUT_REQ or follows from one.
    Puts,
    /// Both GET.
    Gets,
    /// Both PUT and GET.
    Both,
    /// One PUTs, so that only NOOPs give its credits back.
    OneSided,
}

/// Plan of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full {
    /// Depths that the hosts are set to, 2 to 255.
    pub depths: [u16; 2],
    /// Operations.
    pub traffic: Traffic,
}

impl Full {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let mut depth = || {
            let any = rng.range(2, 255) as u16;
            rng.pick(&[2, 3, 8, any])
        };
        let depths = [depth(), depth()];
        let traffic = rng.pick(&[Traffic::Puts, Traffic::Gets, Traffic::Both, Traffic::OneSided]);
        Self { depths, traffic }
    }

    pub(crate) fn config(&self, depth: u16) -> Config {
        Config {
            peer_credits: depth,
            high_water: (depth / 2).max(1),
            timeout: Duration::from_secs(10),
            // No NOOP but for credits.
            keepalive: None,
            ..Config::default()
        }
    }

    /// Programs that begin twice as many operations at once as there are credits.
    pub(crate) fn programs(&self, rng: &mut Rng) -> [ProgramPlan; 2] {
        let depth = u32::from(self.depths[0].min(self.depths[1]));
        let acks = rng.pick(&[0.0, 1.0]);
        [true, false].map(|is_first| ProgramPlan {
            operations: match self.traffic {
                Traffic::OneSided if !is_first => 0,
                _ => 4 * depth + 8,
            },
            at_once: 2 * depth as usize + 4,
            lens: vec![3977, 4096, 8192],
            think: 0,
            gets: match self.traffic {
                Traffic::Puts | Traffic::OneSided => 0.0,
                Traffic::Gets => 1.0,
                Traffic::Both => 0.5,
            },
            acks: if self.traffic == Traffic::Both { acks } else { 0.0 },
            misses: 0.0,
            pings: 0.0,
        })
    }
}
