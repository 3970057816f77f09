//! Connection to a peer.

mod broken;
mod link;
mod operation;
mod outgoing;
mod phase;
mod queue;
mod receiver;
mod staged;

use core::{net::SocketAddr, time::Duration};
use std::collections::VecDeque;

use roce_verbs::{Instant, provider::Provider};

pub use broken::{Broken, Refused};
pub(crate) use link::{Link, LinkId};
pub(crate) use operation::{Ended, Prepared, Ticket};
pub(crate) use outgoing::Outgoing;
pub(crate) use phase::{Answer, Phase};
pub(crate) use queue::SendQueue;
pub(crate) use receiver::{Incoming, Receiver};
pub(crate) use staged::Staged;

use crate::{
    config::Config,
    counters::Counters,
    key::PairKey,
    proto::{BITMAP_FRAGMENTS, CongestionMap, Flags, Header},
    socket::Message,
};

use link::Train;
use queue::Next;

/// Port that pings of the node itself come from. No socket is bound to it (`RDS_FLAG_PROBE_PORT`).
const PROBE_PORT: u16 = 1;

/// Connection to a peer: what outlives its links, and the link that carries it now.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) key: PairKey,
    pub(crate) phase: Phase,
    pub(crate) queue: SendQueue,
    pub(crate) receiver: Receiver,
    /// SENDs that have come and wait for `held`: buffer and bytes. Their buffers are not posted meanwhile, so that the peer waits.
    pub(crate) arrived: VecDeque<(u32, usize)>,
    /// Message for which the node has no room.
    pub(crate) held: Option<(SocketAddr, Message)>,
    /// Messages whose operation could not begin.
    pub(crate) refused: Vec<Outgoing>,
    /// The map of our address is to be sent.
    pub(crate) map_due: bool,
    /// A socket was refused because of the peer's map, and waits for the next one.
    pub(crate) map_wanted: bool,
    /// Longest time to the next attempt to connect.
    backoff: Duration,
    /// When the peer is told of what has come, without being asked.
    ack_at: Option<Instant>,
    /// When the peer is asked for an acknowledgement.
    probe_at: Option<Instant>,
    /// It was asked, over this link. From then on a header alone is sent at these times, so that the end of a peer is noticed that had
    /// taken everything and has acknowledged nothing: one that waits for its sockets to read.
    probed: bool,
    /// Time of its earliest entry in the timer heap.
    pub(crate) armed: Option<Instant>,
}

impl Connection {
    /// Returns one that is down. `first`: the sequence number of its first message; `next`: that of the peer's next.
    pub(crate) fn new(key: PairKey, config: &Config, first: u64, next: u64) -> Self {
        Self {
            key,
            phase: Phase::Down(Instant::ZERO),
            queue: SendQueue::new(config.into(), first),
            receiver: Receiver::new(next),
            arrived: VecDeque::new(),
            held: None,
            refused: Vec::new(),
            map_due: false,
            map_wanted: false,
            backoff: Duration::ZERO,
            ack_at: None,
            probe_at: None,
            probed: false,
            armed: None,
        }
    }

    /// Returns whether its sequence numbers are those that a new one has: it never had a message, either way.
    pub(crate) fn is_unused(&self, config: &Config) -> bool {
        self.queue.next_sequence() == config.first_sequence.max(1) && self.receiver.next() == 1
    }

    /// Returns whether there is nothing to remember: it is unused, and of no use now.
    pub(crate) fn is_blank(&self, config: &Config) -> bool {
        self.is_unused(config) && matches!(self.phase, Phase::Down(_)) && !self.map_wanted
    }

    /// Returns when to connect, if there is something to send or to wait for, and neither a link nor an attempt to have one.
    pub(crate) fn wants_link(&self) -> Option<Instant> {
        match self.phase {
            Phase::Down(due) if !self.queue.is_sent() || self.map_wanted => Some(due),
            _ => None,
        }
    }

    /// The link that it has now carries it from here on. The map of our address goes first.
    pub(crate) fn up(&mut self) {
        self.map_due = true;
        self.backoff = Duration::ZERO;
    }

    /// Messages that the last link carried are to be sent again, but for those that are returned.
    pub(crate) fn restart(&mut self) -> Vec<Outgoing> {
        let dropped = self.queue.restart();
        self.receiver.restart();
        self.arrived.clear();
        (self.ack_at, self.probe_at, self.probed) = (None, None, false);
        dropped
    }

