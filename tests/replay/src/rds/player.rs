//! A node in the place of one side of a capture.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use rds::{
    Config, Node, PairKey, PairState, Received, SocketId,
    proto::{ConnCommon, ConnV4, ConnV6, Flags, Header, Kind, Version},
};
use roce_verbs::{
    Instant,
    provider::{CmKind, CmRef, Cx, DeviceIx, NoAnswer, Provider as _, QpId},
};
use zerocopy::IntoBytes as _;

use super::{
    manifest::Settings,
    provider::{self, Keys, Scripted},
    record::{Record, Sent, What, port_of},
};

/// Longer than any capture.
const NEVER: Duration = Duration::from_secs(1 << 30);

/// A node's side of a connection.
#[derive(Clone, Copy, Debug)]
struct Ours {
    id: CmRef,
    qp: QpId,
}

/// SEND of the node.
#[derive(Debug)]
pub(super) struct Posted {
    /// SEND that the captured side began to send when the node had its turn.
    pub(super) beside: Option<usize>,
    pub(super) bytes: Vec<u8>,
}

/// Result of a replay.
#[derive(Debug, Default)]
pub(super) struct Played {
    /// SENDs of the node on each connection of the record.
    pub(super) posted: BTreeMap<usize, Vec<Posted>>,
    /// Private data of its requests and answers.
    pub(super) private: BTreeMap<usize, Vec<u8>>,
    /// Connections that it refused.
    pub(super) refused: BTreeSet<usize>,
    /// Steps that it did not take.
    pub(super) wrong: Vec<String>,
}

/// A node in the place of one side of a capture.
pub(super) struct Player<'a> {
    record: &'a Record,
    settings: &'a Settings,
    addr: IpAddr,
    peer: IpAddr,
    node: Node,
    provider: Scripted,
    now: Instant,
    sockets: BTreeMap<u16, (SocketId, u8)>,
    /// Sockets of programs that read only so that a port becomes free.
    unread: Vec<SocketId>,
    /// Messages that were given to the node, by type of service.
    queued: BTreeSet<(u8, u64)>,
    /// SENDs of the peer that the node has got.
    delivered: BTreeSet<usize>,
    links: BTreeMap<usize, Ours>,
    /// Connection of the record that carries a type of service now.
    current: BTreeMap<u8, usize>,
    beside: Option<usize>,
    played: Played,
}

/// Private data of a REQ.
fn private_data(from: IpAddr, to: IpAddr, tos: u8) -> Vec<u8> {
    let common = ConnCommon::new(Version::V3_1, tos, 0, 0);
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ConnV4::new(from, to, common).as_bytes().to_vec(),
        (IpAddr::V6(from), IpAddr::V6(to)) => ConnV6::new(from, to, common).as_bytes().to_vec(),
        _ => Vec::new(),
    }
}

fn random(bytes: &mut [u8]) {
    bytes.fill(0);
}

/// The kernel tells and asks nothing by timers.
fn config(settings: &Settings) -> Config {
    Config {
        send_buffer: settings.send_buffer,
        recv_buffer: settings.recv_buffer,
        ack_delay: NEVER,
        probe_delay: NEVER,
        ..Config::default()
    }
}

impl<'a> Player<'a> {
    /// Plays a side of a record.
    ///
    /// # Errors
    /// Without a node.
    pub(super) fn play(record: &'a Record, addr: IpAddr, settings: &'a Settings) -> Result<Played, String> {
        let link = record.links.first().ok_or("no connection")?;
        let peer = match link.connector == addr {
            true => link.acceptor,
            false => link.connector,
        };
        let now = Instant::from_nanos(record.events.first().map_or(0, |(time, _)| *time));
        let mut provider = device(addr);
        let mut states = former(record, addr, peer);
        // It sends and gets a message before that.
        let is_older = |key: &PairKey| {
            record
                .links
                .iter()
                .any(|link| link.private.is_none() && link.tos == key.tos)
        };
        for (_, state) in states.iter_mut().filter(|(key, _)| is_older(key)) {
            state.next_send = state.next_send.max(2) - 1;
            state.next_receive = state.next_receive.max(2) - 1;
        }
        let node = start(&mut provider, now, addr, settings, states)?;
        let mut player = Self {
            record,
            settings,
            addr,
            peer,
            node,
            provider,
            now,
            sockets: BTreeMap::new(),
            unread: Vec::new(),
            queued: BTreeSet::new(),
            delivered: BTreeSet::new(),
            links: BTreeMap::new(),
            current: BTreeMap::new(),
            beside: None,
            played: Played::default(),
        };
        player.join()?;
        if let Some(port) = settings.unread {
            let socket = player.socket(port, 0).map_err(|e| e.to_string())?;
            player.unread.push(socket);
        }
        for (time, what) in &record.events {
            player.now = player.now.max(Instant::from_nanos(*time));
            player.event(*what);
        }
        player.turn();
        Ok(player.played)
    }

