//! Private data of requests, answers and rejects, and the decisions that follow from it. Nothing here has state.

use core::net::Ipv4Addr;

use roce_verbs::provider::RejectReason;
use thiserror::Error;

use crate::{
    config::Config,
    proto::{Body, ConnParams, MAX_MSG, Message, MsgType, Nid, ProtoError, Reject, VERSION_1, Why},
};

/// Our NID and incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    pub(crate) nid: Nid,
    pub(crate) stamp: u64,
}

/// Connect request that can be accepted, or answer that has accepted ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Agreed {
    pub(crate) peer: Nid,
    /// The peer's incarnation.
    pub(crate) stamp: u64,
    /// Messages each way.
    pub(crate) depth: u16,
    /// Fragments of a descriptor.
    pub(crate) frags: u16,
}

/// Why a connect request is refused.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Refusal {
    /// It can't be understood.
    #[error(transparent)]
    Malformed(#[from] ProtoError),
    /// It is for another node, or says that it is from one at another address.
    #[error("from {from} to {to}, which are not the packet's addresses")]
    Address {
        /// Sender that it names.
        from: Nid,
        /// Receiver that it names.
        to: Nid,
    },
    /// It is for an earlier node at this address.
    #[error("for another incarnation")]
    Stale,
    /// Not a connect request.
    #[error("{} in the place of CONNREQ", .0.name())]
    Type(MsgType),
    /// It asks for more messages than this side takes.
    #[error("asks for {0} messages at a time")]
    Depth(u16),
    /// It asks for more fragments than this side takes.
    #[error("asks for {0} fragments")]
    Fragments(u16),
    /// It asks for longer messages than there are.
    #[error("asks for messages of {0} bytes")]
    Size(u32),
    /// Both connect at once, and the peer is the lower one.
    #[error("both connect at once")]
    Race,
    /// This side has as many peers or connections as it may have, or the device has.
    #[error("no resources")]
    Resources,
}

impl Refusal {
    /// Its number on the wire.
    pub(crate) const fn why(&self) -> Why {
        match self {
            Self::Malformed(_) | Self::Address { .. } | Self::Type(_) | Self::Size(_) => Why::FATAL,
            Self::Stale => Why::CONN_STALE,
            Self::Depth(_) => Why::MSG_QUEUE_SIZE,
            Self::Fragments(_) => Why::RDMA_FRAGS,
            Self::Race => Why::CONN_RACE,
            Self::Resources => Why::NO_RESOURCES,
        }
    }

    /// The reject. Who does not name us is told nothing of us but the length of messages, as by the kernel.
    pub(crate) fn reject(&self, us: &Identity, config: &Config) -> Reject {
        let (stamp, params) = match self {
            Self::Malformed(_) | Self::Address { .. } => {
                let params = ConnParams {
                    max_msg_size: MAX_MSG as u32,
                    ..ConnParams::default()
                };
                (0, params)
            }
            _ => (us.stamp, config.offer()),
        };
        Reject::new(self.why(), stamp, params)
    }
}

/// Judges a connect request that came from `from`, in the kernel's order (`kiblnd_passive_connect`).
///
/// # Errors
/// The first thing that is wrong with it.
pub(crate) fn request(us: &Identity, config: &Config, from: Ipv4Addr, private_data: &[u8]) -> Result<Agreed, Refusal> {
    let message = Message::parse(private_data)?;
    let address = Refusal::Address {
        from: message.src,
        to: message.dst,
    };
    // The kernel takes any source; with one that is not the packet's anybody could end the connections of all peers.
    let is_its = message.src.address() == from && message.src.0 >> 32 == us.nid.0 >> 32;
    if message.dst != us.nid || !is_its {
        return Err(address);
    }
    if message.dst_stamp != 0 && message.dst_stamp != us.stamp {
        return Err(Refusal::Stale);
    }
    let Body::ConnReq(asked) = message.body else {
        return Err(Refusal::Type(message.body.kind()));
    };
    match asked {
        ConnParams { queue_depth, .. } if queue_depth > config.peer_credits => Err(Refusal::Depth(queue_depth)),
        ConnParams { max_frags, .. } if max_frags > config.max_frags => Err(Refusal::Fragments(max_frags)),
        ConnParams { max_msg_size, .. } if max_msg_size > MAX_MSG as u32 => Err(Refusal::Size(max_msg_size)),
        // The kernel accepts it, and then can't send.
        ConnParams { queue_depth: 0, .. } => Err(Refusal::Depth(0)),
        ConnParams {
            queue_depth: depth,
            max_frags: frags,
            ..
        } => Ok(Agreed {
            peer: message.src,
            stamp: message.src_stamp,
            depth,
            frags,
        }),
    }
}

