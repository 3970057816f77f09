//! Connections begin and end, as peers have it.

use lnet::proto::{Body, ConnParams, Message, PORT, Reject, Why};
use roce_verbs::{
    WcStatus,
    provider::{CmKind, NoAnswer, RejectReason},
};

use super::{
    link::Link,
    names::{CREDITS, MAX_LINKS, NODE, PEERS, STAMP, node, peer},
    run::Run,
};
use crate::input::Input;

impl Run {
    /// A peer asks for a connection.
    pub(super) fn connect(&mut self, input: &mut Input<'_>) {
        if self.links.len() >= MAX_LINKS {
            return;
        }
        let [from, shape] = [input.below(PEERS), input.below(256)];
        let asked = ConnParams {
            queue_depth: [CREDITS, 1, 2, 5][shape & 3],
            max_frags: [257, 1, 258, 0][shape >> 2 & 3],
            max_msg_size: 4096,
        };
        let stamp = 1 + (shape as u64 >> 4 & 1);
        let message = Message {
            src_stamp: stamp,
            ..Message::new(peer(from), node().0, Body::ConnReq(asked))
        };
        let mut data = message.to_bytes();
        match shape >> 6 {
            3 => data = input.short().to_vec(),
            2 => data[input.below(56)] ^= input.byte(),
            _ => {}
        }
        let (local, remote) = ((NODE, PORT).into(), (peer(from).address(), 1023).into());
        let cm = self
            .host
            .provider
            .ask(self.host.listener, 0, local, remote, data.clone());
        let mut link = Link::new(cm, peer(from), stamp, false);
        if let Ok(Message {
            src_stamp,
            body: Body::ConnReq(asked),
            ..
        }) = Message::parse(&data)
        {
            (link.stamp, link.asked) = (src_stamp, asked.queue_depth);
        }
        self.links.push(link);
        if shape & 32 != 0 {
            self.settle();
            let private_data = Vec::new();
            self.tell(self.links.len() - 1, CmKind::Established { private_data });
        }
    }

    /// A peer answers the node's request, or says its last word.
    pub(super) fn answer(&mut self, link: usize, input: &mut Input<'_>) {
        let Some(of) = self.links.get_mut(link).filter(|link| link.qp.is_some()) else {
            return;
        };
        if !of.is_nodes || of.ledger.is_some() {
            let private_data = Vec::new();
            return self.tell(link, CmKind::Established { private_data });
        }
        let shape = input.byte();
        let taken = ConnParams {
            queue_depth: [of.asked, 1, of.asked + 1, 0][usize::from(shape & 3)],
            max_frags: [1, 257, 256, 258][usize::from(shape >> 2 & 3)],
            max_msg_size: 4096,
        };
        of.stamp = of.stamp.max(1);
        let message = Message {
            src_stamp: of.stamp,
            dst_stamp: STAMP,
            ..Message::new(of.peer, node().0, Body::ConnAck(taken))
        };
        let mut private_data = message.to_bytes();
        if shape & 0xc0 == 0xc0 {
            private_data[input.below(56)] ^= input.byte();
        }
        let Ok(read) = Message::parse(&private_data) else {
            return self.tell(link, CmKind::Established { private_data });
        };
        if let Body::ConnAck(taken) = read.body {
            of.stamp = read.src_stamp;
            of.stands(taken.queue_depth);
        }
        let cm = of.cm;
        self.tell(link, CmKind::Established { private_data });
        // A message may come before the node has seen the answer.
        if shape & 32 == 0 {
            self.settle();
        } else {
            self.noop(link, input);
        }
        if self.host.provider.live(cm).is_none() {
            self.links[link].ledger = None;
        }
    }

    pub(super) fn end(&mut self, link: usize, input: &mut Input<'_>) {
        let kind = match input.byte() % 7 {
            0 | 1 => CmKind::Disconnected,
            2 => self.reject(input),
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

    pub(super) fn reject(&self, input: &mut Input<'_>) -> CmKind {
        let [why, depth, frags, shape] = [(); 4].map(|()| input.byte());
        let params = ConnParams {
            queue_depth: u16::from(depth & 7),
            max_frags: u16::from(frags) * 2,
            max_msg_size: 4096,
        };
        let mut private_data = Reject::new(Why(why % 12), 1 + u64::from(shape & 1), params).to_bytes();
        match shape >> 6 {
            3 => private_data = input.short().to_vec(),
            2 => private_data[input.below(Reject::LEN)] ^= input.byte(),
            _ => {}
        }
        let reason = match shape & 32 {
            0 => RejectReason::CONSUMER,
            _ => RejectReason(u16::from(input.byte())),
        };
        CmKind::Rejected { reason, private_data }
    }
}
