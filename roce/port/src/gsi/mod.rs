//! General service interface (QP1) of an address: the connection manager, and which queue pairs its connections have.
//!
//! [`Gsi`] moves no queue pair. It sends [`QpCommand`]s to the queue pair's shard, and holds an event of the connection back until the
//! shard reports that it is done ([`FromShard`]).

mod placement;

use std::collections::{HashMap, VecDeque};

use crate::cm::{ConnId, Event, Manager, Translation, TranslationWatch, datagram};
use roce_bth::{Psn, Qpn};
use roce_icrc::{Flow, IpPair};
use roce_qp::{TxKind, TxSink};
use roce_verbs::{
    Instant,
    provider::{RejectReason, VerbsError},
};

pub use self::placement::{Arrival, GsiRouter, Placement};
use crate::{
    batch::{QpSink, Staged, TxBatch},
    message::{FromShard, QpCommand, QpKey},
    path::TxPath,
};

/// Hop limit of management datagrams.
const MAD_HOP_LIMIT: u8 = 64;

/// Queue pair that a shard moves for its connection.
struct Bound {
    qp: QpKey,
    /// Events of the connection, the oldest of which the shard has not answered yet.
    held: VecDeque<Event>,
}

/// The connection manager of an address.
pub(crate) struct Gsi {
    pub(crate) cm: Manager,
    /// Connections whose queue pairs are moved for the application.
    bound: HashMap<ConnId, Bound>,
    psn: Psn,
    translations: TranslationWatch,
    /// Events for the application.
    pub(crate) events: VecDeque<Event>,
    /// Commands for shards.
    pub(crate) commands: VecDeque<QpCommand>,
}

impl Gsi {
    pub(crate) fn new(cm: Manager, psn: Psn) -> Self {
        Self {
            cm,
            bound: HashMap::new(),
            psn,
            translations: TranslationWatch::default(),
            events: VecDeque::new(),
            commands: VecDeque::new(),
        }
    }

    /// Assigns a queue pair to a connection. Its shard moves it from now on.
    pub(crate) fn bind(&mut self, conn: ConnId, qp: QpKey) {
        let held = VecDeque::new();
        self.bound.insert(conn, Bound { qp, held });
    }

    /// Returns the queue pair that is moved for a connection.
    pub(crate) fn qp_of(&self, conn: ConnId) -> Option<QpKey> {
        Some(self.bound.get(&conn)?.qp)
    }

    /// Commands a connection's queue pair to be moved to error.
    pub(crate) fn fail(&mut self, conn: ConnId) {
        if let Some(qp) = self.qp_of(conn) {
            self.commands.push_back(QpCommand::Fail { qp, conn });
        }
    }

    /// Destroys a connection. Its queue pair is free.
    pub(crate) fn destroy(&mut self, now: Instant, conn: ConnId) {
        if let Some(bound) = self.bound.remove(&conn) {
            self.commands.push_back(QpCommand::Release(bound.qp));
        }
        self.events.retain(|event| event.conn() != conn);
        self.cm.destroy(now, conn);
    }

    /// Takes a MAD whose packet has passed every check.
    pub(crate) fn handle_mad(&mut self, now: Instant, ip: IpPair, mad: &[u8]) {
        self.cm.handle_mad(now, ip.dst(), ip.src(), mad);
    }

    /// Looks for address translation in a packet with a wrong ICRC, and reports it. Returns whether it is proven.
    pub(crate) fn detect_translation(&mut self, now: Instant, flow: &Flow, id: Option<u16>, packet: &[u8]) -> bool {
        let Some((found, report)) = self.translations.examine(now, flow, id, packet) else {
            return false;
        };
        if report {
            tracing::warn!("a connect request was {found}. {}", Translation::ADVICE);
        }
        true
    }

