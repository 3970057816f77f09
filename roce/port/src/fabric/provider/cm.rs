//! Backends of listeners and routes.

use core::net::{IpAddr, SocketAddr};

use roce_verbs::provider::{CmRef, DeviceCaps, QpId, VerbsError};

use super::{Cm, Fabric, Kind};
use crate::fabric::{
    backend::{Backend, Connections as _},
    ports::Ports,
    soft::gone,
};

/// First port number when the user does not care.
pub(super) const FIRST_PORT: u16 = 49152;
/// Port numbers tried for port 0. There is a limit because an address that is not local fails like a port that is taken.
const PORTS_TRIED: u32 = 256;

/// Returns whether a device can listen at all addresses of a family. The unspecified address of IPv6 includes IPv4.
fn serves(caps: &DeviceCaps, family: IpAddr) -> bool {
    family.is_ipv6() || caps.addrs.is_empty() || caps.addrs.iter().any(IpAddr::is_ipv4)
}

impl<P: Ports> Fabric<P> {
    /// Returns whether a source or listening address belongs to the RDMA devices. An address that no device names belongs to a software
    /// device, which may have all addresses.
    fn is_hardware(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        let is_soft = self.soft_caps().any(|caps| caps.addrs.contains(&addr));
        let hard = self.hardware().filter(|_| !is_soft);
        hard.is_some_and(|hard| hard.owner(addr).is_some() || self.soft_caps().count() == 0)
    }

    /// Returns the ports to listen at for an address, those that have it rather than one that has all, and whether RDMA devices listen.
    fn listening(&self, addr: IpAddr) -> (Vec<usize>, bool) {
        let addr = addr.to_canonical();
        let has = |caps: &DeviceCaps| caps.addrs.contains(&addr);
        let exact = self.soft_caps().any(has);
        let (is_any, is_hardware) = match addr.is_unspecified() {
            true => (
                true,
                self.hardware()
                    .is_some_and(|hard| hard.devices().iter().any(|caps| serves(caps, addr))),
            ),
            false => (false, self.is_hardware(addr)),
        };
        let listens = |caps: &DeviceCaps| match is_any {
            true => serves(caps, addr),
            false => !is_hardware && (!exact || has(caps)),
        };
        let all = self.soft_caps().enumerate();
        let ports = all.filter(|(_, caps)| listens(caps)).map(|(port, _)| port);
        (ports.collect(), is_hardware)
    }

    pub(super) fn listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        // RDMA devices alone find a port by themselves.
        if addr.port() != 0 || self.backends.hard.is_some() && self.listening(addr.ip()).0.is_empty() {
            return self.listen_at(addr, backlog);
        }
        let mut tried = 0;
        loop {
            self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_PORT);
            tried += 1;
            match self.listen_at(SocketAddr::new(addr.ip(), self.next_port), backlog) {
                // Another has the port.
                Err(VerbsError::Address(_)) if tried < PORTS_TRIED => {}
                done => return done,
            }
        }
    }

    /// Listens on all devices of an address, on one port number.
    fn listen_at(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        let (ports, is_hardware) = self.listening(addr.ip());
        if ports.is_empty() && !is_hardware {
            return Err(VerbsError::Address(format!("no device has {}", addr.ip())));
        }
        let id = self.cms.make(Cm::Listener(addr), |id| match ports.is_empty() {
            true => Ok(id),
            false => self.backends.soft.listen(&ports, addr, backlog, id).map(|()| id),
        })?;
        if let Some(hard) = self.backends.hard.as_mut().filter(|_| is_hardware) {
            let made = hard.backend.listen(addr, backlog, id);
            let at = made.inspect_err(|_| self.forget(id))?;
            if ports.is_empty() {
                self.cms.set(id, Cm::Listener(at));
            }
        }
        Ok(id)
    }

    pub(super) fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let mut src = src.map(|ip| ip.to_canonical()).filter(|ip| !ip.is_unspecified());
        if let Some(hard) = &self.backends.hard {
            let no_route = |e| VerbsError::Address(format!("no route to {}: {e}", dst.ip()));
            let from = src.map_or_else(|| (hard.route)(dst.ip()), Ok).map_err(no_route)?;
            let is_hardware = self.is_hardware(from);
            if let Some(hard) = self.backends.hard.as_mut().filter(|_| is_hardware) {
                return self.cms.make(Cm::Conn(Kind::Hard), |id| {
                    hard.backend.resolve(from, dst, id).map(|()| id)
                });
            }
            src = Some(from);
        }
        let soft = &mut self.backends.soft;
        self.cms
            .make(Cm::Conn(Kind::Soft), |id| soft.resolve(src, dst, id).map(|()| id))
    }

    /// Returns which backend a connection has.
    fn kind(&self, id: CmRef) -> Result<Kind, VerbsError> {
        match self.cms.get(id) {
            Some(Cm::Conn(kind)) => Ok(*kind),
            Some(Cm::Listener(_)) => Err(VerbsError::State("not a connection".into())),
            None => Err(gone("connection")),
        }
    }

    /// Returns the backend of a connection.
    pub(super) fn conn(&mut self, id: CmRef) -> Result<&mut dyn Backend, VerbsError> {
        Ok(self.backends.of(self.kind(id)?))
    }

    /// Returns the backend of a connection that is to have a queue pair.
    pub(super) fn conn_with(&mut self, id: CmRef, qp: QpId) -> Result<&mut dyn Backend, VerbsError> {
        let qp = self.qps.get(qp).ok_or_else(|| gone("queue pair"))?;
        match self.kind(id)? {
            kind if kind == qp.kind => Ok(self.backends.of(kind)),
            _ => Err(VerbsError::Invalid("the queue pair belongs to another device".into())),
        }
    }

    /// Removes a listener or connection, of which each backend has a part or none.
    pub(super) fn forget(&mut self, id: CmRef) {
        self.cms.remove(id);
        self.backends.soft.destroy_cm(id);
        if let Some(hard) = &mut self.backends.hard {
            hard.backend.destroy_cm(id);
        }
    }
}
