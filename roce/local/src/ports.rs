//! A host's ports: one, or several.

use std::{net::IpAddr, sync::Arc};

use roce_mem::MemoryTable;
use roce_port::Port;
use roce_verbs::provider::VerbsError;

use crate::fabric::Ports;

/// The first of these addresses, or the one that is asked for.
fn source<T>(addrs: impl Iterator<Item = (T, IpAddr)>, src: Option<IpAddr>) -> Result<(T, IpAddr), VerbsError> {
    let mut found = addrs.filter(|(_, addr)| src.is_none_or(|src| src == *addr));
    found
        .next()
        .ok_or_else(|| VerbsError::Address("not an address of this host".into()))
}

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
        source(self.addrs.iter().map(|addr| (0, *addr)), src)
    }
}

/// The ports of a host, each with some of the host's addresses. Every peer is reached from each of them.
pub struct Several(Vec<(Port, Arc<MemoryTable>, Vec<IpAddr>)>);

impl Several {
    /// Ports, each with the table of its keys and its addresses. The first address of all is taken where none is asked for.
    pub fn new(ports: Vec<(Port, Arc<MemoryTable>, Vec<IpAddr>)>) -> Self {
        Self(ports)
    }

    /// The ports, in the order of the devices.
    pub fn all(&mut self) -> impl Iterator<Item = &mut Port> {
        self.0.iter_mut().map(|(port, ..)| port)
    }

    /// The port that has an address: packets that come to the address are for it.
    pub fn at(&mut self, addr: IpAddr) -> Option<&mut Port> {
        let mut found = self.0.iter_mut().filter(|(.., addrs)| addrs.contains(&addr));
        found.next().map(|(port, ..)| port)
    }
}

impl Ports for Several {
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
        let ports = self.0.iter().enumerate();
        let addrs = ports.flat_map(|(index, (.., addrs))| addrs.iter().map(move |addr| (index, *addr)));
        source(addrs, src)
    }
}
