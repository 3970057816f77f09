//! Peers of an RDS node, some that keep to the protocol and some that don't: connect requests with any private data, fragments of any
//! bytes and of messages that fit together, acknowledgements of anything, ends of connections at any time; and programs that send, read,
//! cancel and close. What the node sends are messages in whole fragments; it acknowledges only what has come; its limits hold, and nothing
//! is left of it in the end. What the transport must not be asked for is in `provider.rs`.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use rds::{
    Config, Node, Received, Rings, SocketId,
    proto::{ConnCommon, ConnV4, EXT_LEN, Flags, Fragment, Header, MAX_SEND, PORT_V4, Version},
};
use roce_host::Machine;
use roce_verbs::{
    Completion, Instant, SendOp, WcStatus,
    provider::{CmKind, CmRef, Cx, DeviceIx, Event, NoAnswer, QpId, RejectReason},
};
use zerocopy::IntoBytes;

use crate::{host::settle, input::Input, node_host::NodeHost};

const NODE: [u8; 4] = [192, 0, 2, 1];
const PORTS: [u16; 2] = [4000, 4001];
const PEERS: usize = 5;
const MAX_CONNECTIONS: usize = 4;
/// Connections of the connection manager in a run.
const MAX_LINKS: usize = 32;
/// Steps of a run: more are left out, so that no input takes long.
const STEPS: usize = 96;

fn config() -> Config {
    Config {
        send_buffer: 20_000,
        recv_buffer: 10_000,
        rings: Rings { send: 4, recv: 4 },
        max_connections: MAX_CONNECTIONS,
        max_sockets: 3,
        max_unread: 2 << 20,
        ..Config::default()
    }
}

fn peer(index: usize) -> IpAddr {
    [10, 0, 0, index as u8 + 1].into()
}

/// Connection as its peer sees it.
struct Link {
    cm: CmRef,
    peer: usize,
    /// First header of the message whose fragments come from the node, and the next fragment.
    open: Option<(Header, u32)>,
}

/// The node, whose programs do what the input says: nobody waits for reports.
struct Programs(Node);

impl Machine for Programs {
    type Key = ();

    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.0.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.0.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.0.timeout(cx);
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.0.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.0.next_timeout()
    }

    fn wants_turn(&self) -> bool {
        self.0.wants_turn()
    }

    fn stop(&mut self, cx: &mut Cx<'_>) {
        self.0.stop(cx);
    }

    fn is_stopped(&self) -> bool {
        self.0.is_stopped()
    }

    fn take_reports(&mut self, changed: &mut dyn FnMut(())) {
        while self.0.poll_output().is_some() {
            changed(());
        }
    }
}

struct Run {
    host: NodeHost<Programs>,
    sockets: Vec<SocketId>,
    links: Vec<Link>,
    /// Highest sequence number that has come from each peer.
    highest: BTreeMap<usize, u64>,
}

/// See the module.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut run = Run::new();
    for _ in 0..STEPS {
        if input.0.is_empty() {
            break;
        }
        run.step(&mut input);
        run.settle();
        run.check();
    }
    run.stop();
}

impl Run {
    fn new() -> Self {
        let host = NodeHost::new(|cx| {
            let mut node = Node::listen(cx, config(), &[NODE.into()], []).expect("a node");
            let sockets = PORTS.map(|port| {
                let id = node.socket().expect("a socket");
                node.bind(id, SocketAddr::new(NODE.into(), port), 0).expect("a port");
                id
            });
            (Programs(node), sockets)
        });
        let (host, sockets) = host;
        Self {
            host,
            sockets: sockets.to_vec(),
            links: Vec::new(),
            highest: BTreeMap::new(),
        }
    }

    fn node(&mut self) -> &mut Node {
        &mut self.host.machine.0
    }

    /// Until the node has nothing left to do.
    fn settle(&mut self) {
        settle(|| {
            let moved = self.host.turn();
            self.find_attempts();
            self.read_sends();
            moved
        });
    }

    /// Connections that the node has begun.
    fn find_attempts(&mut self) {
        for (cm, of) in &self.host.provider.cms {
            let known = self.links.iter().any(|link| link.cm == *cm);
            let Some(to) = of.peer.filter(|_| !known) else { continue };
            let found = (0..PEERS).find(|index| peer(*index) == to.ip());
            let open = None;
            self.links.push(Link {
                cm: *cm,
                peer: found.expect("one of the peers"),
                open,
            });
        }
    }

