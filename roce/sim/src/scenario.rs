//! Plan of a run, drawn from its seed: hosts, links, connections, and the troubles that may come.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use roce_port::TxConfig;
use roce_qp::WindowConfig;
use roce_verbs::{Mtu, Psn, QpCaps, RnrTimer, provider::ConnParams};

use crate::{net::Faults, rng::Rng};

/// Nanoseconds of a microsecond.
pub const US: u64 = 1_000;
/// Nanoseconds of a millisecond.
pub const MS: u64 = 1_000_000;
/// Nanoseconds of a second.
pub const SEC: u64 = 1_000_000_000;

/// Datapath of a host, and the settings of its port.
#[derive(Clone, Debug)]
pub struct HostPlan {
    /// Its address.
    pub addr: IpAddr,
    /// Largest path MTU of its port.
    pub mtu: Mtu,
    /// Receives GRO buffers.
    pub gro: bool,
    /// Sees IP headers, as a raw socket does.
    pub sees_headers: bool,
    /// Sends IPv4 Identifications that count up, as rdma_rxe does, instead of the place in the GSO train.
    pub counts_up: bool,
    /// Settings of transmission.
    pub tx: TxConfig,
    /// Congestion window.
    pub window: WindowConfig,
    /// Bytes of the socket's receive buffer.
    pub rx_buffer: usize,
    /// From a packet's arrival to its processing, at most, nanoseconds.
    pub latency: u64,
    /// Packets that a queue pair sends in a turn.
    pub turn_packets: usize,
    /// Its connection manager has low limits.
    pub tight: bool,
    /// Supports selective acknowledgements, and advertises it; else it is as hardware and rdma_rxe are.
    pub keeps: bool,
}

/// Plan of a connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnPlan {
    /// Hosts of its two ends.
    pub(crate) hosts: [usize; 2],
    pub(crate) via_cm: bool,
    pub(crate) mtu: Mtu,
    pub(crate) caps: QpCaps,
    pub(crate) signal_all: bool,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: RnrTimer,
    pub(crate) rd_atomic: u8,
    /// First PSN of each direction (connections by modify).
    pub(crate) psn: [Psn; 2],
    /// Work requests of each direction, errors that end a connection not counted.
    pub(crate) operations: [u32; 2],
    /// Sends are posted after pauses of up to this, nanoseconds.
    pub(crate) think: u64,
    /// Receives are posted up to this late, nanoseconds.
    pub(crate) recv_lag: u64,
    /// Receives kept ahead of sends.
    pub(crate) recv_ahead: u32,
    /// Probability that a posted operation is a faulty one.
    pub(crate) bad_operations: f64,
    /// Regions start at address zero.
    pub(crate) zero_based: bool,
    pub(crate) largest: usize,
}

impl ConnPlan {
    /// Returns what its ends ask of each other, with its number as private data.
    pub(crate) fn params(&self, conn: usize) -> ConnParams {
        ConnParams {
            private_data: (conn as u32).to_be_bytes().to_vec(),
            responder_resources: self.rd_atomic,
            initiator_depth: self.rd_atomic,
            retry_count: self.retry_cnt,
            rnr_retry_count: self.rnr_retry,
            ..ConnParams::default()
        }
    }
}

/// Plan of a run.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub(crate) hosts: Vec<HostPlan>,
    pub(crate) conns: Vec<ConnPlan>,
    /// Most faults that a link can have; each draws its own.
    pub faults: Faults,
    /// End of the faults, nanoseconds.
    pub chaos_end: u64,
    /// Disturbances (partitions, deaths, resets, disconnects …) during the chaos.
    pub(crate) disturbances: u32,
    /// The other services carry messages as well, and connections use what came with IBTA Annex A19. What the other runs
    /// draw does not depend on any of this.
    pub(crate) extended: bool,
}

fn addr(i: usize, v6: bool) -> IpAddr {
    if v6 {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, i as u16 + 1).into()
    } else {
        Ipv4Addr::new(10, 0, 0, i as u8 + 1).into()
    }
}

