//! Conversations of a capture, and which packet belongs to which.

use std::{collections::HashMap, net::IpAddr};

use roce_bth::{Class, Psn, Qpn, Service};
use serde::Serialize;

use super::{
    cm::{self, Change, Side, Transactions},
    context::{Context, PathMtu},
    conversation::{Conversation, Endpoint, Origin},
    event::{Event, EventKind},
    observed::Observed,
    requests, responses,
    spans::room,
    upper::{ConnectionMessage, UpperJudge},
};
use crate::{finding::Finding, rule::Rule, verdict::Verdict};

/// Conversations that are remembered; packets of further ones are not judged.
const MAX_CONVERSATIONS: usize = 1 << 16;

/// Pause after which a queue pair number may have a new owner, nanoseconds.
const PAUSE_NS: u64 = 500_000_000;

/// Conversations that may be compared with packets to find the ones that these answer: at the beginning, and more with each packet.
const COMPARISONS: usize = 1 << 23;
const COMPARISONS_PER_PACKET: usize = 32;

/// Sender, receiver, destination queue pair.
type Key = (IpAddr, IpAddr, u32);

/// Queue pairs that the user names, when the capture does not show how they were connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stated {
    /// The two queue pairs.
    pub ends: [(IpAddr, Qpn); 2],
    /// Path MTU, bytes.
    pub mtu: Option<u32>,
    /// First PSN of each side's requests.
    pub first_psn: [Option<Psn>; 2],
    /// READs and atomics that each side may have outstanding.
    pub depth: [Option<u8>; 2],
}

/// Conversation in a report.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Summary {
    /// Index, as findings and events have it.
    pub index: usize,
    /// Transport service: `RC`, `UC`, `UD`, `XRC`.
    pub service: &'static str,
    /// Name of the service that was asked for, by service ID or private data.
    pub name: Option<String>,
    /// The two queue pairs; the first asked for the connection, or sent the first packet.
    pub ends: [Endpoint; 2],
    /// How the two are known to belong together.
    pub origin: Origin,
    /// Path MTU, bytes.
    pub mtu: Option<u32>,
    /// Packets that each sent.
    pub packets: [u64; 2],
    /// Request packets that each sent again.
    pub repeated: [u64; 2],
    /// Time of its first and last packet, nanoseconds since 1970.
    pub time_ns: [u64; 2],
    /// Broken rules of severity "error", and of severity "warning".
    pub errors: u64,
    /// Broken rules of severity "warning".
    pub warnings: u64,
    /// Checks that were not possible.
    pub not_checked: Vec<String>,
    /// Verdict.
    pub verdict: Verdict,
}

/// Follows the conversations of a capture.
#[derive(Debug)]
pub struct Judge {
    conversations: Vec<Conversation>,
    halves: HashMap<Key, (usize, usize)>,
    /// Conversations of which one queue pair is not known, by sender and receiver of the known one.
    unpaired: HashMap<(IpAddr, IpAddr), Vec<usize>>,
    transactions: Transactions,
    findings: Vec<Finding>,
    now_ns: u64,
    /// Comparisons that are left. Without any, queue pairs stay unpaired: a capture can't take time that grows with the square
    /// of its length.
    comparisons: usize,
    /// Packets of conversations beyond [`MAX_CONVERSATIONS`].
    not_followed: u64,
    /// Judge of the protocols above, if there is one.
    upper: Option<Box<dyn UpperJudge>>,
}

impl Default for Judge {
    fn default() -> Self {
        Self {
            conversations: vec![],
            halves: HashMap::new(),
            unpaired: HashMap::new(),
            transactions: Transactions::default(),
            findings: vec![],
            now_ns: 0,
            comparisons: COMPARISONS,
            not_followed: 0,
            upper: None,
        }
    }
}

impl Judge {
    /// Creates a judge that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a judge of the protocols above the transport. It must be there before the first packet.
    pub fn set_upper(&mut self, upper: Box<dyn UpperJudge>) {
        self.upper = Some(upper);
    }

    /// Adds queue pairs that the user names.
    pub fn state(&mut self, stated: &Stated) {
        let ends = stated.ends.map(|(addr, qpn)| Endpoint {
            addr,
            qpn: Some(qpn.value()),
        });
        let mut conversation = Conversation::new(Service::Rc, Origin::Stated, ends);
        if let Some(mtu) = stated.mtu {
            conversation.mtu = PathMtu::Stated(mtu);
        }
        conversation.depth = stated.depth;
        for (direction, psn) in conversation.directions.iter_mut().zip(stated.first_psn) {
            if let Some(psn) = psn {
                direction.begin(psn);
            }
        }
        self.insert(conversation);
    }

