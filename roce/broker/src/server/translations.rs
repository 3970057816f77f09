//! Requests that prove address translation (NAT).

use roce_cm::{Translation, TranslationWatch, mad::Mad};
use roce_icrc::Flow;
use roce_net::now;
use roce_verbs::Instant;

use super::broker::Broker;
use crate::proto::{Meta, Translated};

/// Translated requests of late.
#[derive(Default)]
pub(super) struct Translations {
    watch: TranslationWatch,
    last: Option<(Instant, Translation)>,
}

impl Translations {
    /// Returns the last one, for statistics.
    pub(super) fn last(&self, now: Instant) -> Option<Translated> {
        self.last.map(|(at, found)| Translated {
            text: found.to_string(),
            age: now.saturating_since(at).as_secs(),
        })
    }
}

impl Broker {
    /// Reports a request that was dropped because of its ICRC if that proves address translation.
    ///
    /// The process that listens for the service gets the request too, no more than one in 10 s: it drops the request for the same reason,
    /// and tells its user, who may not see the broker's log.
    pub(super) fn look_for_translation(&mut self, meta: &Meta, bytes: &[u8], mad: &[u8]) {
        let Ok(flow) = Flow::try_from((meta.remote, (meta.local, roce_bth::ROCE_UDP_PORT).into())) else {
            return;
        };
        let now = now();
        let Some((found, report)) = self.translations.watch.examine(now, &flow, None, bytes) else {
            return;
        };
        self.count("icrc_translated");
        self.translations.last = Some((now, found));
        if !report {
            return;
        }
        tracing::warn!("a connect request was {found}. {}", Translation::ADVICE);
        let listener = Mad::parse(mad).ok().and_then(|mad| self.owner(meta, &mad.message));
        if let Some(place) = listener {
            self.forward(place, meta, bytes);
        }
    }
}
