//! Connections whose process is gone. Their peers are told with a DREQ, as a kernel does for a process that ends.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use roce_bth::Qpn;
use roce_cm::{
    OutMad,
    mad::{Dreq, Mad, Message},
};
use roce_verbs::Instant;

use crate::proto::Connection;

/// The pause before the first repetition; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// How often a DREQ is sent at most: 16 s in all.
const TRIES: u32 = 6;
/// More are not told.
const MAX: usize = 1 << 16;

struct Orphan {
    conn: Connection,
    local_id: u32,
    due: Instant,
    tries: u32,
}

/// See the module.
#[derive(Default)]
pub(super) struct Orphans {
    /// By our communication ID.
    all: HashMap<u32, Orphan>,
}

impl Orphans {
    /// A process is gone that had this connection.
    pub(super) fn add(&mut self, now: Instant, conn: Connection) {
        // Without our communication ID the peer does not know the connection either: it asks again and is told.
        if let Some(local_id) = conn.local_id
            && self.all.len() < MAX
        {
            let orphan = Orphan {
                conn,
                local_id,
                due: now,
                tries: 0,
            };
            self.all.insert(local_id, orphan);
        }
    }

    /// Takes note of a message. True: it was the answer to a DREQ.
    pub(super) fn observe(&mut self, remote: IpAddr, message: &Message) -> bool {
        let id = match message {
            Message::Drep(m) => m.remote_comm_id,
            // The peer ends it as well; that is answered elsewhere.
            Message::Dreq(m) => m.remote_comm_id,
            _ => return false,
        };
        if self.all.get(&id).is_some_and(|o| o.conn.remote == remote) {
            self.all.remove(&id);
            return matches!(message, Message::Drep(_));
        }
        false
    }

    /// Whether nobody is left to be told.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// When [`Self::poll`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.all.values().map(|o| o.due).min()
    }

    /// What is to be sent now.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<OutMad> {
        let mut out = Vec::new();
        self.all.retain(|_, o| {
            if o.due > now {
                return true;
            }
            if o.tries == TRIES {
                return false;
            }
            o.due = now + FIRST_PAUSE * (1 << o.tries);
            o.tries += 1;
            out.push(OutMad {
                local: o.conn.local,
                remote: o.conn.remote,
                mad: o.dreq().emit(),
            });
            true
        });
        out
    }
}

impl Orphan {
    fn dreq(&self) -> Mad {
        let dreq = Dreq {
            local_comm_id: self.local_id,
            remote_comm_id: self.conn.remote_id,
            remote_qpn: Qpn::new(self.conn.remote_qpn),
            ..Dreq::default()
        };
        // The upper half names the process, as in all of its transactions.
        let id = u64::from(self.local_id);
        Mad::new((id << 32) | id, dreq)
    }
}

#[cfg(test)]
mod tests {
    use roce_cm::mad::Drep;

    use super::*;

    fn connection() -> Connection {
        Connection {
            local: [127, 0, 0, 1].into(),
            remote: [127, 0, 0, 2].into(),
            local_id: Some(70),
            remote_id: 80,
            remote_qpn: 90,
        }
    }

    #[test]
    fn the_peer_is_told_until_it_answers() {
        let mut o = Orphans::default();
        let now = Instant::ZERO;
        o.add(now, connection());
        let out = o.poll(now);
        assert_eq!(out.len(), 1);
        let Message::Dreq(dreq) = Mad::parse(&out[0].mad).unwrap().message else {
            panic!("not a DREQ");
        };
        assert_eq!(
            (dreq.local_comm_id, dreq.remote_comm_id, dreq.remote_qpn.value()),
            (70, 80, 90)
        );
        assert!(o.poll(now).is_empty());
        assert_eq!(o.poll(now + FIRST_PAUSE).len(), 1);
        let drep = Message::Drep(Drep {
            local_comm_id: 80,
            remote_comm_id: 70,
            ..Drep::default()
        });
        assert!(!o.observe([127, 0, 0, 3].into(), &drep), "not the peer");
        assert!(o.observe([127, 0, 0, 2].into(), &drep));
        assert!(o.is_empty());
    }

    #[test]
    fn no_more_than_a_bound_are_told() {
        let mut o = Orphans::default();
        for id in 0..MAX as u32 + 100 {
            let local_id = Some(id);
            o.add(
                Instant::ZERO,
                Connection {
                    local_id,
                    ..connection()
                },
            );
        }
        assert_eq!(o.poll(Instant::ZERO).len(), MAX);
    }

    #[test]
    fn and_not_for_ever() {
        let mut o = Orphans::default();
        let mut now = Instant::ZERO;
        o.add(now, connection());
        let mut sent = 0;
        while let Some(next) = o.next() {
            now = next;
            sent += o.poll(now).len();
        }
        assert_eq!(sent, TRIES as usize);
        let half = Connection {
            local_id: None,
            ..connection()
        };
        o.add(now, half);
        assert!(o.is_empty(), "nobody knows it");
    }
}