    /// Judges the next packet. Its findings are those of [`Judge::take_findings`]. `None`: it belongs to no conversation.
    pub fn packet(&mut self, o: &Observed<'_>) -> Option<Event> {
        self.now_ns = self.now_ns.max(o.meta.time_ns);
        self.comparisons = COMPARISONS.min(self.comparisons + COMPARISONS_PER_PACKET);
        if o.header.bth.dest_qp == Qpn::GSI {
            let change = self.transactions.datagram(o, &mut self.findings);
            self.change(change, o);
            self.connection_message(o);
            return None;
        }
        let (index, sender) = self.route(o)?;
        let before = self.findings.len();
        let kind = self.step(index, sender, o);
        let conversation = &mut self.conversations[index];
        let event = Event {
            frame: o.meta.frame,
            time_ns: o.meta.time_ns,
            conversation: index,
            sender,
            generation: conversation.directions[sender].generation,
            src: o.meta.src.ip(),
            src_port: o.meta.src.port(),
            congestion: o.meta.ecn & 3 == 3,
            bytes: o.payload_len,
            opcode: o.header.bth.opcode,
            kind,
        };
        if let Some(upper) = &mut self.upper {
            upper.packet(&event, o, &mut self.findings);
        }
        conversation.count(&self.findings[before..]);
        Some(event)
    }

    /// Gives a message of the connection manager to the judge of the protocols above.
    fn connection_message(&mut self, o: &Observed<'_>) {
        let Some(upper) = &mut self.upper else { return };
        let Some(mad) = cm::read(o) else { return };
        let known = self.transactions.of(o, &mad.message);
        let message = ConnectionMessage {
            packet: o,
            message: &mad.message,
            request: known.as_ref().map(|known| known.request),
            repeated: known.as_ref().is_some_and(|known| known.frame != o.meta.frame),
            conversation: known.and_then(|known| known.conversation),
        };
        let before = self.findings.len();
        upper.connection(&message, &mut self.findings);
        self.count(before);
    }

    /// Counts findings from the `before`th on for their conversations.
    fn count(&mut self, before: usize) {
        for finding in &self.findings[before..] {
            let index = finding.conversation.map(|index| self.conversation_of(index));
            if let Some(conversation) = index.and_then(|index| self.conversations.get_mut(index)) {
                conversation.count(std::slice::from_ref(finding));
            }
        }
    }

    /// Notes a packet with a wrong ICRC, which a receiver drops; some peers take it. Returns the conversation that it seems to
    /// belong to.
    pub fn damaged(&mut self, o: &Observed<'_>) -> Option<usize> {
        let bth = &o.header.bth;
        let key = (o.meta.src.ip(), o.meta.dst, bth.dest_qp.value());
        let &(index, sender) = self.halves.get(&key)?;
        if !is_answer(bth.opcode.info().class) {
            self.conversations[index].directions[sender].damaged = true;
        }
        Some(index)
    }

    /// Notes a frame of several packets, of which only the first one's header can be read. Returns their conversation.
    pub fn unread(&mut self, first: &Observed<'_>) -> Option<usize> {
        let key = (first.meta.src.ip(), first.meta.dst, first.header.bth.dest_qp.value());
        let &(index, sender) = self.halves.get(&key)?;
        self.conversations[index].directions[sender].unread_frames += 1;
        Some(index)
    }

