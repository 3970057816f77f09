//! Packets of a connection by PSN.

use std::collections::HashMap;

use roce_bth::{Packet, Psn};

use crate::connection::Connection;

/// Indexes of packets that the responder's part needs, by PSN, in the order of the capture.
#[derive(Debug)]
pub(super) struct Index {
    /// Answers of our side.
    answers: HashMap<u32, Vec<usize>>,
    /// Requests of the peer.
    requests: HashMap<u32, Vec<usize>>,
}

impl Index {
    pub(super) fn new(connection: &Connection, side: usize) -> Self {
        let mut index = Self {
            answers: HashMap::new(),
            requests: HashMap::new(),
        };
        for (at, event) in connection.events.iter().enumerate() {
            let kind = match (event.sender == side, event.is_request()) {
                (true, false) => &mut index.answers,
                (false, true) => &mut index.requests,
                _ => continue,
            };
            kind.entry(event.psn().value()).or_default().push(at);
        }
        index
    }

    /// Returns the answers of our side with this PSN behind a packet, the first one first.
    pub(super) fn answers<'a>(
        &'a self,
        connection: &'a Connection,
        psn: Psn,
        behind: usize,
    ) -> impl Iterator<Item = (usize, Packet<'a>)> {
        let all = self.answers.get(&psn.value()).map_or(&[][..], Vec::as_slice);
        let from = all.partition_point(|at| *at <= behind);
        all[from..].iter().map(|at| (*at, connection.events[*at].packet()))
    }

    /// Returns the next request of the peer with this PSN behind a packet.
    pub(super) fn next_request(&self, psn: Psn, behind: usize) -> Option<usize> {
        let all = self.requests.get(&psn.value())?;
        all.get(all.partition_point(|at| *at <= behind)).copied()
    }
}
