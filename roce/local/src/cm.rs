//! Listeners and connections: on ports, and of listeners and routes also which backend has them.

use core::net::{IpAddr, SocketAddr};

use roce_port::{CmEventKind, ConnId, ListenArgs, ListenId};
use roce_verbs::provider::{CmKind, CmRef, ConnParams, DeviceCaps, Event, QpId, RejectReason, VerbsError};

use crate::{
    fabric::{FIRST_PORT, Fabric},
    ports::Ports,
    tables::{Cm, FULL, gone},
};

/// Port numbers tried for port 0. There is a limit because an address that is not local fails like a port that is taken.
const PORTS_TRIED: u32 = 256;

/// Returns the address unless it is unspecified.
fn specific(addr: SocketAddr) -> Option<IpAddr> {
    Some(addr.ip().to_canonical()).filter(|ip| !ip.is_unspecified())
}

impl<P: Ports> Fabric<P> {
    /// Returns whether a source or listening address belongs to the RDMA devices. An address that no device names belongs to a software
    /// device, which may have all addresses.
    fn is_hardware(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        let is_soft = self.soft_caps().any(|caps| caps.addrs.contains(&addr));
        let hard = self.hard.as_ref().filter(|_| !is_soft);
        hard.is_some_and(|hard| hard.backend.owner(addr).is_some() || self.soft_count() == 0)
    }

    /// Returns the ports to listen at for an address: those that have it, rather than one that has all.
    fn listening(&self, addr: IpAddr) -> Vec<usize> {
        let addr = addr.to_canonical();
        let has = |caps: &DeviceCaps| caps.addrs.contains(&addr);
        let exact = self.soft_caps().any(has);
        let is_hardware = !addr.is_unspecified() && self.is_hardware(addr);
        let listens = |caps: &DeviceCaps| match addr.is_unspecified() {
            true => addr.is_ipv6() || caps.addrs.is_empty() || caps.addrs.iter().any(IpAddr::is_ipv4),
            false => !is_hardware && (!exact || has(caps)),
        };
        let all = self.soft_caps().enumerate();
        all.filter(|(_, caps)| listens(caps)).map(|(port, _)| port).collect()
    }

    /// Returns whether the RDMA devices listen at an address.
    fn hardware_listens(&self, addr: IpAddr) -> bool {
        match &self.hard {
            Some(hard) if addr.is_unspecified() => hard.serves(addr),
            Some(_) => self.is_hardware(addr),
            None => false,
        }
    }

    /// Claims a service on a port, and listens for it.
    fn listen_on(&mut self, at: usize, addr: SocketAddr, backlog: u32) -> Result<ListenId, VerbsError> {
        let (one, port) = (specific(addr), addr.port());
        self.ports.claim(at, one, port)?;
        let made = self.ports.port(at).cm_listen(&ListenArgs::new(one, port, backlog));
        made.inspect_err(|_| self.ports.release(at, one, port))
    }

    pub(crate) fn listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        // RDMA devices alone find a port by themselves.
        if addr.port() != 0 || self.hard.is_some() && self.listening(addr.ip()).is_empty() {
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
        let is_hard = self.hardware_listens(addr.ip());
        let ids = self.listen_soft(addr, backlog)?;
        if ids.is_empty() && !is_hard {
            return Err(VerbsError::Address(format!("no device has {}", addr.ip())));
        }
        let mut failed = None;
        let hard = self.hard.as_mut().filter(|_| is_hard);
        let id = self.tables.cms.insert_with(|id| {
            let made = hard.map(|hard| hard.backend.listen(addr, backlog, id)).transpose();
            let made = made.map_err(|e| failed = Some(e)).ok()?;
            let (hard, addr) = match made {
                Some((object, addr)) if ids.is_empty() => (Some(object), addr),
                made => (made.map(|(object, _)| object), addr),
            };
            let ids = ids.clone();
            Some(Cm::Listener { addr, ids, hard })
        });
        let Some(id) = id else {
            self.unlisten(addr, &ids);
            return Err(failed.unwrap_or(VerbsError::Limit("connections")));
        };
        for (port, listener) in ids {
            self.listeners(port).insert(listener, id);
        }
        Ok(id)
    }

