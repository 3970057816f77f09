//! Connections as the connection manager's messages make and end them.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use roce_bth::{Packet, Psn, Qpn};
use roce_port::cm::{
    RejectReason,
    datagram::{self, GsiDrop},
    mad::{CLASS, Mad, Message, Rep, Req},
};

use super::observed::Observed;
use crate::{finding::Finding, rule::Rule, service};

/// Connection requests that are remembered.
const MAX: usize = 1 << 16;
/// Frames with connection messages that are remembered.
const MAX_MESSAGES: usize = 1 << 18;

/// Connection request that a message belongs to.
pub(super) struct Known<'a> {
    pub(super) request: &'a Req,
    /// Frame that had it first.
    pub(super) frame: u64,
    pub(super) conversation: Option<usize>,
}

/// Reads the MAD of a datagram to QP1 whose headers are right.
pub(super) fn read(o: &Observed<'_>) -> Option<Mad> {
    let packet = Packet {
        header: o.header,
        payload: o.payload?,
    };
    Mad::parse(datagram::check(&packet).ok()??).ok()
}

/// Queue pair and parameters of one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Side {
    pub(super) addr: IpAddr,
    pub(super) qpn: Qpn,
    /// First PSN of this side's requests.
    pub(super) first_psn: Psn,
    /// READs and atomics that it may have outstanding.
    pub(super) depth: u8,
}

/// Change of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    None,
    /// A REP names both queue pairs.
    Made {
        key: (IpAddr, u32),
        /// Requester of the connection, then acceptor.
        sides: [Side; 2],
        mtu: Option<u32>,
        name: String,
    },
    /// A DREP ends it.
    Ended(usize),
}

/// Connection request and what became of it.
#[derive(Debug)]
struct Transaction {
    frame: u64,
    time_ns: u64,
    acceptor: IpAddr,
    /// Communication ID of the acceptor's last REP.
    acceptor_id: Option<u32>,
    req: Box<Req>,
    answered: bool,
    conversation: Option<usize>,
    /// Number among all connection requests.
    serial: u64,
}

/// Connection requests by their senders' address and communication ID.
#[derive(Default, Debug)]
pub(super) struct Transactions {
    by_requester: HashMap<(IpAddr, u32), Transaction>,
    /// Acceptors' communication IDs, for disconnects.
    by_acceptor: HashMap<(IpAddr, u32), (IpAddr, u32)>,
    order: VecDeque<(IpAddr, u32)>,
    /// Connection requests so far.
    serials: u64,
    /// Frames with messages, and the number of the request that each belongs to.
    messages: Vec<(u64, u64)>,
    /// Conversations by the numbers of the requests that made them.
    made: HashMap<u64, usize>,
}

impl Transactions {
    /// Takes a datagram to QP1.
    pub(super) fn datagram(&mut self, o: &Observed<'_>, findings: &mut Vec<Finding>) -> Change {
        let peers = (o.meta.src.ip(), o.meta.dst);
        let Some(payload) = o.payload else { return Change::None };
        let packet = Packet {
            header: o.header,
            payload,
        };
        let text = match datagram::check(&packet) {
            Ok(Some(mad)) => match Mad::parse(mad) {
                Ok(mad) => {
                    let change = self.message(o, &mad.message, findings);
                    self.remember(o, &mad.message);
                    return change;
                }
                // Other management classes are not judged.
                Err(_) if payload.get(1) != Some(&CLASS) => return Change::None,
                Err(reason) => format!("a management datagram that is dropped: {}", reason.name()),
            },
            Ok(None) => return Change::None,
            Err(GsiDrop::Service) => "a packet to QP1 that is no UD SEND ONLY".to_owned(),
            Err(GsiDrop::PKey) => format!("a packet to QP1 with partition key {}", o.header.bth.pkey),
            Err(GsiDrop::QKey) => "a packet to QP1 with another Q_Key".to_owned(),
        };
        findings.push(Finding::new(o.meta.frame, Rule::GsiHeader, peers, text));
        Change::None
    }

