//! Counts of runs.

use std::collections::BTreeMap;

use roce_cm::DropReason;
use roce_verbs::WcStatus;

use crate::{runner::Total, world::World};

/// Counts of one run, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Stats {
    pub runs: u64,
    /// Fingerprint of the run: times, headers of all packets received, completions. Of several runs: combined.
    pub trace_hash: u64,
    pub simulated_ns: u64,
    /// Time from the end of the faults until all work was done; of several runs the longest.
    pub longest_quiet_ns: u64,
    /// Time from the last connection's being up until all work was done.
    pub work_ns: u64,
    /// Payload bytes of the connections' work requests.
    pub work_bytes: u64,
    pub events: u64,
    pub timer_runs: u64,
    pub packets: u64,
    pub trains: u64,
    pub lost: u64,
    pub duplicated: u64,
    pub reordered: u64,
    pub corrupted: u64,
    pub overflowed: u64,
    pub icrc_errors: u64,
    pub retransmissions: u64,
    pub rnr_naks: u64,
    pub operations: u64,
    pub faulty_operations: u64,
    /// Operations among them whose memory, at one end, is missing.
    pub missing_pages: u64,
    pub succeeded: u64,
    pub receives: u64,
    pub messages: u64,
    /// Messages of UC, UD, XRC and shared receive queues.
    pub service_messages: u64,
    pub completions: u64,
    pub connections: u64,
    pub repairs: u64,
    pub disturbances: u64,
    pub drains: u64,
    pub cm_events: u64,
    /// Packets of adversaries, and what they caused to addresses that belong to nobody.
    pub forged: u64,
    pub reflected: u64,
    /// Requests to connect that found a listener's backlog full.
    pub backlog_drops: u64,
    /// Forged packets to connected queue pairs, at and around the PSNs in use.
    pub at_live: u64,
    /// Packets among them at the exact PSN where another port has been learned: each PSN once from a port.
    pub exact: u64,
    /// Guesses of adversaries that were redrawn because they hit the peer's source port, or the exact PSN where that would be
    /// believed: what only the peer knows.
    pub port_hits: u64,
    pub psn_hits: u64,
    /// Clients that were accepted under a flood of requests, and how long the slowest needed.
    pub admitted: u64,
    pub longest_admission_ns: u64,
    /// Packets of observers.
    pub meddled: u64,
    /// Forged copies of packets beyond a gap.
    pub copies: u64,
    /// Runs with and without an adversary, and bytes and nanoseconds of the work in either.
    pub pairs: u64,
    pub alone_bytes: u64,
    pub alone_ns: u64,
    pub attacked_bytes: u64,
    pub attacked_ns: u64,
    /// Completions with an error, by status.
    pub errors: BTreeMap<String, u64>,
}

impl Stats {
    pub(crate) fn count_error(&mut self, status: WcStatus) {
        *self.errors.entry(format!("{status:?}")).or_default() += 1;
    }

    /// The goodput of all pairs under attack as a share of that without.
    pub fn goodput(&self) -> f64 {
        let rate = |bytes: u64, ns: u64| bytes as f64 / ns.max(1) as f64;
        rate(self.attacked_bytes, self.attacked_ns) / rate(self.alone_bytes.max(1), self.alone_ns)
    }
}

impl Total for Stats {
    fn add(&mut self, other: &Self) {
        macro_rules! sum {
            ($($name:ident)*) => { $( self.$name += other.$name; )* };
        }
        sum!(runs simulated_ns events timer_runs packets trains lost duplicated reordered corrupted overflowed
             icrc_errors retransmissions rnr_naks operations faulty_operations missing_pages succeeded receives messages service_messages completions
             connections repairs disturbances drains cm_events work_ns work_bytes forged reflected backlog_drops at_live exact port_hits psn_hits meddled copies admitted pairs alone_bytes alone_ns attacked_bytes
             attacked_ns);
        self.trace_hash ^= other.trace_hash;
        self.longest_admission_ns = self.longest_admission_ns.max(other.longest_admission_ns);
        self.longest_quiet_ns = self.longest_quiet_ns.max(other.longest_quiet_ns);
        for (status, n) in &other.errors {
            *self.errors.entry(status.clone()).or_default() += n;
        }
    }
}

impl World {
    pub(crate) fn into_stats(mut self) -> Stats {
        self.stats.runs = 1;
        self.stats.trace_hash = self.trace.hash();
        self.stats.lost = self.net_stats.lost;
        self.stats.duplicated = self.net_stats.duplicated;
        self.stats.reordered = self.net_stats.reordered;
        self.stats.corrupted = self.net_stats.corrupted;
        self.stats.overflowed = self.net_stats.overflowed;
        if let Some(blind) = &self.blind {
            (self.stats.forged, self.stats.reflected) = (blind.forged, blind.reflected);
            self.stats.at_live = blind.at_live;
            self.stats.exact = blind.exact;
            [self.stats.port_hits, self.stats.psn_hits] = blind.redrawn;
        }
        if let Some(copies) = &self.copies {
            self.stats.copies = copies.sent;
        }
        if let Some(observer) = &self.observer {
            self.stats.meddled = observer.sent;
        }
        // Of hosts that died only their last life.
        for host in &self.hosts {
            let c = host.port.counters();
            self.stats.icrc_errors += c.icrc_errors + c.icrc_implausible;
            self.stats.retransmissions += c.tx_retransmissions;
            self.stats.rnr_naks += c.transport.send_rnr_err;
            let full = [DropReason::Backlog, DropReason::BacklogPeer];
            self.stats.backlog_drops += full.map(|reason| c.cm.dropped(reason)).iter().sum::<u64>();
        }
        self.stats
    }
}
