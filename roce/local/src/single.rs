//! A host with one port.

use std::{net::IpAddr, sync::Arc};

use roce_mem::MemoryTable;
use roce_port::Port;
use roce_verbs::provider::VerbsError;

use crate::fabric::Ports;

/// The only port of a host, which may have several addresses. Every peer is reached from each of them.
pub struct Single {
    port: Port,
    memory: Arc<MemoryTable>,
    addrs: Vec<IpAddr>,
}

impl Single {
    /// A port, the table of its keys, and its addresses; the first is taken where none is asked for.
    pub fn new(port: Port, memory: Arc<MemoryTable>, addrs: Vec<IpAddr>) -> Self {
        Self { port, memory, addrs }
    }
}

impl Ports for Single {
    fn count(&self) -> usize {
        1
    }

    fn port(&mut self, _: usize) -> &mut Port {
        &mut self.port
    }

    fn memory(&self, _: usize) -> &Arc<MemoryTable> {
        &self.memory
    }

    fn route(&self, src: Option<IpAddr>, _: IpAddr) -> Result<(usize, IpAddr), VerbsError> {
        let mut found = self.addrs.iter().filter(|addr| src.is_none_or(|src| src == **addr));
        let addr = found.next().copied();
        let addr = addr.ok_or_else(|| VerbsError::Address("not an address of this host".into()))?;
        Ok((0, addr))
    }
}
