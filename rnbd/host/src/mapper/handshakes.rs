//! Half-open NBD clients: those that have not chosen a device yet. Accepting them, their TLS handshakes and their negotiation get at most
//! half of a loop's time while others are served there: an asymmetric operation of TLS takes as long as many reads.

use std::{collections::VecDeque, io, time::Duration};

use roce::reactor::TurnCx;
use roce_verbs::Instant;

use super::Service;
use crate::accept::Connected;

/// Connections that are accepted in a step.
const ACCEPTS: usize = 4;
/// While so many half-open clients wait for the loop, further ones stay in the backlog: those that are accepted are served soon enough
/// not to be evicted.
const MAX_QUEUE: usize = 8;
/// Reads from a client's socket in a step: what it has sent, and what that makes of it.
const READS: usize = 2;
/// The longest pause after a step. A step that took longer was interrupted.
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// Choice of the next half-open client, and its time.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// Clients that have sent something, in that order.
    queue: VecDeque<usize>,
    paused_until: Option<Instant>,
}

impl Handshakes {
    pub(super) fn push(&mut self, client: usize) {
        self.queue.push_back(client);
    }

    pub(super) fn forget(&mut self, client: usize) {
        self.queue.retain(|waits| *waits != client);
    }

    /// More clients can be served soon.
    fn has_room(&self) -> bool {
        self.queue.len() < MAX_QUEUE
    }

    /// A step may be taken now.
    fn is_due(&self, now: Instant) -> bool {
        self.paused_until.is_none_or(|until| until <= now)
    }

    /// A step was taken: others get as much time before the next.
    fn pause(&mut self, began: Instant, ended: Instant) {
        let pause = ended.saturating_since(began).min(MAX_PAUSE);
        self.paused_until = Some(ended + pause);
    }

    pub(super) fn timeout(&mut self, now: Instant) {
        self.paused_until = self.paused_until.filter(|until| *until > now);
    }

    /// When the next step is due that isn't taken at once. `connections`: some can be accepted; `accepts_at`: or then.
    pub(super) fn next_timeout(&self, connections: bool, accepts_at: Option<Instant>) -> Option<Instant> {
        let Some(until) = self.paused_until else {
            return accepts_at;
        };
        match connections || !self.queue.is_empty() {
            true => Some(until),
            false => accepts_at.map(|at| at.max(until)),
        }
    }
}

impl Service {
    /// Takes a step with those that have connected, and with one of the half-open clients.
    pub(super) fn shake_hands(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        for (index, client) in &mut self.clients {
            if client.is_half_open() && !client.queued && client.can_read() {
                client.queued = true;
                self.handshakes.push(index);
            }
        }
        let waits = !self.handshakes.queue.is_empty() || self.accept_path.is_ready();
        if !waits || !self.handshakes.is_due(turn.now) {
            return false;
        }
        let began = roce::now();
        let mut worked = self.handshakes.has_room() && self.accept(turn);
        if let Some(index) = self.handshakes.queue.pop_front() {
            worked = true;
            if let Some(client) = self.clients.get_mut(index) {
                client.queued = false;
            }
            self.serve(turn, index, READS);
        }
        let has_others = self.clients.iter().any(|(_, client)| !client.is_half_open()) || !self.fronts.is_empty();
        if worked && has_others {
            self.handshakes.pause(began, roce::now());
        }
        worked
    }

    /// Accepts connections.
    fn accept(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        for count in 0..ACCEPTS {
            let Some(connected) = self.accept_path.next(turn.now) else {
                return count > 0;
            };
            match connected {
                Connected::Client(id, stream, evicted) => {
                    if let Some(evicted) = evicted {
                        self.evict(turn, evicted, "others came before it had chosen a device");
                    }
                    self.admit(turn, stream, id);
                }
                Connected::Rejected(why) => self.turn_away(turn.now, &why),
            }
        }
        true
    }

    /// A client's connection is closed, for this reason.
    fn evict(&mut self, turn: &mut TurnCx<'_, ()>, id: u64, why: &str) {
        let found = self.clients.iter().find(|(_, client)| client.id == id);
        let Some((index, client)) = found else { return };
        let origin = client.origin();
        self.with_client(turn, index, |client, now, backend| client.connection.cut(now, backend));
        self.turn_away(turn.now, &io::Error::other(format!("{origin}{why}")));
    }

    /// Registers the device that a client has chosen, once.
    pub(super) fn look_chosen(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) {
        let Some(client) = self.clients.get_mut(index).filter(|c| c.is_half_open()) else {
            return;
        };
        let Some(key) = client.device() else { return };
        let id = client.id;
        client.opener = Some(self.rnbd.opener(key));
        if let Some(device) = self.device(key) {
            device.users += 1;
        }
        if let Err(full) = self.accept_path.chosen(id) {
            self.evict(turn, id, &full.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    #[test]
    fn half_of_the_time_is_for_others() {
        let mut handshakes = Handshakes::default();
        assert!(handshakes.is_due(at(0)));
        handshakes.pause(at(1000), at(1800));
        assert!(!handshakes.is_due(at(2599)) && handshakes.is_due(at(2600)));
        // Nobody wakes the loop if there is nothing to do.
        assert_eq!(handshakes.next_timeout(false, None), None);
        assert_eq!(handshakes.next_timeout(true, None), Some(at(2600)));
        assert_eq!(handshakes.next_timeout(false, Some(at(2000))), Some(at(2600)));
        assert_eq!(handshakes.next_timeout(false, Some(at(3000))), Some(at(3000)));
        handshakes.push(3);
        assert_eq!(handshakes.next_timeout(false, None), Some(at(2600)));
        handshakes.timeout(at(2600));
        assert_eq!(handshakes.next_timeout(true, None), None, "it is done at once");
        // The process was stopped.
        handshakes.pause(at(0), at(5_000_000));
        assert!(handshakes.is_due(at(5_000_000) + MAX_PAUSE));
    }
}
