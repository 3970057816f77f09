//! Clients with several paths: over which networks they lead, and what is done with them while the session is in use.

use core::time::Duration;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rnbd::client::OnLoss;
use rtrs::{
    Cx, PathError,
    addr::PathAddr,
    client::{PathCommand, PathId, PathNews, Policy, SessionConfig, SessionId, state::PathState},
    server::ServerConfig,
};

use roce_sim::{Check, MS, Rng, SEC, lan::address};

use crate::{
    client::{ClientEnv, ClientPlan, ClientSide, honest},
    draw::{Draw, Wide},
};

impl Draw {
    /// Makes it a run with several networks.
    pub(crate) fn widen(&mut self, rng: &mut Rng) {
        let mut wide = Wide {
            networks: rng.pick(&[2, 2, 3]),
            storms: !self.calm && rng.chance(0.4),
            lag: 0,
        };
        let server = self.hosts[0].0.addr;
        self.server_config.addr = match server {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        if wide.storms {
            // Chunks are soon used again.
            self.server_config.queue_depth = rng.pick(&[1, 2, 4]);
        }
        for (client, plan) in self.clients.iter_mut().enumerate() {
            let own = self.hosts[1 + client].0.addr;
            several_paths(plan, own, server, wide.networks, rng);
        }
        if !self.calm {
            self.troubles = if wide.storms {
                rng.range(4, 14) as u32
            } else {
                rng.pick(&[1, 4, 8])
            };
        }
        if !self.calm && rng.chance(0.4) {
            wide.lag = rng.pick(&[50 * MS, 150 * MS, 250 * MS]);
            self.slow_down(rng);
        }
        self.wide = Some(wide);
    }

    /// Work lasts for as long as delays jump. Disks don't stall, so that a repetition is done long before what was sent first arrives.
    fn slow_down(&mut self, rng: &mut Rng) {
        self.troubles = rng.range(4, 14) as u32;
        // The late copy of a read is done while the answer of its repetition may be read from the same chunk: the same blocks.
        self.server.garbage = false;
        for (_, faults) in &mut self.disks {
            faults.stall = (0.0, 0);
        }
        for plan in &mut self.clients {
            plan.think = rng.pick(&[MS, 5 * MS, 20 * MS]);
            plan.operations = rng.range(50, 300) as u32;
            plan.commands = rng.pick(&[0.0, 0.02, 0.1]);
        }
    }
}

fn several_paths(plan: &mut ClientPlan, own: IpAddr, server: IpAddr, networks: usize, rng: &mut Rng) {
    let port = plan.config.paths[0].dst.port();
    let path = |from: usize, to: usize| PathAddr {
        src: Some(address(own, from)),
        dst: (address(server, to), port).into(),
    };
    // One for each network; then those that lead from one to another.
    let straight = (0..networks).map(|n| path(n, n));
    let across = (0..networks).map(|n| path(n, (n + 1) % networks));
    let ways: Vec<PathAddr> = straight.chain(across).collect();
    let config = &mut plan.config;
    let count = rng.pick(&[1, 2, 2, networks, 4]).min(ways.len());
    config.paths = ways[..count].to_vec();
    plan.ways = ways;
    config.policy = rng.pick(&Policy::ALL);
    config.connect_any = rng.chance(0.4);
    config.max_reconnects = rng.pick(&[0, 5, 100, SessionConfig::FOREVER, SessionConfig::FOREVER]);
    config.reconnect_delay = Duration::from_nanos(rng.pick(&[MS, 50 * MS, SEC]));
    plan.commands = rng.pick(&[0.0, 0.02, 0.1]);
    plan.on_loss = rng.pick(&[
        OnLoss::Error,
        OnLoss::Error,
        OnLoss::Queue(None),
        OnLoss::Queue(Some(Duration::from_secs(2))),
    ]);
    plan.unmaps = rng.pick(&[0.0, 0.01]);
}

/// The server that follows one that died may be another one.
pub(crate) fn another_server(config: &mut ServerConfig, rng: &mut Rng) {
    if rng.chance(0.5) {
        config.queue_depth = rng.pick(&[1, 2, 4, 16, 32]);
        config.max_chunk_size = rng.pick(&[8 << 10, 16 << 10, 32 << 10]);
        config.always_invalidate = rng.chance(0.7);
    }
}

impl ClientSide {
    /// Its user does something with the paths.
    pub(crate) fn administer(&mut self, cx: &mut Cx<'_>, session: SessionId, env: &mut ClientEnv<'_>) {
        let (rng, paths) = (&mut *env.rng, self.rnbd.rtrs().paths(session));
        match rng.index(8) {
            0 => {
                let policy = rng.pick(&Policy::ALL);
                let set = self.rnbd.rtrs_mut().set_policy(cx, session, policy);
                env.coverage.note_if("policy changed", set.is_ok());
            }
            1 => {
                let attempts = rng.pick(&[0, 1, 100, SessionConfig::FOREVER]);
                let delay = Duration::from_nanos(rng.pick(&[MS, 50 * MS, SEC]));
                // A session that is gone needs none.
                let _ = self.rnbd.rtrs_mut().set_reconnects(cx, session, attempts, delay);
            }
            2 | 3 => {
                let way = rng.pick(&self.plan.ways);
                if let Ok(path) = self.rnbd.rtrs_mut().add_path(cx, session, way) {
                    env.coverage.note("path added");
                    self.commanded.push((path, PathCommand::Add));
                }
            }
            _ if paths.is_empty() => {}
            _ => {
                let path = &paths[rng.index(paths.len())];
                let (command, what) = rng.pick(&[
                    (PathCommand::Remove, "path removed"),
                    (PathCommand::Disconnect, "path disconnected"),
                    (PathCommand::Reconnect, "path reconnected by hand"),
                    (PathCommand::Reconnect, "path reconnected by hand"),
                ]);
                let other = paths.iter().any(|p| p.id != path.id && p.state == PathState::Connected);
                if self.safe_from == Some(0) && !other {
                    return;
                }
                if self.rnbd.rtrs_mut().path_command(cx, session, path.id, command).is_ok() {
                    env.coverage.note(what);
                    self.commanded.push((path.id, command));
                }
            }
        }
    }

