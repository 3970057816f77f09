//! Extensions that ferroce announces in its GUID and in unused fields of REQ and REP.

use roce_verbs::QKey;

/// First three bytes of our GUIDs: locally administered, so no manufacturer has them.
const PREFIX: u64 = 0x02_66_65 << 40;
const PREFIX_MASK: u64 = 0xff_ff_ff << 40;
/// Flag in the fourth byte: supports selective ACK ([`SelectiveAck`](roce_bth::Opcode::SelectiveAck)).
const SELECTIVE_ACK: u64 = 1 << 32;

/// Returns a GUID that announces selective ACK, with the low 32 bits of `any`.
pub const fn keeping(any: u64) -> u64 {
    PREFIX | SELECTIVE_ACK | any & 0xffff_ffff
}

/// Returns whether an adapter with this GUID supports selective ACK: buffers packets beyond a gap and reports them.
pub const fn keeps_packets(guid: u64) -> bool {
    guid & PREFIX_MASK == PREFIX && guid & SELECTIVE_ACK != 0
}

/// Returns the UDP source port in the Q_Key of a ferroce peer's REQ or REP.
///
/// Connections don't use that field. Other peers leave it 0 or fill it otherwise.
pub(crate) fn source_port(guid: u64, qkey: QKey) -> Option<u16> {
    let port = u16::try_from(qkey.0).ok().filter(|port| *port != 0);
    port.filter(|_| keeps_packets(guid))
}

/// Encodes a source port as the Q_Key of a REQ or REP.
pub(crate) fn source_qkey(port: Option<u16>) -> QKey {
    QKey(port.unwrap_or(0).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ferroce_guids_are_recognized() {
        assert!(keeps_packets(keeping(0)) && keeps_packets(keeping(u64::MAX)));
        assert_ne!(keeping(1), keeping(2));
        let port = |guid, qkey| source_port(guid, QKey(qkey));
        assert_eq!(port(keeping(1), source_qkey(Some(0xc001)).0), Some(0xc001));
        assert_eq!(
            [port(keeping(1), 0), port(keeping(1), 0x1_0001), port(PREFIX, 0xc001)],
            [None; 3]
        );
        // rdma_rxe uses the EUI-64 of its MAC address.
        for other in [0, u64::MAX, 0x5054_00ff_fe12_3456, PREFIX, 0x0266_64ff_ffff_ffff] {
            assert!(!keeps_packets(other), "{other:#x}");
        }
    }
}
