//! Messages of the connection manager: GIDs, GUIDs and private data.

use roce_port::cm::{
    cma::{CmaHeader, HEADER_LEN},
    mad::{self, Attribute, Message},
};

use super::address::Addresses;

/// Bytes of the address in an RDMA_CM header, of which IPv4 has the last four.
const SLOT: usize = 16;
/// Offsets of sender and receiver in an RDMA_CM header.
const SLOTS: [usize; 2] = [4, 20];

/// Replaces the contents of a management datagram.
pub(super) fn replace(mad: &mut [u8], addresses: &mut Addresses, keep_private: bool) {
    let id = mad
        .get(16..18)
        .and_then(<[u8]>::first_chunk)
        .map(|id| u16::from_be_bytes(*id));
    let attribute = Attribute::ALL
        .into_iter()
        .find(|attribute| Some(*attribute as u16) == id);
    let Some(attribute) = attribute.filter(|_| mad.get(1) == Some(&mad::CLASS)) else {
        // Of other classes, and other messages, nothing is known to be safe.
        let known = mad.len().min(mad::HEADER_LEN);
        return mad[known..].fill(0);
    };
    for field in Message::fields(attribute) {
        let Some(bytes) = mad.get_mut(field.byte..field.byte + field.width / 8) else {
            continue;
        };
        match field.name {
            "local_ca_guid" => addresses.replace_guid(bytes),
            "private_data" => {
                let named = matches!(attribute, Attribute::Req | Attribute::SidrReq);
                private_data(bytes, named, addresses, keep_private);
            }
            // Additional information of a REJ or SIDR_REP may be a GID.
            "info" => bytes.fill(0),
            name if name.ends_with("_gid") => addresses.replace(bytes),
            _ => {}
        }
    }
}

/// Replaces private data, which may begin with an RDMA_CM header.
fn private_data(bytes: &mut [u8], named: bool, addresses: &mut Addresses, keep: bool) {
    let header = CmaHeader::parse(bytes).filter(|_| named);
    let rest = match &header {
        Some(header) => {
            let len = if header.src.is_ipv4() { 4 } else { SLOT };
            for at in SLOTS {
                bytes[at..at + SLOT - len].fill(0);
                addresses.replace(&mut bytes[at + SLOT - len..at + SLOT]);
            }
            HEADER_LEN
        }
        None => 0,
    };
    if !keep {
        bytes[rest..].fill(0);
    }
}
