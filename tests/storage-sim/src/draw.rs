//! Plan of a run, drawn from its seed.

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};

use rnbd::{client::OnLoss, proto::AccessMode, server::fair_queue::QueueLimits};
use roce_port::fabric::FabricConfig;
use rtrs::{addr::PathAddr, client::SessionConfig, heartbeat::HeartbeatConfig, server::ServerConfig};

use roce_sim::{Coverage, Faults, HostPlan, MS, Rng, SEC, Scenario, US, lan::LagPlan};

use crate::{
    client::ClientPlan,
    disk::DiskFaults,
    raw::RawPlan,
    server::{Names, ServerPlan},
};

/// Plan of a run.
pub(crate) struct Draw {
    /// Nothing but the network's faults goes wrong, and those are mild.
    pub(crate) calm: bool,
    pub(crate) scenario: Scenario,
    /// The server's first; with how it handles keys, and how long it takes to drain, at most.
    pub(crate) hosts: Vec<(HostPlan, FabricConfig, LagPlan)>,
    /// Blocks, and how the disk misbehaves.
    pub(crate) disks: Vec<(u64, DiskFaults)>,
    pub(crate) server_config: ServerConfig,
    pub(crate) server: ServerPlan,
    pub(crate) clients: Vec<ClientPlan>,
    /// Client by hand, on the last two hosts and with the last disk.
    pub(crate) raw: Option<RawPlan>,
    pub(crate) troubles: u32,
    pub(crate) wide: Option<Wide>,
}

/// Plan of a run with several networks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide {
    pub(crate) networks: usize,
    /// Disks stall just before paths are cut, again and again: what was sent by one path is done when its repetition by another
    /// has long ended, if nobody sees to it.
    pub(crate) storms: bool,
    /// Networks differ in their delay, and it jumps: what was sent by a path that is given up is still under way. By so much at most,
    /// nanoseconds, which is below what RTRS takes a packet's lifetime for; 0: no.
    pub(crate) lag: u64,
}

fn keys(rng: &mut Rng) -> FabricConfig {
    let (instant_keys, fast_registration, windows) = rng.pick(&[
        (true, true, true),
        (true, true, true),
        (true, false, true),
        (false, true, true),
        (false, true, false),
        (false, false, true),
        (false, false, false),
    ]);
    FabricConfig {
        instant_keys,
        fast_registration,
        windows,
        tells_invalidated: rng.chance(0.8),
    }
}

fn lag(rng: &mut Rng) -> LagPlan {
    LagPlan {
        most: rng.pick(&[0, 0, 20 * US, MS, 20 * MS]),
        type_1_only: rng.chance(0.3),
    }
}

fn heartbeat(rng: &mut Rng) -> HeartbeatConfig {
    HeartbeatConfig {
        interval: Duration::from_nanos(rng.pick(&[50 * MS, 200 * MS, SEC])),
        max_missed: 5,
    }
}

fn server_config(addr: IpAddr, rng: &mut Rng) -> ServerConfig {
    ServerConfig {
        addr,
        queue_depth: rng.pick(&[1, 2, 4, 16, 32]),
        max_chunk_size: rng.pick(&[8 << 10, 16 << 10, 32 << 10]),
        always_invalidate: rng.chance(0.7),
        heartbeat: heartbeat(rng),
        ..ServerConfig::default()
    }
}

fn server_plan(calm: bool, rng: &mut Rng) -> ServerPlan {
    let no_memory = rng.pick(&[0.0, 0.0, 0.2]);
    ServerPlan {
        limits: QueueLimits {
            slots: rng.pick(&[1, 3, 16, 256]),
            slow: rng.pick(&[1, 4]),
            quantum: 128 << 10,
        },
        no_memory: if calm { 0.0 } else { no_memory },
        zeroes: rng.chance(0.7),
        longest: rng.pick(&[8, 64, 1 << 20]),
        garbage: true,
        names: Names::Boot(0),
    }
}

