//! Listeners and connections on ports.

use core::net::{IpAddr, SocketAddr};

use crate::{CmEventKind, ConnId, ListenArgs, ListenId};
use roce_verbs::{
    Qpn,
    provider::{CmKind, CmRef, ConnParams, DeviceIx, Event, QpId, RejectReason, VerbsError},
};

use super::{Qp, Soft, gone};
use crate::fabric::{
    backend::{Connections, NewCm},
    ports::Ports,
    slots::Table,
};

/// Listener or connection.
pub(super) enum Cm {
    Listener {
        addr: SocketAddr,
        /// By port.
        ids: Vec<(usize, ListenId)>,
    },
    Conn {
        port: usize,
        /// `None` while only the route to the peer is known.
        conn: Option<ConnId>,
        local: SocketAddr,
        remote: SocketAddr,
    },
}

/// Returns the address unless it is unspecified.
fn specific(addr: SocketAddr) -> Option<IpAddr> {
    Some(addr.ip().to_canonical()).filter(|ip| !ip.is_unspecified())
}

/// Returns the number of a queue pair that belongs to this port.
fn qp_of(qps: &Table<QpId, Qp>, qp: QpId, port: usize) -> Result<Qpn, VerbsError> {
    let qp = qps.get(qp).filter(|qp| qp.port == port);
    let foreign = || VerbsError::Invalid("the queue pair belongs to another device".into());
    Ok(qp.ok_or_else(foreign)?.qpn)
}

impl<P: Ports> Soft<P> {
    /// Claims a service on a port, and listens for it.
    fn listen_on(&mut self, at: usize, addr: SocketAddr, backlog: u32) -> Result<ListenId, VerbsError> {
        let (one, port) = (specific(addr), addr.port());
        self.ports.claim(at, one, port)?;
        let made = self.ports.port(at).cm_listen(&ListenArgs::new(one, port, backlog));
        made.inspect_err(|_| self.ports.release(at, one, port))
    }

    /// Listens on these ports. At one address another process may have it on some of them.
    pub(crate) fn listen(
        &mut self,
        ports: &[usize],
        addr: SocketAddr,
        backlog: u32,
        id: CmRef,
    ) -> Result<(), VerbsError> {
        let mut ids = Vec::new();
        let mut failed = None;
        for port in ports {
            match self.listen_on(*port, addr, backlog) {
                Ok(listener) => {
                    self.devices[*port].listeners.insert(listener, id);
                    ids.push((*port, listener));
                }
                Err(e @ VerbsError::Address(_)) if specific(addr).is_some() => failed = Some(e),
                Err(e) => {
                    self.unlisten(addr, &ids);
                    return Err(e);
                }
            }
        }
        if let Some(e) = failed.filter(|_| ids.is_empty()) {
            return Err(e);
        }
        self.cms.insert(id, Cm::Listener { addr, ids });
        Ok(())
    }

    fn unlisten(&mut self, addr: SocketAddr, ids: &[(usize, ListenId)]) {
        for (port, id) in ids {
            self.ports.port(*port).cm_unlisten(*id);
            self.ports.release(*port, specific(addr), addr.port());
            self.devices[*port].listeners.remove(id);
        }
    }

    pub(crate) fn resolve(&mut self, src: Option<IpAddr>, remote: SocketAddr, id: CmRef) -> Result<(), VerbsError> {
        let (port, local) = self.ports.route(src, remote.ip())?;
        let local = SocketAddr::new(local, 0);
        let cm = Cm::Conn {
            port,
            conn: None,
            local,
            remote,
        };
        self.cms.insert(id, cm);
        let kind = CmKind::Resolved {
            device: DeviceIx(port as u16),
        };
        self.events.push_back(Event::Cm { id, kind });
        Ok(())
    }

    fn conn(&self, id: CmRef) -> Result<(usize, ConnId), VerbsError> {
        match self.cms.get(id) {
            Some(&Cm::Conn {
                port, conn: Some(conn), ..
            }) => Ok((port, conn)),
            Some(_) => Err(VerbsError::State("not a connection".into())),
            None => Err(gone("connection")),
        }
    }

