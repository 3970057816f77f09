//! Counts of runs.

use std::collections::BTreeMap;

use roce_verbs::WcStatus;

use crate::runner::Total;

macro_rules! counts {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// Counts of one run, or of several.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct Stats {
            $( $(#[$doc])* pub $name: u64, )*
            /// Fingerprint of the run: times, headers of all packets received, completions. Of several runs: combined.
            pub trace_hash: u64,
            /// Time from the end of the faults until all work was done; of several runs the longest.
            pub longest_quiet_ns: u64,
            /// Time that the slowest client needed to be accepted under a flood of requests.
            pub longest_admission_ns: u64,
            /// Completions with an error, by status.
            pub errors: BTreeMap<String, u64>,
        }

        impl Stats {
            /// Returns the counts that are summed up, with their names.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [ $( (stringify!($name), self.$name), )* ].into_iter()
            }
        }

        impl Total for Stats {
            fn add(&mut self, other: &Self) {
                $( self.$name += other.$name; )*
                self.trace_hash ^= other.trace_hash;
                self.longest_quiet_ns = self.longest_quiet_ns.max(other.longest_quiet_ns);
                self.longest_admission_ns = self.longest_admission_ns.max(other.longest_admission_ns);
                for (status, n) in &other.errors {
                    *self.errors.entry(status.clone()).or_default() += n;
                }
            }
        }
    };
}

counts! {
    runs,
    simulated_ns,
    /// Time from the last connection's being up until all work was done.
    work_ns,
    /// Payload bytes of the connections' work requests.
    work_bytes,
    events,
    timer_runs,
    packets,
    trains,
    lost,
    duplicated,
    reordered,
    corrupted,
    overflowed,
    icrc_errors,
    retransmissions,
    rnr_naks,
    operations,
    faulty_operations,
    /// Operations among them whose memory, at one end, is missing.
    missing_pages,
    succeeded,
    receives,
    messages,
    /// Messages of UC, UD, XRC and shared receive queues.
    service_messages,
    completions,
    connections,
    repairs,
    disturbances,
    drains,
    cm_events,
    /// Packets of adversaries.
    forged,
    /// Packets to addresses that belong to nobody.
    reflected,
    /// Requests to connect that found a listener's backlog full.
    backlog_drops,
    /// Questions of adversaries beyond those that a program may hold.
    question_drops,
    /// Forged packets to connected queue pairs, at and around the PSNs in use.
    at_live,
    /// Packets among them at the exact PSN where another port has been learned: each PSN once from a port.
    exact,
    /// Guesses of adversaries that were redrawn because they hit the peer's source port, which only the peer knows.
    port_hits,
    /// Guesses that were redrawn because they hit the exact PSN where that would be believed.
    psn_hits,
    /// Clients that were accepted under a flood of requests.
    admitted,
    /// Packets of observers.
    meddled,
    /// Forged copies of packets beyond a gap.
    copies,
    /// Runs with and without an adversary, and bytes and nanoseconds of the work in either.
    pairs,
    alone_bytes,
    alone_ns,
    attacked_bytes,
    attacked_ns,
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