    fn message(&mut self, o: &Observed<'_>, message: &Message, findings: &mut Vec<Finding>) -> Change {
        let (src, dst) = (o.meta.src.ip(), o.meta.dst);
        match message {
            Message::Req(req) => {
                check_req(o, req, findings);
                self.request(o, req);
                Change::None
            }
            Message::Rep(rep) => self.reply(o, rep, findings),
            Message::Rej(rej) => {
                let known = self.by_requester.get_mut(&(dst, rej.remote_comm_id));
                let of = known.map_or_else(String::new, |t| {
                    t.answered = true;
                    format!("the request of frame {} was rejected: ", t.frame)
                });
                let text = format!("{of}{}", RejectReason(rej.reason));
                findings.push(Finding::new(o.meta.frame, Rule::CmRejected, (src, dst), text));
                Change::None
            }
            Message::Mra(mra) => {
                if let Some(t) = self.by_requester.get_mut(&(dst, mra.remote_comm_id)) {
                    t.answered = true;
                }
                Change::None
            }
            Message::Drep(drep) => {
                let ids = [(dst, drep.remote_comm_id), (src, drep.local_comm_id)];
                ids.into_iter()
                    .find_map(|id| self.conversation(id))
                    .map_or(Change::None, Change::Ended)
            }
            _ => Change::None,
        }
    }

    fn conversation(&self, id: (IpAddr, u32)) -> Option<usize> {
        let key = self.by_acceptor.get(&id).unwrap_or(&id);
        self.by_requester.get(key)?.conversation
    }

    /// Remembers the frame of a message and the request that it belongs to.
    fn remember(&mut self, o: &Observed<'_>, message: &Message) {
        if let Some(serial) = self.find(o, message).map(|t| t.serial)
            && self.messages.len() < MAX_MESSAGES
        {
            self.messages.push((o.meta.frame, serial));
        }
    }

    fn find(&self, o: &Observed<'_>, message: &Message) -> Option<&Transaction> {
        let id = match message {
            Message::Req(req) => (o.meta.src.ip(), req.local_comm_id),
            other => (o.meta.dst, other.receiver_id()?),
        };
        self.by_requester.get(self.by_acceptor.get(&id).unwrap_or(&id))
    }