    /// Listens on all ports of an address.
    fn listen_soft(&mut self, addr: SocketAddr, backlog: u32) -> Result<Vec<(usize, ListenId)>, VerbsError> {
        let mut ids: Vec<(usize, ListenId)> = Vec::new();
        let mut failed = None;
        for port in self.listening(addr.ip()) {
            match self.listen_on(port, addr, backlog) {
                Ok(id) => ids.push((port, id)),
                // Another device has the address.
                Err(e @ VerbsError::Address(_)) if specific(addr).is_some() => failed = Some(e),
                Err(e) => {
                    self.unlisten(addr, &ids);
                    return Err(e);
                }
            }
        }
        match failed {
            Some(e) if ids.is_empty() => Err(e),
            _ => Ok(ids),
        }
    }

    fn unlisten(&mut self, addr: SocketAddr, ids: &[(usize, ListenId)]) {
        for (port, id) in ids {
            self.ports.port(*port).cm_unlisten(*id);
            self.ports.release(*port, specific(addr), addr.port());
            self.listeners(*port).remove(id);
        }
    }

    pub(crate) fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let mut src = src.map(|ip| ip.to_canonical()).filter(|ip| !ip.is_unspecified());
        if let Some(hard) = &self.hard {
            let no_route = |e| VerbsError::Address(format!("no route to {}: {e}", dst.ip()));
            let from = src.map_or_else(|| (hard.route)(dst.ip()), Ok).map_err(no_route)?;
            let is_hardware = self.is_hardware(from);
            if let Some(hard) = self.hard.as_mut().filter(|_| is_hardware) {
                let mut failed = None;
                let id = self.tables.cms.insert_with(|id| {
                    let made = hard.backend.resolve(Some(from), dst, id);
                    let object = made.map_err(|e| failed = Some(e)).ok()?;
                    Some(Cm::Hard { object, qp: None })
                });
                return id.ok_or_else(|| failed.unwrap_or(FULL));
            }
            src = Some(from);
        }
        let (port, local) = self.ports.route(src, dst.ip())?;
        let made = Cm::Resolved {
            port,
            local: SocketAddr::new(local, 0),
            remote: dst,
        };
        let id = self.tables.cms.insert(made).ok_or(VerbsError::Limit("connections"))?;
        let kind = CmKind::Resolved { device: self.ix(port) };
        self.events.push_back(Event::Cm { id, kind });
        Ok(id)
    }

    pub(crate) fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let Some(Cm::Resolved { port, local, remote }) = self.tables.cms.get(id) else {
            return Err(VerbsError::State("the connection is not resolved".into()));
        };
        let (port, local, remote) = (*port, *local, *remote);
        let qpn = self.qp_of(qp, port)?;
        let conn = self
            .ports
            .port(port)
            .connect_qp(self.now, local, remote, qpn, params.clone())?;
        if let Some(cm) = self.tables.cms.get_mut(id) {
            *cm = Cm::Conn {
                port,
                conn,
                local,
                remote,
            };
        }
        self.conns(port).insert(conn, id);
        Ok(())
    }

    /// Returns the number of a queue pair that belongs to this port.
    fn qp_of(&self, qp: QpId, port: usize) -> Result<roce_verbs::Qpn, VerbsError> {
        match self.soft_qp(qp) {
            Some((of, qpn, _)) if of == port => Ok(qpn),
            None if self.tables.qps.get(qp).is_none() => Err(gone("queue pair")),
            _ => Err(VerbsError::Invalid("the queue pair belongs to another device".into())),
        }
    }

    fn conn(&self, id: CmRef) -> Result<(usize, ConnId), VerbsError> {
        match self.tables.cms.get(id) {
            Some(Cm::Conn { port, conn, .. }) => Ok((*port, *conn)),
            Some(_) => Err(VerbsError::State("not a connection".into())),
            None => Err(gone("connection")),
        }
    }

    pub(crate) fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let (port, conn) = self.conn(id)?;
        let qpn = self.qp_of(qp, port)?;
        let now = self.now;
        self.ports.port(port).accept_qp(now, conn, qpn, params.clone())
    }

    pub(crate) fn reject(&mut self, id: CmRef, reason: RejectReason, data: &[u8]) -> Result<(), VerbsError> {
        let (port, conn) = self.conn(id)?;
        let now = self.now;
        self.ports.port(port).cm_reject(now, conn, reason, data)
    }

    pub(crate) fn disconnect(&mut self, id: CmRef) {
        if let Ok((port, conn)) = self.conn(id) {
            self.ports.port(port).cm_disconnect(self.now, conn);
        }
    }

    /// Sends the DREQ of a connection that is being disconnected from the addresses of other connections too.
    pub(crate) fn disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        let Ok((port, conn)) = self.conn(id) else { return };
        let Some(dreq) = self.ports.port(port).cm_farewell(conn) else {
            return;
        };
        for way in ways {
            if let Ok((port, by)) = self.conn(*way) {
                self.ports.port(port).cm_send_farewell(self.now, by, &dreq);
            }
        }
    }

    pub(crate) fn forget(&mut self, id: CmRef) {
        let Some(cm) = self.tables.cms.remove(id) else { return };
        match cm {
            Cm::Listener { addr, ids, .. } => self.unlisten(addr, &ids),
            Cm::Resolved { .. } | Cm::Hard { .. } => {}
            Cm::Conn { port, conn, .. } => {
                self.conns(port).remove(&conn);
                self.ports.port(port).cm_destroy(self.now, conn);
            }
        }
    }

    /// Returns whether the object of an event exists. Rejects a connect request whose listener does not.
    pub(crate) fn is_live(&mut self, event: &Event) -> bool {
        match event {
            Event::Drained(qp) => self.tables.qps.get(*qp).is_some(),
            Event::Cm {
                id,
                kind: CmKind::ConnectRequest { listener, .. },
            } if self.tables.cms.get(*listener).is_none() => {
                self.forget(*id);
                false
            }
            Event::Cm { id, .. } => self.tables.cms.get(*id).is_some(),
            _ => true,
        }
    }

    /// Moves queue pairs as the ports' connection events demand. Polling for completions begins with it, so that work requests
    /// flushed by an event complete before the user gets the event.
    pub fn take_cm_events(&mut self) {
        for port in 0..self.soft_count() {
            while let Some(change) = self.ports.port(port).poll_change() {
                self.ports.port_change(port, change);
            }
            while let Some(event) = self.ports.port(port).poll_cm_event(self.now) {
                self.cm_events.push_back((port, event));
            }
        }
    }

    /// Returns the next event of a connection for the user.
    pub(crate) fn next_cm_event(&mut self) -> Option<Event> {
        while let Some((port, event)) = self.cm_events.pop_front() {
            let found = match self.conns(port).get(&event.conn()).copied() {
                Some(id) => kind_of(event).map(|kind| (id, kind)),
                None => self.request(port, event),
            };
            if let Some((id, kind)) = found {
                return Some(Event::Cm { id, kind });
            }
        }
        None
    }

    /// Gives the connection of a request a number. Refuses the request if its listener is gone. Ignores other events.
    fn request(&mut self, port: usize, event: CmEventKind) -> Option<(CmRef, CmKind)> {
        let CmEventKind::Request {
            listener,
            conn,
            local,
            remote,
            private_data,
            path,
        } = event
        else {
            return None;
        };
        let made = Cm::Conn {
            port,
            conn,
            local,
            remote,
        };
        let listener = self.listeners(port).get(&listener).copied();
        let made = listener.and_then(|listener| Some((listener, self.tables.cms.insert(made)?)));
        let Some((listener, id)) = made else {
            self.ports.port(port).cm_destroy(self.now, conn);
            return None;
        };
        self.conns(port).insert(conn, id);
        let kind = CmKind::ConnectRequest {
            listener,
            device: self.ix(port),
            private_data,
            initiator_depth: path.initiator_depth,
            responder_resources: path.responder_resources,
        };
        Some((id, kind))
    }
}

fn kind_of(event: CmEventKind) -> Option<CmKind> {
    Some(match event {
        CmEventKind::Established { private_data, .. } => CmKind::Established { private_data },
        CmEventKind::Rejected {
            reason, private_data, ..
        } => CmKind::Rejected { reason, private_data },
        CmEventKind::Unreachable { why, .. } => CmKind::Unreachable(why),
        CmEventKind::Failed { text, .. } => CmKind::ConnectError(text),
        CmEventKind::Disconnected { .. } => CmKind::Disconnected,
        CmEventKind::TimewaitExit { .. } => CmKind::TimewaitExit,
        // Listeners take no datagram requests, and the port moves all queue pairs.
        CmEventKind::Request { .. }
        | CmEventKind::SidrRequest { .. }
        | CmEventKind::Resolved { .. }
        | CmEventKind::Reply { .. } => return None,
    })
}
