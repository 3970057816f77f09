//! Table of connections, learned from the connection manager's messages.

use std::{collections::BTreeMap, net::IpAddr};

use roce_bth::Psn;
use roce_port::cm::{
    cma::{PortSpace, ServiceId},
    mad::{Rep, Req},
};
use rtrs::proto::Uuid;

use crate::{credits::Credits, exchange::ExchangeId, flow::Flow, rds_part::RdsPart, service::Service};

/// Connections at most; the oldest are dropped.
pub(crate) const MAX_CONNS: usize = 1024;

/// Direction of a packet on its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// From the side that sent the REQ.
    ToServer = 0,
    /// To that side.
    ToClient = 1,
}

impl Direction {
    pub(crate) const fn reverse(self) -> Self {
        match self {
            Self::ToServer => Self::ToClient,
            Self::ToClient => Self::ToServer,
        }
    }
}

/// Connection.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) id: u64,
    pub(crate) service: Service,
    service_id: ServiceId,
    pub(crate) client: IpAddr,
    pub(crate) server: IpAddr,
    client_qpn: Option<u32>,
    server_qpn: Option<u32>,
    client_comm: Option<u32>,
    server_comm: Option<u32>,
    /// Path MTU, bytes.
    pub(crate) mtu: u32,
    /// Exchange of the connection manager's messages.
    pub(crate) exchange: ExchangeId,
    /// Directions, by [`Direction`].
    pub(crate) flows: [Flow; 2],
    /// Path of RTRS.
    pub(crate) path: Option<Uuid>,
    /// Number of the connection on the path.
    pub(crate) cid: u16,
    /// RDS messages whose fragments are coming, by [`Direction`].
    pub(crate) rds: [Option<RdsPart>; 2],
    /// Type of service of an RDS connection. Of one that was recognized, a number of its own above those.
    pub(crate) rds_tos: u64,
    /// Credits of an LNet connection, by [`Direction`] of the sender; `None`: not known.
    pub(crate) credits: Option<Credits>,
    /// The service was recognized by a message: the connection request was not seen.
    pub(crate) recognized: bool,
}

impl Conn {
    /// Port in TCP's port space, or 0.
    pub(crate) fn port(&self) -> u16 {
        self.service_id.port(PortSpace::Tcp).unwrap_or(0)
    }

    /// Addresses of the sender and the receiver of a direction.
    pub(crate) const fn ends(&self, direction: Direction) -> (IpAddr, IpAddr) {
        match direction {
            Direction::ToServer => (self.client, self.server),
            Direction::ToClient => (self.server, self.client),
        }
    }
}

/// Table of connections.
#[derive(Debug, Default)]
pub(crate) struct Conns {
    last: u64,
    all: BTreeMap<u64, Conn>,
    /// Queue pairs, by the address and number that packets name.
    halves: BTreeMap<(IpAddr, u32), (u64, Direction)>,
    /// Communication IDs, by their owner.
    comm: BTreeMap<(IpAddr, u32), u64>,
}

impl Conns {
    /// Enters the connection of a REQ. Returns its number, and the connections that were dropped for it; `None` if the REQ was seen
    /// before.
    pub(crate) fn request(
        &mut self,
        (client, server): (IpAddr, IpAddr),
        req: &Req,
        fresh: impl FnOnce() -> ExchangeId,
    ) -> (u64, Option<Vec<Conn>>) {
        let (comm, qpn) = ((client, req.local_comm_id), (client, req.local_qpn.value()));
        let same = |conn: &Conn| {
            conn.client_qpn == Some(qpn.1) && conn.server == server && conn.service_id == ServiceId(req.service_id)
        };
        if let Some(id) = self.comm.get(&comm)
            && self.all.get(id).is_some_and(same)
        {
            return (*id, None);
        }
        let former = [self.comm.get(&comm).copied(), self.halves.get(&qpn).map(|(id, _)| *id)];
        let mut dropped: Vec<Conn> = former.into_iter().flatten().filter_map(|id| self.remove(id)).collect();
        dropped.extend(self.make_room());
        self.last += 1;
        let id = self.last;
        self.comm.insert(comm, id);
        self.halves.insert(qpn, (id, Direction::ToClient));
        let conn = Conn {
            id,
            service: Service::of(ServiceId(req.service_id)),
            service_id: ServiceId(req.service_id),
            client,
            server,
            client_qpn: Some(qpn.1),
            server_qpn: None,
            client_comm: Some(comm.1),
            server_comm: None,
            // Codes 1 to 5 are 256 to 4096 bytes.
            mtu: 128 << req.path_mtu.clamp(1, 5),
            exchange: fresh(),
            flows: Default::default(),
            path: None,
            cid: 0,
            rds: Default::default(),
            rds_tos: 0,
            credits: None,
            recognized: false,
        };
        self.all.insert(id, conn);
        (id, Some(dropped))
    }

