//! What happens to the networks and processes: drawn from a seed.

use std::{fmt, time::Duration};

use ferroce_wire::{
    direction::{Burst, Conditions, Line},
    wire::{End, Wire},
};
use rand::{
    Rng,
    seq::{IndexedRandom as _, SliceRandom as _},
};
use rand_chacha::ChaCha8Rng;

/// Networks between the two ends.
pub(crate) const NETWORKS: u8 = 2;
/// Nothing lasts longer.
pub(crate) const LONGEST: Duration = Duration::from_secs(40);

/// How the server is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ServeOptions {
    /// It listens at the address of each network, not at 0.0.0.0.
    pub(crate) by_address: bool,
    pub(crate) queue_depth: u32,
    pub(crate) chunk_kib: u32,
    pub(crate) always_invalidate: bool,
    pub(crate) heartbeat: u32,
    pub(crate) threads: u16,
}

impl ServeOptions {
    /// As users have it.
    pub(crate) const USUAL: Self = Self {
        by_address: false,
        queue_depth: 512,
        chunk_kib: 128,
        always_invalidate: true,
        heartbeat: 5,
        threads: 1,
    };

    fn draw(rng: &mut ChaCha8Rng) -> Self {
        if rng.random_bool(0.5) {
            return Self::USUAL;
        }
        Self {
            by_address: rng.random(),
            queue_depth: [64, 128, 512, 1024][rng.random_range(0..4)],
            chunk_kib: [32, 64, 128, 256][rng.random_range(0..4)],
            always_invalidate: rng.random(),
            heartbeat: [1, 5, 10][rng.random_range(0..3)],
            threads: rng.random_range(1..=2),
        }
    }

    /// For the command line.
    pub(crate) fn args(&self) -> Vec<String> {
        let on = if self.always_invalidate { "on" } else { "off" };
        let networks = 0..if self.by_address { NETWORKS } else { 0 };
        let listen: Vec<_> = networks
            .map(|network| Wire::address(network, End::A).to_string())
            .collect();
        let listen = if listen.is_empty() {
            vec!["0.0.0.0".to_owned()]
        } else {
            listen
        };
        let listen = listen.into_iter().map(|address| ("--addr", address));
        let others = [
            ("--queue-depth", self.queue_depth.to_string()),
            ("--max-chunk-size", format!("{}K", self.chunk_kib)),
            ("--always-invalidate", on.to_owned()),
            ("--heartbeat", self.heartbeat.to_string()),
            ("--threads", self.threads.to_string()),
        ];
        let all = listen.chain(others);
        all.flat_map(|(option, value)| [option.to_owned(), value]).collect()
    }
}

/// Which way of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ways {
    /// What comes from this end.
    From(End),
    Both,
}

impl Ways {
    pub(crate) fn has(self, from: End) -> bool {
        self == Self::Both || self == Self::From(from)
    }

    fn draw(rng: &mut ChaCha8Rng) -> Self {
        match rng.random_range(0..4) {
            0 => Self::From(End::A),
            1 => Self::From(End::B),
            _ => Self::Both,
        }
    }
}

/// How a client ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// kill -9.
    Killed,
    /// As by ctrl-C.
    Interrupted,
    /// By a command, although NBD clients are there.
    Unmapped,
}

/// Something that takes paths away, or the server, or a client.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Outage {
    /// A network is silent.
    Cut(u8, Ways),
    /// All of them are.
    CutAll(Ways),
    /// The interface at this end has no carrier.
    Carrier(u8, End),
    /// The server is killed, and started again when it is over.
    Kill(ServeOptions),
    /// The server is stopped.
    StopServer,
    /// A client is stopped: its number, to be taken modulo how many there are.
    StopClient(u32),
    /// A client ends, and is started again when it is over.
    EndClient(u32, Ending),
}

impl Outage {
    /// The network that it is about, if it is one.
    pub(crate) fn network(&self) -> Option<u8> {
        match self {
            Self::Cut(network, _) | Self::Carrier(network, _) => Some(*network),
            _ => None,
        }
    }

    /// For the summary.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Cut(_, Ways::Both) => "network cut",
            Self::Cut(..) => "network cut one way",
            Self::CutAll(_) => "all networks cut",
            Self::Carrier(..) => "carrier lost",
            Self::Kill(_) => "server killed",
            Self::StopServer => "server stopped",
            Self::StopClient(_) => "client stopped",
            Self::EndClient(_, Ending::Killed) => "client killed",
            Self::EndClient(..) => "client ended",
        }
    }
}