    fn cx<T>(&mut self, call: impl FnOnce(&mut Node, &mut Cx<'_>) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut random,
        };
        call(&mut self.node, &mut cx)
    }

    fn wrong(&mut self, what: impl Into<String>) {
        self.played.wrong.push(what.into());
    }

    fn tos(&self, link: usize) -> u8 {
        self.record.links[link].tos
    }

    /// Connections that are older than the capture: the node has them.
    fn join(&mut self) -> Result<(), String> {
        for (link, older) in self.record.links.iter().enumerate() {
            if older.private.is_none() {
                self.accept(link, private_data(self.peer, self.addr, older.tos));
                self.establish(link, Vec::new());
                self.turn();
                self.message_before(link)?;
            }
        }
        // All that was sent before the capture.
        self.provider.take_log();
        self.played.posted.clear();
        self.played.private.clear();
        Ok(())
    }

    /// The last message either way that was before the capture: with it the connection is no new one.
    fn message_before(&mut self, link: usize) -> Result<(), String> {
        let tos = self.tos(link);
        // Of no program of the captures.
        let port = 60_000 + u16::from(tos);
        let states = former(self.record, self.addr, self.peer);
        let Some(state) = states.get(&self.key(tos)) else {
            return Ok(());
        };
        let qp = self.links.get(&link).ok_or("no connection")?.qp;
        let header = Header::new(state.next_receive - 1, 0, 0, (port, port), Flags::empty());
        if state.next_receive > 1 {
            self.provider.deliver(qp, header.as_bytes(), None);
        }
        if state.next_send > 1 {
            let socket = self.socket(port, tos).map_err(|e| e.to_string())?;
            let sent = self.node.queue(socket, Some(SocketAddr::new(self.peer, port)), &[]);
            sent.map_err(|e| e.to_string())?;
        }
        self.turn();
        Ok(())
    }

    fn key(&self, tos: u8) -> PairKey {
        PairKey {
            local: self.addr,
            remote: self.peer,
            tos,
        }
    }

    fn event(&mut self, what: What) {
        let record = self.record;
        if let What::Request(link) | What::Reply(link) | What::Confirm(link) | What::End(link) = what
            && ![record.links[link].connector, record.links[link].acceptor].contains(&self.addr)
        {
            return;
        }
        match what {
            What::Request(link) => {
                let connects = record.links[link].connector == self.addr;
                self.restart_before(link);
                self.leave(self.tos(link));
                match (connects, &record.links[link].private) {
                    (true, _) => self.connect(link),
                    (false, Some([request, _])) => self.accept(link, request.clone()),
                    (false, None) => {}
                }
            }
            What::Reply(link) => {
                if let (true, Some([_, reply])) =
                    (record.links[link].connector == self.addr, &record.links[link].private)
                {
                    self.establish(link, reply.clone());
                }
            }
            What::Confirm(link) if record.links[link].acceptor == self.addr => self.establish(link, Vec::new()),
            What::Confirm(_) => {}
            What::End(link) => {
                if self.current.get(&self.tos(link)) == Some(&link) {
                    self.leave(self.tos(link));
                }
            }
            // What the captured side had got by then the node has, too: it may not be quicker.
            What::Begin(number) if record.sent[number].from == self.addr => {
                self.deliver_acknowledged(number);
                self.queue(number);
                self.free(number);
                self.beside = Some(number);
                self.turn();
                self.beside = None;
            }
            What::Begin(_) => {}
            What::Arrive(number) if record.sent[number].from == self.peer => self.deliver(number),
            What::Arrive(_) => {}
        }
    }

