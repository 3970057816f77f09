//! Signs of life of a session's paths, as looks at them find them.

use roce_verbs::Instant;

/// As many looks find a path silent, and another not, before it is given up.
pub(super) const LOOKS: u32 = 8;

/// Keepalive state of a path.
#[derive(Debug, Default)]
pub(crate) struct Signs {
    /// A packet has come since the last look.
    pub(super) heard: bool,
    /// Questions since something came.
    pub(super) owed: u32,
    /// Looks since then that found that something had come by another path.
    behind: u32,
}

impl Signs {
    /// Records that a packet has come.
    pub(crate) fn heard(&mut self) {
        *self = Self {
            heard: true,
            ..Self::default()
        };
    }

    /// A look, at which some path is alive or none is. True: this one is given up.
    pub(super) fn look(&mut self, life: bool) -> bool {
        if !core::mem::take(&mut self.heard) && self.owed > 0 && life {
            self.behind += 1;
        }
        self.behind >= LOOKS
    }
}

/// When the paths of a session are looked at.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(super) at: Option<Instant>,
    /// Requests have come of late.
    pub(super) busy_until: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that was asked.
    fn asked() -> Signs {
        Signs {
            owed: 1,
            ..Signs::default()
        }
    }

    #[test]
    fn looks_count_that_find_another_path_alive() {
        let mut signs = asked();
        for _ in 1..LOOKS {
            assert!(!signs.look(true));
            assert!(!signs.look(false), "all are silent");
        }
        assert!(signs.look(true));
    }

    #[test]
    fn any_sign_of_life_starts_over() {
        let mut signs = asked();
        for _ in 0..10 {
            for _ in 1..LOOKS {
                assert!(!signs.look(true));
            }
            signs.heard();
            assert!(!signs.look(true), "it is the one that is alive");
            signs.owed += 1;
        }
    }

    #[test]
    fn who_was_not_asked_owes_nothing() {
        let mut signs = Signs::default();
        assert!((0..100).all(|_| !signs.look(true)));
    }
}