fn client_plan(server: IpAddr, devices: usize, client: usize, scale: u32, rng: &mut Rng) -> ClientPlan {
    let mut config = SessionConfig::new("client", PathAddr::to(SocketAddr::new(server, 1234)));
    config.connections = rng.pick(&[1, 1, 2, 3]);
    config.invalidate_reads = rng.chance(0.7);
    config.heartbeat = heartbeat(rng);
    config.connect_timeout = Duration::from_secs(rng.pick(&[2, 5, 30]));
    config.buffer_bytes = rng.chance(0.3).then_some(1 << 20);
    config.max_reconnects = rng.pick(&[0, 5, 100]);
    config.reconnect_delay = Duration::from_nanos(rng.pick(&[MS, 50 * MS, SEC]));
    let first = client % devices;
    // Others read along, or wait until the device is free.
    let writes = client < devices || rng.chance(0.4);
    let mode = if writes {
        AccessMode::ReadWrite
    } else {
        AccessMode::ReadOnly
    };
    let mut opens = vec![(first, mode)];
    if devices > 1 && rng.chance(0.4) {
        let mode = rng.pick(&[AccessMode::ReadWrite, AccessMode::ReadOnly]);
        opens.push(((first + 1) % devices, mode));
    }
    ClientPlan {
        config,
        devices: opens,
        depth: rng.pick(&[1, 2, 8, 40]),
        operations: rng.range(1, u64::from(scale)) as u32,
        think: rng.pick(&[0, 0, MS, 10 * MS]),
        leaves: rng.pick(&[0.0, 0.0, 0.01]),
        unmaps: rng.pick(&[0.0, 0.0, 0.01]),
        timeout: rng.pick(&[SEC, 8 * SEC, 20 * SEC]),
        ways: Vec::new(),
        commands: 0.0,
        on_loss: OnLoss::Error,
    }
}

fn disk_faults(calm: bool, rng: &mut Rng) -> DiskFaults {
    let rare = |rng: &mut Rng, p: f64| if rng.chance(0.3) && !calm { p } else { 0.0 };
    DiskFaults {
        delay: rng.pick(&[[0, 0], [1_000, 20_000], [50_000, 3 * MS]]),
        stall: (rare(rng, 0.03), rng.pick(&[100 * MS, 2 * SEC, 8 * SEC])),
        read_error: rare(rng, 0.02),
        write_error: rare(rng, 0.03),
        flush_error: rare(rng, 0.05),
    }
}

/// Returns the faults of a disk that is slow at most.
fn slow(faults: DiskFaults, rng: &mut Rng) -> DiskFaults {
    DiskFaults {
        stall: rng.pick(&[(0.0, 0), (0.3, 50 * MS), (0.3, 2 * SEC)]),
        read_error: 0.0,
        write_error: 0.0,
        flush_error: 0.0,
        ..faults
    }
}

fn raw_plan(server: IpAddr, device: usize, rng: &mut Rng) -> RawPlan {
    let mut config = SessionConfig::new("raw", PathAddr::to(SocketAddr::new(server, 1234)));
    config.connections = rng.pick(&[1, 2]);
    config.heartbeat = heartbeat(rng);
    config.connect_timeout = Duration::from_secs(5);
    let mut other = config.clone();
    other.invalidate_reads = rng.chance(0.7);
    RawPlan {
        configs: [config, other],
        device,
        steps: rng.range(3, 25) as u32,
        moves: rng.chance(0.5),
    }
}

