//! The node and its peers: what goes on between them, and what has to hold.

use std::{net::IpAddr, time::Duration};

use lnet::proto::{Body, Message, Nid, PORT, Reject};
use roce_verbs::{
    RKey,
    provider::{CmKind, QpId},
};

use super::{
    link::{Effect, Link},
    machine::LnetMachine,
    names::{CREDITS, MAX_LINKS, MAX_QUEUED, STAMP, config, node},
};
use crate::{host::settle, input::Input, node_host::NodeHost};

/// See the module.
pub(super) struct Run {
    pub(super) host: NodeHost<LnetMachine>,
    pub(super) links: Vec<Link>,
    /// Number of the next transfer of a peer.
    cookie: u64,
}

impl Run {
    pub(super) fn new(has_target: bool) -> Self {
        let (host, ()) = NodeHost::new(|cx| (LnetMachine::listen(cx, config(), has_target), ()));
        Self {
            host,
            links: Vec::new(),
            cookie: 0x1000,
        }
    }

    /// Until the node has nothing left to do.
    pub(super) fn settle(&mut self) {
        settle(|| {
            let moved = self.host.turn();
            self.find_attempts();
            self.find_answers();
            self.read_sends();
            moved
        });
    }

    /// Connections that the node has begun.
    pub(super) fn find_attempts(&mut self) {
        for (cm, of) in &self.host.provider.cms {
            let known = self.links.iter().any(|link| link.cm == *cm);
            let Some(to) = of.peer.filter(|_| !known) else { continue };
            assert_eq!(to.port(), PORT);
            let IpAddr::V4(address) = to.ip() else {
                panic!("a NID has an IPv4 address");
            };
            self.links.push(Link::new(*cm, Nid::o2ib(address), 0, true));
        }
    }

    /// Requests and answers of the node.
    pub(super) fn find_answers(&mut self) {
        for (_, bytes) in self.host.provider.rejected.drain(..) {
            let reject = Reject::parse(&bytes).expect("a reject");
            assert!(reject.why.name().is_some() && bytes.len() == Reject::LEN);
            assert!([0, STAMP].contains(&reject.incarnation));
        }
        for link in self.links.iter_mut().filter(|link| link.qp.is_none()) {
            let cm = self.host.provider.cms.get(&link.cm);
            let Some((qp, params)) = cm.and_then(|cm| Some((cm.qp?, cm.params.as_ref()?))) else {
                continue;
            };
            link.qp = Some(qp);
            let message = Message::parse(&params.private_data).expect("a message");
            assert_eq!((message.src, message.src_stamp), node());
            match message.body {
                Body::ConnReq(asked) if link.is_nodes => {
                    // Of any network, if lnet_selftest was given such a node.
                    assert_eq!(message.dst.address(), link.peer.address());
                    link.peer = message.dst;
                    assert!((1..=CREDITS).contains(&asked.queue_depth) && (1..=257).contains(&asked.max_frags));
                    (link.asked, link.stamp) = (asked.queue_depth, message.dst_stamp);
                }
                Body::ConnAck(taken) if !link.is_nodes => {
                    let agreed = (link.peer, link.stamp, link.asked);
                    assert_eq!((message.dst, message.dst_stamp, taken.queue_depth), agreed);
                    link.stands(taken.queue_depth);
                }
                body => panic!("{body:?} of a node"),
            }
        }
    }

    /// Reads and checks what the node has posted.
    pub(super) fn read_sends(&mut self) {
        for link in &mut self.links {
            let Some(qp) = link.qp else { continue };
            for (op, bytes) in self.host.provider.take_sends(qp) {
                link.reads(op, &bytes, ((link.peer, link.stamp), node()));
            }
        }
    }

