//! Packets with MADs: UD SEND ONLY from QP1 to QP1 (IBA 13.5.1).

use roce_bth::{Bth, Deth, Header, Opcode, PKey, Packet, Psn, QKey, Qpn};

use crate::cm::mad::MAD_LEN;

/// Offset of the MAD, behind BTH and DETH, bytes.
pub const MAD_OFFSET: usize = 12 + 8;
/// Packet without its ICRC, bytes.
pub const PACKET_LEN: usize = MAD_OFFSET + MAD_LEN;

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
pub fn check<'a>(packet: &Packet<'a>) -> Result<Option<&'a [u8; MAD_LEN]>, GsiDrop> {
    let bth = &packet.header.bth;
    let deth = packet.header.deth().filter(|_| bth.opcode == Opcode::UdSendOnly);
    let deth = deth.ok_or(GsiDrop::Service)?;
    if !is_default_partition(bth.pkey) {
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
pub fn is_default_partition(pkey: PKey) -> bool {
    pkey.0 & 0x7fff == PKey::DEFAULT.0 & 0x7fff
}

/// Writes a packet of [`PACKET_LEN`] bytes.
pub fn write(psn: Psn, mad: &[u8; MAD_LEN], out: &mut [u8]) {
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, psn));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    let at = header.emit(out);
    out[at..at + MAD_LEN].copy_from_slice(mad);
}
