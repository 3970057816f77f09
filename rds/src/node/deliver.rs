//! Messages that have come, to sockets.

use core::net::{IpAddr, SocketAddr};

use super::{Node, Output};
use crate::{
    conn::{Incoming, Outgoing},
    key::PairKey,
    proto::{CongestionMap, Extension, Header, RdmaCookie},
    socket::{Message, PortChange, SocketId},
};

impl Node {
    /// The peer has all messages up to this one.
    pub(super) fn acknowledged(&mut self, key: PairKey, sequence: u64) {
        let Self {
            connections,
            sockets,
            out,
            counters,
            ..
        } = self;
        let Some(connection) = connections.get_mut(&key) else {
            return;
        };
        let mut news = false;
        let was_sent = connection.queue.acknowledge(sequence, |message| {
            news = true;
            let Some(id) = message.socket else { return };
            let Some(socket) = sockets.get_mut(id.0 as usize) else {
                return;
            };
            socket.unacked -= message.data.len();
            counters.send_queue_empty += u64::from(socket.unacked == 0);
            Self::tell(out, (id, socket));
        });
        self.counters.recv_bad_ack += u64::from(!was_sent);
        if news {
            connection.acknowledged();
        }
    }

    /// Handles a message of a peer.
    pub(super) fn incoming(&mut self, key: PairKey, message: Incoming) {
        match message {
            Incoming::Data { header, data } => {
                let from = SocketAddr::new(key.remote, header.sport.get());
                let to = SocketAddr::new(key.local, header.dport.get());
                let cookie = cookie(&header);
                self.operated_by_peer(to, &header);
                if let Some(connection) = self.connections.get_mut(&key) {
                    let message = Message {
                        from,
                        data,
                        cookie,
                        sequence: header.sequence.get(),
                    };
                    connection.held = Some((to, message));
                }
                self.deliver_held(key);
            }
            Incoming::Ping(port) => {
                self.counters.recv_ping += 1;
                self.pong(key, port);
            }
            Incoming::Map(map) => self.new_map(key.remote, map),
            Incoming::Dropped => self.counters.recv_drop_old_seq += 1,
        }
    }

    /// Answers a ping, unless the port is congested: nobody waits for that.
    fn pong(&mut self, key: PairKey, port: u16) {
        let congested = self.peers.get(&key.remote).is_some_and(|map| map.is_congested(port));
        if !self.config.answers_pings || congested {
            return;
        }
        if let Some(connection) = self.connection(key) {
            connection
                .queue
                .push(Outgoing::new(None, (0, port), Box::default()), false);
            self.counters.send_queued += 1;
            self.counters.send_pong += 1;
        }
    }

    /// Delivers the message that a connection holds, if there is room for it. Returns whether the connection holds none now.
    pub(super) fn deliver_held(&mut self, key: PairKey) -> bool {
        let Some(connection) = self.connections.get_mut(&key) else {
            return false;
        };
        let Some((to, message)) = connection.held.take() else {
            return true;
        };
        if let Err(message) = self.deliver(to, message) {
            self.stalled.insert(key);
            if let Some(connection) = self.connections.get_mut(&key) {
                connection.held = Some((to, message));
            }
            return false;
        }
        true
    }

    /// Gives a message to the socket of an address. Without one it is dropped, as a datagram is.
    ///
    /// # Errors
    /// There is more that nobody reads than may be; with the message.
    pub(super) fn deliver(&mut self, to: SocketAddr, message: Message) -> Result<(), Message> {
        let Some(&id) = self.bound.get(&to) else {
            self.counters.recv_drop_no_sock += 1;
            return Ok(());
        };
        let len = message.data.len();
        if self.unread + len > self.config.max_unread {
            return Err(message);
        }
        let socket = &mut self.sockets[id.0 as usize];
        self.unread += len;
        self.counters.recv_queued += 1;
        self.counters.recv_bytes_added_to_sock += len as u64;
        let change = socket.push(message);
        Self::tell(&mut self.out, (id, socket));
        self.port_changed(to, change);
        Ok(())
    }

    /// The map of an address of ours has changed, perhaps: it goes to all peers of the address.
    pub(super) fn port_changed(&mut self, of: SocketAddr, change: Option<PortChange>) {
        let Some(change) = change else { return };
        let map = self.maps.entry(of.ip()).or_default();
        if !map.set(of.port(), change == PortChange::Congested) {
            return;
        }
        Self::note_map(&mut self.congested, of.ip(), map);
        if change == PortChange::Congested {
            self.out.push_back(Output::Congested(of));
        }
        for connection in self.connections.values_mut().filter(|c| c.key.local == of.ip()) {
            if connection.phase.link().is_some() {
                connection.map_due = true;
                self.counters.cong_update_queued += 1;
                self.dirty.insert(connection.key);
            }
        }
        if change == PortChange::Freed {
            // To sockets of the node it is as one of a peer.
            self.maps_received += 1;
            self.freed(1 << (of.port() % 64));
        }
    }

    fn new_map(&mut self, peer: IpAddr, map: CongestionMap) {
        self.counters.cong_update_received += 1;
        self.maps_received += 1;
        // With other ports free the one that is waited for may be congested still.
        let is_congested = !map.is_empty();
        for connection in self.connections.values_mut().filter(|c| c.key.remote == peer) {
            connection.map_wanted &= is_congested;
        }
        let old = self.peers.entry(peer).or_default();
        let freed = map.freed_since(old);
        if Self::note_map(&mut self.congested, peer, &map) {
            self.out.push_back(Output::PeerCongested(peer));
        }
        *old = map;
        self.freed(freed);
    }

    /// Ports of an address are free again, modulo 64. As in the kernel a socket hears of all addresses.
    fn freed(&mut self, ports: u64) {
        for (id, socket) in &mut self.sockets {
            if socket.note_freed(ports) {
                Self::tell(&mut self.out, (SocketId(id as u32), socket));
            }
        }
    }
}

/// Memory of the sender that a message offers.
fn cookie(header: &Header) -> Option<RdmaCookie> {
    header.extensions().find_map(|extension| match extension {
        Extension::RdmaDest(cookie) => Some(cookie),
        _ => None,
    })
}
