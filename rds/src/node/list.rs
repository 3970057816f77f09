//! Lists of messages, for people (`RDS_INFO_*_MESSAGES`).

use core::net::SocketAddr;

use super::{MessageInfo, Node, PairState};
use crate::conn::Connection;

impl Connection {
    /// State that has to outlive it.
    pub(super) fn sequences(&self) -> PairState {
        PairState {
            next_send: self.queue.next_sequence(),
            next_receive: self.receiver.next(),
        }
    }
}

impl Node {
    /// Bytes that sockets have not read.
    pub fn unread_bytes(&self) -> usize {
        self.unread
    }

    /// Messages that wait to be sent, or, with `are_sent`, those that peers have not acknowledged.
    pub fn outgoing(&self, are_sent: bool) -> impl Iterator<Item = MessageInfo> + use<'_> {
        self.connections.values().flat_map(move |connection| {
            let key = connection.key;
            connection
                .queue
                .messages(are_sent)
                .map(move |(sequence, message)| MessageInfo {
                    sequence,
                    len: message.data.len(),
                    from: SocketAddr::new(key.local, message.ports.0),
                    to: SocketAddr::new(key.remote, message.ports.1),
                    tos: key.tos,
                })
        })
    }

    /// Messages that sockets have not taken.
    pub fn unread(&self) -> impl Iterator<Item = MessageInfo> + use<'_> {
        let bound = self.bound.iter().filter_map(|(to, id)| {
            let socket = self.sockets.get(id.0 as usize)?;
            Some((to, socket))
        });
        bound.flat_map(|(to, socket)| {
            socket.inbox().map(|message| MessageInfo {
                sequence: message.sequence,
                len: message.data.len(),
                from: message.from,
                to: *to,
                tos: socket.tos,
            })
        })
    }
}
