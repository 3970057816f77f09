//! Connections.

use core::net::{IpAddr, SocketAddr};

use roce_port::{CmEventKind, ConnId, ListenArgs, ListenId};
use roce_verbs::provider::{CmKind, CmRef, ConnParams, DeviceCaps, DeviceIx, Event, QpId, RejectReason, VerbsError};

use crate::{
    fabric::{FIRST_PORT, Fabric, Ports, gone},
    objects::Cm,
};

/// How many ports are tried when the user does not care: an address that is not ours fails like a port that is taken.
const PORTS_TRIED: u32 = 256;

/// An address unless it stands for all.
fn specific(addr: SocketAddr) -> Option<IpAddr> {
    Some(addr.ip().to_canonical()).filter(|ip| !ip.is_unspecified())
}

impl<P: Ports> Fabric<P> {
    /// The devices that listen at an address: those that have it, rather than one that has all.
    fn listening(&self, addr: IpAddr) -> Vec<usize> {
        let addr = addr.to_canonical();
        let has = |caps: &DeviceCaps| caps.addrs.contains(&addr);
        let exact = self.caps.iter().any(has);
        let listens = |caps: &DeviceCaps| match addr.is_unspecified() {
            true => addr.is_ipv6() || caps.addrs.is_empty() || caps.addrs.iter().any(IpAddr::is_ipv4),
            false => !exact || has(caps),
        };
        let all = self.caps.iter().enumerate();
        all.filter(|(_, caps)| listens(caps))
            .map(|(device, _)| device)
            .collect()
    }

    /// Claims a service on a device, and listens for it.
    fn listen_on(&mut self, device: usize, addr: SocketAddr, backlog: u32) -> Result<ListenId, VerbsError> {
        let (one, port) = (specific(addr), addr.port());
        self.ports.claim(device, one, port)?;
        let made = self.ports.port(device).cm_listen(&ListenArgs::new(one, port, backlog));
        made.inspect_err(|_| self.ports.release(device, one, port))
    }

    pub(crate) fn listen(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        if addr.port() != 0 {
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

    fn listen_at(&mut self, addr: SocketAddr, backlog: u32) -> Result<CmRef, VerbsError> {
        let mut ids: Vec<(usize, ListenId)> = Vec::new();
        let mut failed = None;
        for device in self.listening(addr.ip()) {
            match self.listen_on(device, addr, backlog) {
                Ok(id) => ids.push((device, id)),
                // Another device has the address.
                Err(e @ VerbsError::Address(_)) if specific(addr).is_some() => failed = Some(e),
                Err(e) => {
                    self.unlisten(addr, &ids);
                    return Err(e);
                }
            }
        }
        if ids.is_empty() {
            let nobody = || VerbsError::Address(format!("no device has {}", addr.ip()));
            return Err(failed.unwrap_or_else(nobody));
        }
        let made = ids.clone();
        let Some(id) = self.cms.insert(Cm::Listener { addr, ids }) else {
            self.unlisten(addr, &made);
            return Err(VerbsError::Limit("connections"));
        };
        for (device, listener) in made {
            self.listeners(device).insert(listener, id);
        }
        Ok(id)
    }

    fn unlisten(&mut self, addr: SocketAddr, ids: &[(usize, ListenId)]) {
        for (device, id) in ids {
            self.ports.port(*device).cm_unlisten(*id);
            self.ports.release(*device, specific(addr), addr.port());
            self.listeners(*device).remove(id);
        }
    }

    pub(crate) fn resolve(&mut self, src: Option<IpAddr>, dst: SocketAddr) -> Result<CmRef, VerbsError> {
        let src = src.map(|ip| ip.to_canonical()).filter(|ip| !ip.is_unspecified());
        let (device, local) = self.ports.route(src, dst.ip())?;
        let made = Cm::Resolved {
            device,
            local: SocketAddr::new(local, 0),
            remote: dst,
        };
        let id = self.cms.insert(made).ok_or(VerbsError::Limit("connections"))?;
        let kind = CmKind::Resolved {
            device: DeviceIx(device as u16),
        };
        self.events.push_back(Event::Cm { id, kind });
        Ok(id)
    }

    pub(crate) fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let Some(Cm::Resolved { device, local, remote }) = self.cms.get(id) else {
            return Err(VerbsError::State("the connection is not resolved".into()));
        };
        let (device, local, remote) = (*device, *local, *remote);
        let qpn = self.qp_of(qp, device)?;
        let port = self.ports.port(device);
        let conn = port.connect_qp(self.now, local, remote, qpn, params.clone())?;
        if let Some(cm) = self.cms.get_mut(id) {
            *cm = Cm::Conn {
                device,
                conn,
                local,
                remote,
            };
        }
        self.conns(device).insert(conn, id);
        Ok(())
    }

    /// The number of a queue pair that is of this device.
    fn qp_of(&self, qp: QpId, device: usize) -> Result<roce_verbs::Qpn, VerbsError> {
        match self.qp(qp) {
            Some((of, qpn, _)) if of == device => Ok(qpn),
            Some(_) => Err(VerbsError::Invalid("the queue pair is another device's".into())),
            None => Err(gone("queue pair")),
        }
    }

    fn conn(&self, id: CmRef) -> Result<(usize, ConnId), VerbsError> {
        match self.cms.get(id) {
            Some(Cm::Conn { device, conn, .. }) => Ok((*device, *conn)),
            Some(_) => Err(VerbsError::State("not a connection".into())),
            None => Err(gone("connection")),
        }
    }

    pub(crate) fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let (device, conn) = self.conn(id)?;
        let qpn = self.qp_of(qp, device)?;
        let now = self.now;
        self.ports.port(device).accept_qp(now, conn, qpn, params.clone())
    }