    /// Its user gives up the paths over a network.
    pub(crate) fn flee(&mut self, cx: &mut Cx<'_>, session: SessionId, network: usize, env: &mut ClientEnv<'_>) {
        let Some(way) = self.plan.ways.get(network).copied() else {
            return;
        };
        let over = |addr: &PathAddr| addr.src == way.src || addr.dst == way.dst;
        let command = env.rng.pick(&[PathCommand::Disconnect, PathCommand::Reconnect]);
        let paths = self.rnbd.rtrs().paths(session);
        // Not the last one: what a lost session had in the chunks is another matter.
        let up = |other: bool| {
            paths
                .iter()
                .filter(move |p| p.state == PathState::Connected && over(&p.addr) != other)
        };
        if up(true).next().is_none() {
            return;
        }
        for path in up(false) {
            if self.rnbd.rtrs_mut().path_command(cx, session, path.id, command).is_ok() {
                env.coverage.note("slow path given up by hand");
                self.commanded.push((path.id, command));
            }
        }
    }

    /// Handles an event of a path.
    pub(crate) fn on_path_event(&mut self, path: PathId, news: &PathNews, env: &mut ClientEnv<'_>) -> Check {
        match news {
            PathNews::Up { again } => env.coverage.note_if("path came back", *again),
            PathNews::Down(why) => honest(why)?,
            PathNews::Closed(PathError::Closed) | PathNews::AttemptFailed(_) => {}
            PathNews::Closed(why) => honest(why)?,
            PathNews::TookOver(_) => env.coverage.note("failover"),
            PathNews::Done(command, _) => {
                let asked = self.commanded.iter().position(|c| *c == (path, *command));
                let Some(asked) = asked else {
                    return Err(format!(
                        "client {}: {command:?} of {path:?} ends twice",
                        self.life.client
                    ));
                };
                self.commanded.swap_remove(asked);
            }
        }
        Ok(())
    }
}
