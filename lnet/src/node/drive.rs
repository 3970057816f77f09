//! Turns of the loop: completions, events, timers.

use roce_verbs::{
    Completion, Instant, WcStatus,
    messages::MessageDone,
    provider::{CmKind, CmRef, Cx, Event, QpId},
};

use super::{Node, connect::Request};
use crate::conn::Phase;

impl Node {
    /// A work request has completed. Returns whether the queue pair is one of this node's.
    pub fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) -> bool {
        let Some(&id) = self.by_qp.get(&qp) else { return false };
        let conn = &mut self.conns[id];
        // Receives are flushed before the event that says why there is no connection.
        let is_opening = matches!(conn.phase, Phase::Resolving | Phase::Connecting | Phase::Accepting);
        if conn.phase == Phase::Closing || (is_opening && wc.status == WcStatus::FlushError) {
            return true;
        }
        let done = match conn.completed(wc) {
            Ok(MessageDone::Sent(_)) => {
                if let Some((of, result)) = conn.sent(cx.provider) {
                    self.ended(of, result);
                }
                self.dirty.insert(id);
                Ok(())
            }
            // Completions are delivered before events: the answer to our request came before it.
            Ok(MessageDone::Received { buffer, len }) if conn.phase == Phase::Connecting => {
                conn.keep_early(buffer, len);
                Ok(())
            }
            Ok(MessageDone::Received { buffer, len }) => self.received(cx, id, buffer, len),
            Err(why) => Err(why),
        };
        if let Err(why) = done {
            self.lose(cx.provider, id, why);
        }
        true
    }

    /// Handles an event. Returns whether it is one of this node's alone.
    pub fn event(&mut self, cx: &mut Cx<'_>, event: &Event) -> bool {
        match event {
            Event::Cm { id, kind } => self.cm_event(cx, *id, kind),
            Event::Drained(qp) => {
                let Some(&id) = self.by_qp.get(qp) else { return false };
                self.remove(cx.provider, id);
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
            ..
        } = kind
        {
            let is_ours = self.listener == *listener;
            if is_ours {
                let request = Request {
                    cm: id,
                    device: *device,
                    private_data,
                };
                self.request(cx, &request);
            }
            return is_ours;
        }
        let Some(&conn) = self.by_cm.get(&id) else { return false };
        self.conn_event(cx, conn, kind);
        true
    }

    /// The end of a turn: posts what there is, and begins to connect.
    pub fn end_batch(&mut self, cx: &mut Cx<'_>) {
        while let Some(nid) = self.waking.pop_first() {
            self.wake(cx, nid);
        }
        while let Some(id) = self.dirty.pop_first() {
            let Some(conn) = self.conns.get_mut(id).filter(|c| c.phase == Phase::Established) else {
                continue;
            };
            let pumped = conn.pump(cx.provider, &self.us, (cx.now, &self.config));
            for (of, result) in conn.take_ended() {
                self.ended(of, result);
            }
            if let Err(why) = pumped {
                self.lose(cx.provider, id, why);
            }
        }
    }

    /// Returns whether something was asked of it that [`end_batch`](Self::end_batch) has to do.
    pub fn wants_turn(&self) -> bool {
        !self.dirty.is_empty() || !self.waking.is_empty()
    }

    /// Does what is due.
    pub fn timeout(&mut self, cx: &mut Cx<'_>) {
        if self.look_at <= cx.now {
            self.look_at = cx.now + self.config.interval();
            self.look(cx);
        }
        while let Some((at, nid)) = self.retries.pop_due(cx.now) {
            if let Some(peer) = self.peers.get_mut(&nid).filter(|peer| peer.armed == Some(at)) {
                peer.armed = None;
                self.waking.insert(nid);
            }
        }
        self.end_batch(cx);
    }

    /// When to call [`timeout`](Self::timeout); `None`: nothing will be due by itself.
    pub fn next_timeout(&self) -> Option<Instant> {
        let is_busy = !self.conns.is_empty() || !self.jobs.is_empty();
        let retry = self.retries.peek().map(|(at, _)| at);
        retry.into_iter().chain(is_busy.then_some(self.look_at)).min()
    }
}