    /// Sends the DREQ of a connection that is being disconnected from the addresses of other connections too.
    pub(crate) fn disconnect_by(&mut self, id: CmRef, ways: &[CmRef]) {
        let Ok((port, conn)) = self.conn(id) else { return };
        let Some(dreq) = self.ports.port(port).cm().and_then(|cm| cm.farewell(conn)) else {
            return;
        };
        for way in ways {
            if let Ok((port, by)) = self.conn(*way) {
                self.ports.port(port).cm_send_farewell(self.now, by, &dreq);
            }
        }
    }

    /// Moves queue pairs as the ports' connection events demand. Polling for completions begins with it, so that work requests
    /// flushed by an event complete before the user gets the event.
    pub(crate) fn take_cm_events(&mut self) {
        for port in 0..self.devices.len() {
            while let Some(change) = self.ports.port(port).poll_change() {
                self.ports.port_change(port, change);
            }
            while let Some(event) = self.ports.port(port).poll_cm_event(self.now) {
                self.cm_events.push_back((port, event));
            }
        }
    }

    /// Returns the next event of a connection for the user.
    pub(super) fn next_cm_event(&mut self, new: NewCm<'_>) -> Option<Event> {
        while let Some((port, event)) = self.cm_events.pop_front() {
            let found = match self.devices[port].conns.get(&event.conn()) {
                Some(id) => kind_of(event).map(|kind| (*id, kind)),
                None => self.request(port, event, new),
            };
            if let Some((id, kind)) = found {
                return Some(Event::Cm { id, kind });
            }
        }
        None
    }

    /// Gives the connection of a request a number. Refuses the request if its listener is gone. Ignores other events.
    fn request(&mut self, port: usize, event: CmEventKind, new: NewCm<'_>) -> Option<(CmRef, CmKind)> {
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
        let device = &mut self.devices[port];
        let listener = device.listeners.get(&listener).copied();
        let Some((listener, id)) = listener.and_then(|listener| Some((listener, new()?))) else {
            self.ports.port(port).cm_destroy(self.now, conn);
            return None;
        };
        device.conns.insert(conn, id);
        let cm = Cm::Conn {
            port,
            conn: Some(conn),
            local,
            remote,
        };
        self.cms.insert(id, cm);
        let kind = CmKind::ConnectRequest {
            listener,
            device: DeviceIx(port as u16),
            private_data,
            initiator_depth: path.initiator_depth,
            responder_resources: path.responder_resources,
        };
        Some((id, kind))
    }
}

impl<P: Ports> Connections for Soft<P> {
    fn connect(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let Some(Cm::Conn {
            port,
            conn: conn @ None,
            local,
            remote,
        }) = self.cms.get_mut(id)
        else {
            return Err(VerbsError::State("the connection is not resolved".into()));
        };
        let qpn = qp_of(&self.qps, qp, *port)?;
        let made = self
            .ports
            .port(*port)
            .connect_qp(self.now, *local, *remote, qpn, params.clone())?;
        *conn = Some(made);
        self.devices[*port].conns.insert(made, id);
        Ok(())
    }

    fn accept(&mut self, id: CmRef, qp: QpId, params: &ConnParams) -> Result<(), VerbsError> {
        let (port, conn) = self.conn(id)?;
        let qpn = qp_of(&self.qps, qp, port)?;
        self.ports.port(port).accept_qp(self.now, conn, qpn, params.clone())
    }

    fn reject(&mut self, id: CmRef, reason: RejectReason, private_data: &[u8]) -> Result<(), VerbsError> {
        let (port, conn) = self.conn(id)?;
        self.ports.port(port).cm_reject(self.now, conn, reason, private_data)
    }

    fn disconnect(&mut self, id: CmRef) {
        if let Ok((port, conn)) = self.conn(id) {
            self.ports.port(port).cm_disconnect(self.now, conn);
        }
    }

    fn destroy_cm(&mut self, id: CmRef) {
        match self.cms.remove(id) {
            Some(Cm::Listener { addr, ids }) => self.unlisten(addr, &ids),
            Some(Cm::Conn {
                port, conn: Some(conn), ..
            }) => {
                self.devices[port].conns.remove(&conn);
                self.ports.port(port).cm_destroy(self.now, conn);
            }
            _ => {}
        }
    }

    fn cm_addrs(&self, id: CmRef) -> Option<(SocketAddr, SocketAddr)> {
        match self.cms.get(id)? {
            Cm::Conn { local, remote, .. } => Some((*local, *remote)),
            Cm::Listener { .. } => None,
        }
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