    /// Drops the oldest connections until there is room for another.
    fn make_room(&mut self) -> Vec<Conn> {
        let mut dropped = Vec::new();
        while self.all.len() >= MAX_CONNS {
            let oldest = self.all.keys().next().copied();
            dropped.extend(oldest.and_then(|id| self.remove(id)));
        }
        dropped
    }

    /// Enters a connection of which a packet to `qpn` shows the service. If one between the same addresses is known in the other
    /// direction only, it is taken for that. Returns the connections that were dropped for it.
    pub(crate) fn recognize(
        &mut self,
        (src, dst): (IpAddr, IpAddr),
        qpn: u32,
        service: Service,
        fresh: impl FnOnce() -> ExchangeId,
    ) -> Vec<Conn> {
        let mut all = self.all.values_mut();
        let other_half = all.find(|c| {
            c.recognized && c.service == service && c.client_qpn.is_none() && (c.server, c.client) == (src, dst)
        });
        if let Some(conn) = other_half {
            conn.client_qpn = Some(qpn);
            self.halves.insert((dst, qpn), (conn.id, Direction::ToClient));
            return Vec::new();
        }
        let dropped = self.make_room();
        self.last += 1;
        let id = self.last;
        self.halves.insert((dst, qpn), (id, Direction::ToServer));
        let conn = Conn {
            id,
            service,
            service_id: ServiceId(0),
            client: src,
            server: dst,
            client_qpn: None,
            server_qpn: Some(qpn),
            client_comm: None,
            server_comm: None,
            mtu: 1024,
            exchange: fresh(),
            flows: Default::default(),
            path: None,
            cid: 1,
            rds: Default::default(),
            rds_tos: 0x100 + id,
            credits: None,
            recognized: true,
        };
        self.all.insert(id, conn);
        dropped
    }

    /// Learns the other queue pair of a recognized connection from an acknowledgement: its PSN is that of a message of the connection.
    /// Returns whether there is such a connection.
    pub(crate) fn acknowledged(&mut self, (src, dst): (IpAddr, IpAddr), qpn: u32, psn: Psn) -> bool {
        let mut all = self.all.values_mut();
        let found = all.find(|c| {
            let between = c.recognized && c.client_qpn.is_none() && (c.server, c.client) == (src, dst);
            between && c.flows[Direction::ToServer as usize].is_done(psn)
        });
        let Some(conn) = found else { return false };
        conn.client_qpn = Some(qpn);
        self.halves.insert((dst, qpn), (conn.id, Direction::ToClient));
        true
    }

    /// Enters the server's side of a connection. Returns the connections that were dropped for it.
    pub(crate) fn reply(&mut self, id: u64, rep: &Rep) -> Vec<Conn> {
        let Some(conn) = self.all.get_mut(&id) else {
            return Vec::new();
        };
        let (server, qpn, comm) = (conn.server, rep.local_qpn.value(), rep.local_comm_id);
        if conn.server_qpn == Some(qpn) && conn.server_comm == Some(comm) {
            return Vec::new();
        }
        let gone = [
            conn.server_qpn.replace(qpn).map(|old| (old, true)),
            conn.server_comm.replace(comm).map(|old| (old, false)),
        ];
        for (number, is_qpn) in gone.into_iter().flatten() {
            match is_qpn {
                true => _ = self.halves.remove(&(server, number)),
                false => _ = self.comm.remove(&(server, number)),
            }
        }
        let former = [
            self.halves.get(&(server, qpn)).map(|(other, _)| *other),
            self.comm.get(&(server, comm)).copied(),
        ];
        let others = former.into_iter().flatten().filter(|other| *other != id);
        let dropped = others.collect::<Vec<_>>();
        let dropped = dropped.into_iter().filter_map(|other| self.remove(other)).collect();
        self.halves.insert((server, qpn), (id, Direction::ToServer));
        self.comm.insert((server, comm), id);
        dropped
    }

