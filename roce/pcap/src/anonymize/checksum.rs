//! Checksums of IPv4 and UDP: right where they were right.

/// Sum of 16-bit words in one's complement (RFC 1071).
fn sum(parts: &[&[u8]]) -> u16 {
    let mut total: u64 = 0;
    for part in parts {
        for word in part.chunks(2) {
            let low = word.get(1).copied().unwrap_or(0);
            total += u64::from(u16::from_be_bytes([word[0], low]));
        }
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

/// Returns the checksum of bytes whose checksum field, at `at`, counts as zero.
fn checksum(bytes: &[u8], at: usize, pseudo: &[&[u8]]) -> u16 {
    let mut parts = vec![&bytes[..at], &bytes[at + 2..]];
    parts.extend(pseudo);
    !sum(&parts)
}

fn carried(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Makes the checksum of an IPv4 header again. One that was wrong stays wrong.
pub(super) fn ipv4(old: &[u8], new: &mut [u8]) {
    const AT: usize = 10;
    let fault = carried(old, AT) ^ checksum(old, AT, &[]);
    let right = checksum(new, AT, &[]);
    new[AT..AT + 2].copy_from_slice(&(right ^ fault).to_be_bytes());
}

/// Makes the checksum of a UDP datagram again, of which addresses, protocol and length are `old_pseudo` and `new_pseudo`. Without one
/// it stays without, and one that was wrong stays wrong.
pub(super) fn udp(old: &[u8], old_pseudo: &[&[u8]], new: &mut [u8], new_pseudo: &[&[u8]]) {
    const AT: usize = 6;
    if carried(old, AT) == 0 {
        return;
    }
    // Zero means that there is none.
    let computed = |bytes: &[u8], pseudo: &[&[u8]]| match checksum(bytes, AT, pseudo) {
        0 => 0xffff,
        other => other,
    };
    let fault = carried(old, AT) ^ computed(old, old_pseudo);
    let made = computed(new, new_pseudo) ^ fault;
    let made = if made == 0 { 1 } else { made };
    new[AT..AT + 2].copy_from_slice(&made.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_right_checksum_stays_right_and_a_wrong_one_wrong() {
        let mut old = [0x45, 0, 0, 40, 1, 2, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let right = checksum(&old, 10, &[]);
        old[10..12].copy_from_slice(&right.to_be_bytes());
        let mut new = old;
        new[12] = 11;
        ipv4(&old, &mut new);
        assert_eq!(sum(&[&new]), 0xffff);
        old[11] ^= 0x40;
        ipv4(&old, &mut new);
        assert_ne!(sum(&[&new]), 0xffff);
    }
}