fn faults(rng: &mut Rng) -> Faults {
    let loss = match rng.index(5) {
        0 => 0.0,
        1 => 0.001,
        2 => 0.01,
        3 => 0.04,
        _ => 0.12,
    };
    let some = |rng: &mut Rng, p: f64| if rng.chance(0.6) { rng.unit() * p } else { 0.0 };
    let bandwidth = rng.pick(&[20_000_000, 125_000_000, 1_250_000_000, 5_000_000_000]);
    Faults {
        loss: loss * rng.unit(),
        duplicate: some(rng, 0.05),
        reorder: some(rng, 0.05),
        corrupt: some(rng, 0.03),
        delay: rng.pick(&[US, 5 * US, 30 * US, 200 * US]),
        jitter: rng.pick(&[0, 0, 2 * US, 50 * US]),
        bandwidth,
        queue: rng.pick(&[24 << 10, 100 << 10, 64 << 20, 64 << 20]),
    }
}

impl HostPlan {
    /// Draws the host with this index.
    pub fn draw(i: usize, v6: bool, rng: &mut Rng) -> Self {
        let mtu = rng.pick(&[Mtu::B256, Mtu::B1024, Mtu::B1024, Mtu::B2048, Mtu::B4096, Mtu::B4096]);
        let max = rng.pick(&[32 << 10, 256 << 10, 4 << 20]);
        Self {
            addr: addr(i, v6),
            mtu,
            gro: rng.chance(0.5),
            sees_headers: rng.chance(0.3),
            counts_up: !v6 && rng.chance(0.3),
            tx: TxConfig {
                gso: rng.chance(0.7),
                capacity: rng.pick(&[8 << 10, 64 << 10, 256 << 10]),
                ..TxConfig::default()
            },
            window: WindowConfig {
                initial: (64 << 10).min(max),
                min: 16 << 10,
                max,
            },
            rx_buffer: rng.pick(&[32 << 10, 208 << 10, 4 << 20]),
            latency: rng.pick(&[0, 2 * US, 20 * US, 100 * US]),
            turn_packets: rng.pick(&[1, 4, 16, 64]),
            tight: false,
            keeps: rng.chance(0.7),
        }
    }
}

fn conn(hosts: &[HostPlan], calm: bool, scale: u32, rng: &mut Rng) -> ConnPlan {
    let mut a = rng.index(hosts.len());
    // Now and then a host talks to itself.
    let mut b = if rng.chance(0.05) {
        a
    } else {
        (a + 1 + rng.index(hosts.len() - 1)) % hosts.len()
    };
    let via_cm = rng.chance(0.5);
    let most = hosts[a].mtu.min(hosts[b].mtu);
    let fitting: Vec<Mtu> = Mtu::ALL.into_iter().filter(|m| *m <= most).collect();
    let mtu = if via_cm || rng.chance(0.5) {
        most
    } else {
        rng.pick(&fitting)
    };
    if via_cm && hosts[a].mtu > hosts[b].mtu {
        // The connect request names the active side's MTU, and is refused if the passive side can't do it.
        (a, b) = (b, a);
    }
    let near_wrap = |rng: &mut Rng| {
        if rng.chance(0.6) {
            Psn::new(0u32.wrapping_sub(rng.range(0, 300) as u32))
        } else {
            Psn::new(rng.number() as u32)
        }
    };
    let strict = rng.chance(0.85);
    let queue = rng.range(4, 64) as u32;
    ConnPlan {
        hosts: [a, b],
        via_cm,
        mtu,
        caps: QpCaps {
            max_send_wr: queue,
            max_recv_wr: rng.range(4, 64) as u32,
            max_send_sge: rng.range(1, 6) as u32,
            max_recv_sge: rng.range(1, 6) as u32,
            max_inline_data: rng.pick(&[0, 64, 256, 512]),
        },
        signal_all: rng.chance(0.2),
        timeout: rng.pick(&[0, 12, 14, 14, 16]),
        retry_cnt: if strict { 7 } else { rng.range(0, 3) as u8 },
        rnr_retry: if strict { 7 } else { rng.range(0, 4) as u8 },
        min_rnr_timer: RnrTimer::new(rng.range(1, 14) as u8),
        rd_atomic: rng.pick(&[1, 2, 4, 16]),
        psn: [near_wrap(rng), near_wrap(rng)],
        operations: [
            rng.range(10, u64::from(scale)) as u32,
            if rng.chance(0.8) {
                rng.range(5, u64::from(scale)) as u32
            } else {
                0
            },
        ],
        think: rng.pick(&[US, 50 * US, 500 * US]),
        recv_lag: rng.pick(&[0, 0, 5 * US, 500 * US, 3 * MS]),
        recv_ahead: rng.range(0, 16) as u32,
        bad_operations: if calm { 0.0 } else { 0.02 },
        zero_based: rng.chance(0.5),
        largest: rng.pick(&[mtu.bytes(), 8 * mtu.bytes() + 1, 48 << 10]),
    }
}

