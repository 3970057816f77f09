//! Abilities that adapters of ours announce in their GUID and in fields of REQ and REP that others don't use.

use roce_verbs::QKey;

/// First three bytes of our GUIDs: a locally administered prefix, which no manufacturer has.
const OURS: u64 = 0x02_66_65 << 40;
const MASK: u64 = 0xff_ff_ff << 40;
/// Ability, in the fourth byte: buffers packets beyond a gap and reports them
/// ([`SelectiveAck`](roce_bth::Opcode::SelectiveAck)).
const KEEPS_PACKETS: u64 = 1 << 32;

/// Returns a GUID of an adapter of ours that buffers packets beyond a gap, with 32 bits of `any`.
pub const fn keeping(any: u64) -> u64 {
    OURS | KEEPS_PACKETS | any & 0xffff_ffff
}

/// Whether an adapter with this GUID buffers packets beyond a gap and reports them.
pub const fn keeps_packets(guid: u64) -> bool {
    guid & MASK == OURS && guid & KEEPS_PACKETS != 0
}

/// Returns the UDP source port that an adapter of ours names for a queue pair's packets, in the Q_Key of its REQ or REP: a
/// field that connections don't use. Others leave it 0, or mean something else by it.
pub(crate) fn source_port(guid: u64, qkey: QKey) -> Option<u16> {
    let port = u16::try_from(qkey.0).ok().filter(|port| *port != 0);
    port.filter(|_| keeps_packets(guid))
}

/// The Q_Key that names a source port.
pub(crate) fn source_qkey(port: Option<u16>) -> QKey {
    QKey(port.unwrap_or(0).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_told_from_others() {
        assert!(keeps_packets(keeping(0)) && keeps_packets(keeping(u64::MAX)));
        assert_ne!(keeping(1), keeping(2));
        let port = |guid, qkey| source_port(guid, QKey(qkey));
        assert_eq!(port(keeping(1), source_qkey(Some(0xc001)).0), Some(0xc001));
        assert_eq!(
            [port(keeping(1), 0), port(keeping(1), 0x1_0001), port(OURS, 0xc001)],
            [None; 3]
        );
        // rdma_rxe's begin with its MAC address, made an EUI-64.
        for other in [0, u64::MAX, 0x5054_00ff_fe12_3456, OURS, 0x0266_64ff_ffff_ffff] {
            assert!(!keeps_packets(other), "{other:#x}");
        }
    }
}
