//! What a run tells: a line a minute, and a summary.

use std::{
    io::{self, Write as _},
    sync::atomic::Ordering::Relaxed,
    time::Duration,
};

use ferroce_tests::usage::{Flat, Usage};

use crate::{run::Run, seen::Counts};

/// What counts as flat, from the first calm moment to the last.
const FLAT: Flat = Flat {
    memory: 16 << 20,
    threads: 2,
    descriptors: 4,
};

impl Run<'_> {
    /// What has grown.
    pub(crate) fn grown(&self) -> Vec<String> {
        let each = self.tally.usage.iter().map(|(name, (first, last))| {
            let chunks = self.tally.chunks.get(name).copied().unwrap_or_default();
            let first = Usage {
                anonymous: first.anonymous.max(chunks),
                ..*first
            };
            FLAT.grown(name, first, *last)
        });
        each.flatten().collect()
    }

    fn requests(&self) -> (u64, u64, u64, u64) {
        let each = self.world.loads().map(|load| &load.told);
        each.fold((0, 0, 0, 0), |(requests, bytes, left, cut_off), told| {
            (
                requests + told.requests.load(Relaxed),
                bytes + told.bytes.load(Relaxed),
                left + told.left.load(Relaxed),
                cut_off + told.cut_off.load(Relaxed),
            )
        })
    }

    /// All sessions together.
    pub(crate) fn counts(&self) -> Counts {
        let each = self.world.devices.iter().map(|device| device.counts());
        each.fold(Counts::default(), |sum, counts| sum + counts)
    }

    pub(crate) fn summarise(&mut self) {
        self.report();
        let (requests, bytes, left, cut_off) = self.requests();
        println!(
            "{requests} requests, {} MiB, {left} NBD clients left; where that is allowed, {} requests failed, and {cut_off} ended with the mapping",
            bytes >> 20,
            self.tally.allowed_errors
        );
        let each = self.tally.trouble.iter().map(|(kind, times)| format!("{kind} {times}"));
        println!("trouble: {}", each.collect::<Vec<_>>().join(", "));
        let each = self
            .tally
            .commands
            .iter()
            .map(|(kind, times)| format!("{kind} {times}"));
        println!("commands: {}", each.collect::<Vec<_>>().join(", "));
        let done = self.world.daemon.iter().flat_map(|daemon| daemon.done());
        let each = done.map(|(kind, times)| format!("{kind} {times}"));
        println!("administration: {}", each.collect::<Vec<_>>().join(", "));
        println!("events: {:?}; {} servers", self.counts(), self.world.generation);
        let (counters, under_way) = self.world.counters();
        let each = counters.named().map(|(name, n)| format!("{name} {n}"));
        println!("frames: {}, under way {under_way}", each.collect::<Vec<_>>().join(", "));
        self.tally.long.sort_by_key(|(_, took, _)| std::cmp::Reverse(*took));
        println!(
            "{} requests took a second or longer; the longest with a network that was whole: {}",
            self.tally.long.len(),
            match self.tally.failover {
                Duration::ZERO => "less".to_owned(),
                took => format!("{:.1} s", took.as_secs_f64()),
            }
        );
        for (at, took, what) in self.tally.long.iter().take(5) {
            println!("  {:6.1} s until {at:.0} s: {what}", took.as_secs_f64());
        }
        let (certain, doubtful) = self.tally.compared;
        println!("compared at the end: {certain} blocks, and {doubtful} that may hold one of several writes");
        println!(
            "calm moments: {}; memory in MiB, threads, descriptors, at first and at last:",
            self.tally.moments
        );
        for (name, (first, last)) in &self.tally.usage {
            let shown = |u: &Usage| {
                format!(
                    "{:6.1} {:3} {:4}",
                    u.anonymous as f64 / f64::from(1 << 20),
                    u.threads,
                    u.descriptors
                )
            };
            println!("  {name:14} {} | {}", shown(first), shown(last));
        }
    }

    /// The line of a minute.
    pub(crate) fn report(&self) {
        let minute = self.begun.elapsed().as_secs() / 60;
        let (requests, bytes, ..) = self.requests();
        let counts = self.counts();
        let longest = self.world.loads().map(|load| load.told.longest()).max();
        let longest = longest.unwrap_or_default();
        let trouble: u64 = self.tally.trouble.values().sum();
        println!(
            "{minute:6} {requests:10} {:8} {trouble:8} {:6} {:9} {:6} {:8} {:9.1}",
            bytes >> 20,
            counts.path_down,
            counts.failovers,
            counts.session_lost,
            self.world.generation,
            longest.as_secs_f64()
        );
        let _ = io::stdout().flush();
    }
}

/// Of the lines.
pub(crate) const HEAD: &str = "minute   requests      MiB  trouble  downs failovers   lost  servers  longest/s";