impl Scenario {
    /// Draws a run. `scale` is about how many work requests each direction of a connection carries.
    pub fn draw(scale: u32, rng: &mut Rng) -> Self {
        let v6 = rng.chance(0.25);
        let count = rng.pick(&[2, 2, 2, 3, 4]);
        let hosts: Vec<HostPlan> = (0..count).map(|i| HostPlan::draw(i, v6, rng)).collect();
        // In calm runs nothing but the network is at fault, so every error is one too many.
        let calm = rng.chance(0.4);
        let connections = rng.range(1, 5);
        Self {
            conns: (0..connections)
                .map(|_| conn(&hosts, calm, scale.max(10), rng))
                .collect(),
            hosts,
            faults: faults(rng),
            chaos_end: rng.pick(&[20 * MS, 100 * MS, 400 * MS]),
            disturbances: if calm { 0 } else { rng.range(0, 6) as u32 },
            extended: false,
        }
    }

    /// Leaves no faults but narrow links and queues that overflow.
    pub(crate) fn narrow(&mut self, rng: &mut Rng) {
        self.faults = Faults {
            bandwidth: rng.pick(&[20_000_000, 125_000_000, 1_250_000_000]),
            queue: rng.pick(&[48 << 10, 100 << 10, 256 << 10]),
            // Longer than the first pause before a probe, too.
            delay: rng.pick(&[US, 30 * US, 200 * US, 200 * US, 2 * MS, 20 * MS]),
            ..self.faults.sound()
        };
        self.disturbances = 0;
        self.chaos_end = 5 * SEC;
        for host in &mut self.hosts {
            host.rx_buffer = host.rx_buffer.max(208 << 10);
            host.window.max = 4 << 20;
            host.window.initial = 64 << 10;
        }
        for conn in &mut self.conns {
            conn.bad_operations = 0.0;
            conn.recv_lag = 0;
            conn.recv_ahead = 16;
            conn.think = US;
            conn.largest = 48 << 10;
            conn.caps.max_send_wr = 64;
            conn.rd_atomic = 16;
            conn.timeout = 16;
            (conn.retry_cnt, conn.rnr_retry) = (7, 7);
        }
    }

    /// Leaves no faults at all, and enough work to see what is got through.
    pub(crate) fn clear(&mut self, rng: &mut Rng) {
        self.faults = Faults {
            bandwidth: rng.pick(&[125_000_000, 1_250_000_000]),
            queue: 64 << 20,
            ..self.faults.sound()
        };
        self.disturbances = 0;
        self.chaos_end = 0;
        self.extended = false;
        for host in &mut self.hosts {
            host.rx_buffer = 64 << 20;
        }
        for conn in &mut self.conns {
            conn.bad_operations = 0.0;
            conn.recv_lag = 0;
            conn.recv_ahead = 16;
            conn.think = rng.pick(&[20 * US, 200 * US, MS]);
            conn.operations = conn.operations.map(|n| n.max(150));
            (conn.retry_cnt, conn.rnr_retry) = (7, 7);
        }
    }

    /// Draws the faults of one link: the run's, weakened at random.
    pub fn link(&self, rng: &mut Rng) -> Faults {
        let f = self.faults;
        let share = |rng: &mut Rng, p: f64| p * rng.pick(&[0.0, 0.5, 1.0, 1.0]);
        Faults {
            loss: share(rng, f.loss),
            duplicate: share(rng, f.duplicate),
            reorder: share(rng, f.reorder),
            corrupt: share(rng, f.corrupt),
            ..f
        }
    }
}