    /// Removes a connection from all tables.
    fn remove(&mut self, id: u64) -> Option<Conn> {
        let conn = self.all.remove(&id)?;
        let halves = [(conn.client, conn.client_qpn), (conn.server, conn.server_qpn)];
        for key in halves.into_iter().filter_map(|(ip, qpn)| Some((ip, qpn?))) {
            if self.halves.get(&key).is_some_and(|(owner, _)| *owner == id) {
                self.halves.remove(&key);
            }
        }
        let comms = [(conn.client, conn.client_comm), (conn.server, conn.server_comm)];
        for key in comms.into_iter().filter_map(|(ip, comm)| Some((ip, comm?))) {
            if self.comm.get(&key) == Some(&id) {
                self.comm.remove(&key);
            }
        }
        Some(conn)
    }

    /// Returns the connection of a MAD that names these communication IDs.
    pub(crate) fn of_mad(&self, (src, dst): (IpAddr, IpAddr), (local, remote): (u32, u32)) -> Option<u64> {
        let between = |id: &&u64| {
            let conn = self.all.get(id);
            conn.is_some_and(|c| [c.ends(Direction::ToServer), c.ends(Direction::ToClient)].contains(&(src, dst)))
        };
        let by = |owner, comm| self.comm.get(&(owner, comm)).filter(between).copied();
        by(dst, remote).or_else(|| by(src, local))
    }

    /// Returns the connection and direction of a packet.
    pub(crate) fn of_packet(&mut self, src: IpAddr, dst: IpAddr, qpn: u32) -> Option<(&mut Conn, Direction)> {
        let (id, direction) = *self.halves.get(&(dst, qpn))?;
        let conn = self.all.get_mut(&id)?;
        (conn.ends(direction) == (src, dst)).then_some((conn, direction))
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Conn> {
        self.all.get_mut(&id)
    }
}

#[cfg(test)]
mod tests {
    use roce_bth::Qpn;

    use super::*;

    fn req(comm: u32, qpn: u32) -> Req {
        Req {
            local_comm_id: comm,
            local_qpn: Qpn::new(qpn),
            ..Req::default()
        }
    }

    #[test]
    fn the_oldest_are_dropped_from_all_tables() {
        let mut conns = Conns::default();
        let (a, b): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let mut dropped = 0;
        for n in 0..MAX_CONNS as u32 + 50 {
            let (id, gone) = conns.request((a, b), &req(n, n + 2), || ExchangeId(0));
            dropped += gone.unwrap().len();
            let rep = Rep {
                local_comm_id: n,
                remote_comm_id: n,
                local_qpn: Qpn::new(n + 2),
                ..Rep::default()
            };
            assert!(conns.reply(id, &rep).is_empty() && conns.reply(id, &rep).is_empty());
            assert_eq!(
                conns.of_packet(a, b, n + 2).map(|(c, d)| (c.id, d)),
                Some((id, Direction::ToServer))
            );
            assert!(conns.of_packet(b, b, n + 2).is_none());
            assert_eq!(conns.of_mad((b, a), (n, n)), Some(id));
        }
        assert_eq!((conns.all.len(), dropped), (MAX_CONNS, 50));
        assert_eq!((conns.halves.len(), conns.comm.len()), (2 * MAX_CONNS, 2 * MAX_CONNS));
    }

    #[test]
    fn a_repeated_request_is_the_same_connection_and_a_new_one_takes_its_queue_pair() {
        let mut conns = Conns::default();
        let (a, b): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let fresh = || ExchangeId(0);
        assert_eq!(conns.request((a, b), &req(1, 2), fresh).0, 1);
        let (id, dropped) = conns.request((a, b), &req(1, 2), fresh);
        assert!(id == 1 && dropped.is_none());
        let (id, dropped) = conns.request((a, b), &req(3, 2), fresh);
        assert_eq!((id, dropped.map(|d| d.len())), (2, Some(1)));
        assert_eq!(conns.of_mad((a, b), (1, 0)), None);
    }
}
