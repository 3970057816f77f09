//! Frames within UDP datagrams: VXLAN (RFC 7348) and GENEVE (RFC 8926).

use crate::frame::Datagram;

const VXLAN_PORT: u16 = 4789;
/// Linux's own default, from before the number was assigned.
const VXLAN_PORT_LINUX: u16 = 8472;
const GENEVE_PORT: u16 = 6081;
/// The flag without which a VXLAN header has no network identifier.
const VXLAN_I: u8 = 0x08;
/// GENEVE's protocol type of Ethernet frames.
const ETHERNET: [u8; 2] = [0x65, 0x58];

/// The Ethernet frame in a datagram, and what carries it.
pub(crate) fn inner<'a>(datagram: &Datagram<'a>) -> Option<(&'static str, &'a [u8])> {
    let payload = datagram.payload;
    let header = payload.first_chunk::<8>()?;
    match datagram.dst.port() {
        VXLAN_PORT | VXLAN_PORT_LINUX if header[0] & VXLAN_I != 0 => Some(("VXLAN", &payload[8..])),
        GENEVE_PORT if header[0] >> 6 == 0 && header[2..4] == ETHERNET => {
            let options = usize::from(header[0] & 0x3f) * 4;
            Some(("GENEVE", payload.get(8 + options..)?))
        }
        _ => None,
    }
}