    pub(crate) fn reject(&mut self, id: CmRef, reason: RejectReason, data: &[u8]) -> Result<(), VerbsError> {
        let (device, conn) = self.conn(id)?;
        let now = self.now;
        self.ports.port(device).cm_reject(now, conn, reason, data)?;
        self.forget(id);
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, id: CmRef) {
        if let Ok((device, conn)) = self.conn(id) {
            self.ports.port(device).cm_disconnect(self.now, conn);
        }
    }

    pub(crate) fn disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        self.disconnect(id);
        let Ok((device, conn)) = self.conn(id) else { return };
        let Some(dreq) = self.ports.port(device).cm_farewell(conn) else {
            return;
        };
        for way in ways {
            if let Ok((device, by)) = self.conn(*way) {
                self.ports.port(device).cm_send_farewell(self.now, by, &dreq);
            }
        }
    }

    pub(crate) fn forget(&mut self, id: CmRef) {
        let Some(cm) = self.cms.remove(id) else { return };
        match cm {
            Cm::Listener { addr, ids } => self.unlisten(addr, &ids),
            Cm::Resolved { .. } => {}
            Cm::Conn { device, conn, .. } => {
                self.conns(device).remove(&conn);
                self.ports.port(device).cm_destroy(self.now, conn);
            }
        }
    }

    /// Moves queue pairs as the ports' connection events demand. Polling for completions begins with it, so that work requests
    /// flushed by an event complete before the user gets the event.
    pub fn take_cm_events(&mut self) {
        for device in 0..self.caps.len() {
            while let Some(change) = self.ports.port(device).poll_change() {
                self.ports.port_change(device, change);
            }
            let port = self.ports.port(device);
            while let Some(event) = port.poll_cm_event(self.now) {
                self.cm_events.push_back((device, event));
            }
        }
    }

    /// Returns the next event of a connection for the user.
    pub(crate) fn next_cm_event(&mut self) -> Option<Event> {
        while let Some((device, event)) = self.cm_events.pop_front() {
            let found = match self.conns(device).get(&event.conn()).copied() {
                Some(id) => kind_of(event).map(|kind| (id, kind)),
                None => self.request(device, event),
            };
            if let Some((id, kind)) = found {
                return Some(Event::Cm { id, kind });
            }
        }
        None
    }

    /// Gives the connection of a request a number. Refuses the request if its listener is gone. Ignores other events.
    fn request(&mut self, device: usize, event: CmEventKind) -> Option<(CmRef, CmKind)> {
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
            device,
            conn,
            local,
            remote,
        };
        let listener = self.listeners(device).get(&listener).copied();
        let made = listener.and_then(|listener| Some((listener, self.cms.insert(made)?)));
        let Some((listener, id)) = made else {
            self.ports.port(device).cm_destroy(self.now, conn);
            return None;
        };
        self.conns(device).insert(conn, id);
        let kind = CmKind::ConnectRequest {
            listener,
            device: DeviceIx(device as u16),
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
