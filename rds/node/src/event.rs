//! Events of the node for its user.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    time::Duration,
};

use rds::{Broken, PairKey, Refused};
use roce_verbs::Instant;

/// Events that wait for the user; further ones are counted.
const QUEUE: usize = 1024;
/// Time for which the same event is not reported again, where peers and programs can repeat it.
const AGAIN: Duration = Duration::from_secs(10);
/// Subjects of repeated events that are remembered; events of others are counted.
const SUBJECTS: usize = 1024;

/// Event of the node.
#[derive(Debug)]
pub enum NodeEvent {
    /// An address is open: peers can connect to it.
    Opened {
        /// The address.
        addr: IpAddr,
        /// RDMA device that has it; `None`: it is in software.
        device: Option<String>,
    },
    /// An address could not be opened.
    NotOpened {
        /// The address.
        addr: IpAddr,
        /// Why.
        why: String,
    },
    /// A connection is up.
    Up(PairKey),
    /// A connection has ended.
    Down(PairKey, Broken),
    /// A peer could not be connected. The node goes on trying while there is something to send.
    ConnectFailed(PairKey, Broken),
    /// A peer's request to connect was refused.
    Refused {
        /// The peer.
        peer: IpAddr,
        /// Why.
        why: Refused,
    },
    /// A peer was started again, and counts its messages from the beginning.
    PeerRestarted(PairKey),
    /// A port is congested: its program does not read.
    Congested(SocketAddr),
    /// A peer has congested ports: programs that send there wait.
    PeerCongested(IpAddr),
    /// A process has reached a limit.
    Limit {
        /// The process.
        process: u32,
        /// The limit.
        what: &'static str,
    },
    /// A state file is not usable, or can't be written.
    StateFile {
        /// Its address.
        addr: IpAddr,
        /// The fault, and what is done.
        why: String,
    },
    /// So many events were not read in time, or were too many.
    Lost(u64),
}

/// Subject of an event that may be repeated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Subject {
    NotOpened(IpAddr),
    ConnectFailed(PairKey),
    Refused(IpAddr),
    Congested(SocketAddr),
    PeerCongested(IpAddr),
    Limit(u32, &'static str),
}

impl NodeEvent {
    fn subject(&self) -> Option<Subject> {
        Some(match self {
            Self::NotOpened { addr, .. } => Subject::NotOpened(*addr),
            Self::ConnectFailed(key, _) => Subject::ConnectFailed(*key),
            Self::Refused { peer, .. } => Subject::Refused(*peer),
            Self::Congested(addr) => Subject::Congested(*addr),
            Self::PeerCongested(peer) => Subject::PeerCongested(*peer),
            Self::Limit { process, what } => Subject::Limit(*process, what),
            _ => return None,
        })
    }
}

/// Sender of events. It never waits.
#[derive(Debug)]
pub(crate) struct Events {
    queue: SyncSender<NodeEvent>,
    /// When subjects were reported.
    reported: BTreeMap<Subject, Instant>,
    /// When it was too many of them the last time.
    full_since: Option<Instant>,
    lost: u64,
}

impl Events {
    /// Returns a sender, and its receiver.
    pub(crate) fn new() -> (Self, Receiver<NodeEvent>) {
        let (queue, receiver) = sync_channel(QUEUE);
        let this = Self {
            queue,
            reported: BTreeMap::new(),
            full_since: None,
            lost: 0,
        };
        (this, receiver)
    }

    /// Reports an event, but not one of a kind that peers or programs can repeat, and that was reported a short time ago.
    pub(crate) fn report(&mut self, now: Instant, event: NodeEvent) {
        if let Some(subject) = event.subject() {
            let is_recent = |at: &Instant| now.saturating_since(*at) < AGAIN;
            if self.reported.get(&subject).is_some_and(is_recent) {
                return;
            }
            if self.reported.len() >= SUBJECTS && self.full_since.is_none_or(|since| now > since) {
                self.reported.retain(|_, at| is_recent(at));
                self.full_since = Some(now);
            }
            if self.reported.len() >= SUBJECTS {
                self.lost += 1;
                return;
            }
            self.reported.insert(subject, now);
        }
        if self.lost > 0 && self.queue.try_send(NodeEvent::Lost(self.lost)).is_ok() {
            self.lost = 0;
        }
        if let Err(TrySendError::Full(_)) = self.queue.try_send(event) {
            self.lost += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_peers_can_repeat_is_reported_now_and_then() {
        let (mut events, queue) = Events::new();
        let refused = |n: u32| NodeEvent::Refused {
            peer: IpAddr::V4(n.into()),
            why: Refused::Version,
        };
        let mut now = Instant::ZERO;
        (0..3).for_each(|_| events.report(now, refused(1)));
        events.report(now, refused(2));
        assert_eq!(queue.try_iter().count(), 2);
        now = now + AGAIN;
        events.report(now, refused(1));
        assert_eq!(queue.try_iter().count(), 1);
        // Strangers with any number of addresses take neither memory nor the reader's time.
        (0..100_000).for_each(|n| events.report(now, refused(n)));
        assert!(events.reported.len() <= SUBJECTS && queue.try_iter().count() <= QUEUE);
        now = now + AGAIN;
        events.report(now, refused(1));
        let last: Vec<_> = queue.try_iter().collect();
        assert!(
            matches!(last[..], [NodeEvent::Lost(lost), NodeEvent::Refused { .. }] if lost > 90_000),
            "{last:?}"
        );
    }
}