    /// Reads and checks the node's SENDs.
    fn read_sends(&mut self) {
        for link in &mut self.links {
            let Some(qp) = self.host.provider.cms.get(&link.cm).and_then(|cm| cm.qp) else {
                continue;
            };
            for (op, bytes) in self.host.provider.take_sends(qp) {
                assert_eq!(op, SendOp::Send);
                let index = link.open.map_or(0, |(_, index)| index);
                let fragment = Fragment::parse(&bytes, index).expect("a fragment");
                let header = *fragment.header;
                let first = link.open.map_or(header, |(first, _)| first);
                assert_eq!(header.continues(&first, index), Ok(()));
                let ends = index + 1 == header.fragments();
                link.open = (!ends).then_some((first, index + 1));
                let highest = self.highest.get(&link.peer).copied().unwrap_or(0);
                assert!(header.ack.get() <= highest, "an acknowledgement of what did not come");
            }
        }
    }

    fn check(&self) {
        assert!(self.host.machine.0.connections().count() <= MAX_CONNECTIONS);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.byte();
        let link = input.below(self.links.len());
        match op % 12 {
            0 => self.connect(input),
            1 => self.tell(
                link,
                CmKind::Established {
                    private_data: input.short().to_vec(),
                },
            ),
            2 => self.tell(link, CmKind::Resolved { device: DeviceIx(0) }),
            3 => self.end(link, input),
            4 => {
                let bytes = input.short().to_vec();
                self.deliver(link, &bytes);
            }
            5..=7 => self.fragment(link, input),
            8 => self.send(input),
            9 => self.receive(input),
            10 => self.wait(Duration::from_millis(250) * u32::from(input.byte())),
            _ => self.close(input),
        }
    }

    /// A peer asks for a connection.
    fn connect(&mut self, input: &mut Input<'_>) {
        if self.links.len() >= MAX_LINKS {
            return;
        }
        let [from, shape] = [input.below(PEERS), input.below(256)];
        let (local, remote) = (SocketAddr::new(NODE.into(), PORT_V4), SocketAddr::new(peer(from), 9));
        let mut data = Vec::new();
        if let (IpAddr::V4(src), IpAddr::V4(dst)) = (remote.ip(), local.ip()) {
            let common = ConnCommon::new(Version::V3_1, (shape & 1) as u8, 0, 0);
            data = ConnV4::new(src, dst, common).as_bytes().to_vec();
        }
        match shape >> 6 {
            3 => data = input.short().to_vec(),
            2 => data[input.below(32)] = input.byte(),
            _ => {}
        }
        let cm = self.host.provider.ask(self.host.listener, 0, local, remote, data);
        self.links.push(Link {
            cm,
            peer: from,
            open: None,
        });
        if shape & 32 != 0 {
            self.settle();
            let private_data = Vec::new();
            self.tell(self.links.len() - 1, CmKind::Established { private_data });
        }
    }

    fn tell(&mut self, link: usize, kind: CmKind) {
        let Some(cm) = self.links.get(link).map(|link| link.cm) else {
            return;
        };
        let Some(of) = self.host.provider.cms.get(&cm) else {
            return;
        };
        // A way is found before there is a queue pair, and nothing is established without one.
        let fits = match kind {
            CmKind::Resolved { .. } => of.qp.is_none() && of.peer.is_some_and(|peer| peer.port() == PORT_V4),
            CmKind::Established { .. } => of.qp.is_some(),
            _ => true,
        };
        if fits {
            self.host.provider.tell(cm, kind);
        }
    }

    fn end(&mut self, link: usize, input: &mut Input<'_>) {
        let kind = match input.byte() % 7 {
            0 | 1 => CmKind::Disconnected,
            2 => CmKind::Rejected {
                reason: RejectReason(input.number_or_zeros(1) as u16),
                private_data: input.short().to_vec(),
            },
            3 => CmKind::Unreachable(NoAnswer::Timeout),
            4 => CmKind::ConnectError("broken".into()),
            5 => CmKind::AddressChange,
            _ => {
                if let Some(qp) = self.live(link) {
                    self.host.provider.fail_qp(qp, WcStatus::RetryExceeded);
                }
                return;
            }
        };
        self.tell(link, kind);
    }

    fn live(&self, link: usize) -> Option<QpId> {
        self.host.provider.live(self.links.get(link)?.cm)
    }