    /// The kernel was started again if its first message over a connection has number 1 once more.
    fn restart_before(&mut self, link: usize) {
        let ours = |sent: &&Sent| sent.link == link && sent.from == self.addr;
        let of_link = self.record.sent.iter().filter(ours);
        let mut data = of_link.filter(|sent| matches!(sent.kind(), Some(Kind::Data | Kind::Ping)));
        let fresh = data
            .next()
            .and_then(|sent| sent.header())
            .is_some_and(|header| header.sequence.get() == 1 && !header.flags().contains(Flags::RETRANSMITTED));
        if !fresh || !self.queued.contains(&(self.tos(link), 1)) {
            return;
        }
        match start(&mut self.provider, self.now, self.addr, self.settings, BTreeMap::new()) {
            Ok(node) => self.node = node,
            Err(e) => self.wrong(e),
        }
        self.sockets.clear();
        self.queued.clear();
        self.current.clear();
        self.links.clear();
    }

    /// The connection of a type of service has ended.
    fn leave(&mut self, tos: u8) {
        let Some(link) = self.current.get(&tos).copied() else {
            return;
        };
        self.turn();
        self.queue_unseen(link, tos);
        self.current.remove(&tos);
        if let Some(Ours { id, .. }) = self.links.get(&link).copied() {
            self.provider.tell(id, CmKind::Disconnected);
            self.events();
        }
    }

    /// Queues messages that the captured side sent while the network was cut: the next connection carries them again.
    fn queue_unseen(&mut self, link: usize, tos: u8) {
        let seen = self.played.posted.get(&link).map_or(0, Vec::len);
        for number in 0..self.record.sent.len() {
            let sent = &self.record.sent[number];
            let again = sent
                .header()
                .is_some_and(|header| header.flags().contains(Flags::RETRANSMITTED));
            if again && sent.link > link && sent.from == self.addr && self.tos(sent.link) == tos {
                self.queue(number);
            }
        }
        self.turn();
        self.played.posted.entry(link).or_default().truncate(seen);
    }

    /// The node connects, as it has something to send.
    fn connect(&mut self, link: usize) {
        let tos = self.tos(link);
        if !self.has_waiting(tos) {
            self.queue_first(link, tos);
        }
        self.cx(|node, cx| node.end_batch(cx));
        if self.resolving().is_empty()
            && let Some(at) = self.node.next_timeout()
        {
            self.now = self.now.max(at);
            self.cx(|node, cx| node.timeout(cx));
        }
        let Some(id) = self.resolving().pop() else {
            return self.wrong(format!("connection {link}: the node does not connect"));
        };
        self.provider.tell(id, CmKind::Resolved { device: DeviceIx(0) });
        self.events();
        self.called(link, id);
    }

    /// Connections that the node wants to begin.
    fn resolving(&self) -> Vec<CmRef> {
        let cms = self.provider.cms.iter();
        let unused = cms.filter(|(_, cm)| cm.peer.is_some() && cm.qp.is_none());
        unused.map(|(id, _)| *id).collect()
    }

    /// A program's first message that goes over a connection was there before it.
    fn queue_first(&mut self, link: usize, tos: u8) {
        let ours = self.record.sent.iter().enumerate();
        let mut of_link = ours.filter(|(_, sent)| sent.link == link && sent.from == self.addr);
        let first = of_link.find(|(_, sent)| {
            let is_new = |number| !self.queued.contains(&(tos, number));
            matches!(sent.kind(), Some(Kind::Data | Kind::Ping))
                && sent.header().is_some_and(|header| is_new(header.sequence.get()))
        });
        if let Some((number, _)) = first {
            self.queue(number);
        }
    }

    fn has_waiting(&self, tos: u8) -> bool {
        let key = self.key(tos);
        self.node
            .connections()
            .any(|connection| connection.key == key && connection.waiting > 0)
    }

    /// The peer connects. An attempt of ours has come to nothing, as the kernel's had: it would have refused.
    fn accept(&mut self, link: usize, private: Vec<u8>) {
        for id in self.resolving() {
            self.provider.tell(id, CmKind::Unreachable(NoAnswer::Timeout));
        }
        let port = port_of(self.addr);
        let (local, peer) = (SocketAddr::new(self.addr, port), SocketAddr::new(self.peer, 0));
        let mut cms = self.provider.cms.iter();
        let Some((listener, _)) = cms.find(|(_, cm)| cm.local == local && cm.peer.is_none()) else {
            return self.wrong(format!("connection {link}: the node does not listen"));
        };
        let id = self.provider.ask(*listener, 0, local, peer, private);
        self.events();
        self.called(link, id);
    }

