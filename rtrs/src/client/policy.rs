//! How the path of a request is chosen.

use core::str::FromStr;

/// How a session chooses among the paths that are up (`mpath_policy`, `rtrs-clt-sysfs.c`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub enum Policy {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests in flight; of equals the first. Each loop of a client counts its own, and begins with another.
    #[default]
    MinInflight,
    /// The one whose last heartbeat was answered soonest; one that was not measured yet only if there is no other.
    MinLatency,
}

impl Policy {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::RoundRobin, Self::MinInflight, Self::MinLatency];

    /// Name, as the kernel has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::MinInflight => "min-inflight",
            Self::MinLatency => "min-latency",
        }
    }

    /// Two letters, as the kernel takes them.
    pub const fn short(self) -> &'static str {
        match self {
            Self::RoundRobin => "rr",
            Self::MinInflight => "mi",
            Self::MinLatency => "ml",
        }
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// There is no such policy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no policy `{0}`: there are round-robin (rr), min-inflight (mi) and min-latency (ml)")]
pub struct NoPolicy(String);

impl FromStr for Policy {
    type Err = NoPolicy;

    /// Names, two letters or numbers, in any case (`mpath_policy_store`).
    fn from_str(text: &str) -> Result<Self, NoPolicy> {
        let lower = text.to_ascii_lowercase();
        let is = |(number, policy): &(usize, Self)| {
            lower == policy.name() || lower == policy.short() || lower == number.to_string()
        };
        let found = Self::ALL.into_iter().enumerate().find(is);
        found.map(|(_, policy)| policy).ok_or_else(|| NoPolicy(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::Policy;

    #[test]
    fn policies_have_the_kernels_names() {
        for (n, policy) in Policy::ALL.into_iter().enumerate() {
            for text in [
                policy.name(),
                policy.short(),
                &n.to_string(),
                &policy.name().to_uppercase(),
            ] {
                assert_eq!(text.parse(), Ok(policy));
            }
        }
        for wrong in ["", "3", "r", "rrr", "min", "-1"] {
            assert!(wrong.parse::<Policy>().is_err(), "{wrong}");
        }
        assert_eq!(Policy::default(), Policy::MinInflight);
    }
}
