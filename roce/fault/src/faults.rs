//! The rules of a device that hold now, what they have done, and the faults of verbs.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use parking_lot::Mutex;
use rand::{Rng, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use roce_verbs::{Completion, WcStatus, counters, wr::PostError};

use crate::rule::{Action, Kind, Posting, QpRef, Rule, RuleError, VerbFault, check_number};

/// Queue pairs of which a rule keeps the state; beyond that those that were used longest ago start again.
const MAX_STREAMS: usize = 1 << 16;

counters! {
    /// Counts of a rule.
    pub(crate) struct Counts;

    /// Packets that the rule applied to.
    packets,
    /// Packets lost.
    lost,
    /// Packets dropped because the line's queue or the memory for delayed packets was full.
    dropped,
    /// Packets duplicated.
    duplicated,
    /// Packets held back, so that others overtook them.
    reordered,
    /// Packets delayed.
    delayed,
    /// Packets with a flipped bit.
    corrupted,
    /// Packets that got ECN's CE mark.
    ecn_marked,
    /// Messages refused as if there were no receive work request.
    rnr,
    /// Calls, completions or messages that the rule applied to.
    calls,
    /// Calls, completions or messages among them that it has made fail.
    failed,
}

/// A rule that holds, and what it has done.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) rule: Rule,
    /// Leaf lock: acquire no other lock while holding it.
    pub(crate) counts: Mutex<Counts>,
}

/// Counts of a rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleReport {
    /// The rule as it was written.
    pub rule: String,
    /// Counts by name.
    pub counts: Vec<(&'static str, u64)>,
}

/// State of a rule for each queue pair, bounded; each with when it was used last.
#[derive(Debug)]
pub(crate) struct Streams<K, S> {
    all: HashMap<K, (u64, S)>,
    tick: u64,
}

impl<K, S> Default for Streams<K, S> {
    fn default() -> Self {
        Self {
            all: HashMap::new(),
            tick: 0,
        }
    }
}

impl<K: Eq + Hash, S> Streams<K, S> {
    /// Returns the state of a queue pair.
    pub(crate) fn of(&mut self, key: K, make: impl FnOnce() -> S) -> &mut S {
        self.tick += 1;
        if self.all.len() >= MAX_STREAMS && !self.all.contains_key(&key) {
            let mut ages: Vec<u64> = self.all.values().map(|(used, _)| *used).collect();
            ages.sort_unstable();
            let middle = ages[ages.len() / 2];
            self.all.retain(|_, (used, _)| *used > middle);
        }
        let (used, state) = self.all.entry(key).or_insert_with(|| (0, make()));
        *used = self.tick;
        state
    }
}

/// The seed of a queue pair's stream of random numbers under a rule.
pub(crate) fn stream_seed(seed: u64, rule: usize, direction: u64, serial: u32) -> u64 {
    // SplitMix64's finalizer over distinct numbers (Steele, Lea and Flood 2014).
    let mut z = seed
        .wrapping_add((rule as u64) << 34 | direction << 32 | u64::from(serial))
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// State of a verb's rule for a queue pair.
#[derive(Debug)]
struct Calls {
    seen: u64,
    rng: ChaCha8Rng,
}

#[derive(Default)]
struct Plan {
    rules: Arc<[Active]>,
    /// By rule and queue pair.
    calls: Streams<(usize, QpRef), Calls>,
}

impl Plan {
    /// Counts a call that rule `index` may apply to. Returns the ordinal number of the call for this queue pair, and whether the rule
    /// chooses it.
    fn next(&mut self, index: usize, qp: QpRef) -> (u64, bool) {
        let rule = &self.rules[index].rule;
        let calls = self.calls.of((index, qp), || Calls {
            seen: 0,
            rng: ChaCha8Rng::seed_from_u64(stream_seed(rule.seed, index, 2, qp.serial)),
        });
        calls.seen += 1;
        let nth = rule.which.nth.as_ref().is_none_or(|nth| nth.contains(calls.seen));
        let chosen = nth && rule.which.probability.is_none_or(|p| calls.rng.random::<f64>() < p);
        (calls.seen, chosen)
    }

    /// Counts a call with the rules that have an outcome for it, up to the first that chooses it. Returns that one's outcome.
    fn first<T>(&mut self, qp: QpRef, outcome: impl Fn(&Rule, VerbFault) -> Option<T>) -> Option<T> {
        for (index, fault) in self.verbs(qp) {
            let Some(outcome) = outcome(&self.rules[index].rule, fault) else {
                continue;
            };
            let (_, chosen) = self.next(index, qp);
            self.count(index, chosen);
            if chosen {
                return Some(outcome);
            }
        }
        None
    }

    /// Returns the verb's rules that concern a queue pair.
    fn verbs(&self, qp: QpRef) -> Vec<(usize, VerbFault)> {
        let all = self.rules.iter().enumerate();
        let of = |(index, active): (usize, &Active)| match active.rule.action {
            Action::Verb(fault) if active.rule.which.has_qp(qp) => Some((index, fault)),
            _ => None,
        };
        all.filter_map(of).collect()
    }

    fn count(&self, index: usize, failed: bool) {
        let mut counts = self.rules[index].counts.lock();
        counts.calls += 1;
        counts.failed += u64::from(failed);
    }
}

#[derive(Default)]
struct Shared {
    /// Changes with the rules.
    generation: AtomicU64,
    /// There are rules about verbs.
    verbs: AtomicBool,
    plan: Mutex<Plan>,
}

/// The rules of a device, which may change at any time. Clones share them.
#[derive(Clone, Default)]
pub struct Faults(Arc<Shared>);

impl core::fmt::Debug for Faults {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let rules: Vec<String> = self.report().into_iter().map(|r| r.rule).collect();
        f.debug_tuple("Faults").field(&rules).finish()
    }
}