    /// Takes the report of a shard.
    pub(crate) fn handle_report(&mut self, now: Instant, report: FromShard) {
        match report {
            FromShard::FirstPacket(conn) => self.cm.communication_established(now, conn),
            FromShard::BroughtUp(conn, result) => self.on_brought_up(now, conn, result),
            FromShard::Failed(conn) => {
                // None if the application has ended the connection: that makes no event.
                let held = self.bound.get_mut(&conn).map(|bound| &mut bound.held);
                if let Some(event) = held.and_then(|held| pop_if(held, ends)) {
                    self.events.push_back(event);
                    self.advance(conn);
                }
            }
        }
    }

    /// Answers the peer's REP: with an RTU if the queue pair is in RTS.
    fn on_brought_up(&mut self, now: Instant, conn: ConnId, result: Result<(), VerbsError>) {
        let Some(bound) = self.bound.get_mut(&conn) else { return };
        let reply = pop_if(&mut bound.held, |event| matches!(event, Event::Reply { .. }));
        let Some(Event::Reply { private_data, .. }) = reply else {
            return;
        };
        let done = match result {
            Ok(()) => self.cm.qp_ready(now, conn).map_err(|e| e.to_string()),
            Err(e) => {
                // An error here means that the peer has ended the connection and needs no REJ.
                let _ = self.cm.reject(now, conn, RejectReason::NO_QP, &[]);
                Err(e.to_string())
            }
        };
        match done {
            Ok(()) => self.events.push_back(Event::Established { conn, private_data }),
            Err(text) => bound.held.push_front(Event::Failed { conn, text }),
        }
        self.advance(conn);
    }

    /// Takes an event from the connection manager. Returns false if it has none.
    pub(crate) fn advance_events(&mut self) -> bool {
        let Some(event) = self.cm.poll_event() else {
            return false;
        };
        let conn = event.conn();
        match self.bound.get_mut(&conn) {
            None => self.events.push_back(event),
            Some(bound) => {
                bound.held.push_back(event);
                if bound.held.len() == 1 {
                    self.advance(conn);
                }
            }
        }
        true
    }

    /// Passes on the held events of a connection, up to one that its shard has to answer first.
    fn advance(&mut self, conn: ConnId) {
        let Some(bound) = self.bound.get_mut(&conn) else { return };
        let qp = bound.qp;
        while let Some(event) = bound.held.front() {
            let command = match event {
                Event::Reply { path, .. } => QpCommand::BringUp {
                    qp,
                    conn,
                    path: Box::new(*path),
                },
                event if ends(event) => QpCommand::Fail { qp, conn },
                _ => {
                    self.events.extend(bound.held.pop_front());
                    continue;
                }
            };
            return self.commands.push_back(command);
        }
    }

    /// Stages one MAD. `None`: there is none.
    pub(crate) fn stage(&mut self, batch: &mut TxBatch, src_port: u16) -> Option<Staged> {
        let out = self.cm.poll_mad()?;
        let Ok(ip) = IpPair::try_from((out.local, out.remote)) else {
            return Some(Staged::default());
        };
        let path = TxPath::new(ip, src_port, 0, MAD_HOP_LIMIT);
        // Each in a train of its own: retransmission by the manager must not depend on GSO.
        let mut sink = QpSink::new(batch, &path, [Qpn::GSI; 2], false, 1);
        if let Some(bytes) = sink.reserve(TxKind::Request, datagram::PACKET_LEN) {
            datagram::write(self.psn, &out.mad, bytes);
            sink.commit();
        }
        self.psn = self.psn.next();
        Some(sink.staged)
    }
}

/// Takes the oldest event if it passes a test.
fn pop_if(held: &mut VecDeque<Event>, test: impl Fn(&Event) -> bool) -> Option<Event> {
    match held.front().is_some_and(test) {
        true => held.pop_front(),
        false => None,
    }
}

/// Returns whether the queue pair of an event's connection is moved to error.
fn ends(event: &Event) -> bool {
    matches!(
        event,
        Event::Rejected { .. } | Event::Unreachable { .. } | Event::Disconnected { .. } | Event::Failed { .. }
    )
}