    /// The node has asked for a connection, or answered.
    fn called(&mut self, link: usize, id: CmRef) {
        let cm = self.provider.cms.get(&id);
        if let Some((qp, params)) = cm.and_then(|cm| cm.qp.zip(cm.params.as_ref())) {
            self.links.insert(link, Ours { id, qp });
            self.played.private.insert(link, params.private_data.clone());
        } else if self.provider.rejected.iter().any(|(of, _)| *of == id) {
            self.played.refused.insert(link);
        } else {
            self.wrong(format!("connection {link}: the node neither connects nor accepts"));
        }
    }

    fn establish(&mut self, link: usize, private_data: Vec<u8>) {
        if let Some(Ours { id, .. }) = self.links.get(&link).copied() {
            self.current.insert(self.tos(link), link);
            self.provider.tell(id, CmKind::Established { private_data });
        }
    }

    /// Delivers all that the captured side acknowledges, whether its device has done so or not.
    fn deliver_acknowledged(&mut self, number: usize) {
        let (record, sent) = (self.record, &self.record.sent[number]);
        let Some(ack) = sent.header().map(|header| header.ack.get()) else {
            return;
        };
        let arrives = |other: &Sent| {
            let header = other
                .header()
                .filter(|_| other.link == sent.link && other.from == self.peer);
            header.is_some_and(|header| (1..=ack).contains(&header.sequence.get())) && other.frame < sent.frame
        };
        let Some(last) = record.sent.iter().rposition(arrives) else {
            return;
        };
        let of_link = |n: &usize| record.sent[*n].link == sent.link && record.sent[*n].from == self.peer;
        let due: Vec<usize> = (0..=last).filter(of_link).collect();
        due.into_iter().for_each(|n| self.deliver(n));
    }

    /// Programs have read enough if the captured side says that its ports are free.
    fn free(&mut self, number: usize) {
        let sent = &self.record.sent[number];
        let map = sent.bytes.get(Header::LEN..).unwrap_or_default();
        let is_map = |sent: &&Sent| sent.kind() == Some(Kind::Bitmap);
        let alike = |other: &&Sent| (other.link, other.from) == (sent.link, sent.from);
        let before = self.record.sent[..number].iter().filter(alike).filter(is_map).count();
        // Ports from 32,768 on are in the second fragment.
        if !is_map(&sent) || before % 2 == 1 || map.iter().any(|byte| *byte != 0) {
            return;
        }
        for socket in self.unread.clone() {
            while self.node.some_port_is_congested() && self.node.receive(socket).is_ok() {}
        }
    }

    fn deliver(&mut self, number: usize) {
        let sent = &self.record.sent[number];
        if sent.bytes.is_empty() || !self.delivered.insert(number) {
            return;
        }
        let Some(Ours { qp, .. }) = self.links.get(&sent.link).copied() else {
            return;
        };
        match self.provider.qpn(qp).map_or(0, |_| self.provider.recvs(qp)) {
            0 => self.wrong(format!("frame {}: no receive waits", sent.frame)),
            _ => self.provider.deliver(qp, &sent.bytes, None),
        }
    }

    /// A program of the captured side has sent a message: one of the node does.
    fn queue(&mut self, number: usize) {
        let sent = &self.record.sent[number];
        let Some(header) = sent.header().copied() else { return };
        let tos = self.tos(sent.link);
        let sequence = header.sequence.get();
        if !matches!(header.kind(), Kind::Data | Kind::Ping) || !self.queued.insert((tos, sequence)) {
            return;
        }
        let data = self.message(number, sequence);
        if data.len() != header.len.get() as usize {
            return self.wrong(format!("frame {}: the capture has not all of the message", sent.frame));
        }
        let to = SocketAddr::new(self.peer, header.dport.get());
        let frame = sent.frame;
        let done = self
            .socket(header.sport.get(), tos)
            .and_then(|socket| self.node.queue(socket, Some(to), &data));
        if let Err(e) = done {
            self.wrong(format!("frame {frame}: the node does not send: {e}"));
        }
    }

