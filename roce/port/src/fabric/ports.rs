//! Ports of a fabric's software devices.

use std::{net::IpAddr, sync::Arc};

use crate::{Port, PortChange};
use roce_verbs::mem::MemoryTable;
use roce_verbs::provider::VerbsError;

/// Ports of a fabric, each of which is a software device.
pub trait Ports {
    /// Returns their number. More may come behind them, each followed by [`Fabric::add_device`](crate::fabric::Fabric::add_device); none goes.
    fn count(&self) -> usize;
    /// Returns a port.
    fn port(&mut self, index: usize) -> &mut Port;
    /// Returns the memory table of a port.
    fn memory(&self, index: usize) -> &Arc<MemoryTable>;
    /// Returns the port of the route to a peer, and the local address.
    ///
    /// # Errors
    /// If the source address is not local, or there is no route.
    fn route(&self, src: Option<IpAddr>, dst: IpAddr) -> Result<(usize, IpAddr), VerbsError>;
    /// Claims a port number of RDMA_CM at one address or (`None`) all addresses of a port, from processes that share them.
    ///
    /// # Errors
    /// If another process has it.
    fn claim(&mut self, _index: usize, _addr: Option<IpAddr>, _port: u16) -> Result<(), VerbsError> {
        Ok(())
    }
    /// Gives up a claim.
    fn release(&mut self, _index: usize, _addr: Option<IpAddr>, _port: u16) {}
    /// Reports a change of a port to the processes that share its address.
    fn port_change(&mut self, _index: usize, _change: PortChange) {}
}

/// The ports of a host, each with some of the host's addresses. Every peer is reached from each of them.
pub struct Several(Vec<(Port, Arc<MemoryTable>, Vec<IpAddr>)>);

impl Several {
    /// Ports, each with its memory table and its addresses. The first address of all is the default source.
    pub fn new(ports: Vec<(Port, Arc<MemoryTable>, Vec<IpAddr>)>) -> Self {
        Self(ports)
    }

    /// Returns the ports, in their order.
    pub fn all(&mut self) -> impl Iterator<Item = &mut Port> {
        self.0.iter_mut().map(|(port, ..)| port)
    }

    /// Returns the port of an address, which gets the packets that come to the address.
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
        let mut addrs = ports.flat_map(|(index, (.., addrs))| addrs.iter().map(move |addr| (index, *addr)));
        let found = addrs.find(|(_, addr)| src.is_none_or(|src| src == *addr));
        found.ok_or_else(|| VerbsError::Address("not an address of this host".into()))
    }
}
