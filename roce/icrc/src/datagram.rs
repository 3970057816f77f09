//! The ICRC of a whole IP datagram, with its headers as they came.

use crate::layout::{BTH_LEN, BTH_MASKED, ICRC_LEN, IPV4_LEN, IPV6_LEN, UDP_LEN, start};

const UDP_PROTOCOL: u8 = 17;
/// More than the longest IPv4 header (60), UDP header and BTH.
const HEAD_MAX: usize = 96;

/// The ICRC that a datagram carries and the one that it should.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Checked {
    /// From the last four bytes of the UDP payload.
    pub carried: u32,
    /// Computed from everything before.
    pub computed: u32,
}

impl Checked {
    /// Whether both are the same.
    pub const fn is_ok(self) -> bool {
        self.carried == self.computed
    }
}

/// Checks a complete IP datagram (from its version nibble to the end of the ICRC, no link-layer padding behind it)
/// with every header field as it came, whatever flags or IPv4 options it has.
///
/// `None` when it is not an unfragmented UDP datagram (extension headers of IPv6 are not followed) long enough for a BTH and an ICRC.
pub fn check_datagram(datagram: &[u8]) -> Option<Checked> {
    let first = *datagram.first()?;
    let mut head = [0; HEAD_MAX];
    let ip_len = match first >> 4 {
        4 => usize::from(first & 0x0f) * 4,
        6 => IPV6_LEN,
        _ => return None,
    };
    let head_len = ip_len + UDP_LEN + BTH_LEN;
    let (body, carried) = datagram.split_last_chunk::<ICRC_LEN>()?;
    let (front, rest) = body.split_at_checked(head_len)?;
    let head = &mut head[..head_len];
    head.copy_from_slice(front);
    if first >> 4 == 4 {
        // The two low bits of the flags: more fragments, and a fragment offset.
        let fragment = head[6] & 0x3f != 0 || head[7] != 0;
        if ip_len < IPV4_LEN || head[9] != UDP_PROTOCOL || fragment {
            return None;
        }
        head[1] = 0xff;
        head[8] = 0xff;
        head[10..12].fill(0xff);
    } else {
        if head[6] != UDP_PROTOCOL {
            return None;
        }
        head[0] |= 0x0f;
        head[1..4].fill(0xff);
        head[7] = 0xff;
    }
    head[ip_len + 6..ip_len + 8].fill(0xff);
    head[ip_len + UDP_LEN + BTH_MASKED] = 0xff;
    let mut crc = start();
    crc.update(head);
    crc.update(rest);
    Some(Checked {
        carried: u32::from_le_bytes(*carried),
        computed: crc.finalize(),
    })
}