    /// Bytes of the message whose first fragment this is, of a later connection if this one has not got all of them.
    fn message(&self, first: usize, sequence: u64) -> Vec<u8> {
        let all = &self.record.sent;
        let mut data = Vec::new();
        let mut link = all[first].link;
        for sent in all[first..].iter().filter(|sent| sent.from == self.addr) {
            let Some(header) = sent.header().filter(|header| header.sequence.get() == sequence) else {
                continue;
            };
            if sent.link != link {
                (link, data) = (sent.link, Vec::new());
            }
            data.extend_from_slice(&sent.bytes[Header::LEN..]);
            if data.len() >= header.len.get() as usize {
                break;
            }
        }
        data
    }

    fn socket(&mut self, port: u16, tos: u8) -> Result<SocketId, rds::Error> {
        match self.sockets.get(&port) {
            Some((id, of)) if *of == tos => return Ok(*id),
            Some((id, _)) => self.node.close(*id)?,
            None => {}
        }
        let id = self.node.socket()?;
        self.node.bind(id, SocketAddr::new(self.addr, port), 0)?;
        self.node.set_tos(id, tos)?;
        self.sockets.insert(port, (id, tos));
        Ok(id)
    }

    /// Hands events and completions to the node. Returns whether there were any.
    fn events(&mut self) -> bool {
        let mut any = false;
        let mut completions = Vec::new();
        loop {
            // It can't fail.
            let _ = self.provider.poll_completions(&mut completions, 1);
            if let Some((qp, wc)) = completions.pop() {
                self.cx(|node, cx| node.completion(cx, qp, &wc));
            } else if let Some(event) = self.provider.poll_event() {
                self.cx(|node, cx| node.event(cx, &event));
            } else {
                return any;
            }
            any = true;
        }
    }

    /// Goes on until nothing happens by itself; programs read what has come.
    fn turn(&mut self) {
        loop {
            let had_news = self.events();
            self.cx(|node, cx| node.end_batch(cx));
            while self.node.poll_output().is_some() {}
            self.read();
            let log = self.provider.take_log();
            let is_quiet = log.is_empty() && !had_news;
            for (qp, posted) in log {
                let link = self.links.iter().find(|(_, ours)| ours.qp == qp);
                if let (Some((link, _)), provider::Posted::Send { data: bytes, .. }) = (link, posted) {
                    let beside = self.beside;
                    self.played
                        .posted
                        .entry(*link)
                        .or_default()
                        .push(Posted { beside, bytes });
                }
            }
            if is_quiet && !self.node.wants_turn() {
                return;
            }
        }
    }

    fn read(&mut self) {
        let read = |(socket, _): &&(SocketId, u8)| !self.unread.contains(socket);
        for (socket, _) in self.sockets.values().filter(read) {
            while let Ok(received) = self.node.receive(*socket) {
                drop::<Received>(received);
            }
        }
    }
}

/// Sequence numbers with which the captured side begins, if it had connections before.
fn former(record: &Record, addr: IpAddr, peer: IpAddr) -> BTreeMap<PairKey, PairState> {
    let mut states = BTreeMap::new();
    for link in &record.links {
        let of_tos = |sent: &&Sent| record.links[sent.link].tos == link.tos;
        let headers = |from: IpAddr| {
            let sent = record.sent.iter().filter(of_tos).filter(move |sent| sent.from == from);
            sent.filter_map(|sent| sent.header())
        };
        let first = |from, to| {
            let mut numbers = headers(from).map(|header| header.sequence.get());
            // Of a side that sends no message the other one knows the number.
            let known = || headers(to).map(|header| header.ack.get() + 1).next();
            numbers.find(|number| *number > 0).or_else(known).unwrap_or(1)
        };
        let state = PairState {
            next_send: first(addr, peer),
            next_receive: first(peer, addr),
        };
        let key = PairKey {
            local: addr,
            remote: peer,
            tos: link.tos,
        };
        states.insert(key, state);
    }
    states
}

/// A device with one address.
fn device(addr: IpAddr) -> Scripted {
    let mut provider = Scripted::new(&[Keys::QUEUED]);
    provider.caps[0].addrs = vec![addr];
    provider.caps[0].scattered_keys = true;
    provider
}

/// Starts a node.
fn start(
    provider: &mut Scripted,
    now: Instant,
    addr: IpAddr,
    settings: &Settings,
    former: BTreeMap<PairKey, PairState>,
) -> Result<Node, String> {
    *provider = device(addr);
    let mut cx = Cx {
        now,
        provider,
        random: &mut random,
    };
    Node::listen(&mut cx, config(settings), &[addr], former).map_err(|e| e.to_string())
}