impl fmt::Display for Outage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut(network, ways) => write!(f, "network {network} cut, {ways:?}"),
            Self::CutAll(ways) => write!(f, "all networks cut, {ways:?}"),
            Self::Carrier(network, end) => write!(f, "no carrier on network {network} at {end:?}"),
            Self::Kill(options) => write!(f, "server killed, to come back with {options:?}"),
            Self::StopServer => write!(f, "server stopped"),
            Self::StopClient(number) => write!(f, "client {number} stopped"),
            Self::EndClient(number, how) => write!(f, "client {number}: {how:?}"),
        }
    }
}

/// Mostly short, seldom long, at most so long.
fn duration(rng: &mut ChaCha8Rng, most: Duration) -> Duration {
    most.mul_f64(rng.random::<f64>().powi(4)).max(Duration::from_millis(50))
}

/// Draws an outage and how long it lasts. `kills`: whether processes may end.
pub(crate) fn outage(rng: &mut ChaCha8Rng, kills: bool) -> (Outage, Duration) {
    let outage = loop {
        let network = rng.random_range(0..NETWORKS);
        let end = *End::BOTH.choose(rng).unwrap_or(&End::A);
        break match rng.random_range(0..100) {
            0..35 => Outage::Cut(network, Ways::draw(rng)),
            35..45 => Outage::CutAll(Ways::draw(rng)),
            45..57 => Outage::Carrier(network, end),
            57..70 if kills => Outage::Kill(ServeOptions::draw(rng)),
            70..82 if kills => {
                let how = [Ending::Killed, Ending::Interrupted, Ending::Unmapped];
                Outage::EndClient(rng.random(), how[rng.random_range(0..3)])
            }
            82..92 => Outage::StopServer,
            92.. => Outage::StopClient(rng.random()),
            _ => continue,
        };
    };
    let most = match outage {
        Outage::Kill(_) | Outage::StopClient(_) | Outage::EndClient(..) => LONGEST / 3,
        _ => LONGEST,
    };
    (outage, duration(rng, most))
}

/// A kind of bad weather.
type Change = fn(&mut ChaCha8Rng, &mut Conditions);

const WEATHERS: [(&str, Change); 6] = [
    ("loss", |rng, c| c.loss = 0.05 * rng.random::<f64>().powi(2)),
    ("bursts", |rng, c| {
        c.burst = Some(Burst {
            begins: 0.005 * rng.random::<f64>(),
            length: rng.random_range(2.0..20.0),
        });
    }),
    ("duplicates", |rng, c| c.duplicate = 0.05 * rng.random::<f64>()),
    ("reordering", |rng, c| {
        c.reorder = 0.05 * rng.random::<f64>();
        c.reorder_by = Duration::from_micros(rng.random_range(50..5000));
    }),
    ("delay", |rng, c| {
        c.delay = Duration::from_micros(rng.random_range(100..80_000));
        c.jitter = c.delay.mul_f64(rng.random());
    }),
    ("a slow line", |rng, c| {
        c.line = Some(Line {
            rate: rng.random_range(3..40) * 1_000_000,
            queue: rng.random_range(32..512) << 10,
            // What we send says that it does not know ECN.
            mark_above: None,
        });
    }),
];

/// Bad weather on a network.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Weather {
    pub(crate) network: u8,
    pub(crate) ways: Ways,
    pub(crate) conditions: Conditions,
    /// What it is made of.
    pub(crate) kinds: Vec<&'static str>,
}

impl fmt::Display for Weather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "weather on network {}, {:?}: {} ({:?})",
            self.network,
            self.ways,
            self.kinds.join(", "),
            self.conditions
        )
    }
}

/// Draws bad weather and how long it lasts.
pub(crate) fn weather(rng: &mut ChaCha8Rng) -> (Weather, Duration) {
    let mut weather = Weather {
        network: rng.random_range(0..NETWORKS),
        ways: Ways::draw(rng),
        conditions: Conditions::default(),
        kinds: Vec::new(),
    };
    let mut all = WEATHERS;
    all.shuffle(rng);
    for (kind, change) in &all[..rng.random_range(1..=2)] {
        change(rng, &mut weather.conditions);
        weather.kinds.push(kind);
    }
    (weather, duration(rng, LONGEST))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn a_seed_gives_the_same_trouble_again_and_every_kind_comes() {
        let draw = |seed| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            (0..300)
                .map(|_| (outage(&mut rng, true), weather(&mut rng)))
                .collect::<Vec<_>>()
        };
        let all = draw(4);
        assert!(all == draw(4) && all != draw(5));
        let kinds: std::collections::BTreeSet<_> = all.iter().map(|((outage, _), _)| outage.kind()).collect();
        assert_eq!(kinds.len(), 9);
        assert!(all.iter().all(|((_, a), (_, b))| *a.max(b) <= LONGEST));
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        assert!((0..300).all(|_| !matches!(outage(&mut rng, false).0, Outage::Kill(_) | Outage::EndClient(..))));
    }
}
