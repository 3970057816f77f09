//! Last acknowledgements of stopping queue pairs. An acknowledgement may wait for what the program posts next; without it a message
//! that was completed here would fail at its sender.

use roce_bth::Qpn;
use roce_qp::{TxKind, TxSink};

use crate::{
    batch::{QpSink, Staged, TxBatch},
    entry::QpEntry,
    path::TxPath,
};

/// Last acknowledgement of a queue pair that may be destroyed.
pub(crate) struct Parting {
    path: TxPath,
    src: Qpn,
    dest: Qpn,
    /// Headers and payload, without the ICRC.
    packet: Vec<u8>,
}

/// Sink for one packet.
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
        self.packet = vec![0; len];
        Some(&mut self.packet)
    }

    fn commit(&mut self) {
        self.is_sealed = true;
    }
}

impl Parting {
    /// Takes the acknowledgement that a queue pair owes its peer.
    pub(crate) fn of(entry: &mut QpEntry) -> Option<Self> {
        let path = entry.path.as_ref()?;
        let mut last = One::default();
        entry.qp.flush_ack(&mut last);
        last.is_sealed.then(|| Self {
            path: path.tx,
            src: entry.qp.qpn(),
            dest: path.dest,
            packet: last.packet,
        })
    }

    /// Stages it. `None`: the batch is full.
    pub(crate) fn stage(&self, batch: &mut TxBatch) -> Option<Staged> {
        let mut sink = QpSink::new(batch, &self.path, [self.src, self.dest], false, 1);
        sink.reserve(TxKind::Ack, self.packet.len())?
            .copy_from_slice(&self.packet);
        sink.commit();
        Some(sink.staged)
    }
}
