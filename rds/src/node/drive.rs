//! Turns of the loop: completions, events, timers.

use roce_verbs::{
    Completion, Instant,
    messages::MessageDone,
    provider::{CmKind, CmRef, Cx, Event, QpId},
};

use super::{Node, Output, connect::Request};
use crate::{
    conn::{Broken, LinkId, Phase},
    key::PairKey,
    proto::ProtoError,
};

impl Node {
    /// A work request has completed. Returns whether the queue pair is one of this node's.
    pub fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) -> bool {
        let Some(&id) = self.by_qp.get(&qp) else { return false };
        let link = &mut self.links[id];
        // What comes over a link that was left will be sent again.
        if link.is_closing {
            return true;
        }
        let key = link.key;
        let done = link.completed(wc);
        let result = match done {
            Ok(MessageDone::Sent(_)) => {
                self.counters.ib_tx_cq_event += 1;
                let ended = link.ended(cx.provider);
                self.operations_ended(ended);
                Ok(())
            }
            Ok(MessageDone::Received { buffer, len }) => {
                self.counters.ib_rx_cq_event += 1;
                self.received(cx, id, buffer, len)
            }
            Err(e) => Err(e),
        };
        self.dirty.insert(key);
        if let Err(why) = result {
            self.counters.recv_drop_bad_checksum +=
                u64::from(matches!(why, Broken::Message(ProtoError::Checksum { .. })));
            self.lose(cx, id, why);
        }
        true
    }

    fn received(&mut self, cx: &mut Cx<'_>, id: LinkId, buffer: u32, len: usize) -> Result<(), Broken> {
        let key = self.links[id].key;
        let phase = self.connections.get(&key).map(|connection| connection.phase);
        if phase.and_then(Phase::link) != Some(id) {
            // The peer sends, so it has got our answer: its last word is lost or late.
            self.established(cx, id);
        }
        let Some(connection) = self.connections.get_mut(&key) else {
            return Ok(());
        };
        connection.arrived.push_back((buffer, len));
        self.take_arrived(key, id)
    }

    /// Takes what has come, until there is no room for a message.
    fn take_arrived(&mut self, key: PairKey, id: LinkId) -> Result<(), Broken> {
        while self.deliver_held(key) {
            let (Some(connection), link) = (self.connections.get_mut(&key), &mut self.links[id]) else {
                break;
            };
            let Some((buffer, len)) = connection.arrived.pop_front() else {
                break;
            };
            let taken = connection.receiver.take(len, |out| link.read(buffer, out))?;
            link.give_back(buffer);
            self.counters.ib_ack_received += u64::from(taken.is_only_ack);
            self.counters.recv_ack_required += u64::from(taken.asks);
            if taken.has_restarted {
                self.counters.recv_peer_restarted += 1;
                self.out.push_back(Output::Restarted(key));
            }
            self.acknowledged(key, taken.ack);
            if let Some(message) = taken.message {
                self.incoming(key, message);
            }
        }
        Ok(())
    }

    /// Handles an event. Returns whether it is one of this node's alone.
    pub fn event(&mut self, cx: &mut Cx<'_>, event: &Event) -> bool {
        match event {
            Event::Cm { id, kind } => self.cm_event(cx, *id, kind),
            Event::Drained(qp) => {
                let Some(&id) = self.by_qp.get(qp) else { return false };
                self.remove_link(cx.provider, id);
                true
            }
            Event::DeviceRemoved(_) | Event::Async(..) => false,
        }
    }

    fn cm_event(&mut self, cx: &mut Cx<'_>, id: CmRef, kind: &CmKind) -> bool {
        if let CmKind::ConnectRequest {
            listener,
            device,
            private_data,
            initiator_depth,
            responder_resources,
        } = kind
        {
            let ours = self.listeners.contains(listener);
            if ours {
                let request = Request {
                    cm: id,
                    device: *device,
                    private_data,
                    depths: [*initiator_depth, *responder_resources],
                };
                self.request(cx, &request);
            }
            return ours;
        }
        let Some(&link) = self.by_cm.get(&id) else { return false };
        self.link_event(cx, link, kind);
        true
    }

    /// The end of a turn: posts what there is.
    pub fn end_batch(&mut self, cx: &mut Cx<'_>) {
        while let Some(key) = self.dirty.pop_first() {
            self.pump(cx, key);
            if let Some(connection) = self.connections.get_mut(&key) {
                let deadline = connection.next_timeout();
                self.timers.update(key, &mut connection.armed, deadline);
            }
        }
        self.deregister_freed(cx.provider);
    }

    fn pump(&mut self, cx: &mut Cx<'_>, key: PairKey) {
        let Some(connection) = self.connections.get_mut(&key) else {
            return;
        };
        let Some(id) = connection.phase.link() else {
            if connection.wants_link().is_some_and(|due| due <= cx.now) {
                self.begin(cx, key);
            }
            return;
        };
        let pumped = self.take_arrived(key, id).and_then(|()| {
            let Some(connection) = self.connections.get_mut(&key) else {
                return Ok(());
            };
            let map = self.maps.entry(key.local).or_default();
            let now = (cx.now, &self.config, &mut self.counters);
            let pumped = connection.pump(cx.provider, &mut self.links[id], map, now);
            let refused = core::mem::take(&mut connection.refused);
            self.could_not_begin(&refused);
            pumped
        });
        if let Err(why) = pumped {
            self.lose(cx, id, why);
        }
    }

    /// Does what is due.
    pub fn timeout(&mut self, cx: &mut Cx<'_>) {
        while let Some((at, key)) = self.timers.pop_due(cx.now) {
            // What an entry of another time was for has been done, or has one that is earlier.
            if let Some(connection) = self.connections.get_mut(&key).filter(|c| c.armed == Some(at)) {
                connection.armed = None;
                self.dirty.insert(key);
            }
        }
        self.end_batch(cx);
    }

    /// When to call [`timeout`](Self::timeout), or earlier; `None`: nothing will be due by itself.
    pub fn next_timeout(&self) -> Option<Instant> {
        self.timers.peek().map(|(at, _)| at)
    }
}
