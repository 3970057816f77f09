//! Send path: last acknowledgements, management datagrams, notifications, and then the turns of queue pairs.

use crate::cm::datagram::PACKET_LEN;
use roce_bth::Qpn;
use roce_qp::{PACKET_OVERHEAD, Poll};
use roce_verbs::Instant;

use crate::{
    batch::{Directory, QpSink, TxBatch},
    port::{Port, enqueue},
    qpn::udp_source_port,
};

/// Smallest number of packets for which a train is cut short. Shorter ones cost more system calls than overlapping them gains.
const MIN_CUT_TRAIN: u64 = 16;

/// Result of a queue pair's turn.
enum Turn {
    /// Nothing more to send now.
    Done,
    /// More to send, after the turns of others.
    More,
    /// The batch is full.
    Full,
}

impl Port {
    /// Stages packets behind those that the batch holds. Returns true if the batch is full and more are waiting.
    pub fn poll_transmit(&mut self, now: Instant, batch: &mut TxBatch) -> bool {
        self.now = now;
        // Before a request to disconnect: what it overtakes fails at the peer.
        while let Some(parting) = self.partings.front() {
            let Some(staged) = parting.stage(batch) else {
                return true;
            };
            self.counters.count_staged(&staged);
            self.partings.pop_front();
        }
        if !self.stage_mads(batch) {
            return true;
        }
        while !self.notifications.is_empty() {
            if !batch.has_room(PACKET_LEN) {
                return true;
            }
            self.stage_notification(now, batch);
        }
        while let Some(qpn) = self.ready.pop_front() {
            let Some(slot) = self.qpns.get(qpn) else {
                continue;
            };
            self.qps[slot].queued = false;
            let staged_before = self.counters.tx_packets;
            match self.take_turn(now, slot, batch) {
                Turn::Done => {}
                Turn::More => drop(enqueue(&mut self.ready, &mut self.qps[slot], false)),
                Turn::Full => {
                    let next = self.counters.tx_packets == staged_before;
                    enqueue(&mut self.ready, &mut self.qps[slot], next);
                    return true;
                }
            }
        }
        false
    }

    fn take_turn(&mut self, now: Instant, slot: usize, batch: &mut TxBatch) -> Turn {
        let mut budget = self.config.turn_packets.max(1);
        let entry = &mut *self.qps[slot];
        let qpn = entry.qp.qpn();
        if entry.qp.config().qp_type.is_datagram() {
            return self.take_datagram_turn(now, slot, batch);
        }
        let Some(path) = &entry.path else {
            return Turn::Done;
        };
        let key = path.peer;
        let peer = self.peers.get_mut(key);
        // Only acknowledgements show whether trains arrive.
        let reliable = entry.qp.config().qp_type.is_reliable();
        let gso = match reliable {
            true => peer.gso.may_send(),
            false => peer.gso.is_proven() || self.config.is_on_host(&path.av),
        };
        // The peer acknowledges a train as a whole. With two of them it executes one while the next one is made. Packets of other
        // queue pairs do as well.
        let half = (entry.qp.outstanding_packets() / 2).max(MIN_CUT_TRAIN);
        let others = peer.window.in_flight().saturating_sub(entry.qp.in_flight());
        let cuts = gso && reliable && half < budget as u64 && others < half as usize * PACKET_OVERHEAD;
        if cuts {
            budget = half as usize;
        }
        let mut ctx = roce_qp::Ctx {
            now,
            mem: &self.mem,
            window: &mut peer.window,
            paces: &mut self.paces,
            events: &mut self.events,
            counters: &mut self.counters.transport,
        };
        let mut sink = QpSink::new(batch, &path.tx, [qpn, path.dest], gso, budget);
        let poll = entry.qp.poll_transmit(&mut ctx, &mut sink);
        let (staged, full) = (sink.staged, sink.full);
        if cuts && poll == Poll::More {
            batch.close_train();
        }
        self.timers.update(qpn, &mut entry.armed, entry.qp.next_timeout());
        self.counters.count_staged(&staged);
        let max_reads = u32::from(entry.qp.max_reads());
        if reliable && peer.gso.on_staged(qpn, &staged.trains, max_reads) {
            self.counters.gso_switched_off += 1;
            let addr = peer.addr;
            // A peer can cause this again with each connection: further ones are only counted.
            if self.counters.gso_switched_off == 1 {
                tracing::warn!(peer = %addr, "of trains only the first packets come through: segmentation offload (GSO) is off for this peer");
            } else {
                tracing::debug!(peer = %addr, "segmentation offload (GSO) is off for this peer");
            }
        }
        let room_left = peer.window.available();
        match poll {
            Poll::More if full => Turn::Full,
            Poll::More if staged.packets > 0 => Turn::More,
            Poll::Blocked => {
                if !entry.blocked {
                    entry.blocked = true;
                    peer.blocked.push_back(qpn);
                }
                Turn::Done
            }
            // A queue pair that reports more and stages nothing has changed its state meanwhile: an event makes it ready again.
            Poll::Idle | Poll::More => {
                // The rest of the window is for those that wait.
                if room_left > 0 && !peer.blocked.is_empty() {
                    self.wake_blocked(key);
                }
                Turn::Done
            }
        }
    }

    /// Gives a turn to a datagram queue pair, which has no peer and no window.
    fn take_datagram_turn(&mut self, now: Instant, slot: usize, batch: &mut TxBatch) -> Turn {
        let entry = &mut *self.qps[slot];
        let qpn = entry.qp.qpn();
        let mut ctx = roce_qp::Ctx {
            now,
            mem: &self.mem,
            window: &mut self.spare_window,
            paces: &mut self.paces,
            events: &mut self.events,
            counters: &mut self.counters.transport,
        };
        let directory = Directory {
            config: &self.config,
            peers: &self.peers,
            qpn,
            last: &mut entry.receiver,
        };
        let mut sink = QpSink::directed(batch, directory, self.config.turn_packets.max(1));
        let poll = entry.qp.poll_transmit(&mut ctx, &mut sink);
        let (staged, full) = (sink.staged, sink.full);
        self.timers.update(qpn, &mut entry.armed, entry.qp.next_timeout());
        self.counters.count_staged(&staged);
        match poll {
            Poll::More if full => Turn::Full,
            Poll::More if staged.packets > 0 => Turn::More,
            _ => Turn::Done,
        }
    }

    /// Stages the management datagrams that wait. Returns false if the batch is full.
    fn stage_mads(&mut self, batch: &mut TxBatch) -> bool {
        let Some(gsi) = self.gsi.as_deref_mut() else {
            return true;
        };
        let default_port = || self.config.src_port(udp_source_port(Qpn::GSI, Qpn::GSI));
        let src_port = self.config.mad_port.unwrap_or_else(default_port);
        while batch.has_room(PACKET_LEN) {
            let Some(staged) = gsi.stage(batch, src_port) else {
                return true;
            };
            self.counters.tx_mads += staged.packets;
            self.counters.count_staged(&staged);
        }
        false
    }
}