/// Why an answer to our request can't be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BadAnswer {
    /// It can't be understood.
    #[error(transparent)]
    Malformed(#[from] ProtoError),
    /// Another node has answered, or for another one, or another incarnation of ours was asked.
    #[error("from another node, or for another one")]
    Identity,
    /// Not an answer.
    #[error("{} in the place of CONNACK", .0.name())]
    Type(MsgType),
    /// It takes more than was offered, or nothing.
    #[error("takes {depth} messages and {frags} fragments")]
    Params {
        /// Messages at a time.
        depth: u16,
        /// Fragments of a descriptor.
        frags: u16,
    },
}

/// Judges the answer of a peer that has accepted `offer`.
///
/// # Errors
/// The first thing that is wrong with it: the connection is closed then.
pub(crate) fn answer(us: &Identity, peer: Nid, offer: (u16, u16), private_data: &[u8]) -> Result<Agreed, BadAnswer> {
    let message = Message::parse(private_data)?;
    let Body::ConnAck(taken) = message.body else {
        return Err(BadAnswer::Type(message.body.kind()));
    };
    if (message.src, message.dst, message.dst_stamp) != (peer, us.nid, us.stamp) {
        return Err(BadAnswer::Identity);
    }
    let (depth, frags) = (taken.queue_depth, taken.max_frags);
    let is_too_much = depth > offer.0 || frags > offer.1 || taken.max_msg_size > MAX_MSG as u32;
    if is_too_much || depth == 0 {
        return Err(BadAnswer::Params { depth, frags });
    }
    Ok(Agreed {
        peer,
        stamp: message.src_stamp,
        depth,
        frags,
    })
}

/// Decision after a peer has refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Ask again, as it is.
    Again,
    /// Ask again for this incarnation.
    Stamp(u64),
    /// Ask again for so many messages.
    Depth(u16),
    /// Ask again for so many fragments.
    Fragments(u16),
    /// It would refuse again.
    GiveUp(Rejected),
}

/// A peer's refusal that is final.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Rejected {
    /// The connection manager's: nobody listens, for example.
    #[error("{0}")]
    Cm(RejectReason),
    /// A node's.
    #[error("the node refuses: {why}{}", told(.incarnation, .params))]
    Node {
        /// Why.
        why: Why,
        /// Its incarnation; 0: it does not know the NID that was asked for.
        incarnation: u64,
        /// Parameters that it would accept.
        params: ConnParams,
    },
    /// A node of version 1.
    #[error("the node speaks version 1 of o2iblnd (Lustre 1.8 and before), this side version 2")]
    Version1,
}

fn told(incarnation: &u64, params: &ConnParams) -> String {
    match incarnation {
        0 => " (it has not got as far as its own settings: wrong NID or network, or no interface is up)".into(),
        _ => format!(
            " (it takes {} messages at a time and {} fragments)",
            params.queue_depth, params.max_frags
        ),
    }
}