    /// Returns the findings since the last call.
    pub fn take_findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }

    /// Judges what the capture's end shows.
    pub fn finish(&mut self) {
        let now = self.now_ns;
        for (index, conversation) in self.conversations.iter_mut().enumerate() {
            conversation.close(index, now, &mut self.findings);
        }
        self.transactions.finish(now, &mut self.findings);
    }

    /// Returns the conversations.
    pub fn conversations(&self) -> Vec<Summary> {
        let all = self.conversations.iter().enumerate();
        all.filter(|(_, c)| c.merged.is_none() && c.packets != [0; 2])
            .map(|(index, c)| self.summary(index, c))
            .collect()
    }

    fn summary(&self, index: usize, c: &Conversation) -> Summary {
        let above = self.upper.iter().flat_map(|upper| upper.not_checked(index));
        Summary {
            index,
            service: service_name(c.service),
            name: c.name.clone(),
            ends: c.ends,
            origin: c.origin,
            mtu: c.mtu.bytes(),
            packets: c.packets,
            repeated: [c.directions[0].repeated, c.directions[1].repeated],
            time_ns: [c.first_ns, c.last_ns],
            errors: c.errors,
            warnings: c.warnings,
            not_checked: c.unknown().into_iter().map(|(text, _)| text).chain(above).collect(),
            verdict: c.verdict(),
        }
    }

    /// Returns the conversation that a finding or an event with this index belongs to: two may turn out to be one.
    pub fn conversation_of(&self, index: usize) -> usize {
        self.conversations.get(index).and_then(|c| c.merged).unwrap_or(index)
    }

    /// Returns the two queue pairs of a conversation, as far as they are known by now.
    pub fn ends(&self, index: usize) -> Option<[Endpoint; 2]> {
        self.conversations.get(index).map(|c| c.ends)
    }

    /// Returns the conversations that turned out to be a part of another one, and that one.
    pub fn merged(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = self.conversations.iter().enumerate();
        all.filter_map(|(index, c)| Some((index, c.merged?)))
    }

    /// Returns the frames with messages of the connection manager, and the conversations that they made or ended.
    pub fn connection_messages(&self) -> impl Iterator<Item = (u64, usize)> {
        self.transactions.messages()
    }

    /// Returns conversation and endpoint that an event with these belongs to: [`Judge::conversation_of`] with the endpoint's
    /// index in it.
    pub fn endpoint_of(&self, index: usize, sender: usize) -> (usize, usize) {
        match self.conversations.get(index).and_then(|c| c.merged) {
            // It had the requests of the other's second endpoint.
            Some(whole) => (whole, 1 - sender.min(1)),
            None => (index, sender),
        }
    }

    /// Returns how many packets belong to conversations that were too many to follow.
    pub const fn not_followed(&self) -> u64 {
        self.not_followed
    }

    fn change(&mut self, change: Change, o: &Observed<'_>) {
        match change {
            Change::None => {}
            Change::Made { key, sides, mtu, name } => {
                let index = self.connect(sides, mtu, name);
                if let Some(index) = index {
                    self.transactions.made(key, index);
                }
            }
            Change::Ended(index) => {
                if let Some(conversation) = self.conversations.get_mut(index) {
                    conversation.disconnected.get_or_insert(o.meta.time_ns);
                }
            }
        }
    }

    fn connect(&mut self, sides: [Side; 2], mtu: Option<u32>, name: String) -> Option<usize> {
        let ends = sides.map(|side| Endpoint {
            addr: side.addr,
            qpn: Some(side.qpn.value()),
        });
        let mut conversation = Conversation::new(Service::Rc, Origin::ConnectionManager, ends);
        conversation.mtu = mtu.map_or(PathMtu::Unknown, PathMtu::Stated);
        conversation.name = Some(name);
        conversation.depth = sides.map(|side| Some(side.depth));
        for (direction, side) in conversation.directions.iter_mut().zip(sides) {
            direction.begin(side.first_psn);
        }
        self.insert(conversation)
    }

    /// Adds a conversation of which both queue pairs are known; one that had them before is over.
    fn insert(&mut self, conversation: Conversation) -> Option<usize> {
        if self.conversations.len() >= MAX_CONVERSATIONS {
            return None;
        }
        let index = self.conversations.len();
        for sender in 0..2 {
            let (from, to) = (conversation.ends[sender].addr, conversation.ends[1 - sender]);
            let Some(qpn) = to.qpn else { continue };
            if let Some((old, _)) = self.halves.insert((from, to.addr, qpn), (index, sender)) {
                let now = self.now_ns;
                self.conversations[old].close(old, now, &mut self.findings);
            }
        }
        self.conversations.push(conversation);
        Some(index)
    }

    /// Finds or makes the conversation of a packet.
    fn route(&mut self, o: &Observed<'_>) -> Option<(usize, usize)> {
        let bth = &o.header.bth;
        let (src, dst) = (o.meta.src.ip(), o.meta.dst);
        let info = bth.opcode.info();
        let key = (src, dst, bth.dest_qp.value());
        if let Some(&(index, sender)) = self.halves.get(&key) {
            let conversation = &self.conversations[index];
            let orphan = conversation.directions[1 - sender].requests == 0 && !conversation.is_paired();
            if orphan && is_answer(info.class) {
                return Some(self.merge(index, sender, o).unwrap_or((index, sender)));
            }
            return Some((index, sender));
        }
        if let Some(found) = self.pair(o, key) {
            return Some(found);
        }
        if info.class == Class::Cnp {
            return None;
        }
        if let Some(successor) = self.successor(o, key) {
            return Some(successor);
        }
        let src_qpn = o.header.deth().map(|deth| deth.src_qp.value());
        let ends = [
            Endpoint {
                addr: src,
                qpn: src_qpn,
            },
            Endpoint {
                addr: dst,
                qpn: Some(key.2),
            },
        ];
        let service = match info.service {
            Service::Manufacturer | Service::Cnp => Service::Rc,
            service => service,
        };
        let index = self.insert_half(Conversation::new(service, Origin::Packets, ends), key);
        if index.is_none() {
            self.not_followed += 1;
        }
        index.map(|index| (index, 0))
    }

    fn insert_half(&mut self, conversation: Conversation, key: Key) -> Option<usize> {
        if self.conversations.len() >= MAX_CONVERSATIONS {
            return None;
        }
        let index = self.conversations.len();
        self.halves.insert(key, (index, 0));
        self.unpaired.entry((key.0, key.1)).or_default().push(index);
        self.conversations.push(conversation);
        Some(index)
    }

    /// Finds the conversation whose requests a packet answers, or whose datagrams.
    fn pair(&mut self, o: &Observed<'_>, key: Key) -> Option<(usize, usize)> {
        let index = self.candidate(o, None)?;
        self.conversations[index].ends[0].qpn = Some(key.2);
        self.halves.insert(key, (index, 1));
        self.drop_unpaired((key.1, key.0), index);
        Some((index, 1))
    }

    /// Begins the conversation of a queue pair whose peer has the number of a queue pair that was answered last before a pause:
    /// its answers go to another queue pair now.
    fn successor(&mut self, o: &Observed<'_>, key: Key) -> Option<(usize, usize)> {
        let bth = &o.header.bth;
        if !is_answer(bth.opcode.info().class) {
            return None;
        }
        self.comparisons = self.comparisons.checked_sub(self.conversations.len())?;
        let (answerer, requester) = (key.0, key.1);
        let fits = |c: &Conversation, side: usize| {
            let pause = o.meta.time_ns.saturating_sub(c.directions[side].answered_ns) > PAUSE_NS;
            let between = c.ends[side].addr == requester && c.ends[1 - side].addr == answerer;
            let live = c.origin == Origin::Packets && c.is_paired() && c.merged.is_none() && !c.closed;
            between && live && pause && c.directions[side].requests > 0
        };
        let sides = self.conversations.iter().flat_map(|c| [(c, 0), (c, 1)]);
        let old = sides.filter(|(c, side)| fits(c, *side));
        let old: Vec<_> = old.take(2).map(|(c, side)| (c.ends[1 - side], c.service)).collect();
        let [(peer, service)] = old[..] else {
            return None;
        };
        let ends = [
            peer,
            Endpoint {
                addr: requester,
                qpn: Some(key.2),
            },
        ];
        self.insert(Conversation::new(service, Origin::Packets, ends))
            .map(|index| (index, 0))
    }

    /// Joins conversation `index`, whose answers of endpoint `sender` belong to no request, with the one that has the requests.
    fn merge(&mut self, index: usize, sender: usize, o: &Observed<'_>) -> Option<(usize, usize)> {
        let other = self.candidate(o, Some(index))?;
        debug_assert_eq!(sender, 0, "an unpaired conversation has one sender");
        self.conversations[other].merged = Some(index);
        let qpn = self.conversations[other].ends[1].qpn;
        let requests = std::mem::take(&mut self.conversations[other].directions[0]);
        let (packets, marked) = (
            self.conversations[other].packets[0],
            self.conversations[other].marked[0],
        );
        let mtu = self.conversations[other].mtu;
        let (errors, warnings) = (self.conversations[other].errors, self.conversations[other].warnings);
        let (first_ns, ends) = (self.conversations[other].first_ns, self.conversations[other].ends);
        let joined = &mut self.conversations[index];
        joined.directions[1] = requests;
        joined.packets[1] += packets;
        joined.marked[1] += marked;
        joined.errors += errors;
        joined.warnings += warnings;
        joined.first_ns = joined.first_ns.min(first_ns);
        if joined.mtu == PathMtu::Unknown {
            joined.mtu = mtu;
        }
        joined.ends[0].qpn = qpn;
        if let Some(upper) = &mut self.upper {
            upper.merged(other, index);
        }
        let key = (ends[0].addr, ends[1].addr, qpn?);
        self.halves.insert(key, (index, 1));
        self.drop_unpaired((ends[0].addr, ends[1].addr), other);
        let joined_key = (
            self.conversations[index].ends[0].addr,
            self.conversations[index].ends[1].addr,
        );
        self.drop_unpaired(joined_key, index);
        Some((index, sender))
    }

    /// The only unpaired conversation in the other direction that a packet can belong to.
    fn candidate(&mut self, o: &Observed<'_>, except: Option<usize>) -> Option<usize> {
        let bth = &o.header.bth;
        let class = bth.opcode.info().class;
        let unpaired = self.unpaired.get(&(o.meta.dst, o.meta.src.ip()))?;
        self.comparisons = self.comparisons.checked_sub(unpaired.len())?;
        let fits = |index: &&usize| {
            let conversation = &self.conversations[**index];
            if Some(**index) == except || conversation.closed {
                return false;
            }
            if !bth.opcode.info().is_of(conversation.service) {
                return false;
            }
            match o.header.deth() {
                Some(deth) => {
                    conversation.ends[0].qpn == Some(bth.dest_qp.value())
                        && conversation.ends[1].qpn == Some(deth.src_qp.value())
                }
                None => is_answer(class) && conversation.directions[0].awaits(bth.psn),
            }
        };
        let mut found = unpaired.iter().filter(fits);
        let first = found.next()?;
        found.next().is_none().then_some(*first)
    }

    fn drop_unpaired(&mut self, key: (IpAddr, IpAddr), index: usize) {
        if let Some(list) = self.unpaired.get_mut(&key) {
            list.retain(|known| *known != index);
        }
    }

    fn step(&mut self, index: usize, sender: usize, o: &Observed<'_>) -> EventKind {
        let room = room(self.conversations.len());
        let conversation = &mut self.conversations[index];
        conversation.packets[sender] += 1;
        conversation.marked[sender] += u64::from(o.meta.ecn & 3 == 3);
        conversation.last_ns = o.meta.time_ns;
        conversation.last_frame = o.meta.frame;
        if conversation.first_ns == 0 {
            conversation.first_ns = o.meta.time_ns;
        }
        let info = o.header.bth.opcode.info();
        let answer = is_answer(info.class);
        let requester = if answer { 1 - sender } else { sender };
        let missed = conversation.missed();
        let mut cx = Context {
            conversation: index,
            mtu: &mut conversation.mtu,
            depth: conversation.depth[requester],
            room,
            disconnected: conversation.disconnected,
            missed,
            findings: &mut self.findings,
        };
        if info.class == Class::Cnp {
            conversation.cnps[sender] += 1;
            return EventKind::Cnp;
        }
        if !info.is_of(conversation.service) {
            let text = format!(
                "{} on a queue pair of service {}",
                info.name,
                service_name(conversation.service)
            );
            cx.find(Rule::OpcodeService, o, text);
            return EventKind::Unknown;
        }
        let direction = &mut conversation.directions[requester];
        // A queue pair keeps its source port: after a pause, another port and a jump of PSNs are another queue pair's.
        let port = conversation.ports[sender].replace(o.meta.src.port());
        let is_new = port.is_some_and(|port| port != o.meta.src.port())
            && conversation.origin == Origin::Packets
            && o.meta.time_ns.saturating_sub(direction.last_ns) > PAUSE_NS;
        if is_new
            && !answer
            && direction
                .next
                .is_some_and(|next| direction.unwrap(o.header.bth.psn) != next)
        {
            direction.restart();
        }
        match conversation.service {
            Service::Ud => {
                if o.payload_len > 4096 {
                    cx.find(Rule::DatagramLength, o, format!("{} bytes", o.payload_len));
                }
                EventKind::Datagram
            }
            Service::Uc => requests::unreliable(direction, o, &mut cx),
            _ if answer => responses::answer(direction, o, &mut cx),
            _ => requests::reliable(direction, o, &mut cx),
        }
    }
}

const fn is_answer(class: Class) -> bool {
    matches!(
        class,
        Class::ReadResponse | Class::Acknowledge | Class::AtomicAcknowledge | Class::SelectiveAcknowledge
    )
}

const fn service_name(service: Service) -> &'static str {
    match service {
        Service::Rc | Service::Manufacturer | Service::Cnp => "RC",
        Service::Uc => "UC",
        Service::Ud => "UD",
        Service::Xrc => "XRC",
    }
}
