//! Checksum of messages (`kiblnd_cksum`).

use super::consts::{CHECKSUM_AT, HEAD_LEN};

/// Judgement of a message's checksum. o2iblnd sends none by default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Checksum {
    /// The message has none.
    None,
    /// Right for kernels whose `char` is signed: x86 before Linux 6.2.
    Signed,
    /// Right for kernels whose `char` is unsigned.
    Unsigned,
    /// Right if the payload were zeros: the kernel's fault with payloads that it has mapped.
    ZeroPayload,
    /// Wrong. The kernel closes the connection.
    Wrong,
}

/// Returns the checksum of a message's bytes, whose checksum field counts as 0. The kernel adds C `char`s, so that the result depends on
/// whether those are signed.
pub fn checksum(message: &[u8], signed: bool) -> u32 {
    sum(message, message.len(), signed)
}

/// Returns the checksum of a message in which all bytes from `zeros` on count as 0.
fn sum(message: &[u8], zeros: usize, signed: bool) -> u32 {
    let sum = message.iter().enumerate().fold(0u32, |sum, (at, byte)| {
        let byte = match at {
            _ if CHECKSUM_AT.contains(&at) || at >= zeros => 0,
            _ if signed => i32::from(*byte as i8) as u32,
            _ => u32::from(*byte),
        };
        sum.rotate_left(1).wrapping_add(byte)
    });
    // 0 stands for none.
    sum.max(1)
}

/// Judges the checksum `found` in a message. `payload` is the offset of its payload, if it has one.
pub(crate) fn judge(found: u32, message: &[u8], payload: Option<usize>) -> Checksum {
    let zeros = payload.filter(|at| *at >= HEAD_LEN);
    match found {
        0 => Checksum::None,
        _ if found == checksum(message, true) => Checksum::Signed,
        _ if found == checksum(message, false) => Checksum::Unsigned,
        _ if zeros.is_some_and(|at| [true, false].iter().any(|signed| sum(message, at, *signed) == found)) => {
            Checksum::ZeroPayload
        }
        _ => Checksum::Wrong,
    }
}
