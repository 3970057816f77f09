//! One of two ports in memory, for the examples.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_port::{Port, PortConfig, QpInit, RxMeta, TxBatch, TxConfig};
use roce_qp::CompletionQueue;
use roce_verbs::{Instant, Mtu, QpCaps, QpType, mem::MemoryTable};

pub(crate) const NOW: Instant = Instant::from_nanos(1_000_000);

pub(crate) struct End {
    pub(crate) addr: IpAddr,
    pub(crate) port: Port,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) cq: Arc<CompletionQueue>,
    /// Its queue pairs.
    pub(crate) init: QpInit,
    batch: TxBatch,
}

impl End {
    /// Creates the port of 192.0.2.`last`, with a completion queue of so many entries.
    pub(crate) fn new(last: u8, mtu: Mtu, entries: u32) -> Self {
        let addr = IpAddr::from([192, 0, 2, last]);
        let mut config = PortConfig::new(vec![addr], mtu, u64::from(last));
        config.cm.max_half_open_per_peer = 4096;
        let mem = Arc::new(MemoryTable::new([last; 32], &config.limits));
        let cq = CompletionQueue::new(0, entries, None);
        let init = QpInit {
            pd: mem.alloc_pd().expect("a protection domain"),
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            caps: QpCaps::default(),
            signal_all: false,
            srq: None,
            xrcd: None,
        };
        Self {
            addr,
            port: Port::new(config, mem.clone(), [last; 32]),
            mem,
            cq,
            init,
            batch: TxBatch::new(TxConfig::default()),
        }
    }

    /// Hands everything that it has to send to the other end, as buffers of a socket with GRO.
    pub(crate) fn send_to(&mut self, other: &mut Self) {
        loop {
            let more = self.port.poll_transmit(NOW, &mut self.batch);
            for train in self.batch.trains() {
                let meta = RxMeta {
                    segment_len: train.segment_len,
                    ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                };
                other.port.handle_datagram(NOW, &meta, train.bytes);
            }
            self.batch.clear();
            if !more {
                return;
            }
        }
    }
}
