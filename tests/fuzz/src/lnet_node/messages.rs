//! Messages of peers, and transfers.

use lnet::{
    proto::{
        Body, Completion, Fragment, Fragments, Handle, LnetHdr, Message, MsgType, Operation, PING_MATCH_BITS,
        PING_PORTAL, RdmaDesc,
    },
    selftest::proto as selftest,
};
use roce_verbs::RKey;

use super::{
    link::Granted,
    machine::DATA,
    names::{PORTAL, STAMP, length, node, nodes},
    run::Run,
};
use crate::input::Input;

impl Run {
    /// Any body behind a right head, or any bytes.
    pub(super) fn raw(&mut self, link: usize, input: &mut Input<'_>) {
        let kind = input.byte();
        let bytes = input.short();
        if kind == 0 {
            return self.deliver(link, bytes);
        }
        let Some(of) = self.links.get(link) else { return };
        let message = Message {
            src_stamp: of.stamp,
            dst_stamp: STAMP,
            trailing: bytes,
            ..Message::new(of.peer, node().0, Body::Noop)
        };
        let mut message = message.to_bytes();
        message[6] = 0xd0 | kind & 7;
        self.deliver(link, &message);
    }

    pub(super) fn noop(&mut self, link: usize, input: &mut Input<'_>) {
        self.send(link, &Body::Noop, input);
    }

    /// A peer's PUT, ACK or REPLY, in a message or announced.
    pub(super) fn peer_put(&mut self, link: usize, input: &mut Input<'_>) {
        let Some(of) = self.links.get(link) else { return };
        let (from, shape, len) = (of.peer, input.byte(), length(input));
        let operation = match shape & 7 {
            0 => Operation::Ack {
                dst_md: Handle::NONE,
                match_bits: 0,
                mlength: len,
            },
            1 => Operation::Reply { dst_md: Handle::NONE },
            2 => Operation::Put {
                ack_md: Handle::NONE,
                match_bits: PING_MATCH_BITS,
                hdr_data: 0,
                portal: PING_PORTAL,
                offset: 0,
            },
            ack => Operation::Put {
                ack_md: if ack & 1 == 0 {
                    Handle::NONE
                } else {
                    Handle {
                        interface: 1,
                        object: 2,
                    }
                },
                match_bits: u64::from(shape >> 6),
                hdr_data: 7,
                portal: PORTAL,
                offset: u32::from(input.byte()) * 8,
            },
        };
        let claimed = if shape & 0x38 == 0x38 { length(input) } else { len };
        let hdr = LnetHdr::new(node().0, from, claimed, &operation);
        let data = vec![DATA; len as usize];
        match shape & 8 == 0 && len <= 3976 {
            true => self.send(
                link,
                &Body::Immediate {
                    hdr: &hdr,
                    payload: &data,
                },
                input,
            ),
            false => {
                let cookie = self.number();
                self.send(link, &Body::PutReq { hdr: &hdr, cookie }, input);
            }
        }
    }

    /// Memory that a peer describes.
    pub(super) fn frags(&mut self, len: u32, shape: u8) -> (u32, Vec<Fragment>) {
        let count = 1 + u32::from(shape & 3);
        let key = self.number() as u32;
        let each = len.div_ceil(count);
        let frag = |index: u32| Fragment {
            nob: if shape & 4 != 0 && index == 0 { 1 } else { each },
            addr: 0x7000_0000 + u64::from(key) * 0x10_0000 + u64::from(index * each),
        };
        (key, (0..count).map(frag).collect())
    }

    /// A peer's GET, with memory for the answer or without.
    pub(super) fn peer_get(&mut self, link: usize, input: &mut Input<'_>) {
        let Some(of) = self.links.get(link) else { return };
        let (from, shape, sink_length) = (of.peer, input.byte(), length(input));
        let is_ping = shape & 1 != 0;
        let operation = Operation::Get {
            return_md: Handle {
                interface: 1,
                object: 3,
            },
            match_bits: if is_ping {
                PING_MATCH_BITS
            } else {
                u64::from(shape >> 6)
            },
            portal: if is_ping { PING_PORTAL } else { PORTAL },
            src_offset: u32::from(shape >> 4 & 3) * 100,
            sink_length,
        };
        let hdr = LnetHdr::new(node().0, from, 0, &operation);
        let payload = &[];
        if shape & 2 == 0 {
            return self.send(link, &Body::Immediate { hdr: &hdr, payload }, input);
        }
        let (key, frags) = self.frags(sink_length, input.byte());
        let frags = Fragments::List(&frags);
        let cookie = self.number();
        let desc = RdmaDesc { key, frags };
        self.send(
            link,
            &Body::GetReq {
                hdr: &hdr,
                cookie,
                desc,
            },
            input,
        );
    }