/// Understands a reject (`kiblnd_rejected`). `offer`: messages and fragments that were asked for.
pub(crate) fn rejected(reason: RejectReason, private_data: &[u8], offer: (u16, u16)) -> Next {
    match reason {
        RejectReason::STALE_CONNECTION => return Next::Again,
        RejectReason::CONSUMER => {}
        other => return Next::GiveUp(Rejected::Cm(other)),
    }
    let Ok(reject) = Reject::parse(private_data) else {
        return Next::GiveUp(Rejected::Cm(reason));
    };
    let params = reject.params;
    let smaller = |asked: u16, taken: u16| (1..asked).contains(&taken).then_some(taken);
    let next = match reject.why {
        Why::CONN_RACE | Why::CONN_UNCOMPAT => Some(Next::Again),
        Why::CONN_STALE => Some(Next::Stamp(reject.incarnation)),
        Why::MSG_QUEUE_SIZE => smaller(offer.0, params.queue_depth).map(Next::Depth),
        Why::RDMA_FRAGS => smaller(offer.1, params.max_frags).map(Next::Fragments),
        _ => None,
    };
    let node = Rejected::Node {
        why: reject.why,
        incarnation: reject.incarnation,
        params,
    };
    match (next, reject.version) {
        (Some(next), _) => next,
        (None, VERSION_1) => Next::GiveUp(Rejected::Version1),
        (None, _) => Next::GiveUp(node),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{ByteOrder, NET_O2IB, VERSION_2};

    const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
    const STAMP: u64 = 0x6_6167;

    fn us() -> Identity {
        Identity {
            nid: Nid::o2ib(Ipv4Addr::new(10, 77, 0, 1)),
            stamp: 0x6_4000,
        }
    }

    const fn params(queue_depth: u16, max_frags: u16, max_msg_size: u32) -> ConnParams {
        ConnParams {
            queue_depth,
            max_frags,
            max_msg_size,
        }
    }

    fn asked(params: ConnParams) -> Message<'static> {
        Message {
            src_stamp: STAMP,
            ..Message::new(Nid::o2ib(PEER), us().nid, Body::ConnReq(params))
        }
    }

    fn judged(message: &Message<'_>) -> Result<(u16, u16), (u8, u64, u16)> {
        judged_bytes(&message.to_bytes())
    }

    /// The parameters that are accepted, or the reject's number, incarnation and depth.
    fn judged_bytes(bytes: &[u8]) -> Result<(u16, u16), (u8, u64, u16)> {
        let config = Config::default();
        match request(&us(), &config, PEER, bytes) {
            Ok(agreed) => {
                assert_eq!((agreed.peer, agreed.stamp), (Nid::o2ib(PEER), STAMP));
                Ok((agreed.depth, agreed.frags))
            }
            Err(why) => {
                let reject = why.reject(&us(), &config);
                assert_eq!((reject.version, reject.params.max_msg_size), (VERSION_2, 4096));
                Err((reject.why.0, reject.incarnation, reject.params.queue_depth))
            }
        }
    }

    /// The kernel's answers to the same requests (LNet's `odd-requests` capture), but for a depth of 0, other sources, and version 1, which
    /// it takes.
    #[test]
    fn requests_are_answered_as_by_the_kernel() {
        let whole = |depth, frags, size| judged(&asked(params(depth, frags, size)));
        let known = us().stamp;
        for depth in [1, 2, 4, 7, 8] {
            assert_eq!(whole(depth, 257, 4096), Ok((depth, 257)));
        }
        for frags in [0, 1, 128, 256] {
            assert_eq!(whole(8, frags, 2048), Ok((8, frags)));
        }
        for depth in [0, 9, 16, 255] {
            assert_eq!(whole(depth, 257, 4096), Err((7, known, 8)), "{depth}");
        }
        assert_eq!(whole(8, 258, 4096), Err((6, known, 8)));
        assert_eq!(whole(8, 257, 8192), Err((3, known, 8)));
        let good = asked(params(8, 257, 4096));
        let big = Message {
            order: ByteOrder::Big,
            ..good
        };
        assert_eq!(judged(&big), Ok((8, 257)));
        for (dst_stamp, expected) in [(known, Ok((8, 257))), (known + 1, Err((5, known, 8)))] {
            assert_eq!(judged(&Message { dst_stamp, ..good }), expected);
        }
        // From here on it does not know us.
        let other_net = Nid::new(NET_O2IB, 3, us().nid.address());
        for dst in [Nid::o2ib(Ipv4Addr::new(10, 77, 0, 9)), other_net] {
            assert_eq!(judged(&Message { dst, ..good }), Err((3, 0, 0)));
        }
        let src = Nid::o2ib(Ipv4Addr::new(10, 77, 0, 9));
        assert_eq!(judged(&Message { src, ..good }), Err((3, 0, 0)), "not the packet's");
        let body = Body::ConnAck(params(8, 257, 4096));
        assert_eq!(judged(&Message { body, ..good }), Err((3, known, 8)));
        let mut bytes = good.to_bytes();
        bytes[4] = 0x11;
        assert_eq!(judged_bytes(&bytes), Err((3, 0, 0)), "version 1");
        for len in [0, 5, 6, 55] {
            assert_eq!(judged_bytes(&good.to_bytes()[..len]), Err((3, 0, 0)), "{len}");
        }
    }

    #[test]
    fn answers_that_take_more_or_are_anothers_are_refused() {
        let peer = Nid::o2ib(PEER);
        let take = |depth, frags, size| Message {
            src_stamp: STAMP,
            dst_stamp: us().stamp,
            ..Message::new(peer, us().nid, Body::ConnAck(params(depth, frags, size)))
        };
        let judged = |message: &Message<'_>| answer(&us(), peer, (8, 256), &message.to_bytes());
        let agreed = judged(&take(4, 128, 2048)).unwrap();
        assert_eq!((agreed.depth, agreed.frags, agreed.stamp), (4, 128, STAMP));
        for (depth, frags) in [(9, 256), (8, 257), (0, 256)] {
            assert_eq!(
                judged(&take(depth, frags, 4096)),
                Err(BadAnswer::Params { depth, frags })
            );
        }
        let good = take(8, 256, 4096);
        for message in [Message { dst_stamp: 1, ..good }, Message { src: us().nid, ..good }] {
            assert_eq!(judged(&message), Err(BadAnswer::Identity));
        }
        let body = Body::ConnReq(params(8, 256, 4096));
        assert!(matches!(judged(&Message { body, ..good }), Err(BadAnswer::Type(_))));
        assert!(matches!(
            answer(&us(), peer, (8, 256), &[]),
            Err(BadAnswer::Malformed(_))
        ));
    }

    /// As the kernel goes on after each (LNet's `odd-rejects` capture).
    #[test]
    fn rejects_are_followed_as_by_the_kernel() {
        let node = |why, params| {
            let reject = Reject::new(Why(why), STAMP, params);
            rejected(RejectReason::CONSUMER, &reject.to_bytes(), (8, 257))
        };
        let usual = params(8, 257, 4096);
        assert_eq!([node(1, usual), node(4, usual)], [Next::Again, Next::Again]);
        assert_eq!(node(5, usual), Next::Stamp(STAMP));
        assert_eq!(node(7, params(4, 257, 4096)), Next::Depth(4));
        assert_eq!(node(6, params(8, 128, 4096)), Next::Fragments(128));
        let given_up = [
            node(7, params(20, 257, 4096)),
            node(6, params(8, 300, 4096)),
            node(2, usual),
            node(3, usual),
            node(9, usual),
            node(50, usual),
        ];
        assert!(
            given_up
                .iter()
                .all(|next| matches!(next, Next::GiveUp(Rejected::Node { .. })))
        );
        let old = Reject {
            version: VERSION_1,
            ..Reject::new(Why::FATAL, 0, usual)
        };
        let next = rejected(RejectReason::CONSUMER, &old.to_bytes(), (8, 257));
        assert_eq!(next, Next::GiveUp(Rejected::Version1));
        // A reject that is cut off counts by its number.
        let cut = Reject::new(Why::CONN_RACE, STAMP, usual).to_bytes();
        assert_eq!(rejected(RejectReason::CONSUMER, &cut[..8], (8, 257)), Next::Again);
        let none = rejected(RejectReason::CONSUMER, &[], (8, 257));
        assert_eq!(none, Next::GiveUp(Rejected::Cm(RejectReason::CONSUMER)));
        let stale = rejected(RejectReason::STALE_CONNECTION, &[], (8, 257));
        assert_eq!(stale, Next::Again);
        let nobody = rejected(RejectReason::INVALID_SERVICE_ID, &[], (8, 257));
        assert_eq!(nobody, Next::GiveUp(Rejected::Cm(RejectReason::INVALID_SERVICE_ID)));
    }

    #[test]
    fn a_refusal_tells_a_wrong_nid_from_wrong_parameters() {
        let text = |incarnation| {
            Rejected::Node {
                why: Why::FATAL,
                incarnation,
                params: params(8, 257, 4096),
            }
            .to_string()
        };
        assert!(text(0).contains("wrong NID or network"), "{}", text(0));
        assert!(
            text(7).contains("8 messages at a time and 257 fragments"),
            "{}",
            text(7)
        );
    }
}
