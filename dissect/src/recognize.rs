//! Services of connections whose request was not seen, by their messages.

use lnet::proto::{Body, Message};
use rds::proto::{Flags, Header, MAX_MESSAGE};
use rnbd::proto::{ClientMsg, MsgClose, MsgIo, MsgOpen, MsgSessInfo};
use roce_bth::{Class, Packet, Service as Transport};
use roce_pcap::judge::Observed;
use rtrs::proto::{Imm, RdmaRead, RdmaWrite, Request};

use crate::service::Service;

/// Returns the service of a packet, if its bytes leave no doubt.
pub(crate) fn service(packet: &Packet<'_>) -> Option<Service> {
    let info = packet.header.bth.opcode.info();
    if info.service != Transport::Rc {
        return None;
    }
    match info.class {
        Class::Send if info.position.starts() && packet.header.imm().is_none() => {
            let whole = info.position.ends();
            (is_lnet(packet.payload, whole).then_some(Service::Lnet))
                .or_else(|| is_rds(packet.payload, whole).then_some(Service::Rds))
        }
        Class::Write => {
            let is_request = matches!(Imm::decode(packet.header.imm()?), Ok(Imm::IoReq(_)));
            (is_request && rtrs_request(packet.payload).is_some()).then_some(Service::Rtrs)
        }
        _ => None,
    }
}

/// Returns the service of a packet that begins a SEND, if it is RDS or LNet.
pub(crate) fn upper(o: &Observed<'_>) -> Option<Service> {
    let header = o.header;
    let payload = o.payload?;
    service(&Packet { header, payload }).filter(|service| matches!(service, Service::Rds | Service::Lnet))
}

/// Returns whether a SEND, or its first packet, is a message of LNet.
fn is_lnet(bytes: &[u8], whole: bool) -> bool {
    match Message::parse(bytes) {
        Ok(message) => !matches!(message.body, Body::ConnReq(_) | Body::ConnAck(_)),
        Err(lnet::proto::ProtoError::Short { .. }) => !whole && lnet::proto::peek(bytes).is_ok(),
        Err(_) => false,
    }
}

/// Returns whether a SEND, or its first packet, is a fragment of RDS: a header with a checksum that is right, known flags, and a length
/// that fits.
pub(crate) fn is_rds(bytes: &[u8], whole: bool) -> bool {
    let Ok((header, data)) = Header::parse(bytes) else {
        return false;
    };
    let flags = Flags::all().contains(header.flags());
    let len = header.len.get();
    let fits = match whole {
        // The last fragment may be shorter than the first.
        true => data.len() == header.fragment_len(0) || data.len() == header.fragment_len(header.fragments() - 1),
        false => data.len() <= header.fragment_len(0),
    };
    header.checksum() != 0 && flags && len <= MAX_MESSAGE && fits
}

/// Finds a request of RTRS at the end of a WRITE: one whose user header is a message of RNBD. Returns the offset of RTRS's message.
pub(crate) fn rtrs_request(bytes: &[u8]) -> Option<usize> {
    let lens = [RdmaWrite::LEN, RdmaRead::LEN_ONE, RdmaRead::LEN];
    lens.iter().find_map(|len| {
        let at = bytes.len().checked_sub(*len)?;
        let (before, message) = bytes.split_at(at);
        // An offset that any user header fits before.
        let request = Request::parse(message, u32::MAX, u32::MAX).ok()?;
        let own_len = match (request.direction, request.dest) {
            (rtrs::Direction::Write, _) => RdmaWrite::LEN,
            (rtrs::Direction::Read, Some(_)) => RdmaRead::LEN_ONE,
            (rtrs::Direction::Read, None) => RdmaRead::LEN,
        };
        let user_at = at.checked_sub(request.usr_len.into())?;
        let user = &before[user_at..];
        let expected = match ClientMsg::parse(user).ok()? {
            ClientMsg::SessInfo(_) => size_of::<MsgSessInfo>(),
            ClientMsg::Open(_) => size_of::<MsgOpen>(),
            ClientMsg::Io(_) => size_of::<MsgIo>(),
            ClientMsg::Close(_) => size_of::<MsgClose>(),
        };
        (own_len == *len && user.len() == expected).then_some(at)
    })
}