    /// A SEND comes, if a receive waits for it.
    fn deliver(&mut self, link: usize, bytes: &[u8]) {
        let Some(qp) = self.live(link).filter(|qp| self.host.provider.recvs(*qp) > 0) else {
            return;
        };
        if let Ok((header, _)) = Header::peek(bytes) {
            let highest = self.highest.entry(self.links[link].peer).or_default();
            *highest = (*highest).max(header.sequence.get());
        }
        self.host.provider.deliver(qp, bytes, None);
    }

    /// Fragments of a message that fit together, but perhaps for one.
    fn fragment(&mut self, link: usize, input: &mut Input<'_>) {
        let [shape, sequence, ack, flags] = [(); 4].map(|()| input.byte());
        let number = |byte: u8| match byte {
            255 => u64::MAX,
            254 => u64::MAX - 1,
            253 => 1 << 40,
            byte => u64::from(byte),
        };
        let len = match shape & 3 {
            0 => u32::from(input.byte()),
            1 => 4096 + u32::from(input.byte()),
            2 => 8192,
            _ => input.number_or_zeros(3) as u32,
        };
        let port = |bits: u8| [4000, 4001, 0, 1][usize::from(bits & 3)];
        let ports = (port(shape >> 2), port(shape >> 4));
        let mut header = Header::new(
            number(sequence),
            number(ack),
            len,
            ports,
            Flags::from_bits_retain(flags & 0x27),
        );
        if shape & 64 != 0 {
            let mut extensions = [0; EXT_LEN];
            let bytes = input.take(EXT_LEN);
            extensions[..bytes.len()].copy_from_slice(bytes);
            header.set_extensions(extensions);
            header.seal();
        }
        for index in 0..header.fragments().min(4) {
            let mut bytes = header.as_bytes().to_vec();
            let odd = shape & 128 != 0 && index == u32::from(flags >> 6);
            let len = match odd {
                true => input.number_or_zeros(2) as usize % (MAX_SEND + 64),
                false => header.fragment_len(index),
            };
            bytes.resize(Header::LEN + len, 3);
            self.deliver(link, &bytes);
            self.settle();
        }
    }

    fn socket(&self, input: &mut Input<'_>) -> Option<SocketId> {
        self.sockets.get(input.below(self.sockets.len())).copied()
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let Some(id) = self.socket(input) else { return };
        let [to, port, len] = [(); 3].map(|()| input.byte());
        let to = match usize::from(to) % (PEERS + 1) {
            PEERS => NODE.into(),
            index => peer(index),
        };
        let port = [4000, 4001, 0, 77][usize::from(port & 3)];
        // It may be refused.
        let _ = self
            .node()
            .send(id, Some((to, port).into()), &vec![5; usize::from(len) * 40]);
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let Some(id) = self.socket(input) else { return };
        let peeked = self.node().peek(id);
        let received = self.node().receive(id);
        assert_eq!(peeked, received);
        if let Ok(Received::Message(message)) = received {
            assert!(message.data.len() <= 1 << 20);
            let from = message.from.ip();
            assert!(from == IpAddr::from(NODE) || (0..PEERS).any(|index| peer(index) == from));
        }
    }

    /// Time goes by, with all its timers.
    fn wait(&mut self, time: Duration) {
        let end = self.host.now + time;
        while self.host.advance(end) {
            self.settle();
            self.host.check_timers();
            if self.links.len() >= MAX_LINKS {
                break;
            }
        }
        self.host.now = end;
    }

    /// A socket is canceled, or closed and replaced by another one.
    fn close(&mut self, input: &mut Input<'_>) {
        let [what, to] = [input.byte(), input.byte()];
        let index = usize::from(what >> 1) % self.sockets.len();
        let id = self.sockets[index];
        if what & 1 == 0 {
            let to = SocketAddr::new(peer(usize::from(to) % PEERS), PORTS[usize::from(to >> 7)]);
            self.node().cancel_sent_to(id, to).expect("a bound socket");
            return;
        }
        self.node().close(id).expect("a socket");
        let id = self.node().socket().expect("room for a socket");
        self.node()
            .bind(id, SocketAddr::new(NODE.into(), PORTS[index]), 0)
            .expect("its port is free");
        self.sockets[index] = id;
    }

    /// Ends the node. Nothing is left.
    fn stop(mut self) {
        self.host.with(|node, cx| node.stop(cx));
        self.settle();
        self.host.check_stopped();
    }
}
