//! What the GUID of a channel adapter says of it: peers of ours know each other by it, and nobody else looks at it.

/// The GUID's first three bytes: of those that no manufacturer has (locally administered), ours.
const OURS: u64 = 0x02_66_65 << 40;
const MASK: u64 = 0xff_ff_ff << 40;
/// What such an adapter can do, in the fourth byte: it keeps packets beyond a gap, and says which
/// ([`SelectiveAck`](roce_bth::Opcode::SelectiveAck)).
const KEEPS_PACKETS: u64 = 1 << 32;

/// A GUID of an adapter of ours that keeps packets beyond a gap, with 32 bits of `any`.
pub const fn keeping(any: u64) -> u64 {
    OURS | KEEPS_PACKETS | any & 0xffff_ffff
}

/// Whether an adapter with this GUID keeps packets beyond a gap and says which.
pub const fn keeps_packets(guid: u64) -> bool {
    guid & MASK == OURS && guid & KEEPS_PACKETS != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_told_from_others() {
        assert!(keeps_packets(keeping(0)) && keeps_packets(keeping(u64::MAX)));
        assert_ne!(keeping(1), keeping(2));
        // rdma_rxe's begin with its MAC address, made an EUI-64.
        for other in [0, u64::MAX, 0x5054_00ff_fe12_3456, OURS, 0x0266_64ff_ffff_ffff] {
            assert!(!keeps_packets(other), "{other:#x}");
        }
    }
}
