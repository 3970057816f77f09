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
    message.check_checksum()?;
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
    message.check_checksum()?;
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

/// Reason of a reject; `None`: it is the connection manager's, or not understood.
pub(crate) fn why(reason: RejectReason, private_data: &[u8]) -> Option<Why> {
    let is_node = reason == RejectReason::CONSUMER;
    is_node
        .then(|| Reject::parse(private_data).ok())?
        .map(|reject| reject.why)
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

    #[test]
    fn a_refusal_tells_a_wrong_nid_from_wrong_parameters() {
        let text = |incarnation| {
            Rejected::Node {
                why: Why::FATAL,
                incarnation,
                params: Config::default().offer(),
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
