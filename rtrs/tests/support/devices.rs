//! Devices of a host of a test, and what they send and receive.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use roce_local::Ports;
use roce_mem::MemoryTable;
use roce_port::{Port, RxMeta, TxBatch};
use roce_verbs::{Instant, provider::VerbsError};

/// The devices of a host, each with its keys and some of the host's addresses.
pub(crate) struct Devices(pub(crate) Vec<(Port, Arc<MemoryTable>, Vec<IpAddr>)>);

impl Devices {
    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Port> {
        self.0.iter_mut().map(|(port, ..)| port)
    }

    /// When a port wants to be called.
    pub(crate) fn poll_timeout(&mut self) -> Option<Instant> {
        self.all().filter_map(|port| port.poll_timeout()).min()
    }

    /// Runs what is due.
    pub(crate) fn timers(&mut self, now: Instant) {
        for port in self.all() {
            if port.poll_timeout().is_some_and(|at| at <= now) {
                port.handle_timeout(now);
            }
        }
    }

    /// A packet has come.
    pub(crate) fn receive(&mut self, now: Instant, meta: &RxMeta, bytes: &[u8]) {
        let found = self.0.iter_mut().find(|(.., addrs)| addrs.contains(&meta.local));
        let (port, ..) = found.unwrap_or_else(|| panic!("{} is nobody's", meta.local));
        port.handle_datagram(now, meta, bytes);
    }

    /// Everything that there is to send: `sent` gets it as the other side sees it.
    pub(crate) fn drain(&mut self, now: Instant, batch: &mut TxBatch, mut sent: impl FnMut(&RxMeta, &[u8])) {
        for port in self.all() {
            loop {
                let more = port.poll_transmit(now, batch);
                for train in batch.trains() {
                    let meta = RxMeta {
                        segment_len: train.segment_len,
                        ..RxMeta::new(train.remote.ip(), SocketAddr::new(train.local, train.src_port))
                    };
                    sent(&meta, train.bytes);
                }
                batch.clear();
                if !more {
                    break;
                }
            }
        }
    }
}

impl Ports for Devices {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn port(&mut self, index: usize) -> &mut Port {
        &mut self.0[index].0
    }

    fn memory(&self, index: usize) -> &Arc<MemoryTable> {
        &self.0[index].1
    }

    fn route(&self, src: Option<IpAddr>, _: IpAddr) -> Result<(usize, IpAddr), VerbsError> {
        let src = src.unwrap_or(self.0[0].2[0]);
        let found = self.0.iter().position(|(.., addrs)| addrs.contains(&src));
        let index = found.ok_or_else(|| VerbsError::Address(format!("{src} is not ours")))?;
        Ok((index, src))
    }
}