    /// A peer answers one of the node's messages.
    pub(super) fn go_on(&mut self, link: usize, input: &mut Input<'_>) {
        let Some(of) = self.links.get(link) else { return };
        let shape = input.byte();
        let announced = of.announced.first().copied();
        let granted = of
            .granted
            .get(usize::from(shape >> 4) % of.granted.len().max(1))
            .copied();
        match (shape % 4, announced, granted) {
            (0 | 3, Some((cookie, _)), _) if shape & 8 != 0 => {
                let status = -i32::from(input.byte() & 3);
                self.send(link, &Body::PutNak(Completion { cookie, status }), input);
            }
            (0 | 3, Some((src_cookie, len)), _) => {
                let (key, frags) = self.frags(len, input.byte());
                let frags = Fragments::List(&frags);
                let body = Body::PutAck {
                    src_cookie,
                    dst_cookie: self.number(),
                    desc: RdmaDesc { key, frags },
                };
                self.send(link, &body, input);
            }
            (1 | 3, _, Some(granted)) => self.transfer(link, &granted, input),
            _ => self.reply(link, input),
        }
    }

    /// A peer writes, and says so.
    pub(super) fn transfer(&mut self, link: usize, granted: &Granted, input: &mut Input<'_>) {
        let Some(qp) = self.live(link) else { return };
        let (shape, frag, key) = (input.byte(), granted.frag, RKey(granted.key));
        let len = match shape & 3 {
            3 => frag.nob / 2,
            _ => frag.nob,
        };
        let provider = &mut self.host.provider;
        assert!(
            provider.reach(qp, key, frag.addr, frag.nob + 1).is_err(),
            "more than was described"
        );
        let written = provider.peer_write(qp, key, frag.addr, &nodes(len as usize));
        written.expect("memory that the node has described");
        let status = match shape >> 2 & 7 {
            7 => -5,
            6 => frag.nob as i32 + 1,
            _ => len as i32,
        };
        let cookie = granted.cookie;
        let done = Completion { cookie, status };
        let body = match granted.kind {
            MsgType::PutDone => Body::PutDone(done),
            _ => Body::GetDone(done),
        };
        self.send(link, &body, input);
    }

    /// A peer answers a GET or a PUT of the node: a REPLY or an ACK.
    pub(super) fn reply(&mut self, link: usize, input: &mut Input<'_>) {
        let of = &mut self.links[link];
        let Some((dst_md, len, is_put)) = of.handles.pop() else {
            return;
        };
        let (from, shape) = (of.peer, input.byte());
        let len = match shape & 3 {
            3 => length(input),
            _ => len,
        };
        let operation = match is_put ^ (shape & 0xc == 0xc) {
            true => Operation::Ack {
                dst_md,
                match_bits: 0,
                mlength: len,
            },
            false => Operation::Reply { dst_md },
        };
        let payload = if is_put { 0 } else { len };
        let hdr = LnetHdr::new(node().0, from, payload, &operation);
        if payload > 3976 || shape & 0x30 == 0x30 {
            let cookie = self.number();
            return self.send(link, &Body::PutReq { hdr: &hdr, cookie }, input);
        }
        let payload = &vec![DATA; payload as usize];
        self.send(link, &Body::Immediate { hdr: &hdr, payload }, input);
    }

    /// A message of lnet_selftest.
    pub(super) fn selftest(&mut self, link: usize, input: &mut Input<'_>) {
        let Some(of) = self.links.get(link) else { return };
        let from = of.peer;
        let mut bytes = vec![0; selftest::MESSAGE_LEN];
        let head = [selftest::MAGIC, selftest::VERSION, u32::from(input.byte() & 15)];
        for (at, field) in head.into_iter().enumerate() {
            bytes[4 * at..][..4].copy_from_slice(&field.to_le_bytes());
        }
        bytes[20] = input.byte() & 1;
        let fields = input.short();
        let len = fields.len().min(selftest::MESSAGE_LEN - 24);
        bytes[24..][..len].copy_from_slice(&fields[..len]);
        let service = selftest::Message::parse(&bytes).ok().and_then(|m| m.body.service());
        let service = service.unwrap_or(selftest::Service::Ping);
        let operation = Operation::Put {
            ack_md: Handle::NONE,
            match_bits: service.number().into(),
            hdr_data: 0,
            portal: service.portal(),
            offset: 0,
        };
        let hdr = LnetHdr::new(node().0, from, bytes.len() as u32, &operation);
        self.send(
            link,
            &Body::Immediate {
                hdr: &hdr,
                payload: &bytes,
            },
            input,
        );
    }
}