    /// Returns the connection request that a message belongs to.
    pub(super) fn of(&self, o: &Observed<'_>, message: &Message) -> Option<Known<'_>> {
        self.find(o, message).map(|t| Known {
            request: &t.req,
            frame: t.frame,
            conversation: t.conversation,
        })
    }

    /// Returns the frames with messages of connections that were made, and their conversations.
    pub(super) fn messages(&self) -> impl Iterator<Item = (u64, usize)> {
        let conversation = |(frame, serial)| Some((frame, *self.made.get(&serial)?));
        self.messages.iter().copied().filter_map(conversation)
    }

    fn request(&mut self, o: &Observed<'_>, req: &Req) {
        let key = (o.meta.src.ip(), req.local_comm_id);
        if self.by_requester.get(&key).is_some_and(|known| *known.req == *req) {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.remove(oldest);
        }
        let transaction = Transaction {
            frame: o.meta.frame,
            time_ns: o.meta.time_ns,
            acceptor: o.meta.dst,
            acceptor_id: None,
            req: Box::new(*req),
            answered: false,
            conversation: None,
            serial: self.serials,
        };
        self.serials += 1;
        self.remove(key);
        self.by_requester.insert(key, transaction);
    }

    /// Forgets a connection request, and its acceptor's communication ID.
    fn remove(&mut self, key: (IpAddr, u32)) {
        if let Some(t) = self.by_requester.remove(&key)
            && let Some(id) = t.acceptor_id
        {
            self.by_acceptor.remove(&(t.acceptor, id));
        }
    }

    fn reply(&mut self, o: &Observed<'_>, rep: &Rep, findings: &mut Vec<Finding>) -> Change {
        let key = (o.meta.dst, rep.remote_comm_id);
        let Some(t) = self
            .by_requester
            .get_mut(&key)
            .filter(|t| t.acceptor == o.meta.src.ip())
        else {
            return Change::None;
        };
        t.answered = true;
        if t.conversation.is_some() {
            return Change::None;
        }
        if let Some(before) = t.acceptor_id.replace(rep.local_comm_id) {
            self.by_acceptor.remove(&(t.acceptor, before));
        }
        self.by_acceptor.insert((t.acceptor, rep.local_comm_id), key);
        let req = &t.req;
        if rep.initiator_depth > req.responder_resources {
            let text = format!(
                "initiator depth {}, the request of frame {} has {} responder resources",
                rep.initiator_depth, t.frame, req.responder_resources
            );
            let peers = (o.meta.src.ip(), o.meta.dst);
            findings.push(Finding::new(o.meta.frame, Rule::CmDepth, peers, text));
        }
        let requester = Side {
            addr: key.0,
            qpn: req.local_qpn,
            first_psn: rep.starting_psn,
            depth: req.initiator_depth.min(rep.responder_resources),
        };
        let acceptor = Side {
            addr: o.meta.src.ip(),
            qpn: rep.local_qpn,
            first_psn: req.starting_psn,
            depth: rep.initiator_depth.min(req.responder_resources),
        };
        Change::Made {
            key,
            sides: [requester, acceptor],
            mtu: mtu_bytes(req.path_mtu),
            name: service::name(req.service_id, &req.private_data),
        }
    }

    /// Names the conversation of a connection.
    pub(super) fn made(&mut self, key: (IpAddr, u32), conversation: usize) {
        if let Some(t) = self.by_requester.get_mut(&key) {
            t.conversation = Some(conversation);
            self.made.insert(t.serial, conversation);
        }
    }

    /// Reports requests that nobody answered until the end.
    pub(super) fn finish(&self, now_ns: u64, findings: &mut Vec<Finding>) {
        let mut silent: Vec<_> = self.by_requester.iter().filter(|(_, t)| !t.answered).collect();
        silent.sort_by_key(|(_, t)| t.frame);
        for ((requester, _), t) in silent {
            let waited = now_ns.saturating_sub(t.time_ns);
            if waited >= 1_000_000_000 {
                let name = service::name(t.req.service_id, &t.req.private_data);
                let text = format!(
                    "the request for {name} was not answered in {:.1} s",
                    waited as f64 / 1e9
                );
                findings.push(Finding::new(t.frame, Rule::CmNoAnswer, (*requester, t.acceptor), text));
            }
        }
    }
}

fn mtu_bytes(code: u8) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

fn check_req(o: &Observed<'_>, req: &Req, findings: &mut Vec<Finding>) {
    let peers = (o.meta.src.ip(), o.meta.dst);
    let mut find = |rule, text: String| findings.push(Finding::new(o.meta.frame, rule, peers, text));
    if mtu_bytes(req.path_mtu).is_none() {
        find(Rule::CmMtu, format!("path MTU code {}", req.path_mtu));
    }
    let gids = (req.primary_local_gid, req.primary_remote_gid);
    let same = |gid: IpAddr, addr: IpAddr| gid.to_canonical() == addr.to_canonical();
    if !same(gids.0, peers.0) || !same(gids.1, peers.1) {
        find(
            Rule::CmAddress,
            format!(
                "the request names {} and {}, its packet {} and {}",
                gids.0, gids.1, peers.0, peers.1
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use roce_bth::{Bth, Header, MAX_HEADER_LEN, Opcode};

    use super::*;
    use crate::judge::observed::Meta;

    fn addr(n: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, n).into()
    }

    /// Calls `each` with a packet to QP1 from one host to another.
    fn with_packet<T>(src: u8, dst: u8, each: impl FnOnce(&Observed<'_>) -> T) -> T {
        let mut bytes = [0; MAX_HEADER_LEN];
        let header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0)));
        let header = header.view(&mut bytes);
        let packet = Packet { header, payload: &[] };
        let meta = Meta {
            frame: 1,
            time_ns: 0,
            src: (addr(src), 5000).into(),
            dst: addr(dst),
            ecn: 0,
        };
        each(&Observed::new(meta, packet))
    }

    #[test]
    fn replies_to_one_request_are_one_transaction() {
        let mut known = Transactions::default();
        let req = Req {
            local_comm_id: 1,
            ..Req::default()
        };
        with_packet(1, 2, |o| known.request(o, &req));
        for local_comm_id in 0..100 {
            let rep = Rep {
                local_comm_id,
                remote_comm_id: 1,
                ..Rep::default()
            };
            // Nobody makes a conversation of it: there are too many.
            let change = with_packet(2, 1, |o| known.reply(o, &rep, &mut vec![]));
            assert!(matches!(change, Change::Made { .. }));
        }
        assert_eq!(known.by_acceptor.len(), 1);
        known.remove((addr(1), 1));
        assert!(known.by_acceptor.is_empty() && known.by_requester.is_empty());
    }

    #[test]
    fn memory_for_requests_and_frames_is_bounded() {
        let mut known = Transactions::default();
        let req = |id| Req {
            local_comm_id: id,
            ..Req::default()
        };
        with_packet(1, 2, |o| {
            for id in 0..=MAX as u32 {
                known.request(o, &req(id));
            }
            assert_eq!((known.by_requester.len(), known.order.len()), (1 << 16, 1 << 16));
            assert!(
                !known.by_requester.contains_key(&(addr(1), 0)),
                "the oldest is forgotten"
            );
            known.messages = vec![(0, 0); MAX_MESSAGES - 1];
            for _ in 0..2 {
                known.remember(o, &Message::from(req(1)));
            }
            assert_eq!(known.messages.len(), 1 << 18);
        });
    }
}