/// How a call that posts work requests goes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct PostPlan {
    /// Work requests to post.
    accepted: usize,
    /// The error of the next one; `None`: all are posted.
    refusal: Option<PostError>,
    /// After this number of work requests the queue pair moves to the error state.
    error_after: Option<usize>,
}

/// Step of a call that posts work requests.
#[derive(Clone, Copy, Debug)]
pub enum PostStep<'a, T> {
    /// Post these.
    Post(&'a [T]),
    /// Move the queue pair to the error state.
    Fail,
}

/// Result of posting: the number of work requests accepted before the first refusal, and the refusal.
pub type Posted = Result<(), (usize, PostError)>;

impl Faults {
    /// Creates faults with these rules.
    ///
    /// # Errors
    /// More than [`MAX_RULES`](crate::MAX_RULES).
    pub fn new(rules: Vec<Rule>) -> Result<Self, RuleError> {
        let this = Self::default();
        this.set(rules)?;
        Ok(this)
    }

    /// Replaces all rules. Counts and ordinal numbers start again; packets under way arrive.
    ///
    /// # Errors
    /// More than [`MAX_RULES`](crate::MAX_RULES); nothing changes.
    pub fn set(&self, rules: Vec<Rule>) -> Result<(), RuleError> {
        check_number(&rules)?;
        let verbs = rules.iter().any(|rule| matches!(rule.action, Action::Verb(_)));
        let counts = Mutex::default;
        let active = rules.into_iter().map(|rule| Active { rule, counts: counts() });
        *self.0.plan.lock() = Plan {
            rules: active.collect(),
            calls: Streams::default(),
        };
        self.0.verbs.store(verbs, Relaxed);
        self.0.generation.fetch_add(1, Release);
        Ok(())
    }

    /// Removes all rules.
    pub fn clear(&self) {
        // No rules are not too many.
        let _ = self.set(Vec::new());
    }

    /// Returns what each rule has done since it was set.
    pub fn report(&self) -> Vec<RuleReport> {
        let rules = self.rules();
        let report = |active: &Active| RuleReport {
            rule: active.rule.to_string(),
            counts: active.counts.lock().named().collect(),
        };
        rules.iter().map(report).collect()
    }

    pub(crate) fn generation(&self) -> u64 {
        self.0.generation.load(Acquire)
    }

    pub(crate) fn rules(&self) -> Arc<[Active]> {
        self.0.plan.lock().rules.clone()
    }

    /// Whether there are rules about verbs now.
    #[inline]
    pub fn concern_verbs(&self) -> bool {
        self.0.verbs.load(Relaxed)
    }

