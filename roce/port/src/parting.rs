//! Acknowledgements that stopping queue pairs still owe. The driver lets acknowledgements wait for what a program posts next; without
//! this a message that was completed here would fail at its sender.

use roce_bth::Qpn;
use roce_qp::{TxKind, TxSink};

use crate::{
    batch::{QpSink, TxBatch, TxPath},
    port::Port,
};

/// A packet of a queue pair that may be gone.
pub(crate) struct Parting {
    path: TxPath,
    src: Qpn,
    dest: Qpn,
    /// Headers and payload, without the ICRC.
    packet: Vec<u8>,
}

/// Takes one packet.
#[derive(Default)]
struct One {
    packet: Vec<u8>,
    is_sealed: bool,
}

impl TxSink for One {
    fn reserve(&mut self, _kind: TxKind, len: usize) -> Option<&mut [u8]> {
        if self.is_sealed {
            return None;
        }
        self.packet.clear();
        self.packet.resize(len, 0);
        Some(&mut self.packet)
    }

    fn commit(&mut self) {
        self.is_sealed = true;
    }
}

impl Port {
    /// A queue pair is about to stop.
    pub(crate) fn part(&mut self, slot: usize) {
        let entry = &mut *self.qps[slot];
        let Some(path) = &entry.path else { return };
        let mut last = One::default();
        entry.qp.flush_ack(&mut last);
        if last.is_sealed {
            self.partings.push_back(Parting {
                path: path.tx,
                src: entry.qp.qpn(),
                dest: path.dest,
                packet: last.packet,
            });
        }
    }

    /// Stages what such queue pairs have left. False: the batch is full.
    pub(crate) fn stage_partings(&mut self, batch: &mut TxBatch) -> bool {
        while let Some(parting) = self.partings.front() {
            let mut sink = QpSink::new(batch, &parting.path, [parting.src, parting.dest], false, 1);
            let Some(bytes) = sink.reserve(TxKind::Ack, parting.packet.len()) else {
                return false;
            };
            bytes.copy_from_slice(&parting.packet);
            sink.commit();
            let staged = sink.staged();
            self.counters.count_staged(&staged);
            self.partings.pop_front();
        }
        true
    }
}