    /// Returns the longest time until the next attempt, which doubles from one to the next (`rds_queue_reconnect`).
    pub(crate) fn next_backoff(&mut self, config: &Config) -> Duration {
        let now = self.backoff;
        self.backoff = (now * 2).clamp(config.reconnect_min, config.reconnect_max);
        now
    }

    /// The peer has acknowledged something.
    pub(crate) fn acknowledged(&mut self) {
        (self.probe_at, self.probed) = (None, false);
    }

    /// When [`pump`](Self::pump) is due though nothing has happened.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Up { .. } => self.ack_at.into_iter().chain(self.probe_at).min(),
            _ => self.wants_link(),
        }
    }

    /// Posts what there is and fits. `map`: that of our address.
    ///
    /// # Errors
    /// The link has failed.
    pub(crate) fn pump(
        &mut self,
        provider: &mut dyn Provider,
        link: &mut Link,
        map: &CongestionMap,
        (now, config, counters): (Instant, &Config, &mut Counters),
    ) -> Result<(), Broken> {
        link.count_receives(counters);
        link.post_receives(provider)?;
        let mut is_silent = false;
        if self.probe_at.take_if(|at| *at <= now).is_some() {
            is_silent = core::mem::replace(&mut self.probed, true);
            if !is_silent {
                self.queue
                    .push(Outgoing::new(None, (PROBE_PORT, 0), Box::default()), true);
            }
        }
        let mut train = Train::new(link);
        while train.room() > 0 {
            if self.map_due && !self.queue.is_amid_message() {
                if train.room() < BITMAP_FRAGMENTS as usize {
                    break;
                }
                self.push_map(&mut train, map)?;
                continue;
            }
            match self.queue.next(self.receiver.ack()) {
                None => break,
                Some(Next::Operation(operation, from)) if !train.has_room_for(operation, from) => break,
                Some(Next::Operation(operation, from)) => match train.push_operation(provider, operation, from) {
                    Ok(pieces) => {
                        if self.queue.operated(pieces) {
                            train.end_operation();
                        }
                    }
                    Err(_) => self.refused.extend(self.queue.drop_first()),
                },
                Some(Next::Fragment(next)) => {
                    train.push_fragment(&next)?;
                    let asks = next.is_last && next.header.flags().contains(Flags::ACK_REQUIRED);
                    counters.send_ack_required += u64::from(asks);
                    counters.ib_ack_send_piggybacked += u64::from(self.receiver.is_asked());
                    self.queue.posted();
                    self.receiver.ack_sent();
                }
            }
        }
        // Of what is under way the link's failure would be noticed.
        let is_unsure = is_silent && train.is_idle();
        let is_due = is_unsure || self.receiver.is_asked() || self.ack_at.is_some_and(|at| at <= now);
        let is_full = train.room() == 0;
        counters.ib_tx_ring_full += u64::from(is_full && !self.queue.is_sent());
        if is_due && (is_full || self.queue.is_amid_message()) {
            counters.ib_ack_send_delayed += 1;
        } else if is_due {
            train.push(&Header::ack_only(self.receiver.ack()), &[], true)?;
            self.receiver.ack_sent();
            counters.ib_ack_sent += 1;
        }
        self.set_timers(now, config);
        match train.is_empty() {
            true => Ok(()),
            false => train.post(provider).map_err(Broken::from),
        }
    }

    fn push_map(&mut self, train: &mut Train<'_>, map: &CongestionMap) -> Result<(), Broken> {
        let header = Header::bitmap(self.receiver.ack());
        for index in 0..BITMAP_FRAGMENTS {
            let Some(part) = map.fragment(index) else { break };
            train.push(&header, part.bytes(), index + 1 == BITMAP_FRAGMENTS)?;
        }
        self.map_due = false;
        self.receiver.ack_sent();
        Ok(())
    }

    /// The kernel has no such timers: its last messages may stay unacknowledged for hours.
    fn set_timers(&mut self, now: Instant, config: &Config) {
        self.ack_at = match self.receiver.is_untold() {
            true => self.ack_at.filter(|at| *at > now).or(Some(now + config.ack_delay)),
            false => None,
        };
        // Who waits for a map would not notice otherwise that the peer has died with it.
        let unacked = self.queue.is_sent() && !self.queue.is_acked();
        self.probe_at = match unacked || self.map_wanted {
            true => self.probe_at.or(Some(now + config.probe_delay)),
            false => None,
        };
    }
}