impl Draw {
    /// `wide` draws what clients with several paths are like, and whether there are any.
    pub(crate) fn new(scale: u32, rng: &mut Rng, wide: &mut Rng) -> Self {
        let calm = rng.chance(0.25);
        let mut scenario = Scenario::draw(scale, rng);
        if calm {
            mild(&mut scenario.faults);
        }
        let (clients, devices, v6) = (1 + rng.index(3), 1 + rng.index(2), rng.chance(0.3));
        let raw = rng.chance(0.3);
        let count = 1 + clients + if raw { 2 } else { 0 };
        let mut hosts: Vec<_> = (0..count)
            .map(|i| (HostPlan::draw(i, v6, rng), keys(rng), lag(rng)))
            .collect();
        // A server refuses a client with a larger path MTU than its own.
        let most = hosts[0].0.mtu;
        for (host, ..) in &mut hosts {
            host.mtu = host.mtu.min(most);
        }
        let server = hosts[0].0.addr;
        let mut disks: Vec<_> = (0..devices)
            .map(|_| (rng.pick(&[16, 64, 200]), disk_faults(calm, rng)))
            .collect();
        if raw {
            disks.push((rng.pick(&[8, 32]), slow(disk_faults(calm, rng), rng)));
        }
        let mut draw = Self {
            calm,
            disks,
            server_config: server_config(server, rng),
            server: server_plan(calm, rng),
            clients: (0..clients)
                .map(|i| client_plan(server, devices, i, scale, rng))
                .collect(),
            raw: raw.then(|| raw_plan(server, devices, rng)),
            troubles: if calm { 0 } else { rng.pick(&[0, 1, 3, 6]) },
            scenario,
            hosts,
            wide: None,
        };
        if wide.chance(0.5) {
            draw.widen(wide);
        }
        draw
    }

    /// Notes the events that the plan alone decides.
    pub(crate) fn note(&self, coverage: &mut Coverage) {
        coverage.note_if("calm", self.calm);
        coverage.note_if("IPv6", self.hosts[0].0.addr.is_ipv6());
        coverage.note_if(
            "different MTUs",
            self.hosts.iter().any(|(h, ..)| h.mtu != self.hosts[0].0.mtu),
        );
        coverage.note_if("instant keys at the server", self.hosts[0].1.instant_keys);
        coverage.note_if(
            "instant keys at a client",
            self.hosts[1..].iter().any(|h| h.1.instant_keys),
        );
        coverage.note_if("queued keys at the server", !self.hosts[0].1.instant_keys);
        coverage.note_if(
            "queued keys at a client",
            self.hosts[1..].iter().any(|h| !h.1.instant_keys),
        );
        coverage.note_if("always_invalidate", self.server_config.always_invalidate);
        coverage.note_if("no always_invalidate", !self.server_config.always_invalidate);
        coverage.note_if("server names no instance", self.server.names == Names::None);
        coverage.note_if("zeroes as data", !self.server.zeroes);
        coverage.note_if("raw client", self.raw.is_some());
        let any = |which: fn(&ClientPlan) -> bool| self.clients.iter().any(which);
        coverage.note_if("invalidate_reads", any(|c| c.config.invalidate_reads));
        coverage.note_if("no invalidate_reads", any(|c| !c.config.invalidate_reads));
        coverage.note_if("several connections", any(|c| c.config.connections > 1));
        coverage.note_if("several devices of a session", any(|c| c.devices.len() > 1));
        coverage.note_if(
            "read-only device",
            any(|c| c.devices.iter().any(|(_, mode)| !mode.writable())),
        );
        coverage.note_if("reconnecting client", any(|c| c.config.max_reconnects > 0));
        coverage.note_if("several networks", self.wide.is_some());
        coverage.note_if("storms", self.wide.is_some_and(|wide| wide.storms));
        coverage.note_if("delays that jump", self.wide.is_some_and(|wide| wide.lag > 0));
        coverage.note_if("several paths", any(|c| c.config.paths.len() > 1));
        coverage.note_if("held operations", any(|c| c.on_loss != OnLoss::Error));
        coverage.note_if("slow drains", self.hosts.iter().any(|h| h.2.most > 0));
    }
}

/// Weakens faults so that no connection is lost.
fn mild(faults: &mut Faults) {
    faults.loss = faults.loss.min(0.01);
    faults.corrupt = faults.corrupt.min(0.01);
    faults.bandwidth = faults.bandwidth.max(125_000_000);
    faults.queue = faults.queue.max(64 << 20);
}