    /// Posts work requests by `step`, unless rules refuse some or move the queue pair to the error state. `whole`: post all or none.
    ///
    /// # Errors
    /// A rule's refusal, or the first of `step`.
    pub fn post<T>(
        &self,
        verb: Posting,
        qp: QpRef,
        wrs: &[T],
        whole: bool,
        mut step: impl FnMut(PostStep<'_, T>) -> Posted,
    ) -> Posted {
        let plan = self.posting(verb, qp, wrs.len());
        let accepted = &wrs[..plan.accepted];
        let refused = plan.refusal.map_or(Ok(()), |e| Err((accepted.len(), e)));
        if whole {
            refused?;
        }
        let (before, after) = accepted.split_at(plan.error_after.unwrap_or(accepted.len()));
        if plan.error_after.is_some() && whole {
            step(PostStep::Post(accepted))?;
            return step(PostStep::Fail);
        }
        step(PostStep::Post(before))?;
        if plan.error_after.is_some() {
            step(PostStep::Fail)?;
            step(PostStep::Post(after)).map_err(|(n, e)| (before.len() + n, e))?;
        }
        refused
    }

    /// Decides about posting `n` work requests to a queue pair.
    fn posting(&self, verb: Posting, qp: QpRef, n: usize) -> PostPlan {
        let mut result = PostPlan {
            accepted: n,
            refusal: None,
            error_after: None,
        };
        let mut plan = self.0.plan.lock();
        let rules = plan.verbs(qp);
        for i in 0..n {
            for (index, fault) in &rules {
                let refusal = match fault {
                    VerbFault::Post(of, error) if *of == verb => *error,
                    _ => continue,
                };
                let (_, chosen) = plan.next(*index, qp);
                plan.count(*index, chosen);
                if chosen && result.refusal.is_none() {
                    result.refusal = Some(refusal);
                }
            }
            if result.refusal.is_some() {
                result.accepted = i;
                break;
            }
            for (index, fault) in &rules {
                let VerbFault::QpError(after) = fault else { continue };
                if verb != Posting::Send {
                    continue;
                }
                let (message, _) = plan.next(*index, qp);
                plan.count(*index, message == *after);
                if message == *after {
                    result.error_after.get_or_insert(i + 1);
                }
            }
        }
        result
    }

    /// Replaces the status of a completion that a rule chooses. Returns true if it did: the queue pair moves to the error state then.
    pub fn complete(&self, serial: u32, completion: &mut Completion) -> bool {
        if completion.status != WcStatus::Success {
            return false;
        }
        let qp = QpRef {
            qpn: completion.qpn.value(),
            serial,
        };
        let outcome = |rule: &Rule, fault| match fault {
            VerbFault::Completion(status) => {
                let kind = rule.which.kind;
                (kind.is_none() || kind == Kind::of_completion(completion.opcode)).then_some(status)
            }
            _ => None,
        };
        let status = self.0.plan.lock().first(qp, outcome);
        status.map(|status| completion.status = status).is_some()
    }

    /// Decides about the registration of memory. Returns the error number if it fails.
    pub fn registering(&self) -> Option<i32> {
        let none = QpRef { qpn: 0, serial: 0 };
        self.0.plan.lock().first(none, |_, fault| match fault {
            VerbFault::Register(errno) => Some(errno),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use roce_verbs::{Qpn, WcOpcode};

    use super::*;
    use crate::rule::rules;

    const QP: QpRef = QpRef { qpn: 0x12, serial: 1 };
    const OTHER: QpRef = QpRef { qpn: 0x13, serial: 2 };

    fn faults(text: &str) -> Faults {
        Faults::new(rules(text).unwrap()).unwrap()
    }

    fn done(faults: &Faults, rule: usize) -> (u64, u64) {
        let counts = &faults.report()[rule].counts;
        let of = |name| counts.iter().find(|(n, _)| *n == name).unwrap().1;
        (of("calls"), of("failed"))
    }

    #[test]
    fn the_nth_post_of_a_queue_pair_is_refused() {
        let faults = faults("post_send=ENOMEM,nth=3+5");
        assert!(faults.concern_verbs());
        let post = |qp, n| {
            let plan = faults.posting(Posting::Send, qp, n);
            (plan.accepted, plan.refusal)
        };
        assert_eq!(post(QP, 2), (2, None));
        assert_eq!(post(OTHER, 1), (1, None), "each queue pair has its own numbers");
        assert_eq!(post(QP, 4), (0, Some(PostError::QueueFull)));
        assert_eq!(post(QP, 4), (1, Some(PostError::QueueFull)));
        assert_eq!(post(QP, 4), (4, None));
        assert_eq!(faults.posting(Posting::Recv, QP, 9).accepted, 9);
        assert_eq!(done(&faults, 0), (10, 2));
        // The number is another queue pair's now.
        assert_eq!(post(QpRef { serial: 3, ..QP }, 4), (2, Some(PostError::QueueFull)));
    }

    #[test]
    fn a_queue_pair_fails_after_some_messages() {
        let faults = faults("qp_error=3,qp=#1");
        let after = |qp, n| faults.posting(Posting::Send, qp, n).error_after;
        assert_eq!(
            [after(QP, 2), after(OTHER, 9), after(QP, 4), after(QP, 4)],
            [None, None, Some(1), None]
        );
        assert_eq!(done(&faults, 0), (10, 1));
    }

    #[test]
    fn posting_follows_the_rules() {
        let log = |rules: &str, whole| {
            let mut steps = Vec::new();
            let posted = faults(rules).post(Posting::Send, QP, &[1, 2, 3, 4], whole, |step| {
                steps.push(match step {
                    PostStep::Post(wrs) => format!("{wrs:?}"),
                    PostStep::Fail => "fail".into(),
                });
                Ok(())
            });
            (steps.join(" "), posted.map_err(|(n, _)| n))
        };
        assert_eq!(log("post_send=ENOMEM,nth=3", false), ("[1, 2]".into(), Err(2)));
        assert_eq!(log("post_send=ENOMEM,nth=3", true), (String::new(), Err(2)));
        assert_eq!(log("qp_error=1", false), ("[1] fail [2, 3, 4]".into(), Ok(())));
        assert_eq!(log("qp_error=1", true), ("[1, 2, 3, 4] fail".into(), Ok(())));
        assert_eq!(log("post_recv=ENOMEM", false), ("[1, 2, 3, 4]".into(), Ok(())));
    }

    #[test]
    fn a_status_is_replaced() {
        let faults = faults("wc=RETRY_EXC_ERR,kind=write,nth=2");
        let mut completion = Completion {
            opcode: WcOpcode::RdmaWrite,
            qpn: Qpn::new(0x12),
            ..Completion::default()
        };
        let mut send = Completion {
            opcode: WcOpcode::Send,
            ..completion
        };
        assert!(!faults.complete(1, &mut completion) && !faults.complete(1, &mut send));
        assert!(faults.complete(1, &mut completion));
        assert_eq!(completion.status, WcStatus::RetryExceeded);
        assert!(!faults.complete(1, &mut completion), "it has failed already");
        assert_eq!(done(&faults, 0), (2, 1));
    }

    #[test]
    fn registrations_fail_at_random_but_repeatably() {
        let failed = |seed: u64| {
            let faults = faults(&format!("reg_mr=EFAULT,p=30%,seed={seed}"));
            (0..1000).map(|_| faults.registering().is_some()).collect::<Vec<_>>()
        };
        assert_eq!(failed(7), failed(7));
        assert_ne!(failed(7), failed(8));
        let times = failed(7).iter().filter(|failed| **failed).count();
        assert!((230..370).contains(&times), "{times}");
    }

    #[test]
    fn rules_change_and_counts_start_again() {
        let faults = faults("reg_mr=ENOMEM");
        assert_eq!((faults.registering(), done(&faults, 0)), (Some(12), (1, 1)));
        faults.set(rules("loss=1%").unwrap()).unwrap();
        assert_eq!(faults.registering(), None);
        assert!(!faults.concern_verbs());
        assert_eq!(done(&faults, 0), (0, 0));
        faults.clear();
        assert_eq!(faults.report(), []);
    }

    #[test]
    fn state_is_bounded() {
        let mut streams = Streams::<u32, u64>::default();
        for key in 0..200_000 {
            *streams.of(key, || 0) += 1;
        }
        assert!(streams.all.len() <= MAX_STREAMS);
        assert_eq!(*streams.of(199_999, || 7), 1, "the last one is kept");
    }
}
