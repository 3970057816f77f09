//! Requests that prove address translation (NAT).

use roce_icrc::Flow;
use roce_port::cm::{Translation, TranslationWatch};
use roce_verbs::Instant;

use crate::proto::Translated;

/// Recent translated requests.
#[derive(Default)]
pub(super) struct Translations {
    watch: TranslationWatch,
    last: Option<(Instant, Translation)>,
}

impl Translations {
    /// Examines a packet with a wrong ICRC. Returns the translation that it proves, and whether to report it.
    pub(super) fn examine(&mut self, now: Instant, flow: &Flow, packet: &[u8]) -> Option<(Translation, bool)> {
        let found = self.watch.examine(now, flow, None, packet)?;
        self.last = Some((now, found.0));
        Some(found)
    }

    /// Returns the last one, for statistics.
    pub(super) fn last(&self, now: Instant) -> Option<Translated> {
        self.last.map(|(at, found)| Translated {
            text: found.to_string(),
            age: now.saturating_since(at).as_secs(),
        })
    }
}
