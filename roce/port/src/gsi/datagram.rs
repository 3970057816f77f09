//! Checks of datagrams to QP1, the same for ports, for loops that pass them on, and for the broker.

use roce_bth::{Opcode, PKey, Packet, QKey, Qpn};
use roce_cm::mad::MAD_LEN;

/// Reason for which a datagram to QP1 is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GsiDrop {
    /// It is no UD SEND ONLY.
    Service,
    /// Its partition is not the default one.
    PKey,
    /// Its Q_Key is not that of QP1.
    QKey,
}

/// Checks the headers of a packet to QP1, but not its ICRC. Returns its MAD; `None`: it comes from another queue pair, or has another size.
///
/// # Errors
/// Reason for which the datagram is dropped.
pub fn check_gsi<'a>(packet: &Packet<'a>) -> Result<Option<&'a [u8; MAD_LEN]>, GsiDrop> {
    let bth = &packet.header.bth;
    let deth = packet.header.deth().filter(|_| bth.opcode == Opcode::UdSendOnly);
    let deth = deth.ok_or(GsiDrop::Service)?;
    if !pkey_matches(bth.pkey) {
        return Err(GsiDrop::PKey);
    }
    if deth.qkey != QKey::GSI {
        return Err(GsiDrop::QKey);
    }
    let mad: Option<&[u8; MAD_LEN]> = packet.payload.try_into().ok();
    Ok(mad.filter(|_| deth.src_qp == Qpn::GSI))
}

/// Returns whether a partition key is the default partition's.
///
/// The sender may be a full or a limited member, because we are a full member (IBA 10.9.3).
pub(crate) fn pkey_matches(pkey: PKey) -> bool {
    pkey.0 & 0x7fff == PKey::DEFAULT.0 & 0x7fff
}
