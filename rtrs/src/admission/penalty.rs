//! Clients whose sessions end with access errors again and again: their new paths are refused for a while, longer each
//! time.

use core::time::Duration;
use std::collections::BTreeMap;

use roce_verbs::Instant;

use super::Client;

/// Access errors that cost nothing: a client may have a bug, or have been restarted at a bad moment.
const FREE: u32 = 2;
/// The first pause; each further error doubles it.
const FIRST: Duration = Duration::from_secs(1);
/// Doublings at most: 64 s.
const MAX_DOUBLINGS: u32 = 6;
/// After so long one error is forgotten.
const FORGET: Duration = Duration::from_secs(120);
/// Clients remembered; the one whose last error is longest ago gives way.
const MAX_CLIENTS: usize = 1024;

struct Record {
    errors: u32,
    last: Instant,
}

#[derive(Default)]
pub(super) struct Penalties(BTreeMap<Client, Record>);

impl Record {
    fn remembered(&self, now: Instant) -> u32 {
        let forgotten = now.saturating_since(self.last).as_nanos() / FORGET.as_nanos();
        self.errors.saturating_sub(u32::try_from(forgotten).unwrap_or(u32::MAX))
    }

    fn pause(&self) -> Duration {
        match self.errors.checked_sub(FREE + 1) {
            None => Duration::ZERO,
            Some(doublings) => FIRST * (1 << doublings.min(MAX_DOUBLINGS)),
        }
    }
}

impl Penalties {
    /// A session of this client ended with an access error.
    pub(super) fn add(&mut self, now: Instant, client: Client) {
        if let Some(r) = self.0.get_mut(&client) {
            r.errors = r.remembered(now).saturating_add(1);
            r.last = now;
            return;
        }
        if self.0.len() >= MAX_CLIENTS
            && let Some(oldest) = self.0.iter().min_by_key(|(_, r)| r.last).map(|(c, _)| *c)
        {
            self.0.remove(&oldest);
        }
        self.0.insert(client, Record { errors: 1, last: now });
    }

    /// Whether this client has to wait.
    pub(super) fn waits(&self, now: Instant, client: Client) -> bool {
        let record = self.0.get(&client);
        record.is_some_and(|r| now.saturating_since(r.last) < r.pause())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(secs)
    }

    fn client(n: u32) -> Client {
        Client::of(core::net::Ipv4Addr::from_bits(n).into())
    }

    #[test]
    fn pauses_double_and_errors_are_forgotten() {
        let (mut p, c) = (Penalties::default(), client(1));
        for _ in 0..FREE {
            p.add(at(0), c);
            assert!(!p.waits(at(0), c));
        }
        let mut now = 0;
        for pause in [1, 2, 4, 8, 16, 32, 64, 64] {
            p.add(at(now), c);
            assert!(
                p.waits(at(now + pause - 1), c) && !p.waits(at(now + pause), c),
                "{pause}"
            );
            assert!(!p.waits(at(now), client(2)));
            now += pause;
        }
        // Long after, it begins again.
        now += 120 * 20;
        p.add(at(now), c);
        assert!(!p.waits(at(now), c));
    }

    #[test]
    fn no_more_clients_are_remembered_than_fit() {
        let mut p = Penalties::default();
        for n in 0..3 * MAX_CLIENTS as u32 {
            for _ in 0..=FREE {
                p.add(at(n.into()), client(n));
            }
        }
        assert_eq!(p.0.len(), MAX_CLIENTS);
        let last = 3 * MAX_CLIENTS as u32 - 1;
        assert!(p.waits(at(last.into()), client(last)));
    }
}