    pub(super) fn check(&self) {
        let provider = &self.host.provider;
        let mut registrations = 0;
        for conn in self.host.machine.node.connections() {
            let credits = conn.credits;
            let theirs = usize::from(credits.theirs + credits.outstanding) + conn.promised;
            let ours = usize::from(credits.reserved) + conn.asked;
            let depth = usize::from(credits.depth);
            assert!(
                credits.available <= credits.depth && theirs <= depth && ours <= depth,
                "{conn:?}"
            );
            // Answers that are not posted yet stand for the difference.
            assert!(
                conn.queued > 0 || !conn.is_established || (theirs, ours) == (depth, depth),
                "{conn:?}"
            );
            assert!(conn.queued <= MAX_QUEUED, "{conn:?}");
            registrations += 1 + conn.asked + conn.promised + conn.in_flight;
        }
        let usage = provider.usage();
        assert!(usage.qps == usage.cqs && usage.mrs <= registrations, "{usage:?}");
        for link in &self.links {
            if let (Some(qp), Some(_)) = (provider.live(link.cm), link.ledger) {
                let waiting = provider.recvs(qp);
                assert!(
                    waiting >= link.receives(),
                    "{waiting} receives, not {}",
                    link.receives()
                );
            }
        }
    }

    pub(super) fn tell(&mut self, link: usize, kind: CmKind) {
        let Some(of) = self.links.get(link) else { return };
        let Some(cm) = self.host.provider.cms.get(&of.cm) else {
            return;
        };
        // A way is found before there is a queue pair, and nothing is established without one.
        let fits = match kind {
            CmKind::Resolved { .. } => cm.qp.is_none() && of.is_nodes,
            CmKind::Established { .. } => cm.qp.is_some(),
            _ => true,
        };
        if fits {
            self.host.provider.tell(of.cm, kind);
        }
    }

    pub(super) fn live(&self, link: usize) -> Option<QpId> {
        self.host.provider.live(self.links.get(link)?.cm)
    }

    /// A SEND of a peer comes.
    pub(super) fn deliver(&mut self, link: usize, bytes: &[u8]) {
        let Some(qp) = self.live(link) else { return };
        let of = &mut self.links[link];
        if of.ledger.is_none() || self.host.provider.recvs(qp) == 0 {
            return;
        }
        let effect = of.sends(bytes, ((of.peer, of.stamp), node()));
        let cm = of.cm;
        self.host.provider.deliver(qp, bytes, None);
        self.settle();
        if self.host.provider.live(cm).is_none() {
            return;
        }
        match effect {
            Effect::Ends => panic!("the node goes on after {bytes:02x?}"),
            Effect::Frees(key, frag) => {
                let found = self.host.provider.reach(qp, RKey(key), frag.addr, 1);
                assert!(found.is_err(), "memory is open after its transfer");
            }
            Effect::Counts => {}
        }
    }

    /// A message of a peer, but for a byte perhaps.
    pub(super) fn send(&mut self, link: usize, body: &Body<'_>, input: &mut Input<'_>) {
        let Some(of) = self.links.get(link) else { return };
        let Some(ledger) = of.ledger else { return };
        let shape = input.byte();
        let credits = match shape & 3 {
            0 | 1 => ledger.owed.min(255) as u8,
            2 => 0,
            _ => input.byte(),
        };
        let message = Message {
            credits,
            src_stamp: of.stamp,
            dst_stamp: STAMP,
            ..Message::new(of.peer, node().0, *body)
        };
        let mut bytes = message.to_bytes();
        if shape & 0xf0 == 0xf0 {
            let at = usize::from(input.number_or_zeros(2) as u16) % bytes.len();
            bytes[at] ^= input.byte();
        }
        self.deliver(link, &bytes);
    }

    pub(super) fn number(&mut self) -> u64 {
        self.cookie += 1;
        self.cookie
    }

    /// Time goes by, with all its timers. Returns what it is then.
    pub(super) fn wait(&mut self, time: Duration) -> roce_verbs::Instant {
        let end = self.host.now + time;
        while self.host.advance(end) {
            self.settle();
            self.host.check_timers();
            if self.links.len() >= MAX_LINKS {
                break;
            }
        }
        end
    }

    /// Ends the node. Nothing is left.
    pub(super) fn stop(mut self) -> (usize, usize, usize) {
        let provider = &mut self.host.provider;
        (provider.auto_complete, provider.auto_drain) = (true, true);
        let waiting = provider.draining.clone();
        waiting.into_iter().for_each(|qp| provider.finish_drain(qp));
        self.host.with(|machine, cx| machine.node.stop(cx));
        self.settle();
        self.host.check_stopped();
        let machine = &self.host.machine;
        machine.check_stopped();
        (machine.up, machine.done, machine.served)
    }
}
